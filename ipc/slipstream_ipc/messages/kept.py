"""Answers that are kept after their streams, for clients that ask for them later."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta, Struct

from slipstream_ipc.messages.answer import AnswerEvent
from slipstream_ipc.messages.fields import U32, Identity
from slipstream_ipc.messages.shared import End

MAX_RECORD_BYTES = 2**20
KEPT_ENTRY_BYTES = 512  # what a kept answer takes in memory beside its bytes, a generous estimate


class KeepOptions(Struct, array_like=True, frozen=True):
    """The options of a Submit whose answer is kept once it has ended.

    record: what the client wants to find again with the answer, for it alone to read; at most
    MAX_RECORD_BYTES. scope: only a Recall with an equal one finds the answer. is_background: the
    stream runs to its end without a reader, and after its client has left.
    """

    # the worker checks the narrower limit, so that an error names the request
    record: Annotated[bytes, Meta(max_length=2**24)] = b""
    scope: Identity = b""
    is_background: bool = False


class KeptAnswer(Struct, array_like=True, frozen=True):
    """An answer that was to be kept.

    end: None while the stream has not ended; its text is then read with a Resume. text: of a stream
    that is not read as events. events: of one that is, with adjacent texts joined.
    """

    keep: KeepOptions
    num_prompt_tokens: U32 = 0  # 0 while the prompt is not tokenized
    end: End | None = None
    text: str = ""
    events: tuple[AnswerEvent, ...] = ()
