"""The ids by which a client resumes: the id of an answer, and the ids of its stream's events.

- The id of an answer (`id` in its body) names all its streams: `cmpl-`, `chatcmpl-`, `gen-`, `msg_`
  or `resp_`, the first stream's id and, if there are several, `.PxN` for P prompts with N answers
  each. The other stream ids are hashes of the first, so only a holder of the answer's id can read
  them. Those of one prompt's answers are dealt to one output worker.
- The id of an event holds the answer's id, how the answer is written, a checksum of the request,
  and a cursor for each stream with a checksum of its tokens. Any front can continue from it, even
  one that has never seen the answer. If the streams are gone, the same request is computed again
  and continues after the event, provided that its tokens up to there have the same checksum.
- Of an answer that is printed by blocks, a cursor holds the event's number (`block_printer`). Its
  tokens are those that the server had taken, so those of the event or a few more.
- Ids are opaque to clients. An event id in an earlier format is refused.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from hashlib import blake2b
from zlib import crc32

import msgspec

from slipstream.http.api_errors import ApiError, bad_field
from slipstream_ipc.messages import Submit
from slipstream_ipc.worker_deal import dealt_with

MAX_CURSORS = 128  # streams; with more, events get no ids, which would be longer than the events
BLOCK_KINDS = ("msg", "resp")  # answers of these kinds are printed by blocks
_ANSWER = re.compile(
    r"(?:(cmpl|chatcmpl|gen)-|(msg|resp)_)([0-9a-f]{32})(?:\.([1-9]\d{0,3})x([1-9]\d{0,3}))?"
)
_NUMBER = r"(0|[1-9]\d{0,9})"
_OPTIONS = re.compile(_NUMBER + r"(?:l(0|[1-9]\d{0,6})(a)?)?(?:(u)(c)?(U)?)?(s)?")
_OFFSET = rf"\.{_NUMBER}\.((?:[0-9a-f]{{2}}){{0,3}})"
_CURSOR = re.compile(rf"{_NUMBER}\.{_NUMBER}\.{_NUMBER}(?:{_OFFSET})?(t)?(e)?")
_BLOCK_CURSOR = re.compile(rf"n{_NUMBER}\.{_NUMBER}\.{_NUMBER}")
_REQUEST = re.compile(_NUMBER)
_NOTHING = b"-"
_SYNTAX = "the id of a stream's event"
_PARTS, _OLD_PARTS = 4, 3
_OLD = "made by an earlier version of this server: request the answer from its beginning"


@dataclass(frozen=True, slots=True)
class AnswerId:
    """The id of an answer. kind: `cmpl`, `chatcmpl`, `gen`, `msg` or `resp`. first: the first
    stream's id, 16 bytes.
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
        ids = [self.first, *(_following(self.first, at) for at in range(1, self.num_streams))]
        for at, each in enumerate(ids):
            ids[at] = dealt_with(ids[at - at % self.num_answers], each)  # one worker for a prompt
        return [each.hex() for each in ids]

    def __str__(self) -> str:
        several = f".{self.num_prompts}x{self.num_answers}" if self.num_streams > 1 else ""
        sign = "_" if self.kind in BLOCK_KINDS else "-"
        return f"{self.kind}{sign}{self.first.hex()}{several}"


@dataclass(frozen=True, slots=True)
class StreamCursor:
    """A client's cursor in one stream: what it has received, in characters and tokens.

    It is at a unit of the stream's events, so nothing else has to be known of a call or of the
    reasoning that it is in.

    checksum: `history_checksum` of the tokens. has_begun: the chunk that precedes the text, if the
    shape has one, has been sent. number: of the last event, if the answer is printed by blocks;
    num_chars is 0 then.
    """

    num_chars: int = 0
    num_tokens: int = 0
    checksum: int = 0
    text_offset: int = 0  # where the next token's text begins, as in a completion's logprobs
    pending: bytes = b""  # of an incomplete character at the end of the tokens
    has_ended: bool = False  # the end has been sent
    has_begun: bool = True
    has_called: bool = False  # a tool call has ended, which the finish reason depends on
    number: int | None = None


