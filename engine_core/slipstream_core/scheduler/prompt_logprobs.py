"""The rows whose prompt log-probabilities are still to be computed, and their part of a plan.

- The logits at a position score the token behind it: positions 0 to prompt_len - 2 are wanted, for
  all tokens of the prompt but the first.
- A step has logits at no more than MAX_POSITIONS of them, as logits over the whole vocabulary take
  far more memory than anything else of a step. Chunks are cut to that.
- Such a request shares no blocks that others computed, as their logits are gone. Once its prompt is
  scored, it is like any other.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt
from msgspec.structs import replace

from slipstream_core.step.limits import MAX_POSITIONS
from slipstream_core.step.plan import PromptPlan, StepPlan
from slipstream_ipc.arrays import Int64s
from slipstream_ipc.history.token_log import TokenLog


class _Wanted(NamedTuple):
    stop: int  # the position behind the last one wanted
    num_logprobs: int


class PromptLogprobRows:
    """Rows whose prompts are to be scored; false if there are none."""

    def __init__(self, tokens: TokenLog) -> None:
        self._tokens = tokens
        self._wanted: dict[int, _Wanted] = {}
        self._num_left = MAX_POSITIONS  # positions left in the step that is being planned

    def __bool__(self) -> bool:
        return bool(self._wanted)

    def add(self, row: int, prompt_len: int, num_logprobs: int) -> None:
        """Start a request that wants prompt log-probabilities."""
        if prompt_len > 1:
            self._wanted[row] = _Wanted(prompt_len - 1, num_logprobs)

    def remove(self, row: int) -> None:
        """All of a row's prompt is scored, or the request is gone. Idempotent."""
        self._wanted.pop(row, None)

    def has_room(self, row: int) -> bool:
        """True if the step that is being planned can compute a chunk of this row."""
        return self._num_left > 0 or row not in self._wanted

    def cut(self, row: int, start: int, count: int) -> int:
        """The number of `count` tokens from `start` on that the step can compute."""
        wanted = self._wanted.get(row)
        if wanted is None or start >= wanted.stop:
            return count
        if start + count <= wanted.stop:
            count = min(count, self._num_left)
        elif wanted.stop - start > self._num_left:
            count = self._num_left
        self._num_left -= min(start + count, wanted.stop) - start
        return count

    def extend(self, plan: StepPlan, rows: Int64s) -> StepPlan:
        """The plan with the prompt positions that it has to score; `rows` are the plan's."""
        self._num_left = MAX_POSITIONS
        query_starts = np.cumsum(plan.query_lens, dtype=np.int64) - plan.query_lens
        found, starts, stops, widths = [], [], [], []
        targets: list[npt.NDArray[np.generic]] = []
        for index in range(plan.num_decodes, len(rows)):
            row, wanted = int(rows[index]), self._wanted.get(int(rows[index]))
            stop = int(plan.kv_lens[index])
            start = stop - int(plan.query_lens[index])
            if wanted is None or start >= wanted.stop:
                continue
            stop = min(stop, wanted.stop)
            found.append(index)
            starts.append(start)
            stops.append(stop)
            widths.append(wanted.num_logprobs)
            targets.append(self._tokens.read(row, start + 1, stop + 1))
        if not found:
            return plan
        counts = np.subtract(stops, starts)
        firsts = np.repeat(query_starts[found], counts)
        within = np.arange(len(firsts)) - np.repeat(np.cumsum(counts) - counts, counts)
        return replace(
            plan,
            prompt=PromptPlan(
                rows=np.array(found),
                starts=np.array(starts),
                counts=counts,
                num_logprobs=np.array(widths),
                tokens=firsts + within,
                targets=np.concatenate(targets).astype(np.int64),
            ),
        )
