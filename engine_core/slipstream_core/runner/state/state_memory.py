"""How many requests may run at the same time, by the memory that their states take.

A request that runs has the same states however long it is. Their memory is part of the cache's and
taken out of it first: for as many requests as may run, as each of them can be admitted at any time.
"""

from __future__ import annotations

import logging

from msgspec.structs import replace

from slipstream_core.config import CoreConfig
from slipstream_core.runner.kv_cache_size import PROFILE_BLOCKS, block_bytes
from slipstream_core.runner.load_error import ModelLoadError
from slipstream_core.runner.model.loader import LoadedModel

logger = logging.getLogger(__name__)

_SHARE = 0.4  # of the cache, by default
_MIB = 2**20


def states_bytes(model: LoadedModel, config: CoreConfig) -> int:
    """Bytes of the states of all slots."""
    return config.max_num_seqs * model.state_bytes


def with_states(model: LoadedModel, config: CoreConfig, cache: int) -> CoreConfig:
    """The settings for a model with states, `cache` bytes being for these and for blocks.

    A default `max_num_seqs` is lowered so that states take at most `_SHARE` of the cache. Raises
    ModelLoadError for one that was set and has no room beside the blocks of one request of
    `max_model_len` tokens; unless that was set, too, half of the cache is enough for them. With a
    number of blocks, states come on top of them, and a `max_num_seqs` that was set stays.
    """
    if config.enable_prefix_caching:
        logger.warning(
            "%s carries recurrent states: prefix caching has no effect on it yet", model.name
        )
    each = model.state_bytes
    if config.num_blocks is None or "max_num_seqs" in config.card_defaults:
        config = _fitting(model, config, cache)
    logger.info(
        "recurrent states take %.2f GiB: %d requests of %.1f MiB",
        states_bytes(model, config) / 2**30,
        config.max_num_seqs,
        each / _MIB,
    )
    return config


def _fitting(model: LoadedModel, config: CoreConfig, cache: int) -> CoreConfig:
    each, asked = model.state_bytes, config.max_num_seqs
    most = max(0, cache - _kept_for_blocks(model, config, cache)) // each
    is_default = "max_num_seqs" in config.card_defaults
    if config.num_blocks is None and (most == 0 or (asked > most and not is_default)):
        raise ModelLoadError(
            model.name,
            f"max_num_seqs {asked} needs {asked * each / 2**30:.2f} GiB of states "
            f"({each / _MIB:.1f} MiB each), and the cache has {cache / 2**30:.2f} GiB; "
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
        cache / 2**30,
    )
    return replace(config, max_num_seqs=few)


def _kept_for_blocks(model: LoadedModel, config: CoreConfig, cache: int) -> int:
    size = block_bytes(model, config.block_size)
    longest = (-(-model.max_model_len // config.block_size) + 1) * size
    if config.max_model_len is None:
        longest = min(longest, cache // 2)
    return max(PROFILE_BLOCKS * size, longest)
