"""Cores, workers, links that end in mid-stream: streams go on, nothing is lost or doubled."""

from __future__ import annotations

import pytest
from msgspec import structs
from tests.helpers.answer_stack import PROMPTS as ANSWER_PROMPTS
from tests.helpers.answer_stack import of_read_answers

from slipstream.demo_model import MODEL_PATH
from slipstream_core.workers import sender
from slipstream_ipc.history.event_log import joined_events
from slipstream_ipc.messages import AnswerOptions, ChatMessage, Resume

SLOW_CHAIN = f"simulated:step_ms=20,prefill_us=0,tokenizer={MODEL_PATH},mode=chain"

PROMPTS = [f"Chapter {n}: how names are bound, and where." for n in range(6)]


def run_with(stack, client, num_steps, disturb, **params):
    streams = [client.submit(p, **params) for p in PROMPTS]
    for _ in range(num_steps):
        stack.step()
    disturb()
    stack.until(lambda: all(s.is_over for s in streams))
    return streams


@pytest.mark.parametrize("num_steps", [*range(12), 20, 40, 80, 120])
def test_worker_killed_at_every_protocol_point(make_stack, expected, outcome, num_steps) -> None:
    params = {"max_tokens": 60, "logprobs": 1, "stop": ("q}",)}
    plain = expected(PROMPTS, **params)
    stack = make_stack()
    client = stack.client()

    def disturb() -> None:
        stack.kill_worker()
        for _ in range(10):
            stack.step()
        stack.start_worker()

    streams = run_with(stack, client, num_steps, disturb, **params)
    assert outcome(streams) == outcome(plain)
    assert [s.end for s in streams] == [s.end for s in plain]
    assert [s.ranks for s in streams] == [s.ranks for s in plain]


def test_worker_killed_before_its_client_heard_of_acceptance(make_stack, expected, outcome) -> None:
    plain = expected(PROMPTS, max_tokens=20)
    stack = make_stack()
    client = stack.client()
    stack.until(lambda: client.hop.is_attached)
    streams = [client.submit(p, max_tokens=20) for p in PROMPTS]
    client.step()
    client.is_reading = False
    stack.until(lambda: len(stack.worker.streams) == len(PROMPTS))
    worker, stack.worker = stack.worker, None
    stack.until(lambda: stack.core.handler.num_streams == len(PROMPTS))
    stack.worker = worker
    stack.kill_worker()
    stack.start_worker()
    client.is_reading = True
    stack.until(lambda: all(s.is_over for s in streams))
    assert [s.fault for s in streams] == [None] * len(PROMPTS)
    assert outcome(streams) == outcome(plain)


@pytest.mark.parametrize("num_steps", [*range(12), 20, 40, 80, 120])
def test_core_killed_at_every_protocol_point(make_stack, expected, outcome, num_steps) -> None:
    params = {"max_tokens": 60, "stop": ("q}",)}
    plain = expected(PROMPTS, **params)
    stack = make_stack()
    client = stack.client()

    def disturb() -> None:
        stack.kill_core()
        for _ in range(10):
            stack.step()
        stack.start_core()

    streams = run_with(stack, client, num_steps, disturb, **params)
    assert outcome(streams) == outcome(plain)
    assert [s.end for s in streams] == [s.end for s in plain]


@pytest.mark.parametrize("num_steps", [1, 5, 20, 40])
def test_links_that_attach_anew_lose_and_double_nothing(
    make_stack, expected, outcome, num_steps
) -> None:
    params = {"max_tokens": 100, "logprobs": 2}
    plain = expected(PROMPTS, **params)
    stack = make_stack()
    client = stack.client()

    def disturb() -> None:
        for _ in range(5):
            stack.worker._core.attach(stack.now())
            for _ in range(7):
                stack.step()
            client.hop.attach(stack.now())
            for _ in range(7):
                stack.step()

    streams = run_with(stack, client, num_steps, disturb, **params)
    assert outcome(streams) == outcome(plain)
    assert [s.ranks for s in streams] == [s.ranks for s in plain]