@dataclass(frozen=True, slots=True)
class EventId:
    """The content of an event id: what the client has of an answer, and how it is written.

    request: `checksum_of` the submits; None if they are not known.
    """

    answer: AnswerId
    created: int  # Unix time, s
    num_logprobs: int | None
    with_usage: bool
    with_usage_so_far: bool
    cursors: tuple[StreamCursor, ...]
    is_usage_sent: bool = False
    request: int | None = None
    has_all_logprobs: bool = False  # also of tokens that are not content
    names_calls: bool = True  # a call's finish reason is `tool_calls`, else `stop`


class EventCursor:
    """A `StreamCursor` that moves: what has been taken of a stream.

    prefix: what precedes the numbers in the `id:` line of an event that is nothing but text.
    """

    __slots__ = ("checksum", "num_chars", "num_tokens", "prefix")

    def __init__(self, begin: StreamCursor) -> None:
        self.num_chars = begin.num_chars
        self.num_tokens = begin.num_tokens
        self.checksum = begin.checksum
        self.prefix = b""


class EventIdWriter:
    """Writes the event ids of one answer.

    text_prefix: what precedes the three numbers of an answer's only stream in an id; b"" where ids
    say more.
    """

    def __init__(self, event_id: EventId) -> None:
        self._event_id = event_id
        self._cursors = [_cursor_text(cursor, event_id) for cursor in event_id.cursors]
        self._prefix = self._new_prefix()
        self._is_alone = len(event_id.cursors) == 1
        self._has_offsets = event_id.num_logprobs is not None
        self.text_prefix = self._prefix if self._is_alone and not self._has_offsets else b""

    def set_cursor(self, index: int, cursor: StreamCursor) -> None:
        """Set the cursor of one stream."""
        self._cursors[index] = _cursor_text(cursor, self._event_id)

    def advance(
        self,
        index: int,
        num_chars: int,
        num_tokens: int,
        checksum: int,
        offset: int,
        raw: bytes,
        has_called: bool = False,
    ) -> bytes:
        """`set_cursor` and `line` in one, for a stream that has begun and not ended.

        raw: the cursor's `pending`.
        """
        if self._has_offsets:
            numbers = (num_chars, num_tokens, checksum, offset, raw.hex().encode())
            cursor = b"%d.%d.%d.%d.%b" % numbers
        else:
            cursor = b"%d.%d.%d" % (num_chars, num_tokens, checksum)
        if has_called:
            cursor += b"t"
        self._cursors[index] = cursor
        return b"%b%b\n" % (self._prefix, cursor) if self._is_alone else self.line()

    def advance_to(self, number: int, num_tokens: int, checksum: int) -> bytes:
        """The `id:` line of the next event of an answer that is printed by blocks."""
        return b"%bn%d.%d.%d\n" % (self._prefix, number, num_tokens, checksum)

    def set_usage_sent(self) -> None:
        """The usage has been sent."""
        self._event_id = replace(self._event_id, is_usage_sent=True)
        self._prefix = self._new_prefix()

    def line(self) -> bytes:
        """The `id:` line of the next event."""
        return self._prefix + b",".join(self._cursors) + b"\n"

    def _new_prefix(self) -> bytes:
        its = self._event_id
        logprobs = "" if its.num_logprobs is None else f"l{its.num_logprobs}"
        logprobs += "a" * (its.has_all_logprobs and its.num_logprobs is not None)
        usage = "u" * its.with_usage + "c" * its.with_usage_so_far + "U" * its.is_usage_sent
        finish = "s" * (not its.names_calls)
        request = "" if its.request is None else f"{its.request}"
        return f"id: {its.answer}/{its.created}{logprobs}{usage}{finish}/{request}/".encode()


def parse_answer_id(text: str, field: str = "id") -> AnswerId:
    """Parse the id of an answer. Raises: ApiError, which names `field`."""
    found = _ANSWER.fullmatch(text)
    if found is None:
        allowed = "the `id` of an answer: cmpl-…, chatcmpl-…, gen-…, msg_… or resp_…"
        raise bad_field(field, f"{field}: got {text[:100]!r}, allowed: {allowed}")
    kind, block_kind, first, num_prompts, num_answers = found.groups("1")
    kind = block_kind if found[1] is None else kind
    return AnswerId(kind, bytes.fromhex(first), int(num_prompts), int(num_answers))


