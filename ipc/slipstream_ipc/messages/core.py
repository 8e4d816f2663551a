"""Messages between worker and core."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta, Struct

from slipstream_ipc.messages import tags
from slipstream_ipc.messages.adapters import (
    AdapterChange,
    AdapterOutcome,
    AreAdaptersKnown,
    ServedAdapters,
)
from slipstream_ipc.messages.answer import AnswerSettings, ReasoningIds
from slipstream_ipc.messages.fields import (
    I64,
    MAX_OTHERS,
    U32,
    Count,
    Identity,
    Label,
    LeftOut,
    StopIds,
    StreamId,
    StreamIds,
    TurnChanges,
)
from slipstream_ipc.messages.grammar import MAX_FRAME_CHARS
from slipstream_ipc.messages.handshake import AttachRefused, Hello, Ping, Reattach, Welcome
from slipstream_ipc.messages.media import Media
from slipstream_ipc.messages.pooling import DropPool, Pool, Pooled
from slipstream_ipc.messages.replica import Gauge
from slipstream_ipc.messages.request import RequestSpec
from slipstream_ipc.messages.shared import End, Fault, LogprobColumns

# ---- worker -> core ------------------------------------------------------------------------


class Derived(Struct, array_like=True, frozen=True):
    """Settings of a stream that a worker derives from its request and from the served model."""

    seed: I64
    max_tokens: U32
    stop_token_ids: StopIds = ()  # every id that ends the stream, the model's EOS ids included
    fingerprint: Identity = b""  # of the submission; identifies a late duplicate
    # `root_digest`: only requests with an equal one share cached blocks
    prefix_root: Identity = b""
    bad_word_ids: bytes = b""  # the token ids of `params.bad_words`, concatenated
    bad_word_counts: bytes = b""  # tokens per word
    answer: AnswerSettings | None = None  # None: the answer is text alone
    # None: a grammar applies to the whole answer, and there is no budget for reasoning
    reasoning: ReasoningIds | None = None
    # a grammar of the whole answer, in which FRAMED stands for the spec's structured outputs;
    # empty: these are of all that they apply to
    frame: Annotated[str, Meta(max_length=MAX_FRAME_CHARS)] = ""
    changed_turns: TurnChanges = ()  # of the prompt; a core does not read it
    left_out: LeftOut = ()  # paths of keywords of its schemas that its grammar lacks
    prediction_ids: bytes = b""  # of the Submit's prediction, where answers are drafted


class RequestTimes(Struct, array_like=True, frozen=True):
    """The beginning of a traced request. Times: CLOCK_MONOTONIC, s."""

    operation: Label  # gen_ai.operation.name
    arrived_s: float
    rendered_s: float = 0.0  # when its prompt was tokenised
    is_resubmitted: bool = False  # it has been accepted before, and lost


class Begun(Struct, array_like=True, frozen=True):
    """The state of a stream when it is registered: its reader, and all that was streamed."""

    output_ids: bytes = b""
    # one entry for the last of `output_ids`; earlier ones were delivered before a resubmission
    logprobs: LogprobColumns | None = None
    # one entry for the prompt without its first token; None: not requested, or not yet computed
    prompt_logprobs: LogprobColumns | None = None
    # of the prompt, found in the cache when it was first computed; None: not computed yet
    num_cached_tokens: U32 | None = None
    was_accepted: bool = False  # exempts it from the bound on waiting requests
    strikes: U32 = 0  # crashes of cores that were running it, without progress in between
    owner: Identity = b""  # of the client that reads it
    handle: U32 = 0  # the client's handle of the stream
    moves: U32 = 0  # of the Submit: registrations of one id with other moves are other streams
    times: RequestTimes | None = None  # None unless it is traced


class OtherAdmit(Struct, array_like=True, frozen=True):
    """A registration that differs from the Admit that carries it in these fields only. `begun` is
    without the prompt's log-probabilities, which are those of the Admit.
    """

    stream_id: StreamId
    seed: I64
    fingerprint: Identity
    begun: Begun


class Admit(Struct, array_like=True, frozen=True, tag=tags.ADMIT):
    """A stream's complete registration: a core can start or continue the stream from it alone.

    others: further registrations with the same prompt; empty when nested in another message.
    media: of the Submit; none once the stream has ended.
    """

    stream_id: StreamId
    prompt_ids: bytes
    spec: RequestSpec
    derived: Derived
    begun: Begun = Begun()
    others: Annotated[tuple[OtherAdmit, ...], Meta(max_length=MAX_OTHERS)] = ()
    media: Media = ()


class Report(Struct, array_like=True, gc=False, frozen=True, tag=tags.REPORT):
    """The worker has processed everything up to `step`; `rows` end with `num_tokens` outputs."""

    step: Count
    rows: bytes = b""
    num_tokens: bytes = b""


class Withdraw(Struct, array_like=True, frozen=True, tag=tags.WITHDRAW):
    """End a stream for a reason that its tokens do not show (abort, fault)."""

    stream_id: StreamId
    end: End


class Forget(Struct, array_like=True, frozen=True, tag=tags.FORGET):
    """These ended streams are no longer kept for a reader.

    has_been: they expired after their retention, and must not run again.
    moves: of each, a u32 column; empty: 0.
    """

    stream_ids: StreamIds
    has_been: bool = False
    moves: bytes = b""


class Positions(Struct, array_like=True, frozen=True, tag=tags.POSITIONS):
    """After an attach: the streams that the worker has and how far. `last`: no more follow."""

    stream_ids: StreamIds
    lengths: bytes  # output tokens
    digests: bytes  # u64, `history_digest` of those tokens
    last: bool


class KeptEntry(Struct, array_like=True, frozen=True):
    """A kept answer, encoded; a core does not read it."""

    stream_id: StreamId
    scope: Identity
    answer: bytes


class Keep(Struct, array_like=True, frozen=True, tag=tags.KEEP):
    """Hold these answers for the worker's successor."""

    entries: Annotated[tuple[KeptEntry, ...], Meta(max_length=2**20)]


