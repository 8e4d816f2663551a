"""The restart budget of a process, and the pauses between restarts. Pure: the caller has the clock.

Pauses are those of `slipstream_ipc.restart_backoff`. The budget limits the restarts within a time
window; when it is used up, restarting does not help.
"""

from __future__ import annotations

from collections import deque

from slipstream_ipc.restart_backoff import RestartBackoff


class RestartPolicy:
    """The restarts of one role in the stack."""

    def __init__(self, max_restarts: int, window_s: float) -> None:
        self._max_restarts = max_restarts
        self._window_s = window_s
        self._restarts: deque[float] = deque()
        self._pauses = RestartBackoff()

    def pause_s(self, now: float, served_s: float) -> float | None:
        """The pause before a restart after a death at `now`; None where the budget is used up.

        served_s: how long the dead process had been ready; 0 where it never was.
        """
        while self._restarts and self._restarts[0] <= now - self._window_s:
            self._restarts.popleft()
        if len(self._restarts) >= self._max_restarts:
            return None
        self._restarts.append(now)
        return self._pauses.after(served_s)

    @property
    def limit(self) -> str:
        """The budget, for messages."""
        return f"{self._max_restarts} restarts within {self._window_s:g} s"
