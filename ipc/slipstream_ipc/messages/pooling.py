"""Messages by which texts become vectors: queries, which are asked again after every attach."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta, Struct

from slipstream_ipc.messages import tags
from slipstream_ipc.messages.fields import U32, Count, Identity, StreamId
from slipstream_ipc.messages.shared import Fault

MAX_EMBEDDED = 64  # inputs of an Embed

Dimensions = Annotated[int, Meta(ge=0, le=2**20)]  # 0: all that the model has


class Embed(Struct, array_like=True, frozen=True, tag=tags.EMBED):
    """Request the vectors of texts, or of token ids: one of both. Answered by Embedded.

    token_ids: of all inputs, a u32 column, which get no special tokens. counts: ids of each.
    truncate_to: tokens that longer inputs are cut to; 0: they are refused. truncates_left: of these
    the beginning is left out, in place of the end. normalizes: None: as the model's files say.
    call: random, the same in all queries of one call: calls take turns.
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


class Embedded(Struct, array_like=True, frozen=True, tag=tags.EMBEDDED):
    """Answers an Embed. vectors: an f32 column, one vector behind another. num_tokens: of each
    input, a u32 column. index: of the input that the fault is about; None: of no single one.
    """

    number: U32
    vectors: bytes = b""
    num_tokens: bytes = b""
    fault: Fault | None = None
    index: U32 | None = None


class Pool(Struct, array_like=True, frozen=True, tag=tags.POOL):
    """A client's Embed, tokenised, on the way to the core. number: the worker's. strikes: deaths
    of cores that were computing it.
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


class DropPool(Struct, array_like=True, frozen=True, tag=tags.DROP_POOL):
    """The clients of these queries have gone; a column of u64."""

    numbers: bytes


class Pooled(Struct, array_like=True, frozen=True, tag=tags.POOLED):
    """Answers a Pool. Fields as in Embedded."""

    number: Count
    vectors: bytes = b""
    fault: Fault | None = None
    index: U32 | None = None
