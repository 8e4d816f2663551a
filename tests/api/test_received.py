"""Positions by handle, found for a whole column at once."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from slipstream.received import Received
from slipstream_ipc.columns import pack_u32

HANDLES = st.lists(st.integers(0, 2**32 - 1), min_size=1, max_size=300, unique=True)


def column(*values: int) -> np.ndarray:
    return np.array(values, np.uint32)


@given(HANDLES, st.data())
def test_positions_stay_with_their_handles(handles: list[int], data: st.DataObject) -> None:
    received: Received[str] = Received()
    expected: dict[int, tuple[int, int]] = {}
    for handle in handles:
        if not received.is_free(handle):
            continue
        position = (handle % 1000, handle % 77)
        received.open(handle, f"item {handle}", *position)
        expected[handle] = position
        assert not received.is_free(handle)
        if data.draw(st.integers(0, 3)) == 0:
            gone = data.draw(st.sampled_from(sorted(expected)))
            received.close(gone)
            assert received.is_free(gone)
            del expected[gone]
        elif data.draw(st.booleans()):
            received.move(handle, 5, 6)
            expected[handle] = (5, 6)
    for handle, position in expected.items():
        assert received.position(handle) == position
    asked = data.draw(st.permutations(sorted(expected))) if expected else []
    chars = column(*[expected[handle][0] for handle in asked])
    tokens = column(*[expected[handle][1] for handle in asked])
    found = received.find(pack_u32(asked), chars, tokens)
    assert found is not None
    assert found.items == [f"item {handle}" for handle in asked]
    received.advance(found.rows, chars + np.uint32(3), tokens + np.uint32(1))
    for handle, (num_chars, num_tokens) in expected.items():
        assert received.position(handle) == (num_chars + 3, num_tokens + 1)


def test_what_is_not_exactly_so_is_not_found() -> None:
    received: Received[str] = Received()
    for handle in (1, 2, 3):
        received.open(handle, "x", 10, 4)
    both = pack_u32([1, 2])
    assert received.find(both, column(10, 10), column(4, 4)) is not None
    assert received.find(both, column(10, 9), column(4, 4)) is None
    assert received.find(both, column(10, 10), column(4, 5)) is None
    assert received.find(pack_u32([1, 9]), column(10, 10), column(4, 4)) is None
    assert received.find(pack_u32([1, 1]), column(10, 10), column(4, 4)) is None
    assert received.find(pack_u32([1, 2 + 64]), column(10, 10), column(4, 4)) is None
    received.close(2)
    assert received.find(both, column(10, 10), column(4, 4)) is None
