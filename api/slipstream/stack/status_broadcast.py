"""What those children are told of the stack that tell others: the HTTP fronts.

Owns: who hears what when. Does not know: pipes (`process`), what is counted (`place_statistics`).

Rules: every change of a place's condition is told, to who serves; so is that of a process which a
child keeps itself, as far as the child says it. The numbers are told when they
are due, and only to who has read what came before.
"""

from __future__ import annotations

from collections.abc import Mapping

from slipstream.stack.children.roles import Role
from slipstream.stack.place_statistics import PlaceStatistics
from slipstream_ipc.process import Condition


class StatusBroadcast:
    """About the processes in these places."""

    def __init__(self, roles: Mapping[str, Role], accounts: PlaceStatistics) -> None:
        self._roles = roles
        self._accounts = accounts

    def tell(self, now: float) -> None:
        """Tell what is news."""
        processes = {name: role.condition(now) for name, role in self._roles.items()}
        for role in self._roles.values():
            if role.active is not None:  # a place's own name says more than another's word
                processes = {**role.active.processes, **processes}
        condition = Condition(processes)
        hearers = [
            role.active
            for role in self._roles.values()
            if role.spec.hears_condition and role.active is not None
        ]
        for hearer in hearers:
            hearer.tell(condition)
        if hearers and (statistics := self._accounts.due(now)):
            for hearer in hearers:
                hearer.offer(statistics)
