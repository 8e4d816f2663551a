"""Messages between client and worker; PROTOCOL.md documents them for third-party clients."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta, Struct

from slipstream_ipc.messages import tags
from slipstream_ipc.messages.adapters import (
    AdapterChanged,
    AdapterList,
    ChangeAdapter,
    KnowsAdapters,
)
from slipstream_ipc.messages.answer import AnswerEvent
from slipstream_ipc.messages.fields import (
    MAX_CANCELLED,
    MAX_CHAT_TURNS,
    U32,
    U64,
    CancelledState,
    Count,
    Identity,
    LeftOut,
    StreamId,
    TurnChanges,
)
from slipstream_ipc.messages.handshake import (
    AttachRefused,
    Hello,
    Ping,
    Reattach,
    Starting,
    Welcome,
)
from slipstream_ipc.messages.kept import KeptAnswer
from slipstream_ipc.messages.media import MAX_MEDIA_ITEMS, MediaSize
from slipstream_ipc.messages.pooling import Embed, Embedded
from slipstream_ipc.messages.replica import Inspect, Inspected, Load, Locate, Located
from slipstream_ipc.messages.request import ChatMessage, Submit, TemplateOptions
from slipstream_ipc.messages.shared import End, Fault, LogprobColumns

# ---- client -> worker ----------------------------------------------------------------------


class Resume(Struct, array_like=True, frozen=True, tag=tags.RESUME):
    """Continue a stream from where the reader's copy ends; its previous reader is superseded."""

    handle: U32
    stream_id: StreamId
    num_chars: Count
    num_tokens: U32
    digest: U64 | None = None  # `history_digest` of the reader's tokens; None: it did not keep them
    checksum: U32 | None = None  # `history_checksum` of them; None: not computed
    scope: Identity = b""  # of the stream; one of another scope is unknown
    moves: U32 = 0  # a stream that has changed its replica less often is unknown


class Abort(Struct, array_like=True, frozen=True, tag=tags.ABORT):
    """End a stream now. Ignored unless sent by the stream's reader."""

    stream_id: StreamId
    handle: U32 | None = None  # the sender's handle of the stream
    has_moved: bool = False  # it goes on at another replica: forget it, as if it had never been


class Goodbye(Struct, array_like=True, frozen=True, tag=tags.GOODBYE):
    """The client leaves for good: abort and forget its streams."""


class Tokenize(Struct, array_like=True, frozen=True, tag=tags.TOKENIZE):
    """Request the token ids that `text` or `messages` would have as a prompt in a Submit.

    `number` is chosen by the client and repeated in the Tokenized that answers. After an attach,
    unanswered queries are sent again.
    """

    number: U32
    text: str | None = None
    messages: Annotated[tuple[ChatMessage, ...], Meta(max_length=MAX_CHAT_TURNS)] = ()
    template: TemplateOptions = TemplateOptions()
    add_special_tokens: bool | None = None  # None: added to a text, not to messages
    with_strings: bool = False  # also return each token as the vocabulary spells it
    tenant: Identity = b""  # whose turn it takes; empty: the client's
    # of the images that `messages` name: sizes are all that the tokens depend on
    media: Annotated[tuple[MediaSize, ...], Meta(max_length=MAX_MEDIA_ITEMS)] = ()


class Detokenize(Struct, array_like=True, frozen=True, tag=tags.DETOKENIZE):
    """Request the text of token ids, a u32 column."""

    number: U32
    token_ids: bytes
    skip_special_tokens: bool = False
    tenant: Identity = b""  # as in Tokenize


class Cancel(Struct, array_like=True, frozen=True, tag=tags.CANCEL):
    """End streams by id, whichever client reads them; those of another scope are unknown."""

    number: U32
    stream_ids: Annotated[tuple[StreamId, ...], Meta(max_length=MAX_CANCELLED)]
    scope: Identity = b""


class Recall(Struct, array_like=True, frozen=True, tag=tags.RECALL):
    """Request the kept answer of a stream, or of one that still runs and is to be kept.

    scope: the one in the stream's `KeepOptions`. forget: keep it no longer; a stream that still
    runs is ended.
    """

    number: U32
    stream_id: StreamId
    scope: Identity = b""
    forget: bool = False


# ---- worker -> client ----------------------------------------------------------------------


