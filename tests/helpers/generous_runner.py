"""A runner that gives several tokens to a row and step: what a model with right drafts would."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from slipstream_core.runner.simulated.simulated_runner import SimulatedRunner
from slipstream_core.step.plan import Logprobs, StepPlan, StepResult


class GenerousRunner:
    """A runner whose steps give each row `take()` tokens: its own one, and those that follow it.

    outputs: by prompt length, all that a stream will get; the prompts' lengths differ.
    is_read: whether as many tokens as were collected have been read; a step is not done before.
    """

    def __init__(
        self,
        inner: SimulatedRunner,
        outputs: dict[int, list[int]],
        take: Callable[[], int],
        is_read: Callable[[int], bool],
    ) -> None:
        self._inner = inner
        self._outputs = outputs
        self._take = take
        self._is_read = is_read
        self._num_collected = 0
        self._given: deque[list[list[int]]] = deque()  # of each step in flight, by sampled row
        self.info, self.num_blocks = inner.info, inner.num_blocks

    def launch(self, plan: StepPlan) -> None:
        self._inner.launch(plan)
        lens = zip(plan.kv_lens.tolist(), plan.prompt_lens.tolist(), strict=True)
        rows = [each for each, samples in zip(lens, plan.samples, strict=True) if samples]
        # more than a request may have is the scheduler's to drop
        given = [
            [*self._outputs[prompt_len][kv_len - prompt_len :], *[1] * 9][: self._take()]
            for kv_len, prompt_len in rows
        ]
        self._given.append(given)
        if not plan.awaits_masks:
            self._keep_last(plan)

    def _keep_last(self, plan: StepPlan) -> None:
        """As on a device: the step behind this one begins with the last of its tokens."""
        for slot, ids in zip(plan.slots[plan.samples], self._given[-1], strict=True):
            if len(ids) > 1:
                self._inner._last_token[slot] = ids[-1]

    def sample(self, plan: StepPlan, masks: npt.NDArray[np.int32]) -> None:
        self._inner.sample(plan, masks)  # computes the step
        self._keep_last(plan)

    def collect(self) -> StepResult:
        result, given = self._inner.collect(), self._given.popleft()
        for own, each in zip(result.token_ids.tolist(), given, strict=True):
            each[0] = own  # as computed from the cache
        counts = np.array([len(each) for each in given], np.int64)
        ids = np.array([token_id for each in given for token_id in each], np.int64)
        logprobs = result.logprobs
        if logprobs is not None:  # told apart by token
            values, entries = (
                np.repeat(each, counts, 0) for each in (logprobs.values, logprobs.ids)
            )
            values[:, 0], entries[:, 0] = -ids, ids
            logprobs = Logprobs(values, entries, (ids + 1).astype(np.uint32))
        self._num_collected += len(ids)
        every_one = (counts == 1).all() and result.step % 2 == 0
        return StepResult(result.step, ids, logprobs, counts=None if every_one else counts)

    def done(self) -> bool:
        return self._is_read(self._num_collected) and self._inner.done()

    def done_at(self) -> float | None:
        return self._inner.done_at() if self._is_read(self._num_collected) else None

    def fileno(self) -> int | None:
        return self._inner.fileno()

    def close(self) -> None:
        self._inner.close()
