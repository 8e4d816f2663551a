"""`slipstream bench chaos`: its pure parts, and a short run of the whole with real processes."""

from __future__ import annotations

import json
import os
import resource
import shutil
import signal
import socket
import subprocess
import sys
from collections import Counter
from itertools import combinations
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import psutil
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from msgspec import structs
from tests.helpers.patience import PATIENCE_S, Patience
from tests.helpers.processes import started
from tokenizers import Tokenizer

from slipstream.answers.events import (
    ReasoningDelta,
    ToolCallArguments,
    ToolCallEnd,
    ToolCallStart,
)
from slipstream.answers.tool_calls import call_id
from slipstream.cli.main import main
from slipstream.demo.gaps import GapSpan, longest_gap
from slipstream.demo_model import MODEL_PATH
from slipstream.errors import StreamLostError
from slipstream.request.requests import new_submit
from slipstream.stack.supervisor_events import ProcessEnded, ProcessRestarted
from slipstream_bench.common import process_census
from slipstream_bench.common.provenance import commit
from slipstream_bench.common.report import write_result
from slipstream_core.sampling.noise import exponential, row_keys
from slipstream_ipc.columns import pack_u32
from slipstream_ipc.messages import (
    AnswerEvent,
    EventKind,
    Fault,
    ModelCard,
    RequestSpec,
    SamplingParams,
)
from slipstream_lab.formats.rendering import RENDERINGS
from slipstream_verify.chaos import chaos_series
from slipstream_verify.chaos.chaos_report import ChaosResult, gaps_by_kind
from slipstream_verify.chaos.chaos_series import ChaosRow, ChaosSeries, row_of
from slipstream_verify.chaos.client_process import Follower, ReadSoFar, read_before
from slipstream_verify.chaos.clients import ChaosClient, num_allowed
from slipstream_verify.chaos.compare import (
    AssembledStream,
    ChaosAnswer,
    assemble,
    compare,
    message_of,
)
from slipstream_verify.chaos.core_counters import CounterSums
from slipstream_verify.chaos.fault_injector import (
    ChaosFailed,
    FaultInjector,
    InjectedFault,
    mounted,
)
from slipstream_verify.chaos.http_process import HttpReader, body_of
from slipstream_verify.chaos.journal import (
    AskedAgain,
    Failed,
    JournalWriter,
    ReceivedDelta,
    read_journal,
)
from slipstream_verify.chaos.schedule import FaultKinds, PlannedFault, Round, make_schedule
from slipstream_verify.chaos.workload.chaos_workload import WorkloadShape, make_requests
from slipstream_verify.chaos.workload.later_turns import later_turns, predicted
from slipstream_verify.chaos.workload.played_formats import (
    ANY_FORMAT,
    PLAYED_FORMATS,
    find_played_format,
    write_tokenizer,
)
from slipstream_verify.chaos.workload.reference_model import TOLERANCE, margins_of
from slipstream_verify.chaos.workload.tool_workload import make_tool_requests
from slipstream_worker.streams.registration import register

SHAPE = WorkloadShape(300, 20, 200, 4, vocab_size=4096, has_grammars=True)

ANSWER = ChaosAnswer(
    "one two",
    (1, 2, 3),
    (((1, -0.5, 1),), ((2, -0.25, 1), (9, -3.0, 2)), ((3, -1.0, 1),)),
    "length",
    None,
    (7, 8),
)
PIECES = (
    ReceivedDelta(0, 1.0, 0, 0, "one", (1,), ANSWER.logprobs[:1], prompt_ids=(7, 8)),
    ReceivedDelta(0, 2.0, 3, 1, " tw", (2,), ANSWER.logprobs[1:2]),
    ReceivedDelta(0, 3.0, 6, 2, "o", (3,), ANSWER.logprobs[2:], "length"),
)


# ---- schedule and workload -------------------------------------------------------------------


TARGETS = ("worker", "core", "front", "client")
ALL = FaultKinds(
    (*TARGETS, "prompts"), ("worker", "core", "prompts"), ("worker", "core", "front"), True
)


def test_the_same_seed_gives_the_same_requests_and_faults():
    assert make_requests(3, SHAPE) == make_requests(3, SHAPE)
    assert make_requests(3, SHAPE) != make_requests(4, SHAPE)
    args = (FaultKinds(("worker", "core"), ("worker",)), 20)
    assert make_schedule(3, *args) == make_schedule(3, *args)
    assert make_schedule(3, *args) != make_schedule(4, *args)


def test_prompts_of_text_and_ids_may_begin_alike():
    shared = structs.replace(SHAPE, has_beginnings=True)
    plain, longer = make_requests(3, SHAPE), make_requests(3, shared)
    texts = [(one.text, two.text) for one, two in zip(plain, longer, strict=True) if one.text]
    assert len({two.removesuffix(f" {one}") for one, two in texts}) == 3
    ids = [(a.token_ids, b.token_ids) for a, b in zip(plain, longer, strict=True) if a.token_ids]
    assert len({two[: len(two) - len(one)] for one, two in ids}) == 3
    assert all(two[-len(one) :] == one for one, two in ids)
    assert [each.messages for each in plain] == [each.messages for each in longer]
    assert [each.params for each in plain] == [each.params for each in longer]


@pytest.mark.parametrize("seed", range(20))
def test_every_kind_of_fault_occurs_and_every_combination_of_deaths(seed):
    rounds = make_schedule(seed, ALL, ALL.num_rounds)
    names = {fault.name for one in rounds for fault in one.faults}
    assert names == {
        *(f"kill {target}" for target in (*TARGETS, "prompts")),
        *("stop worker", "stop core", "stop prompts"),
        *("limit worker", "limit core", "limit front", "fill disk"),
    }
    together = {frozenset(fault.target for fault in one.faults) for one in rounds if one.is_burst}
    assert together == {
        frozenset(each) for size in (2, 3, 4) for each in combinations(TARGETS, size)
    }
    firsts = {one.faults[0].target for one in rounds if one.is_burst}
    assert len(firsts) > 1
    for one in make_schedule(seed, ALL, 60):
        times = [fault.after_s for fault in one.faults]
        assert times == sorted(times)
        assert times[0] == 0
        assert times[-1] < 1


