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

from slipstream_core.step.buffer import (
    Field,
    Layout,
    Page,
    PlanBounds,
    PlanBoundsError,
    PlanBuffer,
    PlanBytesError,
    packed_bytes,
)
from slipstream_core.step.plan import COLUMNS, PromptPlan, StepPlan

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


@pytest.mark.parametrize("name", ["token_ids", "table_numbers", "query_lens"])
def test_a_column_need_not_be_dense_but_as_declared(name: str) -> None:
    plan = plan_of([Row(position=2)] * 4)
    buffer = PlanBuffer(memoryview(bytearray(packed_bytes(plan))))
    column = getattr(plan, name)
    for other in (
        column.astype(np.uint8),
        column.astype(column.dtype.newbyteorder(">")),
        column[:-1],
        column[:, None],
    ):
        with pytest.raises(PlanBytesError):
            buffer.pack(msgspec.structs.replace(plan, **{name: other}))
    buffer.pack(msgspec.structs.replace(plan, **{name: np.repeat(column, 2)[::2]}))
    assert_same(buffer.view(), sent(plan))


@given(st.lists(plans(), min_size=2, max_size=4), st.data())
def test_plans_that_share_arrays_follow_each_other(several: list[StepPlan], data: Any) -> None:
    """A plan has some of the arrays of the one before, or a copy of them, and some others."""
    space = bytearray(max(map(packed_bytes, several)))
    writer = PlanBuffer(memoryview(space))
    for plan in several:
        for _ in range(3):
            size = writer.pack(plan)
            assert size == packed_bytes(plan)
            assert_same(view(memoryview(space)), sent(plan))
            others = data.draw(st.sets(st.sampled_from(["positions", "kv_slots", "kv_lens"])))
            changes = {name: getattr(plan, name)[::-1].copy() for name in others}
            plan = msgspec.structs.replace(plan, **changes)


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


@given(st.sampled_from(sorted(ALLOWED)), st.integers(0, 11), st.data())
def test_one_number_out_of_place_is_refused_and_no_other(name: str, at: int, data: Any) -> None:
    low, high = ALLOWED[name]
    column = getattr(PLAN, name).copy()
    info = np.iinfo(column.dtype)
    number = data.draw(st.integers(low - 2, high + 2) | st.integers(info.min, info.max))
    column[at % column.size] = number
    changed = msgspec.structs.replace(PLAN, **{name: column})
    space = memoryview(bytearray(packed_bytes(PLAN)))
    buffer = PlanBuffer(space, BOUNDS)
    buffer.pack(PLAN)
    for _ in range(2):  # nor when it is tried again
        if low <= number <= high:
            buffer.pack(changed)
            assert_same(view(space), sent(changed))
        else:
            with pytest.raises(PlanBoundsError):
                buffer.pack(changed)
            with pytest.raises(PlanBytesError):
                view(space)
    buffer.pack(PLAN)
    assert_same(view(space), sent(PLAN))


def test_a_row_that_computes_more_tokens_than_it_has_is_refused() -> None:
    lens = PLAN.query_lens.copy()
    lens[2] = PLAN.kv_lens[2] + 1
    buffer = PlanBuffer(memoryview(bytearray(packed_bytes(PLAN))), BOUNDS)
    buffer.pack(PLAN)
    with pytest.raises(PlanBoundsError):
        buffer.pack(msgspec.structs.replace(PLAN, query_lens=lens))


def test_plans_that_are_read_share_no_arrays() -> None:
    """A runner would take an array that it has written for one that it has to write."""
    space = memoryview(packed(plan_of([Row(), Row()])))
    buffer = PlanBuffer(space)
    first, second = buffer.view(), buffer.view()
    for name, each in COLUMNS.items():
        if each.declared.sent == "always":
            assert getattr(first, name) is not getattr(second, name)


FIELDS = {"a": np.int64, "b": np.float32, "c": np.int32}


@given(st.lists(st.tuples(st.sampled_from([3, 8]), st.data()), max_size=12))
def test_a_page_holds_what_was_written_last(steps: list[tuple[int, st.DataObject]]) -> None:
    """Against arrays that are written whole each time."""
    layouts = {num: Layout([Field(name, FIELDS[name], num) for name in FIELDS]) for num in (3, 8)}
    memory = np.zeros(layouts[8].size, np.uint8)
    page = Page(memory)
    shared = {name: np.arange(1, 3, dtype=dtype) for name, dtype in FIELDS.items()}
    for num, data in steps:
        page.lay_out(layouts[num])
        expected = {}
        for at, (name, dtype) in enumerate(FIELDS.items()):
            how = data.draw(st.sampled_from(["shared", "other", "by hand", "not"]))
            want = np.full(num, at, dtype)
            if how == "by hand":
                want[:] = data.draw(st.integers(0, 9))
                page[name][...] = want
            elif how == "other":
                want[: num - 1] = data.draw(st.integers(0, 9))
                page.write(name, want[:-1].copy(), pad=at)
            elif how == "shared":
                want[:2] = shared[name]
                page.write(name, shared[name], pad=at)
            else:
                continue
            expected[name] = want
        got = layouts[num].in_host(memory)
        for name, want in expected.items():
            assert got[name].tolist() == want.tolist()


def test_what_is_made_of_a_column_is_made_once() -> None:
    layout, made = Layout([Field("a", np.int64, 3)]), []
    page = Page(np.zeros(layout.size, np.uint8))
    page.lay_out(layout)

    def double(column: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        made.append(column)
        return 2 * column

    for column in (one := np.arange(2), one, np.arange(2)):
        page.write("a", column, pad=7, make=double)
        assert page.columns()["a"].tolist() == [0, 2, 7]
    assert len(made) == 2


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
    plan = msgspec.structs.replace(plan_of([Row(position=2)] * 2), prompt=scored())
    view(memoryview(packed(plan)))
    with pytest.raises(PlanBytesError):
        view(memoryview(packed(msgspec.structs.replace(plan, **changes))))
    changed = msgspec.structs.replace(plan, **changes)
    space = memoryview(bytearray(max(packed_bytes(plan), packed_bytes(changed))))
    leader = PlanBuffer(space, BOUNDS)
    leader.pack(plan)
    for _ in range(2):
        with pytest.raises(PlanBytesError):  # before a rank reads it
            leader.pack(changed)
        with pytest.raises(PlanBytesError, match="not a plan"):
            view(space)
    leader.pack(plan)
    assert_same(view(space), sent(plan))


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
    plan = view(memoryview(packed(plan_of([Row()]))))
    empty = {
        name: column[:0]
        for name in StepPlan.__struct_fields__
        if isinstance(column := getattr(plan, name), np.ndarray)
    }
    space = packed(msgspec.structs.replace(plan, num_decodes=0, **empty))
    assert view(memoryview(space)).num_requests == 0
    np.frombuffer(space, np.int64)[8] = width
    with pytest.raises(PlanBytesError):
        view(memoryview(space))
