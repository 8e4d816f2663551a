"""GET /health and GET /ready: what the supervisor reports about the stack's processes.

/health is for liveness: 503 asks for a restart of the whole stack, so it is the answer only where
nothing inside the stack mends it. The supervisor replaces dead and hung processes, and ends the
stack when that does not help; only a hung supervisor is replaced by nothing. It reports several
times a second, so a front notices.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from slipstream.stack.children.role_statistics import SUPERVISOR
from slipstream_ipc.process import SILENT_S, role_of

_ENGINE_PROCESSES = ("core", "worker", "tokenizer")  # without one of these, requests wait

HealthStatus = Literal["ok", "starting", "recovering", "draining", "unhealthy"]


class StackHealth:
    """The processes of the stack, as the supervisor last reported them. The caller passes the time
    in.
    """

    def __init__(self, hang_timeout_s: float) -> None:
        """hang_timeout_s: silence of the supervisor after which it counts as hung."""
        self._hang_timeout_s = hang_timeout_s
        self._heard_at: float | None = None  # None: no supervisor has reported
        self.processes: dict[str, str] = {}  # state by process name

    def note_report(self, now: float) -> None:
        """Note that the supervisor has reported anything."""
        self._heard_at = now

    def states(self, now: float) -> dict[str, str]:
        """The state of every process, the supervisor included; empty without a supervisor."""
        if self._heard_at is None:
            return self.processes
        is_silent = now >= self._heard_at + SILENT_S
        return {**self.processes, SUPERVISOR: "silent" if is_silent else "ready"}

    def status(self, now: float, *, is_draining: bool) -> HealthStatus:
        """The status of the stack as a whole; `unhealthy` where only its restart helps."""
        if self._heard_at is not None and now >= self._heard_at + self._hang_timeout_s:
            return "unhealthy"  # 503: alone where a restart from outside helps (decision 012)
        if is_draining:
            return "draining"
        states = set(self.processes.values())
        if not states <= {"ready", "starting"}:
            return "recovering"
        return "starting" if "starting" in states else "ok"

    @property
    def serves(self) -> bool:
        """True if every process that a request needs is there. A process in its first start counts:
        the model is known only once it is ready.
        """
        return {"ready", "starting"}.issuperset(self.states_of(_ENGINE_PROCESSES))

    def states_of(self, roles: Sequence[str]) -> list[str]:
        """The states of all processes in these roles."""
        found = self.processes.items()
        return [state for name, state in found if role_of(name) in roles]
