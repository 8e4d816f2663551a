"""The ids by which a client resumes: the id of an answer, and the ids of its stream's events.

- The id of an answer (`id` in its body) names all its streams: `cmpl-`, `chatcmpl-` or `gen-`, the
  first stream's id and, if there are several, `.PxN` for P prompts with N answers each. The other
  stream ids are hashes of the first, so only a holder of the answer's id can read them.
- The id of an event holds the answer's id, how the answer is written, a checksum of the request,
  and a cursor for each stream with a checksum of its tokens. Any front can continue from it, even
  one that has never seen the answer. If the streams are gone, the same request is computed again
  and continues after the event, provided that its tokens up to there have the same checksum.
- Ids are opaque to clients. An event id made by an earlier version is refused.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from hashlib import blake2b
from zlib import crc32

import msgspec

from slipstream.http.errors import ApiError, bad_field
from slipstream_ipc.messages import Submit

MAX_PLACES = 128  # streams; with more, events get no ids, which would be longer than the events
_ANSWER = re.compile(r"(cmpl|chatcmpl|gen)-([0-9a-f]{32})(?:\.([1-9]\d{0,3})x([1-9]\d{0,3}))?")
_NUMBER = r"(0|[1-9]\d{0,9})"
_OPTIONS = re.compile(_NUMBER + r"(?:l(0|[1-9]\d{0,6}))?(?:(u)(c)?(U)?)?")
_OFFSET = rf"\.{_NUMBER}\.((?:[0-9a-f]{{2}}){{0,3}})"
_PLACE = re.compile(rf"{_NUMBER}\.{_NUMBER}\.{_NUMBER}(?:{_OFFSET})?(e)?")
_REQUEST = re.compile(_NUMBER)
_NOTHING = b"-"
_SYNTAX = "an id as a stream's events have it"
_PARTS, _OLD_PARTS = 4, 3
_OLD = "which an earlier version of this server made: ask for the answer from its beginning"


@dataclass(frozen=True, slots=True)
class AnswerId:
    """The id of an answer. kind: `cmpl`, `chatcmpl` or `gen`. first: the first stream's id, 16
    bytes.
    """

    kind: str
    first: bytes
    num_prompts: int = 1
    num_answers: int = 1  # per prompt

    @property
    def num_streams(self) -> int:
        """The number of choices of the answer."""
        return self.num_prompts * self.num_answers

    def stream_ids(self) -> list[str]:
        """The ids of all streams, 32 hexadecimal digits each."""
        rest = range(1, self.num_streams)
        return [self.first.hex(), *(_following(self.first, number).hex() for number in rest)]

    def __str__(self) -> str:
        several = f".{self.num_prompts}x{self.num_answers}" if self.num_streams > 1 else ""
        return f"{self.kind}-{self.first.hex()}{several}"


@dataclass(frozen=True, slots=True)
class Place:
    """A client's cursor in one stream: what it has received, in characters and tokens.

    checksum: `history_checksum` of the tokens. has_begun: the chunk that precedes the text, if the
    shape has one, has been sent.
    """

    num_chars: int = 0
    num_tokens: int = 0
    checksum: int = 0
    text_offset: int = 0  # where the next token's text begins, as in a completion's logprobs
    pending: bytes = b""  # of an incomplete character at the end of the tokens
    has_ended: bool = False  # the end has been sent
    has_begun: bool = True


@dataclass(frozen=True, slots=True)
class Told:
    """The content of an event id: what the client has of an answer, and how it is written.

    request: `checksum_of` the submits; None if they are not known.
    """

    answer: AnswerId
    created: int  # Unix time, s
    num_logprobs: int | None
    with_usage: bool
    with_usage_so_far: bool
    places: tuple[Place, ...]
    is_usage_told: bool = False
    request: int | None = None


class EventIds:
    """Writes the event ids of one answer."""

    def __init__(self, told: Told) -> None:
        self._told = told
        self._places = [_place_text(place, told) for place in told.places]
        self._prefix = self._new_prefix()
        self._is_alone = len(told.places) == 1
        self._has_offsets = told.num_logprobs is not None

    def move(self, index: int, place: Place) -> None:
        """Set the cursor of one stream."""
        self._places[index] = _place_text(place, self._told)

    def move_on(
        self, index: int, num_chars: int, num_tokens: int, checksum: int, offset: int, raw: bytes
    ) -> bytes:
        """`move` and `line` in one, for a stream that has begun and not ended. raw: `pending`."""
        if self._has_offsets:
            numbers = (num_chars, num_tokens, checksum, offset, raw.hex().encode())
            place = b"%d.%d.%d.%d.%b" % numbers
        else:
            place = b"%d.%d.%d" % (num_chars, num_tokens, checksum)
        self._places[index] = place
        return b"%b%b\n" % (self._prefix, place) if self._is_alone else self.line()

    def tell_usage(self) -> None:
        """The usage has been sent."""
        self._told = replace(self._told, is_usage_told=True)
        self._prefix = self._new_prefix()

    def line(self) -> bytes:
        """The `id:` line of the next event."""
        return self._prefix + b",".join(self._places) + b"\n"

    def _new_prefix(self) -> bytes:
        told = self._told
        logprobs = "" if told.num_logprobs is None else f"l{told.num_logprobs}"
        usage = "u" * told.with_usage + "c" * told.with_usage_so_far + "U" * told.is_usage_told
        request = "" if told.request is None else f"{told.request}"
        return f"id: {told.answer}/{told.created}{logprobs}{usage}/{request}/".encode()


def parse_answer_id(text: str, field: str = "id") -> AnswerId:
    """Parse the id of an answer. Raises: ApiError, which names `field`."""
    found = _ANSWER.fullmatch(text)
    if found is None:
        allowed = "the `id` of an answer: cmpl-…, chatcmpl-… or gen-…"
        raise bad_field(field, f"{field}: got {text[:100]!r}, allowed: {allowed}")
    kind, first, num_prompts, num_answers = found.groups("1")
    return AnswerId(kind, bytes.fromhex(first), int(num_prompts), int(num_answers))


def parse_event_id(text: str) -> Told:
    """Parse the id of an event. Raises: ApiError."""
    parts = text.split("/")
    if len(parts) == _OLD_PARTS and _OPTIONS.fullmatch(parts[1]):
        raise bad_field("last-event-id", f"last-event-id: got {text[:200]!r}, {_OLD}")
    if len(parts) != _PARTS:
        raise _wrong(text)
    answer = parse_answer_id(parts[0], "last-event-id")
    options = _OPTIONS.fullmatch(parts[1])
    places = [_parse_place(part) for part in parts[3].split(",")]
    told = tuple([place for place in places if place is not None])
    if options is None or len(told) != len(places) or len(told) != answer.num_streams:
        raise _wrong(text)
    if parts[2] and not _REQUEST.fullmatch(parts[2]):
        raise _wrong(text)
    created, num_logprobs, usage, usage_so_far, usage_told = options.groups()
    return Told(
        answer,
        int(created),
        int(num_logprobs) if num_logprobs is not None else None,
        with_usage=usage is not None,
        with_usage_so_far=usage_so_far is not None,
        places=told,
        is_usage_told=usage_told is not None,
        request=int(parts[2]) if parts[2] else None,
    )


def checksum_of(submits: Sequence[Submit], num_answers: int) -> int:
    """A CRC-32 of a request, independent of its stream ids.

    submits: `num_answers` in a row for each prompt. Only the first of them is hashed as a whole,
    of the others only the sampling parameters.
    """
    found = 0
    for number, submit in enumerate(submits):
        if number % num_answers:
            found = crc32(submit.params, found)
        else:
            plain = msgspec.structs.replace(submit, handle=0, stream_id=bytes(16))
            found = crc32(msgspec.msgpack.encode(plain), found)
    return found


def _following(first: bytes, number: int) -> bytes:
    return blake2b(first + number.to_bytes(4, "little"), digest_size=16).digest()


def _parse_place(text: str) -> Place | None:
    if text == _NOTHING.decode():
        return Place(has_begun=False)
    found = _PLACE.fullmatch(text)
    if found is None:
        return None
    chars, tokens, checksum, offset, pending, end = found.groups("")
    told = int(chars), int(tokens), int(checksum)
    return Place(*told, int(offset or 0), bytes.fromhex(pending), bool(end))


def _place_text(place: Place, told: Told) -> bytes:
    if not place.has_begun:
        return _NOTHING
    end = b"e" if place.has_ended else b""
    if told.num_logprobs is None:
        return b"%d.%d.%d%b" % (place.num_chars, place.num_tokens, place.checksum, end)
    numbers = (place.num_chars, place.num_tokens, place.checksum, place.text_offset)
    return b"%d.%d.%d.%d.%b%b" % (*numbers, place.pending.hex().encode(), end)


def _wrong(text: str) -> ApiError:
    return bad_field("last-event-id", f"last-event-id: got {text[:200]!r}, allowed: {_SYNTAX}")