@pytest.mark.parametrize("seed", range(20))
def test_a_real_models_streams_are_never_left_to_nobody(seed):
    """It may compute other tokens at near ties."""
    for one in make_schedule(seed, ALL, 60, is_exact=False):
        assert not {"client", "worker", "core"} <= {fault.target for fault in one.faults}


@pytest.mark.parametrize("seed", range(20))
def test_a_replica_is_drained_silenced_and_killed_alone_and_with_each_process(seed):
    may = FaultKinds((*TARGETS, "replica"), ("replica",), drain=True)
    rounds = make_schedule(seed, may, may.num_rounds)
    found = {frozenset(fault.name for fault in one.faults) for one in rounds}
    assert {frozenset([f"{action} replica"]) for action in ("kill", "stop", "drain")} <= found
    pairs = {frozenset([f"kill {target}", "kill replica"]) for target in TARGETS}
    assert {each for each in found if len(each) > 1 and "kill replica" in each} == pairs
    for one in make_schedule(seed, may, 60, is_exact=False):
        targets = {fault.target for fault in one.faults if fault.action == "kill"}
        assert not {"client", "replica"} <= targets


def test_no_fault_is_injected_where_no_target_is_named():
    assert make_schedule(0, FaultKinds(), 10) == []
    only = make_schedule(0, FaultKinds(stop=("worker",)), 10)
    assert {fault.name for one in only for fault in one.faults} == {"stop worker"}


def test_requests_are_of_every_kind():
    requests = make_requests(0, SHAPE)
    assert {one.via for one in requests} == {"client", "http"}
    assert {one.client for one in requests} == {0, 1, 2, 3}
    assert len({one.stream_id for one in requests}) == len(requests)
    assert {one.params.logprobs for one in requests} == {None, 0, 5}
    assert {one.params.stream_interval for one in requests} == {1, 4, 16}
    grammars = [one.params for one in requests if one.params.structured_outputs is not None]
    assert 30 < len(grammars) < 100
    assert all(one.stop_token_ids and not one.min_tokens for one in grammars)
    for kind in ("text", "token_ids", "messages", "pauses"):
        assert 0 < sum(bool(getattr(one, kind)) for one in requests) < len(requests)
    for field in ("stop", "stop_token_ids", "min_tokens", "temperature", "top_k", "seed"):
        assert len({getattr(one.params, field) for one in requests}) > 1
    for one in requests:
        assert bool(one.text) + bool(one.token_ids) + bool(one.messages) == 1
        assert one.params.max_tokens <= 200
        assert one.params.top_k or (one.params.top_p == 1 and one.params.min_p == 0)
        assert one.via == "client" or one.params.seed is not None


@pytest.fixture(scope="module")
def tokenizer():
    return Tokenizer.from_file(str(MODEL_PATH / "tokenizer.json"))


def answers_to(requests, tokenizer):
    """Made up: about as many tokens as are asked for."""
    random = np.random.default_rng(7)
    found = []
    for one in requests:
        ids = tuple(random.integers(100, 999, one.params.max_tokens).tolist())
        found.append(ChaosAnswer(tokenizer.decode(ids), ids, prompt_ids=one.token_ids or (5, 6)))
    return found


def test_some_requests_ask_what_others_ask():
    requests = make_requests(1, structs.replace(SHAPE, has_repeats=True))
    assert len({one.stream_id for one in requests}) == len(requests)
    asked = Counter(str((one.prompt, one.params, one.via)) for one in requests)
    assert 20 < sum(num - 1 for num in asked.values()) < 100
    for one in requests:
        assert one.via == "client" or one.params.seed is not None


def test_later_turns_go_on_behind_answers_of_the_first_half(tokenizer):
    requests = make_requests(2, SHAPE)
    answers = answers_to(requests, tokenizer)
    later = later_turns(2, requests, answers, max_model_len=600)
    assert later == later_turns(2, requests, answers, max_model_len=600)
    assert 40 < len(later) < 110
    begun = [(*one.prompt_ids, *one.token_ids) for one in answers[:150]]
    for one in later:
        assert one.index >= 150
        assert one.stream_id != requests[one.index].stream_id
        assert (one.text, one.messages) == (None, ())
        assert any(one.token_ids[: len(each)] == each for each in begun)
        assert len(one.token_ids) + one.params.max_tokens <= 600
        assert one.params == requests[one.index].params


def test_predictions_are_edits_whose_tokens_are_counted(tokenizer):
    requests = make_requests(3, SHAPE)
    answers = answers_to(requests, tokenizer)

    def encode(text):
        return tokenizer.encode(text, add_special_tokens=False).ids

    found, expected = predicted(3, requests, answers, encode)
    assert [structs.replace(one, prediction="") for one in found] == requests
    assert 60 < sum(bool(one.prediction) for one in found) < 150
    counted = []
    for one, before, after in zip(found, answers, expected, strict=True):
        is_counted = bool(one.prediction) and one.via == "http"
        assert after == (structs.replace(before, usage=after.usage) if is_counted else before)
        if not is_counted:
            continue
        assert one.messages
        num_prompt, num, of_reasoning, accepted, rejected = after.usage
        assert (num_prompt, num, of_reasoning) == (2, len(after.token_ids), 0)
        assert accepted + rejected == min(len(encode(one.prediction)), one.params.max_tokens)
        counted.append(accepted / (accepted + rejected))
        path, body = body_of(one)
        assert path == "/v1/chat/completions"
        assert json.loads(body)["prediction"] == {"type": "content", "content": one.prediction}
    assert len(counted) > 2
    assert max(counted) > 0.2


def test_what_cores_counted_is_added_up_over_their_lives():
    counters = CounterSums(None)
    counters.look()
    assert counters.counted == {}
    name = "slipstream:spec_decode_num_draft_tokens"
    for values in ((3, 0), (10, 1), (4, 1)):  # the first core is another one
        lines = [f"# TYPE {name}_total counter"]
        lines += [f'{name}_total{{process="core-{at}"}} {value}' for at, value in enumerate(values)]
        counters.take("\n".join([*lines, ""]))
    assert counters.counted == {"drafted": 3 + 7 + 4 + 1}


# ---- comparison ------------------------------------------------------------------------------


def streamed_of(*records):
    return assemble(records, 1)[0]


