"""What client and worker say to each other; PROTOCOL.md describes it for other people's clients."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta, Raw, Struct

from slipstream_ipc.messages import tags
from slipstream_ipc.messages.fields import (
    I64,
    MAX_CANCELLED,
    MAX_CHAT_TURNS,
    MAX_OTHERS,
    U32,
    U64,
    CancelledState,
    Count,
    Identity,
    LongText,
    StreamId,
)
from slipstream_ipc.messages.handshake import (
    AttachRefused,
    Hello,
    Ping,
    Reattach,
    Starting,
    Welcome,
)
from slipstream_ipc.messages.request import ChatMessage, TemplateOptions
from slipstream_ipc.messages.shared import End, Fault, LogprobColumns

# ---- client -> worker ----------------------------------------------------------------------


class OtherAnswer(Struct, array_like=True, frozen=True):
    """A stream that differs from the Submit which asks for it in no more than this."""

    handle: U32
    stream_id: StreamId
    seed: I64 | None = None


class Submit(Struct, array_like=True, frozen=True, tag=tags.SUBMIT):
    """Ask for a stream. One of `text`, `token_ids`, `messages` is the prompt.

    A stream that was accepted once, and that worker and core have both lost, is asked for again
    with what its reader has of it: `output_ids`, whose text is `num_chars` long. A reader that has
    not kept the ids states `num_tokens` and their `checksum`: the stream is computed from its
    beginning, and sent from there on.

    Several answers to a prompt are asked for at once, so that it travels once: `others` are streams
    of their own from there on, each of which its own Submit may ask for again.
    """

    handle: U32  # the client's number for the stream within this session
    stream_id: StreamId
    params: Raw  # a SamplingParams map, decoded apart so that its errors find their caller
    text: str | None = None
    token_ids: bytes = b""
    messages: Annotated[tuple[ChatMessage, ...], Meta(max_length=MAX_CHAT_TURNS)] = ()
    # the next two are held against narrower limits later, where an error finds its one request
    label: LongText = ""  # the user's own name for it; grants nothing
    priority: int = 0  # lower runs first
    was_accepted: bool = False  # so it passes the bound on waiting requests
    output_ids: bytes = b""
    num_chars: Count = 0
    cache_salt: LongText = ""  # cached blocks are shared only among requests with the same
    template: TemplateOptions = TemplateOptions()  # of `messages`
    num_tokens: U32 = 0  # that the reader has, where `output_ids` does not hold them
    checksum: U32 | None = None  # `history_checksum` of those
    seed: I64 | None = None  # in the place of the one in `params`
    others: Annotated[tuple[OtherAnswer, ...], Meta(max_length=MAX_OTHERS)] = ()
    tenant: Identity = b""  # for whom it is asked; by default for the client itself


class Resume(Struct, array_like=True, frozen=True, tag=tags.RESUME):
    """Go on with a stream from where the reader's copy ends; its reader so far is superseded."""

    handle: U32
    stream_id: StreamId
    num_chars: Count
    num_tokens: U32
    digest: U64 | None = None  # `history_digest` of the tokens it has; None: it did not keep them
    checksum: U32 | None = None  # `history_checksum` of them; None: it has none


class Abort(Struct, array_like=True, frozen=True, tag=tags.ABORT):
    """End a stream now. Counts only from the stream's reader."""

    stream_id: StreamId
    handle: U32 | None = None  # under which the sender reads it


class Goodbye(Struct, array_like=True, frozen=True, tag=tags.GOODBYE):
    """The client leaves for good: abort and forget what is its own."""


class Tokenize(Struct, array_like=True, frozen=True, tag=tags.TOKENIZE):
    """Ask for the token ids of `text`, or of `messages`, as a Submit with them would have.

    `number` is the client's for the question; Tokenized has the same. Where an attach comes in
    between, it is asked again.
    """

    number: U32
    text: str | None = None
    messages: Annotated[tuple[ChatMessage, ...], Meta(max_length=MAX_CHAT_TURNS)] = ()
    template: TemplateOptions = TemplateOptions()
    add_special_tokens: bool | None = None  # None: to a text, not to messages
    with_strings: bool = False  # each token as the vocabulary spells it, too


class Detokenize(Struct, array_like=True, frozen=True, tag=tags.DETOKENIZE):
    """Ask for the text of token ids, a u32 column."""

    number: U32
    token_ids: bytes
    skip_special_tokens: bool = False


class Cancel(Struct, array_like=True, frozen=True, tag=tags.CANCEL):
    """End streams, whoever reads them: who knows a stream's id may."""

    number: U32
    stream_ids: Annotated[tuple[StreamId, ...], Meta(max_length=MAX_CANCELLED)]


# ---- worker -> client ----------------------------------------------------------------------


class Accepted(Struct, array_like=True, frozen=True, tag=tags.ACCEPTED):
    """The stream runs; its prompt has this many tokens."""

    handle: U32
    prompt_ids: bytes


class Rejected(Struct, array_like=True, frozen=True, tag=tags.REJECTED):
    """The stream was never accepted, or what was asked of it cannot be done.

    is_leaving: it would be, but the server stops; another may come to its address.
    """

    handle: U32
    fault: Fault
    is_leaving: bool = False


class Deltas(Struct, array_like=True, gc=False, frozen=True, tag=tags.DELTAS):
    """What is new of a client's streams. Entry i begins at `chars[i]` and `tokens[i]`."""

    handles: bytes
    chars: bytes  # characters before this entry's text
    tokens: bytes  # tokens before this entry's ids
    texts: list[str]
    token_ids: bytes
    counts: bytes = b""  # ids to an entry; empty: one each
    ended: bytes = b""  # indices of entries that are their stream's last
    ends: tuple[End, ...] = ()  # one to an index in `ended`
    logprobs: LogprobColumns | None = None


class UnknownStreams(Struct, array_like=True, frozen=True, tag=tags.UNKNOWN_STREAMS):
    """Resumed streams that the worker knows nothing of."""

    handles: Annotated[tuple[U32, ...], Meta(max_length=2**20)]


class Superseded(Struct, array_like=True, frozen=True, tag=tags.SUPERSEDED):
    """Another reader has taken this stream over; nothing more of it comes here."""

    handle: U32


class PromptLogprobs(Struct, array_like=True, gc=False, frozen=True, tag=tags.PROMPT_LOGPROBS):
    """Log-probabilities of a stream's prompt, in pieces, all of them before its first delta.

    The prompt's first token has none, so `start` counts from its second one. They are said anew,
    from 0 on, behind each Accepted.
    """

    handle: U32
    start: U32  # tokens that pieces before have brought
    logprobs: LogprobColumns  # of one entry, a token of the prompt in the place of a sampled one


class Tokenized(Struct, array_like=True, frozen=True, tag=tags.TOKENIZED):
    """Answers a Tokenize: the ids, or why there are none. `strings`: one to an id, if asked for."""

    number: U32
    token_ids: bytes = b""
    strings: tuple[str, ...] = ()
    fault: Fault | None = None


class Detokenized(Struct, array_like=True, frozen=True, tag=tags.DETOKENIZED):
    """Answers a Detokenize."""

    number: U32
    text: str = ""
    fault: Fault | None = None


class Cancelled(Struct, array_like=True, frozen=True, tag=tags.CANCELLED):
    """Answers a Cancel: what it found, one to an id."""

    number: U32
    found: Annotated[tuple[CancelledState, ...], Meta(max_length=MAX_CANCELLED)]


ClientToWorker = Hello | Ping | Submit | Resume | Abort | Goodbye | Tokenize | Detokenize | Cancel
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
)
