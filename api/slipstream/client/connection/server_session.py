"""The session of a client with the server that its address names: a stack, a fleet, or a stack that
says which fleet it belongs to.
"""

from __future__ import annotations

from functools import partial

import zmq

from slipstream.client.connection.fleet_session import FleetSession
from slipstream.client.connection.stack_session import Handover, StackSession
from slipstream.client.endpoints import check_member
from slipstream.client.placing.discovery import LearnedMembers, names_fleet
from slipstream_ipc.messages import WANTS_MEMBERS
from slipstream_ipc.transport.curve import Access

ServerSession = StackSession | FleetSession


class SessionOpener:
    """Opens the session of one client, and another one once a server has named its fleet."""

    def __init__(
        self,
        context: zmq.Context[zmq.Socket[bytes]],
        address: str,
        timeout_s: float,
        poller: zmq.Poller,
        *,
        access: Access | None = None,
        outlives_server: bool = True,
        fails_early: bool = False,
    ) -> None:
        """See `ClientSession`."""
        self._address = address
        self._outlives_server = outlives_server
        self._fails_early = fails_early
        self._access = access
        self._open_stack = partial(StackSession, context, address, timeout_s, poller)
        self._open_fleet = partial(FleetSession, context, address, timeout_s, poller)
        self._learned = LearnedMembers(address, partial(check_member, access=access))

    def open(self, now: float) -> ServerSession:
        """A session with the stack at the address, or with the fleet that it names."""
        if names_fleet(self._address):
            return self._open_fleet(now, access=self._access, fails_early=self._fails_early)
        return self._open_stack(
            now,
            access=self._access,
            outlives_server=self._outlives_server,
            fails_early=self._fails_early,
            names_fleet=self._names_fleet,
            wants=WANTS_MEMBERS,
        )

    def next(self, session: ServerSession, now: float) -> ServerSession:
        """The session to go on with after a turn of this one."""
        if isinstance(session, FleetSession) or session.handover is None:
            return session
        fleet = self._fleet(session.handover, now)
        session.say_goodbye(now)
        session.close()
        return fleet

    def _names_fleet(self, members: tuple[str, ...]) -> bool:
        self._learned.learn(members)
        return len(self._learned.addresses(0.0)) > 1

    def _fleet(self, handover: Handover, now: float) -> FleetSession:
        return self._open_fleet(now, access=self._access, source=self._learned, handover=handover)
