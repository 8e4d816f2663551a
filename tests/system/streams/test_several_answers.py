"""Answers that one message asks for: from there on they are streams like others."""

from __future__ import annotations

import pytest
from msgspec import structs

from slipstream_ipc.messages import Admit
from slipstream_ipc.transport.dealer import Dealer

PROMPT = "How names are bound, and where."
SEEDS = (5, 6, 7, -3)
DRAWN = {"max_tokens": 40, "temperature": 1.0}


def alone(make_stack):
    stack = make_stack()
    client = stack.client()
    streams = [client.submit(PROMPT, seed=seed, **DRAWN) for seed in SEEDS]
    stack.until(lambda: all(s.is_over for s in streams))
    return streams


def test_they_are_those_that_are_asked_for_one_by_one(make_stack, outcome) -> None:
    stack = make_stack()
    client = stack.client()
    streams = client.submit_together(PROMPT, SEEDS, **DRAWN)
    stack.until(lambda: all(s.is_over for s in streams))
    assert [s.accepted for s in streams] == [1] * len(SEEDS)
    assert outcome(streams) == outcome(alone(make_stack))


@pytest.mark.parametrize("num_steps", [*range(8), 20])
def test_each_is_asked_for_again_alone(make_stack, outcome, num_steps) -> None:
    """Worker, or worker and core, are gone, whatever of them each of the answers had come to."""
    plain = alone(make_stack)
    for loses_core in (False, True):
        stack = make_stack()
        client = stack.client()
        streams = client.submit_together(PROMPT, SEEDS, **DRAWN)
        for _ in range(num_steps):
            stack.step()
        stack.kill_worker()
        if loses_core:
            stack.kill_core()
            stack.start_core()
        stack.start_worker()
        stack.until(lambda streams=streams: all(s.is_over for s in streams))
        assert [s.fault for s in streams] == [None] * len(SEEDS)
        assert outcome(streams) == outcome(plain)


def test_what_is_wrong_with_all_is_told_to_each(make_stack) -> None:
    stack = make_stack()
    client = stack.client()
    streams = client.submit_together(PROMPT, SEEDS, max_tokens=0)
    stack.until(lambda: all(s.is_over for s in streams))
    assert [(s.fault.code, s.fault.field) for s in streams] == [("bad_request", "max_tokens")] * 4
    stack.until(stack.holds_nothing)


def test_what_is_wrong_with_one_is_its_own(make_stack) -> None:
    stack = make_stack()
    client = stack.client()
    taken = client.submit("another", max_tokens=400)
    stack.until(lambda: taken.accepted)
    streams = client.submit_together(PROMPT, SEEDS, **DRAWN)
    submit = client._waiting.pop()
    second, third, last = submit.others
    client._waiting.append(
        structs.replace(
            submit,
            others=(
                structs.replace(second, stream_id=b"short"),
                structs.replace(third, stream_id=taken.stream_id),
                last,
            ),
        )
    )
    stack.until(lambda: all(s.is_over for s in streams))
    assert [s.fault and s.fault.code for s in streams] == [None, "bad_request", "conflict", None]
    assert (streams[1].fault.field, streams[2].fault.field) == ("stream_id", "stream_id")
    client.abort(taken)
    stack.until(lambda: taken.is_over)


def test_what_was_accepted_is_not_asked_for_with_others(make_stack) -> None:
    stack = make_stack()
    client = stack.client()
    streams = client.submit_together(PROMPT, SEEDS, **DRAWN)
    client._waiting.append(structs.replace(client._waiting.pop(), was_accepted=True))
    stack.until(lambda: all(s.is_over for s in streams))
    assert {(s.fault.code, s.fault.field) for s in streams} == {("bad_request", "others")}


def kill_core(stack) -> None:
    stack.kill_core()
    stack.start_core()


def kill_core_then_worker(stack) -> None:
    """The second core was given what the first had computed, and hands it on."""
    kill_core(stack)
    for _ in range(12):
        stack.step()
    stack.kill_worker()
    stack.start_worker()


@pytest.mark.parametrize("death", [kill_core, kill_core_then_worker])
@pytest.mark.parametrize("num_steps", [*range(2, 9), 14, 20])
def test_their_prompt_goes_to_a_core_once(
    make_stack, outcome, monkeypatch, num_steps, death
) -> None:
    """To the next core too; there each goes on from where it was, with its log-probabilities."""
    params = {**DRAWN, "logprobs": 2}
    asked: list[Admit] = []
    send = Dealer.send

    def spy(self, body, receipt):
        is_sent = send(self, body, receipt)
        if is_sent and isinstance(body, Admit):
            asked.append(body)
        return is_sent

    monkeypatch.setattr(Dealer, "send", spy)

    def run(*deaths):
        stack = make_stack()
        client = stack.client()
        asked.clear()
        streams = client.submit_together(PROMPT, SEEDS, **params)
        for _ in range(num_steps):
            stack.step()
        for each in deaths:
            each(stack)
        stack.until(lambda: all(s.is_over for s in streams))
        assert [s.fault for s in streams] == [None] * len(SEEDS)
        return streams, len(asked)

    plain, num_plain = run()
    found, num_messages = run(death)
    assert num_plain == 1
    assert num_messages <= 2
    assert outcome(found) == outcome(plain)
    assert [s.logprobs for s in found] == [s.logprobs for s in plain]
