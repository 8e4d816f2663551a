"""Parts of a decode step's time, from what a list of operations has noted."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np

from slipstream_core.forward.operations import ADD, MUL, NORM, PRODUCT, RECUR, Operation, Part
from slipstream_lab.models.operation_times import parts_of


def test_fused_operations_are_one_part() -> None:
    kinds = (NORM, PRODUCT, MUL, ADD, RECUR, PRODUCT)
    program: Any = SimpleNamespace(operations=[Operation(each, Part(1), Part(0)) for each in kinds])
    # MUL and ADD are fused; the run ends at 10,400
    begun = np.array([10_000, 10_010, 10_110, 0, 10_150, 10_350, 10_400], np.int64)
    parts = parts_of(program, begun)
    assert {name: round(seconds * 1e9) for name, seconds in parts.items()} == {
        "norms, gates and others by row": 10 + 40,
        "products": 100 + 50,
        "recurrences": 200,
    }
