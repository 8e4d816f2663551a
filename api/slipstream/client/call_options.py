"""The keyword options of the clients' calls: their types, and their checks."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import wraps
from typing import Any, ParamSpec, TypedDict, TypeVar, cast, get_args

from slipstream.answers.answer_options import ToolChoice, answer_options
from slipstream.answers.functions import Tool
from slipstream.client.connection.queries import checked_template
from slipstream.client.stream import OutputKind
from slipstream.errors import bad_request, unknown_option
from slipstream.request.requests import checked_params
from slipstream.request.served_models import LoRARequest
from slipstream.vllm_names import CALL_OPTIONS, SAMPLING_PARAMS, without_unsupported
from slipstream_ipc.errors import BadRequest, Summary
from slipstream_ipc.messages import (
    AnswerOptions,
    AskedOptions,
    SamplingOptions,
    SamplingParams,
    StopScope,
    TemplateOptions,
)

Arguments = ParamSpec("Arguments")
Returned = TypeVar("Returned")

_OF_TEMPLATE = (
    "tools",
    "chat_template_kwargs",
    "add_generation_prompt",
    "continue_final_message",
)
_OF_ANSWER = ("tool_choice", "parallel_tool_calls", "stop_scope", "parse_answer")
_OF_CALL = ("model", "prompt_cache_key", "trace_headers")
_FORMER_NAME = "params"
_LORA = "lora_request"
_UNSUPPORTED = {**CALL_OPTIONS, **SAMPLING_PARAMS}


class ChatTemplateOptions(TypedDict, total=False):
    """The arguments of a chat template besides the messages, with transformers' names."""

    tools: Sequence[Tool] | None
    chat_template_kwargs: Mapping[str, Any] | None
    add_generation_prompt: bool
    continue_final_message: bool


class ChatAnswerOptions(TypedDict, total=False):
    """Options for reading the answer to chat messages."""

    tool_choice: ToolChoice | Mapping[str, Any] | None
    parallel_tool_calls: bool | None
    stop_scope: StopScope
    parse_answer: bool


class CallOptions(
    SamplingOptions, AskedOptions, ChatTemplateOptions, ChatAnswerOptions, total=False
):
    """The keyword options of a call with any number of prompts, for `**options: Unpack[...]`."""

    model: str | None
    prompt_cache_key: str | None
    trace_headers: Mapping[str, str] | None
    lora_request: LoRARequest | Sequence[LoRARequest | None] | None


class RequestOptions(CallOptions, total=False):
    """The keyword options of a call with one prompt, for `**options: Unpack[...]`."""

    label: str | None
    stream_id: str | None


@dataclass(frozen=True, slots=True)
class CheckedOptions:
    """The options of a call: sampling parameters, one for each prompt, and those of the request.

    has_many_prompts: the call takes a list of prompts, whose errors name the prompt.
    """

    params: list[SamplingParams]
    asked: AskedOptions
    template: TemplateOptions | None
    answer: AnswerOptions | None = None  # of prompts that are chat messages
    has_many_prompts: bool = False
    model: str | None = None  # by its name; None: the only one that is served
    prompt_cache_key: str | None = None
    trace_headers: Mapping[str, str] | None = None
    label: str | None = None
    stream_id: str | None = None
    loras: Sequence[LoRARequest | None] = ()  # of each prompt; empty: of none

    @property
    def has_several_answers(self) -> bool:
        """True if the only prompt gets several answers.

        Raises: BadRequestError where it does and an option names a single stream.
        """
        if self.params[0].n == 1:
            return False
        for field, value in (("label", self.label), ("stream_id", self.stream_id)):
            if value is not None:
                raise bad_request(BadRequest(field, value, "None where n is more than 1"))
        return True


def options_for_one(
    sampling_params: SamplingParams | None, options: RequestOptions
) -> CheckedOptions:
    """The options of a call with one prompt. To be called by the public method itself, whose
    caller a deprecation warning names.

    Raises: BadRequestError.
    """
    given, rest = _renamed(sampling_params, options, RequestOptions)
    names = ("label", "stream_id", *_OF_CALL)
    of_request = {name: rest.pop(name) for name in names if name in rest}
    asked, (template, answer) = _asked(rest), _of_chats(rest)
    loras = _loras(rest, 1)
    params = [checked_params(given, rest)]
    return CheckedOptions(params, asked, template, answer, loras=loras, **of_request)


