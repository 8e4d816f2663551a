"""Streams that change their readers, come back from their client alone, or end for good."""

from __future__ import annotations

import pytest
from msgspec import structs
from tests.helpers.mini_stack import MiniStack, RawClient, Received

from slipstream.prompt_logprobs import prompt_logprobs_of
from slipstream_ipc.history.text_log import TextCursor
from slipstream_ipc.messages import Cancel, Fault, Resume, Suspects
from slipstream_worker.clients.readers import StreamReaders
from slipstream_worker.streams.retention import MIN_UNREAD_S
from slipstream_worker.streams.stream import ResumePoint, WorkerStream

PROMPTS = [f"Chapter {n}: how names are bound, and where." for n in range(6)]


@pytest.mark.parametrize("num_steps", [5, 20, 60, 100])
@pytest.mark.parametrize("stop", [(), ("e", "q}")])
def test_core_and_worker_killed_within_one_second_client_resubmits(
    make_stack, expected, outcome, num_steps, stop
) -> None:
    params = {"max_tokens": 80, "logprobs": 1, "stop": stop, "min_tokens": 30}
    plain = expected(PROMPTS, **params)
    stack = make_stack()
    client = stack.client()
    streams = [client.submit(p, **params) for p in PROMPTS]
    for _ in range(num_steps):
        stack.step()
    stack.kill_core()
    stack.kill_worker()
    stack.start_core()
    stack.start_worker()
    stack.until(lambda: all(s.is_over for s in streams))
    assert [s.fault for s in streams] == [None] * len(PROMPTS)
    assert outcome(streams) == outcome(plain)
    assert [s.end for s in streams] == [s.end for s in plain]
    assert [s.ranks for s in streams] == [s.ranks for s in plain]


def test_a_resubmitted_stream_that_its_tokens_have_ended_is_not_run(make_stack, expected) -> None:
    [plain] = expected(PROMPTS[:1], max_tokens=20)
    stack = make_stack()
    client = stack.client()
    it = client.submit(PROMPTS[0], max_tokens=20)
    it.text, it.token_ids, it.accepted = plain.text, plain.token_ids, 1  # all but the end
    client._waiting.clear()
    client.send(client.resumption(it))
    stack.until(lambda: it.is_over)
    assert it.end == plain.end
    assert it.text == plain.text
    assert stack.core.handler.num_streams == 0


def test_logprobs_survive_the_death_of_the_core_and_then_of_the_worker(
    make_stack, expected, outcome
) -> None:
    params = {"max_tokens": 80, "logprobs": 3}
    plain = expected(PROMPTS, **params)
    stack = make_stack()
    client = stack.client()
    streams = [client.submit(p, **params) for p in PROMPTS]
    stack.until(lambda: all(len(s.token_ids) > 10 for s in streams))
    stack.kill_core()
    stack.start_core()
    stack.until(lambda: all(len(s.token_ids) > 30 for s in streams))
    reader = stack.client()
    stack.kill_worker()
    stack.start_worker()
    # who comes last is the reader: the other is not to come back later
    stack.until(lambda: all(s.accepted > 1 or s.is_over for s in streams))
    taken = [reader.take_over(s) for s in streams]
    stack.until(lambda: all(s.is_over for s in taken))
    assert outcome(taken) == outcome(plain)
    assert [s.ranks for s in taken] == [s.ranks for s in plain]


def num_in_worker(stack, it) -> int:
    """Tokens of a stream that the worker has."""
    worker = stack.worker
    stream = worker.streams.get(it.stream_id)
    return 0 if stream is None or not stream.worker_row else worker.columns.num_tokens(stream)


def resubmit(stack, client, streams) -> None:
    """Core and worker die together; the client reads some of what the next ones say."""
    client.is_reading = True
    stack.kill_core()
    stack.kill_worker()
    stack.start_core()
    stack.start_worker()
    client.hop.attach(stack.now())  # what was under way is lost with the old socket
    had = [len(it.token_ids) for it in streams]
    stack.until(
        lambda: all(len(it.token_ids) > num + 4 for it, num in zip(streams, had, strict=True))
    )


