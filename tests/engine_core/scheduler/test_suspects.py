"""Steps that fail, cores that die from within: who is at fault ends, nobody else loses anything."""

from __future__ import annotations

import pytest

from slipstream_ipc.messages import Suspects, UnknownToCore

PROMPTS = [[n + 1, 5, 9 * n + 2, 7] for n in range(6)]


def admit_all(worker, max_tokens: int = 25, **fields):
    return [worker.admit(p, max_tokens, logprobs=n % 2 or None) for n, p in enumerate(PROMPTS)]


def same_as_alone(held, undisturbed) -> bool:
    plain = [undisturbed(it.admit) for it in held]
    return [(it.token_ids, it.logprobs) for it in held] == [
        (it.token_ids, it.logprobs) for it in plain
    ]


def ids_of(held) -> list[bytes]:
    return [it.admit.stream_id for it in held]


# ---- an exception in a forward -------------------------------------------------------------------


@pytest.mark.parametrize("at_step", [1, 2, 7])
def test_only_the_request_that_fails_alone_ends(make_core, undisturbed, at_step) -> None:
    box = make_core()
    worker = box.worker()
    held = admit_all(worker)
    poison, others = held[2], [it for n, it in enumerate(held) if n != 2]
    poison_id = poison.admit.stream_id
    box.runner.fails = lambda ids: poison_id in ids and len(box.runner.launched) >= at_step
    box.until(lambda: all(it.is_over for it in held))
    assert poison.fault.code == "engine"
    assert "was alone in this step" in poison.fault.message
    assert "no such luck" in poison.fault.message
    assert all(it.is_whole for it in others)
    assert same_as_alone(others, undisturbed)
    assert not box.core.scheduler.has_work


def test_a_failure_is_logged_with_the_request_id(
    make_core, caplog: pytest.LogCaptureFixture
) -> None:
    box = make_core()
    worker = box.worker()
    held = [worker.admit([1, 5, 9], 25, label=name) for name in ("mine", "yours")]
    poison_id = held[0].admit.stream_id
    box.runner.fails = lambda ids: poison_id in ids
    box.until(lambda: all(it.is_over for it in held))
    told = [record.request_ids for record in caplog.records if hasattr(record, "request_ids")]
    assert told[-2:] == [("mine",), ("mine",)]
    assert ("yours",) not in told


def test_a_step_that_fails_once_costs_nobody_anything(make_core, undisturbed) -> None:
    box = make_core()
    worker = box.worker()
    held = admit_all(worker)
    box.take_in(len(held))
    failed: list[list[bytes]] = []

    def fails(ids: list[bytes]) -> bool:
        if len(ids) == len(held) and len(failed) < 3 and len(box.runner.launched) % 5 == 0:
            failed.append(ids)
            return True
        return False

    box.runner.fails = fails
    box.until(lambda: all(it.is_over for it in held))
    assert len(failed) == 3
    assert all(it.is_whole for it in held)
    assert same_as_alone(held, undisturbed)


def test_whoever_is_tried_again_is_alone(make_core) -> None:
    box = make_core()
    worker = box.worker()
    held = admit_all(worker)
    box.take_in(len(held))
    box.until(lambda: all(len(it.token_ids) > 3 for it in held))
    begun = len(box.runner.launched)
    box.runner.fails = lambda ids: len(box.runner.launched) == begun + 1
    box.until(lambda: len(box.runner.launched) > begun + len(held) + 4)
    after = box.runner.launched[begun + 1 :]
    alone = [ids for ids in after if len(ids) == 1]
    assert sorted(ids for [ids] in alone) == sorted(ids_of(held))
    first = after.index(alone[0])
    assert first <= 1, "at most one step was launched ahead already"
    assert after[first : first + len(held)] == alone
    in_flight = box.runner.num_in_flight[begun + 1 :][first : first + len(held)]
    assert in_flight == [1] * len(held)
    assert max(box.runner.num_in_flight) == 2, "nothing was ever launched ahead: a test of nothing"


def test_a_request_that_always_fails_later_on_ends_with_what_it_has(make_core, undisturbed) -> None:
    """Its outputs so far are delivered."""
    box = make_core()
    worker = box.worker()
    it, other = worker.admit(PROMPTS[0], 40), worker.admit(PROMPTS[1], 40)
    box.runner.fails = lambda ids: it.admit.stream_id in ids and len(it.token_ids) >= 9
    box.until(lambda: it.is_over and other.is_over)
    assert it.fault.code == "engine"
    assert len(it.token_ids) >= 9
    assert it.token_ids == undisturbed(it.admit).token_ids[: len(it.token_ids)]
    assert other.is_whole


# ---- a core that dies from within ----------------------------------------------------------------


def test_what_was_computed_when_the_core_died_is_told(make_core) -> None:
    box = make_core(max_num_seqs=2)
    worker = box.worker()
    held = admit_all(worker)
    box.until(lambda: all(it.row is not None for it in held))
    box.runner.dies = lambda ids: True
    assert not box.survives_until(lambda: False)
    box.start(died_within=True)
    box.until(lambda: bool(worker.heard(UnknownToCore)))
    [suspects] = worker.heard(Suspects)
    assert suspects.incarnation == 2
    computed = {i for ids in box.runner.launched for i in ids}
    assert 1 <= len(suspects.stream_ids) <= 4
    kinds = [type(body) for body in worker.received]
    assert kinds.index(Suspects) < kinds.index(UnknownToCore)
    assert computed <= set(ids_of(held))
    assert {it.strikes for it in held if it.admit.stream_id in suspects.stream_ids} == {1}
    assert {it.strikes for it in held if it.admit.stream_id not in suspects.stream_ids} == {0}
    box.until(lambda: all(it.is_whole for it in held))


