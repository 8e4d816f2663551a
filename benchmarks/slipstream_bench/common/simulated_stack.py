"""Stacks over the simulated model, for benchmarks: as the product starts them, or assembled.

Owns: the simulated model's settings, starting processes and ending them. Does not know: what is
measured.

Rules:
- `product` is the product as it is: a `Stack`, its own processes, its own loops.
  But for its spares, which would load while something is measured.
- `assembled` starts programs of the benchmarks that put the same parts together in another way.
  They are told the same settings, and their sockets lie where the product's would.
- A device that is simulated computes nothing, and prefill takes no time of it (`prefill_us=0`):
  what is measured is the host's.
"""

from __future__ import annotations

import os
import selectors
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Protocol

import msgspec

from slipstream.demo_model import MODEL_PATH
from slipstream.errors import EngineError
from slipstream.stack.children.process import Child, ChildSpec
from slipstream.stack.log_level import log_level
from slipstream.stack.process_plan import plan_stack
from slipstream.stack.settings import settings_from
from slipstream.stack.stack import Stack
from slipstream_ipc.messages import Fault
from slipstream_ipc.process import Activate

_NOTE = "The model is simulated: steps take their time, nothing is computed."

_BUSY_SHARE = 0.25  # of the cores, by the load average: what runs besides is seen in the times
_START_S = 120.0
_END_S = 5.0


def note() -> str:
    """What is to be said above every table; to be asked for before anything is measured."""
    load, cores = os.getloadavg()[0], os.cpu_count() or 1
    if load <= _BUSY_SHARE * cores:
        return _NOTE
    return f"{_NOTE} The machine was busy when this began (load {load:.1f} on {cores} cores)."


class Device(Protocol):
    """What a stack is to serve; a simulated model, or (`gpu_check`) one on a real device."""

    def settings(self) -> dict[str, Any]:
        """A stack's settings."""


@dataclass(frozen=True, slots=True)
class Simulated:
    """A simulated model, and how many requests run on it at a time."""

    step_ms: float
    batch: int
    max_model_len: int = 4096
    max_num_batched_tokens: int = 2048
    stream_interval: int | Literal["auto"] = "auto"

    def settings(self) -> dict[str, Any]:
        """A stack's settings."""
        return {
            "model": f"simulated:step_ms={self.step_ms:g},prefill_us=0,tokenizer={MODEL_PATH}",
            "max_num_seqs": self.batch,
            "max_model_len": self.max_model_len,
            "max_num_batched_tokens": self.max_num_batched_tokens,
            "stream_interval": self.stream_interval,
            "spare_core": False,
            "spare_worker": False,
        }


@dataclass(frozen=True, slots=True)
class RunningStack:
    """A stack that serves. pids: of its processes that do the work, by name."""

    address: str
    pids: dict[str, int]
    http_address: str | None = None


@contextmanager
def product(device: Device, **settings: Any) -> Iterator[RunningStack]:
    """The product, with more settings of a stack."""
    with Stack(**device.settings(), **settings) as stack:
        pids = {name: pid for name, pid in stack.pids.items() if name != "supervisor"}
        yield RunningStack(stack.address, pids, stack.http_address)


@dataclass(frozen=True, slots=True)
class Program:
    """A process to start: `python -m module`.

    gets: whose configs it is given, by the names of a stack's processes; of one, that is its whole
    config, unless there is `more`.
    """

    name: str
    module: str
    gets: tuple[str, ...]
    more: dict[str, Any] | None = None

    def spec(self, parts: dict[str, msgspec.Raw]) -> ChildSpec:
        """How it is started, where `parts` are the product's configs."""
        argv = (sys.executable, "-P", "-m", self.module)
        if self.more is None and len(self.gets) == 1:
            return ChildSpec(self.name, argv, parts[self.gets[0]])
        given = {name: parts[name] for name in self.gets} | (self.more or {})
        return ChildSpec(self.name, argv, msgspec.Raw(msgspec.json.encode(given)))


WORKER = Program("worker", "slipstream_worker.main", ("worker",))


@contextmanager
def assembled(device: Device, programs: Sequence[Program]) -> Iterator[RunningStack]:
    """The programs, started one after the other and all ready; ended with the block."""
    with (
        log_level("WARNING"),  # as a `Stack` has it for its children
        tempfile.TemporaryDirectory(prefix="slipstream-bench-") as folder,
    ):
        config = plan_stack(settings_from(device.settings()), Path(folder))
        parts = {child.name: child.config for child in config.children}
        specs = [program.spec(parts) for program in programs]
        with _children(specs) as pids:
            yield RunningStack(config.address, pids)


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
    """Until it is ready, or until it has ended. Raises: EngineError where it did not start."""
    deadline = time.monotonic() + within_s
    with selectors.DefaultSelector() as selector:
        selector.register(child.status, selectors.EVENT_READ)
        while True:
            child.read_status()
            if child.status.has_ended():
                if is_start:
                    raise _failed(f"{child.name} ended before it was ready: {child.error}")
                return
            if is_start and child.state == "ready":
                return
            if not selector.select(max(0.0, deadline - time.monotonic())):
                if is_start:
                    raise _failed(f"{child.name} was not ready after {within_s:g} s")
                return


def _failed(why: str) -> EngineError:
    return EngineError(Fault("engine", why))