def core_then_worker(stack, client, streams) -> None:
    """They die one after the other, while the client lacks some of what the worker has."""
    client.is_reading = False
    stack.until(lambda: all(num_in_worker(stack, it) > len(it.token_ids) + 4 for it in streams))
    stack.kill_core()
    stack.start_core()
    stack.until(lambda: stack.core.handler.num_streams == len(streams))
    stack.kill_worker()
    stack.start_worker()
    client.hop.attach(stack.now())


def core_twice_then_worker(stack, client, streams) -> None:
    """The second core has nothing from the one before it but by the worker."""
    client.is_reading = False
    stack.until(lambda: all(num_in_worker(stack, it) > len(it.token_ids) + 4 for it in streams))
    stack.kill_core()
    stack.start_core()
    stack.until(lambda: stack.core.handler.num_streams == len(streams))
    core_then_worker(stack, client, streams)


@pytest.mark.parametrize(
    "deaths",
    [
        (resubmit, core_then_worker),
        (resubmit, core_twice_then_worker),
        (resubmit, core_then_worker, core_then_worker),
        (resubmit, resubmit, core_then_worker),
        (resubmit, core_then_worker, resubmit, core_then_worker),
    ],
)
@pytest.mark.parametrize(
    "params",
    [
        {"logprobs": 2},
        {"logprobs": 70},
        {"logprobs": 1, "prompt_logprobs": 3},
        {"logprobs": 0},
        {"logprob_token_ids": (300, 7, 41)},
        {"logprob_token_ids": tuple(range(100, 228))},
    ],
    ids=["few", "wide", "prompt", "own", "listed", "many listed"],
)
def test_logprobs_since_a_resubmission_survive_core_and_then_worker(
    make_stack, outcome, deaths, params
) -> None:
    """The client has those before; those since are handed on to the next core, and by it."""

    def run(*deaths):
        stack = make_stack(max_logprobs=100)
        client = stack.client()
        streams = [client.submit(p, max_tokens=200, **params) for p in PROMPTS[:3]]
        stack.until(lambda: all(len(it.token_ids) > 4 for it in streams))
        for death in deaths:
            death(stack, client, streams)
        client.is_reading = True
        stack.until(lambda: all(it.is_over for it in streams))
        return streams

    plain, found = run(), run(*deaths)
    assert [it.fault for it in found] == [None] * len(found)
    assert outcome(found) == outcome(plain)
    assert [it.end for it in found] == [it.end for it in plain]
    assert [it.ranks for it in found] == [it.ranks for it in plain]
    assert [it.logprobs for it in found] == [it.logprobs for it in plain]
    if "prompt_logprobs" in params:
        assert [prompt_logprobs_of(it.prompt) for it in found] == [
            prompt_logprobs_of(it.prompt) for it in plain
        ]


def test_a_resume_whose_tokens_are_others_ends_as_diverged_and_harms_nobody(
    make_stack, expected, outcome
) -> None:
    plain = expected(PROMPTS[:1], max_tokens=100)
    stack = make_stack()
    client, other = stack.client(), stack.client()
    it = client.submit(PROMPTS[0], max_tokens=100)
    stack.until(lambda: len(it.token_ids) > 10 and other.hop.is_attached)
    copy = other.take_over(it)
    other._waiting.clear()
    copy.text, copy.token_ids = "", []
    wrong = Resume(copy.submit.handle, it.stream_id, len(it.text), len(it.token_ids), digest=17)
    other.send(wrong)
    stack.until(lambda: copy.is_over)
    assert copy.fault.code == "diverged"
    stack.until(lambda: it.is_over)
    assert outcome([it]) == outcome(plain)


