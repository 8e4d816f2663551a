"""What reaches a worker that is slow, or new: everything, and the core waits for nobody."""

from __future__ import annotations

import math
import time

import pytest
from msgspec import structs
from tests.helpers.admits import with_fields
from tests.helpers.core_box import VOCAB_SIZE
from tests.helpers.patience import Patience

from slipstream_core.engine import engine as engine_module
from slipstream_core.workers import sender
from slipstream_ipc.columns import pack_u32
from slipstream_ipc.messages import End, Forget, Registered, Report, Step, Withdraw
from slipstream_ipc.transport.link import WINDOW

PROMPTS = [[n + 1, 5, 9 * n + 2, 7] for n in range(6)]
MAX_UNACKED = 64


def link_of(box):
    [session] = box.core.handler._acceptor.sessions
    return session.link


def history(box, it) -> int:
    """Outputs of a stream in the core's history."""
    return box.core.tokens.length(it.row) - len(it.admit.prompt_ids) // 4


def run_dry(box) -> None:
    """Step until nothing is computed any more."""
    before = -1
    while len(box.runner.launched) != before or box.runner.done():
        before = len(box.runner.launched)
        for _ in range(5):
            box.step()


def test_slow_acking_worker_overrun_is_bounded(make_core, undisturbed) -> None:
    """Of those that only the worker can end; who ends by length runs on."""
    box = make_core()
    worker = box.worker()
    can_end = [worker.admit(p, 200, stop_token_ids=(996,)) for p in PROMPTS[:3]]
    by_length = [worker.admit(p, 200) for p in PROMPTS[3:]]
    box.until(lambda: all(len(it.token_ids) > 5 for it in worker.streams.values()))
    worker.is_reading = False
    run_dry(box)
    acked = box.core.handler.acked
    for it in can_end:
        assert box.core.tokens.length(it.row) - acked[it.row] == MAX_UNACKED
        assert history(box, it) - len(it.token_ids) <= MAX_UNACKED
    for it in by_length:
        assert history(box, it) == 200
    assert not link_of(box).has_credit
    worker.is_reading = True
    box.until(lambda: all(it.is_whole for it in worker.streams.values()))
    for it in worker.streams.values():
        assert it.token_ids == undisturbed(it.admit).token_ids


def test_an_acknowledgement_that_comes_while_nothing_runs_is_enough(make_core, monkeypatch) -> None:
    """The core does not go to sleep with a stream that may run again."""
    box = make_core()
    worker = box.worker()
    it = worker.admit(PROMPTS[0], 200, stop_token_ids=(996,))
    box.until(lambda: len(it.token_ids) > 5)
    worker.is_reading = False
    run_dry(box)
    engine, waits = box.core.engine, []
    monkeypatch.setattr(engine, "_wait", lambda: waits.append(len(engine._in_flight)))
    worker.is_reading = True
    patience = Patience()
    while not it.is_whole:
        patience.check()
        worker.step()
        waits.clear()
        engine.run_once()
        if waits == [0] and history(box, it) < 200:
            ahead = box.core.tokens.length(it.row) - box.core.handler.acked[it.row]
            assert ahead == MAX_UNACKED


def test_a_worker_that_has_less_after_an_attach_is_not_overrun(make_core) -> None:
    box = make_core()
    worker = box.worker()
    it = worker.admit(PROMPTS[0], 200, stop_token_ids=(996,))
    box.until(lambda: len(it.token_ids) > 90)
    it.token_ids = it.token_ids[:1]
    worker.hop.attach(time.monotonic())
    worker.is_reading = False

    def has_moved_back() -> bool:
        if box.core.handler.acked[it.row] == len(PROMPTS[0]) + 1:
            return True
        worker.is_reading = True
        worker.step()
        worker.is_reading = False
        return False

    box.until(has_moved_back)
    before = history(box, it)
    run_dry(box)
    assert before > 1 + MAX_UNACKED
    assert history(box, it) <= before + 2


