"""The types of single fields: which numbers and lengths the decoder lets through."""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import Meta

MAX_CHAT_TURNS = 16384
MAX_IDENTITY_BYTES = 64
MAX_LABEL_CHARS = 1024
MAX_TOOL_CALLS = 1024  # of one message
MAX_TEMPLATE_CHARS = 2**20  # of a chat's tools, and of what else its template is given
MAX_OTHERS = 127  # answers that a Submit asks for, besides its own
MAX_CANCELLED = 4096  # streams to a Cancel

U64 = Annotated[int, Meta(ge=0)]  # msgpack has no larger ones
Count = Annotated[int, Meta(ge=0, le=2**63 - 1)]
U32 = Annotated[int, Meta(ge=0, le=2**32 - 1)]
I32 = Annotated[int, Meta(ge=-(2**31), le=2**31 - 1)]
I64 = Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)]
StreamId = Annotated[bytes, Meta(max_length=16)]  # 128 random bits; a shorter one is nobody's
StreamIds = Annotated[tuple[StreamId, ...], Meta(max_length=2**20)]
StopIds = Annotated[tuple[U32, ...], Meta(max_length=4096)]
Identity = Annotated[bytes, Meta(max_length=MAX_IDENTITY_BYTES)]
Label = Annotated[str, Meta(max_length=MAX_LABEL_CHARS)]
LongText = Annotated[str, Meta(max_length=2**16)]

FinishReason = Literal["stop", "length", "abort", "error"]
ErrorCode = Literal[
    "bad_request",  # the caller's fault: a field is wrong
    "conflict",  # the caller's fault: the stream id is taken by other content
    "unknown_stream",  # no such stream here (any more)
    "overloaded",  # nobody's fault: try again later
    "superseded",  # another reader has taken the stream over
    "diverged",  # a resumed stream is not the one the reader has part of
    "engine",  # ours
]

CancelledState = Literal[
    "running",  # and ends now
    "ended",  # before
    "unknown",
]
