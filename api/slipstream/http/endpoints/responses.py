"""POST /v1/responses: from a body to an `AnswerPlan`."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

from msgspec import structs

from slipstream.http.answers.answer_plan import AnswerPlan
from slipstream.http.answers.block_printer import AnswerHead, BlockShape
from slipstream.http.answers.event_ids import AnswerId
from slipstream.http.endpoints.chat import plan_chat
from slipstream.http.errors import bad_field
from slipstream.http.responses.input_items import check_items, input_items
from slipstream.http.responses.response_object import (
    EchoedFormat,
    EchoedReasoning,
    EchoedText,
    ResponseObject,
)
from slipstream.http.responses.response_printer import ResponsePrinter
from slipstream.http.responses.responses_request import (
    CALLER_NAMES,
    ResponsesRequest,
    TextFormat,
    chat_of,
)
from slipstream_ipc.messages import ModelCard

KIND = "resp"


def plan_response(body: ResponsesRequest, model: ModelCard) -> AnswerPlan:
    """The stream of a new response. Raises: ApiError, BadRequestError."""
    items = input_items(body.input or ())
    check_items(items)
    for index, item in enumerate(items):
        if item.kind == "item_reference":
            field = f"input[{index}]"
            raise bad_field(field, f"{field}: items are not kept here; send the item itself")
    plan = plan_chat(chat_of(body, items), model)
    response = echo_of(body, model)
    return replace(
        plan,
        id=AnswerId(KIND, plan.id.first),
        shape=BlockShape(partial(_new_printer, response)),
        param_names={**plan.param_names, **CALLER_NAMES},
    )


def echo_of(body: ResponsesRequest, model: ModelCard) -> ResponseObject:
    """The response before its head is known: what it repeats of the request."""
    defaults, reasoning = model.default_sampling, body.reasoning
    return ResponseObject(
        id="",
        created_at=0,
        model=model.name,
        instructions=body.instructions,
        max_output_tokens=body.max_output_tokens,
        max_tool_calls=body.max_tool_calls,
        metadata=body.metadata or {},
        parallel_tool_calls=body.parallel_tool_calls is not False,
        prompt_cache_key=body.prompt_cache_key,
        reasoning=EchoedReasoning(reasoning.effort, reasoning.summary)
        if reasoning is not None
        else EchoedReasoning(),
        safety_identifier=body.safety_identifier,
        store=False,
        temperature=_first(body.temperature, defaults.temperature, 1.0),
        text=_echoed_text(body),
        tool_choice=body.tool_choice or "auto",
        tools=body.tools or (),
        top_logprobs=body.top_logprobs or 0,
        top_p=_first(body.top_p, defaults.top_p, 1.0),
        user=body.user,
    )


def _new_printer(response: ResponseObject, head: AnswerHead) -> ResponsePrinter:
    return ResponsePrinter(
        structs.replace(response, id=head.id, model=head.model, created_at=head.created)
    )


def _first(*values: float | None) -> float | None:
    return next((value for value in values if value is not None), None)


def _echoed_text(body: ResponsesRequest) -> EchoedText:
    text = body.text
    given = None if text is None else text.format
    wanted = TextFormat("text") if given is None else given
    kept = EchoedFormat(wanted.type, wanted.name, wanted.schema, wanted.description, wanted.strict)
    return EchoedText(kept, (None if text is None else text.verbosity) or "medium")