def test_a_client_that_attaches_anew_is_sent_nothing_before_it_says_where_it_is(
    make_stack, expected, outcome
) -> None:
    plain = expected(PROMPTS[:1], max_tokens=200)
    stack = make_stack()
    client = stack.client()
    it = client.submit(PROMPTS[0], max_tokens=200)
    stack.until(lambda: len(it.token_ids) > 5)
    # what is under way is lost with the old socket
    client.is_reading = False
    link = stack.worker.readers.port(client.hop._identity).session.link
    stack.until(lambda: link.num_unacked >= 2)
    client.hop.attach(stack.now())
    for _ in range(30):
        stack.step()
    client.is_reading = True
    stack.until(lambda: it.is_over)
    assert outcome([it]) == outcome(plain)


def test_abort_or_error_end_survives_worker_death(make_stack, monkeypatch) -> None:
    stack = make_stack()
    client = stack.client()
    aborted = client.submit(PROMPTS[0], max_tokens=300)
    stack.until(lambda: len(aborted.token_ids) > 10)
    client.abort(aborted)
    client.is_reading = True
    # the end reaches worker and core, but not the client
    while client._waiting:
        client.step()
    client.is_reading = False
    stack.until(lambda: stack.core.scheduler.num_running == 0)
    stack.kill_worker()
    stack.start_worker()
    client.is_reading = True
    stack.until(lambda: aborted.is_over)
    assert aborted.end.reason == "abort"
    assert stack.core.scheduler.num_running == 0


@pytest.mark.parametrize("is_read_as_events", [False, True])
def test_an_aborted_stream_is_replayed_in_portions_to_who_attaches_in_between(
    make_stack, monkeypatch, is_read_as_events: bool
) -> None:
    """Its tokens do not imply its end, which the next worker knows before it has them all."""
    make = of_read_answers(make_stack) if is_read_as_events else make_stack
    prompts = ANSWER_PROMPTS if is_read_as_events else PROMPTS
    stack = make(grace_s=60.0)
    client = stack.client()
    client.resubmits = False
    streams = []
    for seed, prompt in enumerate(prompts):
        it = client.submit(prompt, max_tokens=300, temperature=0.8, seed=seed)
        if is_read_as_events:
            messages = (ChatMessage("user", prompt),)
            it.submit = structs.replace(
                it.submit, text=None, messages=messages, answer=AnswerOptions()
            )
            client._waiting[-1] = it.submit
        streams.append(it)
    stack.until(lambda: all(len(it.token_ids) >= 100 or it.is_over for it in streams))
    for it in streams:
        if not it.is_over:
            client.abort(it)
    stack.until(lambda: all(it.is_over for it in streams))
    assert "abort" in {it.end.reason for it in streams}
    stack.kill_worker()
    monkeypatch.setattr(sender, "_TOKEN_BUDGET", 16)
    monkeypatch.setattr(sender, "_MESSAGES_PER_TURN", 1)
    stack.start_worker()
    reader = stack.client()
    stack.until(lambda: stack.worker._from_core.is_synced and reader.hop.is_attached)
    again = [reader.take_over(it) for it in streams]
    for it in again:
        it.accepted = 1
    stack.until(lambda: all(it.is_over for it in again))
    assert [(it.text, it.token_ids, it.end) for it in again] == [
        (it.text, it.token_ids, it.end) for it in streams
    ]
    assert [joined_events(it.events) for it in again] == [
        joined_events(it.events) for it in streams
    ]


