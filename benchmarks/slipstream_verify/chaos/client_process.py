"""A client process that may be killed at any moment.

`python -m slipstream_verify.chaos.client_process`, with its config (JSON) as the first line on
standard input; it ends when standard input does. It reads its requests' streams to their ends and
writes what it reads into a journal; where earlier lives left journals, it continues after them.

- Sync and asyncio clients alternate, over clients and over the lives of each.
- A slow reader pauses only its own reading; the process's other streams continue.
- Further lines say how many of the requests may have begun by now, in their order.
- A stream of which nothing was read is submitted under its own id, which is harmless if it was
  submitted before. Any other stream is resumed after the last position read.
- A stream that the server no longer has (worker and core died, and so did the client that could
  have submitted it again) is submitted again and read from its beginning; what was read before must
  repeat, and is not recorded twice.
"""

from __future__ import annotations

import asyncio
import os
import sys
import threading
import time
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import msgspec
from msgspec import Struct

from slipstream.answers.events import (
    ContentDelta,
    Event,
    ReasoningDelta,
    ToolCallArguments,
    ToolCallEnd,
    ToolCallStart,
)
from slipstream.client.async_client import AsyncClient, AsyncStream
from slipstream.client.call_options import RequestOptions
from slipstream.client.client import Client, Stream
from slipstream.errors import SlipstreamError, StreamLostError, UnknownStreamError
from slipstream.outputs import Delta
from slipstream_ipc.history.event_log import joined_events
from slipstream_ipc.messages import AnswerEvent, EventKind
from slipstream_verify.chaos.journal import (
    AskedAgain,
    Failed,
    JournalWriter,
    ReceivedDelta,
    TokenCandidates,
    read_journal,
    units_of,
)
from slipstream_verify.chaos.workload.chaos_workload import ChaosRequest

_MOST_AGAIN = 20  # more than this is an endless loop
_STANDARD_INPUT = 0


class ReadSoFar(Struct):
    """What was read of a stream, in this life of its client and earlier ones."""

    text: str = ""
    token_ids: tuple[int, ...] = ()
    is_over: bool = False
    event_id: str = ""
    events: tuple[AnswerEvent, ...] = ()


