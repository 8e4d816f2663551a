"""Steps over tensors that stay in place: decode steps by batch size, others by number of tokens.

A plan is padded to the next recorded size; `takes` says which plans are. A step is two recordings,
and the forward of one with prefill tokens is in `mixed_forwards`. The forward pass is recorded
once per size, whatever its rows ask for. Sampling is recorded per size and kind (greedy, drawn,
truncated; with or without log-probabilities), as the kind depends on the requests and changes from
step to step. One recording of both would need six times as many recordings of the forward, which
are the slow ones.

Sampling is recorded because it is about twenty small kernels, which the host launches no faster
than a small model computes. What no kind covers (very many log-probabilities, listed ones) is
sampled by `sampler.sample` after the recorded forward.

With Triton (`whole_vocab_sampling`) any kind takes rows that are edited. Bits of allowed ids, of
grammars and below min_tokens, and logits that biases and penalties changed are put into buffers
before the replay, row by row of those that have some; two columns name them. So one such row costs
a few small kernels, and the others nothing. Tokens outside the candidates (truncation without
top_k) are drawn there too. Without Triton (on a CPU, in tests) steps with edited rows are sampled
by `sampler.sample`, and the host waits to learn whether a kept set reached further, and then does
the same.

- Padding rows have length 0, write their keys to the null block, and their tokens to a slot that
  belongs to no request.
- A recorded step samples the same tokens as `sampler.sample`: both use its functions.
- The next step's sampling overwrites the result buffer, so it waits for the copy of the last one.
- Ranks record the same sizes, and a plan has the same one at each: what decides is in the columns
  that all of them get. The forward ends in whole logits; the first rank alone samples.
- Everything here is called on the enqueuing thread.
"""

from __future__ import annotations

import bisect
import logging
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import NamedTuple

import numpy as np
import torch

from slipstream_core.attention.block_tables import places_of
from slipstream_core.attention.fixed_shape import DecodeColumns
from slipstream_core.runner.graph_capture import (
    CAPTURE_S,
    Agree,
    CaptureConfig,
    Recorder,
    Work,
    record_all,
)
from slipstream_core.runner.mixed_forwards import MixedForwards, StaticForward
from slipstream_core.runner.readback import StepReadback, fetch, packed_layout, write_logprobs
from slipstream_core.sampling.logits_processors import LogitsProcessors
from slipstream_core.sampling.noise import draw, row_keys
from slipstream_core.sampling.sampler import divisors, undefined_of
from slipstream_core.sampling.token_bitmask import masked_rows, masks_of
from slipstream_core.sampling.top_k_top_p import (
    NUM_CANDIDATES,
    TruncationLimits,
    draw_candidates,
    effective_top_ks,
    limited_twice,
    may_reach_further,
    truncation_columns,
)
from slipstream_core.sampling.top_tokens import logprob_columns
from slipstream_core.sampling.whole_vocab_sampling import (
    Draws,
    RowEdits,
    WholeVocabSampler,
)
from slipstream_core.step.buffer import Field, Layout, Page
from slipstream_core.step.plan import BY_TOKEN, COLUMNS, TRUNCATING, StepPlan
from slipstream_core.step.staging import Copies, CopyEvent, Staging, in_device, to_device
from slipstream_ipc.arrays import Float32s, Int32s, Int64s

logger = logging.getLogger(__name__)

MAX_LOGPROBS = 20  # of a recorded sampling; OpenAI's and vLLM's limit


class GraphKind(NamedTuple):
    """A kind of sampling that is recorded separately."""

    drawn: bool = False  # some row is not greedy
    truncated: bool = False  # as `any_truncation` of some row
    logprobs: bool = False


KINDS = tuple(
    GraphKind(drawn, truncated, logprobs)
    for logprobs in (False, True)
    for drawn, truncated in ((False, False), (True, False), (True, True))
)


_NO_ROWS: Int32s = np.empty(0, np.int32)
MAX_EDITED = 64  # rows of a recorded step whose logits are changed; with more it is sampled eagerly


