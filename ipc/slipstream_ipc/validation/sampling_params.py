"""Checks the values of SamplingParams, of prompts, and of registrations.

A client makes these checks early and the worker makes them again. Every failure is a BadRequest
that names the field, the value and what is allowed.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import msgspec
import numpy as np

from slipstream_ipc.arrays import UInt32s
from slipstream_ipc.errors import BadRequest, Summary, TooManyTokens
from slipstream_ipc.messages import (
    MAX_CHAT_TURNS,
    MAX_PREDICTION_TOKENS,
    Admit,
    ModelCard,
    RepetitionDetection,
    SamplingParams,
    StructuredOutputs,
)
from slipstream_ipc.messages.budgets import LOGPROB_BYTES
from slipstream_ipc.validation.field_types import field_error
from slipstream_ipc.validation.structured_output import check_made_grammar, check_structured
from slipstream_ipc.validation.token_constraints import (
    check_known_ids,
    check_token_params,
    unpack_words,
)

MAX_LOGPROBS = 300_000  # larger than any vocabulary
MAX_LOGPROB_TOKEN_IDS = 128
MAX_LOGPROB_BYTES = 64 * 2**20  # per request, prompt and outputs together
MAX_N = 128
MAX_STOPS = 64
MAX_STOP_CHARS = 1024
MAX_STOP_TOKEN_IDS = 128
MAX_PATTERN_SIZE = 2048  # tokens of a pattern that repetition_detection looks for
MAX_PATTERN_COUNT = 2**16
MAX_SEED = 2**63 - 1
MAX_TEMPERATURE = 1e30  # far below float32's maximum

_NONE_MEANS_EMPTY = ("stop", "stop_token_ids")
_TRUE_MEANS_ONE = ("logprobs", "prompt_logprobs")


def params_from(options: Mapping[str, Any]) -> SamplingParams:
    """SamplingParams of keyword options. Raises: BadRequest for an unknown name or a wrong type.

    As in vLLM, `stop` and `stop_token_ids` may be None for none, and numbers of log-probabilities
    True for 1.
    """
    options = {
        name: value
        for name, value in options.items()
        if value is not None or name not in _NONE_MEANS_EMPTY
    }
    options = with_numbers(options)
    wanted = options.get("structured_outputs")
    if isinstance(wanted, StructuredOutputs):  # a Struct's constructor checks no types
        options = {**options, "structured_outputs": msgspec.structs.asdict(wanted)}
    detection = options.get("repetition_detection")
    if isinstance(detection, RepetitionDetection):
        options = {**options, "repetition_detection": msgspec.structs.asdict(detection)}
    for name, value in options.items():
        if name not in SamplingParams.__struct_fields__:
            allowed = "one of " + ", ".join(sorted(SamplingParams.__struct_fields__))
            raise BadRequest("parameter", f"{name}={value!r}", allowed)
        try:
            msgspec.convert({name: value}, SamplingParams)
        except msgspec.ValidationError as error:
            raise field_error(error, SamplingParams, {name: value}) from error
    return msgspec.convert(dict(options), SamplingParams)


def with_numbers(options: Mapping[str, Any]) -> Mapping[str, Any]:
    """The options with 1 for True where vLLM takes that as a number."""
    true = [name for name in _TRUE_MEANS_ONE if options.get(name) is True]
    return {**options, **dict.fromkeys(true, 1)} if true else options


def stop_strings(params: SamplingParams) -> tuple[str, ...]:
    """The stop strings as a tuple, even if `stop` is a single string."""
    return (params.stop,) if isinstance(params.stop, str) else params.stop


def check_params(params: SamplingParams) -> None:
    """Check all values; the types are right already.

    Raises: BadRequest for the first field whose value is not allowed.
    """
    allowed = f"a number in [0, {MAX_TEMPERATURE:g}]"
    _number("temperature", params.temperature, 0, MAX_TEMPERATURE, allowed)
    _number("top_p", params.top_p, 0, 1, "a number in (0, 1]", open_below=True)
    _number("min_p", params.min_p, 0, 1, "a number in [0, 1]")
    _integer("top_k", params.top_k, -1, 2**31 - 1, "an integer >= 0, 0 or -1 is off")
    if params.seed is not None:
        _integer("seed", params.seed, -MAX_SEED - 1, MAX_SEED, "a 64-bit integer, or None")
    if params.max_tokens is not None:
        _integer("max_tokens", params.max_tokens, 1, 2**31 - 1, "an integer >= 1, or None")
    most = 2**31 - 1 if params.max_tokens is None else params.max_tokens
    _integer("min_tokens", params.min_tokens, 0, most, "an integer in [0, max_tokens]")
    for field in ("logprobs", "prompt_logprobs"):
        wanted: int | None = getattr(params, field)
        if wanted is not None:
            allowed = f"an integer in [0, {MAX_LOGPROBS}], -1 for the whole vocabulary, or None"
            _integer(field, wanted, -1, MAX_LOGPROBS, allowed)
    _check_logprob_ids(params)
    if params.thinking_token_budget is not None:
        allowed = "an integer >= 0, -1 or None for no limit"
        _integer("thinking_token_budget", params.thinking_token_budget, -1, 2**31 - 1, allowed)
    _integer("n", params.n, 1, MAX_N, f"an integer in [1, {MAX_N}]")
    _integer("stream_interval", params.stream_interval, 1, 2**31 - 1, "an integer >= 1")
    _check_stops(params)
    check_token_params(params)
    if params.repetition_detection is not None:
        check_repetition(params.repetition_detection)
    if params.structured_outputs is not None:
        check_structured(params.structured_outputs, params)


def check_repetition(wanted: RepetitionDetection) -> None:
    """Raise BadRequest for the first field of a repetition detection that is not allowed."""
    field, most = "repetition_detection", wanted.max_pattern_size
    allowed = f"an integer in [0, {MAX_PATTERN_SIZE}], 0 is off"
    _integer(f"{field}.max_pattern_size", most, 0, MAX_PATTERN_SIZE, allowed)
    allowed = "an integer in [0, max_pattern_size], 0 is 1"
    _integer(f"{field}.min_pattern_size", wanted.min_pattern_size, 0, most, allowed)
    allowed = f"an integer in [2, {MAX_PATTERN_COUNT}] where max_pattern_size is not 0"
    _integer(f"{field}.min_count", wanted.min_count, 2 if most else 0, MAX_PATTERN_COUNT, allowed)


def check_num_logprobs(params: SamplingParams, card: ModelCard) -> None:
    """Raise BadRequest if more log-probabilities per token are requested than the server allows."""
    most = card.vocab_size if card.max_logprobs < 0 else min(card.max_logprobs, card.vocab_size)
    for field in ("logprobs", "prompt_logprobs"):
        wanted: int | None = getattr(params, field)
        if field == "logprobs" and params.logprob_token_ids is not None:
            continue  # bounded by MAX_LOGPROB_TOKEN_IDS
        if wanted is not None and not (-1 if most == card.vocab_size else 0) <= wanted <= most:
            setting = f"max_logprobs is {card.max_logprobs}"
            raise BadRequest(field, wanted, f"an integer in [0, {most}] ({setting}), or None")


def with_num_logprobs(params: SamplingParams, vocab_size: int) -> SamplingParams:
    """The params with -1 (the whole vocabulary) replaced by `vocab_size`, and with `logprobs` set
    to the number of `logprob_token_ids`.
    """
    numbers = {
        field: vocab_size
        for field in ("logprobs", "prompt_logprobs")
        if getattr(params, field) == -1
    }
    if params.logprob_token_ids is not None and params.logprobs is None:
        numbers["logprobs"] = len(params.logprob_token_ids)
    return msgspec.structs.replace(params, **numbers) if numbers else params


def logprob_bytes(params: SamplingParams, prompt_len: int, max_tokens: int) -> int:
    """The most bytes that a request's log-probabilities take, for prompt and outputs.

    The params have to be those of `with_num_logprobs`, without -1.
    """
    num_bytes = 0
    for wanted, num_tokens in (
        (params.logprobs, max_tokens),
        (params.prompt_logprobs, prompt_len - 1),
    ):
        if wanted is not None:
            num_bytes += num_tokens * LOGPROB_BYTES * (1 + wanted)
    return num_bytes


def check_logprob_bytes(
    params: SamplingParams, prompt_len: int, max_tokens: int, vocab_size: int
) -> None:
    """Raise BadRequest if a request's log-probabilities may exceed MAX_LOGPROB_BYTES."""
    params, num_bytes = with_num_logprobs(params, vocab_size), 0
    for field, num_tokens in (("logprobs", max_tokens), ("prompt_logprobs", prompt_len - 1)):
        wanted: int | None = getattr(params, field)
        if wanted is not None:
            num_bytes += num_tokens * LOGPROB_BYTES * (1 + wanted)
        if num_bytes > MAX_LOGPROB_BYTES:
            given = Summary(f"{wanted} to each of {num_tokens} tokens: {num_bytes} bytes in all")
            allowed = f"{MAX_LOGPROB_BYTES} bytes, {LOGPROB_BYTES} to each log-probability"
            raise BadRequest(field, given, allowed)


