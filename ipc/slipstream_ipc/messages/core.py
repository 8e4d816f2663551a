"""What worker and core say to each other."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta, Struct

from slipstream_ipc.messages import tags
from slipstream_ipc.messages.fields import (
    I32,
    I64,
    MAX_OTHERS,
    U32,
    Count,
    Identity,
    Label,
    StopIds,
    StreamId,
    StreamIds,
)
from slipstream_ipc.messages.handshake import AttachRefused, Hello, Ping, Reattach, Welcome
from slipstream_ipc.messages.request import SamplingParams
from slipstream_ipc.messages.shared import End, Fault, LogprobColumns

# ---- worker -> core ------------------------------------------------------------------------


class OtherAdmit(Struct, array_like=True, frozen=True):
    """A registration that differs in no more than this from the Admit that it travels with.

    Where `params` have a seed, it is this one.
    """

    stream_id: StreamId
    seed: I64
    handle: U32 = 0
    fingerprint: Identity = b""
    output_ids: bytes = b""
    logprobs: LogprobColumns | None = None
    was_accepted: bool = False
    strikes: U32 = 0


class Admit(Struct, array_like=True, frozen=True, tag=tags.ADMIT):
    """A stream's whole registration: enough to run it, or to go on with it, from nothing.

    others: further registrations with the same prompt; none where it is part of another message.
    """

    stream_id: StreamId
    prompt_ids: bytes
    params: SamplingParams
    stop_token_ids: StopIds  # every id that ends it, the model's own included
    seed: I64
    max_tokens: U32
    output_ids: bytes = b""
    priority: I32 = 0
    label: Label = ""
    owner: Identity = b""  # of the client that reads it
    handle: U32 = 0  # and its number there
    fingerprint: Identity = b""  # of the submission, by which a late duplicate is known
    # of the last of `output_ids`, as one entry; those before were delivered before a resubmission
    logprobs: LogprobColumns | None = None
    was_accepted: bool = False  # it passes the bound on waiting requests
    strikes: U32 = 0  # cores that died from within while they ran it, without progress between
    cache_salt: Label = ""  # cached blocks are shared only among requests with the same
    bad_word_ids: bytes = b""  # what `params.bad_words` are tokenised to, all behind one another
    bad_word_counts: bytes = b""  # tokens of each
    # of the prompt, its first token left out, as one entry; None: not asked for, or yet to compute
    prompt_logprobs: LogprobColumns | None = None
    tenant: Identity = b""  # requests of equal priority run in turns of these
    others: Annotated[tuple[OtherAdmit, ...], Meta(max_length=MAX_OTHERS)] = ()


class Report(Struct, array_like=True, gc=False, frozen=True, tag=tags.REPORT):
    """The worker has checked everything up to `step`; these rows end, cut to so many tokens."""

    step: Count
    rows: bytes = b""
    num_tokens: bytes = b""


class Withdraw(Struct, array_like=True, frozen=True, tag=tags.WITHDRAW):
    """End a stream for a reason that its tokens do not imply (abort, fault)."""

    stream_id: StreamId
    end: End


class Forget(Struct, array_like=True, frozen=True, tag=tags.FORGET):
    """No reader will ask for these ended streams again.

    has_been: they were kept until nobody could want them, and are not to be run again.
    """

    stream_ids: StreamIds
    has_been: bool = False


class Positions(Struct, array_like=True, frozen=True, tag=tags.POSITIONS):
    """After an attach: how much of which streams the worker has. `last`: no more follow."""

    stream_ids: StreamIds
    lengths: bytes  # output tokens
    digests: bytes  # u64, of those tokens
    last: bool


# ---- core -> worker ------------------------------------------------------------------------


class Admitted(Struct, array_like=True, frozen=True, tag=tags.ADMITTED):
    """The stream has this row in the columns to come."""

    stream_id: StreamId
    row: U32


class Registered(Struct, array_like=True, frozen=True, tag=tags.REGISTERED):
    """Replays a stream to a worker that does not know it; its tokens follow as a catch-up."""

    row: U32
    registration: Admit
    end: End | None = None  # where it ended for a reason that its tokens do not imply
    is_over: bool = False  # a worker has told the core of its end, whatever that was


class AdmissionRefused(Struct, array_like=True, frozen=True, tag=tags.ADMISSION_REFUSED):
    """The core did not take the stream, or had to end it."""

    stream_id: StreamId
    fault: Fault


class Step(Struct, array_like=True, gc=False, frozen=True, tag=tags.STEP):
    """New tokens by row: what lies between the worker's cursor and the end of the history."""

    step: Count  # everything sampled up to this step has been sent with this message
    rows: bytes
    token_ids: bytes
    counts: bytes = b""  # tokens to a row; empty: one each
    starts: bytes = b""  # where in the history, prompt included; sent where counts are
    logprobs: LogprobColumns | None = None


class UnknownToCore(Struct, array_like=True, frozen=True, tag=tags.UNKNOWN_TO_CORE):
    """Streams that the worker stated and the core knows nothing of."""

    stream_ids: StreamIds


class SyncDone(Struct, array_like=True, frozen=True, tag=tags.SYNC_DONE):
    """Every registration this attach calls for has been sent."""


class Suspects(Struct, array_like=True, frozen=True, tag=tags.SUSPECTS):
    """Streams in the step that ran when this core's predecessor died from within.

    Said once after each Welcome; `incarnation` is this core's, so that a death counts once.
    """

    incarnation: Count
    stream_ids: StreamIds


class ComputedPromptLogprobs(
    Struct, array_like=True, gc=False, frozen=True, tag=tags.COMPUTED_PROMPT_LOGPROBS
):
    """Log-probabilities of a stream's prompt, in pieces, all of them before its first token.

    `start` counts from the prompt's second token; said anew from 0 on after an attach.
    """

    stream_id: StreamId
    start: U32
    logprobs: LogprobColumns


class Forgotten(Struct, array_like=True, frozen=True, tag=tags.FORGOTTEN):
    """The latest streams that are not to be run again, told to a worker that knows of none."""

    stream_ids: StreamIds


WorkerToCore = Hello | Ping | Admit | Report | Withdraw | Forget | Positions
CoreToWorker = (
    Welcome
    | Reattach
    | AttachRefused
    | Ping
    | Admitted
    | Registered
    | AdmissionRefused
    | Step
    | UnknownToCore
    | SyncDone
    | Suspects
    | ComputedPromptLogprobs
    | Forgotten
)
