"""Clients that leave, abort, do not read, or are too many: what users of the peers ran into."""

from __future__ import annotations

import msgspec
import pytest
from tests.helpers.scripted import Watch, play

from slipstream_ipc.messages.budgets import MESSAGE_BUDGET_BYTES
from slipstream_ipc.transport.link import WINDOW

PROMPTS = [f"Chapter {n}: how names are bound, and where." for n in range(8)]


def leave(stack, client, how: str) -> None:
    """A client goes: with a word, or without."""
    if how == "goodbye" and client.hop.has_credit:
        client.goodbye()
    else:
        client.is_reading = False
        client.hop.close()
    stack.clients.remove(client)


# ---- disconnects -------------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["goodbye", "vanishes"])
@pytest.mark.parametrize("moment", ["rendering", "waiting", "prefill", "running", "last step"])
def test_generation_ends_when_its_client_has_left_vllm_54947_sglang_36333_36876(
    make_stack, how, moment
) -> None:
    """There a request whose client had hung up was computed to its end, for nobody."""
    stack = make_stack(client_timeout_s=1.0, grace_s=1.0, max_num_seqs=4, max_num_batched_tokens=64)
    gone, stays = stack.client(), stack.client()
    stack.until(lambda: gone.hop.is_attached and stays.hop.is_attached)
    most = 8 if moment == "last step" else 400
    stack.prompts.is_held = moment == "rendering"
    if moment == "prefill":
        streams = [gone.submit([7] * 100, max_tokens=most) for _ in range(4)]
    else:
        streams = [gone.submit(p, max_tokens=most) for p in PROMPTS]
    held = stack.held
    until = {
        "rendering": lambda: stack.held["worker streams"] == len(PROMPTS),
        "waiting": lambda: stack.held["waiting"] > 0,
        "prefill": lambda: stack.held["running"] > 0,
        "running": lambda: any(len(s.token_ids) > 3 for s in streams),
        "last step": lambda: any(len(s.token_ids) > 6 for s in streams),
    }[moment]
    assert not any(held.values())
    stack.until(until)
    leave(stack, gone, how)
    stack.prompts.is_held = False
    if how == "goodbye":
        stack.until(stack.holds_nothing)
    else:
        stack.let_pass(6.6)  # silence, an unanswered ping, the grace time
        stack.until(stack.holds_nothing)
    made = [len(s.token_ids) for s in streams]
    assert moment == "last step" or max(made) < most, "nothing was computed to its end"
    other = stays.submit(PROMPTS[0], max_tokens=20)
    stack.until(lambda: other.is_over)
    assert other.end.reason == "length"
    stack.until(lambda: stack.worker.readers.num_clients == 1)


def test_no_slot_is_lost_to_those_who_left_sglang_34894(make_stack, expected) -> None:
    """There 13 % of all slots were taken by requests of clients that had gone."""
    plain = expected(PROMPTS[:4], max_tokens=40)
    stack = make_stack(
        max_num_seqs=4, num_blocks=130, max_num_batched_tokens=64, client_timeout_s=0.5, grace_s=0.5
    )
    for round_number in range(30):
        client = stack.client()
        streams = [client.submit(p, max_tokens=400) for p in PROMPTS]
        for _ in range(2 + 2 * round_number):
            stack.step()
        for it in streams[: round_number % 3]:
            client.abort(it)
        leave(stack, client, "goodbye" if round_number % 2 else "vanishes")
        stack.pass_time(0.3)
    stack.let_pass(4.8)
    stack.until(stack.holds_nothing)
    assert stack.worker.columns.tokens.num_pages_used == 0
    client = stack.client()
    streams = [client.submit(p, max_tokens=40) for p in PROMPTS[:4]]
    stack.until(lambda: stack.core.scheduler.num_running == 4)
    stack.until(lambda: all(s.is_over for s in streams))
    assert [s.text for s in streams] == [s.text for s in plain]


# ---- aborts ------------------------------------------------------------------------------------


def test_aborts_of_queued_requests_leak_nothing_sglang_24070(make_stack) -> None:
    """There a request that was aborted while it waited left its state behind, and asking again
    was refused as a duplicate."""
    stack = make_stack(max_num_seqs=1, grace_s=0.0)
    client = stack.client()
    runs = client.submit(PROMPTS[0], max_tokens=400)
    stack.until(lambda: len(runs.token_ids) > 3)
    for _ in range(3):
        queued = [client.submit(p, max_tokens=10) for p in PROMPTS[1:]]
        stack.until(lambda: stack.held["waiting"] == len(PROMPTS) - 1)
        for it in queued:
            client.abort(it)
        stack.until(lambda queued=queued: all(s.is_over for s in queued))
        assert {(s.end.reason, s.end.num_tokens, s.text) for s in queued} == {("abort", 0, "")}
        stack.until(lambda: stack.held["worker streams"] == stack.held["core streams"] == 1)
    assert stack.held["waiting"] == 0
    client.abort(runs)
    stack.until(lambda: runs.is_over and stack.holds_nothing())


