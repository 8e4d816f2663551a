"""The number of requests that may run at the same time, and of states that the prefix cache may
keep, as limited by the memory that states take.

A request that runs has the same states however long it is. Their memory is part of the cache's and
taken out of it first: for as many requests as may run, as each of them can be admitted at any time,
for the copies that prompts with equal beginnings share (`num_snapshots`), and for those in front of
drafts (`num_draft_states`). Blocks get the rest.
"""

from __future__ import annotations

import logging
import math

from msgspec.structs import replace

from slipstream_core.config import CoreConfig
from slipstream_core.load_error import ModelLoadError
from slipstream_core.model.loader import LoadedModel
from slipstream_core.runner.kv_cache_size import PROFILE_BLOCKS, block_bytes

logger = logging.getLogger(__name__)

_SHARE = 0.4  # of the cache, by default
_SNAPSHOTS_SHARE = 0.1  # likewise
_FEW_SNAPSHOTS = 16  # more than that share where that is fewer, but not more than
_MOST_SNAPSHOTS_SHARE = 0.25
_DRAFTED_ROWS = 4  # that have as many drafts as they may
_GIB = 2**30
_MIB = 2**20


def states_bytes(model: LoadedModel, config: CoreConfig) -> int:
    """Bytes of the states of all slots."""
    return config.max_num_seqs * model.state_bytes


def num_draft_states(model: LoadedModel, config: CoreConfig, cache: int) -> int:
    """Return how many drafts a step may have, each of which takes a state, of `cache` bytes for
    everything; 0 where nothing is drafted, or no state has room.
    """
    given, each = config.speculative_config, model.state_bytes
    if given is None:
        return 0
    most = given.num_speculative_tokens
    share = max(int(_SNAPSHOTS_SHARE * cache), min(most * each, int(_MOST_SNAPSHOTS_SHARE * cache)))
    num = min(_DRAFTED_ROWS * most, share // each)
    logger.info("steps may have %d drafts, whose states take %.2f GiB", num, num * each / _GIB)
    return num


def num_snapshots(model: LoadedModel, config: CoreConfig, cache: int) -> int:
    """Return how many copies of states the prefix cache may keep, of `cache` bytes for everything.
    0 turns prefix caching off for the model, which a line says.

    By default they leave room for a request, and for the states of `max_num_seqs` where that was
    set. With a number of blocks, they come on top of these. Raises ModelLoadError for a
    `state_cache_gib` that leaves no such room.
    """
    each, asked = model.state_bytes, config.state_cache_gib
    if not config.enable_prefix_caching:
        if asked:
            logger.warning("state_cache_gib has no effect: prefix caching is off")
        return 0
    room = cache
    if config.num_blocks is None:
        num_rows = 1 if "max_num_seqs" in config.card_defaults else config.max_num_seqs
        room -= _kept_for_blocks(model, config, cache) + num_rows * each
        if room < 0:
            return 0  # `with_states` says what has no room, and what would do
    if asked is None:
        wanted = max(int(_SNAPSHOTS_SHARE * cache), _FEW_SNAPSHOTS * each)
        wanted = min(wanted, int(_MOST_SNAPSHOTS_SHARE * cache), room)
        lacking = "; more kv_cache_gib, or a lower max_num_seqs, gives it some"
    else:
        wanted, lacking = int(asked * _GIB), ", as state_cache_gib says"
        if config.num_blocks is None and wanted > room:
            raise ModelLoadError(
                model.name,
                f"state_cache_gib is {asked:g}, and of the cache's {cache / _GIB:.2f} GiB, blocks "
                f"and states of running requests leave {_down(room)} ({room // each} states of "
                f"{each / _MIB:.1f} MiB); give at most that, more kv_cache_gib, or a lower "
                "max_num_seqs or max_model_len",
            )
    num = wanted // each
    if num:
        logger.info("the prefix cache keeps up to %d states, %.2f GiB", num, num * each / _GIB)
    else:
        logger.warning(
            "%s: prefix caching is off, as it has no room for a state of %.1f MiB%s",
            model.name,
            each / _MIB,
            lacking,
        )
    return num


def _down(num_bytes: int) -> str:
    """GiB as text, never more than there are."""
    return f"{math.floor(num_bytes / _GIB * 1000) / 1000:g}"


def with_states(model: LoadedModel, config: CoreConfig, cache: int) -> CoreConfig:
    """The settings for a model with states, `cache` bytes being for those of running requests, and
    for blocks.

    A default `max_num_seqs` is lowered so that states take at most `_SHARE` of the cache. Raises
    ModelLoadError for one that was set and has no room beside the blocks of one request of
    `max_model_len` tokens; unless that was set, too, half of the cache is enough for them. With a
    number of blocks, states come on top of them, and a `max_num_seqs` that was set stays.
    """
    each = model.state_bytes
    if config.num_blocks is None or "max_num_seqs" in config.card_defaults:
        config = _fitting(model, config, cache)
    logger.info(
        "recurrent states take %.2f GiB: %d requests of %.1f MiB",
        states_bytes(model, config) / _GIB,
        config.max_num_seqs,
        each / _MIB,
    )
    return config


def _fitting(model: LoadedModel, config: CoreConfig, cache: int) -> CoreConfig:
    each, asked = model.state_bytes, config.max_num_seqs
    kept = 0 if config.num_blocks is not None else _kept_for_blocks(model, config, cache)
    most = max(0, cache - kept) // each
    is_default = "max_num_seqs" in config.card_defaults
    if config.num_blocks is None and (most == 0 or (asked > most and not is_default)):
        raise ModelLoadError(
            model.name,
            f"max_num_seqs {asked} needs {asked * each / _GIB:.2f} GiB of states "
            f"({each / _MIB:.1f} MiB each), and the cache has {cache / _GIB:.2f} GiB; "
            + (f"give at most {most}, or " if most else "give ")
            + "more kv_cache_gib, or a lower max_model_len",
        )
    few = max(1, min(most, int(_SHARE * cache) // each))
    if not is_default or few >= asked:
        return config
    logger.warning(
        "max_num_seqs is %d instead of %d by default, as the states of a request take %.1f MiB and "
        "the cache has %.2f GiB; max_num_seqs or kv_cache_gib sets it",
        few,
        asked,
        each / _MIB,
        cache / _GIB,
    )
    return replace(config, max_num_seqs=few)


def _kept_for_blocks(model: LoadedModel, config: CoreConfig, cache: int) -> int:
    size = block_bytes(model, config.block_size)
    longest = (-(-model.max_model_len // config.block_size) + 1) * size
    if config.max_model_len is None:
        longest = min(longest, cache // 2)
    return max(PROFILE_BLOCKS * size, longest)
