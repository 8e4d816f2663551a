"""Turns prompts and options given by a caller into a Submit or a Resume.

All checks that need no server are made here; an error names the invalid field. The worker renders
chat templates and tokenizes. A Submit made here can be encoded and fits into a message, so the I/O
thread never meets a request that it cannot send.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypedDict

import msgspec
import numpy as np
import numpy.typing as npt
from msgspec import Raw

from slipstream.errors import bad_request
from slipstream.trace_context import trace_context_of
from slipstream_ipc.columns import pack_u32, u32
from slipstream_ipc.errors import BadRequest
from slipstream_ipc.messages import (
    ChatMessage,
    ClientToWorker,
    Frame,
    ModelCard,
    OtherAnswer,
    Resume,
    SamplingParams,
    StructuredOutputs,
    Submit,
    TemplateOptions,
)
from slipstream_ipc.messages.budgets import MAX_MESSAGE_BYTES
from slipstream_ipc.transport.codec import client_codec, encode_params
from slipstream_ipc.validation.chat_template import template_message
from slipstream_ipc.validation.sampling_params import (
    check_cache_salt,
    check_label,
    check_num_logprobs,
    check_params,
    check_prompt,
    check_turns,
    params_from,
    token_ids_from,
)
from slipstream_ipc.validation.structured_output import json_as_text


class TextPrompt(TypedDict):
    """A text prompt in vLLM's form: `{"prompt": "..."}`."""

    prompt: str


class TokensPrompt(TypedDict):
    """A prompt of token ids in vLLM's form: `{"prompt_token_ids": [...]}`."""

    prompt_token_ids: Sequence[int]


Conversation = Sequence[ChatMessage | Mapping[str, Any]]
Prompt = (
    str | Sequence[int] | npt.NDArray[np.integer[Any]] | Conversation | TextPrompt | TokensPrompt
)

_KINDS = (
    "a string, a sequence of token ids, a list of chat messages with role and content, "
    '{"prompt": TEXT} or {"prompt_token_ids": IDS}'
)
_OTHER_BYTES = 64  # at most, for each answer after the first
_codec = client_codec()


def checked_params(params: SamplingParams | None, options: Mapping[str, Any]) -> SamplingParams:
    """The checked sampling parameters of a request, given as an object or as keyword options.

    Raises: BadRequestError for both at once, an unknown name, or an invalid type or value.
    """
    try:
        if params is None:
            found = params_from(options)
        elif options:
            names = ", ".join(sorted(options))
            allowed = "either sampling_params or single options, not both"
            raise BadRequest("sampling_params", names, allowed)
        elif isinstance(params, SamplingParams):
            found = _converted(params)
        else:
            raise BadRequest("sampling_params", params, "SamplingParams, or single options")
        check_params(found)
    except BadRequest as error:
        raise bad_request(error) from None
    if found.structured_outputs is not None:
        as_text = json_as_text(found.structured_outputs)
        found = msgspec.structs.replace(found, structured_outputs=as_text)
    return found


def params_of_answers(params: SamplingParams) -> list[SamplingParams]:
    """The parameters of each of a prompt's `n` answers, with consecutive seeds. params: checked."""
    if params.n == 1:
        return [params]
    one = msgspec.structs.replace(params, n=1)
    answers = [one] * params.n
    if params.seed is not None:
        seeds = [(params.seed + index + 2**63) % 2**64 - 2**63 for index in range(params.n)]
        answers = [msgspec.structs.replace(one, seed=seed) for seed in seeds]
    # the first answer brings the prompt's log-probabilities for all of them
    others = [msgspec.structs.replace(each, prompt_logprobs=None) for each in answers[1:]]
    return [answers[0], *others]


def new_submit(
    prompt: Prompt,
    params: SamplingParams,
    *,
    label: str | None = None,
    priority: int = 0,
    model: ModelCard | None = None,
    stream_id: str | None = None,
    cache_salt: str | None = None,
    template: TemplateOptions | None = None,
    trace_headers: Mapping[str, str] | None = None,
) -> Submit:
    """A Submit; the I/O thread sets its handle.

    params, template: checked. model: checks the prompt's token ids and length, if known. stream_id:
    32 hexadecimal digits; None draws one.

    Raises: BadRequestError.
    """
    (submit,) = new_submits(
        prompt,
        [params],
        label=label,
        priority=priority,
        model=model,
        stream_ids=[stream_id],
        cache_salt=cache_salt,
        template=template,
        trace_headers=trace_headers,
    )
    return submit


