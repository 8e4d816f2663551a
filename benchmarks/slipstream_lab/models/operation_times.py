"""Where a decode step's time goes that is one call: by kinds of operations, and around the call."""

from __future__ import annotations

import itertools
import statistics
import time

import numpy as np
import numpy.typing as npt

from slipstream_core.forward.operations import (
    ATTEND,
    CONVOLVE,
    EXPERTS,
    PRODUCT,
    RECUR,
    SUM,
    Operation,
    OperationList,
)
from slipstream_core.runner.torch_runner import TorchRunner
from slipstream_core.step.plan import StepPlan

_PARTS = {
    PRODUCT: "products",
    EXPERTS: "experts",
    ATTEND: "attention",
    CONVOLVE: "convolutions",
    RECUR: "recurrences",
    SUM: "sums over ranks",
}
_BY_ROW = "norms, gates and others by row"
_AROUND = "around the list"  # embedding, logits that the list leaves out, sampler, threads


def decode_parts(runner: TorchRunner, plan: StepPlan, steps: int) -> dict[str, float]:
    """Seconds of each part of a decode step, the median over `steps`; {} if it is not one call."""
    program = runner.decode_program
    if program is None:
        return {}
    begun = program.watch()
    taken: list[dict[str, float]] = []
    for _ in range(steps):
        begin = time.perf_counter()
        runner.launch(plan)
        runner.collect()
        whole = time.perf_counter() - begin
        parts = parts_of(program, begun)
        taken.append(parts | {_AROUND: whole - sum(parts.values())})
    return {name: statistics.median(each[name] for each in taken) for name in taken[0]}


def parts_of(program: OperationList, begun: npt.NDArray[np.int64]) -> dict[str, float]:
    """Seconds of each part of a run of the list, from what `OperationList.watch` has noted."""
    noted = np.flatnonzero(begun)
    parts = dict.fromkeys(map(_part, program.operations), 0.0)
    for at, behind in itertools.pairwise(noted.tolist()):
        parts[_part(program.operations[at])] += (begun[behind] - begun[at]) / 1e9
    return parts


def _part(operation: Operation) -> str:
    return _PARTS.get(operation.kind, _BY_ROW)
