"""The state of one stream, shared by its reader and its connection.

The reader pops from `deltas` and sets `wakeup`; only the connection writes the rest. The reader
reads `is_over` before it concludes from an empty `deltas` that the stream has ended.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

from msgspec.structs import replace

from slipstream.client.streams.wakeup import Wakeup
from slipstream.delta_batch import DeltaBatch
from slipstream.errors import SlipstreamError
from slipstream.outputs import Delta
from slipstream.prompt_logprobs import PromptPieces
from slipstream_ipc.messages import End, Resume, Submit, TraceContext, TurnChanges
from slipstream_ipc.validation.request_spec import among_own


@dataclass(eq=False, slots=True, weakref_slot=True)
class StreamState:
    """One stream, shared by its reader and its connection.

    push: appends the stream's next delta to `deltas`, or to the queue of the group that reads the
    stream. resubmittable: the Submit that starts the stream again where the server no longer has
    it; None where it is not known. where: the prompt's name in errors, where a call has several.
    prompt_cache_key: requests of one key prefer one replica; empty for none. model: the name of the
    one that computes it; empty: the only one, or that of a resumed stream, which is not known yet.
    """

    request: Submit | Resume  # the original request
    wants_whole: bool  # only the end of the stream wakes the reader
    submitted_at: float = 0.0
    deltas: deque[Delta] = field(default_factory=deque)  # unread; merged while nothing reads them
    push: Callable[[Delta], None] = field(init=False)
    wakeup: Wakeup[StreamState] | None = None  # set while the reader waits
    prompt_ids: bytes | None = None  # u32; None until the stream is accepted
    prompt_len: int = 0  # tokens; set with `prompt_ids`
    keeps_prompt_ids: bool = True  # else they are empty once it is accepted
    changed_turns: TurnChanges = ()  # of the prompt; set with `prompt_ids`
    left_out: tuple[str, ...] = ()  # keywords of its schemas that are not enforced
    was_accepted: bool = False  # for an earlier reader, whose place this one takes
    prompt_logprobs: PromptPieces | None = None  # where requested; complete before the first delta
    end: End | None = None
    error: SlipstreamError | None = None
    is_over: bool = False
    handle: int = -1
    worker: int = 0  # the index of the worker that it is dealt to
    num_chars: int = 0  # received; set when the stream is over, the table counts until then
    num_tokens: int = 0
    gap_at: tuple[int, int] = (-1, -1)  # the position of the last gap
    num_gaps: int = 0  # consecutive gaps at that position
    was_sent: bool = False  # the server may know the stream
    was_resubmitted: bool = False  # during the current attach
    is_abort_wanted: bool = False
    awaits_acceptance: bool = False  # the reader waits for `prompt_ids`, which wakes it then
    group: GroupMember | None = None  # the group that the stream is read in
    index: int = 0  # in the group
    resubmittable: Submit | None = None
    member: int = -1  # of a fleet, that the stream is at; -1: at none
    moves: int = 0  # between the members of a fleet
    strikes: int = 0  # cores of other members that crashed while they ran it
    where: str = ""
    prompt_cache_key: str = ""
    model: str = ""

    def __post_init__(self) -> None:
        self.push = self.deltas.append
        if isinstance(self.request, Submit):
            self.resubmittable = self.request

    def set_origin(
        self, tenant: bytes, label: str, trace: TraceContext | None, *, has_priority: bool = True
    ) -> None:
        """Set on whose behalf the request is made, its name in logs, and its trace.

        A stream of a tenant's is for that tenant alone to read and to end. has_priority: whether
        its priority counts among all tenants' requests, else among its own.
        """
        if self.resubmittable is not None:
            is_first = self.request is self.resubmittable
            self.resubmittable = replace(
                self.resubmittable, tenant=tenant, label=label, trace=trace, scope=tenant
            )
            if not has_priority:
                self.resubmittable = among_own(self.resubmittable)
            if is_first:
                self.request = self.resubmittable
        if isinstance(self.request, Resume):
            self.request = replace(self.request, scope=tenant)

    def drop_deltas(self) -> None:
        """Drop unread deltas, and those that arrive from now on. From the reader's thread, for a
        stream that is in no group.
        """
        self.deltas = deque(maxlen=0)
        self.push = self.deltas.append

    @property
    def stream_id(self) -> bytes:
        """128 bits. A secret: with it, any client can read and end a stream without a scope."""
        return self.request.stream_id


class StreamsByNumber(Protocol):
    """A list or a dict of streams."""

    def __getitem__(self, number: int, /) -> StreamState: ...


class GroupMember(Protocol):
    """A group of streams that takes a message as a whole, if all its entries belong to the group.

    group_id: set by a stream table.
    """

    group_id: int

    @property
    def states(self) -> StreamsByNumber:
        """The streams by `StreamState.index`, those that are not over at least."""

    def add_batch(self, indices: list[int], batch: DeltaBatch) -> None:
        """Add a message whose entries belong to the streams at `indices`.

        The wakeup of the first stream, which it has from the beginning, rings for all of them,
        before the wakeups of streams that end with this message. The same list object means the
        same streams.
        """

    def divide(self) -> None:
        """Move the batches added since the last wakeup to the streams' own queues, as the next
        delta goes to its stream alone.
        """

    def release(self, state: StreamState) -> None:
        """Note that a stream of the group is over."""
