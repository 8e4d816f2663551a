"""A core and fake workers in one thread, over real sockets, on a simulated device.

Nothing runs unless it is stepped, so a test decides the order of events.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator

import pytest
from tests.helpers.core_box import CoreBox, Held, boxes_of

from slipstream_ipc.messages import (
    Admit,
)


@pytest.fixture(autouse=True)
def own_environment() -> Iterator[None]:
    """Variables that a core sets for itself, as the first of its ranks does for gloo and the cards,
    are gone after the test.
    """
    before = dict(os.environ)
    yield
    for name in os.environ.keys() - before.keys():
        del os.environ[name]
    os.environ.update(before)


@pytest.fixture
def make_core() -> Iterator[Callable[..., CoreBox]]:
    """A factory of cores, which are closed after the test."""
    with boxes_of(CoreBox) as make:
        yield make


@pytest.fixture
def undisturbed(make_core: Callable[..., CoreBox]) -> Callable[..., Held]:
    """Runs one stream without faults, and returns what its worker received."""

    def run(admit: Admit, **settings: object) -> Held:
        box = make_core(**settings)
        worker = box.worker()
        held = worker.send_admit(admit)
        box.until(lambda: held.is_over)
        assert held.fault is None
        return held

    return run
