"""The roles in a stack: the process that serves in each, its spare, and their succession.

- A role has one active process. Its successor is activated after it is reaped, with a larger
  incarnation, and is sent whether the last process that served caused its own death. A process that
  died before it served does not count: no request can have caused that.
- A spare succeeds, even one that is still starting; a new process is started only where there is
  none. After the death of a spare another is started, after the same pauses.
"""

from __future__ import annotations

from slipstream.stack.children.process import Child, ChildExit, ChildSpec
from slipstream.stack.children.restarts import RestartPolicy
from slipstream_ipc.messages import OwnProcess
from slipstream_ipc.process import SILENT_S, Activate

CORE = "core"  # the roles of the core and of the output workers
WORKER = "worker"


class Role:
    """One role in the stack, with its active process and its spare."""

    def __init__(self, spec: ChildSpec, max_restarts: int, window_s: float) -> None:
        self.spec = spec
        self.active: Child | None = None
        self.spare: Child | None = None
        self.has_served = False  # whether a process was ever ready here
        self.last_exit: ChildExit | None = (
            None  # of the last active process, whether it was ready or not
        )
        self.ended_at = 0.0
        self.due_at: float | None = None  # when the next process starts, while there is none
        self.spare_due_at: float | None = 0.0 if spec.has_spare else None
        self._left_over: dict[str, OwnProcess] = {}  # what its dead processes ran themselves
        self._incarnation = 0
        self._last_death_was_own_fault = False
        self._policy = RestartPolicy(max_restarts, window_s)
        self._spare_policy = RestartPolicy(max_restarts, window_s)

    @property
    def name(self) -> str:
        """The name of the role and of its processes."""
        return self.spec.name

    @property
    def is_ready(self) -> bool:
        """True if the active process is ready."""
        return self.active is not None and self.active.state == "ready"

    def condition(self, now: float) -> str:
        """The state of the role at `now`, for a `Condition`."""
        if self.active is None or self.active.state != "ready":
            return "restarting" if self.has_served else "starting"
        silent_at = self.active.last_beat_at
        return "ready" if silent_at is None or now < silent_at + SILENT_S else "silent"

    @property
    def own_processes(self) -> dict[str, OwnProcess]:
        """The processes that the active one runs itself, by name; `restarting` while it is dead."""
        found = {} if self.active is None else self.active.processes
        return {**self._left_over, **found}

    @property
    def num_restarts(self) -> int:
        """The number of processes that were activated here before the current one."""
        return max(0, self._incarnation - 1)

    @property
    def is_preparing_spare(self) -> bool:
        """True if a spare is starting and not available yet."""
        return self.spare is not None and self.spare.available_at is None

    @property
    def limit(self) -> str:
        """The restart budget, for messages."""
        return self._policy.limit

    def activate(self, child: Child) -> None:
        """Activate `child`: the spare, or a new process."""
        assert self.active is None
        if child is self.spare:
            self.spare = None
            self.spare_due_at = 0.0  # at once, when all processes are ready
        self.active, self.due_at = child, None
        self._incarnation += 1
        child.activate(Activate(self._incarnation, self._last_death_was_own_fault, self.ended_at))

    def note_ready(self) -> None:
        """Note that the active process is ready."""
        assert self.active is not None
        self.has_served = True

    def note_exit(self, child: Child, exit_: ChildExit, now: float) -> bool:
        """Note the death of the active process or the spare. False if no other one may follow."""
        served_s = 0.0 if child.available_at is None else now - child.available_at
        if child is self.spare:
            self.spare = None
            pause_s = self._spare_policy.pause_s(now, served_s)
            self.spare_due_at = None if pause_s is None else now + pause_s
            return pause_s is not None
        self._left_over |= dict.fromkeys(child.processes, OwnProcess("restarting"))
        self.active, self.last_exit, self.ended_at = None, exit_, now
        if child.available_at is not None:
            self._last_death_was_own_fault = exit_.is_own_fault
        pause_s = self._policy.pause_s(now, served_s)
        if pause_s is not None:
            self.due_at = now + pause_s
        return pause_s is not None
