"""Loads and unloads adapters while the core runs.

- Folders are read and checked in a thread beside the engine's loop, one after another; the loop
  takes in what was read. Changes are made in the order of asking.
- A change is noted in the stack's folder before it is answered, so that it outlives this core. One
  that is asked for again, after the death of a worker or core, is done once.
- What cannot be loaded changes nothing.
- A change of a whole fleet comes in two stages. What is read for the first is kept for the second;
  a core that has it no longer reads it again, and refuses other files. The second is the record of
  the name from then on, which tells whether another one is later: whoever asks for it again, in
  whichever order, comes to the same.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
from collections import deque
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, field
from queue import Empty, SimpleQueue

from msgspec.structs import replace

from slipstream_core.adapters.adapter_error import AdapterError
from slipstream_core.adapters.names_file import AdapterNames, write_names
from slipstream_core.config import LoraConfig
from slipstream_core.step.plan import AdapterStore, LoadedAdapter
from slipstream_core.workers.adapters import FLEET_LINGER_S, LINGER_S, Adapters
from slipstream_ipc.adapter_records import RecordTable, is_later
from slipstream_ipc.messages import (
    MAX_LORA_PATH_CHARS,
    AdapterChange,
    AdapterOutcome,
    AdapterRecord,
    ChangeStage,
    ErrorCode,
    Fault,
)
from slipstream_ipc.validation.lora_name import why_no_lora_name

logger = logging.getLogger(__name__)

_MAX_JOBS = 64  # that wait; a worker is told to ask again later beyond that
_MAX_DONE = 256  # operations that are remembered
_MAX_PREPARED = 4  # adapters that are read and not asked for yet
_PREPARED_S = 30.0
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
    store are None where there are no adapters. left: by the core before. free_bytes: memory that
    the machine has; None: unknown.
    """

    adapters: Adapters
    names: Collection[str]
    lora: LoraConfig | None = None
    store: AdapterStore | None = None
    directory: str | None = None
    left: AdapterNames | None = None
    free_bytes: Callable[[], int | None] = lambda: None
    _jobs: dict[tuple[bytes, ChangeStage], _Job] = field(default_factory=dict)  # by operation
    # read and checked, by operation, and until when each is kept
    _prepared: dict[bytes, tuple[LoadedAdapter, float]] = field(default_factory=dict)
    _asked: SimpleQueue[_Job | None] = field(default_factory=SimpleQueue)
    _read: SimpleQueue[_Job] = field(default_factory=SimpleQueue)
    _thread: threading.Thread | None = None

    def __post_init__(self) -> None:
        """Open the descriptor."""
        left = self.left or AdapterNames()
        self.records = RecordTable(left.records)
        self._done = deque(left.done, maxlen=_MAX_DONE)
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
        is_done = not change.stage and change.operation in self._done
        if is_done or (change.stage == "commit" and self._is_made(_record_of(change))):
            return AdapterOutcome(change.number)
        key = change.operation, change.stage
        job = self._jobs.get(key)
        if job is not None:
            job.askers[worker] = change.number
            return None
        try:
            self._check_allowed(change)
            if not self._jobs and change.stage != "commit":  # else it may be right after those
                self._check_names(change)
        except AdapterError as error:
            return _refused(change, error)
        if len(self._jobs) >= _MAX_JOBS:
            fault = Fault("overloaded", f"{_MAX_JOBS} changes of adapters are waiting already")
            return AdapterOutcome(change.number, fault)
        job = self._jobs[key] = _Job(change, {worker: change.number})
        if change.stage == "commit":
            job.adapter, _ = self._prepared.pop(change.operation, (None, 0.0))
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
                del self._jobs[job.change.operation, job.change.stage]
                yield self._make(job, now)

    def beat(self, now: float) -> None:
        """Drop what no stream has any more, or has not been asked for. Call it regularly."""
        for operation, (_, until) in list(self._prepared.items()):
            if now >= until:
                del self._prepared[operation]
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
                if job.change.path and job.adapter is None:
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
            if change.stage == "prepare":
                return DoneChange(job.askers, self._prepare(job, now))
            record = _record_of(change)
            if change.stage == "commit":
                if self._is_made(record):
                    return DoneChange(job.askers, AdapterOutcome(0))
                num_streams = self._commit(job, now)
            else:
                num_streams = self._change_alone(job, now)
                digest = b"" if job.adapter is None else job.adapter.digest
                record = replace(record, version=self.records.next_version, digest=digest)
                self._done.append(change.operation)
            self.records.take(record)
            self._note()
        except AdapterError as error:
            return DoneChange(job.askers, _refused(change, error))
        except OSError as error:  # the next core will not know of it
            logger.error("the adapter %r: cannot be noted: %s", change.name, error)
        what = f"loaded from {change.path}" if change.path else "unloaded"
        logger.info("adapter %r: %s; %d streams of before go on", change.name, what, num_streams)
        warning = "" if job.adapter is None else job.adapter.warning
        if warning:
            logger.warning("adapter %r: %s", change.name, warning)
        outcome = AdapterOutcome(0, num_streams=num_streams, warning=warning)
        return DoneChange(job.askers, outcome, has_changed=True)

    def _change_alone(self, job: _Job, now: float) -> int:
        """Make a change of this stack; returns how many streams go on with what was before."""
        if job.error is not None:
            raise job.error
        self._check_names(job.change)
        if job.adapter is None:
            return self.adapters.forget(job.change.name, now)
        return self._load(job.change, job.adapter, now)

    def _prepare(self, job: _Job, now: float) -> AdapterOutcome:
        """Check that a change could be made now, and keep what was read. Raises AdapterError."""
        if job.error is not None:
            raise job.error
        change, adapter = job.change, job.adapter
        self._check_names(change)
        if adapter is None:
            return AdapterOutcome(0)
        self._check_room(change.name, adapter)
        while len(self._prepared) >= _MAX_PREPARED:
            del self._prepared[next(iter(self._prepared))]
        self._prepared[change.operation] = adapter, now + _PREPARED_S
        return AdapterOutcome(0, warning=adapter.warning, digest=adapter.digest)

    def _commit(self, job: _Job, now: float) -> int:
        """Make a change of a fleet; returns how many streams go on with what was before."""
        change, adapter = job.change, job.adapter
        if change.name in self.names:
            self._check_names(change)
        if not change.path:
            is_served = self.adapters.find(change.name) is not None
            return self.adapters.forget(change.name, now, FLEET_LINGER_S) if is_served else 0
        if self.adapters.has(change.name, change.digest):
            return self.adapters.serve(change.name, change.path, change.digest, now, FLEET_LINGER_S)
        if job.error is not None:
            raise job.error
        assert adapter is not None
        if adapter.digest != change.digest:
            raise AdapterError(f"{change.path} has other files than where it was loaded first")
        return self._load(change, adapter, now, FLEET_LINGER_S)

    def _is_made(self, record: AdapterRecord) -> bool:
        """True if a change has been made, or a later one of its name."""
        last = self.records.get(record.name)
        if last is None or is_later(record, last):
            return False
        served = self.adapters.find(record.name)
        digest = b"" if served is None else served.ref.digest
        return last != record or digest == record.digest

    def _load(
        self, change: AdapterChange, adapter: LoadedAdapter, now: float, linger_s: float = LINGER_S
    ) -> int:
        self._check_room(change.name, adapter)
        return self.adapters.put(change.name, change.path, adapter, now, linger_s)

    def _check_room(self, name: str, adapter: LoadedAdapter) -> None:
        """Raises AdapterError where there is no room for an adapter."""
        assert self.lora is not None
        most = float("inf") if self.lora.gib is None else self.lora.gib * 2**30
        free = self.free_bytes()
        if free is not None and adapter.num_bytes > free:
            raise AdapterError(
                f"it takes {adapter.num_bytes / 1e6:.1f} MB of memory, free: "
                f"{free / 1e6:.1f} MB on this machine",
                "no_room",
            )
        self.adapters.check_room(name, adapter, most)

    def _note(self) -> None:
        served, retired = self.adapters.served, self.adapters.retired
        names = AdapterNames(served, retired, tuple(self._done), self.records.all)
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


def _record_of(change: AdapterChange) -> AdapterRecord:
    return AdapterRecord(change.name, change.version, change.operation, change.path, change.digest)


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
