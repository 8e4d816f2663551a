"""Splits the bytes of an event stream into its events' data (HTML standard, "Server-sent events").

- Events end with an empty line; lines end with LF, CR LF or CR, wherever the bytes were cut.
- Only `data` and `id` count; comments (the usual keep-alive) and other fields are dropped.
"""

from __future__ import annotations

from slipstream_bench.common.load.failures import RequestFailedError

MAX_EVENT_BYTES = 16 * 2**20  # bounds memory if an event never ends


class EventSplitter:
    """Splits one stream. last_id: the id of the last event that had one."""

    __slots__ = ("_rest", "last_id")

    def __init__(self) -> None:
        self._rest = b""
        self.last_id = b""

    def feed(self, piece: bytes) -> list[bytes]:
        """The data of every event that this piece completes.

        Raises: RequestFailedError if an event exceeds MAX_EVENT_BYTES.
        """
        return [data for event in self._events(piece) if (data := self._data(event)) is not None]

    def _events(self, piece: bytes) -> list[bytes]:
        if self._rest:
            piece = self._rest + piece
        held = b""
        if b"\r" in piece:
            if piece.endswith(b"\r"):  # may be the first half of a CR LF
                piece, held = piece[:-1], b"\r"
            piece = piece.replace(b"\r\n", b"\n").replace(b"\r", b"\n")
        *events, rest = piece.split(b"\n\n")
        self._rest = rest + held
        if len(self._rest) > MAX_EVENT_BYTES:
            raise RequestFailedError("malformed", f"an event of more than {MAX_EVENT_BYTES} bytes")
        return events

    def feed_with_ids(self, piece: bytes) -> list[tuple[bytes, bytes]]:
        """As `feed`, each with the value of `last_id` at that event."""
        found: list[tuple[bytes, bytes]] = []
        for event in self._events(piece):
            data = self._data(event)
            if data is not None:
                found.append((self.last_id, data))
        return found

    def _data(self, event: bytes) -> bytes | None:
        if event.startswith(b"data: ") and b"\n" not in event:  # what every server sends
            return event[6:]
        lines: list[bytes] = []
        for line in event.split(b"\n"):
            if line.startswith(b"data:"):
                lines.append(line[5:].removeprefix(b" "))
            elif line.startswith(b"id:"):
                self.last_id = line[3:].removeprefix(b" ")
        return b"\n".join(lines) if lines else None
