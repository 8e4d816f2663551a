"""Prints an answer as a response: as its events, or whole."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from http import HTTPStatus

from msgspec import UNSET, Raw
from msgspec.structs import replace

from slipstream.http.api_errors import ApiError
from slipstream.http.blocks.block_printer import AnswerHead, BlockShape, TextFrame
from slipstream.http.blocks.blocks import Block, BlockKind
from slipstream.http.openai.usage import Usage
from slipstream.http.response_encoding import hole
from slipstream.http.responses import stream_events as events
from slipstream.http.responses.offered_tools import OfferedTool, unusual_tools
from slipstream.http.responses.response_object import (
    CustomToolCallItem,
    FailureDetails,
    FunctionCallItem,
    IncompleteDetails,
    InputTokensDetails,
    ItemStatus,
    OutputItem,
    OutputMessage,
    OutputTextPart,
    OutputTokensDetails,
    ReasoningItem,
    ReasoningTextPart,
    ResponseObject,
    ResponseStatus,
    ResponseUsage,
)
from slipstream_ipc.messages import End

ID_PREFIX = "resp_"
_ITEM_PREFIXES = {BlockKind.CONTENT: "msg_", BlockKind.REASONING: "rs_", BlockKind.CALL: "fc_"}
_CUSTOM_PREFIX = "ctc_"
_DELTAS = {
    BlockKind.CONTENT: events.OutputTextDelta,
    BlockKind.REASONING: events.ReasoningTextDelta,
}
_LastEvent = events.ResponseCompleted | events.ResponseFailed | events.ResponseIncomplete
_LAST: dict[str, type[_LastEvent]] = {
    "completed": events.ResponseCompleted,
    "failed": events.ResponseFailed,
}
_HOLE = "\x7f"  # where the text goes in an encoded event; never raw in what stands around it
_NUMBER = 7_305_114_263  # where the number goes


class ResponsePrinter:
    """See `BlockPrinter`. response: as it is at the beginning. max_text_bytes: of the answer in
    UTF-8; one that has more is not kept, and its response says so. None: it is known to be kept.
    """

    has_numbers = True

    def __init__(self, response: ResponseObject, max_text_bytes: int | None = None) -> None:
        self._response = response
        self._max_text_bytes = max_text_bytes
        self._key = response.id.removeprefix(ID_PREFIX)
        self._unusual = unusual_tools(response.tools)
        self.custom_tools: Collection[str] = [
            name for name, tool in self._unusual.items() if tool.is_custom
        ]

    def begin(self, usage: Usage, number: int) -> Sequence[bytes]:
        response = self._response
        return [
            events.named_event(events.ResponseCreated(number, response)),
            events.named_event(events.ResponseInProgress(number + 1, response)),
        ]

    def begin_block(self, block: Block, number: int) -> Sequence[bytes]:
        item = self._item(block, "in_progress", is_new=True)
        found = [events.named_event(events.OutputItemAdded(number, block.index, item))]
        if block.kind != BlockKind.CALL:
            part = _part(block, "")
            added = events.ContentPartAdded(number + 1, item.id, block.index, 0, part)
            found.append(events.named_event(added))
        return found

    def text_frame(self, block: Block) -> TextFrame:
        item_id = self._item_id(block)
        delta: events.StreamEvent
        if block.input is not None:
            delta = events.CustomInputDelta(_NUMBER, item_id, block.index, _HOLE)
        elif block.kind == BlockKind.CALL:
            delta = events.CallArgumentsDelta(_NUMBER, item_id, block.index, _HOLE)
        else:
            delta = _DELTAS[block.kind](_NUMBER, item_id, block.index, 0, _HOLE)
        before, rest = events.named_event(delta).split(b"%d" % _NUMBER, 1)
        between, after = rest.split(_HOLE.encode(), 1)
        return TextFrame(before, after, between)

    def end_block(self, block: Block, number: int) -> Iterator[bytes]:
        item = self._item(block, _status(block))
        place = item.id, block.index, 0
        done: list[events.StreamEvent]
        match block.kind:
            case BlockKind.CALL if block.input is not None:
                done = [events.CustomInputDone(number, *place[:2], block.text)]
            case BlockKind.CALL:
                name = self._tool(block).name
                done = [events.CallArgumentsDone(number, *place[:2], name, block.text)]
            case BlockKind.REASONING:
                done = [events.ReasoningTextDone(number, *place, block.text)]
            case BlockKind.CONTENT:
                done = [events.OutputTextDone(number, *place, block.text, _logprobs(block))]
        if block.kind != BlockKind.CALL:
            done.append(events.ContentPartDone(number + 1, *place, _part(block, block.text)))
        done.append(events.OutputItemDone(number + len(done), block.index, item))
        return map(events.named_event, done)

    def finish(
        self, blocks: Sequence[Block], end: End, usage: Usage, number: int
    ) -> Iterator[bytes]:
        response = self.whole(blocks, end, usage)
        kind = _LAST.get(response.status, events.ResponseIncomplete)
        yield events.named_event(kind(number, response))

    def fail(self, blocks: Sequence[Block], error: ApiError, number: int) -> bytes:
        given = error.body.error
        if error.status != HTTPStatus.INTERNAL_SERVER_ERROR:  # the stream has, not the response
            code = given.code or given.type
            failed = events.StreamError(number, code, given.message, given.param)
            return events.named_event(failed)
        details = FailureDetails("server_error", given.message)
        store = self._response.store and self._has_room(blocks)
        response = replace(self._response, store=store, status="failed", error=details)
        return events.named_event(events.ResponseFailed(number, response))

    def whole(self, blocks: Sequence[Block], end: End, usage: Usage) -> ResponseObject:
        status: ResponseStatus = "completed"
        details, error = None, None
        match end.reason:
            case "abort":
                status = "cancelled"
            case "error":
                status, error = "failed", FailureDetails("server_error", _message(end))
            case "length":
                status, details = "incomplete", IncompleteDetails("max_output_tokens")
            case "repetition":
                status, details = "incomplete", IncompleteDetails("content_filter")
        return replace(
            self._response,
            store=self._response.store and self._has_room(blocks),
            status=status,
            error=error,
            incomplete_details=details,
            output=[self._item(block, _status(block)) for block in blocks],
            usage=_usage_of(usage),
        )

    def _has_room(self, blocks: Sequence[Block]) -> bool:
        if self._max_text_bytes is None:
            return True
        return sum([block.num_bytes for block in blocks]) <= self._max_text_bytes

    def _item_id(self, block: Block) -> str:
        prefix = _ITEM_PREFIXES[block.kind] if block.input is None else _CUSTOM_PREFIX
        return f"{prefix}{self._key}{block.index:04x}"

    def _tool(self, block: Block) -> OfferedTool:
        """The tool that a block calls, as its client does."""
        return self._unusual.get(block.name) or OfferedTool(block.name)

    def _item(self, block: Block, status: ItemStatus, *, is_new: bool = False) -> OutputItem:
        item_id = self._item_id(block)
        match block.kind:
            case BlockKind.CALL:
                tool, text = self._tool(block), "" if is_new else block.text
                item_type = FunctionCallItem if block.input is None else CustomToolCallItem
                namespace = tool.namespace or UNSET
                return item_type(item_id, status, block.call_id, tool.name, text, namespace)
            case BlockKind.REASONING:
                texts = [] if is_new else [ReasoningTextPart(block.text)]
                return ReasoningItem(item_id, status, texts)
            case BlockKind.CONTENT:
                parts = [] if is_new else [OutputTextPart(block.text, logprobs=_logprobs(block))]
                return OutputMessage(item_id, status, parts)


def response_shape(response: ResponseObject, max_text_bytes: int | None = None) -> BlockShape:
    """The shape of a response. response: as it is at the beginning, but for its id, its model and
    when it was created. max_text_bytes: see `ResponsePrinter`.
    """

    def new_printer(head: AnswerHead) -> ResponsePrinter:
        begun = replace(response, id=head.id, model=head.model, created_at=head.created)
        return ResponsePrinter(begun, max_text_bytes)

    # it takes the tools to print their calls, and only what is kept has them
    is_known = response.store or not unusual_tools(response.tools)
    return BlockShape(new_printer, is_known=is_known)


def _status(block: Block) -> ItemStatus:
    return "completed" if block.is_complete else "incomplete"


def _logprobs(block: Block) -> list[Raw]:
    """A place for those of a block, if it has any."""
    return [hole(block.index)] if block.logprobs and block.logprobs.num_tokens else []


def _part(block: Block, text: str) -> events.TextPart:
    return OutputTextPart(text) if block.kind == BlockKind.CONTENT else ReasoningTextPart(text)


def _message(end: End) -> str:
    return "the engine failed" if end.fault is None else end.fault.message


def _usage_of(usage: Usage) -> ResponseUsage:
    prompt, answer = usage.prompt_tokens_details, usage.completion_tokens_details
    return ResponseUsage(
        usage.prompt_tokens,
        InputTokensDetails(prompt.cached_tokens if prompt else 0),
        usage.completion_tokens,
        OutputTokensDetails(answer.reasoning_tokens if answer else 0),
        usage.total_tokens,
    )