def check_turns(num_turns: int) -> None:
    """Raise BadRequest if a chat has more messages than a request may hold."""
    if num_turns > MAX_CHAT_TURNS:
        raise BadRequest("messages", Summary(f"{num_turns} messages"), f"at most {MAX_CHAT_TURNS}")


def check_admit(admit: Admit) -> None:
    """Check a worker's registration like a client's request, on the core's side.

    The types and ranges are right already; what depends on the model is checked by the core later.
    Raises: BadRequest.
    """
    params, outputs = admit.spec.params, admit.spec.params.structured_outputs
    if admit.derived.answer is not None and outputs is not None and outputs.grammar is not None:
        # it may be the worker's, made of tools, which are longer than a grammar may be
        check_made_grammar(outputs.grammar)
        params = msgspec.structs.replace(params, structured_outputs=None)
    check_params(params)
    _integer("max_tokens", admit.derived.max_tokens, 1, 2**31 - 1, "an integer >= 1")
    prediction_ids = admit.derived.prediction_ids
    columns = [("prompt_ids", admit.prompt_ids), ("output_ids", admit.begun.output_ids)]
    columns += [("prediction_ids", prediction_ids)]
    columns += [("output_ids", other.begun.output_ids) for other in admit.others]
    for field, column in columns:
        if len(column) % 4:
            raise BadRequest(field, Summary(f"{len(column)} bytes"), "u32 values")
    if len(prediction_ids) > 4 * MAX_PREDICTION_TOKENS:
        given = Summary(f"{len(prediction_ids)} bytes")
        raise BadRequest("prediction_ids", given, f"at most {4 * MAX_PREDICTION_TOKENS}")
    unpack_words(admit.derived.bad_word_ids, admit.derived.bad_word_counts)


