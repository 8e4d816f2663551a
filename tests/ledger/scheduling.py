"""Which process of pytest-xdist runs which tests."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from tests.ledger.durations import Ledger, file_of
from xdist.scheduler import LoadScopeScheduling

if TYPE_CHECKING:
    from xdist.workermanage import WorkerController

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
    """Gives each process a unit after the other, in the order of collection.

    A process that dies is replaced. With pytest-xdist 3.8 the run may then wait for ever: finished
    units of the dead one are given out again, and a single test is, where a process begins none
    before it knows of the next or of the end; the test that killed begins again, too. Here the test
    that ran has failed, and others run what was not begun.
    """

    def schedule(self) -> None:
        if self.collection is None:
            nodeids = next(iter(self.registered_collections.values()))
            self._units = units(nodeids, Ledger.read(self.config.option.ledger).seconds(nodeids))
        super().schedule()

    def remove_node(self, node: WorkerController) -> str | None:
        taken = self.assigned_work.pop(node)
        begun = next((each for each in taken.values() if not all(each.values())), None)
        if begun is None:
            return None
        killed = next(nodeid for nodeid, is_over in begun.items() if not is_over)
        begun[killed] = True
        left = {name: each for name, each in taken.items() if not all(each.values())}
        self.workqueue.update(left)
        for other in self.nodes:
            self._reschedule(other)
        return killed

    def _reschedule(self, node: WorkerController) -> None:
        has_collected = node in self.registered_collections
        while has_collected and not node.shutting_down:
            if self._pending_of(self.assigned_work[node]) > 2:
                break
            super()._reschedule(node)  # one unit, or the end

    def _split_scope(self, nodeid: str) -> str:
        return self._units[nodeid]
