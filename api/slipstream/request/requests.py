"""Turns prompts and options given by a caller into a Submit or a Resume.

All checks that need no server are made here; an error names the invalid field. The worker renders
chat templates and tokenizes. A Submit made here can be encoded and fits into a message, so the I/O
thread never meets a request that it cannot send.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Mapping, Sequence
from typing import Any, Unpack

import msgspec
from msgspec import Raw

from slipstream.errors import BadRequestError, bad_request
from slipstream.packed_prompts import PACKED_BYTES, packed
from slipstream.request.prompts import Prompt, checked_prompt, checked_utf8
from slipstream.request.served_models import AdaptedModel
from slipstream.request.trace_context import trace_context_of
from slipstream_ipc.columns import u32
from slipstream_ipc.errors import BadRequest, Summary
from slipstream_ipc.messages import (
    AnswerOptions,
    AskedOptions,
    ClientToWorker,
    Fault,
    Frame,
    ModelCard,
    RepetitionDetection,
    Resume,
    SamplingParams,
    StructuredOutputs,
    Submit,
    TemplateOptions,
)
from slipstream_ipc.messages.budgets import MAX_MESSAGE_BYTES
from slipstream_ipc.transport.codec import client_codec, encode_params
from slipstream_ipc.validation.media import why_no_media
from slipstream_ipc.validation.pooling import served_for
from slipstream_ipc.validation.request_spec import check_spec
from slipstream_ipc.validation.sampling_params import (
    check_num_logprobs,
    check_params,
    check_prompt,
    check_repetition,
    params_from,
    with_numbers,
)
from slipstream_ipc.validation.structured_output import check_form, json_as_text
from slipstream_ipc.worker_deal import dealt_with

MAX_CACHE_KEY_CHARS = 1024
NO_SEED = -1  # as in vLLM and llama.cpp, whose clients send it for a random one
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
            params_from(options)  # an unknown option is reported as such
            names = Summary(f"it and {', '.join(sorted(options))}")
            allowed = "either sampling_params or single options, not both"
            raise BadRequest("sampling_params", names, allowed)
        elif isinstance(params, SamplingParams):
            found = _converted(params)
        else:
            raise BadRequest("sampling_params", params, "SamplingParams, or single options")
        check_params(found)
    except BadRequest as error:
        raise bad_request(error) from None
    if found.seed == NO_SEED:
        found = msgspec.structs.replace(found, seed=None)
    if found.structured_outputs is not None:
        as_text = json_as_text(found.structured_outputs)
        found = msgspec.structs.replace(found, structured_outputs=as_text)
    return found


def check_outputs(outputs: StructuredOutputs) -> None:
    """Check a form of answers by itself. Raises: BadRequestError."""
    try:
        params = params_from({"structured_outputs": outputs})
        assert params.structured_outputs is not None
        check_form(params.structured_outputs)
    except BadRequest as error:
        raise bad_request(error) from None


def check_detection(wanted: RepetitionDetection) -> None:
    """Check a repetition detection by itself. Raises: BadRequestError."""
    try:
        params = params_from({"repetition_detection": wanted})
        assert params.repetition_detection is not None
        check_repetition(params.repetition_detection)
    except BadRequest as error:
        raise bad_request(error) from None


def new_submit(
    prompt: Prompt,
    params: SamplingParams,
    *,
    label: str | None = None,
    model: ModelCard | None = None,
    stream_id: str | None = None,
    template: TemplateOptions | None = None,
    answer: AnswerOptions | None = None,
    trace_headers: Mapping[str, str] | None = None,
    **asked: Unpack[AskedOptions],
) -> Submit:
    """A Submit; the I/O thread sets its handle.

    params, template, answer: checked. model: checks the prompt's token ids and length, if known.
    stream_id: 32 hexadecimal digits; None draws one. asked: what else there is of its spec.

    Raises: BadRequestError.
    """
    (submit,) = new_submits(
        prompt,
        [params],
        label=label,
        model=model,
        stream_ids=[stream_id],
        template=template,
        answer=answer,
        trace_headers=trace_headers,
        **asked,
    )
    return submit


def checked_cache_key(given: str | None) -> str:
    """A request's `prompt_cache_key`; empty for None. Raises: BadRequestError."""
    try:
        if not isinstance(given, str | None):
            raise BadRequest("prompt_cache_key", type(given).__name__, "a string, or None")
        if given is not None and len(given) > MAX_CACHE_KEY_CHARS:
            found = Summary(f"{len(given)} characters")
            raise BadRequest("prompt_cache_key", found, f"at most {MAX_CACHE_KEY_CHARS}")
        return checked_utf8("prompt_cache_key", given or "")
    except BadRequest as error:
        raise bad_request(error) from None


