"""What is kept of a response beside its answer, to print it again and to go on from it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec
from msgspec import Struct, structs

from slipstream.http.blocks.block_printer import blocks_of
from slipstream.http.blocks.blocks import Block
from slipstream.http.openai.response_bodies import (
    CompletionTokensDetails,
    PromptTokensDetails,
    Usage,
)
from slipstream.http.responses.input_items import InputItem
from slipstream.http.responses.response_object import ResponseObject
from slipstream.http.responses.response_printer import ResponsePrinter
from slipstream_ipc.messages import (
    MAX_RECORD_BYTES,
    AnswerEvent,
    End,
    EventKind,
    KeptAnswer,
)

_ITEM_PREFIXES = {
    "message": "msg_",
    "reasoning": "rs_",
    "function_call": "fc_",
    "function_call_output": "fco_",
}


class ResponseRecord(Struct, frozen=True):
    """response: as it was at the beginning. items: its whole input, that of the responses before it
    included.
    """

    response: ResponseObject
    items: tuple[InputItem, ...]

    def packed(self) -> bytes | None:
        """As bytes; None if it takes more than may be kept, or has numbers beyond 64 bits (in a
        schema, say) or lists beyond Python's recursion.
        """
        try:
            packed = msgspec.msgpack.encode(self)
        except (OverflowError, RecursionError):
            return None
        return packed if len(packed) <= MAX_RECORD_BYTES else None

    def input_ids(self) -> list[str]:
        """The ids of the input's items as clients are shown them."""
        key = self.response.id.rpartition("_")[2]
        return [
            item.id or f"{_ITEM_PREFIXES[item.kind]}{key}i{index:04x}"
            for index, item in enumerate(self.items)
        ]


_decoder = msgspec.msgpack.Decoder(ResponseRecord)


class KeptResponse:
    """A kept answer, with its record. response: as it is now."""

    def __init__(self, answer: KeptAnswer) -> None:
        """Raises: msgspec.MsgspecError if the record is another version's."""
        self.record = _decoder.decode(answer.keep.record)
        self.record_bytes = len(answer.keep.record)
        self.is_background = answer.keep.is_background
        self.end = answer.end
        self.num_prompt_tokens = answer.num_prompt_tokens
        self.events = answer.events
        if answer.text:
            self.events = (AnswerEvent(EventKind.CONTENT, answer.text),)

    @property
    def is_over(self) -> bool:
        """Whether the response has ended."""
        return self.end is not None

    @property
    def response(self) -> ResponseObject:
        """The response as it is now; without output while it runs."""
        if self.end is None:
            status = "in_progress" if self.num_prompt_tokens else "queued"
            return structs.replace(self.record.response, status=status)
        printer = ResponsePrinter(self.record.response)
        return printer.whole(self._blocks(self.end), self.end, self.usage(self.end))

    def usage(self, end: End) -> Usage:
        """The tokens of the response."""
        num_prompt, num_output = self.num_prompt_tokens, end.num_tokens
        return Usage(
            num_prompt,
            num_output,
            num_prompt + num_output,
            PromptTokensDetails(end.num_cached_tokens),
            CompletionTokensDetails(min(num_output, end.num_reasoning_tokens)),
        )

    def output_items(self) -> tuple[InputItem, ...]:
        """The output as items of an input."""
        output = msgspec.to_builtins(self.response.output)
        return msgspec.convert(output, tuple[InputItem, ...])

    def _blocks(self, end: End) -> Sequence[Block]:
        return blocks_of(self.events, end)


def shown_item(item: InputItem, item_id: str) -> dict[str, Any]:
    """An item of the input as clients are shown it: a message's text is parts."""
    found: dict[str, Any] = {"type": item.kind, **msgspec.to_builtins(item), "id": item_id}
    if item.kind == "function_call" and not isinstance(item.arguments, str):
        found["arguments"] = msgspec.json.encode(item.arguments or {}).decode()
    if item.kind == "message" and isinstance(item.content, str):
        kind = "output_text" if item.role == "assistant" else "input_text"
        found["content"] = [{"type": kind, "text": item.content}]
    return found
