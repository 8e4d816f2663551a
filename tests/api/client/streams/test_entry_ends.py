"""Where the entries of a message end: C beside numpy."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.oracles import entry_ends

from slipstream.compiled import ends_of
from slipstream_ipc.columns import pack_u32


def column(*values: int) -> bytes:
    return pack_u32(np.array(values, np.uint32))


NEAR_THE_END = st.integers(0, 9) | st.integers(2**32 - 3, 2**32 - 1)  # hostile, and no error


@given(
    st.lists(st.tuples(NEAR_THE_END, NEAR_THE_END, st.text(max_size=3), st.integers(0, 4))),
    st.booleans(),
    st.sampled_from([ends_of, entry_ends.ends_of]),
)
def test_ends_are_begins_and_what_comes(
    entries: list[tuple[int, int, str, int]], has_counts: bool, found: Any
) -> None:
    chars, tokens, texts, counts = zip(*entries, strict=True) if entries else ([], [], [], [])
    more = counts if has_counts else [1] * len(entries)
    ends = found(
        column(*chars), column(*tokens), list(texts), column(*counts) if has_counts else b""
    )
    assert ends == (
        column(*[(at + len(text)) % 2**32 for at, text in zip(chars, texts, strict=True)]),
        column(*[(at + num) % 2**32 for at, num in zip(tokens, more, strict=True)]),
    )


@pytest.mark.parametrize("columns", [(b"", bytes(4)), (bytes(8), bytes(4)), (bytes(4), bytes(3))])
def test_columns_that_do_not_match_are_refused(columns: tuple[bytes, bytes]) -> None:
    with pytest.raises(ValueError, match="lengths"):
        ends_of(*columns, ["a"], b"")
    with pytest.raises(ValueError, match="lengths"):
        ends_of(bytes(4), bytes(4), ["a"], bytes(8))
    with pytest.raises(TypeError):
        ends_of(bytes(4), bytes(4), [b"a"], b"")  # type: ignore[list-item]
