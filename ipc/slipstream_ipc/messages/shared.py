"""What messages of several hops are made of, and what all of them are wrapped in."""

from __future__ import annotations

from typing import Annotated, Generic, TypeVar

from msgspec import Meta, Struct

from slipstream_ipc.messages.fields import U32, U64, ErrorCode, FinishReason, Label, LongText

Body = TypeVar("Body")


class Frame(Struct, Generic[Body], array_like=True, gc=False, frozen=True):
    """What every message is wrapped in; `slipstream_ipc.transport.link` gives its numbers their
    meaning."""

    epoch: U64
    seq: U64
    ack: U64
    body: Body | None = None  # None is a bare acknowledgement


class Fault(Struct, array_like=True, frozen=True):
    """What went wrong, and with which field of whose request."""

    code: ErrorCode
    message: LongText
    field: Label | None = None


class End(Struct, array_like=True, frozen=True):
    """How a stream ended. Every accepted stream gets exactly one."""

    reason: FinishReason
    num_tokens: U32  # output tokens kept
    stop_reason: int | str | None = None  # the stop id or string that ended it, None for EOS
    fault: Fault | None = None


class LogprobColumns(Struct, array_like=True, gc=False, frozen=True):
    """Log-probabilities of all tokens of a batch, in its order; a token's first is its own.

    `widths` is empty where all entries of the batch have `width` values to a token.
    """

    width: U32
    values: bytes  # f32
    ids: bytes
    ranks: bytes  # one to a token that has values; 1 is the most likely
    widths: bytes = b""  # one to an entry of the batch


class SamplingDefaults(Struct, array_like=True, frozen=True):
    """How the model's makers would have it sampled; None where they say nothing.

    For whoever fills in what a request leaves open. The core applies none of it.
    """

    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None


class ModelCard(Struct, array_like=True, frozen=True):
    """What a stack serves."""

    name: str
    path: str  # where the tokenizer is found: a folder or a hub id
    vocab_size: U32
    max_model_len: U32  # tokens, prompt and output together
    eos_token_ids: tuple[U32, ...]
    default_sampling: SamplingDefaults = SamplingDefaults()
    # how many a request may ask for, of its outputs and of its prompt; -1: the whole vocabulary
    max_logprobs: Annotated[int, Meta(ge=-1, le=2**31 - 1)] = 20
