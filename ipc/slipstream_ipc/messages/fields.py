"""The types of single fields, with the ranges and lengths that the decoder accepts."""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import Meta

MAX_CHAT_TURNS = 16384
MAX_IDENTITY_BYTES = 64
MAX_LABEL_CHARS = 1024
MAX_ALIASES = 64  # further names of a model
MAX_TOOL_CALLS = 1024  # per message
MAX_TEMPLATE_CHARS = 2**20  # a chat's tools, and likewise its template variables
MAX_OTHERS = 127  # further answers that a Submit requests
MAX_TRACE_STATE_CHARS = 512
MAX_CANCELLED = 4096  # streams per Cancel
MAX_LOCATED = 4096  # streams per Locate
MAX_KEPT_BYTES = 2**22  # a kept answer with its record; its encoding may take twice as much
MAX_OUTPUT_WORKERS = 64  # of a stack
MAX_LORA_NAME_CHARS = 128
MAX_LORA_PATH_CHARS = 4096  # of an adapter's folder
MAX_LORAS = 1024  # of a model
MAX_PREDICTION_TOKENS = 2**16  # of a prediction; the rest is left out
MAX_LEFT_OUT = 64  # keywords of schemas that are named as left out

U64 = Annotated[int, Meta(ge=0)]  # msgpack has no larger integers
Count = Annotated[int, Meta(ge=0, le=2**63 - 1)]
U32 = Annotated[int, Meta(ge=0, le=2**32 - 1)]
I32 = Annotated[int, Meta(ge=-(2**31), le=2**31 - 1)]
I64 = Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)]
NumWorkers = Annotated[int, Meta(ge=1, le=MAX_OUTPUT_WORKERS)]
StreamId = Annotated[bytes, Meta(max_length=16)]  # 128 random bits; shorter ids name no stream
StreamIds = Annotated[tuple[StreamId, ...], Meta(max_length=2**20)]
StopIds = Annotated[tuple[U32, ...], Meta(max_length=4096)]
Identity = Annotated[bytes, Meta(max_length=MAX_IDENTITY_BYTES)]
Label = Annotated[str, Meta(max_length=MAX_LABEL_CHARS)]
LeftOut = Annotated[tuple[Label, ...], Meta(max_length=2 * MAX_LEFT_OUT)]
LoraName = Annotated[str, Meta(max_length=MAX_LORA_NAME_CHARS)]
LongText = Annotated[str, Meta(max_length=2**16)]

FinishReason = Literal["stop", "length", "abort", "error", "repetition"]
ErrorCode = Literal[
    "bad_request",  # the caller's fault: a field is wrong
    "conflict",  # the caller's fault: the stream id is taken by other content
    "unknown_stream",  # no such stream, or no longer
    "overloaded",  # not a fault of the request: retry later
    "superseded",  # another reader has taken over the stream
    "diverged",  # the resumed stream differs from what the reader has of it
    "engine",  # a fault of Slipstream
]

# what was done to a chat's turns so that its template takes them
TurnChange = Literal[
    "system-first",  # what system and developer say is one turn at the beginning
    "system-in-user",  # it is at the beginning of the user's first turn
    "users-joined",  # consecutive turns of the user are one
    "assistants-joined",  # consecutive turns of the assistant are one
    "user-in-tool",  # a user's turn is at the end of the tool's answer before it
    "system-not-shown",  # the template takes no form in which it writes all that the system says
]
TurnChanges = tuple[TurnChange, ...]

CancelledState = Literal[
    "running",  # the Cancel ends it
    "ended",  # it had ended before
    "unknown",
]
