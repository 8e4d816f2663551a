"""The blocks of an answer: its events as items that begin, grow and end.

Chat chunks print events as they are; `/v1/responses` and `/v1/messages` print blocks. Which blocks
an answer has, and what they are numbered, follows from its events alone, so every front prints the
same.

A stretch of content or of reasoning is one block, and so is a call. A block ends when its call
does, when an event of another block follows, or with the answer. The text of a custom tool's call
is its input.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass, field
from enum import Enum
from io import StringIO

from slipstream.http.logprobs.held_logprobs import HeldLogprobs
from slipstream.http.openai.custom_tools import InputReader
from slipstream_ipc.messages import AnswerEvent, EventKind
from slipstream_ipc.validation.kept_size import num_text_bytes


class BlockKind(Enum):
    """The kind of a block."""

    CONTENT = "content"
    REASONING = "reasoning"
    CALL = "call"


_KINDS = {
    EventKind.CONTENT: BlockKind.CONTENT,
    EventKind.REASONING: BlockKind.REASONING,
    EventKind.CALL_BEGINS: BlockKind.CALL,
    EventKind.CALL_ARGUMENTS: BlockKind.CALL,
    EventKind.CALL_ENDS: BlockKind.CALL,
}


@dataclass(slots=True, eq=False)
class Block:
    """One block so far. index: its place within the answer, from 0. call_id, name: of a call.

    is_complete: it has ended, and was not cut off: a call has its CALL_ENDS, any other block is
    followed by something, or the model ended the answer.
    logprobs: of content's tokens; None unless asked for. input: of a custom tool's call.
    """

    index: int
    kind: BlockKind
    call: int = 0  # which call of the answer, from 0
    call_id: str = ""
    name: str = ""
    is_complete: bool = False
    logprobs: HeldLogprobs | None = None
    input: InputReader | None = None
    _text: StringIO = field(default_factory=StringIO)  # a list of pieces takes twenty times as much

    @property
    def text(self) -> str:
        """All of its text so far; a call's are its arguments, a custom tool's its input."""
        return self._text.getvalue()

    @property
    def num_bytes(self) -> int:
        """The size of its name and its text in UTF-8, as the model wrote them."""
        texts = (self.name, self.text) if self.input is None else (self.name,)
        return num_text_bytes(texts) + (0 if self.input is None else self.input.num_bytes)

    def grow(self, text: str) -> None:
        """Add to its text."""
        self._text.write(text)


@dataclass(frozen=True, slots=True)
class BlockBegins:
    """A block begins, without text."""

    block: Block


@dataclass(frozen=True, slots=True)
class BlockText:
    """A block grows by `text`, which is never empty."""

    block: Block
    text: str


@dataclass(frozen=True, slots=True)
class BlockEnds:
    """A block ends; its text is whole."""

    block: Block


BlockPart = BlockBegins | BlockText | BlockEnds


class BlockReader:
    """Makes blocks of consecutive events. Any division of the events gives the same blocks, but for
    where the text of one is divided. open_block: the one that has not ended.
    """

    def __init__(self, custom_tools: Collection[str] = ()) -> None:
        """custom_tools: the names of those tools whose input is free text."""
        self._custom_tools = custom_tools
        self.blocks: list[Block] = []
        self.open_block: Block | None = None

    def read(self, events: Iterable[AnswerEvent]) -> list[BlockPart]:
        """The changes of blocks by these events, which follow those before."""
        parts: list[BlockPart] = []
        for event in events:
            kind = _KINDS[event.kind]
            if event.kind == EventKind.CALL_ENDS:
                parts += self._end(is_complete=True)
                continue
            if event.kind != EventKind.CALL_BEGINS and not event.text:
                continue
            if not self._continues(kind, event):
                is_call = self.open_block is not None and self.open_block.kind == BlockKind.CALL
                parts += self._end(is_complete=not is_call)
                parts.append(self._begin(kind, event))
            block = self.open_block
            assert block is not None
            if event.kind != EventKind.CALL_BEGINS:
                text = event.text if block.input is None else block.input.read(event.text)
                parts += self._grow(block, text)
        return parts

    def close(self, *, is_complete: bool) -> list[BlockPart]:
        """The answer has ended. is_complete: the model ended it, not a limit or an abort."""
        is_call = self.open_block is not None and self.open_block.kind == BlockKind.CALL
        return self._end(is_complete=is_complete and not is_call)

    def _continues(self, kind: BlockKind, event: AnswerEvent) -> bool:
        block = self.open_block
        if block is None or event.kind == EventKind.CALL_BEGINS:
            return False
        return block.kind == kind and block.call == event.call

    def _begin(self, kind: BlockKind, event: AnswerEvent) -> BlockBegins:
        block = Block(len(self.blocks), kind, event.call)
        if event.kind == EventKind.CALL_BEGINS:
            block.call_id, block.name = event.call_id, event.text
            block.input = InputReader() if event.text in self._custom_tools else None
        self.blocks.append(block)
        self.open_block = block
        return BlockBegins(block)

    def _end(self, *, is_complete: bool) -> list[BlockPart]:
        block, self.open_block = self.open_block, None
        if block is None:
            return []
        block.is_complete = is_complete
        rest = "" if block.input is None else block.input.finish()
        return [*self._grow(block, rest), BlockEnds(block)]

    def _grow(self, block: Block, text: str) -> list[BlockPart]:
        if not text:
            return []
        block.grow(text)
        return [BlockText(block, text)]
