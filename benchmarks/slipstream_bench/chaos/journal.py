"""What a client process has read, written down as it reads: a successor goes on from there.

Owns: the records, the file's form, the reading of a file whose writer was killed. Does not know:
clients, what the records are compared with.

Rules:
- A record is written when the reader has the piece and before it asks for the next one; in one
  `write`, so it is there or not there once the process is killed.
- Each life of a process has a file of its own: a record that was cut short by its writer's death is
  the last of its file, and is dropped.
- Times are time.monotonic, which all processes of a machine share.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import msgspec
from msgspec import Struct

TokenCandidates = tuple[tuple[int, float, int], ...]  # id, log-probability, rank; its own first

_LENGTH_BYTES = 4


class Piece(Struct, frozen=True, array_like=True, tag=True, gc=False):
    """A part of a stream, as its reader got it.

    num_chars, num_tokens: where it begins. prompt_ids: with a life's first piece of a stream.
    event_id: over HTTP, of its event.
    """

    index: int
    time_s: float
    num_chars: int
    num_tokens: int
    text: str
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[TokenCandidates, ...] | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    prompt_ids: tuple[int, ...] | None = None
    event_id: str = ""


class AskedAgain(Struct, frozen=True, array_like=True, tag=True, gc=False):
    """The request was made anew. is_afresh: what was read before counts for nothing."""

    index: int
    time_s: float
    why: str
    is_afresh: bool


class Failed(Struct, frozen=True, array_like=True, tag=True, gc=False):
    """The stream ended with an error."""

    index: int
    time_s: float
    error: str


Record = Piece | AskedAgain | Failed

_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder[Record](Record).decode


class JournalWriter:
    """Writes records into a file, a new one; any thread may."""

    def __init__(self, path: str | Path) -> None:
        self._fd = os.open(
            path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND | os.O_CLOEXEC, 0o600
        )

    def write(self, record: Record) -> None:
        """Write it, or nothing."""
        body = _encode(record)
        os.write(self._fd, len(body).to_bytes(_LENGTH_BYTES, "little") + body)

    def close(self) -> None:
        """No more comes."""
        os.close(self._fd)


def read_journal(path: str | Path) -> Iterator[Record]:
    """Every whole record, in order."""
    content = memoryview(Path(path).read_bytes())
    begin = 0
    while (first := begin + _LENGTH_BYTES) <= len(content):
        end = first + int.from_bytes(content[begin:first], "little")
        if end > len(content):
            return
        yield _decode(content[first:end])
        begin = end