def test_what_is_whole_is_identical():
    verdict = compare(ANSWER, streamed_of(*PIECES))
    assert verdict.is_identical
    assert (verdict.lost, verdict.doubled, verdict.differences) == (0, 0, ())


@pytest.mark.parametrize("left_out", range(3))
def test_a_piece_that_is_missing_is_lost(left_out):
    pieces = [piece for at, piece in enumerate(PIECES) if at != left_out]
    verdict = compare(ANSWER, streamed_of(*pieces))
    assert not verdict.is_identical
    assert verdict.lost == 1 + len(PIECES[left_out].text)
    assert verdict.doubled == 0


@pytest.mark.parametrize("twice", range(2))
def test_a_piece_that_comes_twice_is_doubled(twice):
    pieces = [*PIECES[: twice + 1], *PIECES[twice:]]
    verdict = compare(ANSWER, streamed_of(*pieces))
    assert not verdict.is_identical
    assert verdict.doubled == 1 + len(PIECES[twice].text)


def test_a_doubled_end_is_told():
    assert not compare(ANSWER, streamed_of(*PIECES, PIECES[-1])).is_identical


@pytest.mark.parametrize(
    ("changes", "what"),
    [
        ({"text": "oNe"}, "text"),
        ({"token_ids": (5,)}, "token_ids"),
        ({"logprobs": (((1, -0.5000001, 1),),)}, "logprobs"),
        ({"logprobs": (((1, -0.5, 2),),)}, "logprobs"),
        ({"logprobs": None}, "logprobs"),
        ({"prompt_ids": (7, 9)}, "prompt_ids"),
        ({"prompt_ids": None}, "prompt_ids"),
    ],
)
def test_one_value_that_differs_is_seen(changes, what):
    first = structs.replace(PIECES[0], **changes)
    verdict = compare(ANSWER, streamed_of(first, *PIECES[1:]))
    assert not verdict.is_identical
    assert all(difference.startswith(what) for difference in verdict.differences)


@pytest.mark.parametrize(
    ("changes", "what"),
    [
        ({"finish_reason": "stop"}, "finish_reason"),
        ({"stop_reason": "o"}, "stop_reason"),
        ({"finish_reason": None}, "never ended"),
    ],
)
def test_another_end_is_seen(changes, what):
    last = structs.replace(PIECES[2], **changes)
    verdict = compare(ANSWER, streamed_of(*PIECES[:2], last))
    assert not verdict.is_identical
    assert any(difference.startswith(what) for difference in verdict.differences)


def test_nothing_at_all_and_an_error_are_seen():
    assert compare(ANSWER, AssembledStream(0)).lost == len(ANSWER.text) + 3
    failed = compare(ANSWER, streamed_of(*PIECES[:2], Failed(0, 3.0, "EngineError: no")))
    assert failed.differences[0] == "failed: EngineError: no"


def test_over_http_what_was_asked_for_again_begins_afresh():
    one, two, three = (
        structs.replace(piece, token_ids=(), num_tokens=0, logprobs=None, prompt_ids=None)
        for piece in PIECES
    )
    again = AskedAgain(0, 2.5, "disconnected", is_afresh=True)
    assert compare(ANSWER, streamed_of(one, two, again, one, two, three), is_http=True).is_identical
    assert not compare(ANSWER, streamed_of(one, two, one, two, three), is_http=True).is_identical


def test_logprobs_may_be_close_only_where_that_is_said():
    first = structs.replace(PIECES[0], logprobs=(((1, -0.5001, 1),),))
    streamed = streamed_of(first, *PIECES[1:])
    assert compare(ANSWER, streamed, tolerance=1e-3).is_identical
    assert not compare(ANSWER, streamed, tolerance=1e-5).is_identical
    assert not compare(ANSWER, streamed).is_identical


# ---- journals --------------------------------------------------------------------------------


def test_a_record_that_was_cut_short_is_dropped(tmp_path):
    path = tmp_path / "journal"
    writer = JournalWriter(path)
    records = [*PIECES, AskedAgain(0, 4.0, "why", is_afresh=False), Failed(0, 5.0, "no")]
    for record in records:
        writer.write(record)
    writer.close()
    whole = path.read_bytes()
    assert list(read_journal(path)) == records
    for size in range(len(whole)):
        path.write_bytes(whole[:size])
        read = list(read_journal(path))
        assert read == records[: len(read)]
        assert len(read) < len(records)


class FakeDelta:
    """As a stream yields it; `stream.position` is behind it."""

    def __init__(self, text, token_ids, finish_reason=None, events=()):
        self.text = text
        self.token_ids = token_ids
        self.logprobs = None
        self.finish_reason = finish_reason
        self.stop_reason = None
        self.events = events


class FakeStream:
    def __init__(self, num_chars, num_tokens):
        self.position = type("", (), {"num_chars": num_chars, "num_tokens": num_tokens})
        self.prompt_token_ids = [7]


def test_what_comes_again_is_checked_and_not_written_twice(tmp_path):
    request = make_requests(0, SHAPE)[0]
    path = tmp_path / "first"
    first = Follower(request, ReadSoFar(), JournalWriter(path))
    first.take(FakeStream(3, 1), FakeDelta("one", [1]))
    first.take(FakeStream(6, 2), FakeDelta(" tw", [2]))

    def go_on(name, deltas):
        journal = tmp_path / name
        follower = Follower(request, read_before([path])[request.index], JournalWriter(journal))
        assert follower.is_asked_again(StreamLostError(Fault("unknown_stream", "gone")))
        for position, delta in deltas:
            follower.take(FakeStream(*position), delta)
        records = [*read_journal(path), *read_journal(journal)]
        return assemble(records, request.index + 1)[request.index]

    same = go_on(
        "same", [((5, 2), FakeDelta("one t", [1, 2])), ((7, 3), FakeDelta("wo", [3], "length"))]
    )
    assert (same.text, same.token_ids, same.error) == ("one two", [1, 2, 3], None)
    assert (same.lost, same.doubled, same.num_again) == (0, 0, 1)
    other = go_on("other", [((5, 2), FakeDelta("one T", [1, 2]))])
    assert "another one the second time" in other.error


# ---- answers with reasoning and tool calls ---------------------------------------------------


