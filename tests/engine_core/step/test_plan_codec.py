"""A plan comes back from its bytes as it was; bytes that are no plan are refused."""

from __future__ import annotations

import dataclasses
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.helpers.sampling_plans import Row, plan_of
from tests.oracles.plan_codec import NumpyPlanBuffer

from slipstream_core.step.plan import COLUMNS, PromptPlan, StepPlan
from slipstream_core.step.plan_codec import (
    PlanBuffer,
    PlanBytesError,
    packed_bytes,
)

HEADER_WORDS = 11
SENT = {
    *("step", "num_decodes", "token_ids", "gather_slots", "positions", "kv_slots", "slots"),
    *("query_lens", "kv_lens", "samples", "table_slots", "table_numbers", "table_blocks"),
}
DRAWN = {"temperatures", "seeds"}


@st.composite
def plans(draw: st.DrawFn) -> StepPlan:
    """Plans of up to 8 rows, with chunks, masks, grammars and scored positions."""
    num_decodes = draw(st.integers(0, 5))
    chunks = draw(st.lists(st.integers(1, 6), max_size=3))
    lens = np.array([1] * num_decodes + chunks, np.int32)
    samples = np.array(draw(st.lists(st.booleans(), min_size=len(lens), max_size=len(lens))), bool)
    rng = np.random.default_rng(draw(st.integers(0, 1 << 32)))
    rows, sampled, tokens = len(lens), int(samples.sum()), int(lens.sum())
    masked = draw(st.integers(0, 4)) if sampled else 0
    entries = draw(st.integers(0, 9))
    scored = np.array(draw(st.lists(st.integers(1, 4), max_size=3)) if rows else [], np.int64)

    def longs(count: int, end: int = 1 << 62) -> np.ndarray[Any, np.dtype[np.int64]]:
        return rng.integers(-end, end, count)

    def any_of(dtype: np.dtype[Any], count: int) -> np.ndarray[Any, Any]:
        if dtype.kind == "f":
            return rng.random(count, dtype.type)
        return (
            longs(count) if dtype == np.int64 else rng.integers(-(1 << 31), 1 << 31, count, dtype)
        )

    nums = {"T": tokens, "R": rows, "S": sampled, "E": entries, "M": masked, "G": 0}
    columns = {
        name: any_of(each.dtype, nums[each.declared.over])
        for name, each in COLUMNS.items()
        if name != "samples"
    }
    prompt = PromptPlan(
        rows=rng.integers(0, max(rows, 1), len(scored)),
        starts=longs(len(scored)),
        counts=scored,
        num_logprobs=longs(len(scored)),
        tokens=rng.integers(0, max(tokens, 1), int(scored.sum())),
        targets=longs(int(scored.sum())),
    )
    columns |= {
        "query_lens": lens,
        "samples": samples,
        "masked_rows": rng.integers(0, max(sampled, 1), masked),
        "grammar_rows": np.arange(draw(st.integers(0, sampled))),
    }
    return StepPlan(
        step=draw(st.integers(0, 1 << 62)),
        num_decodes=num_decodes,
        **columns,
        all_greedy=draw(st.booleans()),
        any_truncation=draw(st.booleans()),
        any_wide=draw(st.booleans()),
        max_logprobs=draw(st.integers(-1, 20)),
        prompt=draw(st.sampled_from([None, prompt])),
        sliced=draw(st.booleans()),
    )


def pack(plan: StepPlan, buffer: memoryview) -> int:
    return PlanBuffer(buffer).pack(plan)


def view(buffer: memoryview) -> StepPlan:
    return PlanBuffer(buffer).view()


def packed(plan: StepPlan) -> bytearray:
    space = bytearray(packed_bytes(plan))
    assert pack(plan, memoryview(space)) == len(space)
    return space


def assert_same(got: object, want: object) -> None:
    assert type(got) is type(want)
    if isinstance(want, StepPlan):
        for name in StepPlan.__struct_fields__:
            assert_same(getattr(got, name), getattr(want, name))
    elif isinstance(want, PromptPlan):
        for name in PromptPlan.__dataclass_fields__:
            assert_same(getattr(got, name), getattr(want, name))
    elif isinstance(want, np.ndarray):
        assert isinstance(got, np.ndarray)
        assert (got.dtype, got.shape) == (want.dtype, want.shape)
        np.testing.assert_array_equal(got, want)
    else:
        assert got == want


