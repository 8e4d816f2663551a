"""The output of a stream that is read as events, against oracles that see everything at once."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.msgpack import encode
from tests.helpers.admits import admit_of, with_fields

from slipstream_ipc.columns import pack_u32
from slipstream_ipc.formats.answer_format import digest
from slipstream_ipc.formats.table import find_format
from slipstream_ipc.history.event_log import UnitEvents, joined_events, kind_of
from slipstream_ipc.history.text_log import START, TextCursor
from slipstream_ipc.messages import (
    Admit,
    AnswerEvent,
    AnswerOptions,
    AnswerSettings,
    EventKind,
    Fault,
    SamplingParams,
)
from slipstream_ipc.messages.budgets import MESSAGE_BUDGET_BYTES
from slipstream_worker.detokenizer.factory import TableDetokenizerFactory
from slipstream_worker.detokenizer.table import TokenTable
from slipstream_worker.formats.answer_reader import LocatedEvent
from slipstream_worker.formats.compiled_format import compile_format
from slipstream_worker.formats.start_state import start_state
from slipstream_worker.output.answer_output import AnswerOutput
from slipstream_worker.output.answer_reading import UnknownFormat, open_reader
from slipstream_worker.output.stream_output import StreamOutput
from slipstream_worker.streams.registration import open_output

QWEN = "<tool_call>\n<function=f>\n<parameter=c>\n["
QWEN_END = "\n</parameter>\n</function>\n</tool_call>"
E_ACUTE = "é".encode()
SPECIAL = [b"", b"<think>", b"</think>", b"<tool_call>", b"</tool_call>"]
PIECES = [
    *SPECIAL,
    b"a",
    b"b",
    b"ab",
    b" ",
    b"\n\n",
    b"a\n",
    E_ACUTE[:1],
    E_ACUTE[1:],
    E_ACUTE,
    b"<",
    b"think>",
    b'{"name": "f", "arguments": {',
    b'"x": "',
    b'y"',
    b', "n": 1',
    b"2",
    b"}}",
    b"{}}",
    b"c",
]
EOS, THINK, THOUGHT, CALL, CALLED = range(5)
STOP = len(PIECES) - 1
DELIMITERS = {piece.decode(): at for at, piece in enumerate(SPECIAL) if piece}
FACTORY = TableDetokenizerFactory(
    TokenTable(mode="bytelevel", pieces=PIECES, special=[EOS, THINK, CALL, CALLED]), DELIMITERS
)
HALVES = {PIECES.index(E_ACUTE[:1]), PIECES.index(E_ACUTE[1:])}
FORMAT = find_format("qwen3+hermes")
assert FORMAT is not None
ANSWER = AnswerSettings(FORMAT.name, digest(FORMAT), tools='{"f": {}}')
A_CALL = [CALL, *(PIECES.index(piece) for piece in (PIECES[16], PIECES[17], PIECES[18], b"}}"))]


@dataclass(frozen=True)
class Case:
    token_ids: list[int]
    stops: tuple[str, ...] = ()
    include: bool = False
    min_tokens: int = 0
    max_tokens: int = 99
    skips: bool = True
    scope: str = "content"

    @property
    def admit(self) -> Admit:
        params = SamplingParams(
            stop=self.stops,
            include_stop_str_in_output=self.include,
            min_tokens=self.min_tokens,
            skip_special_tokens=self.skips,
            stop_token_ids=(STOP,),
        )
        answer = AnswerSettings(
            ANSWER.format,
            ANSWER.digest,
            tools=ANSWER.tools,
            options=AnswerOptions(stop_scope=self.scope),  # type: ignore[arg-type]
        )
        return admit_of(b"", pack_u32([5]), params, (EOS, STOP), 0, self.max_tokens, answer=answer)


def make(case: Case) -> AnswerOutput:
    output = open_output(case.admit, FACTORY)
    assert isinstance(output, AnswerOutput)
    return output


def plain(case: Case) -> StreamOutput:
    admit = case.admit
    params = admit.spec.params
    return open_output(
        admit_of(
            b"", admit.prompt_ids, params, admit.derived.stop_token_ids, 0, admit.derived.max_tokens
        ),
        FACTORY,
    )


ids = st.integers(0, len(PIECES) - 1)
# calls are rare among random tokens
spans = st.lists(
    st.one_of(
        st.lists(ids, max_size=4),
        st.just([THINK]),
        st.just([THOUGHT]),
        st.just([*A_CALL, CALLED]),
        st.integers(1, len(A_CALL)).map(lambda num: A_CALL[:num]),
    ),
    max_size=6,
).map(lambda lists: [token_id for some in lists for token_id in some])


@st.composite
def cases(draw: st.DrawFn) -> Case:
    token_ids = draw(spans)
    stops = draw(st.lists(st.text("abé \n", min_size=1, max_size=3), max_size=2))
    min_tokens = draw(st.sampled_from([0, 0, 2, 5]))
    return Case(
        token_ids,
        tuple(stops),
        draw(st.booleans()),
        min_tokens,
        draw(st.integers(max(1, min_tokens), 40)),
        draw(st.booleans()),
        draw(st.sampled_from(["content", "content", "all"])),
    )


def units(output: AnswerOutput) -> list[tuple[TextCursor, str, object]]:
    log, at, found = output.event_log, START, []
    while at != log.end:
        after = log.advance(at, 0, 0)
        found.append((after, log.text_between(at, after), log.events_between(at, after)))
        at = after
    return found


def events_of(output: AnswerOutput) -> tuple[AnswerEvent, ...]:
    log = output.event_log
    events = log.events_between(START, log.end)
    if isinstance(events, tuple):
        return joined_events(events)
    text = log.text_between(START, log.end)
    return (AnswerEvent(EventKind(events & 0xFF), text, events >> 8),) if events else ()


def text_of(output: StreamOutput) -> str:
    return output.log.text_between(START, output.log.end)


def reading(case: Case, token_ids: list[int], *, ends: bool) -> tuple[AnswerEvent, ...]:
    """The events of these tokens without stop strings; `ends`: the last one may be a stop id."""
    reader, delimiter_ids = open_reader(ANSWER, FACTORY.delimiter_ids)
    pieces, run = [], b""
    for at, token_id in enumerate(token_ids):
        is_hidden = token_id in (EOS, STOP) and ends and at == len(token_ids) - 1
        if token_id in delimiter_ids:
            pieces += reader.feed(run.decode("utf-8", "replace")) if run else []
            pieces += reader.feed_delimiter(token_id)
            run = b""
        elif not (is_hidden and not case.include):
            run += PIECES[token_id]
    pieces += reader.feed(run.decode("utf-8", "replace")) if run else []
    pieces += reader.finish()
    return joined_events([piece.event for piece in pieces])


@settings(max_examples=500, deadline=None)
@given(cases())
def test_without_a_match_the_events_are_those_of_the_whole(case: Case) -> None:
    output = make(case)
    output.push(case.token_ids)
    is_over = output.end is not None
    if output.end is None:
        output.finish("abort")
    assert output.end is not None
    if isinstance(output.end.stop_reason, str):
        return
    num = output.end.num_tokens
    is_stop = is_over and output.end.reason == "stop"
    assert events_of(output) == reading(case, case.token_ids[:num], ends=is_stop)
    if HALVES.isdisjoint(case.token_ids):  # a delimiter ends the characters before it
        other = plain(Case(**{**vars(case), "stops": ()}))
        other.push(case.token_ids[:num])
        other.finish("abort")
        assert text_of(output) == text_of(other)
        assert output.log.num_tokens == num


@settings(max_examples=300, deadline=None)
@given(cases())
def test_what_has_left_stays_and_leaves_with_its_tokens(case: Case) -> None:
    """However the tokens are divided, and whatever comes: a beginning of what comes to be."""
    output, whole = make(case), make(case)
    whole.push(case.token_ids)
    whole.finish("abort")
    seen = list[object]()
    for token_id in case.token_ids:
        output.push([token_id])
        now = units(output)
        assert now[: len(seen)] == seen
        seen = list(now)
        assert output.log.num_tokens <= output.num_tokens
    output.finish("abort")
    assert units(output) == units(whole)
    assert output.end == whole.end


def first_match(case: Case) -> tuple[int, int, str] | None:
    """Where the first stop string in content ends and begins, in virtual characters."""
    reader, delimiter_ids = open_reader(ANSWER, FACTORY.delimiter_ids)
    pieces, active_from = [], 0
    for num, token_id in enumerate(case.token_ids, 1):
        is_stop = token_id in (EOS, STOP) and num > case.min_tokens
        if token_id in delimiter_ids:
            pieces += reader.feed_delimiter(token_id)
        elif not is_stop or case.include:
            pieces += reader.feed(PIECES[token_id].decode())
        if num == case.min_tokens:
            active_from = reader.num_fed
        if is_stop or num >= case.max_tokens:
            pieces += reader.finish()
            break
    if len(case.token_ids) < case.min_tokens:
        return None
    runs: list[tuple[int, str]] = []  # content without a gap
    for event, start, _ in pieces:
        if event.kind != EventKind.CONTENT:
            runs.append((-1, ""))
        elif runs and runs[-1][0] + len(runs[-1][1]) == start and runs[-1][0] >= 0:
            runs[-1] = runs[-1][0], runs[-1][1] + event.text
        else:
            runs.append((start, event.text))
    for begin, text in runs:
        for end in range(max(0, active_from - begin) + 1, len(text) + 1):
            matches = [stop for stop in case.stops if text[:end].endswith(stop)]
            if matches:
                stop = max(matches, key=len)
                return begin + end, begin + end - len(stop), stop
    return None


@settings(max_examples=600, deadline=None)
@given(cases().filter(lambda case: HALVES.isdisjoint(case.token_ids)))
def test_the_first_stop_string_in_content_wins(case: Case) -> None:
    case = Case(**{**vars(case), "scope": "content"})
    output = make(case)
    output.push(case.token_ids)
    match = first_match(case)
    is_cut = output.end is not None and isinstance(output.end.stop_reason, str)
    assert is_cut == (match is not None)
    if match is None or output.end is None:
        return
    match_end, match_start, stop = match
    cut = match_end if case.include else match_start
    assert output.end.stop_reason == stop
    spans, at = list[tuple[int, int]](), 0
    raw = 0
    for token_id in case.token_ids:
        text = PIECES[token_id].decode()
        spans.append((at, at + len(text)))
        is_shown = not case.skips or token_id not in (EOS, THINK, CALL, CALLED)
        raw += max(0, min(len(text), cut - at)) if is_shown else 0
        at += len(text)
    begun = sum(start < cut for start, _ in spans)
    most = sum(end <= cut for _, end in spans)
    assert begun <= output.end.num_tokens <= max(begun, most)
    assert output.log.end.num_chars == raw
    assert output.log.num_tokens == output.end.num_tokens


@settings(max_examples=500, deadline=None)
@given(cases())
def test_a_match_cuts_content_alone(case: Case) -> None:
    output = make(case)
    output.push(case.token_ids)
    end = output.end
    if end is None or not isinstance(end.stop_reason, str) or case.scope == "all":
        return
    events = events_of(output)
    stop = end.stop_reason
    if case.include:
        assert events[-1].kind == EventKind.CONTENT
        assert events[-1].text.endswith(stop)
    # the same tokens without stop strings: what left is a beginning, and goes on with the match
    free = make(Case(**{**vars(case), "stops": ()}))
    free.push(case.token_ids)
    free.finish("abort")
    assert text_of(free).startswith(text_of(output)) or not HALVES.isdisjoint(case.token_ids)
    longer = events_of(free)
    num_same = len(events) - (1 if events else 0)
    assert longer[:num_same] == events[:num_same]
    if not case.include and events and events[-1].kind == EventKind.CONTENT:
        assert longer[num_same].text.startswith(events[-1].text)
    for event in events:
        if event.kind == EventKind.CONTENT and not case.min_tokens and not case.include:
            assert all(some not in event.text for some in case.stops)
    assert output.log.num_tokens == end.num_tokens


@settings(max_examples=300, deadline=None)
@given(cases().filter(lambda case: HALVES.isdisjoint(case.token_ids)))
def test_stop_strings_of_scope_all_cut_as_without_a_format(case: Case) -> None:
    case = Case(**{**vars(case), "scope": "all"})
    output, other = make(case), plain(case)
    output.push(case.token_ids)
    other.push(case.token_ids)
    for one in (output, other):
        one.finish("abort")
    assert output.end is not None
    assert other.end is not None
    assert text_of(output) == text_of(other)
    assert (output.end.reason, output.end.num_tokens, output.end.stop_reason) == (
        other.end.reason,
        other.end.num_tokens,
        other.end.stop_reason,
    )
    assert output.log.num_tokens == other.log.num_tokens


@settings(max_examples=300, deadline=None)
@given(cases())
def test_events_are_the_same_whether_special_tokens_are_skipped_or_not(case: Case) -> None:
    case = Case(**{**vars(case), "scope": "content"})
    both = [make(Case(**{**vars(case), "skips": skips})) for skips in (False, True)]
    for output in both:
        output.push(case.token_ids)
        output.finish("abort")
    shown, skipped = both
    assert events_of(shown) == events_of(skipped)
    assert shown.end == skipped.end


@settings(max_examples=300, deadline=None)
@given(cases(), st.integers(1, 4))
def test_no_unit_has_more_tokens_than_a_message_takes(case: Case, unit_tokens: int) -> None:
    whole, cut = make(case), make(case)
    cut._unit_tokens = unit_tokens
    for output in (whole, cut):
        output.push(case.token_ids)
        output.finish("abort")
    assert (cut.end, events_of(cut), text_of(cut)) == (whole.end, events_of(whole), text_of(whole))
    cursors = [START, *(cursor for cursor, _, _ in units(cut))]
    assert all(b.num_tokens - a.num_tokens <= unit_tokens for a, b in pairwise(cursors))


def test_a_stop_string_in_reasoning_or_in_an_argument_is_text() -> None:
    output = make(Case([THINK, 5, THOUGHT, *A_CALL, CALLED], ("a", "y")))
    output.push([THINK, 5, THOUGHT, *A_CALL, CALLED])
    assert output.end is None
    output.finish("length")
    kinds = [event.kind for event in events_of(output)]
    assert kinds == [
        EventKind.REASONING,
        EventKind.CALL_BEGINS,
        EventKind.CALL_ARGUMENTS,
        EventKind.CALL_ENDS,
    ]


def test_a_match_never_straddles_a_call() -> None:
    output = make(Case([], ("ab",)))
    output.push([5, *A_CALL, CALLED, 6])
    assert output.end is None


def test_tokens_cut_by_a_match_are_not_counted() -> None:
    output = make(Case([], ("ab",)))
    b, a, space = 6, 5, 8
    assert output.push([THINK, a, THOUGHT, b, space, a, b])
    assert output.end is not None
    assert (output.end.stop_reason, output.end.num_tokens) == ("ab", 5)
    assert events_of(output)[-1] == AnswerEvent(EventKind.CONTENT, "b ")
    assert output.log.num_tokens == 5


@pytest.mark.parametrize(
    ("token_ids", "num"),
    [
        ([THINK, 5, 8, 6, THOUGHT, 5], 3),
        ([THINK, 5, 5], 2),
        ([THINK, 5, EOS], 1),
        ([5, 6], 0),
        ([THINK, THOUGHT, 5], 0),
    ],
)
def test_tokens_between_the_delimiters_are_counted(token_ids: list[int], num: int) -> None:
    output = make(Case([]))
    output.push(token_ids)
    output.finish("abort")
    assert output.end is not None
    assert output.end.num_reasoning_tokens == num


def opened(state: list[tuple[int, str]]) -> AnswerOutput:
    """An output whose answer begins behind these tokens of the prompt."""
    compiled = compile_format(FORMAT, dict(FACTORY.delimiter_ids))
    start = start_state(compiled, state)
    case = Case([])
    answer = AnswerSettings(ANSWER.format, ANSWER.digest, start, ANSWER.tools)
    output = open_output(with_fields(case.admit, answer=answer), FACTORY)
    assert isinstance(output, AnswerOutput)
    return output


def test_an_answer_may_begin_within_reasoning() -> None:
    output = opened([(THINK, "<think>"), (9, "\n\n")])
    output.push([5, 6, THOUGHT, 5])
    output.finish("length")
    assert [(event.kind, event.text) for event in events_of(output)] == [
        (EventKind.REASONING, "ab"),
        (EventKind.CONTENT, "a"),
    ]
    assert output.end is not None
    assert output.end.num_reasoning_tokens == 2


@pytest.mark.parametrize("num", range(1, 5))
def test_an_answer_may_begin_within_a_call(num: int) -> None:
    """What the prompt has begun of a call is said with the first token, however plain that is."""
    texts = ["<tool_call>", *(PIECES[token_id].decode() for token_id in A_CALL[1:])]
    output = opened(list(zip(A_CALL, texts, strict=True))[:num])
    assert not output.is_settled
    output.push([*A_CALL[num:], CALLED])
    first, _, _ = units(output)[0]
    assert first.num_tokens >= 1
    events = [event for event in events_of(output) if event.kind != EventKind.CALL_ARGUMENTS]
    assert [event.kind for event in events] == [EventKind.CALL_BEGINS, EventKind.CALL_ENDS]
    assert not output._events


def test_an_error_releases_nothing_that_is_held() -> None:
    output = make(Case([]))
    output.push([5, CALL])
    before = units(output)
    output.end_with_error(Fault("engine", "test"))
    assert units(output)[: len(before)] == before
    assert [event.text for event in events_of(output)] == ["a"]


@pytest.mark.parametrize(
    "event",
    [
        AnswerEvent(EventKind.CALL_ARGUMENTS, "\ud800"),
        AnswerEvent(EventKind.CALL_BEGINS, "f", 0, "\ud800"),
    ],
)
def test_an_event_that_no_message_can_hold_is_not_released(event: AnswerEvent) -> None:
    """It raises where the stream's handling is caught: the stream ends with an error."""
    output = make(Case([]))
    output.push([5])
    before = units(output)
    output._events.append(LocatedEvent(event, 1, 1))
    with pytest.raises(UnicodeEncodeError):
        output.push([5])
    output.end_with_error(Fault("engine", "test"))
    assert units(output)[: len(before)] == before
    assert all(event.text == "a" for event in events_of(output))


