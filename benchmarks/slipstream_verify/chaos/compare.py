"""Finds what is lost, doubled or different in the records of a run.

- Pieces carry their positions. Positions between two pieces are lost, positions in two of them are
  doubled, for tokens and characters alike; neither is repaired here.
- An answer is identical if text, token ids, all logprobs, prompt ids, the reason of its end and its
  events are equal. Over HTTP the text, the message and its usage, and the reason can be compared.
- Positions missing at an answer's end are lost, too, even if its reader got an error.
- A simulated model computes integers, so everything must be identical. Every token of a real model
  must be the reference model's, or within its tolerance: a stream that diverges from the
  undisturbed one at such a near tie is right if its text matches its tokens and its finish reason
  follows from them. Over HTTP there are no token ids, so the text must be the same.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

from msgspec import Struct, field, structs
from tokenizers import Tokenizer

from slipstream_ipc.history.event_log import joined_events
from slipstream_ipc.messages import AnswerEvent, EventKind, ModelCard
from slipstream_verify.chaos.journal import (
    AskedAgain,
    Failed,
    ReceivedDelta,
    Record,
    TokenCandidates,
)
from slipstream_verify.chaos.workload.chaos_workload import ChaosRequest
from slipstream_verify.chaos.workload.reference_model import (
    TOLERANCE,
    ReferenceModel,
    ReferenceSummary,
    summarise,
)

_SHOWN = 40  # characters shown of a difference
_LOGPROB_TOLERANCE = 1e-3


class ChaosAnswer(Struct, frozen=True):
    """Everything that a request's reader receives. None: not received, or not requested."""

    text: str
    token_ids: tuple[int, ...] | None = None
    logprobs: tuple[TokenCandidates, ...] | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    prompt_ids: tuple[int, ...] | None = None
    events: tuple[AnswerEvent, ...] = ()
    usage: tuple[int, ...] | None = None


class AssembledStream(Struct):
    """One request's stream, assembled from its records."""

    index: int
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenCandidates] | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    prompt_ids: tuple[int, ...] | None = None
    num_chars: int = 0
    num_tokens: int = 0
    lost: int = 0
    doubled: int = 0
    num_again: int = 0
    num_afresh: int = 0  # of those, read from the beginning
    error: str | None = None
    times_s: list[float] = field(default_factory=list)
    kinds: list[EventKind | None] = field(default_factory=list)  # the last event's, at each time
    problems: list[str] = field(default_factory=list)
    events: list[AnswerEvent] = field(default_factory=list)
    usage: tuple[int, ...] | None = None

    @property
    def is_over(self) -> bool:
        """Whether it has ended, with or without an error."""
        return self.finish_reason is not None or self.error is not None

    def take(self, record: Record) -> None:
        """Add the next record, in the order of writing."""
        match record:
            case ReceivedDelta():
                self._take_piece(record)
            case AskedAgain():
                self.num_again += 1
                if record.is_afresh:
                    self.num_afresh += 1
                    self.text, self.token_ids, self.logprobs, self.events = "", [], None, []
                    self.num_chars = self.num_tokens = 0
            case Failed():
                self.error = record.error

    def _take_piece(self, piece: ReceivedDelta) -> None:
        if self.is_over:
            self.problems.append("something came after the end")
        for begin, end in (
            (piece.num_chars, self.num_chars),
            (piece.num_tokens, self.num_tokens),
        ):
            self.lost += max(0, begin - end)
            self.doubled += max(0, end - begin)
        self.num_chars = piece.num_chars + len(piece.text)
        self.num_tokens = piece.num_tokens + len(piece.token_ids)
        self.text += piece.text
        self.token_ids += piece.token_ids
        if piece.logprobs is not None:
            self.logprobs = [*(self.logprobs or []), *piece.logprobs]
        if piece.prompt_ids is not None:
            if self.prompt_ids not in (None, piece.prompt_ids):
                self.problems.append("the prompt's ids have changed")
            self.prompt_ids = piece.prompt_ids
        self.finish_reason, self.stop_reason = piece.finish_reason, piece.stop_reason
        self.events += piece.events
        self.usage = piece.usage
        self.times_s.append(piece.time_s)
        self.kinds.append(self.events[-1].kind if self.events else None)

    @property
    def answer(self) -> ChaosAnswer:
        """Everything that was received."""
        return ChaosAnswer(
            self.text,
            tuple(self.token_ids),
            tuple(self.logprobs) if self.logprobs else None,
            self.finish_reason,
            self.stop_reason,
            self.prompt_ids,
            joined_events(self.events),
            self.usage,
        )


