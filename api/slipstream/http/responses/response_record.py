"""The record that is kept of a response beside its answer, to print it again and to go on from
it.
"""

from __future__ import annotations

import re
from typing import Any

import msgspec
from msgspec import Raw, Struct, structs

from slipstream.http.blocks.block_printer import blocks_of
from slipstream.http.openai.usage import Usage, final_usage, usage_of
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
from slipstream_ipc.validation.kept_size import num_text_bytes

_ITEM_PREFIXES = {
    "message": "msg_",
    "reasoning": "rs_",
    "function_call": "fc_",
    "function_call_output": "fco_",
    "custom_tool_call": "ctc_",
    "custom_tool_call_output": "ctco_",
}
_OTHER_PREFIX = "item_"
# the stream of the response that had an item first, and the item's place in the output or the input
ITEM_ID = re.compile("[a-z]{2,4}_([0-9a-f]{32})(?:[0-9a-f]{4}|i([0-9a-f]{4,8}))")


def is_of_input(item_id: str) -> bool:
    """True if an item with this id was first in the input of a response."""
    made = ITEM_ID.fullmatch(item_id)
    return made is not None and made[2] is not None


class ResponseRecord(Struct, frozen=True):
    """response: as it was at the beginning. items: its whole input, that of the responses before it
    included.
    """

    response: ResponseObject
    items: tuple[InputItem, ...]

    def packed(self) -> bytes | None:
        """Encode as bytes; None if it takes more than may be kept, or is nested too deeply."""
        try:
            packed = msgspec.json.encode(self)
        except RecursionError:
            return None
        return packed if len(packed) <= MAX_RECORD_BYTES else None


class _ReadRecord(Struct, frozen=True):
    """A record whose items are not read: they may be thousands, and take ten times their bytes."""

    response: ResponseObject
    items: Raw


_decoder = msgspec.json.Decoder(_ReadRecord)
_items_decoder = msgspec.json.Decoder(tuple[InputItem, ...])
_pieces_decoder = msgspec.json.Decoder(list[Raw])
_item_decoder = msgspec.json.Decoder(InputItem)


class KeptInput:
    """The input of a kept response. Reads the items that are asked for, and only those."""

    def __init__(self, response_id: str, items: Raw) -> None:
        self._key = response_id.rpartition("_")[2]
        self._pieces = _pieces_decoder.decode(items)

    def __len__(self) -> int:
        return len(self._pieces)

    def item(self, index: int) -> tuple[str, InputItem]:
        """An item, with the id that clients are shown."""
        item = _item_decoder.decode(self._pieces[index])
        return _id_of(item, self._key, index), item

    def own(self, item_id: str) -> int | None:
        """The place of an item that this response had first; None if there is none."""
        made = ITEM_ID.fullmatch(item_id)
        if made is None or made[2] is None or made[1] != self._key:
            return None
        place = int(made[2], 16)
        return place if place < len(self) and self.item(place)[0] == item_id else None

    def find(self, item_id: str) -> int | None:
        """The place of an item; None if there is none with this id."""
        place = self.own(item_id)
        if place is not None:
            return place
        given = msgspec.json.encode(item_id)  # as it stands in an item that has it
        places = [at for at, piece in enumerate(self._pieces) if given in bytes(piece)]
        return next((at for at in places if self.item(at)[0] == item_id), None)


class KeptResponse:
    """A kept answer, with its record. response: as it is now. begun: as it was at the beginning."""

    def __init__(self, answer: KeptAnswer) -> None:
        """Raises: msgspec.MsgspecError if the record is another version's."""
        record = _decoder.decode(answer.keep.record)
        self.begun = record.response
        self._items = record.items
        self.record_bytes = len(answer.keep.record)
        self.is_background = answer.keep.is_background
        self.end = answer.end
        self.num_prompt_tokens = answer.num_prompt_tokens
        self.events = answer.events
        if answer.text:
            self.events = (AnswerEvent(EventKind.CONTENT, answer.text),)

    @property
    def num_text_bytes(self) -> int:
        """The size of its answer's texts, in bytes."""
        return num_text_bytes([event.text for event in self.events])

    def input(self) -> KeptInput:
        """Its input, to read single items of it."""
        return KeptInput(self.begun.id, self._items)

    def input_items(self) -> tuple[InputItem, ...]:
        """All items of its input, with the ids that clients are shown."""
        key = self.begun.id.rpartition("_")[2]
        return tuple(
            [
                structs.replace(item, id=_id_of(item, key, index))
                for index, item in enumerate(_items_decoder.decode(self._items))
            ]
        )

    @property
    def is_over(self) -> bool:
        """True if the response has ended."""
        return self.end is not None

    @property
    def response(self) -> ResponseObject:
        """The response as it is now; without output while it runs."""
        if self.end is None:
            status = "in_progress" if self.num_prompt_tokens else "queued"
            return structs.replace(self.begun, status=status)
        printer = ResponsePrinter(self.begun)
        blocks = blocks_of(self.events, self.end, printer.custom_tools)
        return printer.whole(blocks, self.end, self.usage(self.end))

    def usage(self, end: End) -> Usage:
        """The tokens of the response."""
        return final_usage(usage_of(self.num_prompt_tokens, end.num_tokens), [end], 1)

    def output_items(self) -> tuple[InputItem, ...]:
        """The output as items of an input."""
        output = msgspec.to_builtins(self.response.output)
        return msgspec.convert(output, tuple[InputItem, ...])


def _id_of(item: InputItem, key: str, index: int) -> str:
    """The id of an item at this place of the input of a response with this key, the part behind its
    prefix.
    """
    if item.id is not None and ITEM_ID.fullmatch(item.id):
        return item.id
    return f"{_ITEM_PREFIXES.get(item.kind, _OTHER_PREFIX)}{key}i{index:04x}"


def shown_item(item: InputItem, item_id: str) -> dict[str, Any]:
    """An item of the input as clients are shown it: a message's text is parts."""
    found: dict[str, Any] = {"type": item.kind, **msgspec.to_builtins(item), "id": item_id}
    if item.kind == "function_call" and not isinstance(item.arguments, str):
        found["arguments"] = msgspec.json.encode(item.arguments or {}).decode()
    if item.kind == "message" and isinstance(item.content, str):
        kind = "output_text" if item.role == "assistant" else "input_text"
        found["content"] = [{"type": kind, "text": item.content}]
    return found