class DropKept(Struct, array_like=True, frozen=True, tag=tags.DROP_KEPT):
    """These answers are not kept, or no longer."""

    stream_ids: StreamIds


class KeptIds(Struct, array_like=True, frozen=True, tag=tags.KEPT_IDS):
    """After an attach, ahead of the positions: the answers that the worker keeps, and the streams
    whose answers it is going to. is_complete: it has been sent all that the core held for it.
    """

    stream_ids: StreamIds
    owed: StreamIds
    is_complete: bool


# ---- core -> worker ------------------------------------------------------------------------


class Admitted(Struct, array_like=True, frozen=True, tag=tags.ADMITTED):
    """The stream is admitted; later columns refer to it by this row.

    Said again, ahead of any token, where some of the prompt was found in the cache.
    """

    stream_id: StreamId
    row: U32
    num_cached_tokens: U32 = 0  # 0 also while the prompt is not computed
    moves: U32 = 0  # of the registration, as in the messages below
    left_out: LeftOut = ()  # as in Admit


class Registered(Struct, array_like=True, frozen=True, tag=tags.REGISTERED):
    """Replays a stream to a worker that does not have it; Steps bring its tokens."""

    row: U32
    registration: Admit
    end: End | None = None  # set if it ended for a reason that its tokens do not show
    is_over: bool = False  # a worker has reported its end, for whatever reason


class AdmissionRefused(Struct, array_like=True, frozen=True, tag=tags.ADMISSION_REFUSED):
    """The core did not admit the stream, or had to end it."""

    stream_id: StreamId
    fault: Fault
    moves: U32 = 0


class Step(Struct, array_like=True, gc=False, frozen=True, tag=tags.STEP):
    """New tokens by row: those between the worker's cursor and the end of the history."""

    step: Count  # with this message, everything sampled up to this step has been sent
    rows: bytes
    token_ids: bytes
    counts: bytes = b""  # tokens per row; empty: one each
    starts: bytes = b""  # positions in the history, prompt included; present if counts are
    logprobs: LogprobColumns | None = None
    is_awaited: bool = True  # whether a report is due even if nothing ended


class FirstToken(Struct, array_like=True, frozen=True, tag=tags.FIRST_TOKEN):
    """The times at which a traced stream was first in a step, and at which its first token was
    known.

    CLOCK_MONOTONIC, s. Sent ahead of the token, and again after each attach.
    """

    stream_id: StreamId
    scheduled_s: float
    sampled_s: float


class UnknownToCore(Struct, array_like=True, frozen=True, tag=tags.UNKNOWN_TO_CORE):
    """Streams in the worker's Positions that the core does not have."""

    stream_ids: StreamIds


class SyncDone(Struct, array_like=True, frozen=True, tag=tags.SYNC_DONE):
    """Every registration that this attach requires has been sent."""


class Suspects(Struct, array_like=True, frozen=True, tag=tags.SUSPECTS):
    """Streams in the step that was running when this core's predecessor crashed.

    Sent once after each Welcome; `incarnation` is this core's, so that a crash is counted once.
    """

    incarnation: Count
    stream_ids: StreamIds
    # CLOCK_MONOTONIC
    predecessor_ended_s: float = 0.0  # 0.0: there was none
    serves_since_s: float = 0.0  # when this core could be attached to


class ComputedPromptLogprobs(
    Struct, array_like=True, gc=False, frozen=True, tag=tags.COMPUTED_PROMPT_LOGPROBS
):
    """Log-probabilities of a stream's prompt, in pieces, all of them before its first token.

    `start` counts from the prompt's second token; after an attach they are sent again from 0 on.
    """

    stream_id: StreamId
    start: U32
    logprobs: LogprobColumns
    moves: U32 = 0


class Kept(Struct, array_like=True, frozen=True, tag=tags.KEPT):
    """Answers that the core holds for a worker that does not have them. last: there are no more.

    They follow SyncDone, beside the steps.
    """

    entries: Annotated[tuple[KeptEntry, ...], Meta(max_length=2**20)]
    last: bool


class UnknownKept(Struct, array_like=True, frozen=True, tag=tags.UNKNOWN_KEPT):
    """The core does not hold these answers."""

    stream_ids: StreamIds


class Forgotten(Struct, array_like=True, frozen=True, tag=tags.FORGOTTEN):
    """The latest streams that must not run again, for a worker that knows of none.

    moves: of each, a u32 column; empty: 0.
    """

    stream_ids: StreamIds
    moves: bytes = b""


WorkerToCore = (
    Hello
    | Ping
    | Admit
    | Report
    | Withdraw
    | Forget
    | Positions
    | Keep
    | DropKept
    | KeptIds
    | AdapterChange
    | AreAdaptersKnown
    | Pool
    | DropPool
)
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
    | FirstToken
    | Kept
    | UnknownKept
    | Gauge
    | AdapterOutcome
    | ServedAdapters
    | Pooled
)
