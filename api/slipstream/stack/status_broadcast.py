"""Sends the condition and the statistics of a stack to its HTTP fronts.

Every change of a role's condition is sent to the serving fronts; so are changes of the processes
that a child runs itself, as the child reports them. Statistics are sent when they are due, and only
to fronts that have read everything before, and to a child that asks for them.
"""

from __future__ import annotations

from collections.abc import Mapping

from slipstream.stack.children.role_statistics import RoleStatistics
from slipstream.stack.children.roles import Role
from slipstream_ipc.process import Condition


class StatusBroadcast:
    """Reports the processes in these roles to the children that receive such reports."""

    def __init__(self, roles: Mapping[str, Role], statistics: RoleStatistics) -> None:
        self._roles = roles
        self._statistics = statistics

    def send(self, now: float) -> None:
        """Send what has changed and what is due."""
        processes: dict[str, str] = {
            name: own.state
            for role in self._roles.values()
            for name, own in role.own_processes.items()
        }
        # the supervisor's own view takes precedence
        processes |= {name: role.condition(now) for name, role in self._roles.items()}
        condition = Condition(processes)
        receivers = [
            role.active
            for role in self._roles.values()
            if role.spec.receives_condition and role.active is not None
        ]
        for receiver in receivers:
            receiver.send_condition(condition)
        if receivers and (statistics := self._statistics.due(now)):
            for receiver in receivers:
                receiver.offer(statistics)
        askers = [each.active for each in self._roles.values() if each.active is not None]
        for asker in askers:
            if asker.wants_statistics:
                asker.wants_statistics = False
                asker.offer(self._statistics.encoded(now))