def sent(plan: StepPlan) -> StepPlan:
    """What other ranks compute: the plan without what only the first one reads."""
    is_drawn = plan.sliced and not plan.all_greedy
    left_out: dict[str, Any] = {
        name: value[:0]
        for name in set(StepPlan.__struct_fields__) - SENT - (DRAWN if is_drawn else set())
        if isinstance(value := getattr(plan, name), np.ndarray)
    }
    prompt = plan.prompt
    if prompt is not None:
        names = set(PromptPlan.__dataclass_fields__) - {"tokens"}
        prompt = dataclasses.replace(prompt, **dict.fromkeys(names, prompt.rows[:0]))
    flags = {
        "all_greedy": not is_drawn,
        "any_truncation": is_drawn and plan.any_truncation,
        "any_wide": False,
        "max_logprobs": -1,
    }
    return msgspec.structs.replace(
        plan, **left_out, **flags, prompt=prompt, constraints=None, listed=None
    )


@given(plans())
def test_what_the_forward_reads_comes_back(plan: StepPlan) -> None:
    assert_same(view(memoryview(packed(plan))), sent(plan))


@given(plans(), st.integers(0, 100))
def test_a_larger_buffer_keeps_what_lies_behind(plan: StepPlan, more: int) -> None:
    space = bytearray(b"\xa5" * (packed_bytes(plan) + more))
    size = pack(plan, memoryview(space))
    assert bytes(space[size:]) == b"\xa5" * more
    assert_same(view(memoryview(space)), sent(plan))


@given(st.lists(plans(), min_size=1, max_size=3))
def test_both_ways_write_the_same(several: list[StepPlan]) -> None:
    size = max(packed_bytes(plan) for plan in several)
    spaces = [bytearray(b"\xa5" * size) for _ in range(2)]
    in_c, in_numpy = PlanBuffer(memoryview(spaces[0])), NumpyPlanBuffer(memoryview(spaces[1]))
    for plan in several:
        assert in_c.pack(plan) == in_numpy.pack(plan)
        assert spaces[0] == spaces[1]
        assert in_c._packer.pack(plan) is (plan.prompt is None)


@pytest.mark.parametrize("name", ["token_ids", "table_numbers", "query_lens"])
def test_what_is_not_dense_or_not_as_declared_is_not_packed_in_c(name: str) -> None:
    plan = plan_of([Row(position=2)] * 4)
    buffer = PlanBuffer(memoryview(bytearray(packed_bytes(plan))))
    buffer.pack(plan)
    column = getattr(plan, name)
    for other in (
        np.repeat(column, 2)[::2],
        column.astype(np.uint8),
        column.astype(column.dtype.newbyteorder(">")),
        column[:-1],
        column[:, None],
        column.tolist(),
    ):
        assert not buffer._packer.pack(msgspec.structs.replace(plan, **{name: other}))
    assert buffer._packer.pack(plan)


@given(st.lists(plans(), min_size=1, max_size=6))
def test_plans_of_all_sizes_follow_each_other_in_one_buffer(several: list[StepPlan]) -> None:
    """One that writes and another one that reads, as in two processes."""
    space = memoryview(bytearray(max(map(packed_bytes, several))))
    writer, reader = PlanBuffer(space), PlanBuffer(space)
    for plan in (*several, *several):
        writer.pack(plan)
        assert_same(reader.view(), sent(plan))
        assert_same(writer.view(), sent(plan))


def test_columns_are_views_of_the_buffer() -> None:
    space = packed(plan_of([Row(), Row()]))
    plan = view(memoryview(space))
    whole = np.frombuffer(space, np.uint8)
    for name in ("token_ids", "table_blocks", "samples"):
        assert np.shares_memory(getattr(plan, name), whole)


@given(plans(), st.data())
def test_part_of_a_plan_is_refused(plan: StepPlan, data: st.DataObject) -> None:
    space = packed(plan)
    end = data.draw(st.integers(0, len(space) - 1))
    with pytest.raises(PlanBytesError):
        view(memoryview(space)[:end])
    with pytest.raises(PlanBytesError):
        pack(plan, memoryview(space)[:end])


@given(plans(), st.data())
def test_a_changed_word_is_refused_or_read(plan: StepPlan, data: st.DataObject) -> None:
    """Whatever is read has consistent shapes; a changed size or count is never read."""
    space = packed(plan)
    words = np.frombuffer(space, np.int64)
    at = data.draw(st.integers(0, len(words) - 1) | st.integers(0, HEADER_WORDS - 1))
    before = int(words[at])
    words[at] = data.draw(
        st.integers(-(1 << 63), (1 << 63) - 1)
        | st.integers(max(before - 2, -(1 << 63)), min(before + 2, (1 << 63) - 1))
    )
    changed = int(words[at]) != before
    try:
        got = view(memoryview(space))
    except PlanBytesError:
        assert changed
        return
    assert not changed or at not in (0, 1)
    assert got.query_lens.sum() == got.num_tokens
    assert got.samples.view(np.uint8).max(initial=0) <= 1
    # what is read can be written
    packed(got)


