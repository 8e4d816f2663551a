"""The places in a stack: who serves in each, who waits beside it, what became of those before.

Owns: a place's process and its spare, the succession of incarnations, when the next one is due.
Does not know: signals, pipes, other places, or what follows when a place cannot be filled.

Rules:
- A place has one process that serves. Its successor is activated after it is reaped, with a larger
  incarnation, and is told how the last one died that served: what one that never got so far died of
  has nothing to do with anybody's requests.
- A spare that waits, however far it has come, succeeds; only where there is none a new process is
  started. A spare's own death costs nobody anything: another is started after the same pauses.
"""

from __future__ import annotations

from slipstream.stack.children.process import Child, ChildExit, ChildSpec
from slipstream.stack.children.restarts import RestartPolicy
from slipstream_ipc.process import SILENT_S, Activate


class Role:
    """One place, by the name of its processes."""

    def __init__(self, spec: ChildSpec, max_restarts: int, window_s: float) -> None:
        self.spec = spec
        self.active: Child | None = None
        self.spare: Child | None = None
        self.has_served = False  # somebody was ready here once
        self.last_exit: ChildExit | None = (
            None  # how the last one that served, or should have, died
        )
        self.ended_at = 0.0
        self.due_at: float | None = None  # when the next one starts, where there is none
        self.spare_due_at: float | None = 0.0 if spec.has_spare else None
        self._incarnation = 0
        self._died_within = False
        self._policy = RestartPolicy(max_restarts, window_s)
        self._spare_policy = RestartPolicy(max_restarts, window_s)

    @property
    def name(self) -> str:
        """Its processes' name."""
        return self.spec.name

    @property
    def is_ready(self) -> bool:
        """Whether somebody serves."""
        return self.active is not None and self.active.state == "ready"

    def condition(self, now: float) -> str:
        """How it is, in the words of `Condition`."""
        if self.active is None or self.active.state != "ready":
            return "restarting" if self.has_served else "starting"
        silent_at = self.active.heard_at
        return "ready" if silent_at is None or now < silent_at + SILENT_S else "silent"

    @property
    def num_restarts(self) -> int:
        """Processes that had this place before."""
        return max(0, self._incarnation - 1)

    @property
    def is_preparing_spare(self) -> bool:
        """Whether a spare is on its way and does not wait yet."""
        return self.spare is not None and self.spare.settled_at is None

    @property
    def limit(self) -> str:
        """How often it may be filled again, for people."""
        return self._policy.limit

    def fill(self, child: Child) -> None:
        """This one serves from now on: the spare, or one just started."""
        assert self.active is None
        if child is self.spare:
            self.spare = None
            self.spare_due_at = 0.0  # at once when all are ready
        self.active, self.due_at = child, None
        self._incarnation += 1
        child.activate(Activate(self._incarnation, self._died_within))

    def became_ready(self) -> None:
        """The active one serves."""
        assert self.active is not None
        self.has_served = True

    def lost(self, child: Child, exit_: ChildExit, now: float) -> bool:
        """One of the two died. False where the place stays empty for good."""
        served_s = 0.0 if child.settled_at is None else now - child.settled_at
        if child is self.spare:
            self.spare = None
            pause_s = self._spare_policy.pause_s(now, served_s)
            self.spare_due_at = None if pause_s is None else now + pause_s
            return pause_s is not None
        self.active, self.last_exit, self.ended_at = None, exit_, now
        if child.settled_at is not None:
            self._died_within = exit_.within
        pause_s = self._policy.pause_s(now, served_s)
        if pause_s is not None:
            self.due_at = now + pause_s
        return pause_s is not None