def test_a_superseded_reader_is_notified_and_its_aborts_are_ignored(
    make_stack, expected, outcome
) -> None:
    plain = expected(PROMPTS[:1], max_tokens=200)
    stack = make_stack()
    old, new = stack.client(), stack.client()
    it = old.submit(PROMPTS[0], max_tokens=200)
    stack.until(lambda: len(it.token_ids) > 10 and new.hop.is_attached)
    taken = new.take_over(it, len(it.text), len(it.token_ids))
    stack.until(lambda: it.is_superseded)
    old.abort(it)
    stack.until(lambda: taken.is_over)
    assert outcome([taken]) == outcome(plain)
    assert not it.is_over


def test_front_dies_after_final_ack_last_event_id_gets_tail(make_stack, expected, outcome) -> None:
    """A reader acknowledged everything, but whoever it read for had only a part."""
    params = {"max_tokens": 60, "stop": ("qqq",), "stream_interval": 4, "logprobs": 1}
    plain = expected(PROMPTS[:1], **params)
    stack = make_stack()
    front, successor = stack.client(), stack.client()
    it = front.submit(PROMPTS[0], **params)
    positions = [(0, 0)]

    def note() -> bool:
        positions.append((len(it.text), len(it.token_ids)))
        return it.is_over

    stack.until(note)
    link = stack.worker.readers.port(front.hop._identity).session.link
    stack.until(lambda: link.num_unacked == 0)
    front.is_reading = False
    for num_chars, num_tokens in dict.fromkeys(positions):
        taken = successor.take_over(it, num_chars, num_tokens)
        stack.until(lambda taken=taken: taken.is_over)
        assert outcome([taken]) == outcome(plain)
        assert taken.end == plain[0].end


def test_an_id_whose_stream_ended_and_was_forgotten_is_not_run_again(make_stack) -> None:
    stack = make_stack(grace_s=0.0)
    client = stack.client()
    it = client.submit(PROMPTS[0], max_tokens=5)
    stack.until(lambda: it.is_over and stack.holds_nothing())
    late = client.send_submit(structs.replace(it.submit, handle=9))
    stack.until(lambda: late.is_over)
    assert late.fault.code == "unknown_stream"
    assert stack.holds_nothing()


@pytest.mark.parametrize("how", ["end", "client", "unread"])
def test_a_forgotten_id_is_not_run_again_by_the_next_worker(make_stack, how) -> None:
    """However it ended: by itself, with its client, or because no client came to read it."""
    stack = make_stack(grace_s=0.0)
    client = stack.client()
    it = client.submit(PROMPTS[0], max_tokens=5 if how == "end" else 400)
    stack.until(lambda: it.accepted > 0)
    if how == "client":
        client.goodbye()
    elif how == "unread":
        client.streams.clear()
        client.hop.attach(stack.now())
        stack.until(lambda: client.hop.is_attached)
        stack.pass_time(MIN_UNREAD_S)
    stack.until(stack.holds_nothing)
    for _ in range(2):  # a link that fails in between tells nothing anew
        stack.kill_worker()
        stack.start_worker()
        other = stack.client()
        late = other.send_submit(structs.replace(it.submit, handle=9))
        stack.until(lambda late=late: late.is_over)
        assert late.fault is not None
        assert late.fault.code == "unknown_stream"
        assert stack.holds_nothing()
        stack.worker._core.attach(stack.now())


def test_only_so_many_ids_outlive_a_worker(make_stack, monkeypatch) -> None:
    monkeypatch.setattr("slipstream_core.workers.handler._MAX_FORGOTTEN", 3)
    monkeypatch.setattr("slipstream_core.workers.handler._FORGOTTEN_PER_MESSAGE", 2)
    stack = make_stack(grace_s=0.0)
    client = stack.client()
    streams = []
    for _ in range(5):
        streams.append(client.submit(PROMPTS[0], max_tokens=3))
        stack.until(lambda: streams[-1].is_over and stack.holds_nothing())
    stack.kill_worker()
    stack.start_worker()
    stack.until(lambda: stack.worker._from_core.is_synced)
    known = [stack.worker.retention.has_been(it.stream_id) for it in streams]
    assert known == [False, False, True, True, True]