def parse_event_id(text: str) -> EventId:
    """Parse the id of an event. Raises: ApiError."""
    parts = text.split("/")
    if len(parts) == _OLD_PARTS and _OPTIONS.fullmatch(parts[1]):
        raise bad_field("last-event-id", f"last-event-id: got {text[:200]!r}, {_OLD}")
    if len(parts) != _PARTS:
        raise _wrong(text)
    answer = parse_answer_id(parts[0], "last-event-id")
    options = _OPTIONS.fullmatch(parts[1])
    is_by_blocks = answer.kind in BLOCK_KINDS
    parse = _parse_block_cursor if is_by_blocks else _parse_cursor
    found = [parse(part) for part in parts[3].split(",")]
    cursors = tuple([cursor for cursor in found if cursor is not None])
    if options is None or len(cursors) != len(found) or len(cursors) != answer.num_streams:
        raise _wrong(text)
    if parts[2] and not _REQUEST.fullmatch(parts[2]):
        raise _wrong(text)
    created, num_logprobs, all_logprobs, usage, usage_so_far, usage_sent, finish = options.groups()
    return EventId(
        answer,
        int(created),
        int(num_logprobs) if num_logprobs is not None else None,
        with_usage=usage is not None,
        with_usage_so_far=usage_so_far is not None,
        cursors=cursors,
        is_usage_sent=usage_sent is not None,
        request=int(parts[2]) if parts[2] else None,
        has_all_logprobs=all_logprobs is not None,
        names_calls=finish is None,
    )


def checksum_of(submits: Sequence[Submit], num_answers: int) -> int:
    """A CRC-32 of a request, independent of its stream ids, labels, tenant, traces and records, and
    of the version of its adapter.

    submits: `num_answers` in a row for each prompt. Only the first of them is hashed as a whole,
    of the others only the sampling parameters.
    """
    found = 0
    for number, submit in enumerate(submits):
        if number % num_answers:
            found = crc32(submit.params, found)
        else:
            without_ids = msgspec.structs.replace(
                submit,
                handle=0,
                stream_id=bytes(16),
                label="",
                tenant=b"",
                scope=b"",
                trace=None,
                keep=None,
                adapter_digest=b"",
            )
            found = crc32(msgspec.msgpack.encode(without_ids), found)
    return found


def _following(first: bytes, number: int) -> bytes:
    return blake2b(first + number.to_bytes(4, "little"), digest_size=16).digest()


def _parse_cursor(text: str) -> StreamCursor | None:
    if text == _NOTHING.decode():
        return StreamCursor(has_begun=False)
    found = _CURSOR.fullmatch(text)
    if found is None:
        return None
    chars, tokens, checksum, offset, pending, called, end = found.groups("")
    numbers = int(chars), int(tokens), int(checksum), int(offset or 0)
    pending_bytes = bytes.fromhex(pending)
    return StreamCursor(*numbers, pending_bytes, bool(end), has_called=bool(called))


def _parse_block_cursor(text: str) -> StreamCursor | None:
    found = _BLOCK_CURSOR.fullmatch(text)
    if found is None:
        return None
    number, num_tokens, checksum = map(int, found.groups())
    return StreamCursor(0, num_tokens, checksum, number=number)


def _cursor_text(cursor: StreamCursor, event_id: EventId) -> bytes:
    if not cursor.has_begun:
        return _NOTHING
    end = b"t" * cursor.has_called + b"e" * cursor.has_ended
    if event_id.num_logprobs is None:
        return b"%d.%d.%d%b" % (cursor.num_chars, cursor.num_tokens, cursor.checksum, end)
    numbers = (cursor.num_chars, cursor.num_tokens, cursor.checksum, cursor.text_offset)
    return b"%d.%d.%d.%d.%b%b" % (*numbers, cursor.pending.hex().encode(), end)


def _wrong(text: str) -> ApiError:
    return bad_field("last-event-id", f"last-event-id: got {text[:200]!r}, allowed: {_SYNTAX}")