def check_prompt(token_ids: UInt32s, params: SamplingParams, card: ModelCard) -> int:
    """The number of tokens that the request may produce.

    Raises: BadRequest if its prompt or its params do not fit the model.
    """
    num = len(token_ids)
    if not num:
        raise BadRequest("prompt", Summary("an empty prompt"), "at least one token")
    largest = int(token_ids.max())
    if largest >= card.vocab_size:
        allowed = f"token ids in [0, {card.vocab_size})"
        raise BadRequest("prompt_token_ids", largest, allowed)
    if num >= card.max_model_len:
        most = card.max_model_len - 1
        allowed = f"at most {most} (max_model_len {card.max_model_len} less one)"
        raise TooManyTokens("prompt", Summary(f"{num} tokens"), allowed, num, most)
    room = card.max_model_len - num
    for token_id in params.stop_token_ids:
        if not 0 <= token_id < card.vocab_size:
            raise BadRequest("stop_token_ids", token_id, f"ids in [0, {card.vocab_size})")
    check_known_ids(params, card.vocab_size)
    check_num_logprobs(params, card)
    max_tokens = room if params.max_tokens is None else params.max_tokens
    if max_tokens > room:
        allowed = f"at most {room} (max_model_len {card.max_model_len} less the prompt's {num})"
        raise TooManyTokens(
            "max_tokens",
            max_tokens,
            allowed,
            num,
            card.max_model_len,
            num_answer_tokens=max_tokens,
        )
    check_logprob_bytes(params, num, max_tokens, card.vocab_size)
    return max_tokens


