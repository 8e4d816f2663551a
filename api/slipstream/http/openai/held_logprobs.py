"""Log-probabilities that wait to be shown, in columns: as JSON they take eight times as much."""

from __future__ import annotations

from collections.abc import Iterator

from slipstream.delta_batch import EntryColumns, divided
from slipstream_ipc.messages import LogprobColumns


class HeldLogprobs:
    """The log-probabilities of consecutive tokens, all with equally many candidates."""

    __slots__ = ("_ids", "_ranks", "_values", "width")

    def __init__(self) -> None:
        self.width = 0
        self._values, self._ids, self._ranks = bytearray(), bytearray(), bytearray()

    @property
    def num_tokens(self) -> int:
        """How many tokens there are."""
        return len(self._ranks) // 4

    @property
    def num_candidates(self) -> int:
        """How many candidates they have in all."""
        return self.num_tokens * self.width

    def add(self, columns: EntryColumns | LogprobColumns) -> None:
        """Add the tokens that follow, if these have log-probabilities."""
        if columns.width:
            self.width = columns.width
            self._values += columns.values
            self._ids += columns.ids
            self._ranks += columns.ranks

    def take(self, num_tokens: int) -> HeldLogprobs:
        """Remove the first tokens and return them."""
        taken, num = HeldLogprobs(), 4 * num_tokens
        taken.width = self.width
        taken._ranks, taken._ids, taken._values = (
            self._ranks[:num],
            self._ids[: num * self.width],
            self._values[: num * self.width],
        )
        del self._ranks[:num], self._ids[: num * self.width], self._values[: num * self.width]
        return taken

    def extend(self, other: HeldLogprobs) -> None:
        """Add the tokens of another one."""
        self.add(other.columns)

    @property
    def columns(self) -> LogprobColumns:
        """All tokens."""
        return LogprobColumns(self.width, bytes(self._values), bytes(self._ids), bytes(self._ranks))

    def parts(self) -> Iterator[LogprobColumns]:
        """The tokens, some at a time."""
        if self.width:
            columns = LogprobColumns(self.width, self._values, self._ids, self._ranks)  # type: ignore[arg-type]
            yield from divided(columns)
