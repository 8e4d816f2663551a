"""A plan that names a place that ranks do not have is refused, and no other."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace
from tests.helpers.sampling_plans import Row, plan_of

from slipstream_core.step.plan import StepPlan
from slipstream_core.step.plan_check import PlanBounds, PlanBoundsError
from slipstream_core.step.plan_codec import PlanBuffer, packed_bytes

BOUNDS = PlanBounds(num_blocks=10, block_size=4, max_num_seqs=6, max_blocks=3, vocab_size=50)
PLAN = plan_of([Row(position=2)] * 4)
# by column: the least and the largest number allowed
ALLOWED = {
    "token_ids": (0, 49),
    "kv_slots": (0, 39),
    "slots": (0, 5),
    "gather_slots": (-1, 5),
    "table_slots": (0, 5),
    "table_numbers": (0, 2),
    "table_blocks": (0, 9),
    "positions": (0, 11),
    "kv_lens": (1, 12),
}


def check_in_numpy(plan: StepPlan) -> None:
    BOUNDS.check(plan)


def check_in_c(plan: StepPlan) -> None:
    """As a plan is packed; one within the bounds is packed in C."""
    buffer = PlanBuffer(memoryview(bytearray(packed_bytes(plan))))
    buffer.pack(plan, BOUNDS)
    assert buffer._packer.pack(plan)


CHECKS = pytest.mark.parametrize("check", [check_in_numpy, check_in_c])


@CHECKS
def test_a_plan_within_the_bounds_passes(check: Callable[[StepPlan], None]) -> None:
    check(PLAN)


@CHECKS
@given(st.sampled_from(sorted(ALLOWED)), st.integers(0, 11), st.data())
def test_one_number_out_of_place_is_refused(
    check: Callable[[StepPlan], None], name: str, at: int, data: Any
) -> None:
    low, high = ALLOWED[name]
    column = getattr(PLAN, name).copy()
    info = np.iinfo(column.dtype)
    given_number = data.draw(
        st.one_of(st.integers(low - 2, high + 2), st.integers(info.min, info.max))
    )
    column.reshape(-1)[at % column.size] = given_number
    changed = replace(PLAN, **{name: column})
    if low <= given_number <= high:
        check(changed)
    else:
        with pytest.raises(PlanBoundsError):
            check(changed)


@CHECKS
def test_a_row_that_computes_more_tokens_than_it_has_is_refused(
    check: Callable[[StepPlan], None],
) -> None:
    lens = PLAN.query_lens.copy()
    lens[2] = PLAN.kv_lens[2] + 1
    with pytest.raises(PlanBoundsError):
        check(replace(PLAN, query_lens=lens))
