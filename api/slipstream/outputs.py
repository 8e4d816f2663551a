"""The public output types: deltas of a stream and complete outputs.

Token ids and log-probabilities stay in the columns of their message until they are accessed.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
from msgspec import Struct
from msgspec.structs import replace

from slipstream.answers.events import Event, public_event, text_of
from slipstream.answers.tool_calls import ToolCall, ToolCallDelta, call_deltas, tool_calls_of
from slipstream.delta_batch import (
    CandidateSpan,
    DeltaBatch,
    EntryColumns,
    Logprob,
    StreamPosition,
    TokenLogprobs,
)
from slipstream.prompt_logprobs import PromptPieces, PromptTokenLogprobs, prompt_logprobs_of
from slipstream_ipc.columns import f32, pack_u32, u32
from slipstream_ipc.history.event_log import joined_entries, joined_events
from slipstream_ipc.history.event_log import kind_of as kind_of_events
from slipstream_ipc.messages import (
    AnswerEvent,
    ChatMessage,
    ChatToolCall,
    Deltas,
    End,
    EventKind,
    FinishReason,
    FunctionCall,
    LogprobColumns,
    TurnChanges,
)

__all__ = [
    "Completion",
    "CompletionOutput",
    "Delta",
    "Logprob",
    "PromptTokenLogprobs",
    "RequestMetrics",
    "RequestOutput",
    "StreamPosition",
    "TokenLogprobs",
    "begin_of",
    "candidates_of",
    "columns_of",
    "end_of",
    "events_of",
    "is_alone",
    "join",
    "kind_of",
    "message_of",
    "metrics_of",
    "together",
]


# what `repr` shows, with vLLM's names in its order
_COMPLETION_FIELDS = (
    "index",
    "text",
    "token_ids",
    "cumulative_logprob",
    "logprobs",
    "finish_reason",
    "stop_reason",
)
_REQUEST_FIELDS = (
    "request_id",
    "prompt",
    "prompt_token_ids",
    "prompt_logprobs",
    "outputs",
    "finished",
    "metrics",
)


class Delta(Struct, frozen=True, gc=False, eq=False, repr_omit_defaults=True):
    """A piece of a stream's output: new text and the tokens that it comes from.

    text: may be empty, where a token completes no character or may begin a stop string.
    """

    text: str
    _batch: DeltaBatch
    _entry: int
    _skip: int = 0  # tokens of the entry that the reader has received before

    @property
    def num_tokens(self) -> int:
        """The number of new tokens; cheaper than `len(token_ids)`."""
        batch = self._batch
        return (1 if batch.has_one_each else batch.num_tokens(self._entry)) - self._skip

    @property
    def token_ids(self) -> list[int]:
        """The new token ids."""
        batch = self._batch
        if batch.has_one_each and not self._skip:
            return [batch.ids[self._entry]]
        return batch.token_ids(self._entry, self._skip)

    @property
    def logprobs(self) -> list[TokenLogprobs] | None:
        """The candidates of each new token by token id, the token itself first; None if they were
        not requested.
        """
        return self._batch.logprobs(self._entry, self._skip)

    @property
    def finish_reason(self) -> FinishReason | None:
        """The reason why the stream ended with this delta; None if it continues."""
        end = self._batch.ends.get(self._entry)
        return end.reason if end is not None else None

    @property
    def stop_reason(self) -> int | str | None:
        """The stop token id or stop string that ended the stream; None for any other end."""
        end = self._batch.ends.get(self._entry)
        return end.stop_reason if end is not None else None

    @property
    def events(self) -> list[Event]:
        """The answer's new parts, in order. Where the model's format is unknown, or the request
        was none of chat messages, all text is content.
        """
        return [public_event(event) for event in joined_events(events_of(self))]

    @property
    def content(self) -> str:
        """The new text of the answer itself."""
        return text_of(EventKind.CONTENT, events_of(self)) if self._batch.has_events else self.text

    @property
    def reasoning(self) -> str:
        """The new text of the model's reasoning."""
        return text_of(EventKind.REASONING, events_of(self)) if self._batch.has_events else ""

    @property
    def reasoning_content(self) -> str:
        """`reasoning`, by its name in OpenAI-compatible servers."""
        return self.reasoning

    @property
    def tool_calls(self) -> list[ToolCallDelta]:
        """The new parts of the answer's tool calls, one for each call."""
        return call_deltas(events_of(self)) if self._batch.has_events else []

    def __repr__(self) -> str:
        shown = [f"text={self.text!r}", f"token_ids={self.token_ids}"]
        shown += [
            f"{name}={value!r}"
            for name in ("finish_reason", "stop_reason")
            if (value := getattr(self, name)) is not None
        ]
        return f"Delta({', '.join(shown)})"


