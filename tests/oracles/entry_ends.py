"""The positions at which the entries of a message of deltas end, in numpy."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from slipstream_ipc.columns import u32


def ends_of(
    chars: bytes, tokens: bytes, texts: Sequence[str], counts: bytes
) -> tuple[bytes, bytes]:
    """The positions at which a message's entries end.

    chars, tokens: u32 columns of where they begin. counts: u32 column of tokens to an entry; empty
    means one each.
    """
    lens = np.fromiter(map(len, texts), np.uint32, len(texts))
    more = u32(counts) if counts else np.uint32(1)
    return (u32(chars) + lens).tobytes(), (u32(tokens) + more).tobytes()
