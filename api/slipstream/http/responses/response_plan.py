"""POST /v1/responses: from a body to an `AnswerPlan`."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import msgspec
from msgspec import structs

from slipstream.http.answers.answer_plan import AnswerPlan
from slipstream.http.answers.event_ids import AnswerId, EventId
from slipstream.http.api_errors import ApiError, bad_field
from slipstream.http.planning.chat import plan_chat
from slipstream.http.response_encoding import json_raw
from slipstream.http.responses.input_items import InputItem, check_items, input_items
from slipstream.http.responses.offered_tools import used_tools
from slipstream.http.responses.response_object import (
    EchoedFormat,
    EchoedReasoning,
    EchoedText,
    ResponseObject,
    no_tools,
)
from slipstream.http.responses.response_printer import ID_PREFIX, response_shape
from slipstream.http.responses.response_record import (
    ITEM_ID,
    KeptResponse,
    ResponseRecord,
    is_of_input,
)
from slipstream.http.responses.responses_request import (
    CALLER_NAMES,
    ResponsesRequest,
    TextFormat,
    chat_of,
)
from slipstream_ipc.messages import MAX_CHAT_TURNS, KeepOptions, ModelCard
from slipstream_ipc.validation.kept_size import max_text_bytes

KIND = "resp"
_RESPONSE_ID = re.compile(ID_PREFIX + "([0-9a-f]{32})")
_MAX_NAMED = 32  # responses that an input refers to
_MAX_LOGPROBS = 2**17  # in a response
_GONE = (
    "it never existed, was not kept, is no longer kept (the server keeps those that were used last)"
)

MAX_RECALLED_BYTES = 2**22  # of a request: as large as one kept answer may be


class Named:
    """The kept responses that a body refers to. Keeps of each the parts that are named, and nothing
    else.

    num_bytes: what that takes.
    """

    def __init__(self, body: ResponsesRequest) -> None:
        """Raises: ApiError."""
        self._body = body
        self._previous: tuple[InputItem, ...] = ()
        self._is_found = False
        self._items: dict[str, InputItem] = {}  # by id
        self.num_bytes = 0
        self._of: dict[str, set[str]] = {}  # ids of items that are named, by stream
        if body.previous_response_id is not None:
            stream_id = stream_id_of(body.previous_response_id)
            if stream_id is None:
                raise unknown_response(body.previous_response_id, "previous_response_id")
            self._of[stream_id] = set()
        for index, item in enumerate(input_items(body.input or ())):
            if _is_reference(item):
                self._of.setdefault(_stream_of_item(item, index), set()).add(item.id or "")
        if len(self._of) > _MAX_NAMED:
            what = (
                f"input: got references to items of {len(self._of)} responses, allowed: "
                f"{_MAX_NAMED}; send previous_response_id, or the items themselves"
            )
            raise bad_field("input", what)

    @property
    def stream_ids(self) -> tuple[str, ...]:
        """The streams of the responses that are named."""
        return tuple(self._of)

    def add(self, stream_id: str, kept: KeptResponse) -> None:
        """Take what is named of a response that is kept. Raises: ApiError."""
        previous = self._body.previous_response_id
        wanted = self._of[stream_id]
        outputs = kept.output_items() if wanted or kept.is_over else ()
        if previous is not None and stream_id_of(previous) == stream_id:
            if not kept.is_over:
                what = f"previous_response_id: {previous} has not ended"
                raise bad_field("previous_response_id", what)
            self._is_found = True
            self._charge(kept.record_bytes + kept.num_text_bytes)
            self._previous = (*kept.input_items(), *outputs)
        for item in outputs:
            if item.id in wanted:
                self._hold(item.id, item)
        of_input = [each for each in wanted if is_of_input(each)]
        if of_input:
            given = kept.input()
            for item_id in of_input:
                place = given.own(item_id)
                if place is not None:
                    self._hold(*given.item(place))

    def previous(self) -> tuple[InputItem, ...]:
        """The items before those of the body. Raises: ApiError."""
        previous = self._body.previous_response_id
        if previous is not None and not self._is_found:
            raise unknown_response(previous, "previous_response_id")
        return self._previous

    def take(self, item: InputItem, index: int) -> InputItem:
        """The item that a reference means, each once: a body could name the longest ever again.

        Raises: ApiError.
        """
        found = self._items.pop(item.id or "", None)
        if found is None:
            raise _unknown_item(item, index)
        return found

    def _hold(self, item_id: str, item: InputItem) -> None:
        self._charge(len(msgspec.json.encode(item)))
        self._items[item_id] = structs.replace(item, id=item_id)

    def _charge(self, num_bytes: int) -> None:
        self.num_bytes += num_bytes
        if self.num_bytes > MAX_RECALLED_BYTES:
            what = (
                f"input: what it names of kept responses takes more than {MAX_RECALLED_BYTES} "
                "bytes, allowed: as much; name fewer items"
            )
            raise bad_field("input", what)


def stream_id_of(response_id: str) -> str | None:
    """The stream of a response; None if this is no response's id."""
    found = _RESPONSE_ID.fullmatch(response_id)
    return None if found is None else found[1]