def test_slot_reused_while_window_full_keeps_tail(make_core, undisturbed) -> None:
    box = make_core(max_num_seqs=1)
    worker = box.worker()
    held = [worker.admit(p, 30, logprobs=n % 2 or None) for n, p in enumerate(PROMPTS)]
    box.until(lambda: all(it.row is not None for it in held) and len(held[0].token_ids) > 2)
    worker.is_reading = False
    run_dry(box)
    assert not link_of(box).has_credit
    assert all(history(box, it) == 30 for it in held), "all have had the one slot there is"
    assert not held[-1].token_ids
    worker.is_reading = True
    box.until(lambda: all(it.is_whole for it in held))
    for it in held:
        plain = undisturbed(it.admit)
        assert (it.token_ids, it.logprobs) == (plain.token_ids, plain.logprobs)


def test_a_row_given_to_another_stream_takes_nothing_over(make_core, undisturbed) -> None:
    """Acknowledgements of the last one are under way still."""
    box = make_core(max_num_seqs=2)
    worker = box.worker()
    first = worker.admit(PROMPTS[0], 200)
    box.until(lambda: len(first.token_ids) > 3)
    row = first.row
    del worker.streams[first.admit.stream_id]
    worker.send(Forget((first.admit.stream_id,)))
    second = worker.admit(PROMPTS[1], 40, stop_token_ids=(996,))
    box.until(lambda: second.row is not None)
    assert second.row == row
    box.until(lambda: second.is_whole)
    assert second.token_ids == undisturbed(second.admit).token_ids


def test_what_was_sampled_is_sent_before_more_is_planned(make_core, monkeypatch) -> None:
    """So its worker can end a stream before the step after the one in flight has it."""
    box = make_core(model=f"simulated:step_ms=200,vocab_size={VOCAB_SIZE}")
    worker = box.worker()
    box.until(lambda: worker.is_synced)
    engine = box.core.engine
    monkeypatch.setattr(engine, "_device_idle_at", lambda: math.inf)
    it = worker.admit(PROMPTS[0], 50, stop_token_ids=tuple(range(VOCAB_SIZE)))
    box.until(lambda: len(box.runner.launched) == 2)
    worker.is_reading = False
    box.until(lambda: engine._collected_step >= 1)
    assert len(box.runner.launched) - engine._collected_step <= 1
    worker.is_reading = True
    box.until(lambda: bool(it.token_ids))


def test_a_worker_that_checks_slowly_is_a_few_steps_behind(make_core, monkeypatch) -> None:
    """Not as many as the scheduler allows, while the device waits; and that is not for ever."""
    box = make_core()
    worker = box.worker()
    box.until(lambda: worker.is_synced)
    worker.is_reporting = False
    most = engine_module._MAX_UNCHECKED
    with monkeypatch.context() as patch:  # a step takes for ever
        patch.setattr(box.core.engine, "_launch_at", lambda num: math.inf if num > most else 0.0)
        it = worker.admit(PROMPTS[0], 50, stop_token_ids=tuple(range(VOCAB_SIZE)))
        box.until(lambda: len(it.token_ids) > most)
        run_dry(box)
        # two are launched while so many are out, and the first message may be of two steps
        assert history(box, it) <= most + 3
    box.until(lambda: it.is_whole)


def test_tokens_that_end_nothing_are_not_waited_for(make_core, monkeypatch) -> None:
    box = make_core()
    worker = box.worker()
    box.until(lambda: worker.is_synced)
    monkeypatch.setattr(box.core.engine, "_device_idle_at", lambda: math.inf)
    it = worker.admit(PROMPTS[0], 50, stop_token_ids=(VOCAB_SIZE - 1,))
    other = worker.admit(PROMPTS[1], 50)
    box.until(lambda: it.is_whole and other.is_whole)
    assert VOCAB_SIZE - 1 not in it.token_ids
    third = worker.send_admit(structs.replace(it.admit, stream_id=bytes(16)))
    box.until(lambda: third.row is not None)
    worker.is_reading = False
    box.until(lambda: history(box, third) == 50)


