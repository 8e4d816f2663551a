"""Requests: every bad value is refused by the field's name, the value, and what is allowed."""

from __future__ import annotations

import contextlib
import math
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from slipstream_ipc.columns import pack_u32
from slipstream_ipc.errors import BadRequest
from slipstream_ipc.messages import (
    ModelCard,
    RepetitionDetection,
    SamplingParams,
    StructuredOutputs,
)
from slipstream_ipc.transport.codec import decode_params, encode_params
from slipstream_ipc.validation.sampling_params import (
    MAX_LOGPROB_BYTES,
    MAX_LOGPROB_TOKEN_IDS,
    MAX_LOGPROBS,
    MAX_N,
    MAX_PATTERN_COUNT,
    MAX_PATTERN_SIZE,
    MAX_SEED,
    MAX_STOP_CHARS,
    MAX_STOP_TOKEN_IDS,
    MAX_STOPS,
    check_params,
    check_prompt,
    params_from,
    stop_strings,
    token_ids_from,
    with_num_logprobs,
)
from slipstream_ipc.validation.token_constraints import (
    MAX_ALLOWED_TOKEN_IDS,
    MAX_BAD_WORD_CHARS,
    MAX_BAD_WORDS,
    MAX_LOGIT_BIASES,
)

CARD = ModelCard("m", "p", vocab_size=100, max_model_len=32, eos_token_ids=(2,))
HUGE = 2**70

BAD_VALUES: dict[str, list[Any]] = {
    "temperature": [-0.001, math.nan, math.inf, -math.inf, -1],
    "top_p": [0, 0.0, 1.001, -1, math.nan, math.inf],
    "min_p": [-0.1, 1.1, math.nan, -math.inf],
    "top_k": [-2, 2**31, HUGE, -HUGE],
    "seed": [MAX_SEED + 1, -MAX_SEED - 2, HUGE, -HUGE],
    "max_tokens": [0, -1, 2**31, HUGE],
    "min_tokens": [-1, 17, HUGE],
    "logprobs": [-2, MAX_LOGPROBS + 1, HUGE],
    "prompt_logprobs": [-2, MAX_LOGPROBS + 1, HUGE],
    "logprob_token_ids": [[], [-1], [0, 2**32], [1] * (MAX_LOGPROB_TOKEN_IDS + 1)],
    "stream_interval": [0, -1, 2**31, HUGE],
    "stop": [
        "",
        [""],
        ["a", ""],
        ["a"] * (MAX_STOPS + 1),
        "a" * (MAX_STOP_CHARS + 1),
    ],
    "stop_token_ids": [[1] * (MAX_STOP_TOKEN_IDS + 1), [-1], [3, 2**32], [HUGE]],
    "presence_penalty": [-2.001, 2.001, math.nan, math.inf, 3],
    "frequency_penalty": [-2.001, 2.001, math.nan, -math.inf, 3],
    "repetition_penalty": [0, 0.0, -1, 1e-7, 1e7, math.nan, math.inf],
    "logit_bias": [
        {-1: 0.0},
        {2**32: 1.0},
        {1: 100.001},
        {1: math.nan},
        {1: -math.inf},
        dict.fromkeys(range(MAX_LOGIT_BIASES + 1), 1.0),
    ],
    "allowed_token_ids": [[], [-1], [0, 2**32], [1] * (MAX_ALLOWED_TOKEN_IDS + 1)],
    "bad_words": [[""], ["a", ""], ["a"] * (MAX_BAD_WORDS + 1), ["a" * (MAX_BAD_WORD_CHARS + 1)]],
    "n": [0, -1, MAX_N + 1],
    "thinking_token_budget": [-2, 2**31, HUGE],
    "structured_outputs": [{}, {"json_object": False}, {"regex": "a", "choice": ["b"]}],
}

