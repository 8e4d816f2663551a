"""The memory that the KV cache may take.

- `gpu_memory_utilization` is the share of the whole card that this core may use, as in vLLM: the
  weights, the largest step, recorded graphs and the cache together. Memory used by other processes
  does not count against it: a core that fits beside them starts.
- The largest step is measured, not estimated: `largest_plan` runs before the cache is allocated.
- Only `Meter` and `free_before_loading` query a device.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from msgspec.structs import replace

from slipstream_core.attention.block_tables import table_bytes, table_width
from slipstream_core.config import CoreConfig
from slipstream_core.load_error import ModelLoadError, NoRoomError
from slipstream_core.model.loader import LoadedModel
from slipstream_core.runner import mixed_forwards
from slipstream_core.runner.decode_graphs import static_bytes
from slipstream_core.runner.graph_capture import CaptureConfig
from slipstream_core.sampling.penalties import most_bytes
from slipstream_core.step.constraint_plan import ConstraintPlan, ConstraintRefill, StepConstraints
from slipstream_core.step.limits import MAX_POSITIONS
from slipstream_core.step.plan import (
    PromptPlan,
    Runner,
    StepFailed,
    StepPlan,
    blank_plan,
    columns_over,
)

logger = logging.getLogger(__name__)

PROFILE_BLOCKS = 2  # cache blocks while the largest step is measured: the null block and one more

_GIB = 2**30

# Memory that drivers and libraries take later, outside torch's allocator: kernels loaded on first
# use, workspaces, the graphs themselves. vLLM reserves as much.
_SLACK_BYTES = 150 << 20  # decision 033


@dataclass(frozen=True, slots=True)
class DeviceMemoryUse:
    """The use of a card's memory, in bytes."""

    total: int
    free_before: int  # when this process held only its CUDA context
    free: int  # with the model loaded and the allocator's cache empty
    step: int  # the largest step's peak on top of that
    graphs: int  # upper bound of what recorded steps keep on top of that

    @property
    def own(self) -> int:
        """The memory that this process uses, mostly for the model."""
        return max(0, self.free_before - self.free)


def cache_bytes(use: DeviceMemoryUse, utilization: float) -> int:
    """Bytes left for the cache, negative if even the rest does not fit."""
    others = use.step + use.graphs + _SLACK_BYTES
    allowed = int(use.total * utilization) - use.own - others
    return min(allowed, use.free - others)


def too_small(use: DeviceMemoryUse, utilization: float, needed: int) -> str:
    """The error text for a cache of `needed` bytes that does not fit."""
    room = max(0, cache_bytes(use, utilization))
    busy = use.total - use.free_before
    return (
        f"the cache needs {_gib(needed)} GiB at least and gets {_gib(room)}: of the card's "
        f"{_gib(use.total)} GiB others and this process's CUDA context use {_gib(busy)}, the model "
        f"takes {_gib(use.own)}, its largest step {_gib(use.step)} and recorded steps "
        f"{_gib(use.graphs)}, and "
        f"gpu_memory_utilization is {utilization:g}; raise that, lower max_num_batched_tokens, "
        "max_num_seqs or max_model_len, or set enforce_eager"
    )


def _gib(num: int) -> str:
    return f"{num / _GIB:.2f}"


class Meter:
    """Measures a card's memory."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def free_and_total(self) -> tuple[int, int]:
        """Free and total bytes of the card, after emptying the allocator's cache."""
        torch.cuda.synchronize(self._device)
        torch.cuda.empty_cache()
        free, total = torch.cuda.mem_get_info(self._device)
        return free, total

    def peak_of(self, work: Callable[[], None]) -> int:
        """Peak bytes that `work` allocates beyond those in use before it."""
        torch.cuda.synchronize(self._device)
        torch.cuda.reset_peak_memory_stats(self._device)
        before = torch.cuda.memory_allocated(self._device)
        work()
        torch.cuda.synchronize(self._device)
        return max(0, torch.cuda.max_memory_allocated(self._device) - before)


def free_before_loading(config: CoreConfig) -> int:
    """Free bytes of the card before the model is loaded; 0 on a CPU."""
    if config.device == "cpu" or not torch.cuda.is_available():
        return 0
    return int(torch.cuda.mem_get_info()[0])


