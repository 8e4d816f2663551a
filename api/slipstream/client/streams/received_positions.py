"""The position up to which each open stream has been received, kept as columns.

A message of a thousand entries is checked against its streams in a few array operations.

- Items may belong to a group, in which each has a number. A message whose items are all of one
  group is described by the group and the numbers, without looking up its items.
- Most messages have the streams of the previous message and continue where it ended. Their columns
  then equal the expected ones byte for byte, and no row is read. The rows are written when
  something else is looked up.
- The row of a handle is its lowest bits. There are at least twice as many rows as streams, and a
  handle whose row is taken is not assigned, so the rows of a message are found in one operation.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import numpy as np
import numpy.typing as npt

from slipstream.client.streams.plain_deltas import plain_ends
from slipstream.compiled import find_rows, rows_are_at
from slipstream_ipc.columns import u32
from slipstream_ipc.messages import Deltas

Item = TypeVar("Item")
Rows = npt.NDArray[np.intp]

_NOBODY = -1
_LEAST_ROWS = 64


@dataclass(slots=True)
class MessageStreams(Generic[Item]):
    """The streams that a column of handles names."""

    handles: bytes
    rows: Rows
    group_id: int  # the group of all streams; 0 where they belong to several, or to none
    numbers: list[int]  # in the group; empty without one
    items: list[Item]  # empty with a group
    chars: bytes = b""  # u32 column of current positions; empty where only the rows have them
    tokens: bytes = b""
    is_ahead: bool = False  # these are not written to the rows yet
    delivery: Any = None  # how they are given messages, once a `DeltaRelay` has asked for it


class ReceivedPositions(Generic[Item]):
    """Items by client handle, each with its position in characters and tokens."""

    def __init__(self) -> None:
        self._num = 0
        # the streams of the latest message: most messages have the same ones
        self.latest: MessageStreams[Item] | None = None
        self._resize(_LEAST_ROWS)

    def is_free(self, handle: int) -> bool:
        """True if `open` would accept this handle."""
        return self._handles.item(handle & self._mask) == _NOBODY

    def open(
        self,
        handle: int,
        item: Item,
        num_chars: int,
        num_tokens: int,
        *,
        group_id: int = 0,
        number: int = 0,
    ) -> None:
        """Add a stream at a position. Its handle has to be free. group_id: 0 for no group."""
        row = handle & self._mask
        assert self._handles.item(row) == _NOBODY
        self._handles[row], self._items[row] = handle, item
        self._group_ids[row], self._numbers[row] = group_id, number
        self._chars[row], self._tokens[row] = num_chars, num_tokens
        self._num += 1
        if 2 * self._num > len(self._handles):
            self._grow()

    def close(self, handle: int) -> None:
        """Remove a stream that is over."""
        self._write()
        row = handle & self._mask
        assert self._handles.item(row) == handle
        self._handles[row], self._items[row] = _NOBODY, None
        self.latest = None
        self._num -= 1

    def position(self, handle: int) -> tuple[int, int]:
        """The number of characters and tokens received of the stream."""
        if self.latest is not None and self.latest.is_ahead:
            self._write()
        row = handle & self._mask
        return self._chars_at[row], self._tokens_at[row]

    def move(self, handle: int, num_chars: int, num_tokens: int) -> None:
        """Set a stream's position."""
        self._forget()
        row = handle & self._mask
        self._chars_at[row] = num_chars
        self._tokens_at[row] = num_tokens

    def find(self, handles: bytes, chars: bytes, tokens: bytes) -> MessageStreams[Item] | None:
        """The streams of these u32 columns; None unless all are known, distinct and at these
        positions.
        """
        found = self.latest
        if found is None or found.handles != handles:
            self._write()
            found = self._find(handles)
            if found is None:
                return None
            self.latest = found
        elif found.tokens:
            return found if found.tokens == tokens and found.chars == chars else None
        return found if self._are_at(found.rows, chars, tokens) else None

    def _are_at(self, rows: Rows, chars: bytes, tokens: bytes) -> bool:
        return rows_are_at(rows, chars, tokens, self._chars, self._tokens)

    def continued(self, message: Deltas) -> MessageStreams[Item] | None:
        """The streams of a message that has nothing but tokens, their text and candidates for each
        of the streams of the message before it, behind that; None for any other. Sets their
        positions.
        """
        found = self.latest
        if found is None or not found.tokens:
            return None
        ends = plain_ends(message, found.handles, found.chars, found.tokens)
        if ends is None:
            return None
        found.chars, found.tokens = ends
        found.is_ahead = True
        return found

    def _find(self, column: bytes) -> MessageStreams[Item] | None:
        tables = (self._handles, self._scratch, self._group_ids, self._numbers, self._items)
        known = find_rows(column, *tables)
        if known is None:
            return None
        rows, group_id, objects = known
        numbers, items = (objects, []) if group_id else ([], objects)
        return MessageStreams(column, np.frombuffer(rows, np.intp), group_id, numbers, items)

    def advance(self, found: MessageStreams[Item], chars: bytes, tokens: bytes) -> None:
        """Set the positions of the streams that the last call of `find` returned."""
        assert found is self.latest
        found.chars, found.tokens = chars, tokens
        found.is_ahead = True

    def _write(self) -> None:
        """Write the positions in `latest` to the rows."""
        found = self.latest
        if found is not None and found.is_ahead:
            self._chars[found.rows] = u32(found.chars)
            self._tokens[found.rows] = u32(found.tokens)
            found.is_ahead = False

    def _forget(self) -> None:
        """Write the positions in `latest` to the rows and drop them from `latest`."""
        if self.latest is not None and self.latest.tokens:
            self._write()
            self.latest.chars = self.latest.tokens = b""

    def _resize(self, num_rows: int) -> None:
        self.latest = None
        self._mask = num_rows - 1
        self._handles = np.full(num_rows, _NOBODY, np.int64)
        self._chars = np.zeros(num_rows, np.uint32)
        self._tokens = np.zeros(num_rows, np.uint32)
        # memoryviews: faster than numpy for single elements
        self._chars_at, self._tokens_at = self._chars.data, self._tokens.data
        self._scratch = np.zeros(num_rows, np.intp)
        self._group_ids = np.zeros(num_rows, np.int64)
        self._numbers = np.zeros(num_rows, object)
        self._items = np.full(num_rows, None, object)

    def _grow(self) -> None:
        self._write()
        live = np.flatnonzero(self._handles != _NOBODY)
        handles, chars, tokens, items = self._handles, self._chars, self._tokens, self._items
        group_ids, numbers = self._group_ids, self._numbers
        self._resize(2 * len(handles))
        rows = handles[live] & self._mask
        self._handles[rows], self._items[rows] = handles[live], items[live]
        self._group_ids[rows], self._numbers[rows] = group_ids[live], numbers[live]
        self._chars[rows], self._tokens[rows] = chars[live], tokens[live]