EVENTS = (
    AnswerEvent(EventKind.REASONING, "why"),
    AnswerEvent(EventKind.CALL_BEGINS, "now", 0, "call_1"),
    AnswerEvent(EventKind.CALL_ARGUMENTS, "{}", 0),
    AnswerEvent(EventKind.CALL_ENDS, "", 0),
)
PLAYED_SHAPE = WorkloadShape(200, 20, 200, 4, vocab_size=0)


def of_events(*events, **changes):
    return structs.replace(ANSWER, events=events, **changes)


@pytest.mark.parametrize("name", PLAYED_FORMATS)
def test_chats_with_tools_are_of_every_kind(name):
    played = PLAYED_FORMATS[name]
    requests, lines = make_tool_requests(1, PLAYED_SHAPE, played)
    assert (requests, lines) == make_tool_requests(1, PLAYED_SHAPE, played)
    assert requests != make_tool_requests(2, PLAYED_SHAPE, played)[0]
    assert len(lines) == 1 + len(requests)
    chats = [one.chat for one in requests if one.chat is not None]
    assert 0 < len(chats) < len(requests)
    assert {bool(chat.tools) for chat in chats} == {True, False}
    forced = {str(chat.tool_choice) for chat in chats if chat.is_forced}
    assert len(forced) > 2  # functions, and any
    over_http = [one for one in requests if one.via == "http"]
    assert {one.is_streamed for one in over_http} == {True, False}
    assert all(one.is_streamed for one in requests if one.via == "client")
    for one, line in zip(requests, lines[1:], strict=True):
        said = one.text or one.messages[-1].content
        assert said.endswith(line["when"])
        assert one.params.max_tokens <= 200


def test_any_format_is_each_in_turn():
    found = {find_played_format(ANY_FORMAT, seed) for seed in range(1, 13)}
    assert found == set(PLAYED_FORMATS.values())
    assert find_played_format("harmony", 3) == PLAYED_FORMATS["harmony"]


@pytest.mark.parametrize("name", PLAYED_FORMATS)
def test_delimiters_are_tokens_of_the_tokenizer_where_the_format_says_so(name, tmp_path):
    played = PLAYED_FORMATS[name]
    write_tokenizer(tmp_path / "it", played)
    tokenizer = Tokenizer.from_file(str(tmp_path / "it" / "tokenizer.json"))
    delimiters = RENDERINGS[played.rendering].added_tokens
    assert {len(tokenizer.encode(each).ids) == 1 for each in delimiters} == {played.has_tokens}
    ids = tokenizer.get_added_tokens_decoder()
    assert sorted(ids)[5:] == list(range(4096, tokenizer.get_vocab_size()))


def test_events_are_compared_however_they_were_divided():
    begin, call, arguments, end = EVENTS
    parts = (
        structs.replace(PIECES[0], events=(structs.replace(begin, text="w"),)),
        structs.replace(
            PIECES[1],
            events=(structs.replace(begin, text="hy"), call, structs.replace(arguments, text="{")),
        ),
        structs.replace(PIECES[2], events=(structs.replace(arguments, text="}"), end)),
    )
    streamed = streamed_of(*parts)
    assert compare(of_events(*EVENTS), streamed).is_identical
    assert streamed.answer == of_events(*EVENTS)
    for other in (
        EVENTS[:-1],
        (*EVENTS, AnswerEvent(EventKind.CONTENT, " ")),
        (begin, structs.replace(call, call_id="call_2"), arguments, end),
        (begin, call, structs.replace(arguments, text="{ }"), end),
        (call, arguments, end, begin),
    ):
        [difference] = compare(of_events(*other), streamed).differences
        assert difference.startswith("events differ from position")


def test_over_http_a_message_and_its_usage_are_compared():
    begin, call, arguments, _ = EVENTS
    # the parts of a chunk have no order
    last = structs.replace(PIECES[2], events=(call, arguments, begin), usage=(7, 3, 1))
    streamed = streamed_of(*PIECES[:2], last)

    def differences(*events, usage=(7, 3, 1)):
        return compare(of_events(*events, usage=usage), streamed, is_http=True).differences

    assert differences(*EVENTS) == ()
    assert differences(*EVENTS[:-1]) == ()  # a chunk does not tell the end of a call
    assert "usage" in differences(*EVENTS, usage=(7, 3, 2))[0]
    assert "message" in differences(*EVENTS[1:])[0]
    assert "message" in differences(begin, structs.replace(call, call_id="x"), arguments)[0]


def test_events_that_come_again_are_checked_and_not_written_twice(tmp_path):
    requests, _ = make_tool_requests(0, PLAYED_SHAPE, PLAYED_FORMATS["hermes"])
    request = next(one for one in requests if one.chat is not None and one.via == "client")
    first = [ReasoningDelta("why"), ToolCallStart(0, "call_1", "now"), ToolCallArguments(0, "{")]

    def read(name, again):
        path = tmp_path / name
        follower = Follower(request, ReadSoFar(), JournalWriter(path))
        follower.take(FakeStream(4, 1), FakeDelta("why{", [1], events=first))
        assert follower.is_asked_again(StreamLostError(Fault("unknown_stream", "gone")))
        for position, delta in again:
            follower.take(FakeStream(*position), delta)
        return assemble(read_journal(path), request.index + 1)[request.index]

    again = [ReasoningDelta("wh")], [ReasoningDelta("y"), *first[1:2], ToolCallArguments(0, "{}")]
    same = read(
        "same",
        [
            ((2, 0), FakeDelta("wh", [], events=again[0])),
            ((5, 2), FakeDelta("y{}", [1, 2], "stop", events=[*again[1], ToolCallEnd(0)])),
        ],
    )
    assert same.error is None
    assert same.answer.events == EVENTS
    other = read("other", [((5, 2), FakeDelta("why{}", [1, 2], events=[ReasoningDelta("how")]))])
    assert "the events are others" in other.error


