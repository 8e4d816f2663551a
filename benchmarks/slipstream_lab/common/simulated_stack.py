"""Starts stacks over a simulated model for benchmarks: the product itself, or an assembly of other
programs.

- `product` is a `Stack` with its own processes and loops. `Simulated.settings` disables spares,
  which would load during a measurement.
- `assembled` starts benchmark programs that combine the same components differently, with the same
  settings and socket addresses.
- A simulated device computes nothing and prefill takes none of its time (`prefill_us=0`), so the
  host is what is measured.
"""

from __future__ import annotations

import asyncio
import os
import selectors
import signal
import sys
import tempfile
import time
from collections.abc import Awaitable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Protocol, TypeVar

import msgspec

from slipstream.demo_model import MODEL_PATH
from slipstream.stack.children.process import Child, ChildSpec
from slipstream.stack.plan.log_level import log_level
from slipstream.stack.plan.process_plan import plan_stack
from slipstream.stack.settings import settings_from
from slipstream.stack.stack import Stack
from slipstream_bench.common.measures import cannot_measure
from slipstream_ipc.process import Activate

_NOTE = "The model is simulated: steps take their time, nothing is computed."

_BUSY_SHARE = 0.25  # load average per core above which timings suffer
_START_S = 120.0
_END_S = 5.0

Result = TypeVar("Result")


def simulation_note() -> str:
    """The note printed above every table; call it before anything is measured."""
    load, cores = os.getloadavg()[0], os.cpu_count() or 1
    if load <= _BUSY_SHARE * cores:
        return _NOTE
    return f"{_NOTE} The machine was busy when this began (load {load:.1f} on {cores} cores)."


class ServedDevice(Protocol):
    """What a stack serves: a simulated model, or (`gpu_check`) a model on a real device."""

    def settings(self) -> dict[str, Any]:
        """A stack's settings."""


@dataclass(frozen=True, slots=True)
class Simulated:
    """A simulated model, and how many requests run on it at a time. answers: a file to play."""

    step_ms: float
    batch: int
    max_model_len: int = 4096
    max_num_batched_tokens: int = 2048
    stream_interval: int | Literal["auto"] = "auto"
    answers: Path | None = None

    def settings(self) -> dict[str, Any]:
        """A stack's settings."""
        model = f"simulated:step_ms={self.step_ms:g},prefill_us=0,tokenizer={MODEL_PATH}"
        if self.answers is not None:
            model += f",answers={self.answers}"
        return {
            "model": model,
            "max_num_seqs": self.batch,
            "max_model_len": self.max_model_len,
            "max_num_batched_tokens": self.max_num_batched_tokens,
            "stream_interval": self.stream_interval,
            "spare_core": False,
            "spare_worker": False,
        }


@dataclass(frozen=True, slots=True)
class RunningStack:
    """A running stack. pids: its processes by name, without the supervisor and what processes run
    themselves.
    """

    address: str
    pids: dict[str, int]
    http_address: str | None = None
    supervisor: int | None = None  # its pid


@contextmanager
def product(device: ServedDevice, **settings: Any) -> Iterator[RunningStack]:
    """The product with further settings of a stack."""
    with Stack(**device.settings(), **settings) as stack:
        pids = {name: pid for name, pid in stack.pids.items() if name != "supervisor"}
        supervisor = stack.pids.get("supervisor")
        yield RunningStack(stack.address, pids, stack.http_address, supervisor)


@dataclass(frozen=True, slots=True)
class Program:
    """A process to start: `python -m module`.

    gets: the processes of a stack whose configs it receives; a single one is its whole config,
    unless there is `more`.
    """

    name: str
    module: str
    gets: tuple[str, ...]
    more: dict[str, Any] | None = None

    def spec(self, parts: dict[str, msgspec.Raw]) -> ChildSpec:
        """How to start it; `parts` are the product's configs by process name."""
        argv = (sys.executable, "-P", "-m", self.module)
        if self.more is None and len(self.gets) == 1:
            return ChildSpec(self.name, argv, parts[self.gets[0]])
        given = {name: parts[name] for name in self.gets} | (self.more or {})
        return ChildSpec(self.name, argv, msgspec.Raw(msgspec.json.encode(given)))


WORKER = Program("worker", "slipstream_worker.main", ("worker",))


@contextmanager
def assembled(device: ServedDevice, programs: Sequence[Program]) -> Iterator[RunningStack]:
    """Start the programs in order and wait until all are ready; they end with the block."""
    with (
        log_level("WARNING"),  # as a `Stack` has it for its children
        tempfile.TemporaryDirectory(prefix="slipstream-bench-") as folder,
    ):
        config = plan_stack(settings_from(device.settings()), Path(folder))
        parts = {child.name: child.config for child in config.children}
        specs = [program.spec(parts) for program in programs]
        with _children(specs) as pids:
            yield RunningStack(config.address, pids)


async def while_all_run(stack: RunningStack, work: Awaitable[Result]) -> Result:
    """The work's result. Nothing replaces a process of an assembled stack: the work would wait.

    Raises: EngineError, with its name, when a process ends.
    """
    loop = asyncio.get_running_loop()
    ended: asyncio.Future[str] = loop.create_future()
    fds: list[int] = []

    def end(name: str, fd: int) -> None:
        loop.remove_reader(fd)
        if not ended.done():
            ended.set_result(f"{name} {_how(fd)} while it was measured")

    task = asyncio.ensure_future(work)
    try:
        for name, pid in stack.pids.items():
            fds.append(os.pidfd_open(pid))
            loop.add_reader(fds[-1], end, name, fds[-1])
        await asyncio.wait((task, ended), return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise cannot_measure(ended.result())
        return task.result()
    finally:
        for fd in fds:
            loop.remove_reader(fd)
            os.close(fd)
        task.cancel()


def _how(pid_fd: int) -> str:
    """How a child of ours ended, which is left to be reaped."""
    found = os.waitid(os.P_PIDFD, pid_fd, os.WEXITED | os.WNOWAIT)
    assert found is not None
    if found.si_code == os.CLD_EXITED:
        return f"exited with code {found.si_status}"
    return f"was ended by {signal.Signals(found.si_status).name}"


@contextmanager
def _children(specs: Sequence[ChildSpec]) -> Iterator[dict[str, int]]:
    children: list[Child] = []
    try:
        for spec in specs:
            child = Child(spec)
            children.append(child)
            child.activate(Activate())
        for child in children:
            _wait(child, _START_S, is_start=True)
        yield {child.name: child.pid for child in children}
    finally:
        for child in children:
            child.terminate()
        for child in children:
            _wait(child, _END_S, is_start=False)
            child.reap()


def _wait(child: Child, within_s: float, *, is_start: bool) -> None:
    """Wait until the child is ready or has ended. Raises: EngineError if it did not start."""
    deadline = time.monotonic() + within_s
    with selectors.DefaultSelector() as selector:
        selector.register(child.status, selectors.EVENT_READ)
        while True:
            child.read_status()
            if child.status.has_ended():
                if is_start:
                    raise cannot_measure(f"{child.name} ended before it was ready: {child.error}")
                return
            if is_start and child.state == "ready":
                return
            if not selector.select(max(0.0, deadline - time.monotonic())):
                if is_start:
                    raise cannot_measure(f"{child.name} was not ready after {within_s:g} s")
                return