@pytest.mark.parametrize("why", ["too long", "no room for output", "bad field", "bad ids"])
def test_requests_that_are_never_dispatched_leak_nothing_sglang_28380(make_stack, why) -> None:
    """There a request that failed between its registration and the scheduler stayed for good."""
    prompt, params = {
        "too long": ([5] * 600, {}),
        "no room for output": ([5] * 500, {"max_tokens": 100}),
        "bad field": ("x", {"top_p": 7.0}),
        "bad ids": ([4096], {}),
    }[why]
    stack = make_stack(grace_s=0.0)
    client = stack.client()
    for _ in range(20):
        it = client.submit(prompt, **params)
        stack.until(lambda it=it: it.is_over)
        assert it.fault.code == "bad_request"
        client.abort(it)  # of what never was
    for _ in range(10):
        stack.step()
    assert stack.holds_nothing()
    assert stack.worker.columns.tokens.num_pages_used == 0


@pytest.mark.parametrize(
    "moment",
    ["rendering", "submitted", "waiting", "prefill", "running", "without core", "replaced"],
)
def test_an_abort_always_has_an_end_for_who_waits_for_it(make_stack, moment) -> None:
    """There an abort ended the computation, and whoever waited for the answer waited for ever."""
    stack = make_stack(max_num_seqs=1, max_num_batched_tokens=32, grace_s=60.0)
    client = stack.client()
    watch = Watch(client)
    stack.until(lambda: client.hop.is_attached)
    other = client.submit(PROMPTS[0], max_tokens=400) if moment == "waiting" else None
    if other is not None:
        stack.until(lambda: len(other.token_ids) > 3)
    stack.prompts.is_held = moment == "rendering"
    core = stack.core
    if moment == "submitted":
        stack.core = None
    it = client.submit([7] * 100 if moment == "prefill" else PROMPTS[1], max_tokens=400)
    stack.until(
        {
            "rendering": lambda: stack.held["worker streams"] == 1,
            "submitted": lambda: len(stack.worker.streams) == 1,
            "waiting": lambda: stack.held["waiting"] == 1,
            "prefill": lambda: stack.held["running"] == 1,
        }.get(moment, lambda: len(it.token_ids) > 3)
    )
    if moment in ("without core", "replaced"):
        stack.kill_core()
    client.abort(it)
    if moment == "replaced":
        stack.start_core()
    stack.until(lambda: it.is_over)
    stack.prompts.is_held = False
    if moment == "submitted":
        stack.core = core
    if moment == "without core":
        stack.start_core()
    if moment == "rendering":
        assert "aborted" in it.fault.message
    else:
        assert it.end.reason == "abort"
        assert it.end.num_tokens == len(it.token_ids)
        assert watch.num_ends(it.submit.handle) == 1
    if other is not None:
        client.abort(other)
    # the core is done with it at once, not only when it is forgotten, or has its 400 tokens
    begin = stack.core.engine._collected_step
    stack.until(lambda: not any(stack.held[kind] for kind in ("running", "waiting", "blocks")))
    assert stack.core.engine._collected_step - begin < 200
    port = stack.worker.readers.port(client.hop._identity)
    stack.until(lambda: port.session.link.num_unacked == 0 and not port.has_unsent)
    stack.step()
    stack.pass_time(61.0)
    stack.until(stack.holds_nothing)


@pytest.mark.parametrize("num_steps", range(0, 16, 2))
def test_an_abort_in_the_final_step_ends_once_vllm(make_stack, num_steps) -> None:
    """Of vLLM's tests: the last token is there when the abort comes, from outside or from inside
    (a stop); one end, and no token more or less than it says."""
    stack = play(make_stack, {(5,): [50, 51, 52, 1], (6,): [50, 51, 52]}, grace_s=0.0)
    client = stack.client()
    watch = Watch(client)
    streams = [client.submit([5], max_tokens=40), client.submit([6], max_tokens=3)]
    stack.until(lambda: all(s.accepted for s in streams))
    for _ in range(num_steps):
        stack.step()
    for it in streams:
        client.abort(it)
        client.abort(it)  # said twice, it changes nothing
    stack.until(lambda: all(s.is_over for s in streams))
    for it, natural in zip(streams, ("stop", "length"), strict=True):
        whole = [50, 51, 52, 1] if natural == "stop" else [50, 51, 52]
        assert it.end.reason in (natural, "abort")
        assert it.token_ids == whole[: it.end.num_tokens]
        assert it.end.reason == "abort" or it.token_ids == whole
        assert watch.num_ends(it.submit.handle) == 1
    stack.until(stack.holds_nothing)


