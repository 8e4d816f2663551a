"""The plan of one answer: its streams, and the JSON shape in which it is written.

The endpoints make it of a request's body (`endpoints`); `streaming`, `unary` and `block_answers`
carry it out.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass, field
from typing import Protocol

from msgspec import UNSET, Raw, UnsetType

from slipstream.client.streams.stream_state import StreamState
from slipstream.http.answers.echo import Echo
from slipstream.http.answers.event_ids import MAX_CURSORS, AnswerId, StreamCursor, checksum_of
from slipstream.http.blocks.block_printer import BlockShape
from slipstream.http.logprobs.logprob_bodies import TextPosition
from slipstream.http.logprobs.logprob_pieces import ShownLogprobs
from slipstream.http.logprobs.vocabulary import TokenTexts
from slipstream.http.openai.answer_parts import AnswerParts
from slipstream.http.openai.response_bodies import Choice
from slipstream.outputs import Delta

WITH_IDS = "gen"  # answers of this kind always have token ids


def prompt_name(number: int) -> str:
    """The name in a request of one of several prompts."""
    return f"prompt[{number}]"


@dataclass(slots=True, eq=False)
class ChoiceContent:
    """A choice or a chunk of one, before a shape gives it its JSON form.

    parts: in place of the text, where the shape reads events. kind: what the text is if there are
    no parts (see `Deltas.kinds`); 0: content.
    """

    index: int
    text: str | Raw
    logprobs: Raw | None
    finish_reason: str | None
    token_ids: list[int] = field(default_factory=list)  # empty unless the shape has ids
    stop_reason: int | str | None = None
    prompt_logprobs: Raw | UnsetType | None = UNSET
    prompt_ids: list[int] | UnsetType = UNSET  # if the shape has ids: in a choice's first chunk
    parts: AnswerParts | None = None
    kind: int = 0


class AnswerShape(Protocol):
    """The JSON shape of an endpoint's answers.

    has_ids: choices contain token ids. has_many_prompts: one answer may be to several prompts, so
    a prompt's ids and log-probabilities are in its choices, not beside them. reads_events: an
    answer is shown by its events, not as text. custom_tools: the names of those tools whose calls
    have free text.
    """

    object: str
    chunk_object: str
    has_many_prompts: bool
    reads_events: bool

    @property
    def has_ids(self) -> bool: ...

    @property
    def custom_tools(self) -> Collection[str]: ...

    def choice(self, content: ChoiceContent) -> Choice:
        """A complete choice."""

    def first_chunk(self, index: int) -> Choice | None:
        """The chunk that precedes a choice's first text, if the shape has one."""

    def chunk(self, content: ChoiceContent) -> Choice:
        """A chunk of a choice."""

    def logprobs(self, shown: ShownLogprobs, *, is_line: bool) -> Iterator[bytes]:
        """Log-probabilities as JSON, in pieces."""

    def logprobs_json(
        self, delta: Delta, texts: TokenTexts, position: TextPosition
    ) -> bytes | None:
        """`logprobs` of a delta whose text begins at `position`, by a fast path.

        None if there is none; `position` is unchanged then.
        """


@dataclass(frozen=True, slots=True, eq=False)
class AnswerPlan:
    """One request: its streams, each a choice of the answer, and how the answer is written."""

    id: AnswerId
    model: str
    created: int  # Unix time, s
    states: list[StreamState]
    shape: AnswerShape | BlockShape
    is_stream: bool
    with_usage: bool  # in the last chunk of a stream
    with_usage_so_far: bool  # in each chunk, of its choice
    num_logprobs: int | None  # top candidates per token, besides the sampled token
    param_names: dict[str, str] = field(default_factory=dict)  # internal name -> caller's
    echo: Echo | None = None  # the prompts to repeat in front of the outputs
    cursors: tuple[StreamCursor, ...] = ()  # the client's, by stream; empty for a new answer
    is_usage_sent: bool = False
    is_resumable: bool = False  # the client may resume: events have ids
    num_prompt_logprobs: int | None = None  # as num_logprobs, of the prompts
    event_checksum: int | None = None  # `request_checksum` from the client's last event
    unknown_hint: str = ""  # hint for the error if its streams are no longer known
    has_all_logprobs: bool = False  # also of tokens that are not content
    most_tokens: int = 0  # of all outputs together
    prompt_lens: int = 0  # tokens whose log-probabilities are asked for, about
    is_background: bool = False  # its stream goes on without a reader
    names_calls: bool = True  # a call's finish reason is `tool_calls`, else `stop`
    base: str = ""  # the model that `model` is an adapter of; empty: none

    @property
    def served_by(self) -> str:
        """The name of the model whose weights and tokenizer serve it."""
        return self.base or self.model

    @property
    def has_logprobs(self) -> bool:
        """True if the answer has log-probabilities, of outputs or prompts."""
        return self.num_logprobs is not None or self.num_prompt_logprobs is not None

    @property
    def num_held(self) -> int:
        """The number of log-probabilities that may wait for the end of their streams, about."""
        num, is_held = 0, isinstance(self.shape, BlockShape) or not self.is_stream
        if self.num_logprobs is not None and is_held:
            num += (1 + self.num_logprobs) * self.most_tokens
        if self.num_prompt_logprobs is not None:
            num += (1 + self.num_prompt_logprobs) * self.prompt_lens
        return num

    @property
    def needs_texts(self) -> bool:
        """True if the vocabulary has to be loaded before the request is run."""
        return self.has_logprobs or (self.echo is not None and self.echo.needs_texts)

    @property
    def request_checksum(self) -> int | None:
        """A u32 that identifies the request when it is sent again: `checksum_of` its submits, or
        the one in the client's last event if the submits are not known here. None if neither is.
        """
        submits = [each for state in self.states if (each := state.resubmittable) is not None]
        if len(submits) < len(self.states):
            return self.event_checksum
        return checksum_of(submits, self.id.num_answers)

    @property
    def can_resume(self) -> bool:
        """True if event ids can hold everything needed to resume the answer."""
        is_usual = self.echo is None and self.shape.has_ids == (self.id.kind == WITH_IDS)
        shape = self.shape
        is_known = shape.is_known if isinstance(shape, BlockShape) else not shape.custom_tools
        if not is_known:  # a front that knows the id alone would print functions
            return False
        if isinstance(self.shape, BlockShape) and self.num_logprobs is not None:
            return False  # it is read from its beginning, whose log-probabilities may be dropped
        return self.is_stream and is_usual and self.id.num_streams <= MAX_CURSORS