@pytest.mark.parametrize("include", [False, True])
@pytest.mark.parametrize("skips", [False, True])
def test_a_stop_id_that_ends_a_call_is_read(include: bool, skips: bool) -> None:
    """Harmony's `<|call|>`: hidden in the text, and the end of the arguments."""
    marks = ["<|start|>", "<|channel|>", "<|message|>", "<|constrain|>", "<|end|>", "<|call|>"]
    texts = ["analysis", "So", "assistant", " to=functions.f", "commentary", "json", '{"x": 1}']
    vocabulary = [*marks, *texts]
    words = ["<|channel|>", "analysis", "<|message|>", "So", "<|end|>", "<|start|>", "assistant"]
    words += [" to=functions.f", "<|channel|>", "commentary", "<|constrain|>", "json"]
    words += ["<|message|>", '{"x": 1}', "<|call|>"]
    token_ids = [vocabulary.index(word) for word in words]
    factory = TableDetokenizerFactory(
        TokenTable(
            "bytelevel", tuple(word.encode() for word in vocabulary), tuple(range(len(marks)))
        ),
        {mark: at for at, mark in enumerate(marks)},
    )
    harmony = find_format("harmony")
    assert harmony is not None
    params = SamplingParams(include_stop_str_in_output=include, skip_special_tokens=skips)
    call = vocabulary.index("<|call|>")
    answer = AnswerSettings("harmony", digest(harmony), tools='{"f": {}}')
    admit = admit_of(b"", pack_u32([7]), params, (call,), 0, 99, answer=answer)
    output = open_output(admit, factory)
    assert isinstance(output, AnswerOutput)
    assert output.push(token_ids)
    assert [(event.kind, event.text) for event in events_of(output)] == [
        (EventKind.REASONING, "So"),
        (EventKind.CALL_BEGINS, "f"),
        (EventKind.CALL_ARGUMENTS, '{"x": 1}'),
        (EventKind.CALL_ENDS, ""),
    ]
    assert output.end is not None
    assert (output.end.reason, output.end.num_tokens) == ("stop", len(token_ids))
    assert output.end.num_reasoning_tokens == 1
    assert ("<|call|>" in text_of(output)) == (include and not skips)