WRONG_TYPES: dict[str, list[Any]] = {
    "temperature": ["1", None, True, [1], np.float64(1), 10**400],
    "top_p": ["1", None, False],
    "min_p": ["1", None, True],
    "top_k": ["1", None, True, 1.0, math.nan, np.int64(1)],
    "seed": ["1", True, 1.5],
    "max_tokens": ["1", True, 16.0, math.inf],
    "min_tokens": ["1", True, None],
    "logprobs": ["1", False, 1.0],
    "prompt_logprobs": ["1", False, 1.0],
    "logprob_token_ids": [1, "1", ["1"], [1.0], [None]],
    "stream_interval": ["1", True, None, 1.0],
    "stop": [1, [1], [None], [["a"]]],
    "stop_token_ids": [1, "1", ["1"], [1.0], [True]],
    "include_stop_str_in_output": [None, 1, "true"],
    "ignore_eos": [None, 0, "no"],
    "skip_special_tokens": [None, 1, []],
    "detokenize": [None, 1, {}],
    "presence_penalty": ["1", None, True, [1]],
    "frequency_penalty": ["1", None, False],
    "repetition_penalty": ["1", None, True],
    "logit_bias": [[1], {"a": 1.0}, {"1": 1.0}, {1: "1"}, {1: None}, {1.5: 1.0}],
    "allowed_token_ids": [1, "1", ["1"], [1.0], [None]],
    "bad_words": ["a", [1], [None], [["a"]]],
    "n": ["1", None, 1.5, [1]],
    "thinking_token_budget": ["1", True, 1.0],
    "structured_outputs": [
        StructuredOutputs(regex=1),
        1,
        "a",
        [],
        {"regex": 1},
        {"choice": "a"},
        {"jason": {}},
    ],
    "repetition_detection": [
        RepetitionDetection(max_pattern_size="3"),
        1,
        "a",
        [3, 1, 2],
        {"max_pattern_size": "3"},
        {"max_pattern_size": None},
        {"min_count": 2.5},
        {"max_size": 3},
    ],
}

GOOD_VALUES: dict[str, list[Any]] = {
    "temperature": [0, 0.0, 1, 1e30],
    "top_p": [1, 1e-9, 0.5],
    "min_p": [0, 1, 0.5],
    "top_k": [-1, 0, 1, 2**31 - 1],
    "seed": [None, 0, -1, MAX_SEED, -MAX_SEED - 1],
    "max_tokens": [None, 1, 2**31 - 1],
    "min_tokens": [0, 16],
    "logprobs": [None, 0, -1, MAX_LOGPROBS],
    "prompt_logprobs": [None, 0, -1, MAX_LOGPROBS],
    "logprob_token_ids": [None, [0], [5, 2**32 - 1], [1] * MAX_LOGPROB_TOKEN_IDS],
    "stream_interval": [1, 1000],
    "thinking_token_budget": [None, -1, 0, 2**31 - 1],
    "stop": [(), [], "a", ["a", "b"], "é" * MAX_STOP_CHARS, ["x"] * MAX_STOPS],
    "stop_token_ids": [(), [0, 2**32 - 1], [1] * MAX_STOP_TOKEN_IDS],
    "include_stop_str_in_output": [True, False],
    "ignore_eos": [True],
    "skip_special_tokens": [False],
    "detokenize": [False],
    "presence_penalty": [-2, 2, 0.5],
    "frequency_penalty": [-2.0, 2.0, 0],
    "repetition_penalty": [1, 1e-6, 1e6, 1.1],
    "logit_bias": [None, {}, {0: -100, 2**32 - 1: 100.0}],
    "allowed_token_ids": [None, [0], [5, 2**32 - 1], [2**32 - 1] * MAX_ALLOWED_TOKEN_IDS],
    "bad_words": [None, [], ["a", " b"], ["é" * MAX_BAD_WORD_CHARS] * MAX_BAD_WORDS],
    "n": [1, 2, MAX_N],
    "structured_outputs": [None, {"json": {"type": "null"}}, {"choice": ["a"]}, {"regex": "a+"}],
    "repetition_detection": [
        None,
        {},
        {"min_count": 3},
        {"max_pattern_size": 1, "min_count": 2},
        {
            "max_pattern_size": MAX_PATTERN_SIZE,
            "min_pattern_size": MAX_PATTERN_SIZE,
            "min_count": MAX_PATTERN_COUNT,
        },
    ],
}


def cases(of: dict[str, list[Any]]) -> list[Any]:
    return [
        pytest.param(name, value, id=f"{name}-{i}")
        for name, values in of.items()
        for i, value in enumerate(values)
    ]


def checked(**options: Any) -> SamplingParams:
    params = params_from(options)
    check_params(params)
    return params