def test_ended_streams_are_let_go_of_where_they_take_too_much_memory(
    make_stack, monkeypatch
) -> None:
    monkeypatch.setattr("slipstream_worker.streams.retention._MAX_ENDED_BYTES", 4000)
    stack = make_stack(grace_s=1000.0)
    client = stack.client()
    for _ in range(20):
        it = client.submit(PROMPTS[0], max_tokens=20)
        stack.until(lambda it=it: it.is_over)
    stack.until(lambda: len(stack.worker.streams) < 12)
    assert stack.worker.retention._ended_bytes <= 4000
    last = client.take_over(it)
    stack.until(lambda: last.is_over)
    assert last.text == it.text


@pytest.mark.parametrize("how", ["error", "abort", "shutdown", "core"])
def test_buffered_text_is_flushed_before_the_end_reaches_the_client(
    make_stack, expected, how: str
) -> None:
    [plain] = expected(PROMPTS[:1], max_tokens=200, stop=("zzzz",))
    stack = make_stack()
    client = stack.client()
    it = client.submit(PROMPTS[0], max_tokens=200, stop=("zzzz",), stream_interval=1000)
    stream = None

    def num_made() -> int:
        nonlocal stream
        stream = stack.worker.streams.get(it.stream_id)
        return 0 if stream is None else stack.worker.columns.num_tokens(stream)

    stack.until(lambda: num_made() > 30)
    assert it.num_deltas <= 1, "the first tokens alone have left"
    if how == "abort":
        client.abort(it)
    elif how == "error":
        stack.worker.lifecycle.fail(stream, "a test's fault")
    elif how == "shutdown":
        stack.worker.end_drain()
    else:  # the core ends the stream, as it does where a forward pass raises
        row = stack.core.handler._streams.get(it.stream_id).row
        stack.core.manager.end_by_fault([row], Fault("engine", "a test's fault"))
    stack.until(lambda: it.is_over)
    assert len(it.token_ids) > 30
    assert it.token_ids == plain.token_ids[: len(it.token_ids)]
    assert plain.text.startswith(it.text)
    assert it.text
    assert it.end.reason == ("abort" if how == "abort" else "error")


def test_a_worker_that_drains_takes_nothing_new_and_finishes_what_runs(make_stack) -> None:
    stack = make_stack()
    client = stack.client()
    it = client.submit(PROMPTS[0], max_tokens=60)
    stack.until(lambda: len(it.token_ids) > 5)
    stack.worker.begin_drain()
    late = client.submit(PROMPTS[1], max_tokens=5)
    stack.until(lambda: it.is_over and late.is_over)
    assert late.fault.code == "overloaded"
    assert it.end.reason == "length"
    assert stack.worker.num_running == 0
    stack.until(lambda: not stack.worker.has_unsent)


def test_only_what_makes_no_progress_over_three_deaths_is_failed(make_stack) -> None:
    stack = make_stack()
    client = stack.client()
    stuck = client.submit(PROMPTS[0], max_tokens=400)
    stack.until(lambda: len(stuck.token_ids) > 5)
    worker = stack.worker
    stack.core, core = None, stack.core  # it computes nothing more
    for incarnation in (1, 1, 2, 2):  # said again after an attach, a death counts once
        worker._from_core.handle(Suspects(incarnation, (stuck.stream_id, b"nobody's")))
    stream = worker.streams.get(stuck.stream_id)
    assert stream.strikes == 2
    assert worker.lifecycle.readmission(stream).begun.strikes == 2
    stack.core = core
    stack.until(lambda: worker.columns.num_tokens(stream) > stream.struck_at)
    worker._from_core.handle(Suspects(3, (stuck.stream_id,)))
    assert stream.strikes == 1, "it had made progress"
    stack.core = None
    for incarnation in (4, 5):
        worker._from_core.handle(Suspects(incarnation, (stuck.stream_id,)))
    stack.core = core
    stack.until(lambda: stuck.is_over)
    assert stuck.end.reason == "error"
    assert "crashed the engine 3 times" in stuck.end.fault.message