def new_submits(
    prompt: Prompt,
    answers: Sequence[SamplingParams],
    *,
    stream_ids: Sequence[str | None],
    label: str | None = None,
    priority: int = 0,
    model: ModelCard | None = None,
    cache_salt: str | None = None,
    template: TemplateOptions | None = None,
    trace_headers: Mapping[str, str] | None = None,
) -> list[Submit]:
    """A Submit for each of a prompt's answers. The prompt is checked and encoded only once.

    The Submits share the objects of the prompt and the parameters, by which `can_join` recognises
    them.

    Raises: BadRequestError.
    """
    try:
        if not isinstance(label, str | None):
            raise BadRequest("label", label, "a string, or None")
        if not isinstance(priority, int) or isinstance(priority, bool):
            raise BadRequest("priority", priority, "a 32-bit integer; lower runs first")
        check_label(label or "", priority)
        if not isinstance(cache_salt, str | None):
            raise BadRequest("cache_salt", type(cache_salt).__name__, "a string, or None")
        check_cache_salt(cache_salt or "")
        text, token_ids, messages = checked_prompt(prompt)
        if template is not None and not messages:
            given = "text" if text is not None else "token ids"
            raise BadRequest("prompt", given, "chat messages beside options of the chat template")
        plain = Submit(
            handle=0,
            stream_id=bytes(16),
            params=Raw(),
            text=text,
            token_ids=token_ids,
            messages=messages,
            label=_utf8("label", label or ""),
            priority=priority,
            cache_salt=_utf8("cache_salt", cache_salt or ""),
            template=template or TemplateOptions(),
            trace=trace_context_of(trace_headers),
        )
        num_plain_bytes = _num_bytes(plain) + _OTHER_BYTES * (len(answers) - 1)
        submits: list[Submit] = []
        shared = None  # the previous answer's params, without their seed
        for params, stream_id in zip(answers, stream_ids, strict=True):
            seed = params.seed
            if len(answers) > 1:
                params = msgspec.structs.replace(params, seed=None)
            if params != shared:
                _check_answer(params, token_ids, model)
                encoded = _encoded(params)
                num_bytes = num_plain_bytes + memoryview(encoded).nbytes
                if num_bytes > MAX_MESSAGE_BYTES:
                    given = f"a request of {num_bytes} bytes"
                    raise BadRequest("prompt", given, f"at most {MAX_MESSAGE_BYTES}")
                shared = params
                plain = msgspec.structs.replace(plain, params=encoded)
            own_id = secrets.token_bytes(16) if stream_id is None else _stream_id(stream_id)
            own = plain if len(answers) == 1 else msgspec.structs.replace(plain, seed=seed)
            submits.append(msgspec.structs.replace(own, stream_id=own_id))
    except BadRequest as error:
        raise bad_request(error) from None
    return submits


def new_resume(
    stream_id: str, num_chars: int, num_tokens: int, checksum: int | None = None
) -> Resume:
    """A Resume; the I/O thread sets its handle. checksum: `history_checksum` of the tokens.

    Raises: BadRequestError.
    """
    try:
        for field, value in (
            ("num_chars", num_chars),
            ("num_tokens", num_tokens),
            ("checksum", 0 if checksum is None else checksum),
        ):
            if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value < 2**32:
                raise BadRequest(field, value, "an integer in [0, 2**32)")
        return Resume(0, _stream_id(stream_id), num_chars, num_tokens, checksum=checksum)
    except BadRequest as error:
        raise bad_request(error) from None


def joined(submit: Submit, others: Iterable[Submit]) -> Submit:
    """One Submit for all of these answers, which have to satisfy `can_join`."""
    own = tuple(OtherAnswer(other.handle, other.stream_id, other.seed) for other in others)
    return msgspec.structs.replace(submit, others=own)


def can_join(submit: Submit, other: Submit) -> bool:
    """Whether both come from one call of `new_submits` and differ at most in their seeds."""
    return (
        submit.params is other.params
        and submit.text is other.text
        and submit.token_ids is other.token_ids
        and submit.messages is other.messages
    )


def fits_message(body: ClientToWorker) -> bool:
    """Whether a message is within MAX_MESSAGE_BYTES."""
    return _num_bytes(body) <= MAX_MESSAGE_BYTES


