"""Matches the stop strings of one request against text as it streams in.

Independent of tokens: the caller decides from `min_tokens` whether a match counts.

- The earliest end wins; among matches with the same end, the earliest start, which is the longest.
- The text held back is exactly the longest suffix that is a proper prefix of a stop string. So no
  character of a stop string leaks, and a text that ends is its emitted parts and the last `held`.
- A match counts if it ends in text that was fed while `active`. One that ends earlier is ordinary
  text; one that begins earlier and ends later counts.
- The result does not depend on how the text is split into calls.
"""

from __future__ import annotations

from collections.abc import Sequence

__all__ = ["StopStrings"]


class StopStrings:
    """The stop strings of one request, compiled. Has no per-stream state and may be shared."""

    __slots__ = ("_include", "_inner_chars", "_min_len", "_stops", "first_chars")

    def __init__(self, stops: Sequence[str], include_stop_str_in_output: bool = False) -> None:
        """Raises ValueError if `stops` is empty or contains an empty string."""
        if not stops or "" in stops:
            raise ValueError(f"stop: got {stops!r}, allowed: strings that are not empty")
        self._stops = tuple(stops)
        self._include = include_stop_str_in_output
        self._min_len = min(map(len, stops))
        self.first_chars = frozenset(stop[0] for stop in stops)
        self._inner_chars = frozenset("".join(stop[:-1] for stop in stops))

    @classmethod
    def none(cls) -> StopStrings:
        """No stop strings: all text is emitted as it comes."""
        stops = cls.__new__(cls)
        stops._stops, stops._include, stops._min_len = (), False, 0
        stops.first_chars = stops._inner_chars = frozenset()
        return stops

    def is_harmless(self, text: str) -> bool:
        """True if `text`, with nothing held before it, completes no stop string and is emitted
        whole.
        """
        _, held, stop = self.feed("", text)
        return not held and stop is None

    def feed(self, held: str, text: str, active: bool = True) -> tuple[str, str, str | None]:
        """Process `text`, which follows `held` (the text held back by the last call; "" at first).

        Returns the text to emit, the text held back, and the stop string that matched, if any.
        After a match nothing is held; the emitted text ends before the match, or after it with
        `include_stop_str_in_output`.
        """
        if not held and self.first_chars.isdisjoint(text):
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
        """(end, start) of the winning match among those that end after `min_end`."""
        best = None
        for stop in self._stops:
            start = buffer.find(stop, max(0, min_end - len(stop) + 1))
            if start >= 0 and (best is None or (start + len(stop), start) < best):
                best = (start + len(stop), start)
        return best

    def _held_at(self, buffer: str) -> int:
        """Start of the longest suffix of `buffer` that begins a stop string; else its length.

        Steps from first character to first character instead of storing all prefixes, whose size is
        the square of the stop string's length, which the user chooses.
        """
        held_at = len(buffer)
        if buffer[-1:] not in self._inner_chars:  # held text ends inside a stop string
            return held_at
        for stop in self._stops:
            start = buffer.find(stop[0], max(0, len(buffer) - len(stop) + 1), held_at)
            while start >= 0:
                if stop.startswith(buffer[start:]):
                    held_at = start
                    break
                start = buffer.find(stop[0], start + 1, held_at)
        return held_at