@pytest.mark.parametrize("is_streamed", [True, False])
def test_an_answer_over_http_is_put_together_with_its_usage(tmp_path, is_streamed):
    stream_id = bytes(range(16))
    requests, _ = make_tool_requests(0, PLAYED_SHAPE, PLAYED_FORMATS["hermes"])
    request = next(
        one
        for one in requests
        if one.chat is not None and one.via == "http" and one.is_streamed == is_streamed
    )
    usage = {
        "prompt_tokens": 7,
        "completion_tokens": 3,
        "completion_tokens_details": {"reasoning_tokens": 1},
    }
    function = {"name": "now", "arguments": "{}"}
    call = {"id": call_id(stream_id, 0), "type": "function", "function": function}
    message = {"content": None, "reasoning_content": "why", "tool_calls": [call]}
    whole = {"finish_reason": "tool_calls", "message": message}
    chunks = [{"choices": [whole], "usage": usage}]
    if is_streamed:
        deltas = [{"reasoning_content": "w"}, {"reasoning_content": "hy"}]
        deltas += [{"tool_calls": [{**call, "index": 0}]}]
        chunks = [{"choices": [{"delta": delta}]} for delta in deltas]
        chunks += [{"choices": [{"delta": {}, "finish_reason": "tool_calls"}]}]
        chunks += [{"choices": [], "usage": usage}]
    path = tmp_path / "journal"
    reader = HttpReader(request, ReadSoFar(), JournalWriter(path))
    for number, chunk in enumerate(chunks):
        assert not reader.is_over
        data = json.dumps({"id": f"chatcmpl-{stream_id.hex()}", **chunk}).encode()
        reader.feed(b"id: %d\ndata: %s\n\n" % (number, data) if is_streamed else data)
    reader.finish()
    assert reader.is_over
    streamed = assemble(read_journal(path), request.index + 1)[request.index]
    assert (streamed.finish_reason, streamed.usage) == ("tool_calls", (7, 3, 1, 0, 0))
    assert message_of(streamed.events) == ["", "why", " now {}"]


# ---- gaps ------------------------------------------------------------------------------------


def test_the_gap_is_the_longest_one_around_and_after_the_fault():
    times = [0.0, 1.0, 2.0, 2.5, 6.0, 6.1, 20.0]
    assert longest_gap(times, GapSpan("x", 2.1, 7.0)) == 3.5
    assert longest_gap(times, GapSpan("x", 2.1, 6.05)) == 3.5
    assert longest_gap(times, GapSpan("x", 1.5, 2.2)) == 1.0


def test_a_gap_that_goes_on_belongs_to_the_next_round_from_there_on():
    times = [0.0, 1.0, 2.0, 12.0, 13.0]
    assert longest_gap(times, GapSpan("x", 0.5, 4.0)) == 2.0
    assert longest_gap(times, GapSpan("x", 4.0, 13.0)) == 10.0
    assert longest_gap(times, GapSpan("x", 2.5, 4.0)) == 10.0


def test_a_stream_that_was_not_there_has_no_gap():
    assert longest_gap([1.0, 2.0], GapSpan("x", 0.5, 3.0)) is None
    assert longest_gap([1.0, 2.0], GapSpan("x", 2.0, 3.0)) is None
    assert longest_gap([], GapSpan("x", 2.0, 3.0)) is None
    assert gaps_by_kind([[0.0, 2.0], [5.0]], [GapSpan("x", 1.0, 3.0)]) == {"x": [2.0]}


# ---- the teacher -----------------------------------------------------------------------------

CARD = ModelCard("fake", "/nowhere", vocab_size=50, max_model_len=2048, eos_token_ids=(2,))


def admit_of(**params):
    chosen = SamplingParams(seed=5, max_tokens=20, **params)
    prompt = pack_u32([1, 2, 3])
    submit = new_submit([1, 2, 3], chosen)
    return register(submit, prompt, b"", CARD, spec=RequestSpec(chosen), fingerprint=b"")


def test_a_greedy_token_has_no_margin_and_another_has_its_distance():
    logits = torch.randn(4, 50, generator=torch.Generator().manual_seed(0))
    best = logits.argmax(-1).tolist()
    admit = admit_of(temperature=0.0)
    assert margins_of(logits, best, admit, 3, 0) == [0.0] * 4
    other = [best[0], (best[1] + 1) % 50, *best[2:]]
    margins = margins_of(logits, other, admit, 3, 0)
    assert margins[1] == pytest.approx(float(logits[1, best[1]] - logits[1, other[1]]))
    assert margins[0] == margins[2] == margins[3] == 0.0


def test_a_sampled_token_is_held_against_its_noise():
    logits = torch.randn(6, 50, generator=torch.Generator().manual_seed(1))
    admit = admit_of(temperature=0.7)
    keys = torch.from_numpy(row_keys(np.full(6, 5), 3 + 2 + np.arange(6)))
    noise = exponential(keys, torch.arange(50, dtype=torch.int32)).log()
    drawn = (logits / 0.7 - noise).argmax(-1).tolist()
    assert margins_of(logits, drawn, admit, 3, 2) == [0.0] * 6
    assert max(margins_of(logits, drawn, admit, 3, 3)) > TOLERANCE  # at another place


def test_what_truncation_or_min_tokens_forbid_is_wrong():
    logits = torch.zeros(1, 50)
    logits[0, :3] = torch.tensor([5.0, 4.0, 3.0])
    cut = admit_of(temperature=1.0, top_k=2)
    (margin,) = margins_of(logits, [2], cut, 3, 0)
    assert margin == float("inf")
    assert min(margins_of(logits, [one], cut, 3, 0)[0] for one in (0, 1)) == 0.0
    forbidden = admit_of(temperature=0.0, min_tokens=4)
    ended = torch.zeros(1, 50)
    ended[0, 2] = 9.0  # the end of sequence
    assert margins_of(ended, [2], forbidden, 3, 3) == [float("inf")]
    assert margins_of(ended, [2], forbidden, 3, 4) == [0.0]


def test_what_a_grammar_forbids_is_wrong():
    logits = torch.tensor([[5.0, 4.0, 3.0], [5.0, 4.0, 3.0]])
    grammar = torch.tensor([[True, True, True], [False, True, True]])
    admit = admit_of(temperature=0.0)
    assert margins_of(logits, [0, 1], admit, 3, 0, grammar) == [0.0, 0.0]
    assert margins_of(logits, [0, 2], admit, 3, 0, grammar) == [0.0, 1.0]
    assert margins_of(logits, [0, 0], admit, 3, 0, grammar)[1] == float("inf")


# ---- faults -----------------------------------------------------------------------------------


