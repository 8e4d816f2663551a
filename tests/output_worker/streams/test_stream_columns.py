"""Streams whose tokens go the columns' way, against one output that sees every token."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.helpers.admits import admit_of

from slipstream_ipc.columns import check_deltas, pack_u32, u32
from slipstream_ipc.formats.answer_format import digest
from slipstream_ipc.formats.table import find_format
from slipstream_ipc.history.event_log import UnitEvents, joined_events
from slipstream_ipc.history.text_log import START
from slipstream_ipc.messages import (
    Admit,
    AnswerEvent,
    AnswerOptions,
    AnswerSettings,
    EventKind,
    LogprobColumns,
    RepetitionDetection,
    SamplingParams,
)
from slipstream_ipc.row_set import RowSet
from slipstream_worker.clients import deltas
from slipstream_worker.clients.latency import RequestCounters
from slipstream_worker.detokenizer.factory import TableDetokenizerFactory
from slipstream_worker.detokenizer.table import TokenTable
from slipstream_worker.detokenizer.text_columns import TextColumns, VocabularyView, character_sets
from slipstream_worker.output.answer_output import AnswerOutput
from slipstream_worker.output.stream_output import StreamOutput
from slipstream_worker.streams.registration import open_output
from slipstream_worker.streams.slow_path import push_slow
from slipstream_worker.streams.stream import Reader, Stage, WorkerStream
from slipstream_worker.streams.stream_columns import StreamColumns

E_ACUTE = "é".encode()
PIECES = [b"", b"a", b"b", b"ab", b" ", E_ACUTE[:1], E_ACUTE[1:], E_ACUTE, b"", b"c", b"d", b"cd"]
EOS, STOP = 0, 9
THINK, THOUGHT, CALL, CALLED = range(len(PIECES), len(PIECES) + 4)
DELIMITERS = [b"<think>", b"</think>", b"<tool_call>", b"</tool_call>"]
BEGIN, CLOSE = len(PIECES) + 4, len(PIECES) + 5
A_CALL = [CALL, BEGIN, 1, 2, 3, CLOSE, CALLED]
PIECES += [*DELIMITERS, b'{"name": "f", "arguments": {"x": "', b'"}}', b"\n", b"<"]
FACTORY = TableDetokenizerFactory(
    TokenTable(mode="bytelevel", pieces=PIECES, special=[EOS, CALL]),
    {piece.decode(): THINK + at for at, piece in enumerate(DELIMITERS)},
)
FORMAT = find_format("qwen3+hermes")
assert FORMAT is not None
ANSWER = AnswerSettings(FORMAT.name, digest(FORMAT))
BEYOND = len(PIECES) + 3  # an id without a token


@dataclass
class Sent:
    """What a reader has."""

    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    ranks: list[int] = field(default_factory=list)
    events: list[AnswerEvent] = field(default_factory=list)
    is_ended: bool = False


DETECTIONS = [
    RepetitionDetection(max_pattern_size=2, min_count=3),
    RepetitionDetection(max_pattern_size=4, min_pattern_size=2, min_count=2),
]


@st.composite
def registrations(draw: st.DrawFn) -> Admit:
    has_text = draw(st.sampled_from([True, True, True, False]))
    stops = st.lists(st.text("abcdé ", min_size=1, max_size=3), max_size=2)
    params = SamplingParams(
        stop=tuple(draw(stops)) if has_text else (),
        detokenize=has_text,
        include_stop_str_in_output=draw(st.booleans()),
        min_tokens=draw(st.integers(0, 3)),
        logprobs=draw(st.sampled_from([None, None, 0, 2])),
        skip_special_tokens=draw(st.booleans()),
        stream_interval=draw(st.sampled_from([1, 1, 3])),
        repetition_detection=draw(st.sampled_from([None, None, *DETECTIONS])),
        stop_token_ids=draw(st.sampled_from([(), (STOP,), (BEYOND,)])),
    )
    eos = draw(st.sampled_from([(), (EOS,)]))
    options = AnswerOptions(stop_scope=draw(st.sampled_from(["content", "content", "all"])))
    answer = AnswerSettings(FORMAT.name, digest(FORMAT), options=options)
    return admit_of(
        stream_id=b"",
        prompt_ids=pack_u32(draw(st.sampled_from([[1], [1, 5]]))),
        params=params,
        stop_token_ids=eos + params.stop_token_ids,
        seed=0,
        max_tokens=draw(st.integers(1, 40)),
        answer=draw(st.sampled_from([None, answer])) if has_text else None,
    )


TOKENS = st.sampled_from(
    [1, 1, 2, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, EOS, BEYOND, *range(THINK, len(PIECES))]
)
SPANS = st.one_of(
    st.lists(TOKENS, min_size=1, max_size=4),
    st.sampled_from([[THINK, 1, 2], [1, THOUGHT, 1], A_CALL, A_CALL[:3], A_CALL[3:]]),
)


@settings(max_examples=300, deadline=None)
@given(st.data())
def test_both_ways_give_what_one_output_gives(data: st.DataObject) -> None:
    columns = StreamColumns(data.draw(st.sampled_from([FACTORY.fast_table] * 3 + [None])))
    admits = data.draw(st.lists(registrations(), min_size=1, max_size=5))
    streams, oracles, copies = [], [], []
    for number, admit in enumerate(admits):
        stream = WorkerStream(bytes([number]), Stage.RUNNING, registration=admit)
        stream.output = open_output(admit, FACTORY)
        stream.interval = admit.spec.params.stream_interval
        stream.reader = Reader(b"client", number)
        columns.open(stream, admit)
        columns.handles[stream.worker_row] = number
        streams.append(stream)
        oracles.append(open_output(admit, FACTORY))
        copies.append(Sent())
    told: list[list[int]] = [[] for _ in streams]
    for _ in range(data.draw(st.integers(1, 25))):
        push(data, columns, streams, oracles, told)
        if data.draw(st.booleans()):
            send(columns, streams, copies)
        for oracle, copy in zip(oracles, copies, strict=True):
            assert oracle.log.find(len(copy.text), len(copy.token_ids)) is not None
    for stream, oracle in zip(streams, oracles, strict=True):
        if oracle.end is None:
            columns.make_slow(stream, columns.num_tokens(stream))
            stream.output.finish("abort")
            oracle.finish("abort")
        columns.is_dirty[stream.worker_row] = True
    while send(columns, streams, copies):
        pass
    for stream, oracle, copy, ids in zip(streams, oracles, copies, told, strict=True):
        end = oracle.log.end
        assert copy.text == oracle.log.text_between(START, end)
        assert copy.token_ids == ids[: end.num_tokens]
        assert copy.is_ended == (oracle.end is not None)
        assert stream.output is not None
        assert stream.output.end == oracle.end
        wanted = stream.registration.spec.params.logprobs is not None
        if isinstance(oracle, AnswerOutput):
            assert joined_events(copy.events) == listed(
                oracle.event_log.events_between(START, end), copy.text
            )
        else:
            assert not copy.events
        assert copy.ranks == ([token + 7 for token in copy.token_ids] if wanted else [])


def listed(events: UnitEvents, text: str) -> tuple[AnswerEvent, ...]:
    """The events of a text, which is one of them if they are a kind."""
    if isinstance(events, tuple):
        return joined_events(events)
    return (AnswerEvent(EventKind(events & 0xFF), text, events >> 8),) if events else ()


def push(
    data: st.DataObject,
    columns: StreamColumns,
    streams: list[WorkerStream],
    oracles: list[StreamOutput],
    told: list[list[int]],
) -> None:
    """One step: a few streams have new tokens."""
    going = [n for n, stream in enumerate(streams) if stream.output.end is None]
    chosen = [n for n in going if data.draw(st.booleans())]
    if not chosen:
        return
    is_one_each = data.draw(st.booleans())
    spans = [[data.draw(TOKENS)] if is_one_each else data.draw(SPANS) for _ in chosen]
    worker_rows = np.array([streams[n].worker_row for n in chosen])
    counts = None if is_one_each else np.array([len(span) for span in spans])
    ids = np.array([token for span in spans for token in span], np.uint32)
    widths = [int(columns.widths[worker_row]) for worker_row in worker_rows]
    if any(widths):
        values = [w for span, w in zip(spans, widths, strict=True) for _ in range(len(span) * w)]
        ranked = [t + 7 for span, w in zip(spans, widths, strict=True) if w for t in span]
        logprobs = LogprobColumns(
            0, bytes(4 * len(values)), bytes(4 * len(values)), pack_u32(ranked), pack_u32(widths)
        )
        columns.logprobs.append_columns(RowSet(worker_rows), counts, logprobs)
    to_check = columns.append(RowSet(worker_rows), counts, ids)
    for at, (n, span) in enumerate(zip(chosen, spans, strict=True)):
        told[n] += span
        oracles[n].push(span)
        if at in to_check:
            assert push_slow(columns, streams[n], span) == (oracles[n].end is not None)
        assert streams[n].output.end == oracles[n].end, "only what needs care can end"


def send(columns: StreamColumns, streams: list[WorkerStream], copies: list[Sent]) -> bool:
    """What a client's port does; every position must be one of the whole stream's."""
    numbers = [s.worker_row for s, c in zip(streams, copies, strict=True) if not c.is_ended]
    fast, fast_counts, slow_rows = columns.loops.due(np.array(numbers, np.int64), False)
    slow = [s for row in slow_rows if (s := columns.streams[row]) and deltas.is_due(s)]
    if not fast and not slow:
        return False
    built = deltas.build(columns, fast, fast_counts, slow)
    message = built.message
    check_deltas(message)
    counts = u32(message.counts).tolist() if message.counts else [1] * len(message.texts)
    ids, ranks = u32(message.token_ids).tolist(), []
    widths = [0] * len(counts)
    if message.logprobs is not None:
        ranks = u32(message.logprobs.ranks).tolist()
        same = [message.logprobs.width] * len(counts)
        widths = u32(message.logprobs.widths).tolist() if message.logprobs.widths else same
    handles = u32(message.handles).tolist()
    kinds = u32(message.kinds).tolist() if message.kinds else [0] * len(handles)
    own = dict(zip(u32(message.event_entries).tolist(), message.events, strict=True))
    for i, handle in enumerate(handles):
        copy = copies[handle]
        assert u32(message.chars)[i] == len(copy.text)
        assert u32(message.tokens)[i] == len(copy.token_ids)
        copy.text += message.texts[i]
        assert message.texts[i] or not kinds[i]
        copy.events += own.get(i, listed(kinds[i], message.texts[i]))
        copy.token_ids += ids[: counts[i]]
        del ids[: counts[i]]
        if widths[i]:
            copy.ranks += ranks[: counts[i]]
            del ranks[: counts[i]]
    for i in u32(message.ended).tolist():
        copies[handles[i]].is_ended = True
    RequestCounters().delivered(columns, built, 1.0)
    return True


@given(st.lists(st.text("aé\n \x0eZ~", max_size=4), max_size=8), st.text("aé\n\x1e", max_size=3))
def test_texts_without_a_common_bit_have_no_common_character(texts: list[str], other: str) -> None:
    low, high = character_sets([*texts, other])
    for n, text in enumerate(texts):
        if not (low[n] & low[-1]) | (high[n] & high[-1]):
            assert set(text).isdisjoint(other)


def test_ascii_letters_have_a_bit_each() -> None:
    letters = [chr(c) for c in range(33, 127)]
    low, high = character_sets(letters)
    assert len({(int(a), int(b)) for a, b in zip(low, high, strict=True)}) == len(letters)


def test_each_view_has_an_entry_for_ids_beyond_the_vocabulary() -> None:
    table = TextColumns(["x", None], ["", None])
    for view, text, length in (
        (VocabularyView.SHOWN, "x", 1),
        (VocabularyView.SKIPPED, "", 0),
        (VocabularyView.SILENT, "", 0),
    ):
        at = table.first(view)
        assert (table.texts[at], table.lens[at]) == (text, length)
    assert (
        table.lens[table.first(VocabularyView.SHOWN) + 2]
        == table.lens[table.first(VocabularyView.SHOWN) + 1]
        == -1
    )


def test_what_is_harmless_is_learnt_for_each_set_of_stop_strings(monkeypatch) -> None:
    monkeypatch.setattr("slipstream_worker.streams.fast_path._MAX_SETS", 2)
    columns = StreamColumns(FACTORY.fast_table)

    def new(*stops: str) -> WorkerStream:
        admit = admit_of(b"", pack_u32([1]), SamplingParams(stop=stops), (), 0, 99)
        stream = WorkerStream(
            b"", Stage.RUNNING, registration=admit, output=open_output(admit, FACTORY)
        )
        columns.open(stream, admit)
        columns.make_fast(stream, START)
        return stream

    def needs_check(stream: WorkerStream, token: int) -> bool:
        worker_row = RowSet(np.array([stream.worker_row]))
        care = columns.append(worker_row, None, np.array([token], np.uint32))
        if care:
            columns.record_harmless(stream, stream.output, token)
        return bool(care)

    ab = 3
    first = new("aa", "bc")
    assert needs_check(first, ab), "its first character begins a stop string"
    assert needs_check(first, ab), "and its last one, too: it is not harmless"
    second = new("ac")
    assert needs_check(second, ab)
    assert not needs_check(second, ab), "ab can not begin ac"
    assert not needs_check(new("ac"), ab), "known for the set, not the stream"
    third = new("ad")  # takes the place of the oldest set
    assert needs_check(third, ab)
    assert not needs_check(third, ab)
    assert needs_check(first, ab)
    assert not needs_check(second, ab)


@pytest.mark.parametrize(
    ("before", "kind"),
    [
        ([1], EventKind.CONTENT),
        ([THINK, 1], EventKind.REASONING),
        ([CALL, BEGIN], EventKind.CALL_ARGUMENTS),
        ([*A_CALL, CALL, BEGIN], EventKind.CALL_ARGUMENTS | 1 << 8),
    ],
)
def test_plain_tokens_of_one_kind_need_no_check(before: list[int], kind: int) -> None:
    columns = StreamColumns(FACTORY.fast_table)
    admit = admit_of(b"", pack_u32([1]), SamplingParams(stop=("b",)), (), 0, 99, answer=ANSWER)
    stream = WorkerStream(b"", Stage.RUNNING, registration=admit)
    stream.output, stream.reader = open_output(admit, FACTORY), Reader(b"client", 0)
    columns.open(stream, admit)
    row = stream.worker_row
    copies = [Sent()]

    def needs_check(*token_ids: int) -> list[bool]:
        found = []
        for token_id in token_ids:
            ids = np.array([token_id], np.uint32)
            found.append(bool(columns.append(RowSet(np.array([row])), None, ids)))
            if found[-1]:
                push_slow(columns, stream, [token_id])
            send(columns, [stream], copies)
        return found

    assert needs_check(*before)[-1]
    assert columns.is_fast[row]
    assert not any(needs_check(1, 1, 10))
    is_stopped = kind == EventKind.CONTENT  # elsewhere the stop string is text
    assert columns.kinds[row] == kind
    assert needs_check(2) == [is_stopped]
    last = copies[0].events[-1]
    assert (last.kind | last.call << 8, last.text) == (kind, "d" if is_stopped else "b")
    if not is_stopped:
        assert needs_check(THOUGHT, 1, 1) == [True, kind == EventKind.REASONING, False]


def test_an_id_beyond_the_vocabulary_has_no_text_where_none_is_wanted() -> None:
    columns = StreamColumns(FACTORY.fast_table)
    admit = admit_of(b"", pack_u32([1]), SamplingParams(detokenize=False), (), 0, 9)
    stream = WorkerStream(b"", Stage.RUNNING, registration=admit, reader=Reader(b"client", 0))
    stream.output = open_output(admit, FACTORY)
    columns.open(stream, admit)
    copies = [Sent()]
    for ids in ([1], [BEYOND], [2**32 - 1, 1], [BEYOND, BEYOND]):
        worker_rows, counts = RowSet(np.array([stream.worker_row])), np.array([len(ids)])
        if columns.append(worker_rows, counts, np.array(ids, np.uint32)):
            push_slow(columns, stream, ids)
        send(columns, [stream], copies)
    assert copies[0].token_ids == [1, BEYOND, 2**32 - 1, 1, BEYOND, BEYOND]
    assert copies[0].text == ""


def test_worker_rows_are_taken_again_and_keep_nothing() -> None:
    columns = StreamColumns(FACTORY.fast_table)
    admit = admit_of(b"", pack_u32([1]), SamplingParams(stop=("b",)), (EOS,), 0, 9)
    for _ in range(3):
        some = [WorkerStream(bytes([n]), Stage.RUNNING, registration=admit) for n in range(100)]
        for stream in some:
            columns.open(stream, admit)
        worker_rows = np.array([stream.worker_row for stream in some])
        assert len(set(worker_rows.tolist())) == 100
        assert columns.tokens.lengths(worker_rows).sum() == 0
        columns.append(RowSet(worker_rows), None, np.full(100, 1, np.uint32))
        for stream in some:
            columns.close(stream)
            columns.close(stream)
    assert columns.tokens.num_pages_used == 0
    assert len(columns.streams) == 101