def assert_names(error: BadRequest, field: str, value: Any) -> None:
    assert error.field == field
    assert str(error).startswith(f"{field}: got ")
    assert ", allowed: " in str(error)
    assert len(str(error)) < 500
    shown = repr(value)
    assert shown[:20] in str(error) or isinstance(value, list | str | dict | StructuredOutputs)
    assert (error.fault.code, error.fault.field) == ("bad_request", field)
    assert error.fault.message == str(error)


@pytest.mark.parametrize(("field", "value"), cases(BAD_VALUES))
def test_bad_values(field: str, value: Any) -> None:
    with pytest.raises(BadRequest) as caught:
        checked(**{field: value})
    assert_names(caught.value, field, value)


@pytest.mark.parametrize(
    ("wrong", "value"),
    [
        ("max_pattern_size", {"max_pattern_size": -1}),
        ("max_pattern_size", {"max_pattern_size": MAX_PATTERN_SIZE + 1, "min_count": 2}),
        ("max_pattern_size", {"max_pattern_size": HUGE, "min_count": 2}),
        ("min_pattern_size", {"min_pattern_size": 1}),
        ("min_pattern_size", {"max_pattern_size": 3, "min_pattern_size": 4, "min_count": 2}),
        ("min_pattern_size", {"max_pattern_size": 3, "min_pattern_size": -1, "min_count": 2}),
        ("min_count", {"max_pattern_size": 3}),
        ("min_count", {"max_pattern_size": 3, "min_count": 1}),
        ("min_count", {"max_pattern_size": 3, "min_count": MAX_PATTERN_COUNT + 1}),
        ("min_count", {"min_count": -1}),
    ],
)
def test_bad_repetition_detections(wrong: str, value: dict[str, int]) -> None:
    with pytest.raises(BadRequest) as caught:
        checked(repetition_detection=value)
    assert_names(caught.value, f"repetition_detection.{wrong}", value.get(wrong, 0))


@pytest.mark.parametrize(("field", "value"), cases(WRONG_TYPES))
def test_wrong_types(field: str, value: Any) -> None:
    with pytest.raises(BadRequest) as caught:
        params_from({field: value})
    part = caught.value.field
    assert part.startswith(field)
    parts = [".regex", ".choice", ".jason", ".max_pattern_size", ".min_count", ".max_size"]
    assert part[len(field) :] in ("", "[0]", *parts)
    assert str(caught.value).startswith(f"{part}: ")
    assert "`" not in str(caught.value)  # msgspec's words


@pytest.mark.parametrize(("field", "value"), cases(GOOD_VALUES))
def test_good_values_travel(field: str, value: Any) -> None:
    params = checked(**{field: value})
    assert decode_params(encode_params(params)) == params


def test_every_field_is_tested() -> None:
    assert set(WRONG_TYPES) == set(GOOD_VALUES) == set(SamplingParams.__struct_fields__)


@pytest.mark.parametrize("name", ["temprature", "", "N", "Temperature", "__class__"])
def test_an_unknown_name_is_answered_with_all_there_are(name: str) -> None:
    with pytest.raises(BadRequest) as caught:
        params_from({"top_k": 1, name: 3})
    assert_names(caught.value, "parameter", f"{name}=3")
    assert "temperature" in str(caught.value)


def test_defaults_are_allowed() -> None:
    assert checked() == SamplingParams()


def test_fields_that_depend_on_others() -> None:
    assert checked(max_tokens=None, min_tokens=1000).min_tokens == 1000
    with pytest.raises(BadRequest, match=r"min_tokens: got 5, allowed: .*max_tokens"):
        checked(max_tokens=4, min_tokens=5)
    with pytest.raises(BadRequest, match="detokenize"):
        checked(stop="a", detokenize=False)


def test_listed_ids_say_how_many_log_probabilities_there_are() -> None:
    listed = checked(logprob_token_ids=[5, 3], logprobs=2)
    assert with_num_logprobs(listed, 100) == listed
    assert with_num_logprobs(checked(logprob_token_ids=[5, 3]), 100) == listed
    for other in (0, 1, 3, -1):
        with pytest.raises(BadRequest, match=r"logprobs: got .*, allowed: 2, the number of"):
            checked(logprob_token_ids=[5, 3], logprobs=other)
    few = msgspec.structs.replace(CARD, max_logprobs=1)
    check_prompt(ids(1), checked(logprob_token_ids=[5, 3, 99], max_tokens=2), few)
    with pytest.raises(BadRequest, match=r"logprob_token_ids: got 100, allowed: ids in \[0, 100\)"):
        check_prompt(ids(1), checked(logprob_token_ids=[5, 100], max_tokens=2), few)


