"""Reads HTTP/1.1 answers (RFC 9112) on one connection, wherever their bytes were cut.

It opens no socket and keeps no more than a head, or a chunk's line: pieces of a body go to the
connection as they come. One connection carries one answer at a time; bytes behind it are an error,
since nothing has been asked that they could answer.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import lru_cache
from typing import Protocol

_PROTOCOL = b"HTTP/1."
_MAX_HEAD_BYTES = 2**16
_MAX_LINE_BYTES = 2**12  # a chunk's size with its extensions, a trailer
_SHORT_LINE_BYTES = 20
_STATUS_LINE = re.compile(rb"HTTP/1\.([01]) ([1-5][0-9][0-9])(?: .*)?", re.DOTALL)
_HEADER = re.compile(rb"([!#$%&'*+\-.^_`|~0-9A-Za-z]+):[ \t]*(.*?)[ \t]*", re.DOTALL)
_LENGTH = re.compile(rb"[0-9]{1,15}")
_SIZE = re.compile(rb"([0-9A-Fa-f]{1,15})[ \t]*(?:;.*)?", re.DOTALL)
_WITHOUT_BODY = (204, 304)


class MalformedResponseError(ValueError):
    """A server's answer is not HTTP."""


class ResponseReader(Protocol):
    """The callbacks of a parser, in the order of an answer's parts."""

    def on_head(self, status: int) -> None:
        """The answer's head is complete."""

    def on_body(self, piece: bytes) -> None:
        """A piece of its body, which is not empty."""

    def on_end(self) -> None:
        """The answer is complete."""


class ResponseParser:
    """One connection's answers. keeps_alive: whether another request may be sent after the answer
    that was read last.
    """

    __slots__ = ("_at", "_data", "_left", "_read", "_reader", "keeps_alive")

    def __init__(self, reader: ResponseReader) -> None:
        self._reader = reader
        self._data = b""  # what has arrived; read up to _at
        self._at = 0
        self._left = 0  # bytes of the body or of the chunk
        self._read = self._head
        self.keeps_alive = True

    def begin(self) -> None:
        """Another request is sent."""
        self._read = self._head

    def feed(self, data: bytes) -> None:
        """Read what has arrived. Raises: MalformedResponseError."""
        self._data = self._data + data if self._data else data
        self._at = 0
        while self._at < len(self._data) and self._read():
            pass
        self._data = self._data[self._at :]

    def end(self) -> bool:
        """The connection has ended: whether that ends the answer, as it does where nothing else
        says how long it is.
        """
        if self._read != self._until_closed:
            return False
        self._finish()
        return True

    # ---- each reads what it can; False if it needs more ------------------------------------------

    def _head(self) -> bool:
        end = self._data.find(b"\r\n\r\n", self._at)
        head = self._data[self._at : end if end >= 0 else None]
        if not head.startswith(_PROTOCOL[: len(head)]):
            raise MalformedResponseError(f"it begins with {head[:40]!r}")
        if len(head) > _MAX_HEAD_BYTES:
            raise MalformedResponseError(f"a head of more than {_MAX_HEAD_BYTES} bytes")
        if end < 0:
            return False
        self._at = end + 4
        first, *lines = head.split(b"\r\n")
        line = _STATUS_LINE.fullmatch(first)
        if line is None:
            raise MalformedResponseError(f"it begins with {first[:40]!r}")
        status = int(line[2])
        if status < 200:  # another head follows
            return True
        fields = _fields(lines)
        said = {word.strip().lower() for word in fields.get(b"connection", b"").split(b",")}
        self.keeps_alive = b"close" not in said and (line[1] == b"1" or b"keep-alive" in said)
        self._read = self._body_of(status, fields)
        self._reader.on_head(status)
        if self._read == self._sized and not self._left:
            self._finish()
        return True

    def _body_of(self, status: int, fields: dict[bytes, bytes]) -> Callable[[], bool]:
        """Return the method that reads the body, by the head's fields."""
        coding, length = fields.get(b"transfer-encoding"), fields.get(b"content-length")
        self._left = 0
        if coding is not None:
            if coding.lower() != b"chunked" or length is not None:
                raise MalformedResponseError(f"transfer-encoding: {coding[:40]!r}, or a length too")
            return self._chunk_size
        if status in _WITHOUT_BODY:
            return self._sized
        if length is None:
            self.keeps_alive = False
            return self._until_closed
        if _LENGTH.fullmatch(length) is None:
            raise MalformedResponseError(f"content-length: {length[:40]!r}")
        self._left = int(length)
        return self._sized

    def _sized(self) -> bool:
        self._give_piece()
        if not self._left:
            self._finish()
        return True

    def _until_closed(self) -> bool:
        self._left = len(self._data)
        self._give_piece()
        return True

    def _chunk_size(self) -> bool:
        self._give_whole_chunks()
        line = self._line()
        if line is None:
            return False
        self._left = _size_of(line)
        self._read = self._chunk if self._left else self._trailer
        return True

    def _give_whole_chunks(self) -> None:
        """Read the chunks that are there from their size to their end, but for the last one: what
        most events are.
        """
        data, on_body, find = self._data, self._reader.on_body, self._data.find
        while (end := find(b"\r\n", self._at, self._at + _SHORT_LINE_BYTES)) > 0:
            begin = end + 2
            stop = begin + _size_of(data[self._at : end])
            if stop == begin or data[stop : stop + 2] != b"\r\n":
                return
            self._at = stop + 2
            on_body(data[begin:stop])

    def _chunk(self) -> bool:
        self._give_piece()
        if not self._left:
            self._read = self._chunk_end
        return True

    def _chunk_end(self) -> bool:
        end = self._data[self._at : self._at + 2]
        if end == b"\r":
            return False
        if end != b"\r\n":
            raise MalformedResponseError(f"behind a chunk: {end!r}")
        self._at += 2
        self._read = self._chunk_size
        return True

    def _trailer(self) -> bool:
        line = self._line()
        if line == b"":
            self._finish()
        return line is not None

    def _idle(self) -> bool:
        raise MalformedResponseError(f"behind an answer: {self._data[self._at : self._at + 40]!r}")

    # ----------------------------------------------------------------------------------------------

    def _finish(self) -> None:
        self._read = self._idle
        self._reader.on_end()

    def _give_piece(self) -> None:
        piece = self._data[self._at : self._at + self._left]
        self._at += len(piece)
        self._left -= len(piece)
        self._reader.on_body(piece)

    def _line(self) -> bytes | None:
        end = self._data.find(b"\r\n", self._at, self._at + _MAX_LINE_BYTES + 2)
        if end < 0:
            if len(self._data) - self._at > _MAX_LINE_BYTES + 1:
                raise MalformedResponseError(f"a line of more than {_MAX_LINE_BYTES} bytes")
            return None
        line = self._data[self._at : end]
        self._at = end + 2
        return line


@lru_cache(4096)
def _size_of(line: bytes) -> int:
    """The size in a chunk's first line."""
    size = _SIZE.fullmatch(line)
    if size is None:
        raise MalformedResponseError(f"a chunk's size: {line[:40]!r}")
    return int(size[1], 16)


def _fields(lines: list[bytes]) -> dict[bytes, bytes]:
    """Values by name in lower case; of a name that comes twice, both, with a comma between."""
    fields: dict[bytes, bytes] = {}
    for line in lines:
        field = _HEADER.fullmatch(line)
        if field is None:
            raise MalformedResponseError(f"a header: {line[:40]!r}")
        name = field[1].lower()
        fields[name] = b", ".join([fields[name], field[2]]) if name in fields else field[2]
    return fields
