"""The pause before a parent restarts a child. Pure: the caller has the clock.

The first restart is immediate. If a replacement dies soon after it was ready, or before, the next
restart waits: 0.5 s, then twice as long each time, up to 10 s.
"""

from __future__ import annotations

STEADY_S = 2.0  # a child that has served this long did not die from its start
_FIRST_PAUSE_S = 0.5
_LONGEST_PAUSE_S = 10.0


class RestartBackoff:
    """The pauses before the restarts of one child."""

    def __init__(self) -> None:
        self._num_quick = 0  # deaths since a child last served for STEADY_S, that one included

    def after(self, served_s: float) -> float:
        """The pause after a death, in seconds.

        served_s: how long the dead child had been ready, 0 if it never was.
        """
        if served_s >= STEADY_S:
            self._num_quick = 0
        self._num_quick += 1
        if self._num_quick == 1:
            return 0.0
        doublings = min(self._num_quick - 2, 10)  # else the power would overflow a float
        return min(_LONGEST_PAUSE_S, _FIRST_PAUSE_S * 2.0**doublings)
