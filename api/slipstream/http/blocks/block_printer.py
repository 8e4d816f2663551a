"""Printing of an answer's blocks as server-sent events, and the numbers of those.

- Every character of a block's text has a number, and so has every other event, from 0 on. An event
  with text has that of its last character. So the number of an event follows from the answer's
  events alone, however its text was divided, and each number is one place in the answer.
- An answer that is continued after a number is printed from its beginning, and what has a number up
  to there is left out. A text that goes on beyond it is cut.

`BlockWriter` is pure; `block_answers` writes what it makes to connections.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from msgspec import Struct

from slipstream.http.api_errors import ApiError
from slipstream.http.blocks.blocks import Block, BlockBegins, BlockPart, BlockReader, BlockText
from slipstream.http.openai.usage import Usage
from slipstream.http.response_encoding import json_part
from slipstream_ipc.history.event_log import joined_events
from slipstream_ipc.messages import AnswerEvent, End

NOTHING = -1  # the number before the first event's


class AnswerHead(NamedTuple):
    """The head of an answer, known before it begins. created: Unix time, s."""

    id: str
    model: str
    created: int


class TextFrame(Struct, frozen=True, gc=False):
    """The constant parts of the events with a block's text: what stands before and after it.

    between: of events that contain their number, what follows the number; `before` is before it
    then.
    """

    before: bytes
    after: bytes
    between: bytes | None = None

    def event(self, number: int, part: bytes) -> bytes:
        """An event. part: its text as JSON, without the quotes."""
        if self.between is None:
            return b"%b%b%b" % (self.before, part, self.after)
        return b"%b%d%b%b%b" % (self.before, number, self.between, part, self.after)


class BlockPrinter(Protocol):
    """Prints one answer. Its events are complete but for the `id:` line, which may stand before
    them. number: of the first event that is returned; those behind it have the ones that follow.

    has_numbers: its events contain their numbers. custom_tools: the names of those tools whose
    input is free text.
    """

    has_numbers: bool
    custom_tools: Collection[str]

    def begin(self, usage: Usage, number: int) -> Sequence[bytes]:
        """The events before any block. usage: with the tokens of the prompt alone."""

    def begin_block(self, block: Block, number: int) -> Sequence[bytes]:
        """The events with which a block begins."""

    def text_frame(self, block: Block) -> TextFrame:
        """The constant parts of the events that contain the text of a block."""

    def end_block(self, block: Block, number: int) -> Iterable[bytes]:
        """The events with which a block ends, each encoded when it is asked for: with
        log-probabilities they are large.
        """

    def finish(
        self, blocks: Sequence[Block], end: End, usage: Usage, number: int
    ) -> Iterable[bytes]:
        """The events after all blocks, each encoded when it is asked for."""

    def fail(self, blocks: Sequence[Block], error: ApiError, number: int) -> bytes:
        """The last event of an answer that fails. blocks: those so far."""

    def whole(self, blocks: Sequence[Block], end: End, usage: Usage) -> Struct:
        """The body of an answer that is not streamed."""


@dataclass(frozen=True, slots=True, eq=False)
class BlockShape:
    """The answers of an endpoint that prints blocks. new_printer: makes the printer of one.

    is_known: a front that knows no more than the answer's id can print it.
    """

    new_printer: Callable[[AnswerHead], BlockPrinter]
    has_ids: bool = False  # of tokens
    is_known: bool = True


class NumberedEvent(NamedTuple):
    """A server-sent event with its number, without its `id:` line."""

    number: int
    data: bytes


class BlockWriter:
    """Prints and numbers consecutive events of an answer. number: of the last one, printed or left
    out. has_begun: `begin` has been called, as it must be before the other methods.
    """

    def __init__(self, printer: BlockPrinter, after: int = NOTHING) -> None:
        """after: what has a number up to this one is left out."""
        self._printer = printer
        self._after = after
        self._reader = BlockReader(printer.custom_tools)
        self._frame: tuple[Block, TextFrame] | None = None
        self.number = NOTHING
        self.has_begun = False

    @property
    def open_block(self) -> Block | None:
        """The block that grows; None between blocks."""
        return self._reader.open_block

    @property
    def blocks(self) -> Sequence[Block]:
        """Blocks that have begun."""
        return self._reader.blocks

    def forget_logprobs(self) -> None:
        """Forget those of all blocks, which are printed no more."""
        for block in self._reader.blocks:
            block.logprobs = None

    def frame(self, block: Block) -> TextFrame:
        """The constant parts of the events with a block's text."""
        if self._frame is None or self._frame[0] is not block:
            self._frame = block, self._printer.text_frame(block)
        return self._frame[1]

    @property
    def is_past(self) -> bool:
        """True if nothing will be left out any more."""
        return self.number >= self._after

    def begin(self, usage: Usage) -> list[NumberedEvent]:
        """The answer begins. usage: with the tokens of the prompt alone."""
        self.has_begun = True
        return list(self._numbered(self._printer.begin(usage, self.number + 1)))

    def write(self, events: Iterable[AnswerEvent]) -> list[NumberedEvent]:
        """The events that follow those before."""
        return list(self._print(self._reader.read(joined_events(events))))

    def grow(self, text: str) -> int:
        """The open block grows by `text`, while nothing is left out; the number of its event, which
        is `frame` around it.
        """
        assert self._reader.open_block is not None
        self._reader.open_block.grow(text)
        self.number += len(text)
        return self.number

    def finish(self, end: End, usage: Usage) -> list[NumberedEvent]:
        """The answer has ended, without a failure."""
        return list(self.finish_in_parts(end, usage))

    def finish_in_parts(self, end: End, usage: Usage) -> Iterator[NumberedEvent]:
        """`finish`, each event encoded when it is asked for."""
        yield from self._print(self._reader.close(is_complete=end.reason == "stop"))
        blocks = self._reader.blocks
        yield from self._numbered(self._printer.finish(blocks, end, usage, self.number + 1))

    def fail(self, error: ApiError) -> bytes:
        """The event that ends a failed answer."""
        return self._printer.fail(self._reader.blocks, error, self.number + 1)

    def _print(self, parts: Sequence[BlockPart]) -> Iterator[NumberedEvent]:
        printer = self._printer
        for part in parts:
            if isinstance(part, BlockText):
                self.number += len(part.text)
                num_new = self.number - self._after
                if num_new > 0:
                    text = part.text[-num_new:]
                    data = self.frame(part.block).event(self.number, json_part(text))
                    yield NumberedEvent(self.number, data)
            elif isinstance(part, BlockBegins):
                yield from self._numbered(printer.begin_block(part.block, self.number + 1))
            else:
                yield from self._numbered(printer.end_block(part.block, self.number + 1))

    def _numbered(self, printed: Iterable[bytes]) -> Iterator[NumberedEvent]:
        for data in printed:
            self.number += 1
            if self.number > self._after:
                yield NumberedEvent(self.number, data)


def blocks_of(
    events: Iterable[AnswerEvent], end: End, custom_tools: Collection[str] = ()
) -> list[Block]:
    """All blocks of a whole answer. custom_tools: see `BlockPrinter`."""
    reader = BlockReader(custom_tools)
    reader.read(joined_events(events))
    reader.close(is_complete=end.reason == "stop")
    return reader.blocks
