"""A replica's reports to clients that route among several; PROTOCOL.md documents them."""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import Meta, Struct

from slipstream_ipc.messages import tags
from slipstream_ipc.messages.fields import MAX_LOCATED, U32, Count, Identity, StreamId

WANTS_LOAD = 1  # bits of `Hello.wants`
WANTS_MEMBERS = 2
# bits of `Welcome.answers`
ANSWERS_INSPECT = 1
ONE_TENANT = 2  # the client is one by its key, whatever tenants it names
ANSWERS_STAGES = 4  # of a ChangeAdapter

ReplicaState = Literal[
    "serving",
    "core_away",  # its streams wait for another core
    "draining",  # nothing new is accepted
]


class Load(Struct, array_like=True, gc=False, frozen=True, tag=tags.LOAD):
    """The load of a replica, and its readiness to serve. Takes no sequence number.

    Sent to clients whose Hello wants it: on every change of `state`, at most every 0.1 s when
    numbers change, and every second.
    """

    state: ReplicaState = "serving"
    within: bool = False  # the core died of its own doing
    within_s: float = 0.0  # until a drain ends; 0: at once, or it does not drain
    running: U32 = 0  # requests that are being computed
    waiting: U32 = 0  # requests that are not
    queued_tokens: Count = 0  # of prompts, not computed yet
    free_blocks: U32 = 0  # of the cache, unused or reusable
    blocks: U32 = 0
    # how long ago the block was last used that was evicted last; None: none was
    kept_since_s: float | None = None
    step_s: float = 0.0  # of a step, recently
    max_seqs: U32 = 0  # requests that it runs at a time
    # where the core died of its own doing, digests of the streams that it was computing, 8 bytes
    # each; None: unknown
    suspects: bytes | None = None


class Gauge(Struct, array_like=True, gc=False, frozen=True, tag=tags.GAUGE):
    """The core's part of a Load, with its meanings. Sent at most every 50 ms."""

    running: U32
    waiting: U32
    queued_tokens: Count
    free_blocks: U32
    blocks: U32
    kept_since_s: float | None
    step_s: float
    max_seqs: U32


class Locate(Struct, array_like=True, frozen=True, tag=tags.LOCATE):
    """Asks which of these streams the worker has; a stream that is forgotten is unknown."""

    number: U32
    stream_ids: Annotated[tuple[StreamId, ...], Meta(max_length=MAX_LOCATED)]
    scope: Identity = b""  # of the streams; those of another scope are unknown


class Located(Struct, array_like=True, frozen=True, tag=tags.LOCATED):
    """Answers a Locate, in the order of its ids: 0 for an unknown stream, else 1 + its `moves`.
    Empty where the client leaves too much unread: nothing was looked up.
    """

    number: U32
    moves: Annotated[tuple[U32, ...], Meta(max_length=MAX_LOCATED)]


class Inspect(Struct, array_like=True, frozen=True, tag=tags.INSPECT):
    """Asks for the statistics of the worker's stack."""

    number: U32


class Inspected(Struct, array_like=True, frozen=True, tag=tags.INSPECTED):
    """Answers an Inspect. statistics: a `Statistics` as JSON; empty where the client leaves too
    much unread.
    """

    number: U32
    statistics: bytes = b""
