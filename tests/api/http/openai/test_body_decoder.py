"""Bodies: what is read, what may be said without effect, what is refused and how it is named."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from slipstream.errors import BadRequestError
from slipstream.http.answers.answer_plan import AnswerPlan
from slipstream.http.anthropic.request_bodies import MessagesRequest
from slipstream.http.api_errors import ApiError
from slipstream.http.openai import body_decoder
from slipstream.http.openai.body_decoder import BodyDecoder, check_num_values
from slipstream.http.openai.request_bodies import (
    NEUTRAL_VALUES,
    AbortRequest,
    ChatRequest,
    CompletionRequest,
    Message,
)
from slipstream.http.planning.chat import plan_chat, read_chat
from slipstream.http.planning.completions import MAX_PROMPTS, plan_completion, read_completion
from slipstream_ipc.columns import u32
from slipstream_ipc.messages import (
    ModelCard,
    RepetitionDetection,
    SamplingDefaults,
    SamplingParams,
    StructuredOutputs,
)
from slipstream_ipc.transport.codec import decode_params

MODEL = ModelCard("m", "/nowhere", vocab_size=1000, max_model_len=2048, eos_token_ids=(2,))
USER = {"role": "user", "content": "hi"}
PART = "messages[0].content[0].type"


def complete(**fields: object) -> AnswerPlan:
    body = read_completion(json.dumps({"prompt": "x", **fields}).encode())
    return plan_completion(body, MODEL)


def chat(**fields: object) -> AnswerPlan:
    body = read_chat(json.dumps({"messages": [USER], **fields}).encode())
    return plan_chat(body, MODEL)


def params(plan: AnswerPlan) -> SamplingParams:
    return decode_params(plan.states[0].request.params)


def prompts(plan: AnswerPlan) -> list[object]:
    submits = [state.request for state in plan.states]
    return [s.text if s.text is not None else u32(s.token_ids).tolist() for s in submits]


@pytest.mark.parametrize("levels", [100, 900, 5000])
def test_what_is_nested_too_deeply_is_said(levels: int) -> None:
    """It was "maximum recursion depth exceeded", of a body that is "not JSON"."""
    schema = '{"properties":{"a":' * levels + "{}" + "}}" * levels
    tool = f'{{"type":"function","function":{{"name":"f","parameters":{schema}}}}}'
    body = json.dumps({"messages": [USER], "tools": "@"}).replace('"@"', f"[{tool}]")
    with pytest.raises((ApiError, BadRequestError), match="at most 128 levels"):
        plan_chat(read_chat(body.encode()), MODEL)


def test_the_values_of_a_body_are_counted_before_they_are_read():
    for few in (
        b"," * 2**16,
        b"{" * 2**16,
        b"x" * 2**22,
        b"," * 2**20,
        b'"' + b"{" * 2**20 + b'"',
        b"{" * 2**14 + b"[" * 2**14 + b"x" * 2**17,
    ):
        check_num_values(few, 2048)
    many = b"," * (2**20 + 1)
    with pytest.raises(ApiError, match="times ','") as caught:
        check_num_values(many, 2048)
    assert caught.value.status == 413
    check_num_values(many, 2**20)  # for a model that can take as much
    for sign in (b"{", b"[", b"{[[", b'{"{":'):
        with pytest.raises(ApiError, match="lists and objects") as caught:
            check_num_values(sign * (2**15 + 1) + b"x" * 2**16, 2**20)
        assert caught.value.status == 413


@given(
    parts=st.lists(st.sampled_from(['"', "\\", "\\\\", '\\"', "{", "[", "x", "é"]), max_size=40),
    pieces=st.integers(1, 20),
)
def test_lists_and_objects_are_counted_but_for_what_is_text(parts: list[str], pieces: int) -> None:
    text = [{"".join(parts): ["".join(parts), {}, "[[[", parts]}, *[[]] * 3]
    body, num = msgspec.json.encode(text), 0

    def count(value: Any) -> int:
        if isinstance(value, dict):
            return 1 + sum(count(each) for each in value.values())
        return 1 + sum(count(each) for each in value) if isinstance(value, list) else 0

    num = count(text)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(body_decoder, "_PIECE_BYTES", pieces)
        assert body_decoder._num_of(b"{[", body, 0) == num


def test_defaults_are_openais():
    assert params(complete(stream=True)) == SamplingParams(max_tokens=16)
    assert params(chat(stream=True)) == SamplingParams(max_tokens=None)
    assert str(complete().id).startswith("cmpl-")
    assert str(chat().id).startswith("chatcmpl-")


def test_what_is_left_open_is_as_the_models_makers_have_it():
    defaults = SamplingDefaults(temperature=0.6, top_k=20, top_p=0.95, repetition_penalty=1.1)
    model = msgspec.structs.replace(MODEL, default_sampling=defaults)
    body = read_completion(b'{"prompt": "x", "stream": true, "top_k": 7}')
    expected = SamplingParams(
        max_tokens=16, temperature=0.6, top_p=0.95, top_k=7, repetition_penalty=1.1
    )
    assert params(plan_completion(body, model)) == expected
    body = read_chat(json.dumps({"messages": [USER], "stream": True, "temperature": 0}).encode())
    assert params(plan_chat(body, model)).temperature == 0


def test_who_gets_the_answer_at_once_is_sent_few_deltas():
    assert params(complete()).stream_interval == 64
    assert params(complete(stream_interval=100)).stream_interval == 100
    assert params(complete(stream=True, stream_interval=3)).stream_interval == 3


def test_every_sampling_field_arrives():
    given = {
        "temperature": 0.5,
        "top_p": 0.6,
        "top_k": 7,
        "min_p": 0.1,
        "seed": 8,
        "stop_token_ids": (3,),
        "include_stop_str_in_output": True,
        "ignore_eos": True,
        "min_tokens": 2,
        "skip_special_tokens": False,
        "stream_interval": 4,
        "max_tokens": 20,
        "presence_penalty": 0.5,
        "frequency_penalty": -2,
        "repetition_penalty": 1.2,
        "logit_bias": {5: -100, 17: 3.5},  # as a JSON object its keys are strings
        "allowed_token_ids": (5, 17),
        "bad_words": ("a", "b c"),
        "repetition_detection": {"max_pattern_size": 4, "min_count": 3},
    }
    detection = RepetitionDetection(max_pattern_size=4, min_count=3)
    for plan in (complete, chat):
        found = params(plan(stream=True, stop=["a", "b"], **given))
        assert found == SamplingParams(
            stop=("a", "b"), **{**given, "repetition_detection": detection}
        )
        assert params(plan(stop="a")).stop == "a"
        assert plan(priority=-3).states[0].request.priority == -3
        assert plan(cache_salt="mine").states[0].request.cache_salt == "mine"
        assert plan(prompt_cache_key="k").states[0].prompt_cache_key == "k"
    assert params(complete(logprobs=3)).logprobs == 3
    assert params(chat(logprobs=True)).logprobs == 0
    assert params(chat(logprobs=True, top_logprobs=5)).logprobs == 5
    assert params(chat(logprobs=False, top_logprobs=0)).logprobs is None
    assert params(chat(max_completion_tokens=9)).max_tokens == 9


def test_null_is_the_default():
    for plan, body_type in ((complete, CompletionRequest), (chat, ChatRequest)):
        nulls = {
            field.name: None for field in msgspec.structs.fields(body_type) if not field.required
        }
        assert params(plan(**nulls, stream=True) if "stream" not in nulls else plan(**nulls))


def test_kinds_of_prompts():
    assert prompts(complete(prompt="a")) == ["a"]
    assert prompts(complete(prompt=["a", "b"])) == ["a", "b"]
    assert prompts(complete(prompt=[1, 2])) == [[1, 2]]
    assert prompts(complete(prompt=[[1], [2, 3]])) == [[1], [2, 3]]


@pytest.mark.parametrize(
    "prompt", [[], [[]], ["a", 1], [1, "a"], [[1], "a"], [1, [2]], [1.5], [True], [None], [{}]]
)
def test_prompts_that_cannot_be(prompt):
    with pytest.raises((ApiError, BadRequestError), match="prompt"):
        complete(prompt=prompt)


def test_too_many_prompts():
    with pytest.raises(ApiError, match=f"allowed: {MAX_PROMPTS}"):
        complete(prompt=["x"] * (MAX_PROMPTS + 1))


def test_contents_of_messages():
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    plan = chat(messages=[{"role": "system", "content": parts}, USER])
    assert [turn.content for turn in plan.states[0].request.messages] == ["ab", "hi"]


def test_an_answer_may_come_back_as_a_turn():
    answer = {"role": "assistant", "content": "yes", "refusal": None, "annotations": []}
    answer |= {"tool_calls": None, "function_call": None, "audio": None}
    assert len(chat(messages=[USER, answer, USER]).states[0].request.messages) == 3


def test_fields_without_effect_may_say_anything():
    harmless = {"user": "me", "metadata": {"a": "b"}, "store": True, "service_tier": "auto"}
    harmless |= {"safety_identifier": "x", "prompt_cache_retention": "y"}
    assert complete(**harmless)
    assert chat(**harmless, parallel_tool_calls=False)


def fields_not_yet(body_type: type) -> set[str]:
    supported = {"echo"} if body_type is CompletionRequest else set()
    return {field.name for field in msgspec.structs.fields(body_type)} & set(
        NEUTRAL_VALUES
    ) - supported


@pytest.mark.parametrize("name", sorted(fields_not_yet(CompletionRequest)))
def test_completions_refuse_what_is_not_supported_yet(name):
    for neutral in NEUTRAL_VALUES[name]:
        assert complete(**{name: neutral})
    with pytest.raises(ApiError, match=f"{name}: not supported yet: got ") as caught:
        complete(**{name: {"something": "else"}})
    assert caught.value.body.error.param == name


@pytest.mark.parametrize("name", sorted(fields_not_yet(ChatRequest)))
def test_chats_refuse_what_is_not_supported_yet(name):
    for neutral in NEUTRAL_VALUES[name]:
        assert chat(**{name: neutral})
    with pytest.raises(ApiError, match=f"{name}: not supported yet: got ") as caught:
        chat(**{name: {"something": "else"}})
    assert caught.value.status == 400
    assert caught.value.body.error.param == name


@pytest.mark.parametrize("name", sorted(fields_not_yet(Message)))
def test_messages_refuse_what_is_not_supported_yet(name):
    with pytest.raises(ApiError) as caught:
        chat(messages=[USER, {**USER, name: [{"x": 1}]}])
    assert caught.value.body.error.param == f"messages[1].{name}"


def test_true_is_not_one():
    with pytest.raises(ApiError, match="best_of: not supported yet"):
        complete(best_of=True)
    assert complete(best_of=1.0)
    with pytest.raises(ApiError, match="n: "):
        complete(n=True)


def test_every_neutral_value_belongs_to_a_field():
    types = (CompletionRequest, ChatRequest, Message, MessagesRequest)
    assert set().union(*map(fields_not_yet, types)) == set(NEUTRAL_VALUES)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"nonsense": 1}, "nonsense"),
        ({"max_tokens": "many"}, "max_tokens"),
        ({"max_tokens": 1.5}, "max_tokens"),
        ({"stream": 1}, "stream"),
        ({"stop": [1]}, "stop[0]"),
        ({"stream_options": {"include_usage": True}}, "stream_options"),
        ({"stream": True, "stream_options": {"nonsense": 1}}, "stream_options.nonsense"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"temperature": -1}, "temperature"),
        ({"top_p": 0}, "top_p"),
        ({"stop": ["x"] * 65}, "stop"),
        ({"stop": ""}, "stop"),
        ({"min_tokens": 1000}, "min_tokens"),
        ({"seed": 2**63}, "seed"),
        ({"priority": 2**31}, "priority"),
        ({"presence_penalty": 2.5}, "presence_penalty"),
        ({"frequency_penalty": -2.5}, "frequency_penalty"),
        ({"repetition_penalty": 0}, "repetition_penalty"),
        ({"logit_bias": {"7": 101}}, "logit_bias"),
        ({"allowed_token_ids": []}, "allowed_token_ids"),
        ({"bad_words": ["x", ""]}, "bad_words"),
    ],
)
def test_the_field_is_named(fields, param):
    for plan in (complete, chat):
        given = {"max_tokens": 5, **fields}
        with pytest.raises((ApiError, BadRequestError)) as caught:
            plan(**given)
        error = caught.value
        named = error.body.error.param if isinstance(error, ApiError) else error.field
        assert named == param


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "user"}]}, "messages[0].content"),
        ({"messages": [{"content": "x"}]}, "messages[0].role"),
        ({"messages": [{**USER, "nonsense": 1}]}, "messages[0].nonsense"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, PART),
        ({"top_logprobs": 3}, "top_logprobs"),
        ({"max_tokens": 3, "max_completion_tokens": 4}, "max_tokens"),
    ],
)
def test_the_field_of_a_chat_is_named(fields, param):
    with pytest.raises(ApiError) as caught:
        chat(**fields)
    assert caught.value.status == 400
    assert caught.value.body.error.param == param


@pytest.mark.parametrize(
    ("body", "text"),
    [
        ({"topk": 5}, "topk: unknown field; did you mean top_k?"),
        (
            {"guided_decoding": {"choice": ["a"]}},
            "guided_decoding: unknown field; it is structured_outputs now",
        ),
        ({"zzz": 1}, "zzz: unknown field"),
        (
            {"structured_outputs": {"rejex": "a"}},
            "structured_outputs.rejex: unknown field; did you mean regex?",
        ),
        ({"temperature": "hot"}, "temperature: got 'hot', allowed: a number, or None"),
        ({"temperature": "x" * 2**17}, "temperature: got a string, allowed: a number, or None"),
        ({"stream": 1}, "stream: got 1, allowed: True or False, or None"),
        (
            {"response_format": {"type": "xml"}},
            "response_format.type: got 'xml', allowed: one of json_object, json_schema, text",
        ),
    ],
)
def test_errors_say_what_was_given_and_what_is_allowed(body, text):
    for make in (complete, chat):
        with pytest.raises(ApiError) as caught:
            make(**body)
        assert str(caught.value) == text
        assert caught.value.body.error.param == text.partition(":")[0]


def test_a_wrong_part_of_a_malformed_body_is_named():
    with pytest.raises(ApiError) as caught:
        read_completion(b'{"temperature": "hot", ')
    assert str(caught.value) == "temperature: got a string, allowed: a number, or None"


def test_few_fields_are_listed():
    with pytest.raises(ApiError) as caught:
        BodyDecoder(AbortRequest).decode(b'{"id": "cmpl-1"}')
    assert str(caught.value) == "id: unknown field, allowed: request_id"
    assert caught.value.body.error.param == "id"


def test_a_picture_is_refused_with_what_is_read_instead():
    with pytest.raises(ApiError, match="'image_url', allowed: text; the model is served as text"):
        chat(messages=[{"role": "user", "content": [{"type": "image_url"}]}])


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"[]",
        b"null",
        b'"x"',
        b'{"prompt": "\xff"}',
        b'{"prompt": "\\ud800"}',
        b"[" * 99999,
    ],
)
def test_what_is_no_object_is_refused(body):
    with pytest.raises(ApiError) as caught:
        read_completion(body)
    assert caught.value.status == 400
    assert caught.value.body.error.param is None


SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}


def structured(plan: AnswerPlan) -> StructuredOutputs | None:
    return params(plan).structured_outputs


@pytest.mark.parametrize("make", [complete, chat])
def test_what_an_answer_is_to_look_like(make):
    as_text = StructuredOutputs(json=msgspec.json.encode(SCHEMA).decode())
    named = {"name": "x", "strict": True, "description": "d", "schema": SCHEMA}
    wanted = {"type": "json_schema", "json_schema": named}
    strict = StructuredOutputs(json=as_text.json, strict=True)
    assert structured(make(response_format=wanted)) == strict
    for is_strict in (False, None):
        loose = {**wanted, "json_schema": {**named, "strict": is_strict}}
        assert structured(make(response_format=loose)) == as_text
    assert structured(make(structured_outputs={"json": SCHEMA})) == as_text
    any_object = StructuredOutputs(json_object=True)
    assert structured(make(response_format={"type": "json_object"})) == any_object
    assert structured(make(structured_outputs={"choice": ["a"]})).choice == ("a",)
    assert structured(make(response_format={"type": "text"})) is None
    text = {"type": "text"}
    assert structured(make(response_format=text, structured_outputs={"regex": "a"})).regex == "a"


@pytest.mark.parametrize("make", [complete, chat])
def test_json_may_be_compact(make):
    compact = {"disable_any_whitespace": True}
    of_schema = structured(make(structured_outputs={"json": SCHEMA, **compact}))
    assert of_schema.disable_any_whitespace
    named = {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}
    assert structured(make(response_format=named, structured_outputs=compact)) == of_schema
    any_object = {"type": "json_object"}
    assert structured(
        make(response_format=any_object, structured_outputs=compact)
    ) == StructuredOutputs(json_object=True, disable_any_whitespace=True)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"response_format": {"type": "json_schema"}}, "response_format"),
        ({"response_format": {"type": "text", "json_schema": {"schema": {}}}}, "response_format"),
        ({"response_format": {"type": "xml"}}, "response_format.type"),
        ({"response_format": {"type": "json_schema", "json_schema": {"schema": 1}}}, None),
        (
            {"response_format": {"type": "json_object"}, "structured_outputs": {"regex": "a"}},
            "response_format",
        ),
        ({"structured_outputs": {"rejex": "a"}}, None),
    ],
)
def test_what_no_answer_can_look_like(fields, param):
    with pytest.raises(ApiError) as caught:
        complete(**fields)
    found = caught.value.body.error.param
    assert found == param if param else found.startswith(next(iter(fields)))


def test_a_refusal_names_the_callers_field():
    wanted = {"response_format": {"type": "json_object"}}
    assert complete(**wanted).param_names["structured_outputs"] == "response_format"
    assert chat(**wanted).param_names["structured_outputs"] == "response_format"
    assert "structured_outputs" not in chat(structured_outputs={"regex": "a"}).param_names


@pytest.mark.parametrize("length", [65, 2**21])
def test_a_long_unknown_name_is_cut_and_not_searched_for(
    length: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    searched: list[str] = []
    monkeypatch.setattr(
        "difflib.get_close_matches", lambda given, *_, **__: searched.append(given) or []
    )
    body = json.dumps({"x" * length: 1}).encode()
    with pytest.raises(ApiError) as caught:
        BodyDecoder(AbortRequest).decode(body)
    error = caught.value.body.error
    assert not searched
    assert len(error.message) < 1000
    assert error.param is not None
    assert len(error.param) < 1000


@pytest.mark.parametrize("field", ["logprobs", "prompt_logprobs"])
def test_log_probabilities_of_prompts_are_bounded_by_answers(field: str) -> None:
    asked = {"prompt": "a b c " * 600, field: 20, "echo": field == "logprobs", "max_tokens": 1}
    complete(**asked, n=16)
    with pytest.raises(ApiError, match=f"{field}: got 20 per token, up to .* of prompts") as caught:
        complete(**asked, n=128)
    assert caught.value.status == 400


@pytest.mark.parametrize(
    ("plan", "fields", "field"),
    [
        (chat, {"max_completion_tokens": 0}, "max_completion_tokens"),
        (chat, {"logprobs": True, "top_logprobs": 30}, "top_logprobs"),
        (chat, {"guided_choice": []}, "guided_choice"),
        (chat, {"messages": [USER] * 16385}, "messages"),
        (complete, {"prompt": [-1]}, "prompt"),
    ],
)
def test_the_callers_own_field_is_named(
    plan: Callable[..., AnswerPlan], fields: dict[str, object], field: str
) -> None:
    with pytest.raises(ApiError) as caught:
        plan(**fields)
    error = caught.value.body.error
    assert error.param == field
    assert error.message.startswith(field)


@pytest.mark.parametrize(
    "half", [r"\ud83d", r"\ude00", r"\\\ud83d", r"\ud83d\ud83d\ude00", r"\uD83Dx"]
)
def test_half_a_character_is_told(half: str) -> None:
    body = b'{"prompt": "%b"}' % half.encode()
    with pytest.raises(ApiError, match=r"\\u[dD].*, half of a character") as caught:
        read_completion(body)
    assert caught.value.status == 400
    read_completion(rb'{"prompt": "\ud83d\ude00 \\ud83d"}')


PIECES = ["\\\\", r"\ud83d\ude00", r"\n", "a", "ud83d", r"\u00e9"]


@given(
    st.lists(st.sampled_from(PIECES), max_size=40),
    st.sampled_from([r"\ud83d", r"\udfff", ""]),
    st.lists(st.sampled_from(PIECES), max_size=40),
    st.booleans(),
)
def test_half_a_character_is_told_just_where_it_is(
    before: list[str], half: str, behind: list[str], is_whole: bool
) -> None:
    if half == r"\ud83d" and behind[:1] == ["ud83d"]:
        behind = []
    text = "".join(before) + half + "".join(behind)
    body = b'{"prompt": "%b' % text.encode() + b'"}' * is_whole
    if is_whole and not half:
        read_completion(body)
        return
    with pytest.raises(ApiError) as caught:
        read_completion(body)
    if is_whole:
        assert f"got {half}, half of a character" in caught.value.body.error.message
    elif not half:
        assert "not JSON" in caught.value.body.error.message


@pytest.mark.parametrize("end", [b"", b'\\ud800"}', b'\\ud800\\u0041"}'])
def test_a_refusal_reads_little_of_a_body(monkeypatch: pytest.MonkeyPatch, end: bytes) -> None:
    """One of nothing but escapes made millions of matches, and all streams wait for it."""
    real, num_bytes = body_decoder._ESCAPES, []

    class Escapes:
        def finditer(self, body: bytes, begin: int = 0, end: int | None = None) -> Any:
            num_bytes.append((len(body) if end is None else end) - begin)
            return real.finditer(body, begin, len(body) if end is None else end)

    monkeypatch.setattr(body_decoder, "_ESCAPES", Escapes())
    with pytest.raises(ApiError):
        read_completion(b'{"prompt": "' + b"\\\\" * 2**16 + end)
    assert 0 < sum(num_bytes) < 100


TOOLS = [
    {"type": "function", "function": {"name": name, "parameters": {"type": "object"}}}
    for name in ("clock", "weather")
]


def allowed(*names: str, mode: str = "required") -> dict[str, object]:
    tools = [{"type": "function", "function": {"name": name}} for name in names]
    return {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": tools}}


def test_allowed_tools_are_the_tools_of_a_chat() -> None:
    body = read_chat(
        json.dumps({"messages": [USER], "tools": TOOLS, "tool_choice": allowed("weather")}).encode()
    )
    same = read_chat(
        json.dumps({"messages": [USER], "tools": TOOLS[1:], "tool_choice": "required"}).encode()
    )
    found, expected = plan_chat(body, MODEL), plan_chat(same, MODEL)
    assert found.states[0].request.template == expected.states[0].request.template
    assert found.states[0].request.answer == expected.states[0].request.answer
    for wrong in (allowed(), allowed("sun"), allowed("clock", mode="none")):
        with pytest.raises(ApiError, match="tool_choice") as caught:
            chat(tools=TOOLS, tool_choice=wrong)
        assert caught.value.status == 400
