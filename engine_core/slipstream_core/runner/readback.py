"""Copies what a step sampled from the device to the host, as a StepResult.

- Everything is packed as 32-bit words into one buffer: ids (a vocabulary has fewer than 2**31),
  which rows are undefined, then, if any row asked for them, values, ids and ranks of L rows.
- Rows that did not ask have zeros in the result's columns.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt
import torch

from slipstream_core.runner.cuda_thread import PendingStep
from slipstream_core.sampling.logprobs import PendingLogprobs, arrived, candidates
from slipstream_core.sampling.sampler import RawLogprobs
from slipstream_core.step.buffer import Field, Layout
from slipstream_core.step.plan import Candidates, Logprobs, StepPlan, StepResult
from slipstream_core.step.staging import Copies, CopyEvent, in_device
from slipstream_ipc.arrays import Int64s
from slipstream_ipc.history.wide_logprobs import MAX_NARROW
from slipstream_ipc.telemetry.trace import SpanKind, Tracer

Wide = tuple[tuple[int, Candidates | PendingLogprobs], ...]  # (sampled row, its candidates)
Prompts = tuple[Candidates | PendingLogprobs, ...]


def packed_layout(
    num_rows: int, num_asking: int, width: int, *, with_covered: bool = False
) -> Layout:
    """The layout of `num_rows` ids and `num_asking` rows of `width` log-probabilities.

    `with_covered` adds the second result of `top_k_top_p.draw_candidates`, one word per row.
    """
    fields = [Field("token_ids", np.int32, num_rows), Field("undefined", np.int32, num_rows)]
    if with_covered:
        fields.append(Field("covered", np.int32, num_rows))
    if num_asking:
        fields += [
            Field("values", np.float32, num_asking * width),
            Field("ids", np.int32, num_asking * width),
            Field("ranks", np.int32, num_asking),
        ]
    return Layout(fields)


def pack(
    token_ids: torch.Tensor, undefined: torch.Tensor | None, logprobs: RawLogprobs | None
) -> tuple[torch.Tensor, Layout]:
    """Pack a result into a uint8 buffer on the device; returns it with its layout."""
    asking, width = (0, 0) if logprobs is None else logprobs.values.shape
    layout = packed_layout(len(token_ids), asking, width)
    piece = torch.empty(layout.size, dtype=torch.uint8, device=token_ids.device)
    views = in_device(layout, piece)
    views["token_ids"].copy_(token_ids)
    if undefined is None:
        views["undefined"].zero_()
    else:
        views["undefined"].copy_(undefined)
    if logprobs is not None and asking:
        write_logprobs(views, logprobs.values, logprobs.ids, logprobs.ranks)
    return piece, layout


def write_logprobs(
    views: dict[str, torch.Tensor], values: torch.Tensor, ids: torch.Tensor, ranks: torch.Tensor
) -> None:
    """Write log-probabilities to the columns of a packed buffer."""
    views["values"].copy_(values.reshape(-1))
    views["ids"].copy_(ids.reshape(-1))
    views["ranks"].copy_(ranks)


def fetch(copies: Copies, piece: torch.Tensor, size: int) -> tuple[torch.Tensor, CopyEvent]:
    """Start copying the first `size` bytes of `piece` to the host."""
    target = copies.host(size)
    return target, copies.fetch(piece[:size], target)


@dataclass(slots=True)
class StepReadback:
    """A step's result being copied to the host. Keeps the copy's source alive."""

    plan: StepPlan
    layout: Layout
    rows: Int64s | None  # which of the S sampled rows have log-probabilities
    piece: torch.Tensor
    target: torch.Tensor
    event: CopyEvent
    wide: Wide = ()
    prompt: Prompts = ()

    def wait(self) -> StepResult:
        """Wait for the copy and return the result."""
        self.event.synchronize()
        views = self.layout.in_host(self.target.numpy())
        num = int(np.count_nonzero(self.plan.samples))
        logprobs = None
        if self.rows is not None:
            logprobs = self._logprobs(views, num)
        token_ids = views["token_ids"][:num].astype(np.int64)
        wide = tuple((row, arrived(it)) for row, it in self.wide)
        return StepResult(
            self.plan.step,
            token_ids,
            logprobs,
            wide,
            tuple(map(arrived, self.prompt)),
            undefined=_places(views["undefined"][:num]),
        )

    def _logprobs(self, views: dict[str, npt.NDArray[np.generic]], num: int) -> Logprobs:
        assert self.rows is not None
        width = 1 + self.plan.max_logprobs
        if "ranks" not in views:  # no row has log-probabilities in columns
            return on_host(
                self.rows,
                num,
                np.empty((0, width), np.float32),
                np.empty((0, width), np.uint32),
                np.empty(0, np.uint32),
            )
        num_given = len(views["ranks"])
        values = views["values"].reshape(num_given, -1)[:, :width]
        ids = views["ids"].view(np.uint32).reshape(num_given, -1)[:, :width]
        ranks = views["ranks"].view(np.uint32)
        if num_given != len(self.rows):  # a recorded step has them for all rows
            values, ids, ranks = values[self.rows], ids[self.rows], ranks[self.rows]
        return on_host(self.rows, num, values, ids, ranks)


def on_host(
    rows: Int64s,
    num_rows: int,
    values: npt.NDArray[np.generic],
    ids: npt.NDArray[np.generic],
    ranks: npt.NDArray[np.generic],
) -> Logprobs:
    """Scatter the rows with log-probabilities over all S sampled rows."""
    all_values = np.zeros((num_rows, values.shape[1]), np.float32)
    all_ids = np.zeros(all_values.shape, np.uint32)
    all_ranks = np.zeros(num_rows, np.uint32)
    all_values[rows] = values
    all_ids[rows] = ids
    all_ranks[rows] = ranks
    return Logprobs(all_values, all_ids, all_ranks)


@dataclass(slots=True)
class EndedStep:
    """A result that is already on the host; `mark` is the end of its step."""

    result: StepResult
    event: CopyEvent
    prompt: Prompts = ()  # for the result; may still be pending

    def wait(self) -> StepResult:
        """Wait for the step and return the result."""
        self.event.synchronize()
        if not self.prompt:
            return self.result
        return replace(self.result, prompt=tuple(map(arrived, self.prompt)))


class DeviceSpans:
    """Traces steps on a card, from enqueuing, or the end of the previous step, to their end."""

    def __init__(self, tracer: Tracer) -> None:
        """`tracer` is used on the waiting thread only."""
        self._tracer = tracer
        self._done_ns = 0  # end of the last step

    def until_done(
        self, pending: PendingStep[StepResult], begin_ns: int, step: int
    ) -> PendingStep[StepResult]:
        """Wrap `pending` so that its wait records the step's span."""
        return _Traced(self, pending, begin_ns, step)

    def add(self, begin_ns: int, step: int) -> None:
        """Record the span of a step that ends now."""
        now_ns = time.monotonic_ns()
        self._tracer.add(SpanKind.DEVICE, max(begin_ns, self._done_ns), now_ns, step)
        self._done_ns = now_ns


