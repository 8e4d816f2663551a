"""A replica's status as known to a client, for tools that monitor a fleet."""

from __future__ import annotations

from typing import Literal

from msgspec import Struct

from slipstream_ipc.messages import Load

ReplicaCondition = Literal["away", "refused", "serving", "core_away", "draining"]


class ReplicaStatus(Struct, frozen=True):
    """A replica, seen from here.

    condition: away: not connected; refused: it cannot be used; else what the replica says of
    itself, serving before it has said anything. why: the reason for away or refused; empty: not
    known. name: as it is called among replicas; empty: it has no name, or has not told it.
    is_namesake: another replica has the same name, as the first ones of two fleets do. load: what
    it said last; None: nothing yet. model: the name of the one that it serves; empty: not known
    yet.
    """

    address: str
    condition: ReplicaCondition
    name: str = ""
    why: str = ""
    load: Load | None = None
    model: str = ""
    is_namesake: bool = False

    @property
    def shown_name(self) -> str:
        """Its name, or its address where it has none of its own."""
        return self.address if self.is_namesake else self.name or self.address