@given(st.binary(max_size=400))
def test_garbage_is_refused(garbage: bytes) -> None:
    with pytest.raises(PlanBytesError):
        view(memoryview(garbage))


@pytest.mark.parametrize("word", range(5, HEADER_WORDS))
@pytest.mark.parametrize("count", [-1, 1 << 40, (1 << 63) - 1])
def test_a_count_beyond_the_buffer_is_refused(word: int, count: int) -> None:
    space = packed(plan_of([Row(), Row()]))
    np.frombuffer(space, np.int64)[word] = count
    with pytest.raises(PlanBytesError):
        view(memoryview(space))


@pytest.mark.parametrize(
    "changes",
    [
        {"query_lens": np.ones(2, np.int64)},
        {"kv_lens": np.ones(1, np.int32)},
        {"table_blocks": np.ones(1, np.int32)},
        {"samples": np.ones(2, np.uint8)},
    ],
)
def test_a_column_that_is_not_as_declared_is_refused(changes: dict[str, Any]) -> None:
    plan = plan_of([Row(), Row()])
    wrong = msgspec.structs.replace(plan, **changes)
    space = packed(plan)
    with pytest.raises(PlanBytesError):
        pack(wrong, memoryview(space))
    # and what the buffer held before is not read in its place
    with pytest.raises(PlanBytesError):
        view(memoryview(space))


def longs(*values: int) -> np.ndarray[Any, np.dtype[np.int64]]:
    return np.array(values, np.int64)


def scored(token: int = 0) -> PromptPlan:
    """One position of the first row."""
    columns = {name: longs(0) for name in PromptPlan.__dataclass_fields__}
    return PromptPlan(**columns | {"counts": longs(1), "tokens": longs(token)})


@pytest.mark.parametrize(
    "changes",
    [
        {"num_decodes": 3},
        {"num_decodes": -1},
        {"query_lens": np.array([1, 2], np.int32), "num_decodes": 1},
        {"query_lens": np.array([2, 0], np.int32), "num_decodes": 0},
        {"samples": np.array([1, 2], np.uint8).view(np.bool_)},
        {"prompt": scored(2)},
        {"prompt": scored(-1)},
        {"prompt": None, "sliced": True, "all_greedy": False, "samples": np.zeros(2, np.bool_)},
    ],
)
def test_columns_that_contradict_each_other_are_refused(changes: dict[str, Any]) -> None:
    plan = msgspec.structs.replace(plan_of([Row(), Row()]), prompt=scored())
    view(memoryview(packed(plan)))
    with pytest.raises(PlanBytesError):
        view(memoryview(packed(msgspec.structs.replace(plan, **changes))))


@pytest.mark.parametrize("has_prompt", [-1, 0, 2])
def test_a_prompt_that_is_none_is_refused(has_prompt: int) -> None:
    space = packed(msgspec.structs.replace(plan_of([Row()]), prompt=scored()))
    np.frombuffer(space, np.int64)[4] = has_prompt
    with pytest.raises(PlanBytesError):
        view(memoryview(space))


@pytest.mark.parametrize("slices", [0, 1, 4])
def test_draws_from_no_slices_are_refused(slices: int) -> None:
    space = packed(msgspec.structs.replace(plan_of([Row(), Row()]), sliced=True))
    assert view(memoryview(space)).temperatures.tolist() == [1, 1]
    np.frombuffer(space, np.int64)[5] = slices
    with pytest.raises(PlanBytesError):
        view(memoryview(space))


@pytest.mark.parametrize("width", [-1, 1 << 40])
def test_a_width_without_rows_is_refused(width: int) -> None:
    space = bytearray(8 * HEADER_WORDS)
    plan = view(memoryview(packed(plan_of([Row()]))))
    empty = {
        name: column[:0]
        for name in StepPlan.__struct_fields__
        if isinstance(column := getattr(plan, name), np.ndarray)
    }
    pack(msgspec.structs.replace(plan, num_decodes=0, **empty), memoryview(space))
    assert view(memoryview(space)).num_requests == 0
    np.frombuffer(space, np.int64)[8] = width
    with pytest.raises(PlanBytesError):
        view(memoryview(space))
