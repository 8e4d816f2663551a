"""An answer in parts: reasoning, content and tool calls, as events of a stream.

A stream whose request has `AnswerOptions`, from a model whose answers have a known format, is read
by the worker: its text becomes events. Positions stay those of the raw text.
"""

from __future__ import annotations

from enum import IntEnum
from typing import Annotated, Literal

from msgspec import Meta, Struct

from slipstream_ipc.messages.fields import U32, Label

MAX_NAME_CHARS = 256  # of a function
MAX_CALLS = 1024  # in one answer; what follows is content
MAX_ANSWER_TOOLS_CHARS = 2**18
FUNCTION_CHOICE = "function:"  # begins a tool_choice that names a function


class EventKind(IntEnum):
    """The kind of an event."""

    CONTENT = 1  # text of the answer itself
    REASONING = 2  # text of the model's reasoning
    CALL_BEGINS = 3  # text: the function's name
    CALL_ARGUMENTS = 4  # text: the next piece of the arguments, a JSON object in pieces
    CALL_ENDS = 5  # the arguments are complete


# events whose text comes in pieces
TEXT_KINDS = frozenset({EventKind.CONTENT, EventKind.REASONING, EventKind.CALL_ARGUMENTS})


class AnswerEvent(Struct, array_like=True, frozen=True, gc=False):
    """One event of an answer.

    call: which call of the answer, from 0; of content and reasoning 0. call_id: of CALL_BEGINS, the
    id that the model wrote, or one in the form that its format asks for; else empty. num_tokens:
    tokens of the entry whose last character lies in this event. num_before: those between the event
    before it, or the entry's beginning, and the first of these: of delimiters, and tokens without
    text.
    """

    kind: EventKind
    text: str = ""
    call: U32 = 0
    call_id: Annotated[str, Meta(max_length=MAX_NAME_CHARS)] = ""
    num_tokens: U32 = 0
    num_before: U32 = 0


StopScope = Literal["content", "all"]
ReasoningPlace = Literal["start", "border", "reasoning", "content"]
_Ids = Annotated[tuple[U32, ...], Meta(max_length=64)]
_Sequences = Annotated[
    tuple[Annotated[tuple[U32, ...], Meta(min_length=1, max_length=16)], ...], Meta(max_length=64)
]


class AnswerOptions(Struct, array_like=True, frozen=True):
    """The options of a Submit with messages whose answer is to be read as events.

    tool_choice: "auto", "none" (calls are content), "required", or a function's name in the form
    "function:NAME". stop_scope: where stop strings are looked for. reasoning_target: as the
    request's `thinking_token_budget`, where it has none and this model's format can keep one.
    """

    tool_choice: Label = "auto"
    parallel_tool_calls: bool = True
    stop_scope: StopScope = "content"
    reasoning_target: U32 | None = None

    @property
    def forces_calls(self) -> bool:
        """True if the answer has to be calls."""
        return self.tool_choice not in ("auto", "none")


class AnswerSettings(Struct, array_like=True, frozen=True):
    """The settings of an Admit by which the worker reads the stream's answer.

    format: a name in the table of formats. digest: of its entry; a worker whose entry has another
    one ends the stream as diverged. start: the reader's state after the prompt. tools: a JSON
    object: for each function the types of its properties by name; empty where tools are unknown.
    """

    format: Label
    digest: Annotated[bytes, Meta(max_length=16)]
    start: Annotated[bytes, Meta(max_length=4096)] = b""
    tools: Annotated[str, Meta(max_length=MAX_ANSWER_TOOLS_CHARS)] = ""
    options: AnswerOptions = AnswerOptions()


class ReasoningSequences(Struct, array_like=True, frozen=True):
    """The delimiters of a ReasoningIds that are several ids, one after another."""

    begins: _Sequences = ()
    ends: _Sequences = ()
    calls: _Sequences = ()
    borders: _Sequences = ()
    triggers: _Sequences = ()


class ReasoningIds(Struct, array_like=True, frozen=True):
    """The token ids of an Admit by which the core follows reasoning and calls of an answer.

    start: where the prompt leaves the answer: at its start, at another border, within reasoning or
    content. begins: begin reasoning, at a border and nowhere else; of an answer in a grammar, only
    at its start. ends: end it, and lead to a border; the first is sampled where a budget is spent.
    calls: begin a call, which ends reasoning. borders: lead to a border. blanks: white space, which
    keeps one, and the start. triggers: begin a call in the grammar, which applies to calls alone,
    from that token on; empty: it applies to the whole content. is_single: there may be one such
    call. num_behind: tokens behind one of `begins` that still belong to the beginning. sequences:
    further ones, each of several ids; the first that ends reasoning is sampled where no single id
    ends it. in_grammar: the grammar is of reasoning, too, and allows its end at any place of it.
    """

    start: ReasoningPlace
    begins: _Ids
    ends: _Ids
    calls: _Ids = ()
    borders: _Ids = ()
    blanks: _Ids = ()
    triggers: _Ids = ()
    is_single: bool = False
    num_behind: int = 0
    sequences: ReasoningSequences = ReasoningSequences()
    in_grammar: bool = False

    @property
    def forced_end(self) -> tuple[int, ...]:
        """The ids that are sampled where a budget is spent; empty: there are none."""
        return self.ends[:1] or next(iter(self.sequences.ends), ())

    @property
    def has_triggers(self) -> bool:
        """True if the grammar is of calls alone."""
        return bool(self.triggers or self.sequences.triggers)
