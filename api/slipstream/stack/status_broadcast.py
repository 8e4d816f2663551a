"""Sends the condition and the statistics of a stack to its HTTP fronts.

Every change of a place's condition is sent to the serving fronts; so are changes of the processes
that a child runs itself, as the child reports them. Statistics are sent when they are due, and only
to fronts that have read everything before.
"""

from __future__ import annotations

from collections.abc import Mapping

from slipstream.stack.children.roles import Role
from slipstream.stack.place_statistics import PlaceStatistics
from slipstream_ipc.process import Condition


class StatusBroadcast:
    """Reports the processes in these places to those children that take such reports."""

    def __init__(self, roles: Mapping[str, Role], accounts: PlaceStatistics) -> None:
        self._roles = roles
        self._accounts = accounts

    def tell(self, now: float) -> None:
        """Send what has changed and what is due."""
        processes = {name: role.condition(now) for name, role in self._roles.items()}
        for role in self._roles.values():
            if role.active is not None:  # the supervisor's own view takes precedence
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
