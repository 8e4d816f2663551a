"""Messages by which adapters (LoRA) are loaded and unloaded while a server runs."""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import Meta, Struct

from slipstream_ipc.messages import tags
from slipstream_ipc.messages.fields import (
    MAX_LORAS,
    U32,
    Count,
    Identity,
    LongText,
    LoraName,
)
from slipstream_ipc.messages.model_card import AdapterRef
from slipstream_ipc.messages.shared import Fault

WANTS_ADAPTERS = 4  # a bit of `Hello.wants`

AdapterRefs = Annotated[tuple[AdapterRef, ...], Meta(max_length=MAX_LORAS)]

# of a change that was not made, beside its fault; empty: what was asked for is wrong
ChangeFault = Literal[
    "",
    "missing",  # no such adapter, or no such files
    "forbidden",  # adapters are not changed here, or not from there, or not by this client
    "no_room",  # it would not fit beside those that are loaded
]


# of a change that reaches all replicas of a fleet or none
ChangeStage = Literal[
    "",  # it is made at once, at this stack
    "prepare",  # say whether it can be made, and keep what is read for it for a while
    "commit",  # make it, unless a later change of the name has been made
]


class AdapterRecord(Struct, array_like=True, frozen=True):
    """The last change of a name, of which all replicas of a fleet come to have the same. Of two the
    one with the greater version counts, or the greater operation where these are equal.

    path, digest: empty: the name is not served.
    """

    name: LoraName
    version: Count
    operation: Identity
    path: LongText = ""
    digest: Identity = b""


AdapterRecords = Annotated[tuple[AdapterRecord, ...], Meta(max_length=2 * MAX_LORAS)]


class ChangeAdapter(Struct, array_like=True, frozen=True, tag=tags.CHANGE_ADAPTER):
    """Load an adapter from a folder of the server's, or forget one. Answered by AdapterChanged.

    path: empty: requests find the name no longer, and streams that have it go on to their end.
    load_inplace: a name that is taken gets what lies at `path`; streams end with what they began.
    operation: random, the same where it is asked again: it is done once. version, digest: of the
    AdapterRecord that a "commit" makes; files with another digest are refused.
    """

    number: U32
    operation: Identity
    name: LoraName
    path: LongText = ""
    load_inplace: bool = False
    stage: ChangeStage = ""
    version: Count = 0
    digest: Identity = b""


class AdapterChanged(Struct, array_like=True, frozen=True, tag=tags.ADAPTER_CHANGED):
    """Answers a ChangeAdapter. fault: it was not made; why: see `ChangeFault`. num_streams: that go
    on with what was served under the name before. warning: what was loaded is not all used. digest:
    of the files that were read to "prepare".
    """

    number: U32
    fault: Fault | None = None
    why: ChangeFault = ""
    num_streams: U32 = 0
    warning: str = ""
    digest: Identity = b""


class AdapterList(Struct, array_like=True, frozen=True, tag=tags.ADAPTER_LIST):
    """The adapters that are served from now on, in place of those of the model's card. Sent to
    clients whose Hello wants it, on every change, and after the Welcome where there were changes;
    answered by KnowsAdapters. number: of the change.
    """

    adapters: AdapterRefs
    number: Count = 0
    records: AdapterRecords = ()


class KnowsAdapters(Struct, array_like=True, frozen=True, tag=tags.KNOWS_ADAPTERS):
    """The client has the AdapterList of this number. A change is answered once all clients have."""

    number: Count


class AdapterChange(Struct, array_like=True, frozen=True, tag=tags.ADAPTER_CHANGE):
    """A client's ChangeAdapter, on the way to the core. number: the worker's."""

    number: Count
    operation: Identity
    name: LoraName
    path: LongText
    load_inplace: bool
    stage: ChangeStage = ""
    version: Count = 0
    digest: Identity = b""


class AdapterOutcome(Struct, array_like=True, frozen=True, tag=tags.ADAPTER_OUTCOME):
    """Answers an AdapterChange; behind the ServedAdapters that it made."""

    number: Count
    fault: Fault | None = None
    why: ChangeFault = ""
    num_streams: U32 = 0
    warning: str = ""
    digest: Identity = b""


class ServedAdapters(Struct, array_like=True, frozen=True, tag=tags.SERVED_ADAPTERS):
    """The adapters that a core serves from now on, in place of those in its Welcome. number: of
    the change.
    """

    adapters: AdapterRefs
    number: Count = 0
    records: AdapterRecords = ()


class AreAdaptersKnown(Struct, array_like=True, frozen=True, tag=tags.ARE_ADAPTERS_KNOWN):
    """The worker and its clients have taken in the ServedAdapters of this number."""

    number: Count