def test_nobody_is_a_suspect_of_a_death_from_outside(make_core) -> None:
    box = make_core()
    worker = box.worker()
    held = admit_all(worker)
    box.until(lambda: all(len(it.token_ids) > 2 for it in held))
    box.kill()
    box.start()
    box.until(lambda: all(it.is_whole for it in held))
    assert not worker.heard(Suspects)


def test_suspects_are_told_until_they_are_here_again(make_core) -> None:
    """A worker that takes another's place must not strike them a second time."""
    box = make_core()
    worker = box.worker()
    held = [worker.admit(p, 200) for p in PROMPTS]
    box.take_in(len(held))
    box.until(lambda: all(len(it.token_ids) > 2 for it in held))
    box.runner.dies = lambda ids: True
    assert not box.survives_until(lambda: False)
    box.start(died_within=True)
    box.until(lambda: box.core.handler.num_streams == len(held))
    assert len(worker.heard(Suspects)) == 1
    box.kill_worker(worker)
    fresh = box.worker()
    box.until(lambda: fresh.is_synced)
    assert not fresh.heard(Suspects)
    assert {it.admit.begun.strikes for it in fresh.streams.values()} == {1}


def deaths_by(poison, box, most: int = 10) -> int:
    """Let cores die whenever `poison` is computed, until none does; how many did."""
    poison_id = poison.admit.stream_id
    for number in range(most):
        box.runner.dies = lambda ids: poison_id in ids
        if box.survives_until(lambda: poison.is_over):
            return number
        box.start(died_within=True)
    raise AssertionError("it goes on for ever")


def test_a_request_that_kills_every_core_ends_after_it_died_alone(make_core, undisturbed) -> None:
    box = make_core()
    worker = box.worker()
    held = admit_all(worker)
    poison, others = held[2], [it for n, it in enumerate(held) if n != 2]
    assert deaths_by(poison, box) == 3
    assert poison.fault.message == "it died alone"
    box.until(lambda: all(it.is_over for it in held))
    assert all(it.is_whole for it in others)
    assert same_as_alone(others, undisturbed)


def test_two_core_kills_fail_no_progressing_or_queued_request(make_core, undisturbed) -> None:
    """Deaths from within, and everybody is in their steps; others have never been in any."""
    box = make_core(max_num_seqs=4)
    worker = box.worker()
    held = [worker.admit([n + 3, 7 * n + 1], 40) for n in range(12)]
    for _ in range(4):
        had = {id(it): len(it.token_ids) for it in held}
        box.until(lambda had=had: any(len(it.token_ids) > had[id(it)] + 3 for it in held))
        box.runner.dies = lambda ids: len(ids) > 1
        assert not box.survives_until(lambda: False)
        box.start(died_within=True)
    box.until(lambda: all(it.is_over for it in held))
    assert all(it.is_whole for it in held)
    assert same_as_alone(held, undisturbed)


def test_deaths_without_any_progress_end_nobody_who_lives_alone(make_core, undisturbed) -> None:
    """What kills is that there are several; each alone is well."""
    box = make_core()
    worker = box.worker()
    held = admit_all(worker, 3)
    box.take_in(len(held))  # else the first to arrive would have a step to itself, and a token
    box.runner.dies = lambda ids: len(ids) > 1
    assert not box.survives_until(lambda: False)
    box.start(died_within=True)
    box.take_in(len(held))
    box.runner.dies = lambda ids: len(ids) > 1
    assert not box.survives_until(lambda: False)
    assert not any(it.token_ids for it in held)
    box.start(died_within=True)
    box.take_in(len(held))
    box.until(lambda: all(it.is_over for it in held))
    assert all(it.is_whole for it in held)
    first = box.runner.launched[: len(held)]
    assert sorted(ids for [ids] in first) == sorted(ids_of(held)), "each was alone at first"
    assert box.runner.num_in_flight[: len(held)] == [1] * len(held)
    assert same_as_alone(held, undisturbed)


def test_others_wait_while_one_is_suspect_and_go_on_after(make_core, undisturbed) -> None:
    box = make_core(max_num_batched_tokens=4)
    worker = box.worker()
    held = [worker.admit(PROMPTS[0], 60)]
    box.until(lambda: len(held[0].token_ids) > 2)
    suspects = [worker.admit(list(range(1, 14)), 10, strikes=2) for _ in range(2)]
    begun = len(box.runner.launched)
    held += suspects
    box.until(lambda: all(it.is_whole for it in held))
    launched = box.runner.launched[begun:]
    for it in suspects:
        steps = [ids for ids in launched if it.admit.stream_id in ids]
        assert [len(ids) for ids in steps[:4]] == [1] * 4, "13 tokens in steps of 4"
        assert max(len(ids) for ids in steps) > 1
    assert same_as_alone(held, undisturbed)
