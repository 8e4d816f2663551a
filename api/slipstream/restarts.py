"""How often, and after what pause, a process is started again. Pure: the caller has the clock.

Rules:
- The first restart is immediate. When a replacement dies soon after it was ready, or never gets
  that far, the next one waits: 0.5 s, then twice as long each time, up to 10 s.
- A budget bounds the restarts within a window of time. When it is used up something is wrong that
  no restart mends.
"""

from __future__ import annotations

from collections import deque

STEADY_S = 2.0  # whoever serves for that long did not die of being started
_FIRST_PAUSE_S = 0.5
_LONGEST_PAUSE_S = 10.0


class RestartPolicy:
    """The restarts of one place in the stack."""

    def __init__(self, max_restarts: int, window_s: float) -> None:
        self._max_restarts = max_restarts
        self._window_s = window_s
        self._restarts: deque[float] = deque()
        self._num_quick = 0  # restarts since somebody last served for STEADY_S

    def pause_s(self, now: float, served_s: float) -> float | None:
        """After a death `now`: how long the next start waits; None where there may be none.

        served_s: how long the dead one had been ready, 0 where it never was.
        """
        while self._restarts and self._restarts[0] <= now - self._window_s:
            self._restarts.popleft()
        if len(self._restarts) >= self._max_restarts:
            return None
        self._restarts.append(now)
        if served_s >= STEADY_S:
            self._num_quick = 0
        self._num_quick += 1
        if self._num_quick == 1:
            return 0.0
        doublings = min(self._num_quick - 2, 10)  # or the power would outgrow a float
        return min(_LONGEST_PAUSE_S, _FIRST_PAUSE_S * 2.0**doublings)

    @property
    def limit(self) -> str:
        """The budget, for people."""
        return f"{self._max_restarts} restarts within {self._window_s:g} s"