def test_listed_ids_count_among_a_requests_bytes() -> None:
    long = msgspec.structs.replace(CARD, vocab_size=1000, max_model_len=2**20)
    listed = checked(logprob_token_ids=list(range(128)), max_tokens=MAX_LOGPROB_BYTES // (129 * 8))
    check_prompt(ids(1), listed, long)
    with pytest.raises(BadRequest, match=r"logprobs: got 128 to each of \d+ tokens"):
        check_prompt(ids(1), msgspec.structs.replace(listed, max_tokens=2**17), long)


def test_stop_strings() -> None:
    assert stop_strings(checked(stop="ab")) == ("ab",)
    assert stop_strings(checked(stop=["a", "b"])) == ("a", "b")
    assert stop_strings(checked()) == ()


@given(st.dictionaries(st.sampled_from(sorted(WRONG_TYPES)), st.none() | st.booleans()
                       | st.integers() | st.floats() | st.text(max_size=5)
                       | st.lists(st.text(max_size=3) | st.integers(), max_size=4)))  # fmt: skip
def test_options_are_taken_or_refused(options: dict[str, Any]) -> None:
    """And what is taken can be sent (text that UTF-8 cannot hold is the sender's to refuse)."""
    with contextlib.suppress(BadRequest):
        params = checked(**options)
        assert decode_params(encode_params(params)) == params


# ---- prompts -------------------------------------------------------------------------------


def ids(*values: int) -> Any:
    return token_ids_from(values)


def test_room_for_output() -> None:
    assert check_prompt(ids(1, 2), checked(max_tokens=None), CARD) == 30
    assert check_prompt(ids(1, 2), checked(max_tokens=30), CARD) == 30
    with pytest.raises(BadRequest, match="max_tokens: got 31, allowed: at most 30"):
        check_prompt(ids(1, 2), checked(max_tokens=31), CARD)
    assert check_prompt(ids(*[1] * 31), checked(max_tokens=None), CARD) == 1


@pytest.mark.parametrize(
    ("prompt", "match"),
    [
        ([], "prompt: .*at least one token"),
        ([99, 100], r"prompt_token_ids: got 100, allowed: token ids in \[0, 100\)"),
        ([1] * 32, "prompt: got 32 tokens, allowed: at most 31"),
        ([1] * 33, "prompt: got 33 tokens"),
    ],
)
def test_prompts_that_cannot_be_run(prompt: list[int], match: str) -> None:
    with pytest.raises(BadRequest, match=match):
        check_prompt(ids(*prompt), checked(max_tokens=None), CARD)


def test_stop_ids_that_the_model_does_not_have() -> None:
    assert check_prompt(ids(1), checked(stop_token_ids=[99]), CARD) == 16
    with pytest.raises(BadRequest, match="stop_token_ids: got 100"):
        check_prompt(ids(1), checked(stop_token_ids=[100]), CARD)


@pytest.mark.parametrize(
    "given_ids",
    [[1, 2], (1, 2), range(1, 3), np.array([1, 2], np.uint8), np.array([1, 2], np.int64)],
)
def test_token_ids(given_ids: Any) -> None:
    array = token_ids_from(given_ids)
    assert (array.dtype, array.tolist()) == (np.uint32, [1, 2])
    assert pack_u32(array) == pack_u32([1, 2])


def test_no_token_ids() -> None:
    assert token_ids_from([]).tolist() == []
    assert token_ids_from(np.zeros(0)).dtype == np.uint32


class Unwilling:
    def __array__(self, *_: Any, **__: Any) -> Any:
        raise TypeError("cannot be an array")


@pytest.mark.parametrize(
    "given_ids",
    [
        None, "ab", b"ab", 3, {1}, {1: 2}, [[1, 2]], [[]], [[1], [2, 3]], [1.0], [True], [None],
        ["1"], [-1], [2**32], [HUGE], [2**63, -1], np.array([1.5]), np.array(3), iter([1]),
        Unwilling(),
    ],
)  # fmt: skip
def test_no_token_ids_at_all(given_ids: Any) -> None:
    with pytest.raises(BadRequest) as caught:
        token_ids_from(given_ids)
    assert caught.value.field == "prompt_token_ids"
    assert "allowed: a sequence of integers in [0, 2**32)" in str(caught.value)