class Answer(Struct, frozen=True, eq=False):
    """The text and the tokens of one answer, from its whole stream. text: all of it."""

    text: str
    _whole: Delta

    @property
    def num_tokens(self) -> int:
        """The number of the answer's tokens; cheaper than `len(token_ids)`."""
        return self._whole.num_tokens

    @property
    def token_ids(self) -> list[int]:
        """The answer's token ids."""
        return self._whole.token_ids

    @property
    def logprobs(self) -> list[TokenLogprobs] | None:
        """The candidates of each token by token id, the token itself first; None if they were not
        requested.
        """
        return self._whole.logprobs

    @property
    def finish_reason(self) -> FinishReason | None:
        """The reason why the answer ended."""
        return self._whole.finish_reason

    @property
    def stop_reason(self) -> int | str | None:
        """The stop token id or stop string that ended the answer; None for any other end."""
        return self._whole.stop_reason

    @property
    def content(self) -> str:
        """The text of the answer itself: `text` without reasoning and tool calls. Where the model's
        format is unknown, or the request was none of chat messages, it is `text`.
        """
        return self._whole.content

    @property
    def reasoning(self) -> str | None:
        """The text of the model's reasoning; None where there is none."""
        return self._whole.reasoning or None

    @property
    def reasoning_content(self) -> str | None:
        """`reasoning`, by its name in OpenAI-compatible servers."""
        return self.reasoning

    @property
    def tool_calls(self) -> list[ToolCall]:
        """The functions that the answer calls; those with the status "incomplete" were cut off."""
        return tool_calls_of(events_of(self._whole))

    @property
    def message(self) -> ChatMessage:
        """The answer as an assistant's turn, to be appended to the messages of the next request.
        Incomplete tool calls are left out.
        """
        return message_of(events_of(self._whole))


class CompletionOutput(Answer, frozen=True, eq=False):
    """One answer to a prompt. index: its number among the `n` answers, from 0."""

    index: int

    @property
    def cumulative_logprob(self) -> float | None:
        """The sum of the tokens' own log-probabilities; None if they were not requested."""
        cut = self._whole._batch.cut(self._whole._entry, self._whole._skip)
        if not cut.width:
            return None
        return float(f32(cut.values)[:: cut.width].sum(dtype=np.float64))

    def finished(self) -> bool:
        """True if the answer has ended: always, for compatibility with vLLM."""
        return True

    def __eq__(self, other: object) -> bool:
        return isinstance(other, CompletionOutput) and self._fields == other._fields

    def __repr__(self) -> str:
        return _repr(self, _COMPLETION_FIELDS)

    @property
    def _fields(self) -> tuple[object, ...]:
        whole = self._whole
        of_tokens = (whole.token_ids, whole.logprobs, whole.finish_reason, whole.stop_reason)
        return (self.index, self.text, *of_tokens)


class RequestMetrics(Struct, frozen=True):
    """The times at which a request was made and answered, as its client saw them; Unix time in
    seconds.

    With several answers to a prompt: from the first answer's first token to the last one's end.

    arrival_time: when the client submitted the request.
    first_token_time: when the first token arrived; None without any token.
    finished_time: when the answer's end arrived.
    """

    arrival_time: float
    first_token_time: float | None
    finished_time: float


class RequestOutput(Answer, frozen=True, eq=False):
    """A prompt and its answers, with vLLM's names.

    `text`, the tokens and the finish reason are those of the first answer.

    request_id: the stream's id, 32 hexadecimal digits; from an `LLM`, a running number.
    label: the label given with the request.
    prompt: the prompt's text; None where it was not given as text.
    metrics: times of the request; None where the client ended it early.
    changed_turns: what was done to a chat's turns so that the model's template takes them.
    left_out: paths of keywords of the request's schemas that were not enforced.
    """

    request_id: str
    label: str
    _prompt_ids: bytes
    _others: tuple[RequestOutput, ...] = ()
    _prompt: PromptPieces | None = None
    prompt: str | None = None
    metrics: RequestMetrics | None = None
    changed_turns: TurnChanges = ()
    left_out: tuple[str, ...] = ()

    @property
    def outputs(self) -> list[CompletionOutput]:
        """All `n` answers to the prompt."""
        return [
            CompletionOutput(each.text, each._whole, index)
            for index, each in enumerate(self.choices)
        ]

    @property
    def finished(self) -> bool:
        """Always True, for compatibility with vLLM: unfinished requests are `Stream`s."""
        return True

    @property
    def id(self) -> str:
        """The request_id."""
        return self.request_id

    @property
    def choices(self) -> tuple[RequestOutput, ...]:
        """All `n` answers to the prompt, this one first, each with its stream's id."""
        return (self, *self._others)

    @property
    def prompt_logprobs(self) -> PromptTokenLogprobs | None:
        """The candidates of each prompt token by token id, the token itself first; None for the
        first token, which has no log-probability. Shared by all answers to the prompt.

        None where they were not requested.
        """
        return prompt_logprobs_of(self._prompt)

    @property
    def num_cached_tokens(self) -> int | None:
        """The number of tokens of the prompt that were in the prefix cache when it was first
        computed; None if the client ended the request early.
        """
        end = self._whole._batch.ends.get(self._whole._entry)
        return end.num_cached_tokens if end is not None else None

    @property
    def prompt_token_ids(self) -> list[int]:
        """The prompt's token ids as the model saw them."""
        ids: list[int] = u32(self._prompt_ids).tolist()
        return ids

    def __repr__(self) -> str:
        return _repr(self, _REQUEST_FIELDS)


