"""Columns of a plan are declared once; what is derived from that."""

from __future__ import annotations

from typing import Annotated

import msgspec
import numpy as np
import numpy.typing as npt
import pytest

from slipstream_core.runner.kv_cache_size import largest_plan
from slipstream_core.scheduler.request_table import NewRequest, RequestTable
from slipstream_core.step.buffer import PlanBounds, PlanBoundsError, PlanBuffer, packed_bytes
from slipstream_core.step.columns import Column, columns_of
from slipstream_core.step.plan import COLUMNS, StepPlan, blank_plan
from slipstream_ipc.messages import SamplingParams

BOUNDS = PlanBounds(num_blocks=9, block_size=4, max_num_seqs=5, max_blocks=3, vocab_size=7)


def test_all_that_is_an_array_in_a_plan_is_declared() -> None:
    plan = largest_plan(3, 8, max_model_len=64, vocab_size=50)
    arrays = {
        each for each in StepPlan.__struct_fields__ if isinstance(getattr(plan, each), np.ndarray)
    }
    assert arrays == set(COLUMNS)
    for name, each in COLUMNS.items():
        assert getattr(plan, name).dtype == each.dtype, name


def test_what_is_declared_is_read_from_annotations() -> None:
    class Some(msgspec.Struct):
        step: int
        ids: Annotated[npt.NDArray[np.int64], Column("T", "vocab", least=-1)]
        scale: Annotated[npt.NDArray[np.float32], Column("S", fill=0.5)]

    found = columns_of(Some)
    assert list(found) == ["ids", "scale"]
    assert found["ids"].dtype == np.int64
    assert found["ids"].declared.below == "vocab"
    assert found["scale"].blank(3).tolist() == [0.5] * 3
    assert found["scale"].blank(3).dtype == np.float32


def test_what_is_gathered_is_a_column_of_the_table_and_a_field_of_a_request() -> None:
    table = RequestTable()
    for each in COLUMNS.values():
        if source := each.declared.source:
            assert isinstance(getattr(table, source), np.ndarray)
            assert hasattr(NewRequest, source) or source in SamplingParams.__struct_fields__


def test_a_blank_plan_asks_for_nothing() -> None:
    plan = blank_plan(slots=np.arange(3))
    assert (plan.num_decodes, plan.num_tokens, plan.num_requests) == (3, 3, 3)
    assert plan.all_greedy
    assert not any([plan.any_truncation, plan.awaits_masks, plan.needs_whole_rows])
    chunks = blank_plan(slots=np.arange(3), query_lens=np.array([1, 4, 1], np.int32))
    assert (chunks.num_decodes, chunks.num_tokens, len(chunks.positions)) == (1, 6, 6)
    some = blank_plan(slots=np.arange(3), samples=np.array([True, False, True]))
    assert len(some.temperatures) == 2
    PlanBuffer(memoryview(bytearray(packed_bytes(plan))), BOUNDS).pack(plan)


@pytest.mark.parametrize("name", [name for name, each in COLUMNS.items() if each.declared.below])
def test_every_bound_holds_up_to_its_last_number(name: str) -> None:
    column = COLUMNS[name]
    sizes = {
        "vocab": 7, "cache_slots": 36, "rows": 5, "table": 3, "blocks": 9, "length": 12,
    }  # fmt: skip
    assert column.declared.below is not None
    end = sizes[column.declared.below] + column.declared.reaches

    def pack(number: int) -> None:
        changed = {name: np.array([number], column.dtype)}
        entries = int(column.declared.over == "E")
        blank = {key: each.blank(entries) for key, each in COLUMNS.items() if "table" in key}
        plan = msgspec.structs.replace(blank_plan(slots=np.arange(1), **blank), **changed)
        space = memoryview(bytearray(packed_bytes(plan)))
        PlanBuffer(space, BOUNDS).pack(plan)

    pack(end - 1)
    # a row has the token that it computes
    pack(1 if name == "kv_lens" else column.declared.least)
    for number in (end, column.declared.least - 1):
        with pytest.raises(PlanBoundsError, match=name):
            pack(number)
