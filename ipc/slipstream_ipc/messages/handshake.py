"""The control messages: what the ends of any hop say of the hop itself."""

from __future__ import annotations

from msgspec import Struct

from slipstream_ipc.messages import tags
from slipstream_ipc.messages.fields import U32, Identity
from slipstream_ipc.messages.shared import Fault, ModelCard

PROTOCOL_VERSION = 2


class Hello(Struct, array_like=True, frozen=True, tag=tags.HELLO):
    """Opens an epoch. `fresh`: the sender knows of no stream and wants everything replayed."""

    version: U32
    identity: Identity  # stays the same over all attaches of one party's life
    fresh: bool = True


class Welcome(Struct, array_like=True, frozen=True, tag=tags.WELCOME):
    """The accepting end's answer to a Hello."""

    version: U32
    model: ModelCard


class Reattach(Struct, array_like=True, frozen=True, tag=tags.REATTACH):
    """The accepting end does not know this route: attach anew."""


class AttachRefused(Struct, array_like=True, frozen=True, tag=tags.ATTACH_REFUSED):
    """The accepting end will not have this peer, or cannot read what it sent.

    is_leaving: it stops, and another may come to its address, where the streams can go on.
    """

    fault: Fault
    is_leaving: bool = False


class Ping(Struct, array_like=True, frozen=True, tag=tags.PING):
    """Asks for a sign of life."""


class Starting(Struct, array_like=True, frozen=True, tag=tags.STARTING):
    """The accepting end is there and cannot serve yet; it keeps the Hello, and answers it then."""


Control = Hello | Welcome | Reattach | AttachRefused | Ping | Starting  # take no sequence number