def test_steps_that_end_nothing_do_not_put_a_worker_behind(make_core, monkeypatch) -> None:
    """The device waits for a worker that has several steps to check, not for one that has one."""
    box = make_core()
    worker = box.worker()
    box.until(lambda: worker.is_synced)
    it = worker.admit(PROMPTS[0], 50)
    box.until(lambda: it.is_whole)
    most = engine_module._MAX_UNCHECKED
    monkeypatch.setattr(box.core.engine, "_launch_at", lambda num: math.inf if num > most else 0.0)
    worker.is_reporting = False
    other = worker.send_admit(
        with_fields(it.admit, stream_id=bytes(16), stop_token_ids=(it.token_ids[20],))
    )
    box.until(lambda: other.is_whole)


def test_an_end_reported_after_an_attach_says_nothing_of_steps_checked_before(make_core) -> None:
    """It comes before the first step of the attach, so its report names none."""
    box = make_core()
    worker = box.worker()
    held = [worker.admit(p, 200, stop_token_ids=(VOCAB_SIZE - 1,)) for p in PROMPTS[:2]]
    box.until(lambda: all(len(it.token_ids) > 20 for it in held))
    worker.hop.attach(time.monotonic())
    box.until(lambda: worker.hop.is_attached and len(held[1].token_ids) > 30)
    worker.send(Report(0, pack_u32([held[0].row]), pack_u32([4 + len(held[0].token_ids)])))
    box.until(lambda: box.core.scheduler.num_running == 1)
    assert box.core.handler.num_unchecked <= 1


# ---- ends that tokens do not imply ---------------------------------------------------------------


def abort(box, worker, it) -> None:
    worker.send(Withdraw(it.admit.stream_id, End("abort", len(it.token_ids))))
    it.end = End("abort", len(it.token_ids))
    box.until(lambda: box.core.scheduler.num_running == 1)


def fail(box, worker, it) -> None:
    box.runner.fails = lambda ids: it.admit.stream_id in ids
    box.until(lambda: it.fault is not None)


@pytest.mark.parametrize(("end", "reason"), [(abort, "abort"), (fail, "error")])
def test_abort_or_error_end_survives_worker_death(make_core, undisturbed, end, reason) -> None:
    box = make_core()
    worker = box.worker()
    it, other = worker.admit(PROMPTS[0], 200), worker.admit(PROMPTS[1], 200)
    box.until(lambda: len(it.token_ids) > 9)
    end(box, worker, it)
    for _ in range(2):  # the second finds what the first one found
        box.kill_worker(worker)
        worker = box.worker()
        box.until(lambda w=worker: w.is_synced)
        found = {body.registration.stream_id: body.end for body in worker.heard(Registered)}
        assert found[other.admit.stream_id] is None
        ended = found[it.admit.stream_id]
        assert ended.reason == reason
        assert (ended.fault is not None) == (reason == "error")
        replayed = worker.streams[it.admit.stream_id]
        box.until(lambda r=replayed, e=ended: len(r.token_ids) >= e.num_tokens)
        assert replayed.token_ids == undisturbed(it.admit).token_ids[: len(replayed.token_ids)]
    replayed = worker.streams[other.admit.stream_id]
    box.until(lambda: replayed.is_whole)
    assert replayed.token_ids == undisturbed(other.admit).token_ids


def test_an_end_that_comes_twice_stays_the_first(make_core) -> None:
    box = make_core()
    worker = box.worker()
    it, other = worker.admit(PROMPTS[0], 200), worker.admit(PROMPTS[1], 200)
    box.until(lambda: len(it.token_ids) > 9 and other.row is not None)
    abort(box, worker, it)
    worker.send(Withdraw(it.admit.stream_id, End("error", 3)))
    box.until(lambda: other.is_whole)
    box.kill_worker(worker)
    fresh = box.worker()
    box.until(lambda: fresh.is_synced)
    ends = [body.end for body in fresh.heard(Registered)]
    assert sorted((end.reason for end in ends if end), key=str) == ["abort"]