def unknown_response(response_id: str, param: str | None = None) -> ApiError:
    """404: no such response, or none that this key may see."""
    what = f"unknown response {response_id[:100]!r}: {_GONE}, or is another key's"
    return ApiError(404, what, param=param, code="response_not_found")


def new_response(
    body: ResponsesRequest,
    model: ModelCard,
    *,
    scope: bytes = b"",
    named: Named | None = None,
    before: EventId | None = None,
) -> tuple[AnswerPlan, ResponseObject]:
    """The stream of a new response, and the response as it is at the beginning.

    scope: of its `KeepOptions`. named: what the body names of kept responses. before: an event of
    the response, where this computes it again: so it has its id, and was created when it says.
    Raises: ApiError, BadRequestError.
    """
    items = context_of(body, Named(body) if named is None else named)
    plan = plan_chat(chat_of(body, items), model, param_names=CALLER_NAMES)
    _check_logprobs(plan.num_logprobs, body, model)
    answer_id, created = AnswerId(KIND, plan.id.first), plan.created
    if before is not None:
        answer_id, created = AnswerId(KIND, before.answer.first), before.created
    response = structs.replace(echo_of(body, model), id=str(answer_id), created_at=created)
    is_kept = response.store and model.max_kept_bytes > 0
    record = ResponseRecord(response, items).packed() if is_kept else None
    most_text = -1 if record is None else max_text_bytes(len(record), model.max_kept_bytes)
    if record is None or most_text < 0:
        if body.background:
            why = "store is false, or it is too large"
            if not model.max_kept_bytes:
                why = "the server has no room for any (--response-store-mib 0)"
            what = "background: allowed only for a response that is stored, and this one is not"
            raise bad_field("background", f"{what}: {why}")
        response = structs.replace(response, store=False)
    else:
        keep = KeepOptions(record, scope, is_background=bool(body.background))
        [state] = plan.states
        assert state.resubmittable is not None
        state.request = state.resubmittable = structs.replace(state.resubmittable, keep=keep)
    plan = replace(
        plan,
        id=answer_id,
        created=created,
        shape=response_shape(response, most_text),
        is_background=bool(body.background),
    )
    return plan, response