def _repr(output: Struct, names: Sequence[str]) -> str:
    shown = [f"{name}={getattr(output, name)!r}" for name in names]
    return f"{type(output).__name__}({', '.join(shown)})"


Completion = RequestOutput  # the former name, kept for one release


def together(answers: Sequence[RequestOutput]) -> RequestOutput:
    """The output that holds all answers to one prompt, which share the prompt's logprobs."""
    first, *others = answers
    if not others:
        return first
    shared = [replace(other, _prompt=first._prompt) for other in others]
    every = [each.metrics for each in answers if each.metrics is not None]
    begins = [each.first_token_time for each in every if each.first_token_time is not None]
    metrics = None
    if len(every) == len(answers):
        metrics = RequestMetrics(
            min(each.arrival_time for each in every),
            min(begins, default=None),
            max(each.finished_time for each in every),
        )
    return replace(first, _others=tuple(shared), metrics=metrics)


def metrics_of(whole: Delta, submitted_at: float, monotonic_zero: float) -> RequestMetrics:
    """The metrics of an answer's only delta.

    submitted_at: in seconds of the monotonic clock. monotonic_zero: the Unix time of its zero.
    """
    batch = whole._batch
    first_at = batch.first_at + monotonic_zero if whole.num_tokens else None
    return RequestMetrics(submitted_at + monotonic_zero, first_at, batch.last_at + monotonic_zero)


def id_column_of(delta: Delta) -> bytes:
    """A delta's token ids as a u32 column."""
    return delta._batch.id_column(delta._entry, delta._skip)


def begin_of(delta: Delta) -> StreamPosition:
    """The position in its stream at which a delta begins."""
    num_chars, num_tokens = end_of(delta)
    return StreamPosition(num_chars - len(delta.text), num_tokens - delta.num_tokens)


def end_of(delta: Delta) -> StreamPosition:
    """The position in its stream at which a delta ends."""
    return delta._batch.end_of(delta._entry)


def events_of(delta: Delta) -> tuple[AnswerEvent, ...]:
    """A delta's events as they were sent; adjacent ones may continue each other."""
    return delta._batch.events(delta._entry, delta._skip, delta.text)


def kind_of(delta: Delta) -> int | None:
    """The kind of a delta's text (see `Deltas.kinds`), 0 if it is not read as events; None if it
    has events of its own.
    """
    batch = delta._batch
    if not batch.has_events:
        return 0
    if delta._entry in batch.own_events:
        return None
    return batch.kinds[delta._entry] if batch.kinds else 0


def message_of(events: Sequence[AnswerEvent]) -> ChatMessage:
    """All events of an answer as an assistant's turn, without its incomplete tool calls."""
    calls = tuple(
        ChatToolCall(FunctionCall(call.name, call.arguments), call.id, "function")
        for call in tool_calls_of(events)
        if call.status == "complete"
    )
    return ChatMessage(
        "assistant",
        text_of(EventKind.CONTENT, events),
        tool_calls=calls or None,
        reasoning_content=text_of(EventKind.REASONING, events) or None,
    )


def candidates_of(delta: Delta) -> tuple[DeltaBatch, CandidateSpan] | None:
    """The message and the range that hold a delta's log-probabilities; None where it has none."""
    span = delta._batch.span(delta._entry, delta._skip)
    return None if span is None else (delta._batch, span)


def columns_of(delta: Delta) -> EntryColumns:
    """The columns of a delta's tokens."""
    return delta._batch.cut(delta._entry, delta._skip)


def is_alone(delta: Delta) -> bool:
    """True if the delta's message has no other entries, so that it keeps no other columns alive."""
    return len(delta._batch.message.texts) == 1