class Follower:
    """Reads one request's stream to its end."""

    def __init__(
        self, request: ChaosRequest, read: ReadSoFar, journal: JournalWriter, place: int = 0
    ) -> None:
        """place: among the client's requests."""
        self.request = request
        self.place = place
        self._read = read
        self._journal = journal
        self._pauses = [p for p in request.pauses if p.num_tokens >= len(read.token_ids)]
        self._skip_chars = self._skip_tokens = 0  # positions still to come that were read before
        self._events_again: list[AnswerEvent] = []  # units still to come that were read before
        self._has_prompt = False
        self._num_again = 0

    def open(self, client: Client) -> Stream:
        """The stream, opened at the right position."""
        if self._is_whole:
            return client.stream(self.request.prompt, self.request.params, **self._options)
        chars, tokens = self._position
        return client.resume(self.request.stream_id, num_chars=chars, num_tokens=tokens)

    def open_async(self, client: AsyncClient) -> AsyncStream:
        """The stream, opened at the right position."""
        if self._is_whole:
            return client.stream(self.request.prompt, self.request.params, **self._options)
        chars, tokens = self._position
        return client.resume(self.request.stream_id, num_chars=chars, num_tokens=tokens)

    def take(self, stream: Stream | AsyncStream, delta: Delta) -> float:
        """Record a delta; returns the pause before the next one, in seconds."""
        end = stream.position
        token_ids = tuple(delta.token_ids)
        logprobs = _candidates(delta)
        chars, tokens = end.num_chars - len(delta.text), end.num_tokens - len(token_ids)
        skip_chars = max(0, min(self._skip_chars - chars, len(delta.text)))
        skip_tokens = max(0, min(self._skip_tokens - tokens, len(token_ids)))
        if skip_chars or skip_tokens:
            self._check_again(chars, tokens, delta.text[:skip_chars], token_ids[:skip_tokens])
        text, token_ids = delta.text[skip_chars:], token_ids[skip_tokens:]
        events = self._new_events(delta) if self.request.chat is not None else ()
        prompt_ids = None if self._has_prompt else stream.prompt_token_ids
        self._has_prompt = True
        is_end = delta.finish_reason is not None
        if text or token_ids or events or is_end or prompt_ids is not None:
            piece = ReceivedDelta(
                self.request.index,
                time.monotonic(),
                max(chars + skip_chars, self._skip_chars),
                max(tokens + skip_tokens, self._skip_tokens),
                text,
                token_ids,
                None if logprobs is None else logprobs[skip_tokens:],
                delta.finish_reason,
                delta.stop_reason,
                None if prompt_ids is None else tuple(prompt_ids),
                events=events,
            )
            self._journal.write(piece)
        self._read.text += text
        self._read.token_ids += token_ids
        self._read.events += events
        return self._pause(end.num_tokens)

    def is_asked_again(self, error: SlipstreamError) -> bool:
        """Whether to open the stream again after an error; otherwise the error is recorded."""
        now = time.monotonic()
        is_lost = isinstance(error, StreamLostError | UnknownStreamError)
        if is_lost and self._num_again < _MOST_AGAIN:
            self._num_again += 1
            self._skip_chars, self._skip_tokens = len(self._read.text), len(self._read.token_ids)
            self._events_again = units_of(self._read.events)
            why = f"{type(error).__name__}: {error}"
            self._journal.write(AskedAgain(self.request.index, now, why, is_afresh=False))
            return True
        self._fail(f"{type(error).__name__}: {error}")
        return False

    @property
    def _options(self) -> RequestOptions:
        options: RequestOptions = {"stream_id": self.request.stream_id}
        if self.request.prediction:
            options["prediction"] = self.request.prediction
        chat = self.request.chat
        if chat is not None:
            options["tools"] = chat.tools
            options["tool_choice"] = chat.tool_choice
            options["parallel_tool_calls"] = chat.parallel_tool_calls
            options["stop_scope"] = chat.stop_scope
        return options

    @property
    def _is_whole(self) -> bool:
        """Whether the stream is read from its beginning."""
        return bool(self._num_again) or not (self._read.text or self._read.token_ids)

    @property
    def _position(self) -> tuple[int, int]:
        return len(self._read.text), len(self._read.token_ids)

    def _check_again(self, chars: int, tokens: int, text: str, token_ids: tuple[int, ...]) -> None:
        read = self._read
        if read.text[chars : chars + len(text)] != text:
            self._fail(f"the text from {chars} on is another one the second time")
        if read.token_ids[tokens : tokens + len(token_ids)] != token_ids:
            self._fail(f"the tokens from {tokens} on are others the second time")

    def _new_events(self, delta: Delta) -> tuple[AnswerEvent, ...]:
        """A delta's events without those that were read before."""
        events = tuple(map(_answer_event, delta.events))
        if not self._events_again:
            return events
        units = units_of(events)
        num_again = min(len(units), len(self._events_again))
        if units[:num_again] != self._events_again[:num_again]:
            self._fail("the events are others the second time")
        del self._events_again[:num_again]
        return joined_events(units[num_again:])

    def _fail(self, why: str) -> None:
        self._journal.write(Failed(self.request.index, time.monotonic(), why))

    def _pause(self, num_tokens: int) -> float:
        seconds = 0.0
        while self._pauses and self._pauses[0].num_tokens <= num_tokens:
            seconds += self._pauses.pop(0).seconds
        return seconds


def read_before(journals: Iterable[str | Path]) -> dict[int, ReadSoFar]:
    """What earlier lives have read, by request. journals: oldest first."""
    found: dict[int, ReadSoFar] = {}
    for path in journals:
        for record in read_journal(path):
            read = found.setdefault(record.index, ReadSoFar())
            match record:
                case ReceivedDelta():
                    read.text += record.text
                    read.token_ids += record.token_ids
                    read.is_over = record.finish_reason is not None
                    read.event_id = record.event_id
                    read.events += record.events
                case AskedAgain():
                    if record.is_afresh:
                        read.text, read.token_ids, read.event_id, read.events = "", (), "", ()
                case Failed():
                    read.is_over = True
    return found


def _candidates(delta: Delta) -> tuple[TokenCandidates, ...] | None:
    if delta.logprobs is None:
        return None
    return tuple(
        tuple((each.token_id, each.logprob, each.rank) for each in token.values())
        for token in delta.logprobs
    )