def scoped(client: RawClient, prompt: str, **params: object) -> Received:
    """A stream that only those who know its scope may read and end."""
    it = client.submit(prompt, **params)
    client._waiting.clear()
    it.submit = structs.replace(it.submit, scope=b"a scope")
    client.send(it.submit)
    return it


def asked_of(client: RawClient, stack: MiniStack, it: Received, scope: bytes) -> str:
    """What a Cancel with this scope finds."""
    client.send(Cancel(7, (it.stream_id,), scope))
    stack.until(lambda: 7 in client.cancelled)
    [found] = client.cancelled.pop(7).found
    return found


@pytest.mark.parametrize("given", [b"", b"another"])
@pytest.mark.parametrize("is_worker_new", [False, True])
def test_a_stream_of_another_scope_is_unknown(make_stack, given, is_worker_new) -> None:
    stack = make_stack()
    client, other = stack.client(), stack.client()
    other.resubmits = False
    it = scoped(client, PROMPTS[0], max_tokens=200)
    stack.until(lambda: len(it.token_ids) > 5)
    if is_worker_new:
        stack.kill_worker()
        stack.start_worker()
        stack.until(lambda: it.accepted > 1)
    taken = other.take_over(it, scope=given)
    again = other.send_submit(structs.replace(it.submit, handle=9, scope=given))
    stack.until(lambda: taken.is_unknown and again.is_over)
    assert again.fault is not None
    assert again.fault.code == "conflict"
    assert asked_of(other, stack, it, given) == "unknown"
    assert not it.is_superseded
    stack.until(lambda: it.is_over)
    assert it.end is not None
    assert it.end.reason == "length"


def test_a_stream_is_known_to_any_client_of_its_scope(make_stack) -> None:
    stack = make_stack()
    client, other = stack.client(), stack.client()
    it = scoped(client, PROMPTS[0], max_tokens=400)
    stack.until(lambda: len(it.token_ids) > 5)
    taken = other.take_over(it, scope=b"a scope")
    stack.until(lambda: len(taken.token_ids) > 5)
    assert asked_of(stack.client(), stack, it, b"a scope") == "running"
    stack.until(lambda: taken.is_over)
    assert taken.end.reason == "abort"


@pytest.mark.parametrize("who", ["the next worker's client", "who attaches again", "another"])
def test_a_resume_that_fails_ends_the_stream_and_whoever_resumes_it_hears_of_it(
    make_stack, monkeypatch, who: str
) -> None:
    stack = make_stack()
    client = stack.client()
    client.resubmits = False
    it = client.submit(PROMPTS[0], max_tokens=300)
    stack.until(lambda: len(it.token_ids) > 10)
    locate = StreamReaders._locate
    calls: list[object] = []

    def fail_once(
        self: StreamReaders, stream: WorkerStream, position: ResumePoint
    ) -> TextCursor | None:
        calls.append(stream)
        if len(calls) == 1:
            raise RuntimeError("as it was told")
        return locate(self, stream, position)

    monkeypatch.setattr(StreamReaders, "_locate", fail_once)
    reader = it
    match who:
        case "another":
            other = stack.client()
            stack.until(lambda: other.hop.is_attached)
            reader = other.take_over(it)
        case "who attaches again":
            client.hop.attach(stack.now())
        case _:
            stack.kill_worker()
            stack.start_worker()
    stack.until(lambda: reader.is_unknown or reader.is_over)
    assert calls
    stack.until(lambda: stack.core.scheduler.num_running == 0)
