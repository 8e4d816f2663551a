"""The two threads of a card: order, errors, and that nobody enqueues behind a wait."""

from __future__ import annotations

import select
import threading
from collections.abc import Callable, Iterator

import pytest
from tests.helpers.patience import PATIENCE_S

from slipstream_core.runner.cuda_thread import CudaThread


class Work:
    """Pending until somebody says so."""

    def __init__(self, result: int, *, error: Exception | None = None, ready: bool = False) -> None:
        self.done = threading.Event()
        self.was_waited_for = threading.Event()
        self._result = result
        self._error = error
        if ready:
            self.done.set()

    def wait(self) -> int:
        self.was_waited_for.set()
        assert self.done.wait(PATIENCE_S)
        if self._error is not None:
            raise self._error
        return self._result


@pytest.fixture
def device() -> Iterator[CudaThread[int]]:
    device: CudaThread[int] = CudaThread("card", lambda: None)
    yield device
    device.close()


def enqueue(work: Work, when: threading.Event) -> Callable[[], Work]:
    def job() -> Work:
        when.set()
        return work

    return job


def test_the_next_step_is_enqueued_while_the_one_before_runs(
    device: CudaThread[int],
) -> None:
    first, second = Work(1), Work(2)
    enqueued = threading.Event()
    device.submit(lambda: first)
    assert first.was_waited_for.wait(PATIENCE_S)  # the card works on it
    device.submit(enqueue(second, enqueued))
    assert enqueued.wait(PATIENCE_S)
    assert not device.done()
    assert select.select([device.fileno()], [], [], 0)[0] == []
    first.done.set()
    assert select.select([device.fileno()], [], [], PATIENCE_S)[0] == [device.fileno()]
    assert device.done()
    assert device.collect() == 1
    assert select.select([device.fileno()], [], [], 0)[0] == []
    second.done.set()
    assert device.collect() == 2


def test_errors_come_in_their_turn(device: CudaThread[int]) -> None:
    def fails() -> Work:
        raise KeyError("while it was enqueued")

    device.submit(lambda: Work(1, ready=True))
    device.submit(fails)
    device.submit(lambda: Work(0, error=ValueError("on the card"), ready=True))
    device.submit(lambda: Work(4, ready=True))
    assert device.collect() == 1
    with pytest.raises(KeyError, match="while it was enqueued"):
        device.collect()
    with pytest.raises(ValueError, match="on the card"):
        device.collect()
    assert device.collect() == 4


def test_close_with_jobs_that_were_never_begun() -> None:
    device: CudaThread[int] = CudaThread("card", lambda: None)
    may_go_on, begun = threading.Event(), threading.Event()

    def slow() -> Work:
        begun.set()
        assert may_go_on.wait(PATIENCE_S)
        return Work(1, ready=True)

    device.submit(slow)
    assert begun.wait(PATIENCE_S)
    for _ in range(3):
        device.submit(lambda: Work(0, ready=True))
    closer = threading.Thread(target=device.close)
    closer.start()
    may_go_on.set()
    closer.join(PATIENCE_S)
    assert not closer.is_alive()
    device.close()
