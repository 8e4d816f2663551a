"""The positions at which the entries of a message of deltas end, by its columns."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

from slipstream_ipc.columns import u32
from slipstream_ipc.native.extension import load_extension

EntryEnds = tuple[bytes, bytes]  # u32 columns of characters and tokens
EndsOf = Callable[[bytes, bytes, Sequence[str], bytes], EntryEnds]


def ends_of(chars: bytes, tokens: bytes, texts: Sequence[str], counts: bytes) -> EntryEnds:
    """The positions at which a message's entries end.

    chars, tokens: u32 columns of where they begin. counts: u32 column of tokens to an entry; empty
    means one each.
    """
    lens = np.fromiter(map(len, texts), np.uint32, len(texts))
    more = u32(counts) if counts else np.uint32(1)
    return (u32(chars) + lens).tobytes(), (u32(tokens) + more).tobytes()


def native_ends_of() -> EndsOf:
    """`ends_of` in C, where that is to be had."""
    native = load_extension("entry_ends", Path(__file__).with_name("entry_ends.c"))
    return ends_of if native is None else native.ends_of
