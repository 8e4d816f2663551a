"""Ids put aside as columns are those of a list that was appended to."""

from __future__ import annotations

from unittest.mock import patch

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slipstream.client.streams.received_ids import ReceivedIds
from slipstream.compiled import add_received_ids
from slipstream_ipc.columns import pack_u32, u32

IDS = st.lists(st.integers(0, 2**32 - 1), max_size=4)
MESSAGES = st.lists(st.tuples(st.integers(0, 5), IDS), max_size=6)
STEPS = st.lists(
    st.one_of(
        MESSAGES,
        st.sampled_from(["open", "drop", "look"]),
        st.just("handles begin anew"),
        # messages of a run, and how many ids each has of a handle
        st.tuples(st.sets(st.integers(0, 5)), st.integers(0, 3), st.integers(1, 2)),
    ),
    max_size=40,
)


@given(
    STEPS, st.integers(1, 64), st.integers(1, 8), st.sampled_from([1, 2**14, 2**30]), st.booleans()
)
def test_what_is_kept_is_what_came(
    steps: list, most_bytes: int, most_messages: int, stride: int, is_in_c: bool
) -> None:
    """`stride`: how far apart handles are; near ones are sorted in another way than far ones."""
    expected: dict[int, list[int]] = {}
    handle = 0
    opened: set[int] = set()
    kept = ReceivedIds()
    with (
        patch("slipstream.client.streams.received_ids.MOST_BYTES", most_bytes),
        patch("slipstream.client.streams.received_ids._MOST_MESSAGES", most_messages),
        patch(
            "slipstream.client.streams.received_ids.add_received_ids",
            add_received_ids if is_in_c else lambda *_: False,
        ),
    ):
        for step in steps:
            if step == "open":
                while handle in expected:
                    handle += stride
                kept.open(handle)
                expected[handle] = []
                opened.add(handle)
            elif step == "drop" and expected:
                dropped = next(iter(expected))
                kept.drop(dropped)
                kept.drop(dropped)
                del expected[dropped]
            elif step == "handles begin anew":
                handle = 0
            elif step == "look":
                for one, ids in expected.items():
                    assert u32(kept.of(one) or b"").tolist() == ids
            elif isinstance(step, tuple):
                handles = [one * stride for one in step[0] if one * stride in opened]
                if handles:
                    _, run, counts = kept.begin_run(pack_u32(handles))
                    for number in range(step[1]):
                        run += pack_u32([one + number for one in handles for _ in range(step[2])])
                        if step[2] > 1:
                            counts += pack_u32([step[2]] * len(handles))
                for one in handles:
                    if one in expected:
                        expected[one] += [one + at // step[2] for at in range(step[1] * step[2])]
            elif isinstance(step, list):
                entries = [(w * stride, ids) for w, ids in step if w * stride in opened]
                counts = [len(ids) for _, ids in entries]
                kept.add(
                    pack_u32([one for one, _ in entries]),
                    pack_u32([token_id for _, ids in entries for token_id in ids]),
                    b"" if set(counts) == {1} else pack_u32(counts),
                )
                for one, ids in entries:
                    if one in expected:
                        expected[one] += ids
        for which in range(6):
            found = kept.of(which * stride)
            assert (found is None) == (which * stride not in expected)
            if found is not None:
                assert u32(found).tolist() == expected[which * stride]


ID = pack_u32([1])
NOT_MESSAGES = [
    (ID, b"", b""),
    (ID, ID + b"1", b""),
    (ID + b"1", ID, b""),
    (ID, ID, pack_u32([2])),
    (ID, ID, ID + ID),
    (ID + ID, b"", pack_u32([2**32 - 1] * 2)),
]


@pytest.mark.parametrize("message", NOT_MESSAGES)
def test_columns_that_do_not_match_are_refused(message: tuple[bytes, bytes, bytes]) -> None:
    kept = {1: bytearray()}
    with pytest.raises(ValueError, match="column"):
        add_received_ids(kept, [(ID, ID, b""), message])
    for other in ([message[:2]], ["ab"], [(ID, "ab", b"")], message):
        with pytest.raises((TypeError, ValueError)):
            add_received_ids(kept, other)
    with pytest.raises(TypeError):
        add_received_ids({1: b""}, [(ID, ID, b"")])
    assert kept == {1: b""}


def test_what_was_put_aside_for_an_ended_stream_goes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("slipstream.client.streams.received_ids._MOST_MESSAGES", 100)
    kept = ReceivedIds()
    kept.open(7)
    for _ in range(1000):
        kept.add(pack_u32([7]), pack_u32([1]))
    kept.drop(7)
    for _ in range(100):
        kept.add(pack_u32([8]), pack_u32([1]))
    assert kept.of(7) is None
    assert len(kept._recent) < 100
    assert not kept._sorted
