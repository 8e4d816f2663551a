"""The state in which an answer begins whose first part stands in the prompt."""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from slipstream_ipc.formats.tool_types import ToolTypes
from slipstream_ipc.messages.answer import AnswerOptions
from slipstream_worker.formats.compiled_format import CompiledFormat

MAX_STATE_BYTES = 4096


def start_state(
    compiled: CompiledFormat,
    pieces: Iterable[tuple[int, str]],
    tools: ToolTypes | None = None,
    options: AnswerOptions = AnswerOptions(),  # noqa: B008 - frozen
) -> bytes:
    """The state in which an answer begins that continues these tokens of the prompt: (id, text) of
    the assistant's turn that it left open.
    """
    reader = compiled.reader(tools, options)
    base = reader.state
    items: list[str | int] = []
    for token_id, text in pieces:
        if token_id in compiled.delimiter_ids:
            items.append(token_id)
            reader.feed_delimiter(token_id)
        elif text:
            items.append(text)
            reader.feed(text)
        if reader.is_between_calls:
            base = reader.save(0)
            items = []
    *fields, _ = msgspec.msgpack.decode(base)
    state = msgspec.msgpack.encode([*fields, items])
    return state if len(state) <= MAX_STATE_BYTES else base
