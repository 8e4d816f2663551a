"""Forwards of steps with prefill tokens, recorded by number of tokens.

An arrival would otherwise cost every row of its step what it takes to enqueue a forward operator by
operator. One recording serves decode and prefill rows in any mixture: how many there are of each is
on the device, and the tokens and rows that are missing are padding at the end (`MixedColumns`).

- A step is padded to the next bucket. Larger steps, and those with more prefill rows than
  MAX_PREFILLS, run eagerly: the time that a bucket's attention takes to find nothing to do grows
  with them.
- As many logits are computed as there may be rows; those behind the sampled ones are not used.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch

from slipstream_core.attention.fixed_shape import FixedShapeBackend, MixedColumns
from slipstream_core.attention.interface import AttentionContext
from slipstream_core.attention.kv_cache import LayerCache
from slipstream_core.forward.trace import Forward
from slipstream_core.runner.graph_capture import Work
from slipstream_core.step.buffer import Field, Layout
from slipstream_core.step.plan import BY_TOKEN, COLUMNS, StepPlan
from slipstream_core.step.staging import Copies, Staging, in_device

MAX_PREFILLS = 16


def static_bytes(buckets: Sequence[int]) -> int:
    """Bytes of the columns that recorded forwards read; others hold tables and logits."""
    return max(buckets, default=0) * 9 * 8


@dataclass(frozen=True, slots=True)
class StaticForward:
    """A model's forward, and the tensors that stay in place from one recorded step to the next."""

    forward: Forward
    backend: FixedShapeBackend
    layers: Sequence[LayerCache]
    last_token: torch.Tensor  # [max_num_seqs + 1] int64; the last is the padding rows' slot
    tables: torch.Tensor  # [max_num_seqs + 1, width] int32, likewise
    block_size: int

    def compute(
        self,
        columns: Mapping[str, torch.Tensor],
        keep: torch.Tensor,
        context: AttentionContext,
        logits: torch.Tensor,
    ) -> None:
        """Fill `logits` [R, vocab] with those of the tokens `keep` [R]."""
        gather_slots = columns["gather_slots"]
        from_last = self.last_token[gather_slots.clamp(min=0)]
        ids = torch.where(gather_slots < 0, columns["token_ids"], from_last)
        logits.copy_(self.forward(ids[None], columns["positions"][None], keep, context)[0])


class MixedForwards:
    """Recorded forwards of one runner, by bucket."""

    def __init__(
        self,
        static: StaticForward,
        logits: torch.Tensor,  # [max_rows, vocab], which a forward fills from the first on
        copies: Copies,
        buckets: Sequence[int],  # ascending
    ) -> None:
        self._static = static
        self._logits = logits
        self._buckets = tuple(buckets)
        self._forwards: dict[int, Work] = {}
        device, most = logits.device, max(buckets)
        self._layouts = {bucket: self._layout(bucket) for bucket in self._buckets}
        self._staging = Staging(copies, device, self._layouts[most].size)

    def takes(self, plan: StepPlan) -> bool:
        """True if `forward` can compute this plan."""
        bucket = self._bucket_for(plan.num_tokens)
        return (
            bucket is not None
            and plan.num_requests <= self._num_rows(bucket)
            and 0 < plan.num_requests - plan.num_decodes <= MAX_PREFILLS
            and plan.prompt is None
        )

    def forward(self, plan: StepPlan) -> torch.Tensor:
        """Logits of the sampled rows of a plan that `takes` accepts, [S, vocab].

        They are valid until the next call.
        """
        bucket = self._bucket_for(plan.num_tokens)
        assert bucket is not None
        num, layout = plan.num_requests, self._layouts[bucket]
        page = self._staging.open(layout)
        for name in BY_TOKEN:
            page.write(name, getattr(plan, name), pad=COLUMNS[name].declared.fill)
        page.write("kv_lens", plan.kv_lens, pad=0)
        page.write("slots", plan.slots, pad=len(self._static.last_token) - 1)
        starts = page["query_starts"]
        starts[0] = 0
        np.cumsum(plan.query_lens, out=starts[1 : num + 1])
        starts[num + 1 :] = bucket
        page["num_decodes"][0] = plan.num_decodes
        kept = np.flatnonzero(plan.samples)
        np.subtract(starts[1:][kept], 1, out=kept)
        page.write("keep", kept, pad=0)
        self._staging.send(layout)
        self._forwards[bucket]()
        return self._logits[: len(kept)]

    def work(self) -> list[tuple[int, str, Work, Callable[[Work], None]]]:
        """The work to record: tokens, name, and what takes the replay. Clears what it reads."""
        self._staging.device_buffer.zero_()
        found: list[tuple[int, str, Work, Callable[[Work], None]]] = []
        for bucket in reversed(self._buckets):
            columns = in_device(self._layouts[bucket], self._staging.device_buffer)
            work = partial(self._compute, bucket, columns)
            keep = partial(self._forwards.__setitem__, bucket)
            found.append((bucket, f"the forward of {bucket} tokens", work, keep))
        return found

    def _compute(self, bucket: int, columns: dict[str, torch.Tensor]) -> None:
        rows, static = self._num_rows(bucket), self._static
        context = static.backend.mixed(
            static.layers,
            MixedColumns(
                columns["kv_slots"],
                columns["positions"],
                columns["kv_lens"],
                columns["query_starts"],
                columns["num_decodes"],
                columns["slots"],
                static.tables,
                static.block_size,
                min(rows, MAX_PREFILLS) + 1,
            ),
        )
        static.compute(columns, columns["keep"], context, self._logits[:rows])

    def _num_rows(self, bucket: int) -> int:
        """The most rows of requests in a step of this bucket."""
        return min(bucket, len(self._logits))

    def _bucket_for(self, num_tokens: int) -> int | None:
        """The smallest recorded bucket that holds them."""
        return next((it for it in self._buckets if it >= num_tokens and it in self._forwards), None)

    def _layout(self, bucket: int) -> Layout:
        rows = self._num_rows(bucket)
        return Layout(
            [
                *(Field(name, COLUMNS[name].dtype, bucket) for name in BY_TOKEN),
                *(Field(name, COLUMNS[name].dtype, rows + 1) for name in ("slots", "kv_lens")),
                Field("keep", np.int64, rows),
                Field("query_starts", np.int32, rows + 2),
                Field("num_decodes", np.int32, 1),
            ]
        )