class Verdict(Struct, frozen=True):
    """The comparison of one request with its expected answer."""

    index: int
    differences: tuple[str, ...]
    lost: int
    doubled: int

    @property
    def is_identical(self) -> bool:
        """Whether no difference is visible."""
        return not (self.differences or self.lost or self.doubled)


def assemble(records: Iterable[Record], num_requests: int) -> list[AssembledStream]:
    """The streams of all requests, by index; empty where there are no records."""
    streams = [AssembledStream(index) for index in range(num_requests)]
    for record in records:
        streams[record.index].take(record)
    return streams


def compare(
    expected: ChaosAnswer,
    streamed: AssembledStream,
    *,
    is_http: bool = False,
    tolerance: float = 0.0,
) -> Verdict:
    """Compare a stream with its expected answer.

    tolerance: allowed error of logprobs, where the same tokens may have been computed in another
    batch; other candidates than the token itself are then not compared, as close ones may swap
    ranks.
    """
    differences = list(streamed.problems)
    if streamed.error is not None:
        differences.append(f"failed: {streamed.error}")
    elif not streamed.is_over:
        differences.append("never ended")
    lost = streamed.lost + max(0, len(expected.text) - streamed.num_chars)
    differences += _difference("text", expected.text, streamed.text)
    differences += _difference("finish_reason", expected.finish_reason, streamed.finish_reason)
    if is_http:
        messages = (message_of(expected.events), message_of(streamed.events))
        differences += _difference("message", *map(str, messages))
        differences += _difference("usage", expected.usage, streamed.usage)
    else:
        ids = expected.token_ids or ()
        lost += max(0, len(ids) - streamed.num_tokens)
        differences += _difference("token_ids", ids, tuple(streamed.token_ids))
        logprobs = tuple(streamed.logprobs) if streamed.logprobs else None  # None without tokens
        if not tolerance or not _are_close(expected.logprobs, logprobs, tolerance):
            differences += _difference("logprobs", expected.logprobs or None, logprobs)
        differences += _difference("stop_reason", expected.stop_reason, streamed.stop_reason)
        differences += _difference("prompt_ids", expected.prompt_ids, streamed.prompt_ids)
        differences += _difference("events", *map(shown, (expected.events, streamed.events)))
    return Verdict(streamed.index, tuple(differences), lost, streamed.doubled)


def message_of(events: Iterable[AnswerEvent]) -> list[str]:
    """The parts of a message, by which it is compared over HTTP: a chunk does not say which of its
    parts came first.
    """
    content = reasoning = ""
    calls: list[str] = []
    for event in events:
        match event.kind:
            case EventKind.CONTENT:
                content += event.text
            case EventKind.REASONING:
                reasoning += event.text
            case EventKind.CALL_BEGINS:
                calls.append(f"{event.call_id} {event.text} ")
            case EventKind.CALL_ARGUMENTS:
                calls[event.call] += event.text
    return [content, reasoning, *calls]


def shown(events: Iterable[AnswerEvent]) -> str:
    """All that the events say, as text."""
    return "; ".join(
        f"{event.kind.name.lower()} {event.call} {event.call_id!r} {event.text!r}"
        for event in joined_events(events)
    )