def test_slow_acking_worker_overrun_is_bounded(make_stack, expected, outcome) -> None:
    plain = expected(PROMPTS, max_tokens=300, stop=("q}",))
    stack = make_stack()
    client = stack.client()
    streams = [client.submit(p, max_tokens=300, stop=("q}",)) for p in PROMPTS]
    stack.until(lambda: all(len(s.token_ids) > 3 for s in streams if not s.is_over))
    worker, stack.worker = stack.worker, None
    lengths = stack.core.tokens
    before = [lengths.length(row) for row in range(len(PROMPTS))]
    for _ in range(400):
        stack.step()
    after = [lengths.length(row) for row in range(len(PROMPTS))]
    assert all(b - a <= 66 for a, b in zip(before, after, strict=True))
    stack.worker = worker
    stack.until(lambda: all(s.is_over for s in streams))
    assert outcome(streams) == outcome(plain)


def test_slot_reused_while_window_full_keeps_tail(make_stack, expected, outcome) -> None:
    plain = expected(PROMPTS, max_tokens=40)
    stack = make_stack(max_num_seqs=1)
    client = stack.client()
    streams = [client.submit(p, max_tokens=40, ignore_eos=True) for p in PROMPTS]
    stack.until(lambda: streams[0].accepted == 1 and len(streams[0].token_ids) > 2)
    worker, stack.worker = stack.worker, None
    for _ in range(400):
        stack.step()
    stack.worker = worker
    stack.until(lambda: all(s.is_over for s in streams))
    assert outcome(streams) == outcome(plain)


def test_resume_before_sync_done_waits(make_stack, expected, outcome) -> None:
    plain = expected(PROMPTS[:1], max_tokens=60)
    stack = make_stack()
    client = stack.client()
    it = client.submit(PROMPTS[0], max_tokens=60)
    stack.until(lambda: len(it.token_ids) > 10)
    stack.kill_worker()
    stack.start_worker()
    # the fresh worker is welcomed, but has not been told of any stream, when the resume comes
    core, stack.core = stack.core, None
    for _ in range(50):
        stack.step()
    stack.core = core
    stack.until(lambda: it.is_over)
    assert not it.is_unknown
    assert outcome([it]) == outcome(plain)


def test_an_abort_before_sync_done_waits(make_stack) -> None:
    # slow enough that the stream does not end before a quiet client has noticed the death
    stack = make_stack(SLOW_CHAIN)
    client = stack.client()
    it = client.submit(PROMPTS[0], max_tokens=400)
    stack.until(lambda: len(it.token_ids) > 10)
    stack.kill_worker()
    stack.start_worker()
    core, stack.core = stack.core, None
    client.abort(it)
    for _ in range(50):
        stack.step()
    stack.core = core
    stack.until(lambda: it.is_over)
    assert it.end.reason == "abort"


def test_a_resume_from_a_position_that_never_was_ends_as_diverged(make_stack) -> None:
    stack = make_stack()
    client, other = stack.client(), stack.client()
    it = client.submit(PROMPTS[0], max_tokens=60)
    stack.until(lambda: len(it.token_ids) > 10)
    copy = other.send_submit(it.submit)
    other._waiting.clear()
    other.send(Resume(copy.submit.handle, it.stream_id, 3, 40000))
    stack.until(lambda: copy.is_over)
    assert copy.fault.code == "diverged"
    stack.until(lambda: it.is_over)


def test_takeover_then_old_socket_dies_new_reader_unharmed(make_stack, expected, outcome) -> None:
    plain = expected(PROMPTS[:1], max_tokens=200)
    stack = make_stack(client_timeout_s=0.5, grace_s=0.5)
    old, new = stack.client(), stack.client()
    it = old.submit(PROMPTS[0], max_tokens=200)
    stack.until(lambda: len(it.token_ids) > 10 and new.hop.is_attached)
    taken = new.send_submit(it.submit)
    new._waiting.clear()
    new.send(Resume(taken.submit.handle, it.stream_id, 0, 0))
    stack.until(lambda: len(taken.token_ids) > 5)
    old.is_reading = False
    old.hop.close()
    stack.clients.remove(old)
    stack.let_pass(1.2)
    stack.until(lambda: taken.is_over)
    assert outcome([taken]) == outcome(plain)
