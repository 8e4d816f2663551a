"""The pause between the attaches of a peer that does not answer. Pure: the caller has the clock.

A pause is the time that a Hello waits for its Welcome. It doubles with each attach, up to four
times the first: with a fixed one, an accepting end slower than that would always answer a closed
socket.
"""

from __future__ import annotations

_LONGEST = 4.0  # multiples of the first pause


class ReconnectBackoff:
    """The pauses between the attaches to one peer. pause_s: the current one, in seconds."""

    __slots__ = ("_first_s", "pause_s")

    def __init__(self, first_s: float) -> None:
        self._first_s = first_s
        self.pause_s = first_s

    def lengthen(self) -> None:
        """Double the pause: a Hello was not answered."""
        self.pause_s = min(2 * self.pause_s, _LONGEST * self._first_s)

    def reset(self) -> None:
        """Return to the first pause: the peer has answered."""
        self.pause_s = self._first_s