def _are_close(
    one: Sequence[TokenCandidates] | None, other: Sequence[TokenCandidates] | None, tolerance: float
) -> bool:
    if one is None or other is None or len(one) != len(other):
        return one is other
    return all(
        a[0][0] == b[0][0] and abs(a[0][1] - b[0][1]) <= tolerance and len(a) == len(b)
        for a, b in zip(one, other, strict=True)
    )


def _difference(name: str, expected: object, got: object) -> list[str]:
    if expected == got:
        return []
    if isinstance(expected, Sequence) and isinstance(got, Sequence):
        at = first_difference(expected, got)
        shown = [repr(one[at : at + _SHOWN])[: 2 * _SHOWN] for one in (expected, got)]
        lens = f"{len(expected)} and {len(got)} long"
        return [f"{name} differ from position {at} on ({lens}): {shown[0]}, got {shown[1]}"]
    return [f"{name}: {expected!r:.80}, got {got!r:.80}"]


def first_difference(one: Sequence[object], other: Sequence[object]) -> int:
    """The first position at which two sequences differ."""
    pairs = zip(one, other, strict=False)
    return next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(one), len(other)))


def exact_verdicts(
    requests: Sequence[ChaosRequest],
    expected: Sequence[ChaosAnswer],
    streams: Sequence[AssembledStream],
) -> list[Verdict]:
    """Verdicts for a simulated model."""
    return [
        compare(answer, streamed, is_http=request.via == "http")
        for request, answer, streamed in zip(requests, expected, streams, strict=True)
    ]


def real_verdicts(
    requests: Sequence[ChaosRequest],
    expected: Sequence[ChaosAnswer],
    streams: Sequence[AssembledStream],
    card: ModelCard,
) -> tuple[list[Verdict], ReferenceSummary]:
    """Verdicts for a real model, and the summary of its reference model."""
    reference = ReferenceModel(card)
    tokenizer = Tokenizer.from_file(str(Path(card.path) / "tokenizer.json"))
    verdicts: list[Verdict] = []
    margins: list[float] = []
    for request, answer, streamed in zip(requests, expected, streams, strict=True):
        if request.via == "http":
            verdicts.append(compare(answer, streamed, is_http=True))
            continue
        verdict = compare(answer, streamed, tolerance=_LOGPROB_TOLERANCE)
        found = reference.margins(request, streamed.prompt_ids or (), streamed.token_ids)
        margins += found
        wrong = [f"token {i} lies {m:.3g} below" for i, m in enumerate(found) if m > TOLERANCE]
        if wrong:
            verdict = structs.replace(verdict, differences=(*verdict.differences, *wrong[:3]))
        elif tuple(streamed.token_ids) != answer.token_ids:
            problems = _problems_of_another(request, streamed, tokenizer)
            # a shorter answer has not lost positions
            verdict = Verdict(request.index, tuple(problems), streamed.lost, streamed.doubled)
        verdicts.append(verdict)
    return verdicts, summarise(margins)


def _problems_of_another(
    request: ChaosRequest, streamed: AssembledStream, tokenizer: Tokenizer
) -> list[str]:
    """The faults of a stream whose tokens are right but differ from the undisturbed ones."""
    params = request.params
    problems = list(streamed.problems)
    if streamed.error is not None:
        return [*problems, f"failed: {streamed.error}"]
    whole = tokenizer.decode(streamed.token_ids, skip_special_tokens=params.skip_special_tokens)
    if params.detokenize and not whole.startswith(streamed.text.rstrip("\ufffd")):
        problems.append("its text is not that of its tokens")
    if streamed.finish_reason == "length":
        if len(streamed.token_ids) != params.max_tokens:
            problems.append(f"ended by length with {len(streamed.token_ids)} tokens")
    elif streamed.finish_reason != "stop":
        problems.append(f"ended by {streamed.finish_reason}")
    return problems