def static_bytes(sizes: Sequence[int], vocab_size: int) -> int:
    """Bytes of the tensors that recorded steps read and write, mostly the logits."""
    largest = max(sizes, default=0)
    masks = 2 * largest * -(-vocab_size // 32)  # and as much on their way
    edited = min(largest, MAX_EDITED) * vocab_size
    rows = largest * (vocab_size + 2 * 64)
    return 4 * (masks + edited + rows)


class DecodeGraphs:
    """Recorded decode steps of one runner."""

    def __init__(
        self,
        static: StaticForward,
        *,
        vocab: torch.Tensor,  # arange(vocab) int32
        copies: Copies,
        capture: CaptureConfig,
        kinds: Sequence[GraphKind] = KINDS,
        whole: WholeVocabSampler | None = None,
        logits_processors: LogitsProcessors | None = None,  # with `whole`
    ) -> None:
        self._logits_processors = logits_processors
        self._static = static
        self._last_token = static.last_token
        self._tables = static.tables
        self._block_size = static.block_size
        self._vocab = vocab
        self._copies = copies
        self._sizes = tuple(capture.sizes)
        self._kinds = tuple(kinds)
        self._whole = whole
        self._forwards: dict[int, Work] = {}
        self._samplers: dict[tuple[int, GraphKind], Work] = {}
        self._recorded: list[int] = []  # sizes, ascending
        self._ran_out = False  # of memory, in the last recording that failed
        self._num_logprobs = min(MAX_LOGPROBS, len(vocab))
        device, largest = vocab.device, self._sizes[-1]
        self._layouts = {size: _columns_layout(size) for size in self._sizes}
        self._staging = Staging(copies, device, self._layouts[largest].size)
        self._rows = torch.arange(largest, device=device)
        # of the model's type where kernels read it: a pass over bfloat16 moves half of the bytes
        dtype = torch.float32 if whole is None else static.layers[0].keys.dtype
        self._logits = torch.zeros((largest, len(vocab)), dtype=dtype, device=device)
        words = -(-len(vocab) // 32)
        num_edited = 0 if whole is None else min(largest, MAX_EDITED)
        self._edited = torch.zeros((num_edited, len(vocab)), device=device)
        self._masks = torch.zeros(
            (0 if whole is None else largest, words), dtype=torch.int32, device=device
        )
        self._mask_staging = Staging(copies, device, 4 * words)  # grows with what is asked
        self._pieces = {
            size: packed_layout(size, size, 1 + self._num_logprobs, with_covered=True)
            for size in self._sizes
        }
        self._piece = torch.zeros(self._pieces[largest].size, dtype=torch.uint8, device=device)
        self._last_fetch: CopyEvent | None = None
        self._mixed: MixedForwards | None = None
        if capture.buckets:
            self._mixed = MixedForwards(static, self._logits, copies, capture.buckets)

    def record(self, recorder: Recorder, agree: Agree | None = None) -> None:
        """Record as much as time allows, largest first. agree: see `record_all`.

        Raises if the device is unusable; OutOfMemoryError of a rank.
        """
        # all rows are padding: their tables and lengths are zeros
        self._staging.device_buffer.zero_()
        mixed = [] if self._mixed is None else self._mixed.work()
        total = len(self._sizes) * (1 + len(self._kinds)) + len(mixed)

        def failed(error: Exception) -> None:
            self._ran_out = isinstance(error, torch.OutOfMemoryError)

        work = self._work(mixed)
        record_all(recorder, work, total, within_s=CAPTURE_S, failed=failed, agree=agree)
        self._recorded = sorted(self._forwards)
        if not self._recorded:
            logger.warning("no CUDA graphs are recorded: decode steps run eagerly")

    def takes(self, plan: StepPlan) -> bool:
        """True if `forward` can compute this plan."""
        num = plan.num_requests
        if not self._recorded or np.count_nonzero(plan.samples) > self._recorded[-1]:
            return False
        if plan.num_decodes < num:
            return self._mixed is not None and self._mixed.takes(plan)
        return num > 0 and plan.prompt is None and bool(plan.samples.all())

    def takes_entries(self, plan: StepPlan) -> bool:
        """True if `forward` writes the plan's entries of block tables, as of any usual decode step:
        they travel with its columns.
        """
        return len(plan.table_slots) <= plan.num_decodes == plan.num_requests

    def forward(self, plan: StepPlan) -> torch.Tensor:
        """Logits of a plan that `takes` accepts, [S, vocab], until the next call.

        The caller has appended its entries of block tables, unless `takes_entries`.
        """
        num = plan.num_requests
        if plan.num_decodes < num:
            assert self._mixed is not None
            logits = self._mixed.forward(plan)
            if len(logits):
                layout = self._layouts[self._size_for(len(logits))]
                page = self._staging.open(layout)
                self._fill_sampling(plan, page, plan.slots[plan.samples])
                self._staging.send(layout)
            return logits
        size = self._size_for(num)
        layout = self._layouts[size]
        page = self._staging.open(layout)
        for name in BY_TOKEN:
            page.write(name, getattr(plan, name), pad=COLUMNS[name].declared.fill)
        page.write("kv_lens", plan.kv_lens, pad=0)  # a row of padding has no keys
        self._fill_sampling(plan, page, plan.slots)
        begun = len(plan.table_slots) if self.takes_entries(plan) else 0
        if begun:
            page["table_places"][:begun] = places_of(plan, self._tables)
            page["table_blocks"][:begun] = plan.table_blocks
        self._staging.send(layout)
        if begun:
            columns = in_device(layout, self._staging.device_buffer)
            places, blocks = columns["table_places"], columns["table_blocks"]
            self._tables.view(-1).index_copy_(0, places[:begun], blocks[:begun])
        self._forwards[size]()
        return self._logits[:num]

    def sample(self, plan: StepPlan, masks: Int32s | None = None) -> StepReadback | None:
        """Sample the plan whose forward ran last; None if no recorded kind covers it.

        masks: as in `Runner.sample`, if the plan awaits some.
        """
        size = self._size_for(int(np.count_nonzero(plan.samples)))
        kind = self._kind_of(plan)
        if kind is None or (size, kind) not in self._samplers:
            return None
        if self._last_fetch is not None:
            self._copies.wait_for(self._last_fetch)
        self._send_edits(plan, masks)
        self._samplers[size, kind]()
        if plan.constraints is not None:
            assert self._logits_processors is not None
            slots = to_device(plan.slots[plan.samples], self._last_token.device)
            self._logits_processors.sampled(self._last_token[slots])
        layout, rows = self._pieces[size], None
        if kind.logprobs:
            rows = np.flatnonzero(plan.num_logprobs >= 0)
        else:
            layout = packed_layout(size, 0, 0, with_covered=True)
        target, event = fetch(self._copies, self._piece, layout.size)
        self._last_fetch = event
        asks = kind.truncated and self._whole is None
        if asks and not self._is_covered(plan, layout, target, event):
            return None
        return StepReadback(plan, layout, rows, self._piece, target, event)

    def _send_edits(self, plan: StepPlan, masks: Int32s | None) -> None:
        """Fill the buffers that the columns `edit_rows` and `mask_rows` of this plan name."""
        if (constraints := plan.constraints) is not None:
            assert self._logits_processors is not None
            logits = self._logits[: int(np.count_nonzero(plan.samples))]
            changed = self._logits_processors.changed_rows(logits, constraints)
            self._edited[: len(changed)].copy_(changed)
        if len(masked_rows(plan)):
            bits = masks_of(plan, masks, len(self._vocab))
            (sent,) = self._mask_staging.send_columns((bits.ravel(),))
            self._masks[: len(bits)].copy_(sent.view(bits.shape))

    def _is_covered(
        self, plan: StepPlan, layout: Layout, target: torch.Tensor, event: CopyEvent
    ) -> bool:
        """True if the candidates contain the kept sets of all rows. May wait for the device."""
        vocab_size = len(self._vocab)
        open_ended = may_reach_further(plan, effective_top_ks(plan, vocab_size), vocab_size)
        if not open_ended.any():
            return True
        event.synchronize()
        covered = layout.in_host(target.numpy())["covered"][: len(open_ended)]
        return bool(covered.astype(np.bool_)[open_ended].all())

    def bare(self, batch: int, context: int, kind: GraphKind, num_blocks: int, steps: int) -> float:
        """Seconds that `steps` replays take without host work between them.

        The `batch` rows have `context` tokens each, in blocks spread over the cache's `num_blocks`,
        and inputs of their own, so that experts are chosen as by different requests. Writes to the
        cache and the tables of the first slots. Raises ValueError if the batch size or kind is not
        recorded.
        """
        if not self._recorded or batch > self._recorded[-1]:
            raise ValueError(f"no CUDA graph for {batch} rows, only for {self._recorded}")
        size = self._size_for(batch)
        if (size, kind) not in self._samplers:
            raise ValueError(f"no CUDA graph for sampling of kind {kind}")
        blocks = -(-context // self._block_size)
        dealt = 1 + np.arange(batch * blocks, dtype=np.int64) % (num_blocks - 1)
        tables = dealt.reshape(batch, blocks)
        layout = self._layouts[size]
        columns = self._staging.open(layout)
        for name in layout.places:
            columns[name][...] = 0
        columns["gather_slots"][...] = -1
        columns["token_ids"][...] = np.random.default_rng(0).integers(len(self._vocab), size=size)
        columns["slots"][:batch] = np.arange(batch)
        columns["slots"][batch:] = len(self._last_token) - 1
        columns["positions"][:batch] = context - 1
        columns["kv_lens"][:batch] = context
        offset = (context - 1) % self._block_size
        columns["kv_slots"][:batch] = tables[:, -1] * self._block_size + offset
        columns["divisors"][...] = 1
        columns["edit_rows"][...] = columns["mask_rows"][...] = -1
        columns["drawn"][...] = kind.drawn
        for name in TRUNCATING:
            columns[name][...] = COLUMNS[name].declared.fill
        self._staging.send(layout)
        on_device = torch.from_numpy(tables.astype(np.int32)).to(self._tables.device)
        self._tables[:batch, :blocks].copy_(on_device)
        forward, sampler = self._forwards[size], self._samplers[size, kind]

        def replay(num: int) -> None:
            for _ in range(num):
                forward()
                sampler()
            self._copies.record().synchronize()

        replay(1)
        started = time.perf_counter()
        replay(steps)
        return time.perf_counter() - started

    def _work(
        self, mixed: Sequence[tuple[int, str, Work, Callable[[Work], None]]]
    ) -> Iterator[tuple[str, Work, Callable[[Work], None]]]:
        """The work to record, largest first. What failed is skipped for smaller sizes, unless it
        ran out of memory, of which they take less.
        """
        kinds, others = self._kinds, deque(mixed)
        for size in reversed(self._sizes):
            while others and others[0][0] >= size:
                _, name, work, keep = others.popleft()
                yield name, work, keep
            columns = in_device(self._layouts[size], self._staging.device_buffer)
            yield (
                f"the forward of {size} rows",
                self._forward_of(size, columns),
                partial(self._forwards.__setitem__, size),
            )
            if size not in self._forwards:
                if self._ran_out:
                    continue
                return
            piece = in_device(self._pieces[size], self._piece)
            hopeless: set[GraphKind] = set()
            for kind in kinds:
                yield (
                    f"sampling of {size} rows ({_name(kind)})",
                    partial(self._sample, size, kind, columns, piece),
                    partial(self._samplers.__setitem__, (size, kind)),
                )
                if (size, kind) not in self._samplers and not self._ran_out:
                    hopeless.add(kind)
            kinds = tuple(kind for kind in kinds if kind not in hopeless)
        for _, name, work, keep in others:
            yield name, work, keep

    def _forward_of(self, size: int, columns: dict[str, torch.Tensor]) -> Work:
        at = DecodeColumns(
            columns["kv_slots"],
            columns["kv_lens"],
            columns["slots"],
            self._tables,
            self._block_size,
        )
        static = self._static

        def forward() -> None:
            context = static.backend.decode(static.layers, at)
            static.compute(columns, self._rows[:size], context, self._logits[:size])

        return forward

    def _sample(
        self,
        size: int,
        kind: GraphKind,
        columns: dict[str, torch.Tensor],
        piece: dict[str, torch.Tensor],
    ) -> None:
        logits, whole = self._logits[:size], self._whole
        if whole is not None:
            self._sample_edited(whole, size, kind, columns, piece)
            return
        token_ids = logits.argmax(-1)
        undefined = undefined_of(logits, token_ids)
        piece["undefined"].copy_(undefined)
        if kind.drawn:
            scaled = logits / columns["divisors"][:, None]
            keys = columns["keys"].view(2, size)
            if kind.truncated:
                drawn, covered = draw_candidates(_limits_of(scaled, columns), keys)
                piece["covered"].copy_(covered)
            else:
                drawn = draw(scaled, keys, self._vocab)
            token_ids = torch.where((columns["drawn"] > 0) & ~undefined, drawn, token_ids)
        self._last_token.index_copy_(0, columns["slots"], token_ids)
        piece["token_ids"].copy_(token_ids)
        if kind.logprobs:
            write_logprobs(piece, *logprob_columns(logits, token_ids, self._num_logprobs))

    def _sample_edited(
        self,
        whole: WholeVocabSampler,
        size: int,
        kind: GraphKind,
        columns: dict[str, torch.Tensor],
        piece: dict[str, torch.Tensor],
    ) -> None:
        """Sample as `_sample` does, with Triton's kernels, which also apply the rows' edits."""
        logits, keys = self._logits[:size], columns["keys"].view(2, size)
        edits = RowEdits(self._edited, columns["edit_rows"], self._masks, columns["mask_rows"])
        draws = None
        if kind.drawn and not kind.truncated:
            draws = Draws(columns["divisors"], columns["drawn"], keys)
        chosen = whole.choose(
            logits, draws=draws, edits=edits, totals=kind.logprobs, undefined=piece["undefined"]
        )
        token_ids = chosen.token_ids
        if kind.truncated:
            scaled = whole.scaled(logits, columns["divisors"], edits)
            limits = _limits_of(scaled, columns)
            drawn, covered = draw_candidates(limits, keys, whole)
            if len(self._vocab) > NUM_CANDIDATES:
                # no row has both top_k and top_p here: see _kind_of
                bounded = (columns["top_ks"] > 0) & (columns["top_ks"] <= NUM_CANDIDATES)
                further = (columns["drawn"] > 0) & ~bounded & ~covered
                whole.further(limits, keys, further, drawn, limits.top_ps)
            is_drawn = columns["drawn"] > piece["undefined"]
            token_ids = torch.where(is_drawn, drawn, token_ids)
            if chosen.own is not None:
                own = logits.gather(1, token_ids[:, None])[:, 0].float()
                chosen = chosen._replace(token_ids=token_ids, own=own)
        self._last_token.index_copy_(0, columns["slots"], token_ids)
        piece["token_ids"].copy_(token_ids)
        if kind.logprobs:
            write_logprobs(piece, *whole.logprob_columns(logits, chosen, self._num_logprobs))

    def _fill_sampling(self, plan: StepPlan, page: Page, slots: Int64s) -> None:
        """Write what sampling reads of the plan's sampled rows, in `slots`, and padding."""
        num = len(slots)
        page.write("slots", slots, pad=len(self._last_token) - 1)
        for name in ("edit_rows", "mask_rows"):
            page.write(name, _NO_ROWS, pad=-1)
        if (constraints := plan.constraints) is not None:
            page["edit_rows"][constraints.rows] = np.arange(len(constraints.rows))
        if len(rows := masked_rows(plan)):
            page["mask_rows"][rows] = np.arange(len(rows))
        if plan.all_greedy:
            return  # the columns below are only read when drawing
        page.write("divisors", plan.temperatures, pad=1, make=divisors)
        page.write("drawn", plan.temperatures, pad=0, make=_drawn)
        keys = page["keys"].reshape(2, -1)
        keys[:, :num] = row_keys(plan.seeds, plan.kv_lens[plan.samples])
        keys[:, num:] = 0
        if plan.any_truncation:
            for name, column in truncation_columns(plan, len(self._vocab)).items():
                page.write(name, column, pad=COLUMNS[name].declared.fill)

    def _kind_of(self, plan: StepPlan) -> GraphKind | None:
        if plan.any_wide or plan.listed is not None:
            return None
        constraints = plan.constraints
        if self._whole is None:
            if constraints is not None or len(plan.masked_rows) or plan.awaits_masks:
                return None
        elif constraints is not None and (
            self._logits_processors is None or len(constraints.rows) > len(self._edited)
        ):
            return None
        if plan.max_logprobs > self._num_logprobs:
            return None
        truncated = plan.any_truncation and not plan.all_greedy
        if truncated and self._whole is not None:
            vocab_size = len(self._vocab)
            if len(limited_twice(plan, effective_top_ks(plan, vocab_size), vocab_size)):
                return None  # the mass left by top_k needs a topk of varying width
        return GraphKind(not plan.all_greedy, truncated, plan.max_logprobs >= 0)

    def _size_for(self, num: int) -> int:
        return self._recorded[bisect.bisect_left(self._recorded, num)]


def _drawn(temperatures: Float32s) -> Int32s:
    return (temperatures > 0).astype(np.int32)


def _columns_layout(size: int) -> Layout:
    return Layout(
        [
            *(
                Field(name, COLUMNS[name].dtype, size)
                for name in (*BY_TOKEN, "slots", "kv_lens", *TRUNCATING)
            ),
            Field("table_places", np.int64, size),
            Field("table_blocks", np.int32, size),
            Field("edit_rows", np.int32, size),
            Field("mask_rows", np.int32, size),
            Field("divisors", np.float32, size),
            Field("drawn", np.int32, size),
            Field("keys", np.int32, 2 * size),
        ]
    )


def _limits_of(scaled: torch.Tensor, columns: Mapping[str, torch.Tensor]) -> TruncationLimits:
    return TruncationLimits(scaled, {name: columns[name] for name in TRUNCATING})


def _name(kind: GraphKind) -> str:
    how = "truncated" if kind.truncated else "drawn" if kind.drawn else "greedy"
    return how + (", log-probabilities" if kind.logprobs else "")