@given(st.integers(1, 500), st.integers(0, 40))
def test_requests_are_held_back_for_each_round_and_the_last_until_none_is_left(num, num_rounds):
    allowed = [num_allowed(num, over, num_rounds) for over in range(num_rounds + 1)]
    assert allowed == sorted(allowed)
    assert allowed[-1] == num
    assert allowed[0] >= num / 2
    if num_rounds:
        shares = np.diff(allowed)
        assert shares.max() - shares.min() <= 1
        assert allowed[0] <= num / 2 + 1
        assert allowed[-2] < num or num == 1  # so the run goes on until the last round is over


def client_with(has_ended: Any) -> Any:
    """A client that reads, with no request that waits for a round."""
    return SimpleNamespace(has_begun=lambda: True, has_ended=has_ended, allow=lambda num_over: None)


def test_a_client_begins_its_last_requests_when_the_last_round_is_over():
    """So it cannot end before, however fast its requests are."""
    fault = PlannedFault("disk", "fill")  # misses, as there is no volume
    injector: FaultInjector
    allowed: list[tuple[int, int]] = []
    stack: Any = SimpleNamespace(pids={}, next_event=lambda timeout_s: None, is_running=True)
    client = client_with(lambda: bool(allowed) and allowed[-1][0] == 3)
    client.allow = lambda num_over: allowed.append((num_over, injector.num_missed))
    injector = FaultInjector(stack, [Round(0.0, False, (fault,))] * 3, set())
    injector.run([client], within_s=PATIENCE_S)
    assert allowed == [(0, 0), (1, 1), (2, 2), (3, 3)]


def test_a_client_process_begins_no_more_than_it_may(tmp_path):
    """It asks an address where nobody answers."""
    requests = [one for one in make_requests(0, SHAPE) if one.via == "http"][:4]
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.settimeout(PATIENCE_S)
        client = ChaosClient(
            "http",
            0,
            requests,
            address=f"http://127.0.0.1:{server.getsockname()[1]}",
            folder=tmp_path,
            concurrency=8,
            timeout_s=PATIENCE_S,
            num_rounds=1,
        )
        try:
            taken = [server.accept()[0] for _ in range(2)]
            server.settimeout(0)
            with pytest.raises(BlockingIOError):
                server.accept()
            server.settimeout(PATIENCE_S)
            client.allow(1)
            taken += [server.accept()[0] for _ in range(2)]
            client.kill()  # its successor may begin them all
            taken += [server.accept()[0] for _ in range(4)]
        finally:
            client.end()
            for each in taken:
                each.close()


def test_a_process_that_ended_before_its_fault_is_missed():
    """Its end has not been reported yet when it is hit twice in a moment."""
    with subprocess.Popen([sys.executable, "-c", ""]) as process:
        process.wait()
    stack: Any = SimpleNamespace(
        pids={"worker": process.pid}, next_event=lambda timeout_s: None, is_running=True
    )
    rounds = [Round(pause_s=0.0, awaits_spares=False, faults=(PlannedFault("worker", "kill"),))]
    injector = FaultInjector(stack, rounds, set())
    client = client_with(lambda: bool(injector.num_missed or injector.injected))
    injector.run([client], within_s=60.0)
    assert (injector.num_missed, injector.injected) == (1, [])


def fleet_with(events: list[Any], **pids: int) -> Any:
    """A fleet that tells of `events`, one after another, once something was injected."""
    fleet: Any = SimpleNamespace(pids=pids, is_running=True, injector=None)

    def next_event(timeout_s: float) -> Any:
        return events.pop(0) if fleet.injector.injected and events else None

    fleet.next_event = next_event
    return fleet


def injected_into(fleet: Any, fault: PlannedFault) -> FaultInjector:
    """The injector once its fault has hit and has recovered."""
    fleet.injector = injector = FaultInjector(fleet, [Round(0.0, False, (fault,))], set())

    def has_ended() -> bool:
        return bool(injector.injected) and injector.injected[0].recovered_s is not None

    client = client_with(has_ended)
    injector.run([client], within_s=PATIENCE_S)
    return injector


def test_a_silent_replica_goes_on_with_all_of_its_processes():
    program = "import subprocess, sys; subprocess.run([sys.executable, '-c', 'input()'])"
    with started([sys.executable, "-c", program], stdin=subprocess.PIPE) as process:
        patience = Patience()
        while len(process_census.descendants(process.pid)) < 2:
            patience.wait("it has no child")
        tree = [psutil.Process(pid) for pid in process_census.descendants(process.pid)]
        fleet = fleet_with([], **{"replica-0": process.pid})
        next_event, num_stopped = fleet.next_event, 0

        def look(timeout_s: float) -> Any:
            nonlocal num_stopped
            patience = Patience()
            while fleet.injector.injected and num_stopped < len(tree):
                num_stopped = sum(each.status() == psutil.STATUS_STOPPED for each in tree)
                patience.wait("a process is not stopped")
            return next_event(timeout_s)

        fleet.next_event = look
        injector = injected_into(fleet, PlannedFault("replica", "stop"))
        assert num_stopped == 2
        patience = Patience()
        while any(each.status() == psutil.STATUS_STOPPED for each in tree):
            patience.wait("a process is stopped still")
        assert [one.how for one in injector.injected] == [""]
        for each in tree:
            each.kill()