@pytest.mark.parametrize(
    "settings_",
    [AnswerSettings("qwen3+hermes", b"another"), AnswerSettings("not a format", ANSWER.digest)],
)
def test_a_format_of_another_table_is_never_read_otherwise(settings_: AnswerSettings) -> None:
    with pytest.raises(UnknownFormat):
        open_reader(settings_, FACTORY.delimiter_ids)


def test_a_unit_whose_text_is_its_event_has_a_kind() -> None:
    call = AnswerEvent(EventKind.CALL_ARGUMENTS, "x", 3, num_tokens=2)
    assert kind_of("x", (call,), 2) == EventKind.CALL_ARGUMENTS | 3 << 8
    assert kind_of("y", (call,), 2) == (call,)
    assert kind_of("x", (call,), 3) == (call,)
    assert kind_of("", (), 0) == 0
    assert kind_of("", (), 1) == ()
    assert kind_of("y", (), 1) == ()


def tokens_of(events: UnitEvents, num_tokens: int) -> list[int]:
    """Of each token the kind that it counts for, 0 for none."""
    if isinstance(events, int):
        return [events & 0xFF] * num_tokens
    found = list[int]()
    for event in events:
        found += [0] * event.num_before + [int(event.kind)] * event.num_tokens
    assert len(found) <= num_tokens
    return found + [0] * (num_tokens - len(found))


