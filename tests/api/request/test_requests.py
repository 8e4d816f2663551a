"""What a caller may write, and what it is told otherwise."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from slipstream.errors import BadRequestError
from slipstream.request import prompts
from slipstream.request import requests as module
from slipstream.request.media import MediaCollector
from slipstream.request.parallel_sampling import can_join, joined, params_of_answers
from slipstream.request.requests import checked_params, new_submit, new_submits
from slipstream_ipc.columns import pack_u32
from slipstream_ipc.errors import BadRequest
from slipstream_ipc.messages import (
    ChatMessage,
    ChatToolCall,
    FunctionCall,
    ModelCard,
    SamplingParams,
    Submit,
)
from slipstream_ipc.messages.budgets import MAX_MESSAGE_BYTES
from slipstream_ipc.transport.codec import decode_params
from slipstream_worker.streams.registration import Submission

PARAMS = SamplingParams()


def test_params_whole_or_as_options() -> None:
    assert checked_params(None, {"top_k": 3, "stop": "a"}) == SamplingParams(top_k=3, stop="a")
    assert checked_params(SamplingParams(top_k=3), {}) == SamplingParams(top_k=3)


@pytest.mark.parametrize(
    ("params", "options", "field"),
    [
        (None, {"max_token": 3}, "parameter"),
        (None, {"max_tokens": "3"}, "max_tokens"),
        (None, {"max_tokens": 0}, "max_tokens"),
        (None, {"stop": [""]}, "stop"),
        (None, {"temperature": float("nan")}, "temperature"),
        (SamplingParams(temperature="hot"), {}, "temperature"),  # type: ignore[arg-type]
        (SamplingParams(stop=["a", 3]), {}, "stop[1]"),  # type: ignore[arg-type]
        (SamplingParams(logprobs=-2), {}, "logprobs"),
        (SamplingParams(), {"top_k": 3}, "sampling_params"),
        ({"top_k": 3}, {}, "sampling_params"),
    ],
)
def test_bad_params_are_named(params: Any, options: dict[str, Any], field: str) -> None:
    with pytest.raises(BadRequestError) as caught:
        checked_params(params, options)
    assert caught.value.field == field
    assert "allowed" in str(caught.value)


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"temperature": "hot"}, "temperature: got 'hot', allowed: a number"),
        ({"max_tokens": "3"}, "max_tokens: got '3', allowed: an integer, or None"),
        ({"stop": [3]}, "stop[0]: got 3, allowed: a string"),
        (
            {"structured_outputs": {"choice": "ab"}},
            "structured_outputs.choice: got 'ab', allowed: a list of strings, or None",
        ),
        (
            {"structured_outputs": {"jso": "{}"}},
            (
                "structured_outputs.jso: unknown field, allowed: choice, "
                "disable_any_whitespace, grammar, json, json_object, regex, strict"
            ),
        ),
        ({"stop": ["x"] * 65}, "stop: got 65 strings, allowed: at most 64"),
    ],
)
def test_errors_say_what_was_given_and_what_is_allowed(options: dict[str, Any], text: str) -> None:
    with pytest.raises(BadRequestError) as caught:
        checked_params(None, options)
    assert str(caught.value) == text


def test_an_unknown_option_beside_params_is_unknown() -> None:
    with pytest.raises(BadRequestError, match="foo") as caught:
        checked_params(PARAMS, {"foo": 1})
    assert "not both" not in str(caught.value)
    with pytest.raises(BadRequestError) as caught:
        checked_params(PARAMS, {"top_k": 1})
    assert str(caught.value) == (
        "sampling_params: got it and top_k, allowed: either sampling_params or single options, "
        "not both"
    )


PARTS = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]


AS_TEXT = "allowed: text; the model is served as text"


def test_the_content_of_a_message_may_come_in_parts() -> None:
    submit = new_submit([{"role": "user", "content": PARTS}], PARAMS)
    assert submit.messages == (ChatMessage("user", "ab"),)


@pytest.mark.parametrize(
    ("part", "text"),
    [
        (
            {"type": "input_audio", "input_audio": {"data": "x"}},
            f"messages[0].content[2].type: got 'input_audio', {AS_TEXT}",
        ),
        ({"type": "text"}, "messages[0].content[2].text: missing, allowed: a string"),
        ({"type": "text", "text": 3}, "messages[0].content[2].text: got 3, allowed: a string"),
        (
            "c",
            (
                "messages[0].content[2]: got 'c', allowed: a mapping with text or a mapping with "
                "image, detail or a mapping with image_url"
            ),
        ),
    ],
)
def test_parts_that_are_no_text_are_named(part: Any, text: str) -> None:
    with pytest.raises(BadRequestError) as caught:
        new_submit([{"role": "user", "content": [*PARTS, part]}], PARAMS)
    assert str(caught.value) == text


@pytest.mark.parametrize("arguments", ["{}", "", "{bad", "[]"])
def test_turns_of_earlier_answers_are_taken_as_they_were(arguments: str) -> None:
    """What a model wrote wrongly, too: refusing it would end the conversation."""
    call = {"function": {"name": "look", "arguments": arguments}}
    for extra in (
        {"tool_calls": [call]},
        {"tool_calls": [call], "content": None},
        {"tool_calls": [call], "content": "", "reasoning_content": "so"},
        {"reasoning_content": "so"},
        {"reasoning_content": "so", "content": None},
    ):
        (message,) = new_submit([{"role": "assistant", **extra}], PARAMS).messages
        assert message.content == ""
        assert message.reasoning_content == extra.get("reasoning_content")
        assert (message.tool_calls is None) == ("tool_calls" not in extra)


@pytest.mark.parametrize("ids", [[1, 2, 3], (1, 2, 3), range(1, 4), np.array([1, 2, 3])])
def test_token_ids_of_any_sequence(ids: Any) -> None:
    submit = new_submit(ids, PARAMS)
    assert submit.token_ids == pack_u32([1, 2, 3])
    assert submit.text is None
    assert decode_params(submit.params) == PARAMS


def test_every_submit_has_an_id_of_its_own() -> None:
    first, second = new_submit("x", PARAMS), new_submit("x", PARAMS)
    assert len(first.stream_id) == 16
    assert first.stream_id != second.stream_id


@pytest.mark.parametrize(
    ("prompt", "field"),
    [
        (b"bytes", "prompt"),
        (3, "prompt"),
        (None, "prompt"),
        ({"role": "user", "content": "x"}, "prompt"),
        ([], "prompt"),
        (np.zeros(0, np.uint32), "prompt"),
        ([1.5], "prompt_token_ids"),
        ([-1], "prompt_token_ids"),
        (["a"], "prompt_token_ids"),
        ([[1]], "prompt_token_ids"),
        ("half a pair \ud800", "prompt"),
        ([{"role": "user"}], "messages[0].content"),
        ([{"role": "user", "content": "x"}, {"role": "user", "content": 3}], "messages[1].content"),
        ([{"role": "user", "content": "x", "nonsense": "y"}], "messages[0].nonsense"),
        ([{"role": "user", "content": "x"}] * 16385, "messages"),
        ([ChatMessage("user", "x"), 5], "messages[1]"),
        ([ChatMessage("user", 5)], "messages[0].content"),  # type: ignore[arg-type]
        ([ChatMessage("user", "\ud800")], "messages[0]"),
    ],
)
def test_bad_prompts_are_named(prompt: Any, field: str) -> None:
    with pytest.raises(BadRequestError) as caught:
        new_submit(prompt, PARAMS)
    assert caught.value.field == field


@pytest.mark.parametrize(
    ("options", "field"),
    [
        ({"label": 3}, "label"),
        ({"label": "\ud800"}, "label"),
        ({"priority": "high"}, "priority"),
        ({"priority": True}, "priority"),
        ({"priority": 2**31}, "priority"),
        ({"cache_salt": 3}, "cache_salt"),
        ({"cache_salt": "x" * 1025}, "cache_salt"),
        ({"cache_salt": "\ud800"}, "cache_salt"),
    ],
)
def test_bad_label_priority_or_salt_is_named(options: dict[str, Any], field: str) -> None:
    with pytest.raises(BadRequestError) as caught:
        new_submit("x", PARAMS, **options)
    assert caught.value.field == field


@pytest.mark.parametrize("options", [{"stop": "\ud800"}, {"bad_words": ["a", "\ud800"]}])
def test_string_that_no_message_can_hold(options: dict[str, Any]) -> None:
    with pytest.raises(BadRequestError) as caught:
        new_submit("x", checked_params(None, options))
    assert caught.value.field in options


def test_prompt_larger_than_a_message_is_refused() -> None:
    with pytest.raises(BadRequestError, match=str(MAX_MESSAGE_BYTES)) as caught:
        new_submit("x" * MAX_MESSAGE_BYTES, PARAMS)
    assert caught.value.field == "prompt"
    new_submit("x" * (MAX_MESSAGE_BYTES - 1000), PARAMS)


@pytest.mark.parametrize("field", ["logprobs", "prompt_logprobs"])
@pytest.mark.parametrize(
    ("most", "allowed", "refused"),
    [(20, [0, 20, None], [-1, 21]), (0, [0], [-1, 1]), (-1, [-1, 999, 1000], [1001])],
)
def test_a_server_says_how_many_log_probabilities_it_has(
    field: str, most: int, allowed: list[int | None], refused: list[int]
) -> None:
    model = ModelCard("m", "p", 1000, 100, (), max_logprobs=most)
    for wanted in allowed:
        assert new_submit("x", SamplingParams(**{field: wanted}), model=model)
    for wanted in refused:
        with pytest.raises(BadRequestError, match=f"{field}.*max_logprobs is {most}") as caught:
            new_submit("x", SamplingParams(**{field: wanted}), model=model)
        assert caught.value.fault.field == field


def test_a_prompt_is_measured_once_for_all_its_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    ids = [f"{number:032x}" for number in range(5)]
    answers = params_of_answers(SamplingParams(n=5, seed=7, prompt_logprobs=1))
    alone = [
        new_submit("a prompt", params, stream_id=stream_id, label="l", priority=3)
        for params, stream_id in zip(answers, ids, strict=True)
    ]
    measured: list[Submit] = []
    measure = module._num_bytes

    def counted(submit: Submit) -> int:
        measured.append(submit)
        return measure(submit)

    monkeypatch.setattr(module, "_num_bytes", counted)
    found = new_submits("a prompt", answers, stream_ids=ids, label="l", priority=3)
    assert [can_join(found[1], one) for one in found] == [False, True, True, True, True]
    assert [Submission(one).spec_of(one).params for one in found] == answers
    assert [Submission(one).fingerprint(one) for one in found] == [
        Submission(one).fingerprint(one) for one in alone
    ]
    assert len(measured) == 1
    all_of_them = measure(joined(found[0], found[1:]))
    monkeypatch.setattr(module, "MAX_MESSAGE_BYTES", all_of_them + 64 * len(ids))
    assert len(new_submits("a prompt", answers, stream_ids=ids)) == len(ids)
    monkeypatch.setattr(module, "MAX_MESSAGE_BYTES", all_of_them - 1)  # what would not fit
    with pytest.raises(BadRequestError, match=r"a request of \d+ bytes"):
        new_submits("a prompt", answers, stream_ids=ids, label="l", priority=3)


TEXTS = st.text(st.characters(exclude_categories=()), max_size=3)
CALLS = st.builds(ChatToolCall, st.builds(FunctionCall, TEXTS, TEXTS), TEXTS)
MESSAGES = st.builds(
    ChatMessage,
    st.one_of(st.sampled_from(["user", "assistant"]), TEXTS),
    st.one_of(TEXTS, st.just(5)),
    st.none() | TEXTS,
    st.none() | st.tuples(CALLS),
    st.none() | TEXTS,
    st.none() | TEXTS,
)


@given(st.lists(MESSAGES, min_size=1, max_size=4))
def test_messages_are_checked_at_once_as_they_are_one_by_one(messages: list[ChatMessage]) -> None:
    def outcome(check: Callable[[], object]) -> object:
        try:
            return check()
        except BadRequest as error:
            return error.field, str(error)

    def one_by_one() -> object:
        images = MediaCollector()
        return tuple([prompts._message(index, each, images) for index, each in enumerate(messages)])

    assert outcome(lambda: prompts.checked_prompt(messages).messages) == outcome(one_by_one)
