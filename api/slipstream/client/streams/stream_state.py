"""One stream of a client, between its reader and its connection.

A reader pops from `deltas` and hangs its wakeup up; all else is the connection's to write. The
reader looks at `is_over` before it finds no more deltas.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from msgspec.structs import replace

from slipstream.client.streams.wakeup import Wakeup
from slipstream.delta_batch import DeltaBatch
from slipstream.errors import SlipstreamError
from slipstream.outputs import Delta
from slipstream.prompt_logprobs import PromptPieces
from slipstream_ipc.messages import End, Resume, Submit


@dataclass(eq=False, slots=True, weakref_slot=True)
class StreamState:
    """One stream, between its reader and its connection.

    push: takes the stream's next delta; it appends to `deltas`, or to the queue of the group that
    reads the stream. resubmittable: what the stream is submitted as where the server no longer has
    it; None where that is not known.
    """

    request: Submit | Resume  # as it was asked for at first
    wants_whole: bool  # the reader is woken by the end alone
    submitted_at: float = 0.0
    deltas: deque[Delta] = field(default_factory=deque)  # unread; merged while nothing reads them
    push: Callable[[Delta], None] = field(init=False)
    wakeup: Wakeup[StreamState] | None = None  # hangs here while the reader waits
    prompt_ids: bytes | None = None  # u32; None until the stream is accepted
    prompt_logprobs: PromptPieces | None = None  # where they were asked for; whole before a delta
    end: End | None = None
    error: SlipstreamError | None = None
    is_over: bool = False
    handle: int = -1
    num_chars: int = 0  # received, once the stream is over; until then the table knows
    num_tokens: int = 0
    gap_at: tuple[int, int] = (-1, -1)  # where a part was missing last
    num_gaps: int = 0  # how often in a row there
    was_sent: bool = False  # the server may know of it
    was_resubmitted: bool = False  # over this attach
    is_abort_wanted: bool = False
    group: GroupMember | None = None  # which reads it, with others
    index: int = 0  # in the group
    resubmittable: Submit | None = None

    def __post_init__(self) -> None:
        self.push = self.deltas.append
        if isinstance(self.request, Submit):
            self.resubmittable = self.request

    def ask_for(self, tenant: bytes) -> None:
        """Whoever submits it does so for this tenant."""
        if self.resubmittable is not None:
            is_first = self.request is self.resubmittable
            self.resubmittable = replace(self.resubmittable, tenant=tenant)
            if is_first:
                self.request = self.resubmittable

    @property
    def stream_id(self) -> bytes:
        """128 bits; who knows them can read the stream and end it."""
        return self.request.stream_id


class StreamsByNumber(Protocol):
    """A list or a dict of streams."""

    def __getitem__(self, number: int, /) -> StreamState: ...


class GroupMember(Protocol):
    """Streams that are handed a message together, where it has nothing but streams of theirs.

    group: the table's number for it. num_open: its streams that are not over.
    """

    group_id: int
    num_open: int

    @property
    def states(self) -> StreamsByNumber:
        """Those not over, by `StreamState.index`."""

    def add_batch(self, indices: Sequence[int], batch: DeltaBatch) -> None:
        """A message whose entries are these streams'. The wakeup of the first one rings for all,
        before those of the streams that end with it. The same list means the same streams.
        """

    def divide(self) -> None:
        """The next delta comes to its stream alone: what was added since a wakeup rang for it goes
        to the streams' own queues.
        """

    def release(self, state: StreamState) -> None:
        """A stream of it is over."""