def test_what_is_missing_of_a_replica_that_ends_is_back_with_it():
    with started([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as process:
        worker = "replica-0: worker"
        events = [
            ProcessEnded(worker, process.pid, "signal SIGKILL"),
            ProcessEnded("replica-0", 1, "signal SIGKILL"),
            ProcessRestarted("replica-1: worker", 2, "", 0.1),  # another one's
            ProcessRestarted("replica-0", 3, "", 0.1),
        ]
        fleet = fleet_with(events, **{worker: process.pid})
        injector = FaultInjector(
            fleet, [Round(0.0, False, (PlannedFault("worker", "kill"),))], set()
        )
        fleet.injector = injector
        injector.injected.append(
            InjectedFault(-1, PlannedFault("replica", "kill"), 1, 0.0, name="replica-0")
        )
        client = client_with(lambda: not events)
        injector.run([client], within_s=PATIENCE_S)
    assert all(one.recovered_s is not None for one in injector.injected)


def test_a_process_of_a_replica_that_ends_by_itself_is_told():
    with started([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as process:
        events = [ProcessEnded("replica-1: core", 7, "exit code 1")]
        fleet = fleet_with(events, **{"replica-0: worker": process.pid})
        with pytest.raises(ChaosFailed, match=r"replica-1: core .* without an injected fault"):
            injected_into(fleet, PlannedFault("worker", "kill"))


def test_a_file_limit_is_taken_back():
    program = [sys.executable, "-c", "import sys; sys.stdin.read()"]
    with started(program, stdin=subprocess.PIPE) as process:
        stack: Any = SimpleNamespace(
            pids={"worker": process.pid}, next_event=lambda timeout_s: None, is_running=True
        )
        limits = [resource.prlimit(process.pid, resource.RLIMIT_NOFILE)]

        def has_ended() -> bool:
            limits.append(resource.prlimit(process.pid, resource.RLIMIT_NOFILE))
            return len(set(limits)) > 1 and limits[-1] == limits[0]

        rounds = [
            Round(pause_s=0.0, awaits_spares=False, faults=(PlannedFault("worker", "limit"),))
        ]
        injector = FaultInjector(stack, rounds, set())
        client = client_with(has_ended)
        injector.run([client], within_s=60.0)
        process.send_signal(signal.SIGKILL)
    assert min(soft for soft, _ in limits) < 16
    assert [one.fault.name for one in injector.injected] == ["limit worker"]


def test_a_full_disk_has_no_room_until_it_is_emptied(tmp_path):
    before = os.environ.get("XDG_CACHE_HOME")
    with mounted(tmp_path / "disk") as volume:
        if isinstance(volume, str):
            pytest.skip(f"nothing can be mounted here: {volume}")
        assert os.environ["XDG_CACHE_HOME"] == str(volume.cache)
        volume.fill()
        with pytest.raises(OSError, match="No space left"):
            (volume.cache / "one").write_bytes(bytes(2**16))
        volume.empty()
        (volume.runtime_dir / "two").write_bytes(bytes(2**16))
    assert not any((tmp_path / "disk").iterdir())
    assert os.environ.get("XDG_CACHE_HOME") == before


# ---- many runs -------------------------------------------------------------------------------


def result_of(**changes: Any) -> ChaosResult:
    numbers = dict.fromkeys(
        ("lost", "doubled", "failed", "orphans", "http_asked_again", "http_asked_afresh"), 0
    )
    numbers |= dict.fromkeys(("asked_again", "unexplained_again", "double_deaths"), 0)
    numbers |= dict.fromkeys(("rounds", "planned_rounds"), 20)
    fields: dict[str, Any] = {
        **numbers,
        "seed": 1,
        "commit": "abc",
        "model": "simulated:",
        "identical": 5,
        "total": 5,
        "gap_p50_s": 0.1,
        "gap_p99_s": 0.5,
        "http_identical": 1,
        "http_total": 1,
        "missed_faults": 0,
        "faults": {"kill worker": 3},
        "combinations": {},
        "gaps": [],
        "recovery_s": {},
        "memory_start": {},
        "memory_end": {},
        "duration_s": 36.0,
        "num_tokens": 100,
    }
    return ChaosResult(**(fields | changes))


def test_a_series_goes_on_where_it_was_ended_and_repeats_what_was_bad(
    tmp_path, monkeypatch, capsys
):
    monkeypatch.setattr(chaos_series, "KINDS", dict.fromkeys(("all", "worker", "core"), ""))
    file = tmp_path / "chaos.json"
    several = ChaosRow(kind="all", seeds=(1, 2), commits=("aba",), requests=8, identical=8)
    write_result(file, ChaosSeries((several,)))

    def sit(commit: str, different: dict[int, list[str]], num_runs: int) -> list[tuple[Any, ...]]:
        ran = []

        def played(kind: str, seed: int, options: list[str], folder: Path) -> ChaosRow:
            if len(ran) == num_runs:
                raise KeyboardInterrupt
            ran.append((kind, seed, *options))
            (folder / "report.txt").write_text("what happened")
            is_bad = kind == "core" and different
            changes = {"identical": 4, "different": different} if is_bad else {}
            return row_of(kind, result_of(seed=seed, commit=commit, **changes))

        monkeypatch.setattr(chaos_series, "run_chaos", played)
        return ran

    def rows() -> list[tuple[Any, ...]]:
        found = msgspec.json.decode(file.read_bytes(), type=ChaosSeries).rows
        return [(row.kind, row.seeds, row.commits, row.bad) for row in found]

    ran = sit("abc", {3: ["text differs"]}, num_runs=2)
    with pytest.raises(KeyboardInterrupt):
        chaos_series.main([str(file), "--seeds", "2", "--quick"])
    assert ran == [("worker", 1, "--quick"), ("core", 1, "--quick")]
    assert rows() == [
        ("all", (1, 2), ("aba",), ()),
        ("worker", (1,), ("abc",), ()),
        ("core", (1,), ("abc",), ("request 3: text differs",)),
    ]
    folder = Path(capsys.readouterr().out.partition("FAILED, see ")[2].split()[0])
    assert (folder / "report.txt").exists()
    shutil.rmtree(folder)

    ran = sit("abd", {}, num_runs=3)
    assert chaos_series.main([str(file), "--seeds", "2"]) == 0
    assert ran == [("core", 1), ("worker", 2), ("core", 2)]
    assert rows() == [
        ("all", (1, 2), ("aba",), ()),
        ("worker", (1,), ("abc",), ()),
        ("worker", (2,), ("abd",), ()),
        ("core", (1,), ("abd",), ()),
        ("core", (2,), ("abd",), ()),
    ]
    total = next(line.split() for line in capsys.readouterr().out.splitlines() if "all" in line)
    assert total[:5] == ["all", "2", "2", "8", "8"]
    assert chaos_series.main([str(file), "--seeds", "2"]) == 0
    assert len(ran) == 3

    ran = sit("abe", {}, num_runs=1)
    assert chaos_series.main([str(file), "--seeds", "3", "--kinds", "core"]) == 0
    assert ran == [("core", 3)]
    with pytest.raises(SystemExit):
        chaos_series.main([str(file), "--kinds", "core,cat"])


def test_a_run_of_a_series_is_one_of_chaos(tmp_path):
    words = ["--quick", "--requests", "12", "--rounds", "1"]
    row = chaos_series.run_chaos("worker", 2, words, tmp_path)
    assert (row.kind, row.seeds, row.options) == ("worker", (2,), " ".join(words))
    assert (row.bad, row.identical, row.requests) == ((), 12, 12)
    assert row.commits == (commit(),)
    (another := tmp_path / "another").mkdir()
    row = chaos_series.run_chaos("worker", 2, ["--no-such-option"], another)
    assert row.bad == ("no result, exit code 2",)


# ---- the whole -------------------------------------------------------------------------------


def test_processes_that_were_left_are_found():
    with process_census.marked() as mark:
        program = [sys.executable, "-c", "import sys; print('here', flush=True); sys.stdin.read()"]
        with started(program, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
            assert process.stdout.readline() == b"here\n"
            assert list(process_census.marked_pids(mark)) == [process.pid]
            assert process_census.strays(mark) == {}  # it is ours yet
            assert process_census.holding(process.pid).num_fds >= 3
            process.send_signal(signal.SIGKILL)
        assert process_census.marked_pids(mark) == {}


def test_options_that_cannot_be_are_refused(capsys):
    for option in (
        ("--kill", "worker,cat"),
        ("--tokens", "9-3"),
        ("--requests", "0"),
        ("--json", "/nowhere/at/all.json"),
        ("--answers", "morse"),
        ("--answers", "hermes", "--model", "slipstream-demo"),
        ("--answers", "hermes", "--hybrid"),
        ("--hybrid", "--model", "slipstream-demo"),
        ("--kill", "replica"),
        ("--drain-replicas",),
        ("--replicas", "3", "--fill-disk"),
    ):
        assert main(["bench", "chaos", *option]) == 2
    assert "worker,core,front,client" in capsys.readouterr().err


def test_chaos_quick_finds_no_difference(tmp_path, capsys):
    file = tmp_path / "chaos.json"
    code = main(
        ["bench", "chaos", "--quick", "--stop", "worker,core", "--seed", "1", "--json", str(file)]
    )
    shown = capsys.readouterr().out
    assert code == 0, shown
    result = json.loads(file.read_text())
    assert result["identical"] == result["total"] == 60
    assert (result["lost"], result["doubled"], result["orphans"]) == (0, 0, 0)
    assert {"gap_p50_s", "gap_p99_s"} <= set(result)
    assert sum(result["blows"].values()) >= 4
    assert "identical        60 of 60" in shown


def test_shortages_and_the_prompt_processs_deaths_make_no_difference(tmp_path, capsys):
    file = tmp_path / "chaos.json"
    words = "--quick --requests 30 --kill prompts --stop prompts --limit-files front --fill-disk"
    code = main(["bench", "chaos", *words.split(), "--json", str(file)])
    shown = capsys.readouterr().out
    assert code == 0, shown
    result = json.loads(file.read_text())
    assert result["identical"] == result["total"] == 30
    wanted = {"kill prompts", "stop prompts", "limit front", "fill disk"}
    assert set(result["blows"]) == (wanted - {"fill disk"} if result["left_out"] else wanted)


def test_deaths_within_thoughts_and_calls_change_no_event(tmp_path, capsys):
    file = tmp_path / "chaos.json"
    words = "--quick --requests 30 --rounds 4 --answers hermes --seed 1"
    code = main(["bench", "chaos", *words.split(), "--json", str(file)])
    shown = capsys.readouterr().out
    assert code == 0, shown
    result = json.loads(file.read_text())
    assert result["identical"] == result["total"] == 30
    assert 0 < result["forced_calls"] < result["tool_calls"]
    assert sum(result["interrupted"].values()) > 0
    assert "deaths within" in shown


def test_a_hybrids_states_survive_deaths(tmp_path, capsys):
    file = tmp_path / "chaos.json"
    words = "--quick --hybrid --requests 24 --tokens 50-150 --rounds 3 --kill worker,core --seed 1"
    code = main(["bench", "chaos", *words.split(), "--json", str(file)])
    shown = capsys.readouterr().out
    assert code == 0, shown
    result = json.loads(file.read_text())
    assert result["identical"] == result["total"] == 24
    assert set(result["blows"]) == {"kill worker", "kill core"}
    assert result["teacher"]["num_wrong"] == 0
    assert result["teacher"]["num_tokens"] > 500
    assert result["counted"]["snapshots"] > 0


def test_drafts_predictions_and_grammars_survive_deaths(tmp_path, capsys):
    file = tmp_path / "chaos.json"
    words = "--quick --model slipstream-demo --requests 40 --tokens 50-150 --rounds 3"
    words += ' --kill worker,core --seed 1 --speculative-config {"method":"suffix"}'
    code = main(["bench", "chaos", *words.split(), "--json", str(file)])
    shown = capsys.readouterr().out
    assert code == 0, shown
    result = json.loads(file.read_text())
    assert result["identical"] == result["total"] == 40
    assert set(result["blows"]) == {"kill worker", "kill core"}
    assert 0 < result["counted"]["accepted"] < result["counted"]["drafted"]
    assert "cores counted" in shown


def test_chaos_kills_one_of_several_fronts(tmp_path, capsys):
    file = tmp_path / "chaos.json"
    words = "--quick --requests 24 --rounds 3 --kill front --http-workers 2"
    code = main(["bench", "chaos", *words.split(), "--json", str(file)])
    shown = capsys.readouterr().out
    assert code == 0, shown
    result = json.loads(file.read_text())
    assert result["identical"] == result["total"] == 24
    assert set(result["blows"]) == {"kill front"}
    assert result["commit"]


def test_replicas_killed_silenced_and_drained_make_no_difference(tmp_path, capsys):
    file = tmp_path / "chaos.json"
    words = "--quick --replicas 2 --requests 40 --tokens 100-400 --rounds 3 --kill replica"
    more = "--stop replica --drain-replicas --seed 1"
    code = main(["bench", "chaos", *words.split(), *more.split(), "--json", str(file)])
    shown = capsys.readouterr().out
    assert code == 0, shown
    result = json.loads(file.read_text())
    assert result["identical"] == result["total"] == 40
    assert set(result["blows"]) == {"kill replica", "stop replica", "drain replica"}