def echo_of(body: ResponsesRequest, model: ModelCard) -> ResponseObject:
    """The part of its request that a response repeats; without its id and its time of creation."""
    defaults, reasoning = model.default_sampling, body.reasoning
    return ResponseObject(
        id="",
        created_at=0,
        background=bool(body.background),
        model=model.name,
        instructions=body.instructions,
        max_output_tokens=body.max_output_tokens,
        max_tool_calls=body.max_tool_calls,
        metadata=body.metadata or {},
        parallel_tool_calls=body.parallel_tool_calls is not False,
        previous_response_id=body.previous_response_id,
        prompt_cache_key=body.prompt_cache_key,
        reasoning=EchoedReasoning(reasoning.effort, reasoning.summary)
        if reasoning is not None
        else EchoedReasoning(),
        safety_identifier=body.safety_identifier,
        store=body.store is not False,
        temperature=_first(body.temperature, defaults.temperature, 1.0),
        text=_echoed_text(body),
        tool_choice=_echoed_choice(body.tool_choice),
        tools=json_raw(used_tools(body.tools)) if body.tools else no_tools(),
        top_logprobs=body.top_logprobs or 0,
        top_p=_first(body.top_p, defaults.top_p, 1.0),
        user=body.user,
    )


def context_of(body: ResponsesRequest, named: Named) -> tuple[InputItem, ...]:
    """All items that the model is to see. Raises: ApiError."""
    given = input_items(body.input or ())
    check_items(given)
    found = list(named.previous())
    for index, item in enumerate(given):
        found.append(named.take(item, index) if _is_reference(item) else item)
    if len(found) > MAX_CHAT_TURNS:
        what = f"input: got {len(found)} items, allowed: at most {MAX_CHAT_TURNS}"
        if len(given) < len(found):
            what += ", those of the responses before included"
        raise bad_field("input", what)
    return tuple(found)


def _is_reference(item: InputItem) -> bool:
    return item.kind == "item_reference"


def _stream_of_item(item: InputItem, index: int) -> str:
    found = ITEM_ID.fullmatch(item.id or "")
    if found is None:
        raise _unknown_item(item, index)
    return found[1]


def _unknown_item(item: InputItem, index: int) -> ApiError:
    field = f"input[{index}].id"
    what = (
        f"{field}: unknown item {(item.id or '')[:100]!r} of a response: {_GONE}, "
        "or one before names it; send the item"
    )
    return bad_field(field, what, "item_not_found")


def _check_logprobs(per_token: int | None, body: ResponsesRequest, model: ModelCard) -> None:
    """Raises ApiError for more than `_MAX_LOGPROBS`: they are written several times."""
    if per_token is None:
        return
    most_tokens = body.max_output_tokens or model.max_model_len
    num = (1 + per_token) * min(most_tokens, model.max_model_len)
    if num > _MAX_LOGPROBS:
        what = (
            f"top_logprobs: got {num} log-probabilities in all, allowed: {_MAX_LOGPROBS} in one "
            "response; request fewer, or set max_output_tokens"
        )
        raise bad_field("top_logprobs", what)


def _first(*values: float | None) -> float | None:
    return next((value for value in values if value is not None), None)


def _echoed_choice(choice: str | dict[str, Any] | None) -> str | dict[str, Any]:
    """A choice that has been read, without what was not."""
    match choice:
        case dict() if choice.get("type") != "allowed_tools":
            return _echoed_name(choice)
        case {"type": "allowed_tools", "mode": mode, "tools": list(tools)}:
            names = {tuple(named.items()): named for named in map(_echoed_name, tools)}
            return {"type": "allowed_tools", "mode": mode, "tools": list(names.values())}
        case str():
            return choice
        case _:
            return "auto"


def _echoed_name(named: dict[str, Any]) -> dict[str, Any]:
    """The name by which a choice refers to a tool."""
    return {key: named[key] for key in ("type", "name", "namespace") if key in named}


def _echoed_text(body: ResponsesRequest) -> EchoedText:
    text = body.text
    given = None if text is None else text.format
    wanted = TextFormat("text") if given is None else given
    schema = None if wanted.schema is None else json_raw(wanted.schema)
    kept = EchoedFormat(wanted.type, wanted.name, schema, wanted.description, wanted.strict)
    return EchoedText(kept, (None if text is None else text.verbosity) or "medium")