def tokens_by_their_ends(case: Case) -> list[bool]:
    """Of each token whether its last character is one of content."""
    reader, delimiter_ids = open_reader(ANSWER, FACTORY.delimiter_ids)
    pieces, spans = [], []
    for token_id in case.token_ids:
        start = reader.num_fed
        if token_id in delimiter_ids:
            pieces += reader.feed_delimiter(token_id)
        elif token_id != EOS:
            pieces += reader.feed(PIECES[token_id].decode())
        spans.append((start, reader.num_fed))
    pieces += reader.finish()
    content = [(start, end) for event, start, end in pieces if event.kind == EventKind.CONTENT]
    return [
        start < end and any(begin < end <= stop for begin, stop in content) for start, end in spans
    ]


@settings(max_examples=500, deadline=None)
@given(cases().filter(lambda case: HALVES.isdisjoint(case.token_ids)), st.integers(1, 9))
def test_a_token_counts_for_its_last_character(case: Case, unit_tokens: int) -> None:
    """However the stream is divided, in one unit or several."""
    case = replace_case(case)
    output = make(case)
    output._unit_tokens = unit_tokens
    output.push(case.token_ids)
    output.finish("abort")
    log = output.event_log
    cursors = [START, *(cursor for cursor, _, _ in units(output))]
    found, whole = list[int](), START
    for start, stop in pairwise(cursors):
        num = stop.num_tokens - start.num_tokens
        found += tokens_of(log.events_between(start, stop), num)
        assert tokens_of(log.events_between(whole, stop), stop.num_tokens) == found
    assert [kind == EventKind.CONTENT for kind in found] == tokens_by_their_ends(case)


