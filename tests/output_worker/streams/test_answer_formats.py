"""Answers of every format, cut into any tokens, on the fast path and off it."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace
from tests.helpers.admits import admit_of
from tests.helpers.answers import delimiter_tokens, divide, join, read, to_items

from slipstream_ipc.columns import check_deltas, pack_u32, u32
from slipstream_ipc.formats.answer_format import digest
from slipstream_ipc.formats.table import CALLS, REASONING, WHOLE, compose, find_format
from slipstream_ipc.formats.tool_types import encode_tool_types
from slipstream_ipc.messages import AnswerEvent, AnswerSettings, EventKind, SamplingParams
from slipstream_ipc.row_set import RowSet
from slipstream_lab.formats.rendering import RENDERINGS, SampleCall, format_of, render
from slipstream_worker.clients import deltas
from slipstream_worker.clients.latency import RequestCounters
from slipstream_worker.detokenizer.factory import TableDetokenizerFactory
from slipstream_worker.detokenizer.table import TokenTable
from slipstream_worker.formats.call_ids import made_call_id
from slipstream_worker.formats.compiled_format import compile_format
from slipstream_worker.streams.registration import open_output
from slipstream_worker.streams.slow_path import push_slow
from slipstream_worker.streams.stream import Reader, Stage, WorkerStream
from slipstream_worker.streams.stream_columns import StreamColumns

TYPES = {"f": {"x": "string", "n": "integer"}, "g": {}}
CALLS_MADE = (
    SampleCall("f", {"x": "some words, and \u00e9 more", "n": 12}),
    SampleCall("g", {}),
)
KNOWN = [name for name in RENDERINGS if format_of(name) in {*CALLS, *WHOLE}]


@pytest.mark.parametrize("variant", KNOWN)
@settings(max_examples=6, deadline=None)
@given(st.lists(st.integers(1, 6), min_size=1, max_size=5), st.booleans(), st.booleans())
def test_columns_give_the_events_of_the_whole(
    variant: str, sizes: list[int], has_tokens: bool, skips: bool
) -> None:
    name = format_of(variant)
    answer_format = find_format(name) or compose(REASONING["qwen3"], CALLS[name])
    tokens = delimiter_tokens(answer_format) if has_tokens else {}
    text = render(variant, CALLS_MADE, content="Let me see. ", reasoning="I should look.")
    items = divide(to_items(text, tokens), sizes)
    expected = read(compile_format(answer_format, tokens), items, TYPES)
    literals = {token_id: literal for literal, token_id in tokens.items()}
    spelled = [literals.get(item, "") if isinstance(item, int) else item for item in items]
    vocabulary = list(dict.fromkeys(spelled))
    ids = [vocabulary.index(word) for word in spelled]
    delimiters = {word: at for at, word in enumerate(vocabulary) if word in tokens and has_tokens}
    special = tuple(delimiters.values())
    factory = TableDetokenizerFactory(
        TokenTable("bytelevel", tuple(word.encode() for word in vocabulary), special), delimiters
    )
    answer = AnswerSettings(
        answer_format.name, digest(answer_format), tools=encode_tool_types(TYPES)
    )
    params = SamplingParams(skip_special_tokens=skips)
    admit = admit_of(b"", pack_u32([]), params, (), 0, 10**6, answer=answer)
    columns = StreamColumns(factory.fast_table)
    stream = WorkerStream(b"", Stage.RUNNING, registration=admit)
    stream.output, stream.reader = open_output(admit, factory), Reader(b"client", 0)
    oracle = open_output(admit, factory)
    columns.open(stream, admit)
    row = stream.worker_row
    events, sent, num_fast = list[AnswerEvent](), "", 0

    def send() -> None:
        nonlocal sent
        fast, counts, slow_rows = columns.loops.due(np.array([row]), False)
        slow = [stream] if slow_rows and deltas.is_due(stream) else []
        if not fast and not slow:
            return
        built = deltas.build(columns, fast, counts, slow)
        message = built.message
        check_deltas(message)
        assert u32(message.chars).tolist() == [len(sent)]
        kind = u32(message.kinds)[0] if message.kinds else 0
        if kind:
            kind_of_it = EventKind(int(kind) & 0xFF)
            events.append(AnswerEvent(kind_of_it, message.texts[0], int(kind) >> 8))
        events.extend(event for some in message.events for event in some)
        sent += message.texts[0]
        RequestCounters().delivered(columns, built, 1.0)

    for token_id in ids:
        if columns.append(RowSet(np.array([row])), None, np.array([token_id], np.uint32)):
            push_slow(columns, stream, [token_id])
        else:
            num_fast += 1
        oracle.push([token_id])
        send()
        assert oracle.log.find(len(sent), oracle.log.num_tokens) is not None
    for output in (stream.output, oracle):
        if output is stream.output:
            columns.make_slow(stream, columns.num_tokens(stream))
        output.finish("length")
    send()
    uncounted = [replace(event, num_tokens=0, num_before=0) for event in join(events)]
    assert uncounted == expected
    assert num_fast or max(sizes) > 2


def test_the_workers_calls_have_mistrals_ids() -> None:
    """They are functions of the stream and the call, so that a successor makes the same."""
    stream_id = bytes(range(16))
    answer_format = compose(None, CALLS["mistral"])
    answer = AnswerSettings(answer_format.name, digest(answer_format))
    words = ["[TOOL_CALLS]", "f", "{}", "[TOOL_CALLS]", "g", "{}"]
    table = TokenTable("bytelevel", tuple(word.encode() for word in words), ())
    factory = TableDetokenizerFactory(table, {})
    admit = admit_of(stream_id, pack_u32([]), SamplingParams(), (), 0, 10**6, answer=answer)
    output = open_output(admit, factory)
    output.push(range(len(words)))
    output.finish("length")
    start = output.log.find(0, 0)
    assert start is not None
    found = output.log.events_between(start, output.log.end)
    assert isinstance(found, tuple)
    ids = [event.call_id for event in found if event.kind == EventKind.CALL_BEGINS]
    assert ids == [made_call_id(stream_id, 0), made_call_id(stream_id, 1)]
