"""The journal of a client process: a record of everything it reads, from which a successor
continues.

- A record is written after the reader has the piece and before it requests the next one, in a
  single `write`: after a kill it is either there or not.
- Each life of a process has its own file: a record cut short by a kill is the last of its file, and
  is dropped.
- Times are time.monotonic, which all processes of a machine share.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from pathlib import Path

import msgspec
from msgspec import Struct, structs

from slipstream_ipc.messages import TEXT_KINDS, AnswerEvent

TokenCandidates = tuple[tuple[int, float, int], ...]  # (id, logprob, rank); the sampled token first

_LENGTH_BYTES = 4


class ReceivedDelta(Struct, frozen=True, array_like=True, tag=True, gc=False):
    """A part of a stream, as its reader received it.

    num_chars, num_tokens: where it begins. prompt_ids: on the first piece of a stream in each life.
    event_id: the id of its event over HTTP. events: of an answer in parts; a call over HTTP has an
    id only if it is no hash of the stream's. usage: over HTTP with the end: tokens of prompt,
    answer and reasoning, and accepted and rejected ones of the prediction.
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
    events: tuple[AnswerEvent, ...] = ()
    usage: tuple[int, ...] | None = None


class AskedAgain(Struct, frozen=True, array_like=True, tag=True, gc=False):
    """The request was sent again. is_afresh: from its beginning, ignoring what was read."""

    index: int
    time_s: float
    why: str
    is_afresh: bool


class Failed(Struct, frozen=True, array_like=True, tag=True, gc=False):
    """The stream ended with an error."""

    index: int
    time_s: float
    error: str


Record = ReceivedDelta | AskedAgain | Failed

_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder[Record](Record).decode


class JournalWriter:
    """Writes records into a new file; thread-safe."""

    def __init__(self, path: str | Path) -> None:
        self._fd = os.open(
            path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND | os.O_CLOEXEC, 0o600
        )

    def write(self, record: Record) -> None:
        """Write the record completely or not at all."""
        body = _encode(record)
        os.write(self._fd, len(body).to_bytes(_LENGTH_BYTES, "little") + body)

    def close(self) -> None:
        """Close the file."""
        os.close(self._fd)


def read_journal(path: str | Path) -> Iterator[Record]:
    """All complete records, in order."""
    content = memoryview(Path(path).read_bytes())
    begin = 0
    while (first := begin + _LENGTH_BYTES) <= len(content):
        end = first + int.from_bytes(content[begin:first], "little")
        if end > len(content):
            return
        yield _decode(content[first:end])
        begin = end


def units_of(events: Iterable[AnswerEvent]) -> list[AnswerEvent]:
    """The events with a character in each text: the same ones however an answer was divided."""
    return [
        unit
        for event in events
        for unit in (
            [structs.replace(event, text=char) for char in event.text]
            if event.kind in TEXT_KINDS
            else [event]
        )
    ]
