"""Kept answers in a core: held for workers that die, within a bound, never forgotten too early."""

from __future__ import annotations

import secrets
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.helpers.core_box import CoreBox, Held, StateWorker

from slipstream_core.workers.kept_answers import KeptAnswersByWorker
from slipstream_ipc.messages import (
    KEPT_ENTRY_BYTES,
    DropKept,
    Forget,
    Keep,
    KeepOptions,
    Kept,
    KeptEntry,
    KeptIds,
    Registered,
    UnknownKept,
    Withdraw,
)
from slipstream_ipc.messages.shared import End

ABORT = End("abort", 0)


def entry(held: Held, answer: bytes = b"an answer") -> KeptEntry:
    return KeptEntry(held.admit.stream_id, b"a scope", answer)


def ended(box: CoreBox, worker: StateWorker) -> Held:
    """A stream that has ended, and whose answer is to be kept."""
    held = worker.admit([3, 5, 7], max_tokens=5, keep=KeepOptions(b"a record"))
    box.until(lambda: held.is_over)
    worker.send(Withdraw(held.admit.stream_id, ABORT))
    return held


def said_all(box: CoreBox, worker: StateWorker) -> None:
    box.until(lambda: not worker._waiting and worker.hop.num_unacked == 0)


def replaced(box: CoreBox, worker: StateWorker) -> StateWorker:
    box.kill_worker(worker)
    successor = box.worker()
    box.until(lambda: any(kept.last for kept in successor.heard(Kept)))
    said_all(box, successor)
    return successor


@pytest.mark.parametrize("is_answered", [True, False])
def test_a_stream_is_not_forgotten_before_its_answer_is_here(
    make_core: Any, is_answered: bool
) -> None:
    box = make_core()
    worker = box.worker()
    held = ended(box, worker)
    stream_id = held.admit.stream_id
    worker.send(Forget((stream_id,), has_been=True))
    said_all(box, worker)
    assert box.core.handler.num_streams == 1
    worker.send(Keep((entry(held),)) if is_answered else DropKept((stream_id,)))
    said_all(box, worker)
    assert box.core.handler.num_streams == 0
    successor = replaced(box, worker)
    assert successor.heard(Registered) == []
    assert successor.kept == ((entry(held),) if is_answered else ())


def test_a_worker_that_died_between_leaves_the_stream_to_its_successor(make_core: Any) -> None:
    box = make_core()
    worker = box.worker()
    held = ended(box, worker)
    worker.send(Forget((held.admit.stream_id,), has_been=True))
    said_all(box, worker)
    successor = replaced(box, worker)
    [registered] = successor.heard(Registered)
    assert registered.registration.spec.keep == KeepOptions(b"a record")
    successor.send(Keep((entry(held),)))
    said_all(box, successor)
    assert box.core.handler.num_streams == 1  # the successor keeps it for its readers
    again = replaced(box, successor)
    [registered] = again.heard(Registered)
    assert registered.registration.spec.keep is None
    assert again.kept == (entry(held),)


def test_a_stream_that_a_worker_cannot_read_is_forgotten_at_once(make_core: Any) -> None:
    box = make_core()
    worker = box.worker()
    held = ended(box, worker)
    worker.send(Forget((held.admit.stream_id,)))
    said_all(box, worker)
    assert box.core.handler.num_streams == 0


@pytest.mark.parametrize("is_complete", [True, False])
def test_a_worker_that_attaches_again_is_asked_for_what_is_not_here(
    make_core: Any, is_complete: bool
) -> None:
    box = make_core()
    worker = box.worker()
    held = [ended(box, worker) for _ in range(3)]
    both, lost, dropped = [each.admit.stream_id for each in held]
    worker.send(Keep((entry(held[0]), entry(held[2]))))
    said_all(box, worker)
    worker.streams.clear()  # all are forgotten, and their Forget was lost
    worker.hop.attach(0.0)
    box.until(lambda: not worker.hop.is_attached)
    box.until(lambda: worker.hop.is_attached)
    worker._waiting.appendleft(KeptIds((both, lost), (), is_complete))
    said_all(box, worker)
    assert [each.stream_ids for each in worker.heard(UnknownKept)] == [(lost,)]
    assert box.core.handler.num_streams == 1  # until the answer is here
    worker.send(Keep((entry(held[1]),)))
    said_all(box, worker)
    assert box.core.handler.num_streams == 0
    kept = {each.stream_id for each in replaced(box, worker).kept}
    assert kept == ({both, lost} if is_complete else {both, lost, dropped})
    assert (worker.kept == ()) == is_complete


def test_a_stream_that_owes_nothing_is_forgotten_after_an_attach(make_core: Any) -> None:
    box = make_core()
    worker = box.worker()
    ended(box, worker)
    said_all(box, worker)
    worker.streams.clear()
    worker.hop.attach(0.0)
    box.until(lambda: worker.hop.is_attached)
    worker._waiting.appendleft(KeptIds((), (), True))
    box.until(lambda: box.core.handler.num_streams == 0)


@given(
    st.lists(
        st.tuples(
            st.booleans(), st.integers(0, 9), st.sampled_from([b"a", b"b"]), st.integers(0, 3000)
        ),
        max_size=60,
    )
)
def test_what_is_held_stays_within_the_bound(
    operations: list[tuple[bool, int, bytes, int]],
) -> None:
    held, model = KeptAnswersByWorker(10 * KEPT_ENTRY_BYTES), dict[bytes, tuple[bytes, int]]()
    for is_put, number, worker, size in operations:
        stream_id = bytes([number])
        if not is_put:
            held.drop(worker, [stream_id])
            if model.get(stream_id, (b"", 0))[0] == worker:
                del model[stream_id]
        elif model.get(stream_id, (worker, 0))[0] == worker:
            model.pop(stream_id, None)
            model[stream_id] = worker, size + KEPT_ENTRY_BYTES
            while sum(size for _, size in model.values()) > 10 * KEPT_ENTRY_BYTES:
                del model[next(iter(model))]
            held.put(worker, KeptEntry(stream_id, b"", bytes(size)))
        else:
            held.put(worker, KeptEntry(stream_id, b"", secrets.token_bytes(4)))
        assert held.num_bytes == sum(size for _, size in model.values())
        for each in (b"a", b"b"):
            assert [*held.of_worker(each)] == [
                id_ for id_, (its, _) in model.items() if its == each
            ]
        assert len(held) == len(model)