# ---- back-pressure -----------------------------------------------------------------------------


def test_more_than_may_wait_is_turned_away_at_once_vllm_18826(make_stack, expected) -> None:
    """There all that came was queued, without bound; here whoever is too many is told, while those
    before it are served."""
    plain = expected(PROMPTS * 3, max_tokens=60)
    stack = make_stack(max_num_seqs=2, max_waiting=5, grace_s=0.0)
    client = stack.client()
    streams = [client.submit(p, max_tokens=60) for p in PROMPTS * 3]
    stack.until(lambda: sum(s.fault is not None for s in streams) >= len(streams) - 7)
    assert not any(s.end for s in streams), "they hear of it before anybody is done"
    stack.until(lambda: all(s.is_over for s in streams))
    turned_away = [s.fault for s in streams if s.fault is not None]
    assert {fault.code for fault in turned_away} == {"overloaded"}
    assert "5 requests are waiting already" in turned_away[0].message
    served = [(it, same) for it, same in zip(streams, plain, strict=True) if it.end is not None]
    assert 5 <= len(served) <= 7
    assert all(it.text == same.text for it, same in served)
    stack.until(stack.holds_nothing)
    again = client.submit(PROMPTS[0], max_tokens=60)
    stack.until(lambda: again.is_over)
    assert again.text == plain[0].text


def test_what_was_accepted_is_never_turned_away_later_vllm_18826(
    make_stack, expected, outcome
) -> None:
    """The bound is for what is new: a core that comes back takes all that waited before."""
    plain = expected(PROMPTS, max_tokens=40)
    stack = make_stack(max_num_seqs=1, max_waiting=len(PROMPTS))
    client = stack.client()
    streams = [client.submit(p, max_tokens=40) for p in PROMPTS]
    stack.until(lambda: all(s.accepted for s in streams))
    late = [client.submit(p, max_tokens=40) for p in PROMPTS]
    stack.kill_core()
    stack.start_core()
    stack.until(lambda: all(s.is_over for s in streams + late))
    assert outcome(streams) == outcome(plain)
    assert all(s.fault is None or s.fault.code == "overloaded" for s in late)


@pytest.mark.parametrize("interval", ["auto", 1])
def test_a_reader_that_does_not_read_costs_bounded_memory(
    make_stack, expected, monkeypatch, interval
) -> None:
    """There what a slow reader had not read was queued, one object for each of its tokens."""
    params = {"max_tokens": 400, "logprobs": 5}
    plain = expected(PROMPTS, **params)
    stack = make_stack(stream_interval=interval)
    slow, quick = stack.client(), stack.client()
    a = [slow.submit(p, **params) for p in PROMPTS]
    b = [quick.submit(p, **params) for p in PROMPTS]
    stack.until(lambda: all(len(s.token_ids) > 3 for s in a + b))
    slow.is_reading = False
    front, sizes = stack.worker.readers._front, []
    send = front.send

    def weigh(session, body, receipt):
        has_left = send(session, body, receipt)
        if has_left and session.identity == slow.hop._identity:
            sizes.append(len(msgspec.msgpack.encode(body)))
        return has_left

    monkeypatch.setattr(front, "send", weigh)
    stack.until(lambda: all(s.is_over for s in b))
    stack.until(lambda: stack.core.scheduler.num_running == 0)
    port = stack.worker.readers.port(slow.hop._identity)
    assert len(sizes) <= WINDOW
    assert sum(sizes) < WINDOW * MESSAGE_BUDGET_BYTES
    assert len(port._messages) == 0
    assert port.session.link.num_unacked <= WINDOW
    num_before = len(sizes)
    slow.is_reading = True
    stack.until(lambda: all(s.is_over for s in a))
    assert [(s.text, s.token_ids, s.ranks) for s in a] == [
        (s.text, s.token_ids, s.ranks) for s in plain
    ]
    assert len(sizes) - num_before < 50, "the rest came merged"
    assert [(s.text, s.end) for s in b] == [(s.text, s.end) for s in plain]
