"""Engine and detokeniser die, in one thread: every request of the peers ended; here none does.

`test_processes` kills and stops real ones.
"""

from __future__ import annotations

import pytest
from tests.helpers.scripted import EOS, FILLER, play

PROMPTS = [f"Chapter {n}: how names are bound, and where." for n in range(6)]
PROMPT = (5, 6, 7)
PARAMS = {"max_tokens": 60, "logprobs": 1}


def some_run_some_wait(stack, client):
    """Streams of which two run and have said something, and the others wait."""
    streams = [client.submit(p, **PARAMS) for p in PROMPTS]
    stack.until(lambda: sum(len(s.token_ids) > 5 for s in streams) >= 2)
    assert stack.held["waiting"] > 0
    return streams


def test_no_request_fails_when_the_engine_dies_vllm_39863(make_stack, expected, outcome) -> None:
    """There every request ended with EngineDeadError, or hung; here those that ran, waited or came
    while there was no engine get what they would have got, later."""
    plain = expected(PROMPTS, **PARAMS)
    stack = make_stack(max_num_seqs=2)
    client = stack.client()
    streams = some_run_some_wait(stack, client)
    stack.kill_core()
    late = [client.submit(p, **PARAMS) for p in PROMPTS]
    for _ in range(100):
        stack.step()
        stack.pass_time(0.3)  # half a minute in all: longer than any ping is waited for
    assert not any(s.is_over for s in streams + late), "nobody is told a lie meanwhile"
    stack.start_core()
    stack.until(lambda: all(s.is_over for s in streams + late))
    assert outcome(streams) == outcome(late) == outcome(plain)
    assert [s.ranks for s in streams] == [s.ranks for s in plain]


def test_no_request_fails_when_the_detokeniser_dies_sglang_36900(
    make_stack, expected, outcome
) -> None:
    """There the server went on without its detokeniser, and no answer ever came again."""
    plain = expected(PROMPTS, **PARAMS)
    stack = make_stack(max_num_seqs=2)
    client = stack.client()
    streams = some_run_some_wait(stack, client)
    stack.kill_worker()
    late = [client.submit(p, **PARAMS) for p in PROMPTS]
    for _ in range(300):
        stack.step()
    assert not any(s.is_over for s in streams + late)
    stack.start_worker()
    stack.until(lambda: all(s.is_over for s in streams + late))
    assert outcome(streams) == outcome(late) == outcome(plain)
    assert [s.ranks for s in streams] == [s.ranks for s in plain]


@pytest.mark.parametrize("how", ["eos", "stop", "length"])
@pytest.mark.parametrize("reader", ["there", "later"])
def test_an_end_that_comes_with_the_replay_is_kept_for_its_reader(make_stack, how, reader) -> None:
    """A detokeniser that is born again and learns at once that a stream has ended: its reader has
    the grace time to come for it, as after any other end. (It was forgotten in the same turn.)"""
    answer = [*[FILLER] * 12, *({"eos": [EOS], "stop": [777]}.get(how, []))]
    stack = play(make_stack, {PROMPT: answer}, grace_s=60.0)
    client = stack.client()
    most = 12 if how == "length" else 40
    it = client.submit(list(PROMPT), max_tokens=most, stop_token_ids=(777,))
    stack.until(lambda: len(it.token_ids) > 3)
    worker, stack.worker = stack.worker, None  # it learns nothing more
    stream = stack.core.handler._streams.get(it.stream_id)
    stack.until(lambda: stack.core.tokens.length(stream.row) - stream.prompt_len >= len(answer))
    stack.worker = worker
    stack.kill_worker()
    client.is_reading = False
    stack.start_worker()
    worker, stack.worker = stack.worker, None
    for _ in range(100):  # the whole replay lies in its socket before it first looks
        stack.step()
    stack.worker = worker
    for _ in range(20):
        stack.step()
    if reader == "later":
        stack.pass_time(30.0)
        for _ in range(20):
            stack.step()
    client.is_reading = True
    stack.until(lambda: it.is_over)
    assert not it.is_unknown
    assert it.fault is None
    assert it.end.reason == ("length" if how == "length" else "stop")
    assert it.token_ids == answer


@pytest.mark.parametrize("died", ["worker", "core", "core, then worker"])
def test_text_is_the_same_whatever_was_held_back_at_a_death(make_stack, tokenizer, died) -> None:
    """What only the detokeniser knew when it died: half a character, and what may begin a stop."""
    ids = tokenizer.encode("a <END😀 b <EN").ids
    for num_seen in range(1, len(ids)):
        stack = play(make_stack, {PROMPT: ids})
        client = stack.client()
        it = client.submit(list(PROMPT), max_tokens=len(ids), stop=("<END>",))
        stack.until(lambda it=it: it.accepted > 0)
        stream = stack.worker.streams.get(it.stream_id)
        columns = stack.worker.columns
        stack.until(lambda c=columns, s=stream, num=num_seen: c.num_tokens(s) >= num)
        if died.startswith("core"):
            stack.kill_core()
            stack.start_core()
            stack.until(lambda s=stack, it=it: s.core.handler.num_streams > 0 or it.is_over)
        if died.endswith("worker"):
            stack.kill_worker()
            stack.start_worker()
        stack.until(lambda it=it: it.is_over)
        assert (it.text, it.token_ids) == ("a <END😀 b <EN", ids)
        stack.close()
        stack.clients.clear()
        stack.worker = stack.core = None
