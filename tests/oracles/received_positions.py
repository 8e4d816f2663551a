"""`ReceivedPositions` with its lookups in numpy."""

from __future__ import annotations

from typing import TypeVar

import numpy as np

from slipstream.client.streams.received_positions import MessageStreams, ReceivedPositions, Rows
from slipstream_ipc.columns import u32

Item = TypeVar("Item")


class NumpyPositions(ReceivedPositions[Item]):
    """The same streams and positions."""

    def _are_at(self, rows: Rows, chars: bytes, tokens: bytes) -> bool:
        is_there = (self._tokens[rows] == u32(tokens)).all()
        return bool(is_there and (self._chars[rows] == u32(chars)).all())

    def _find(self, column: bytes) -> MessageStreams[Item] | None:
        handles = u32(column)
        rows = (handles & self._mask).astype(np.intp)
        order = np.arange(len(rows))
        self._scratch[rows] = order
        if not ((self._handles[rows] == handles).all() and (self._scratch[rows] == order).all()):
            return None
        group_ids = self._group_ids[rows]
        group_id = int(group_ids[0]) if len(group_ids) else 0
        if group_id and (group_ids == group_id).all():
            return MessageStreams(column, rows, group_id, self._numbers[rows].tolist(), [])
        return MessageStreams(column, rows, 0, [], self._items[rows].tolist())
