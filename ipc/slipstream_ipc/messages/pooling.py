"""Messages by which texts become vectors, classes or scores: queries, which are asked again after
every attach.
"""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta, Struct

from slipstream_ipc.messages import tags
from slipstream_ipc.messages.fields import U32, Count, Identity, StreamId
from slipstream_ipc.messages.model_card import PoolingTask
from slipstream_ipc.messages.shared import Fault

MAX_EMBEDDED = 64  # inputs of an Embed

Dimensions = Annotated[int, Meta(ge=0, le=2**20)]  # 0: all that the model has


class Embed(Struct, array_like=True, frozen=True, tag=tags.EMBED):
    """Request a row of each text, or of each input of token ids: one of both. It is a vector, or of
    a model that classifies a number for each of its labels. Answered by Embedded.

    token_ids: of all inputs, a u32 column, which get no special tokens. counts: ids of each.
    truncate_to: tokens that longer inputs are cut to; 0: they are refused. truncates_left: of these
    the beginning is left out, in place of the end. normalizes: whether vectors get length 1, or the
    activation is applied to what a classifier computes; None: as the model's files say.
    call: random, the same in all queries of one call: calls take turns. task: that the model has
    to be served for. pairs: the second text of each; empty: there are none. max_first, max_second:
    tokens that texts and second texts are cut to, without special ones; 0: they are not.
    template_kwargs: a JSON object, variables of the template in which pairs are written, if any.
    """

    number: U32
    texts: Annotated[tuple[str, ...], Meta(max_length=MAX_EMBEDDED)] = ()
    token_ids: bytes = b""
    counts: Annotated[bytes, Meta(max_length=4 * MAX_EMBEDDED)] = b""
    dimensions: Dimensions = 0
    truncate_to: U32 = 0
    truncates_left: bool = False
    normalizes: bool | None = None
    add_special_tokens: bool = True  # to texts
    call: Identity = b""
    tenant: Identity = b""  # as in Tokenize
    task: PoolingTask = "embed"
    pairs: Annotated[tuple[str, ...], Meta(max_length=MAX_EMBEDDED)] = ()
    max_first: U32 = 0
    max_second: U32 = 0
    template_kwargs: str = ""


class Embedded(Struct, array_like=True, frozen=True, tag=tags.EMBEDDED):
    """Answers an Embed. vectors: an f32 column, one row behind another. num_tokens: of each
    input, a u32 column. index: of the input that the fault is about; None: of no single one.
    """

    number: U32
    vectors: bytes = b""
    num_tokens: bytes = b""
    fault: Fault | None = None
    index: U32 | None = None


class Pool(Struct, array_like=True, frozen=True, tag=tags.POOL):
    """A client's Embed, tokenised, on the way to the core. number: the worker's. strikes: deaths
    of cores that were computing it. first_lens: tokens of type 0 at the beginning of each input, a
    u32 column: those behind them have type 1; empty: there are none.
    """

    number: Count
    query_id: StreamId  # of 16 bytes: it stands where streams' ids do when a core dies
    token_ids: bytes
    counts: bytes
    dimensions: Dimensions
    normalizes: bool | None
    call: Identity
    tenant: Identity
    strikes: U32 = 0
    first_lens: bytes = b""


class DropPool(Struct, array_like=True, frozen=True, tag=tags.DROP_POOL):
    """The clients of these queries have gone; a column of u64."""

    numbers: bytes


class Pooled(Struct, array_like=True, frozen=True, tag=tags.POOLED):
    """Answers a Pool. Fields as in Embedded."""

    number: Count
    vectors: bytes = b""
    fault: Fault | None = None
    index: U32 | None = None