class Accepted(Struct, array_like=True, frozen=True, tag=tags.ACCEPTED):
    """The stream was accepted; `prompt_ids` are the token ids of its prompt, a column.

    changed_turns: what was done to a chat's turns so that the model's template takes them.
    left_out: paths of keywords of the request's schemas that cannot be enforced, and are not.
    adapter_digest: of the adapter that the stream began with, whichever its client knew.
    """

    handle: U32
    prompt_ids: bytes
    changed_turns: TurnChanges = ()
    left_out: LeftOut = ()
    adapter_digest: Identity = b""


class Rejected(Struct, array_like=True, frozen=True, tag=tags.REJECTED):
    """The stream was not accepted, or what was asked of it cannot be done.

    is_leaving: only because the server is stopping; another one may take over its address.
    """

    handle: U32
    fault: Fault
    is_leaving: bool = False


class Deltas(Struct, array_like=True, gc=False, frozen=True, tag=tags.DELTAS):
    """New text and tokens of a client's streams; an entry is a delta of one stream.

    An entry of a stream that is read as events has its kind in `kinds`, where its text is one event
    of that kind, or else is listed in `event_entries`.
    """

    handles: bytes
    chars: bytes  # characters of the stream before the entry's text
    tokens: bytes  # tokens of the stream before the entry's ids
    texts: list[str]
    token_ids: bytes
    counts: bytes = b""  # ids per entry; empty: one each
    ended: bytes = b""  # indices of entries that are their stream's last, ascending
    ends: tuple[End, ...] = ()  # one per index in `ended`
    logprobs: LogprobColumns | None = None
    # per entry: kind (an EventKind) and, from bit 8 on, call; 0: not one event, or text alone
    kinds: bytes = b""  # empty: all 0
    event_entries: bytes = b""  # indices of entries with events of their own, ascending
    events: tuple[tuple[AnswerEvent, ...], ...] = ()  # for each of those; may be empty


class UnknownStreams(Struct, array_like=True, frozen=True, tag=tags.UNKNOWN_STREAMS):
    """Resumed streams that the worker does not have."""

    handles: Annotated[tuple[U32, ...], Meta(max_length=2**20)]


class Superseded(Struct, array_like=True, frozen=True, tag=tags.SUPERSEDED):
    """Another reader has taken over this stream; no more of it is sent to this one."""

    handle: U32


class PromptLogprobs(Struct, array_like=True, gc=False, frozen=True, tag=tags.PROMPT_LOGPROBS):
    """Log-probabilities of a stream's prompt, in pieces, all of them before its first delta.

    The prompt's first token has none, so `start` counts from its second one. After each Accepted
    they are sent again, from 0 on.
    """

    handle: U32
    start: U32  # tokens in the pieces before this one
    logprobs: LogprobColumns  # one entry, with the prompt's tokens instead of sampled ones


class Tokenized(Struct, array_like=True, frozen=True, tag=tags.TOKENIZED):
    """Answers a Tokenize: the ids or a fault. `strings`: one per id, if `with_strings`.

    changed_turns: as in Accepted.
    """

    number: U32
    token_ids: bytes = b""
    strings: tuple[str, ...] = ()
    fault: Fault | None = None
    changed_turns: TurnChanges = ()


class Detokenized(Struct, array_like=True, frozen=True, tag=tags.DETOKENIZED):
    """Answers a Detokenize."""

    number: U32
    text: str = ""
    fault: Fault | None = None


class Cancelled(Struct, array_like=True, frozen=True, tag=tags.CANCELLED):
    """Answers a Cancel: the state in which each stream was found, in the order of its ids."""

    number: U32
    found: Annotated[tuple[CancelledState, ...], Meta(max_length=MAX_CANCELLED)]


class Recalled(Struct, array_like=True, frozen=True, tag=tags.RECALLED):
    """Answers a Recall: what is kept, as it was before it was forgotten; None: nothing is."""

    number: U32
    answer: KeptAnswer | None = None
    fault: Fault | None = None


ClientToWorker = (
    Hello
    | Ping
    | Submit
    | Resume
    | Abort
    | Goodbye
    | Tokenize
    | Detokenize
    | Cancel
    | Recall
    | Locate
    | Inspect
    | ChangeAdapter
    | KnowsAdapters
    | Embed
)
WorkerToClient = (
    Welcome
    | Reattach
    | AttachRefused
    | Ping
    | Starting
    | Accepted
    | Rejected
    | Deltas
    | UnknownStreams
    | Superseded
    | PromptLogprobs
    | Tokenized
    | Detokenized
    | Cancelled
    | Recalled
    | Located
    | Inspected
    | Load
    | AdapterChanged
    | AdapterList
    | Embedded
)