def _answer_event(event: Event) -> AnswerEvent:
    match event:
        case ContentDelta(text):
            return AnswerEvent(EventKind.CONTENT, text)
        case ReasoningDelta(text):
            return AnswerEvent(EventKind.REASONING, text)
        case ToolCallStart(index, call_id, name):
            return AnswerEvent(EventKind.CALL_BEGINS, name, index, call_id)
        case ToolCallArguments(index, text):
            return AnswerEvent(EventKind.CALL_ARGUMENTS, text, index)
        case ToolCallEnd(index):
            return AnswerEvent(EventKind.CALL_ENDS, "", index)


class ClientConfig(Struct, frozen=True):
    """What a client reads, and where it writes.

    address: of the stack, or of its HTTP front. earlier: journals of its former lives, oldest
    first. num_allowed: how many of the requests may begin at once.
    """

    address: str
    requests: tuple[ChaosRequest, ...]
    journal: str
    earlier: tuple[str, ...]
    num_allowed: int
    concurrency: int
    timeout_s: float
    is_async: bool


class Allowance:
    """How many of a client's requests may have begun."""

    def __init__(self, num: int) -> None:
        self._num = num
        self._raised = threading.Condition()

    def raise_to(self, num: int) -> None:
        """Allow so many."""
        with self._raised:
            self._num = num
            self._raised.notify_all()

    def wait(self, place: int) -> None:
        """Wait until the request at this place, counted from 0, may begin."""
        with self._raised:
            self._raised.wait_for(lambda: place < self._num)


def main() -> int:
    """Read all streams to their ends; exit code 0."""
    config, allowance = read_config()
    before = read_before(config.earlier)
    journal = JournalWriter(config.journal)
    followers = [
        Follower(request, read, journal, place)
        for place, request in enumerate(config.requests)
        if not (read := before.get(request.index, ReadSoFar())).is_over
    ]
    # running streams first: they have no other reader, and their time is limited
    followers.sort(key=lambda follower: follower.request.index not in before)
    if config.is_async:
        asyncio.run(_follow_all_async(config, followers, allowance))
    else:
        _follow_all(config, followers, allowance)
    return 0


def read_config() -> tuple[ClientConfig, Allowance]:
    """Read the config; from now on the process ends with its standard input."""
    lines = _lines()
    config = msgspec.json.decode(next(lines), type=ClientConfig)
    allowance = Allowance(config.num_allowed)
    threading.Thread(target=_obey_parent, args=(lines, allowance), daemon=True).start()
    return config, allowance


def _lines() -> Iterator[bytes]:
    rest = b""
    while chunk := os.read(_STANDARD_INPUT, 65536):  # no buffer, whose lock an exit would wait for
        *lines, rest = (rest + chunk).split(b"\n")
        yield from lines


def _obey_parent(lines: Iterator[bytes], allowance: Allowance) -> None:
    for line in lines:
        allowance.raise_to(int(line))
    os._exit(3)


def _follow_all(config: ClientConfig, followers: list[Follower], allowance: Allowance) -> None:
    nothing = threading.Event()  # never set; slow readers wait on it with a timeout

    def follow(client: Client, follower: Follower) -> None:
        while True:
            try:
                with follower.open(client) as stream:
                    for delta in stream:
                        if pause_s := follower.take(stream, delta):
                            nothing.wait(pause_s)
                return
            except SlipstreamError as error:
                if not follower.is_asked_again(error):
                    return

    with (
        Client(config.address, timeout_s=config.timeout_s) as client,
        ThreadPoolExecutor(config.concurrency) as threads,
    ):
        begun = []
        for follower in followers:
            allowance.wait(follower.place)
            begun.append(threads.submit(follow, client, follower))
        for done in begun:
            done.result()


async def _follow_all_async(
    config: ClientConfig, followers: list[Follower], allowance: Allowance
) -> None:
    places = asyncio.Semaphore(config.concurrency)

    async def follow(client: AsyncClient, follower: Follower) -> None:
        async with places:
            while True:
                try:
                    async with follower.open_async(client) as stream:
                        async for delta in stream:
                            if pause_s := follower.take(stream, delta):
                                await asyncio.sleep(pause_s)
                    return
                except SlipstreamError as error:
                    if not follower.is_asked_again(error):
                        return

    async with (
        AsyncClient(config.address, timeout_s=config.timeout_s) as client,
        asyncio.TaskGroup() as tasks,
    ):
        for follower in followers:
            await asyncio.to_thread(allowance.wait, follower.place)
            tasks.create_task(follow(client, follower))


if __name__ == "__main__":
    sys.exit(main())
