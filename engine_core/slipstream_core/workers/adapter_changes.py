"""Loads and unloads adapters while the core runs.

- Folders are read and checked in a thread beside the engine's loop, one after another; the loop
  takes in what was read. Changes are made in the order of asking.
- A change is noted in the stack's folder before it is answered, so that it outlives this core. One
  that is asked for again, after the death of a worker or core, is done once.
- What cannot be loaded changes nothing.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
from collections import deque
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field
from queue import Empty, SimpleQueue

from msgspec.structs import replace

from slipstream_core.adapters.adapter_error import AdapterError
from slipstream_core.adapters.names_file import AdapterNames, write_names
from slipstream_core.config import LoraConfig
from slipstream_core.step.plan import AdapterStore, LoadedAdapter
from slipstream_core.workers.adapters import Adapters
from slipstream_ipc.messages import (
    MAX_LORA_PATH_CHARS,
    AdapterChange,
    AdapterOutcome,
    ErrorCode,
    Fault,
)
from slipstream_ipc.validation.lora_name import why_no_lora_name

logger = logging.getLogger(__name__)

_MAX_JOBS = 64  # that wait; a worker is told to ask again later beyond that
_MAX_DONE = 256  # operations that are remembered
_FIELDS = "lora_name", "lora_path"


@dataclass(eq=False, slots=True)
class _Job:
    """A change that was asked for, and what was read for it. askers: workers, each with the number
    of its message.
    """

    change: AdapterChange
    askers: dict[bytes, int]
    adapter: LoadedAdapter | None = None
    error: AdapterError | None = None


@dataclass(frozen=True, slots=True)
class DoneChange:
    """The end of a change. askers: see `_Job`. has_changed: other adapters are served now."""

    askers: dict[bytes, int]
    outcome: AdapterOutcome
    has_changed: bool = False


@dataclass(eq=False)
class AdapterChanges:
    """The changes of a core's adapters. names: the model's own. directory: the stack's. lora and
    store are None where there are no adapters. done: operations that the core before carried out.
    free_bytes: memory that the machine has; None: unknown.
    """

    adapters: Adapters
    names: Collection[str]
    lora: LoraConfig | None = None
    store: AdapterStore | None = None
    directory: str | None = None
    done: Sequence[bytes] = ()
    free_bytes: Callable[[], int | None] = lambda: None
    _jobs: dict[bytes, _Job] = field(default_factory=dict)  # by operation
    _asked: SimpleQueue[_Job | None] = field(default_factory=SimpleQueue)
    _read: SimpleQueue[_Job] = field(default_factory=SimpleQueue)
    _thread: threading.Thread | None = None

    def __post_init__(self) -> None:
        """Open the descriptor."""
        self._done = deque(self.done, maxlen=_MAX_DONE)
        self._fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)

    def fileno(self) -> int:
        """A descriptor that is readable while `take_done` has something to take."""
        return self._fd

    @property
    def has_jobs(self) -> bool:
        """True if changes are asked for and not done."""
        return bool(self._jobs)

    def ask(self, worker: bytes, change: AdapterChange) -> AdapterOutcome | None:
        """Make a change, some time later; else the answer, where it is known. Does not block."""
        if change.operation in self._done:
            return AdapterOutcome(change.number)
        job = self._jobs.get(change.operation)
        if job is not None:
            job.askers[worker] = change.number
            return None
        try:
            self._check_allowed(change)
            if not self._jobs:  # else it may be right once those are done
                self._check_names(change)
        except AdapterError as error:
            return _refused(change, error)
        if len(self._jobs) >= _MAX_JOBS:
            fault = Fault("overloaded", f"{_MAX_JOBS} changes of adapters are waiting already")
            return AdapterOutcome(change.number, fault)
        job = self._jobs[change.operation] = _Job(change, {worker: change.number})
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="adapters", daemon=True)
            self._thread.start()
        self._asked.put(job)
        return None

    def take_done(self, now: float) -> Iterator[DoneChange]:
        """Make the changes whose files have been read since the last call."""
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self._fd)  # first: what is read after this sets it again
        with contextlib.suppress(Empty):
            while True:
                job = self._read.get_nowait()
                del self._jobs[job.change.operation]
                yield self._make(job, now)

    def beat(self, now: float) -> None:
        """Drop what no stream has any more. Call it regularly."""
        gone = list(self.adapters.drop_unused(now))
        for ref in gone:
            logger.info("the adapter %r of before is dropped: no stream has it", ref.name)
        if gone:
            with contextlib.suppress(OSError):  # it is read again in vain, by another core
                self._note()

    def close(self) -> None:
        """End the thread after its current job."""
        if self._thread is not None:
            self._asked.put(None)
            self._thread.join()
            self._thread = None
        os.close(self._fd)

    def _run(self) -> None:
        assert self.store is not None
        assert self.lora is not None
        self.store.prepare_thread()
        while (job := self._asked.get()) is not None:
            try:
                if job.change.path:
                    job.adapter = self.store.read(job.change.path, self.lora.roots)
            except AdapterError as error:
                job.error = error
            except MemoryError:
                job.error = AdapterError("there is not enough memory to read it", "no_room")
            except Exception as error:
                logger.exception("reading an adapter failed")
                job.error = AdapterError(f"{type(error).__name__} while reading it")
            self._read.put(job)
            os.eventfd_write(self._fd, 1)

    def _make(self, job: _Job, now: float) -> DoneChange:
        change = job.change
        try:
            if job.error is not None:
                raise job.error
            self._check_names(change)
            if job.adapter is not None:
                num_streams = self._load(change, job.adapter, now)
            else:
                num_streams = self.adapters.forget(change.name, now)
            self._done.append(change.operation)
            self._note()
        except AdapterError as error:
            return DoneChange(job.askers, _refused(change, error))
        except OSError as error:  # the next core will not know of it
            logger.error("the adapter %r: cannot be noted: %s", change.name, error)
        what = "unloaded" if job.adapter is None else f"loaded from {change.path}"
        logger.info("adapter %r: %s; %d streams of before go on", change.name, what, num_streams)
        warning = "" if job.adapter is None else job.adapter.warning
        if warning:
            logger.warning("adapter %r: %s", change.name, warning)
        outcome = AdapterOutcome(0, num_streams=num_streams, warning=warning)
        return DoneChange(job.askers, outcome, has_changed=True)

    def _load(self, change: AdapterChange, adapter: LoadedAdapter, now: float) -> int:
        assert self.lora is not None
        most = float("inf") if self.lora.gib is None else self.lora.gib * 2**30
        free = self.free_bytes()
        if free is not None and adapter.num_bytes > free:
            raise AdapterError(
                f"it takes {adapter.num_bytes / 1e6:.1f} MB of memory, free: "
                f"{free / 1e6:.1f} MB on this machine",
                "no_room",
            )
        self.adapters.check_room(change.name, adapter, most)
        return self.adapters.put(change.name, change.path, adapter, now)

    def _note(self) -> None:
        names = AdapterNames(self.adapters.served, self.adapters.retired, tuple(self._done))
        write_names(self.directory, names)

    def _check_allowed(self, change: AdapterChange) -> None:
        """Raises AdapterError for a change that is never made here."""
        if self.lora is None or self.store is None:
            raise AdapterError("this server serves no adapters (--enable-lora)", "missing")
        if not self.lora.is_updatable:
            raise AdapterError(
                "adapters are not changed while this server runs (--allow-runtime-lora-updating)",
                "forbidden",
            )
        why = why_no_lora_name(change.name)
        if why:
            raise AdapterError(f"lora_name: got {change.name!r}, allowed: {why}")
        if len(change.path) > MAX_LORA_PATH_CHARS:
            given = f"{len(change.path)} characters"
            raise AdapterError(f"lora_path: got {given}, allowed: at most {MAX_LORA_PATH_CHARS}")

    def _check_names(self, change: AdapterChange) -> None:
        """Raises AdapterError for a name that is not to be changed so."""
        name, found = change.name, self.adapters.find(change.name)
        if name in self.names:
            raise AdapterError(f"lora_name: got {name!r}, allowed: names that the model has not")
        if not change.path:
            if found is None:
                allowed = "names of adapters that are loaded"
                raise AdapterError(f"lora_name: got {name!r}, allowed: {allowed}", "missing")
        elif found is not None and not change.load_inplace:
            raise AdapterError(
                f"lora_name: got {name!r}, which is loaded, allowed: other names, or load_inplace"
            )


def _refused(change: AdapterChange, error: AdapterError) -> AdapterOutcome:
    code: ErrorCode = "overloaded" if error.why == "no_room" else "bad_request"
    message = str(error)
    field_of = next((name for name in _FIELDS if message.startswith(f"{name}:")), None)
    if change.path and field_of is None:
        message = f"the adapter {change.name!r}: {message}"
    return AdapterOutcome(change.number, Fault(code, message, field_of), error.why)


def with_number(outcome: AdapterOutcome, number: int) -> AdapterOutcome:
    """The outcome, as the answer to the message of this number."""
    return replace(outcome, number=number)