def token_ids_from(ids: Any) -> UInt32s:
    """A u32 array, [n], of token ids given as a sequence of integers. Raises: BadRequest."""
    allowed = "a sequence of integers in [0, 2**32)"
    try:
        array = np.asarray(ids)
    except (ValueError, TypeError, OverflowError) as error:
        raise BadRequest("prompt_token_ids", ids, allowed) from error
    if array.ndim == 1 and array.size == 0:
        return np.zeros(0, np.uint32)
    if array.ndim != 1 or array.dtype.kind not in "iu":
        raise BadRequest("prompt_token_ids", ids, allowed)
    for value in (array.min(), array.max()):
        if not 0 <= int(value) < 2**32:
            raise BadRequest("prompt_token_ids", int(value), allowed)
    return array.astype(np.uint32)


def _check_logprob_ids(params: SamplingParams) -> None:
    token_ids = params.logprob_token_ids
    if token_ids is None:
        return
    field, num = "logprob_token_ids", len(token_ids)
    if not 0 < num <= MAX_LOGPROB_TOKEN_IDS:
        raise BadRequest(field, Summary(f"{num} ids"), f"1 to {MAX_LOGPROB_TOKEN_IDS}, or None")
    for token_id in token_ids:
        _integer(field, token_id, 0, 2**32 - 1, "ids in [0, 2**32)")
    if params.logprobs not in (None, num):
        allowed = f"{num}, the number of logprob_token_ids, or None beside them"
        raise BadRequest("logprobs", params.logprobs, allowed)


def _check_stops(params: SamplingParams) -> None:
    stops = stop_strings(params)
    if len(stops) > MAX_STOPS:
        raise BadRequest("stop", Summary(f"{len(stops)} strings"), f"at most {MAX_STOPS}")
    for stop in stops:
        if not stop or len(stop) > MAX_STOP_CHARS:
            raise BadRequest("stop", stop, f"strings of 1 to {MAX_STOP_CHARS} characters")
    if stops and not params.detokenize:
        raise BadRequest("stop", stops, "no stop strings where detokenize is False")
    num_ids = len(params.stop_token_ids)
    if num_ids > MAX_STOP_TOKEN_IDS:
        raise BadRequest(
            "stop_token_ids", Summary(f"{num_ids} ids"), f"at most {MAX_STOP_TOKEN_IDS}"
        )
    for token_id in params.stop_token_ids:
        _integer("stop_token_ids", token_id, 0, 2**32 - 1, "ids in [0, 2**32)")


def _number(
    field: str, value: float, low: float, high: float, allowed: str, *, open_below: bool = False
) -> None:
    above = value > low if open_below else value >= low
    if not (math.isfinite(value) and above and value <= high):
        raise BadRequest(field, value, allowed)


def _integer(field: str, value: int, low: int, high: int, allowed: str) -> None:
    if not low <= value <= high:
        raise BadRequest(field, value, allowed)
