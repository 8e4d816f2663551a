"""The control messages, which both hops use to attach and stay attached."""

from __future__ import annotations

from msgspec import Struct

from slipstream_ipc.messages import tags
from slipstream_ipc.messages.fields import U32, U64, Identity, NumWorkers
from slipstream_ipc.messages.model_card import ModelCard
from slipstream_ipc.messages.replica import Gauge, Load
from slipstream_ipc.messages.shared import Fault

PROTOCOL_VERSION = 2  # between client and worker
CORE_HOP_VERSION = 7  # between worker and core, which are of one release


class Hello(Struct, array_like=True, frozen=True, tag=tags.HELLO):
    """Opens an epoch. `fresh`: the sender has no streams and needs everything replayed."""

    version: U32
    identity: Identity  # the same for all attaches of one process or client
    fresh: bool = True
    wants: U32 = 0  # WANTS_LOAD, WANTS_MEMBERS, WANTS_ADAPTERS


class Welcome(Struct, array_like=True, frozen=True, tag=tags.WELCOME):
    """The accepting end's answer to a Hello.

    worker, num_workers: which of its stack's output workers a client has reached (see
    `worker_deal`).
    """

    version: U32
    model: ModelCard
    worker: U32 = 0
    num_workers: NumWorkers = 1
    replica: Identity = b""  # the stack's name, the same after a restart; empty: it has none
    incarnation: U64 = 0  # another one after each start of the stack
    members: tuple[str, ...] = ()  # addresses of the fleet's replicas, for clients that want them
    answers: U32 = 0  # ANSWERS_INSPECT, ONE_TENANT, ANSWERS_STAGES


class Reattach(Struct, array_like=True, frozen=True, tag=tags.REATTACH):
    """The accepting end does not know this route: attach anew."""


class AttachRefused(Struct, array_like=True, frozen=True, tag=tags.ATTACH_REFUSED):
    """The accepting end refuses this peer, or cannot read what it sent.

    is_leaving: it is stopping; another one may take over its address and continue the streams.
    """

    fault: Fault
    is_leaving: bool = False


class Ping(Struct, array_like=True, frozen=True, tag=tags.PING):
    """Asks for a sign of life."""


class Starting(Struct, array_like=True, frozen=True, tag=tags.STARTING):
    """The accepting end cannot serve yet; it keeps the Hello and answers it when it can."""


# they take no sequence number
Control = Hello | Welcome | Reattach | AttachRefused | Ping | Starting | Load | Gauge