def blocks_on_card(
    model: LoadedModel,
    config: CoreConfig,
    meter: Meter,
    runner: Runner,
    *,
    free_before: int,
    capture: CaptureConfig,
) -> int:
    """The number of blocks that the cache may have. Raises ModelLoadError.

    `runner` runs the largest steps on the loaded model, with PROFILE_BLOCKS blocks. `capture` are
    the steps that will be recorded.
    """
    sizes, buckets = capture.sizes, capture.buckets
    size, vocab = block_bytes(model, config.block_size), model.vocab_size
    share = config.gpu_memory_utilization
    num_rows = min(config.max_num_seqs, config.max_num_batched_tokens)
    plan = partial(
        largest_plan,
        max_model_len=model.max_model_len,
        vocab_size=vocab,
    )
    largest = [costliest_plan(plan(num_rows, config.max_num_batched_tokens), vocab)]
    if sizes:  # recorded steps keep their memory
        largest.append(plan(max(sizes), max(sizes)))
    if buckets:  # in the same memory
        largest.append(plan(min(max(sizes), max(buckets)), max(buckets)))
    try:
        peaks = [meter.peak_of(partial(_run, runner, plan)) for plan in largest]
    except torch.OutOfMemoryError as error:
        free, total = meter.free_and_total()
        raise NoRoomError(
            model.name,
            f"with it loaded {_gib(free)} of the card's {_gib(total)} GiB are free, and a step of "
            f"{config.max_num_batched_tokens} tokens takes more; lower max_num_batched_tokens or "
            "max_num_seqs",
        ) from error
    width = table_width(model.max_model_len, config.block_size)
    kept = most_bytes(config.max_num_seqs, vocab, model.max_model_len)
    kept += table_bytes(config.max_num_seqs, width)
    graphs = 0
    if sizes:
        graphs = max(peaks[1:]) + static_bytes(sizes, vocab)
        graphs += mixed_forwards.static_bytes(buckets)
    free, total = meter.free_and_total()
    use = DeviceMemoryUse(total, free_before, free, peaks[0] + kept, graphs)
    given = cache_bytes(use, share)
    if given < 2 * size:
        raise NoRoomError(model.name, too_small(use, share, 2 * size))
    logger.info(
        "the model takes %s GiB, a step up to %s, recorded steps up to %s; the cache gets %s",
        _gib(use.own),
        _gib(use.step),
        _gib(use.graphs),
        _gib(given),
    )
    return given // size


def no_room(
    model: LoadedModel, config: CoreConfig, num_blocks: int, states: int = 0
) -> NoRoomError:
    """The error for a cache that could not be allocated although it should have fitted.

    states: bytes of recurrent states beside the blocks.
    """
    size = num_blocks * block_bytes(model, config.block_size)
    return NoRoomError(
        model.name,
        f"a cache of {num_blocks} blocks ({_gib(size)} GiB)"
        + (f", recurrent states ({_gib(states)} GiB)" if states else "")
        + " and the steps' own memory do not fit "
        + (
            "on the card; lower num_blocks or gpu_memory_utilization"
            if model.device.type == "cuda"
            else "into this process's memory; lower "
            + ("max_num_seqs, state_cache_gib, " if states else "")
            + "kv_cache_gib or num_blocks"
        ),
    )


