"""How long a parent waits before it starts a child again. Pure: the caller has the clock.

The first restart is immediate. When a replacement dies soon after it was ready, or never gets that
far, the next one waits: 0.5 s, then twice as long each time, up to 10 s.
"""

from __future__ import annotations

STEADY_S = 2.0  # what serves for that long did not die of being started
_FIRST_PAUSE_S = 0.5
_LONGEST_PAUSE_S = 10.0


class RestartBackoff:
    """Before the restarts of one child."""

    def __init__(self) -> None:
        self._num_quick = 0  # restarts since one last served for STEADY_S

    def after(self, served_s: float) -> float:
        """The pause after a death, in seconds.

        served_s: how long the dead one had been ready, 0 where it never was.
        """
        if served_s >= STEADY_S:
            self._num_quick = 0
        self._num_quick += 1
        if self._num_quick == 1:
            return 0.0
        doublings = min(self._num_quick - 2, 10)  # or the power would outgrow a float
        return min(_LONGEST_PAUSE_S, _FIRST_PAUSE_S * 2.0**doublings)
