"""One fork server for a session of tests: a stack with a simulated model starts from what it has
imported, in a fifth of the time that its processor takes otherwise.

It forks the supervisor, and that forks its children. What a test may want to see of programs is as
it was: each is a child of the process that is its parent, has a session or a process group of its
own, and dies with its parent. A stack whose environment or folder differs from those that the
server has started with is made of programs, as modules may have read them while they were imported.
"""

from __future__ import annotations

import os
import select
import sys
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import msgspec
import pytest
from tests.helpers.inheritance import inheritance
from tests.helpers.patience import PATIENCE_S

from slipstream.stack import supervisor_process
from slipstream.stack.children.fork_client import ForkClient
from slipstream.stack.plan.process_plan import plan_stack
from slipstream.stack.settings import settings_from
from slipstream.stack.supervisor_process import (
    SUPERVISOR_MODULE,
    StartedSupervisor,
    fork_supervisor,
    start_supervisor,
)
from slipstream_ipc.fork_server import Preload


class Zygote:
    """The fork server, which starts when it is asked for the first time. num_forks: how many
    supervisors it has forked.
    """

    def __init__(self) -> None:
        self._around = inheritance(os.environ)
        self._lock = threading.Lock()  # one request is unanswered at a time
        self._client: ForkClient | None = None
        self.num_forks = 0

    def start(self, environment: Mapping[str, str]) -> StartedSupervisor:
        """As `start_supervisor` does."""
        is_main = threading.current_thread() is threading.main_thread()  # both die with the thread
        if not is_main or inheritance(environment) != self._around:
            return start_supervisor(environment)
        with self._lock:
            self._client = self._client or _started()
            started = fork_supervisor(self._client, environment)
        assert started is not None
        sys.audit("os.fork")  # by which the ledger knows a test that starts processes
        self.num_forks += 1
        return started

    def close(self) -> None:
        if self._client is not None:
            self._client.close()


def _started() -> ForkClient:
    settings = settings_from({"model": "simulated:", "http_port": 0})
    plan = plan_stack(settings, Path("/nowhere"))
    preloads = [Preload(spec.argv[-1], spec.config) for spec in plan.children]
    preloads.append(Preload(SUPERVISOR_MODULE, msgspec.Raw(b"{}")))
    client = ForkClient(preloads, stays_reaper=False, fork_s=PATIENCE_S)
    while any(client.is_awaited(each.module) for each in preloads):
        select.select([client], [], [])
        client.read()
        client.preload_next()
    return client


@contextmanager
def zygote() -> Iterator[Zygote]:
    """A zygote, by which supervisors are forked meanwhile."""
    it = Zygote()
    supervisor_process.start_supervisor = it.start
    try:
        yield it
    finally:
        supervisor_process.start_supervisor = start_supervisor
        it.close()


@pytest.fixture(scope="session", autouse=True)
def session_zygote() -> Iterator[Zygote]:
    """The zygote of a session, in folders whose conftest imports this."""
    with zygote() as it:
        yield it
