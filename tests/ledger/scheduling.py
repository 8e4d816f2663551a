"""Which process of pytest-xdist runs which tests."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

from tests.ledger.durations import Ledger, file_of
from xdist.scheduler import LoadScopeScheduling

_MOST_S = 60.0  # of tests that one process runs without a break, where they can be divided


def units(nodeids: Sequence[str], expected: Mapping[str, float]) -> dict[str, str]:
    """The unit that each case belongs to: its file, or a part of it where the file takes over a
    minute. Each part is started in a process of its own, with its own fixtures of the file.
    """
    of_case: dict[str, str] = {}
    taken: Counter[str] = Counter()
    part: Counter[str] = Counter()
    for nodeid in nodeids:
        file, seconds = file_of(nodeid), expected[nodeid]
        if file in taken and taken[file] + seconds > _MOST_S:
            part[file] += 1
            taken[file] = 0
        taken[file] += seconds  # type: ignore[assignment]
        of_case[nodeid] = f"{file} {part[file]}"
    return of_case


class UnitScheduling(LoadScopeScheduling):
    """Gives each process a unit after the other, in the order of collection."""

    def schedule(self) -> None:
        if self.collection is None:
            nodeids = next(iter(self.registered_collections.values()))
            self._units = units(nodeids, Ledger.read(self.config.option.ledger).seconds(nodeids))
        super().schedule()

    def _split_scope(self, nodeid: str) -> str:
        return self._units[nodeid]