def _check_answer(params: SamplingParams, token_ids: bytes, model: ModelCard | None) -> None:
    if params.n != 1:
        allowed = "1 for a stream; `generate`, `generate_many` and `stream_many` take more"
        raise BadRequest("n", params.n, allowed)
    if token_ids and model is not None:
        check_prompt(u32(token_ids), params, model)
    if model is not None:
        check_num_logprobs(params, model)


def _num_bytes(body: ClientToWorker) -> int:
    frame: Frame[ClientToWorker] = Frame(2**63, 2**63, 2**63, body)
    return len(_codec.encode(frame))


def _stream_id(given: str) -> bytes:
    if isinstance(given, str) and re.fullmatch("[0-9a-fA-F]{32}", given):
        return bytes.fromhex(given)
    raise BadRequest("stream_id", given, "32 hexadecimal digits (a stream's `id`)")


def checked_prompt(prompt: Prompt) -> tuple[str | None, bytes, tuple[ChatMessage, ...]]:
    """A prompt as text, as a u32 column of token ids or as messages; all but one are empty.

    Raises: BadRequest.
    """
    if isinstance(prompt, Mapping):
        return checked_prompt(_unwrapped(prompt))
    if isinstance(prompt, str):
        return _utf8("prompt", prompt), b"", ()
    if not isinstance(prompt, Sequence | np.ndarray) or isinstance(prompt, bytes | bytearray):
        raise BadRequest("prompt", prompt, _KINDS)
    if not len(prompt):
        raise BadRequest("prompt", prompt, f"{_KINDS}, none of them empty")
    if isinstance(prompt[0], ChatMessage | Mapping):
        check_turns(len(prompt))
        return None, b"", tuple(_message(index, each) for index, each in enumerate(prompt))
    return None, pack_u32(token_ids_from(prompt)), ()


def is_prompt_mapping(given: object) -> bool:
    """Whether this is meant as a TextPrompt or TokensPrompt, valid or not, and no chat message."""
    return isinstance(given, Mapping) and ("prompt" in given or "prompt_token_ids" in given)


def _unwrapped(given: Mapping[str, object]) -> Any:
    """The text or token ids in a TextPrompt or a TokensPrompt. Raises: BadRequest."""
    if len(given) == 1:
        [(name, value)] = given.items()
        if name == "prompt" and isinstance(value, str):
            return value
        if name == "prompt_token_ids" and not isinstance(value, str | Mapping):
            ids = token_ids_from(value)
            if len(ids):
                return ids
    raise BadRequest("prompt", given, _KINDS)


def _message(index: int, given: object) -> ChatMessage:
    field = f"messages[{index}]"
    try:
        if isinstance(given, ChatMessage):
            given = msgspec.to_builtins(given)  # a Struct's constructor checks no types
        elif isinstance(given, Mapping) and given.get("tool_calls") and "content" in given:
            given = {**given, "content": given["content"] or ""}  # may be null beside tool calls
        message = msgspec.convert(given, ChatMessage)
    except msgspec.ValidationError as error:
        raise BadRequest(field, given, f"role and content, both strings ({error})") from None
    _utf8(field, message.role + message.content)
    if message.name is not None:
        _utf8(f"{field}.name", message.name)
    if message.tool_calls is not None or message.tool_call_id is not None:
        try:
            msgspec.msgpack.encode(message)
        except UnicodeEncodeError as error:
            raise BadRequest(field, message, "text that UTF-8 can hold") from error
        template_message(message, field)
    return message


def _converted(params: SamplingParams) -> SamplingParams:
    fields = msgspec.structs.asdict(params)  # a Struct's constructor checks no types
    if isinstance(params.structured_outputs, StructuredOutputs):
        fields["structured_outputs"] = msgspec.structs.asdict(params.structured_outputs)
    try:
        return msgspec.convert(fields, SamplingParams)
    except msgspec.ValidationError:
        return params_from(fields)  # raises an error that names the field


def _encoded(params: SamplingParams) -> Raw:
    for word in params.bad_words or ():
        _utf8("bad_words", word)
    try:
        return encode_params(params)
    except UnicodeEncodeError as error:
        raise BadRequest("stop", params.stop, "text that UTF-8 can hold") from error


def _utf8(field: str, text: str) -> str:
    """Check that the text has no lone surrogates, which no message can hold. Raises: BadRequest."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise BadRequest(field, text, "text that UTF-8 can hold") from error
    return text
