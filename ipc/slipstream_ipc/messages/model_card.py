"""The card of the model that a stack serves."""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import Meta, Struct

from slipstream_ipc.messages.fields import (
    MAX_ALIASES,
    MAX_KEPT_BYTES,
    MAX_LORAS,
    U32,
    Identity,
    Label,
    LongText,
    LoraName,
)
from slipstream_ipc.messages.media import MediaCard
from slipstream_ipc.messages.request import SamplingDefaults


class AdapterRef(Struct, array_like=True, frozen=True):
    """An adapter of a model (LoRA). digest: of its files, wherever they lie."""

    name: LoraName
    path: LongText  # a folder of the server's
    digest: Identity


class NamedPrompt(Struct, array_like=True, frozen=True):
    """A text in front of an input for embeddings, by its name."""

    name: Label
    text: LongText


PoolingTask = Literal["embed", "classify"]


class PoolingCard(Struct, array_like=True, frozen=True):
    """The rows of a model that is served for pooling. dimensions: of its vectors, or its labels.
    matryoshka: shorter lengths that they may be cut to; None: none, empty: any. default_prompt: the
    name of the one that stands in front of an input unless a request names another; empty: none.
    labels: of a model that classifies, in the order of its numbers. needs_template: it has learnt
    pairs in a template, which is not among its files.
    """

    dimensions: U32
    matryoshka: Annotated[tuple[U32, ...], Meta(max_length=1024)] | None = None
    prompts: Annotated[tuple[NamedPrompt, ...], Meta(max_length=256)] = ()
    default_prompt: Label = ""
    task: PoolingTask = "embed"
    labels: Annotated[tuple[str, ...], Meta(max_length=2**16)] = ()
    needs_template: bool = False


class ModelCard(Struct, array_like=True, frozen=True):
    """The model that a stack serves."""

    name: str
    path: str  # of the tokenizer: a folder or a hub id
    vocab_size: U32
    max_model_len: U32  # tokens, prompt and output together
    eos_token_ids: tuple[U32, ...]
    default_sampling: SamplingDefaults = SamplingDefaults()
    # the most that a request may ask for, per output or prompt token; -1: the whole vocabulary
    max_logprobs: Annotated[int, Meta(ge=-1, le=2**31 - 1)] = 20
    answer_format: Label = ""  # how reasoning and tool calls are written; empty: unknown
    # of weights, dtype, tokenizer and template: a stream moves among equal ones; empty: unknown
    fingerprint: Identity = b""
    # of a kept answer (`KeepOptions`): its record, its text in UTF-8 and KEPT_ENTRY_BYTES; one that
    # takes more is not kept. 0: none is
    max_kept_bytes: U32 = MAX_KEPT_BYTES
    # other names that requests may use; one with * at its end stands for all that begin so
    aliases: Annotated[tuple[Label, ...], Meta(max_length=MAX_ALIASES)] = ()
    # models of their own to requests, which the same weights serve
    adapters: Annotated[tuple[AdapterRef, ...], Meta(max_length=MAX_LORAS)] = ()
    is_drafted: bool = False  # its answers are, and so a Submit's prediction saves steps
    pooling: PoolingCard | None = None  # None: it generates
    media: MediaCard | None = None  # None: it is made for text alone