def _run(runner: Runner, plan: StepPlan) -> None:
    runner.launch(plan)
    if plan.awaits_masks:
        words = -(-runner.info.vocab_size // 32)
        runner.sample(plan, np.full((len(plan.grammar_rows), words), -1, np.int32))
    try:
        runner.collect()
    except StepFailed as error:
        raise error.__cause__ or error from error


def largest_plan(
    num_rows: int, num_tokens: int, *, max_model_len: int, vocab_size: int
) -> StepPlan:
    """A step of `num_tokens` tokens of which `num_rows` are sampled with the costliest parameters.

    All keys go to the null block. Each row begins at position 0, so no cached keys matter.
    """
    rest = num_tokens - (num_rows - 1)  # for the prompts; all other rows have one token
    chunks = [max_model_len] * (rest // max_model_len) + [rest % max_model_len]
    lens = np.array([1] * (num_rows - 1) + [chunk for chunk in chunks if chunk], np.int32)
    # with several prompts there may be more rows than are to be sampled
    num, samples = len(lens), np.arange(len(lens)) < num_rows
    starts = np.repeat(np.cumsum(lens) - lens, lens)
    positions = np.arange(num_tokens) - starts
    costly: dict[str, Any] = {
        name: each.costly(num_rows) for name, each in columns_over("S").items()
    }
    costly["num_logprobs"] = np.minimum(costly["num_logprobs"], np.int32(vocab_size))
    return blank_plan(
        step=0,
        positions=positions,
        slots=np.minimum(np.arange(num), num_rows - 1),
        query_lens=lens,
        kv_lens=lens,
        prompt_lens=lens,
        samples=samples,
        **costly,
    )


def costliest_plan(plan: StepPlan, vocab_size: int) -> StepPlan:
    """The plan with everything that costs memory in sampling.

    Every row has allowed ids, masked ids and a grammar, each of which copies the logits, and prompt
    log-probabilities are computed for as many positions as a step may have.
    """
    rows = np.arange(np.count_nonzero(plan.samples))
    none = rows[:0]
    numbers = np.empty(0, np.float32)
    constraints = StepConstraints(
        bias_rows=none,
        bias_ids=none,
        biases=numbers,
        allowed_rows=rows,
        allowed_state_slots=rows,
        banned_rows=none,
        banned_ids=none,
        word_rows=none,
        word_state_slots=none,
        word_heads=np.empty((0, 1), np.int64),
        word_lasts=none,
        tail_rows=none,
        tail_state_slots=none,
        penalty_rows=none,
        count_state_slots=none,
        repetitions=numbers,
        frequencies=numbers,
        presences=numbers,
        any_repetition=False,
    )
    refill = ConstraintRefill(
        tail_state_slots=none,
        tails=np.empty((0, 1), np.int64),
        allowed_state_slots=rows,
        allowed_bits=np.full((len(rows), -(-vocab_size // 32)), -1, np.int32),
        count_state_slots=none,
        seen=np.empty((0, 1), np.int64),
        num_seen=none,
        output_state_slots=none,
        output_ids=none,
    )
    return replace(
        plan,
        constraints=ConstraintPlan(rows, constraints, refill),
        masked_rows=rows,
        masked_ids=np.zeros(len(rows), np.int64),
        grammar_rows=rows,
        prompt=_most_of_prompts(plan),
    )


def _most_of_prompts(plan: StepPlan) -> PromptPlan | None:
    """The first MAX_POSITIONS prompt positions, without each row's last one, which is sampled."""
    is_last = np.zeros(plan.num_tokens, np.bool_)
    is_last[np.cumsum(plan.query_lens) - 1] = True
    tokens = np.flatnonzero(~is_last)[:MAX_POSITIONS]
    owners = np.repeat(np.arange(plan.num_requests), plan.query_lens)[tokens]
    rows, counts = np.unique(owners, return_counts=True)
    if not len(rows):
        return None
    return PromptPlan(
        rows=rows,
        starts=np.zeros(len(rows), np.int64),
        counts=counts,
        num_logprobs=np.full(len(rows), plan.max_logprobs),
        tokens=tokens,
        targets=np.zeros(len(tokens), np.int64),
    )


def check_length(model: LoadedModel, config: CoreConfig, num_blocks: int) -> None:
    """Check that the cache holds one request of full length. Raises ModelLoadError.

    A configured max_model_len that does not fit is an error; the model's own is only logged, as the
    runner lowers it to what the cache holds.
    """
    room = (num_blocks - 1) * config.block_size
    if not 0 < room < model.max_model_len:
        return
    if config.max_model_len is None:
        logger.warning(
            "%s supports %d tokens, but the KV cache holds %d, which is the limit of a request",
            model.name,
            model.max_model_len,
            room,
        )
        return
    blocks = -(-model.max_model_len // config.block_size) + 1
    needed = blocks * block_bytes(model, config.block_size) / _GIB
    raise ModelLoadError(
        model.name,
        f"max_model_len is {model.max_model_len}, but the cache has room for {room} tokens; "
        f"give at most that, or {needed:.3f} GiB of cache ({blocks} blocks)",
    )


def blocks_in(model: LoadedModel, config: CoreConfig, num_bytes: int) -> int:
    """The number of blocks that a cache of `num_bytes` has.

    Where no layer attends, blocks take none: there are as many as requests of full length need, and
    as many again for the prefix cache, which names states by them.
    """
    each = block_bytes(model, config.block_size)
    if each:
        return num_bytes // each
    longest = -(-model.max_model_len // config.block_size) + 1
    return 1 + 2 * config.max_num_seqs * longest


def block_bytes(model: LoadedModel, block_size: int) -> int:
    """Bytes of cache that one block takes over all layers, and over those of its draft model."""
    form = model.cache_format
    own = block_size * sum(layer.bytes_per_token(model.dtype, form) for layer in model.geometry)
    return own if model.draft is None else own + block_bytes(model.draft, block_size)