# ---- catching up ---------------------------------------------------------------------------------


@pytest.mark.long
def test_a_catch_up_is_a_flow_beside_the_steps(make_core, undisturbed, monkeypatch) -> None:
    """A turn of the loop sends a bounded part of what a fresh worker lacks."""
    monkeypatch.setattr(sender, "_LOGPROB_TOKEN_BUDGET", 100)
    box = make_core(max_model_len=512)
    worker = box.worker()
    held = [worker.admit([n + 1, 3], 200 if n % 2 else 500, logprobs=1) for n in range(14)]
    box.until(lambda: all(len(it.token_ids) > 199 for it in held))
    box.kill_worker(worker)
    acceptor = box.core.handler._acceptor
    send = acceptor.send
    sent: list[int] = []  # the step before each message of tokens

    def watched(session, body, receipt) -> bool:
        if isinstance(body, Step):
            sent.append(len(box.runner.launched))
        return send(session, body, receipt)

    monkeypatch.setattr(acceptor, "send", watched)
    fresh = box.worker()
    box.until(lambda: fresh.is_synced and all(it.is_whole for it in fresh.streams.values()))
    assert len(fresh.streams) == len(held)
    num_messages = len(held) * 200 // 100
    most = max(sent.count(step) for step in set(sent[:num_messages]))
    assert most <= 4, "messages between two steps"
    for it in fresh.streams.values():
        plain = undisturbed(it.admit, max_model_len=512)
        assert (it.token_ids, it.logprobs) == (plain.token_ids, plain.logprobs)


def test_reports_are_acknowledged_by_the_steps_that_follow(make_core, monkeypatch) -> None:
    """A message of its own is for a core that has nothing to send, and then it comes at once."""
    box = make_core()
    acceptor, bare = box.core.handler._acceptor, []
    send = acceptor._send_control

    def counted(session, body) -> None:
        if body is None:
            bare.append(box.core.engine.running_s(math.inf) > 0)
        send(session, body)

    monkeypatch.setattr(acceptor, "_send_control", counted)
    worker = box.worker()
    held = worker.admit(PROMPTS[0], 200, stop_token_ids=tuple(range(VOCAB_SIZE)))
    box.until(lambda: held.is_whole and box.core.handler.num_streams == 1)
    num_steps = len(worker.heard(Step))
    assert num_steps > 50
    assert len(bare) < num_steps / 2
    box.until(lambda: not worker.hop.num_unacked)
    worker.forget(held)
    box.until(lambda: box.core.handler.num_streams == 0)
    box.until(lambda: not worker.hop.num_unacked)
    assert not bare[-1], "said while nothing ran"


def test_what_yields_to_other_messages_does_not_wait_for_a_step(make_core, monkeypatch) -> None:
    """It leaves while fewer than a quarter of the window is unacknowledged (`CoreLink.is_idle`)."""
    box = make_core(model=f"simulated:step_ms=60000,vocab_size={VOCAB_SIZE}")
    monkeypatch.setattr(box.core.handler, "beat", lambda _now: None)
    worker = box.worker()
    worker.admit(PROMPTS[0], 50)
    box.until(lambda: box.runner.launched and not worker.hop.num_unacked)
    for number in range(WINDOW // 4):
        worker.send(Forget((number.to_bytes(16, "little"),)))
    worker.step()
    assert worker.hop.num_unacked == WINDOW // 4
    monkeypatch.setattr(worker.hop, "beat", lambda _now: None)
    box.until(lambda: worker.hop.num_unacked < WINDOW // 4, within_s=20)