@dataclass(slots=True)
class _Traced:
    spans: DeviceSpans
    pending: PendingStep[StepResult]
    begin_ns: int
    step: int

    def wait(self) -> StepResult:
        """See PendingStep."""
        try:
            return self.pending.wait()
        finally:
            self.spans.add(self.begin_ns, self.step)


def wide(
    logits: torch.Tensor, token_ids: torch.Tensor, plan: StepPlan, copies: Copies | None
) -> Wide:
    """The candidates of the sampled rows that ask for MAX_NARROW log-probabilities or more."""
    return tuple(
        (row, candidates(logits[row : row + 1], token_ids[row : row + 1], num, copies, listed))
        for row, num in enumerate(plan.num_logprobs.tolist())
        if num >= MAX_NARROW
        for listed in (None if plan.listed is None else plan.listed.of(row),)
    )


def rows_of(undefined: torch.Tensor | None) -> Int64s | None:
    """Return `StepResult.undefined` from bool [S] on the host."""
    return None if undefined is None else _places(undefined.numpy())


def _places(is_undefined: npt.NDArray[np.generic]) -> Int64s | None:
    return np.flatnonzero(is_undefined) if is_undefined.any() else None


def deliver(
    copies: Copies | None,
    plan: StepPlan,
    token_ids: torch.Tensor,
    undefined: torch.Tensor | None = None,
    logprobs: RawLogprobs | None = None,
    more: Wide = (),
    prompt: Prompts = (),
) -> StepResult | StepReadback:
    """A step's result: a StepResult without `copies`, else a pending readback. undefined: bool [S];
    None: of ids that another rank has sampled.
    """
    if copies is not None:
        piece, layout = pack(token_ids, undefined, logprobs)
        target, event = fetch(copies, piece, layout.size)
        rows = None if logprobs is None else logprobs.rows
        return StepReadback(plan, layout, rows, piece, target, event, more, prompt)
    columns = None
    if logprobs is not None:
        columns = on_host(
            logprobs.rows,
            len(token_ids),
            logprobs.values.numpy(),
            logprobs.ids.numpy(),
            logprobs.ranks.numpy(),
        )
    here = tuple((row, arrived(it)) for row, it in more)
    its = tuple(map(arrived, prompt))
    found = rows_of(undefined)
    return StepResult(plan.step, token_ids.numpy(), columns, here, its, undefined=found)
