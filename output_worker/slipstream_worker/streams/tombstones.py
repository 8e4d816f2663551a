"""A set of stream ids of fixed size that drops the oldest, each with the highest `moves` added.

- Two tables of 64-bit hashes with open addressing: ids are added to one of them; when it is half
  full, the other is emptied and takes its place. The last `least` ids are always known, up to twice
  as many sometimes, and an id costs 24 to 48 bytes instead of the 150 of a dict.
- The hash is Python's own hash of bytes, which is keyed at random per process, so clients cannot
  construct ids that collide. Two ids whose 64 bits are equal are not told apart.
"""

from __future__ import annotations

_HASH_MASK = 2**64 - 1
_ZEROS = memoryview(bytes(2**15)).cast("Q")  # a table is emptied in place, piece by piece


class Tombstones:
    """The ids added last. least: number of ids known at least, a power of two."""

    def __init__(self, least: int) -> None:
        assert least & (least - 1) == 0
        self._least = least
        self._mask = 2 * least - 1
        self._new = self._empty()
        self._old = self._empty()
        self._new_moves = self._no_moves()  # by the index of the id; of empty cells they are old
        self._old_moves = self._no_moves()
        self._num_new = 0

    def add(self, stream_id: bytes, moves: int = 0) -> None:
        """Add an id."""
        moves = max(moves, self.moves_of(stream_id))
        if self._num_new == self._least:
            self._old, self._new = self._new, self._old
            self._old_moves, self._new_moves = self._new_moves, self._old_moves
            for begin in range(0, len(self._new), len(_ZEROS)):
                self._new[begin : begin + len(_ZEROS)] = _ZEROS[: len(self._new) - begin]
            self._num_new = 0
        table, key = self._new, _key_of(stream_id)
        index = self._find(table, key)
        if not table[index]:
            table[index] = key
            self._num_new += 1
        self._new_moves[index] = moves

    def __contains__(self, stream_id: bytes) -> bool:
        return self.moves_of(stream_id) >= 0

    def moves_of(self, stream_id: bytes) -> int:
        """The moves of an id; -1 where it is not known."""
        key = _key_of(stream_id)
        for table, moves in ((self._new, self._new_moves), (self._old, self._old_moves)):
            index = self._find(table, key)
            if table[index]:
                return moves[index]
        return -1

    def _find(self, table: memoryview[int], key: int) -> int:
        """The index of the key, or of the empty cell for it."""
        index = key & self._mask
        while table[index] and table[index] != key:
            index = (index + 1) & self._mask
        return index

    def _empty(self) -> memoryview[int]:
        # `b"\0" * n`, not `bytearray(n)`: that would commit its memory page by page, later
        return memoryview(bytearray(b"\0") * (8 * (self._mask + 1))).cast("Q")

    def _no_moves(self) -> memoryview[int]:
        return memoryview(bytearray(b"\0") * (4 * (self._mask + 1))).cast("I")


def _key_of(stream_id: bytes) -> int:
    return hash(stream_id) & _HASH_MASK or 1  # 0 marks an empty cell