def options_for_many(
    prompts: Sequence[object],
    sampling_params: SamplingParams | Sequence[SamplingParams] | None,
    options: CallOptions,
) -> CheckedOptions:
    """The options of a call with these prompts. Otherwise as `options_for_one`."""
    given, rest = _renamed(sampling_params, options, CallOptions)
    of_request = {name: rest.pop(name) for name in _OF_CALL if name in rest}
    asked, (template, answer) = _asked(rest), _of_chats(rest)
    _check_prompts(prompts)
    loras = _loras(rest, len(prompts))
    params = _params_for_each(prompts, given, rest)
    of_request |= {"loras": loras, "has_many_prompts": True}
    return CheckedOptions(params, asked, template, answer, **of_request)


def check_kind(kind: OutputKind) -> None:
    """Check a stream's `output_kind`. Raises: BadRequestError."""
    allowed = get_args(OutputKind)
    if kind not in allowed:
        raise bad_request(BadRequest("output_kind", kind, "one of " + ", ".join(allowed)))


def _renamed(
    sampling_params: Any, options: Mapping[str, Any], of_call: type
) -> tuple[Any, dict[str, Any]]:
    """The sampling parameters given under either name, and the other options.

    of_call: the TypedDict of the call's options.

    Raises: BadRequestError for an unknown option, or one of vLLM's that is not supported and
    changes something.
    """
    rest = without_unsupported(options, _UNSUPPORTED)
    former = rest.pop(_FORMER_NAME, None)
    known = of_call.__annotations__
    for name in rest:
        if name not in known:
            raise unknown_option(name, {*known, "sampling_params"})
    if former is None:
        return sampling_params, rest
    if sampling_params is not None:
        allowed = "sampling_params alone: its new name"
        raise bad_request(BadRequest(_FORMER_NAME, former, allowed))
    warnings.warn(
        "params= is called sampling_params= now, and goes with the next release",
        DeprecationWarning,
        stacklevel=4,  # the caller of the public method
    )
    return former, rest


def suggesting_keywords(function: Callable[Arguments, Returned]) -> Callable[Arguments, Returned]:
    """Raises UnknownOptionError for unknown keywords. function: one without `**` parameters."""
    known = inspect.signature(function).parameters.keys() - {"self"}

    @wraps(function)
    def checked(*args: Arguments.args, **options: Arguments.kwargs) -> Returned:
        for name in options:
            if name not in known:
                raise unknown_option(name, known)
        return function(*args, **options)

    return checked


def _asked(options: dict[str, Any]) -> AskedOptions:
    """Take the options that are fields of a request's spec out of `options`."""
    names = [name for name in AskedOptions.__annotations__ if name in options]
    return cast(AskedOptions, {name: options.pop(name) for name in names})


def _of_chats(options: dict[str, Any]) -> tuple[TemplateOptions | None, AnswerOptions | None]:
    """Take the options of chats out of `options`. The template's are None where there are none of
    either kind, which any prompt goes with.
    """
    of_template = {name: options.pop(name) for name in _OF_TEMPLATE if name in options}
    of_answer = {name: options.pop(name) for name in _OF_ANSWER if name in options}
    template = checked_template(**of_template) if of_template or of_answer else None
    return template, answer_options(**of_answer)


def _loras(options: dict[str, Any], num_prompts: int) -> list[LoRARequest | None]:
    """Take the adapter of each prompt out of `options`, one for all or one for each; empty for
    none. Raises: BadRequestError.
    """
    given = options.pop(_LORA, None)
    if given is None:
        return []
    found = list(given) if isinstance(given, list | tuple) else [given] * num_prompts
    for each in found:
        if not isinstance(each, LoRARequest | None):
            raise bad_request(BadRequest(_LORA, each, "LoRARequest, or a list with one for each"))
    if len(found) != num_prompts:
        allowed = f"one for all, or {num_prompts} for {num_prompts} prompts"
        raise bad_request(BadRequest(_LORA, Summary(f"{len(found)} of them"), allowed))
    return found


def _check_prompts(prompts: object) -> None:
    """Raises: BadRequestError where `prompts` is not a list."""
    if not isinstance(prompts, Sequence) or isinstance(prompts, str | bytes):
        raise bad_request(BadRequest("prompts", prompts, "a list of prompts"))


def _params_for_each(
    prompts: Sequence[object], given: Any, options: Mapping[str, Any]
) -> list[SamplingParams]:
    """Checked params for each prompt, given as one for all, one for each, or keyword options.

    Raises: BadRequestError.
    """
    num_prompts = len(prompts)
    if not isinstance(given, Sequence):
        return [checked_params(given, options)] * num_prompts
    if len(given) != num_prompts:
        found = Summary(f"{len(given)} of them")
        allowed = f"one for all, or {num_prompts} for {num_prompts} prompts"
        raise bad_request(BadRequest("sampling_params", found, allowed))
    return [checked_params(each, options) for each in given]
