"""Types shared by the messages of several hops, and the frame around each message."""

from __future__ import annotations

from typing import Annotated, Generic, TypeVar

from msgspec import Meta, Struct

from slipstream_ipc.messages.fields import (
    MAX_TRACE_STATE_CHARS,
    U32,
    U64,
    ErrorCode,
    FinishReason,
    Label,
    LongText,
)

Body = TypeVar("Body")


class Frame(Struct, Generic[Body], array_like=True, gc=False, frozen=True):
    """The envelope of every message; `slipstream_ipc.transport.link` defines its numbers."""

    epoch: U64
    seq: U64
    ack: U64
    body: Body | None = None  # None is a bare acknowledgement


class Fault(Struct, array_like=True, frozen=True):
    """An error: its code, a message for people, and the field of the request it is about.

    Of a request that does not fit the model, also tokens: those of the prompt (at least), of the
    answer that it asks for (0 where the prompt alone is too long), and how many there may be.
    """

    code: ErrorCode
    message: LongText
    field: Label | None = None
    num_prompt_tokens: U32 = 0
    num_answer_tokens: U32 = 0
    max_num_tokens: U32 = 0


class TraceContext(Struct, array_like=True, frozen=True):
    """A request's place in its caller's trace, as W3C's `traceparent` and `tracestate` have it.

    trace_id: 16 bytes. parent_id: 8 bytes, the caller's span; empty if the request begins the
    trace. flags: bit 0 says that the caller records the trace.
    """

    trace_id: Annotated[bytes, Meta(max_length=16)]
    parent_id: Annotated[bytes, Meta(max_length=8)] = b""
    flags: Annotated[int, Meta(ge=0, le=255)] = 1
    state: Annotated[str, Meta(max_length=MAX_TRACE_STATE_CHARS)] = ""


REPETITION_DETECTED = "repetition_detected"  # vLLM's word


class End(Struct, array_like=True, frozen=True):
    """The end of a stream. Every accepted stream gets exactly one."""

    reason: FinishReason
    num_tokens: U32  # output tokens kept
    # the stop id or string that ended it, None for EOS; REPETITION_DETECTED of a repetition
    stop_reason: int | str | None = None
    fault: Fault | None = None
    num_cached_tokens: U32 = 0  # of the prompt, found in the cache when it was first computed
    num_reasoning_tokens: U32 = 0  # of the answer, between the delimiters of its reasoning
    # of the prediction, where answers are drafted: tokens that came as foreseen, and the others
    num_accepted_prediction_tokens: U32 = 0
    num_rejected_prediction_tokens: U32 = 0


class LogprobColumns(Struct, array_like=True, gc=False, frozen=True):
    """Log-probabilities of all tokens of a batch, in its order; the first of a token is its own.

    `widths` is empty if all entries of the batch have `width` values per token.
    """

    width: U32
    values: bytes  # f32
    ids: bytes
    ranks: bytes  # one per token that has values; 1 is the most likely
    widths: bytes = b""  # one per entry of the batch