class Embeddings(Struct, frozen=True, eq=False):
    """The vectors of a call's inputs, in their order.

    vectors: float32, [inputs, dimensions]. num_prompt_tokens: of each input.
    """

    vectors: npt.NDArray[np.float32]
    num_prompt_tokens: list[int]


class Classes(Struct, frozen=True, eq=False):
    """The classes of a call's inputs, in their order.

    probs: float32, [inputs, labels], or logits where these were asked for. labels: in the order of
    the numbers. num_prompt_tokens: of each input.
    """

    probs: npt.NDArray[np.float32]
    labels: tuple[str, ...]
    num_prompt_tokens: list[int]

    @property
    def best(self) -> list[str]:
        """The label of each input that has the highest number."""
        return [self.labels[at] for at in self.probs.argmax(1).tolist()]


class ClassificationOutput(Struct, frozen=True):
    """The classes of an input, with vLLM's names. probs: of each label."""

    probs: list[float]

    @property
    def num_classes(self) -> int:
        """The number of labels."""
        return len(self.probs)


class ClassificationRequestOutput(Struct, frozen=True):
    """An input of `LLM.classify` and its classes. Fields as in `EmbeddingRequestOutput`."""

    request_id: str
    outputs: ClassificationOutput
    num_prompt_tokens: int
    prompt: str | None = None
    finished: bool = True


class ScoringOutput(Struct, frozen=True):
    """The score of a pair, with vLLM's name."""

    score: float


class ScoringRequestOutput(Struct, frozen=True):
    """A pair of `LLM.score` and its score. Fields as in `EmbeddingRequestOutput`."""

    request_id: str
    outputs: ScoringOutput
    num_prompt_tokens: int
    finished: bool = True


class EmbeddingOutput(Struct, frozen=True):
    """A vector, with vLLM's names."""

    embedding: list[float]

    @property
    def hidden_size(self) -> int:
        """Its dimensions."""
        return len(self.embedding)


class EmbeddingRequestOutput(Struct, frozen=True):
    """An input of `LLM.embed` and its vector, with vLLM's names. request_id: a running number.
    prompt: None where the input was not given as text.
    """

    request_id: str
    outputs: EmbeddingOutput
    num_prompt_tokens: int
    prompt: str | None = None
    finished: bool = True


def join(deltas: Sequence[Delta], end: End | None = None, *, has_logprobs: bool = True) -> Delta:
    """Join consecutive deltas of a stream into one.

    end: the stream's End, used where the deltas do not hold it themselves. has_logprobs: False
    leaves theirs out.
    """
    cuts = [columns_of(delta) for delta in deltas] if has_logprobs else []
    token_ids = b"".join([id_column_of(delta) for delta in deltas])
    text = "".join([delta.text for delta in deltas])
    begin = StreamPosition(0, 0)
    if deltas:
        begin = begin_of(deltas[0])
        end = deltas[-1]._batch.ends.get(deltas[-1]._entry, end)
    message = Deltas(
        b"",
        pack_u32([begin.num_chars]),
        pack_u32([begin.num_tokens]),
        [text],
        token_ids,
        pack_u32([len(token_ids) // 4]),
        logprobs=_joined([cut for cut in cuts if cut.width]),
    )
    if any(delta._batch.has_events for delta in deltas):
        message = _with_events(message, deltas)
    joined = DeltaBatch(message, {0: end} if end is not None else {})
    if deltas:
        with_token = next((delta for delta in deltas if delta.num_tokens), deltas[0])
        joined.first_at = with_token._batch.first_at
        joined.last_at = deltas[-1]._batch.last_at
    return Delta(text, joined, 0)


def _with_events(message: Deltas, deltas: Sequence[Delta]) -> Deltas:
    """The message of joined deltas, with their events."""
    kinds = [kind_of(delta) for delta in deltas]
    if not any(kind != 0 for kind in kinds):
        return message
    events = joined_entries(
        (delta.text, events_of(delta) if kind is None else kind, delta.num_tokens)
        for delta, kind in zip(deltas, kinds, strict=True)
    )
    joined = kind_of_events(message.texts[0], events, len(message.token_ids) // 4)
    if isinstance(joined, int):
        return replace(message, kinds=pack_u32([joined]))
    return replace(message, event_entries=pack_u32([0]), events=(joined,))


def _joined(cuts: Sequence[EntryColumns]) -> LogprobColumns | None:
    if not cuts:
        return None
    width = cuts[0].width  # the same for all deltas of a stream
    assert all(cut.width == width for cut in cuts)
    return LogprobColumns(
        width,
        b"".join([cut.values for cut in cuts]),
        b"".join([cut.ids for cut in cuts]),
        b"".join([cut.ranks for cut in cuts]),
    )