def replace_case(case: Case) -> Case:
    """The case without an end before its last token."""
    token_ids = [token_id for token_id in case.token_ids if token_id not in (EOS, STOP)]
    return Case(token_ids, max_tokens=len(token_ids) + 1, skips=case.skips, scope=case.scope)


def test_a_token_cut_by_a_stop_string_counts_for_what_is_left() -> None:
    output = make(Case([], ("b",)))
    output.push([THINK, 5, THOUGHT, 5, 7])
    assert output.end is not None
    log = output.event_log
    found = tokens_of(log.events_between(START, log.end), log.num_tokens)
    assert found == [0, EventKind.REASONING, 0, EventKind.CONTENT, EventKind.CONTENT]


@pytest.mark.parametrize(
    ("name", "tools", "head", "filler", "tail"),
    [
        ("none+qwen3_coder", '{"f":{"c":"array"}}', QWEN, " ", f"]{QWEN_END}"),
        ("none+qwen3_coder", '{"f":{"c":"array"}}', QWEN, '"\u4e00",', f"1]{QWEN_END}"),
        ("none+qwen3_coder", '{"f":{"c":"array"}}', QWEN, "1,", "1"),
        ("none+hermes", '{"f":{}}', '<tool_call>{"name": "f", "x": "', "\u4e00", '"}</tool_call>'),
        ("none+hermes", "", '<tool_call>{"arguments": {"x": "', "\x01", '"}, "name": "f"}'),
        ("none+hermes", "", '<tool_call>{"name": "f", "arguments": "{\\"a\\": \\"', "\\u4e00",
         '\\"}"}'),
    ],
)  # fmt: skip
def test_every_unit_fits_into_a_message(
    name: str, tools: str, head: str, filler: str, tail: str
) -> None:
    """What a call holds until its end leaves in one unit, however long it is."""
    part = filler * (1000 // len(filler))
    texts = [text.encode() for text in (head, part, tail)]
    factory = TableDetokenizerFactory(TokenTable(mode="bytelevel", pieces=texts, special=[]), {})
    answer_format = find_format(name)
    settings = AnswerSettings(answer_format.name, digest(answer_format), tools=tools)
    admit = admit_of(b"", pack_u32([0]), SamplingParams(), (), 0, 9999, answer=settings)
    output = open_output(admit, factory)
    assert isinstance(output, AnswerOutput)
    output.push([0, *[1] * 1200, 2])
    output.finish("abort")
    for text, events in zip(output.log._texts, output.event_log._unit_events, strict=True):
        assert len(encode((text, events))) <= 3 * MESSAGE_BUDGET_BYTES


@pytest.mark.parametrize("stops", [("zz",), ("</think>",), ("k>",)])
def test_vllm_14170_14399_stop_strings_take_nothing_from_reasoning(stops: tuple[str, ...]) -> None:
    """They cut reasoning, and the rest of its end came as content."""
    thought, said = PIECES.index(b"ab"), PIECES.index(b"b")
    token_ids = [THINK, thought, thought, THOUGHT, said, EOS]
    output = make(Case(token_ids, stops))
    for token_id in token_ids:
        output.push([token_id])
    assert [(each.kind, each.text) for each in events_of(output)] == [
        (EventKind.REASONING, "abab"),
        (EventKind.CONTENT, "b"),
    ]