def new_submits(
    prompt: Prompt,
    answers: Sequence[SamplingParams],
    *,
    stream_ids: Sequence[str | None],
    label: str | None = None,
    model: ModelCard | None = None,
    template: TemplateOptions | None = None,
    answer: AnswerOptions | None = None,
    trace_headers: Mapping[str, str] | None = None,
    **asked: Unpack[AskedOptions],
) -> list[Submit]:
    """A Submit for each of a prompt's answers. The prompt is checked and encoded only once.

    answer: how answers to chat messages are read; without effect on other prompts, and where
    answers have no text.

    The Submits share the objects of the prompt and the parameters, by which
    `parallel_sampling.can_join` recognises them.

    Raises: BadRequestError.
    """
    if model is not None and model.pooling is not None:
        why = f"{model.name!r} is served {served_for(model.pooling)}: it generates no text"
        raise BadRequestError(Fault("bad_request", why))
    try:
        text, token_ids, messages, media, _ = checked = checked_prompt(prompt)
        if media and model is not None and (why := why_no_media(model)):
            place = checked.places[0] if checked.places else "media"
            raise BadRequest(place, Summary("an image"), f"text: {why}")
        if answer is not None and answer.forces_calls and not answers[0].detokenize:
            raise BadRequest("detokenize", False, "true where a call is forced")
        if template is not None and not messages:
            given = Summary("text" if text is not None else "token ids")
            raise BadRequest("prompt", given, "chat messages beside options of chats")
        named = {name: value for name, value in asked.items() if value is not None}
        _check_prediction(asked.get("prediction"))
        request = Submit(
            handle=0,
            stream_id=bytes(16),
            params=Raw(),
            text=text,
            token_ids=token_ids,
            messages=messages,
            label="" if label is None else label,
            template=template or TemplateOptions(),
            trace=trace_context_of(trace_headers),
            answer=answer if messages and answers[0].detokenize else None,
            media=media,
            **_adapter_of(model),
            **named,  # type: ignore[arg-type]
        )
        check_spec(request)
        for name, value in (("label", label), *named.items()):
            if isinstance(value, str):
                checked_utf8(name, value)
        num_shared_bytes = _num_bytes(request) + _OTHER_BYTES * (len(answers) - 1)
        if num_shared_bytes > PACKED_BYTES:
            request = packed(request)
        submits: list[Submit] = []
        shared = None  # the previous answer's params, without their seed
        for params, stream_id in zip(answers, stream_ids, strict=True):
            seed = params.seed
            if len(answers) > 1:
                params = msgspec.structs.replace(params, seed=None)
            if params != shared:
                _check_answer(params, token_ids, model)
                encoded = _encoded(params)
                num_bytes = num_shared_bytes + memoryview(encoded).nbytes
                if num_bytes > MAX_MESSAGE_BYTES:
                    given = Summary(f"a request of {num_bytes} bytes")
                    raise BadRequest("prompt", given, f"at most {MAX_MESSAGE_BYTES}")
                shared = params
                request = msgspec.structs.replace(request, params=encoded)
            answer_id = secrets.token_bytes(16) if stream_id is None else _stream_id(stream_id)
            if submits and stream_id is None:  # one worker renders the prompt for all of them
                answer_id = dealt_with(submits[0].stream_id, answer_id)
            seeded = request if len(answers) == 1 else msgspec.structs.replace(request, seed=seed)
            submits.append(msgspec.structs.replace(seeded, stream_id=answer_id))
    except BadRequest as error:
        raise bad_request(error) from None
    return submits


def _check_prediction(prediction: object) -> None:
    if prediction is not None and not isinstance(prediction, str):
        raise BadRequest("prediction", type(prediction).__name__, "a string, or None")
    if prediction == "":
        raise BadRequest("prediction", "", "the text that the answer will probably say")


def _adapter_of(model: ModelCard | None) -> dict[str, Any]:
    """The fields of a Submit that name its adapter, where the model is one."""
    if not isinstance(model, AdaptedModel):
        return {}
    return {"adapter": model.adapter.name, "adapter_digest": model.adapter.digest}


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


def fits_message(body: ClientToWorker) -> bool:
    """True if a message is within MAX_MESSAGE_BYTES."""
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


def _converted(params: SamplingParams) -> SamplingParams:
    fields = msgspec.structs.asdict(params)  # a Struct's constructor checks no types
    if isinstance(params.structured_outputs, StructuredOutputs):
        fields["structured_outputs"] = msgspec.structs.asdict(params.structured_outputs)
    if isinstance(params.repetition_detection, RepetitionDetection):
        fields["repetition_detection"] = msgspec.structs.asdict(params.repetition_detection)
    given = with_numbers(fields)
    try:
        return msgspec.convert(given, SamplingParams)
    except msgspec.ValidationError:
        return params_from(given)  # raises an error that names the field


def _encoded(params: SamplingParams) -> Raw:
    for word in params.bad_words or ():
        checked_utf8("bad_words", word)
    try:
        return encode_params(params)
    except UnicodeEncodeError as error:
        raise BadRequest("stop", params.stop, "text that UTF-8 can hold") from error
