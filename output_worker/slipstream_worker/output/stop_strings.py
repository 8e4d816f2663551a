"""Stop strings of one request, matched as its text comes in.

Owns: where a text stops, and how much of its end has to wait because a stop string may begin there.

Does not know: tokens, streams, stop token ids, min_tokens (its caller says whether a match counts).

Rules:
- The earliest end wins; among matches with the same end, the earliest start, which is the longest.
- Held back is the longest end of the text that begins some stop string and is not all of it, and
  nothing else. So no character of a stop string leaks, and a text that ends is its emitted parts
  and the last `held`.
- A match counts if it ends in text that was fed while `active`. One that ends earlier is text like
  any other; one that begins earlier and ends later counts.
- The text does not depend on how it is cut into calls.
"""

from __future__ import annotations

from collections.abc import Sequence

__all__ = ["StopStrings"]


class StopStrings:
    """The stop strings of one request, compiled. Holds nothing of a stream: children share it."""

    __slots__ = ("_first_chars", "_include", "_inner_chars", "_min_len", "_stops")

    def __init__(self, stops: Sequence[str], include_stop_str_in_output: bool = False) -> None:
        """Raises ValueError if `stops` is empty or has an empty string in it."""
        if not stops or "" in stops:
            raise ValueError(f"stop takes one or more strings that are not empty, not {stops!r}")
        self._stops = tuple(stops)
        self._include = include_stop_str_in_output
        self._min_len = min(map(len, stops))
        self._first_chars = frozenset(stop[0] for stop in stops)
        self._inner_chars = frozenset("".join(stop[:-1] for stop in stops))

    def is_harmless(self, text: str) -> bool:
        """Whether `text`, with nothing held before it, neither ends a stream nor holds anything."""
        _, held, stop = self.feed("", text)
        return not held and stop is None

    def feed(self, held: str, text: str, active: bool = True) -> tuple[str, str, str | None]:
        """Take `text`, which follows `held` (what the last call held back; "" at first).

        Returns what may leave now, what is held back, and the stop string if one has matched. Then
        the text stops: what leaves ends before the match, or after it with
        include_stop_str_in_output, and nothing is held.
        """
        if not held and self._first_chars.isdisjoint(text):
            return text, "", None
        buffer = held + text
        if active and len(buffer) >= self._min_len:
            match = self._first_match(buffer, len(held))
            if match is not None:
                end, start = match
                return buffer[: end if self._include else start], "", buffer[start:end]
        held_at = self._held_at(buffer)
        return buffer[:held_at], buffer[held_at:], None

    def _first_match(self, buffer: str, min_end: int) -> tuple[int, int] | None:
        """(end, start) of the match that wins, of those that end behind `min_end`."""
        best = None
        for stop in self._stops:
            start = buffer.find(stop, max(0, min_end - len(stop) + 1))
            if start >= 0 and (best is None or (start + len(stop), start) < best):
                best = (start + len(stop), start)
        return best

    def _held_at(self, buffer: str) -> int:
        """Where the longest end of `buffer` starts that begins a stop string; else its length.

        Searches from first character to first character instead of keeping all beginnings: their
        size is the square of a stop string's, which is the user's to choose.
        """
        held_at = len(buffer)
        if buffer[-1:] not in self._inner_chars:  # what is held ends within a stop string
            return held_at
        for stop in self._stops:
            start = buffer.find(stop[0], max(0, len(buffer) - len(stop) + 1), held_at)
            while start >= 0:
                if stop.startswith(buffer[start:]):
                    held_at = start
                    break
                start = buffer.find(stop[0], start + 1, held_at)
        return held_at
