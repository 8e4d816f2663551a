"""Columns: what does not fit raises a ProtocolError, and nothing raises anything else."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec import structs

from slipstream_ipc.columns import (
    check_deltas,
    check_report,
    check_step,
    f32,
    pack_f32,
    pack_u32,
    pack_u64,
    u32,
    u64,
)
from slipstream_ipc.errors import ProtocolError
from slipstream_ipc.messages import (
    MAX_CALLS,
    AnswerEvent,
    Deltas,
    End,
    EventKind,
    LogprobColumns,
    Report,
    Step,
)

END = End("stop", 1)

# three entries with 1, 2 and 0 tokens; logprobs of widths 2, 0 and 1, or 2 everywhere
RAGGED = LogprobColumns(
    0, pack_f32([1, 2]), pack_u32([1, 2]), pack_u32([1]), pack_u32([2, 0, 1])
)  # fmt: skip
EVEN = LogprobColumns(2, pack_f32(range(6)), pack_u32(range(6)), pack_u32([1, 2, 3]))
REPORT = Report(5, pack_u32([1, 2]), pack_u32([3, 4]))
STEP = Step(
    9, pack_u32([4, 5, 6]), pack_u32([7, 8, 9]), pack_u32([1, 2, 0]), pack_u32([0, 3, 5]), RAGGED
)
COMPACT = Step(9, pack_u32([4, 5, 6]), pack_u32([7, 8, 9]), logprobs=EVEN)
DELTAS = Deltas(
    pack_u32([1, 2, 3]), pack_u32([0, 0, 9]), pack_u32([0, 0, 4]), ["a", "b", ""],
    pack_u32([7, 8, 9]), pack_u32([1, 2, 0]), pack_u32([0, 2]), (END, END), RAGGED,
)  # fmt: skip
COMPACT_DELTAS = structs.replace(DELTAS, counts=b"", logprobs=EVEN)

GOOD: list[tuple[Callable[[Any], None], Any]] = [
    (check_report, REPORT),
    (check_report, Report(0)),
    (check_step, STEP),
    (check_step, structs.replace(STEP, logprobs=None)),
    (check_step, COMPACT),
    (check_step, Step(0, b"", b"")),
    (check_step, Step(0, b"", b"", logprobs=LogprobColumns(3, b"", b"", b""))),
    (check_deltas, DELTAS),
    (check_deltas, COMPACT_DELTAS),
    (check_deltas, Deltas(b"", b"", b"", [], b"")),
]


def bytes_fields(body: Any) -> list[tuple[str, ...]]:
    """The paths of all columns of a message."""
    paths: list[tuple[str, ...]] = []
    for name in body.__struct_fields__:
        value = getattr(body, name)
        if isinstance(value, bytes):
            paths.append((name,))
        elif isinstance(value, LogprobColumns):
            paths += [(name, *path) for path in bytes_fields(value)]
    return paths


def changed(body: Any, path: tuple[str, ...], value: Any) -> Any:
    if len(path) > 1:
        value = changed(getattr(body, path[0]), path[1:], value)
    return structs.replace(body, **{path[0]: value})


def get(body: Any, path: tuple[str, ...]) -> Any:
    for name in path:
        body = getattr(body, name)
    return body


CASES = [(check, body, path) for check, body in GOOD for path in bytes_fields(body)]


@pytest.mark.parametrize(("check", "body"), GOOD)
def test_well_formed(check: Callable[[Any], None], body: Any) -> None:
    check(body)


@pytest.mark.parametrize(("check", "body", "path"), CASES)
def test_every_length_mismatch(
    check: Callable[[Any], None], body: Any, path: tuple[str, ...]
) -> None:
    column = get(body, path)
    wrong = [column + b"\0", column + bytes(4), column + bytes(400)]
    if column and path[-1] not in ("counts", "widths"):  # those may be left out as a whole
        wrong += [column[:-1], column[:-4], b""]
    elif column:
        wrong += [column[:-1], column[:-4]]
    for other in wrong:
        with pytest.raises(ProtocolError):
            check(changed(body, path, other))


def test_counts_that_are_left_out_change_what_the_rest_must_be() -> None:
    with pytest.raises(ProtocolError, match="starts without counts"):
        check_step(structs.replace(STEP, counts=b"", logprobs=None))
    with pytest.raises(ProtocolError, match="logprobs"):
        check_deltas(structs.replace(DELTAS, counts=b""))


def test_widths_that_are_left_out() -> None:
    with pytest.raises(ProtocolError, match="logprobs"):
        check_step(changed(STEP, ("logprobs", "widths"), b""))


@pytest.mark.parametrize("width", [-1, 2**32, 2**63, -(2**63)])
def test_a_width_that_is_none(width: int) -> None:
    with pytest.raises(ProtocolError, match=r"logprobs\.width"):
        check_step(changed(COMPACT, ("logprobs", "width"), width))


@pytest.mark.parametrize("num", [2**31, 2**32 - 1])
def test_huge_counts_do_not_wrap(num: int) -> None:
    with pytest.raises(ProtocolError):
        check_step(structs.replace(STEP, counts=pack_u32([num, num, 2]), logprobs=None))
    with pytest.raises(ProtocolError):
        check_step(changed(STEP, ("logprobs", "widths"), pack_u32([num, num, num])))
    with pytest.raises(ProtocolError):
        check_step(changed(COMPACT, ("logprobs", "width"), num))
    with pytest.raises(ProtocolError):
        check_deltas(structs.replace(DELTAS, counts=pack_u32([num, num, 2]), logprobs=None))


@pytest.mark.parametrize("ended", [[0, 3], [0, 2**32 - 1], [2, 0], [1, 1]])
def test_ended_names_entries_once_and_in_order(ended: list[int]) -> None:
    with pytest.raises(ProtocolError, match="ended"):
        check_deltas(structs.replace(DELTAS, ended=pack_u32(ended)))


def test_texts_and_ends_count_too() -> None:
    for texts in ([], ["a"], ["a"] * 4):
        with pytest.raises(ProtocolError):
            check_deltas(structs.replace(DELTAS, texts=texts))
    for ends in ((), (END,), (END,) * 3):
        with pytest.raises(ProtocolError, match="ended"):
            check_deltas(structs.replace(DELTAS, ends=ends))


EVENTS = structs.replace(
    DELTAS,
    kinds=pack_u32([EventKind.REASONING, 0, EventKind.CALL_ARGUMENTS | 5 << 8]),
    event_entries=pack_u32([1]),
    events=((AnswerEvent(EventKind.CALL_ENDS),),),
)


@pytest.mark.parametrize(
    "wrong",
    [
        {"kinds": pack_u32([1, 0])},
        {"kinds": pack_u32([1, 1, 1])},  # of an entry with events of its own
        {"kinds": pack_u32([EventKind.CALL_BEGINS, 0, 0])},
        {"kinds": pack_u32([9, 0, 0])},
        {"kinds": pack_u32([EventKind.CALL_ARGUMENTS | MAX_CALLS << 8, 0, 0])},
        {"event_entries": b""},
        {"event_entries": pack_u32([3])},
        {"event_entries": pack_u32([1, 1]), "events": ((), ())},
        {"events": ()},
    ],
)
def test_kinds_and_events_belong_to_entries(wrong: dict[str, Any]) -> None:
    check_deltas(EVENTS)
    with pytest.raises(ProtocolError):
        check_deltas(structs.replace(EVENTS, **wrong))


@settings(max_examples=300)
@given(st.sampled_from(GOOD), st.data())
def test_random_bytes_raise_nothing_else(case: Any, data: Any) -> None:
    check, body = case
    small = st.lists(st.integers(0, 4), max_size=4).map(pack_u32)
    for path in bytes_fields(body):
        if data.draw(st.booleans()):
            body = changed(body, path, data.draw(small | st.binary(max_size=20)))
    if getattr(body, "logprobs", None) is not None:
        width = data.draw(st.integers(-(2**63), 2**64 - 1) | st.integers(0, 3))
        body = changed(body, ("logprobs", "width"), width)
    with contextlib.suppress(ProtocolError):
        check(body)


@given(st.lists(st.integers(0, 2**32 - 1)))
def test_u32_round_trip(values: list[int]) -> None:
    for given_values in (values, np.array(values, np.int64), np.array(values, np.uint32)):
        assert u32(pack_u32(given_values)).tolist() == values


@given(st.lists(st.integers(0, 2**64 - 1)))
def test_u64_round_trip(values: list[int]) -> None:
    assert u64(pack_u64(values)).tolist() == values


@given(st.lists(st.floats(width=32, allow_nan=False)))
def test_f32_round_trip(values: list[float]) -> None:
    assert f32(pack_f32(values)).tolist() == values


def test_columns_are_views_that_cannot_be_written() -> None:
    column = pack_u32([1, 2])
    view = u32(column)
    assert not view.flags.owndata
    with pytest.raises(ValueError, match="read-only"):
        view[0] = 3


@pytest.mark.parametrize(("read", "size"), [(u32, 4), (f32, 4), (u64, 8)])
def test_the_error_names_the_column(read: Callable[..., Any], size: int) -> None:
    with pytest.raises(ProtocolError, match=f"rows: 3 bytes, expected a multiple of {size}"):
        read(b"abc", "rows")
    with pytest.raises(ProtocolError, match="rows: 2 entries, expected 3"):
        read(bytes(2 * size), "rows", 3)
