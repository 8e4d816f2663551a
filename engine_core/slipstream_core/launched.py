"""Whom the steps in flight are for.

Owns: a record of each launched step until it is answered, in launch order. Does not know: what has
become of those requests since; whoever asks compares generations (see `columns`).
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from slipstream_core.runner.plan import StepPlan

Int64s = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Launched:
    """Whom a step is for: R rows, of which S are sampled, with their generations."""

    step: int
    rows: Int64s  # [R]
    generations: Int64s  # [R]
    sampled: Int64s  # [S] rows
    sampled_generations: Int64s  # [S]
    on_probation: bool  # its one request is


class LaunchedSteps:
    """The steps in flight, oldest first."""

    def __init__(self) -> None:
        self._records: deque[Launched] = deque()

    def __len__(self) -> int:
        return len(self._records)

    @property
    def has_probation(self) -> bool:
        """Whether a request on probation is in flight, which nothing is launched behind."""
        return len(self._records) > 0 and self._records[-1].on_probation

    def add(self, plan: StepPlan, rows: Int64s, generations: Int64s, *, on_probation: bool) -> None:
        """`plan`, for these rows, is launched next."""
        sampled, sampled_generations = rows, generations
        if not plan.samples.all():
            sampled, sampled_generations = rows[plan.samples], generations[plan.samples]
        self._records.append(
            Launched(plan.step, rows, generations, sampled, sampled_generations, on_probation)
        )

    def answered(self, plan: StepPlan) -> Launched:
        """The record of the oldest step, which is `plan`; it is in flight no longer."""
        record = self._records.popleft()
        assert record.step == plan.step, f"step {plan.step} answered before {record.step}"
        return record

    def rows_of(self, plan: StepPlan) -> Int64s:
        """The rows of a step in flight, [R]."""
        return self.record_of(plan).rows

    def record_of(self, plan: StepPlan) -> Launched:
        """The record of a step in flight."""
        return next(record for record in self._records if record.step == plan.step)
