"""The log-probabilities of a block's tokens, held as compressed JSON until the block's end.

A token with twenty candidates takes 1.4 KB of JSON, so as it is a stream of some thousand tokens
would hold several MiB while it runs; compressed, a quarter of that.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence

from msgspec import Raw

_PIECE_BYTES = 2**16  # compressed at once: 1 ms
_LEVEL = 1  # the next ones save a tenth more in twice the time


class HeldLogprobs:
    """JSON objects, one for each token. num_bytes: of their JSON."""

    __slots__ = ("_last", "_num_last", "_pieces", "num_bytes")

    def __init__(self) -> None:
        self.num_bytes = 0
        self._pieces: list[bytes] = []  # compressed
        self._last: list[Raw] = []  # of the piece that grows
        self._num_last = 0  # bytes

    def add(self, tokens: Sequence[Raw]) -> None:
        """Add the tokens that follow."""
        for token in tokens:
            num_bytes = memoryview(token).nbytes
            self.num_bytes += num_bytes
            self._num_last += num_bytes
            self._last.append(token)
            if self._num_last >= _PIECE_BYTES:
                self._pieces.append(zlib.compress(b",".join(self._last), _LEVEL))
                self._last, self._num_last = [], 0

    def array(self) -> Raw:
        """All of them, as a JSON array."""
        pieces = [zlib.decompress(piece) for piece in self._pieces]
        if self._last:
            pieces.append(b",".join(self._last))
        return Raw(b"[" + b",".join(pieces) + b"]")
