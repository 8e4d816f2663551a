"""How an answer is to be read: its format, where it starts, and the types of its tools."""

from __future__ import annotations

import functools
import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace
from tests.helpers.chat_templates import (
    ALWAYS_REASONS,
    CHANNEL_TOKENS,
    CHANNELS,
    ENDS_CHATS,
    HYBRID,
    TAG_TOKENS,
    TAGS,
    tokenizer_with,
)

from slipstream_ipc.columns import u32
from slipstream_ipc.formats.answer_format import digest
from slipstream_ipc.formats.table import find_format
from slipstream_ipc.formats.tool_types import (
    LIST_ITEM,
    decode_tool_types,
    encode_tool_types,
    nested_key,
)
from slipstream_ipc.messages import (
    FORMAT_MARK,
    FRAMED,
    AnswerOptions,
    AnswerSettings,
    ChatMessage,
    Render,
    Rendered,
    StructuredForm,
    TemplateOptions,
)
from slipstream_ipc.validation.chat_template import template_options
from slipstream_worker.formats.compiled_format import compile_format
from slipstream_worker.formats.property_types import Looks, _Schemas, property_types
from slipstream_worker.tokenizer.answer_settings import compact_tools, read_format
from slipstream_worker.tokenizer.prompt_rendering import ChatTraits, render
from slipstream_worker.tokenizer.template_dialect import find_dialect

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "look",
            "parameters": {"type": "object", "properties": {"at": {"type": "string"}}},
        },
    }
]
HI = (ChatMessage("user", "hi"),)
FORMAT = find_format("qwen3+hermes")
assert FORMAT is not None


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return tokenizer_with(None)


class Chat:
    """A tokenizer with a template, and what its prompts say of their answers."""

    def __init__(self, tokenizer: Any, template: str, name: str = "qwen3+hermes") -> None:
        tokenizer.chat_template = template
        self.tokenizer = tokenizer
        found = find_format(name)
        assert found is not None
        self.compiled = compile_format(found, tokenizer.get_added_vocab())
        ids = tokenizer.get_vocab()
        read = read_format(found, tokenizer.get_added_vocab(), self.encoded, ids.get)
        self.traits = ChatTraits(find_dialect(tokenizer), read)

    def encoded(self, text: str) -> list[int]:
        ids: list[int] = self.tokenizer(text, add_special_tokens=False)["input_ids"]
        return ids

    def rendered(
        self,
        messages: tuple[ChatMessage, ...] = HI,
        template: TemplateOptions | None = None,
        options: AnswerOptions | None = AnswerOptions(),  # noqa: B008
        *,
        structured: StructuredForm | None = None,
    ) -> Rendered:
        template = template_options(TOOLS) if template is None else template
        request = Render(
            1, messages=messages, template=template, answer=options, structured=structured
        )
        answer = render(self.tokenizer, request, self.traits)
        assert answer.fault is None
        return answer

    def events(self, settings: AnswerSettings | None, text: str) -> list[tuple[str, str]]:
        """The events of an answer, of neighbours of one kind one."""
        assert settings is not None
        types = decode_tool_types(settings.tools)
        reader = self.compiled.reader(types, settings.options, settings.start)
        pieces = []
        for token_id in self.tokenizer(text, add_special_tokens=False)["input_ids"]:
            if token_id in self.compiled.delimiter_ids:
                pieces += reader.feed_delimiter(token_id)
            else:
                pieces += reader.feed(self.tokenizer.decode([token_id]))
        found: list[tuple[str, str]] = []
        for event, _, _ in pieces + reader.finish():
            if found and found[-1][0] == event.kind.name:
                found[-1] = (found[-1][0], found[-1][1] + event.text)
            else:
                found.append((event.kind.name, event.text))
        return found


THINKS = [("REASONING", "so"), ("CONTENT", "well")]
CALLS = [("CALL_BEGINS", "look"), ("CALL_ARGUMENTS", '{"at": 1}'), ("CALL_ENDS", "")]
CALL = '<tool_call>\n{"name": "look", "arguments": {"at": 1}}\n</tool_call>'


def test_settings_name_the_format_and_the_tools(tokenizer):
    chat = Chat(tokenizer, HYBRID)
    settings = chat.rendered().answer
    assert settings is not None
    assert FORMAT is not None
    assert settings.format == "qwen3+hermes"
    assert settings.digest == digest(FORMAT)
    assert json.loads(settings.tools) == {"look": {"at": "string"}}
    assert settings.options == AnswerOptions()
    assert chat.events(settings, f"<think>so</think>\n\nwell{CALL}") == THINKS + CALLS


def test_only_chats_whose_answers_are_read_have_settings(tokenizer):
    chat = Chat(tokenizer, HYBRID)
    assert chat.rendered(options=None).answer is None
    traits = chat.traits._replace(format=None)
    request = Render(1, messages=HI, answer=AnswerOptions())
    assert render(tokenizer, request, traits).answer is None
    assert render(tokenizer, Render(1, "text", answer=AnswerOptions()), chat.traits).answer is None


def test_without_thinking_the_answer_is_content(tokenizer):
    """An empty `<think></think>` is prefilled."""
    chat = Chat(tokenizer, HYBRID)
    template = template_options(TOOLS, {"enable_thinking": False})
    settings = chat.rendered(template=template).answer
    assert chat.events(settings, f"well{CALL}") == [("CONTENT", "well"), *CALLS]
    assert settings != chat.rendered().answer


def test_a_prefilled_think_begins_reasoning(tokenizer):
    chat = Chat(tokenizer, ALWAYS_REASONS)
    settings = chat.rendered().answer
    assert chat.events(settings, "so</think>\n\nwell") == THINKS
    assert chat.events(settings, "so") == [("REASONING", "so")]


def test_a_prefilled_think_of_a_template_that_ends_chats(tokenizer):
    chat = Chat(tokenizer, ENDS_CHATS)
    assert chat.events(chat.rendered().answer, "so</think>\n\nwell") == THINKS


@pytest.mark.parametrize("template", [HYBRID, ALWAYS_REASONS, ENDS_CHATS])
@pytest.mark.parametrize("text", ["<think>", "a<think>b", CALL, "<tool_call>", "</think>", "<"])
@pytest.mark.parametrize("role", ["user", "tool", "system"])
def test_what_messages_say_starts_nothing(tokenizer, template, text, role):
    chat = Chat(tokenizer, template)
    settings = chat.rendered((*HI, ChatMessage(role, text))).answer
    assert settings == chat.rendered((*HI, ChatMessage(role, "fine"))).answer


def continued(chat: Chat, content: str, reasoning: str | None = None) -> AnswerSettings | None:
    turns = (*HI, ChatMessage("assistant", content, reasoning_content=reasoning))
    template = template_options(TOOLS, add_generation_prompt=False, continue_final_message=True)
    return chat.rendered(turns, template).answer


def test_an_open_turn_goes_on_where_it_ended(tokenizer):
    chat = Chat(tokenizer, HYBRID)
    assert chat.events(continued(chat, "Hello"), f" you{CALL}") == [("CONTENT", " you"), *CALLS]
    assert chat.events(continued(chat, "", "so"), "well") == THINKS[1:]
    chat = Chat(tokenizer, ENDS_CHATS)
    assert chat.events(continued(chat, "<think>so"), "so</think>\n\nwell") == THINKS
    begun = '<tool_call>\n{"name": "look", "arguments": {"at'
    found = chat.events(continued(chat, begun), '": 1}}\n</tool_call>')
    assert found[0] == ("CALL_BEGINS", "look")
    assert found[-1] == ("CALL_ENDS", "")


def test_channels_go_on(tokenizer):
    """The generation prompt is a literal of the format itself."""
    chat = Chat(tokenizer_with(None, CHANNEL_TOKENS), CHANNELS, "harmony")
    analysis = "<|channel|>analysis<|message|>so<|end|><|start|>assistant"
    call = '<|channel|>commentary to=functions.look<|message|>{"at": 1}<|call|>'
    settings = chat.rendered().answer
    assert chat.events(settings, f"{analysis}<|channel|>final<|message|>well") == THINKS
    assert chat.events(settings, analysis + call) == [THINKS[0], *CALLS]
    turns = (*HI, ChatMessage("assistant", "Hello"))
    template = template_options(TOOLS, add_generation_prompt=False, continue_final_message=True)
    settings = chat.rendered(turns, template).answer
    assert chat.events(settings, " you<|return|>") == [("CONTENT", " you")]


def test_tags_go_on(tokenizer):
    """Each delimiter of the format is several tokens."""
    chat = Chat(tokenizer_with(None, TAG_TOKENS), TAGS, "kimi_k3+kimi_k3")
    call = (
        '<|open|>tools<|sep|><|open|>call tool="look" index="1"<|sep|><|open|>argument key="at" '
        'type="number"<|sep|>1<|close|>argument<|sep|><|close|>call<|sep|><|close|>tools<|sep|>'
    )
    settings = chat.rendered().answer
    thought, content = "so<|close|>think<|sep|>", "well<|close|>response<|sep|>"
    answer = f"{thought}<|open|>response<|sep|>{content}{call}<|close|>message<|sep|>"
    assert chat.events(settings, answer) == THINKS + CALLS
    template = template_options(TOOLS, {"enable_thinking": False})
    settings = chat.rendered(template=template).answer
    assert chat.events(settings, content + call) == [THINKS[1], *CALLS]
    turns = (*HI, ChatMessage("assistant", "Hello"))
    template = template_options(TOOLS, add_generation_prompt=False, continue_final_message=True)
    settings = chat.rendered(turns, template).answer
    assert chat.events(settings, f" you<|close|>response<|sep|>{call}") == [
        ("CONTENT", " you"),
        *CALLS,
    ]


def test_reasoning_between_tags_is_followed_in_every_spelling(tokenizer):
    chat = Chat(tokenizer_with(None, TAG_TOKENS), TAGS, "kimi_k3+kimi_k3")
    strict = [{**TOOLS[0], "function": {**TOOLS[0]["function"], "strict": True}}]
    rendered = chat.rendered(template=template_options(strict))
    reasoning = rendered.reasoning
    assert reasoning.start == "reasoning"
    assert list(reasoning.forced_end) == chat.encoded("<|close|>think<|sep|>")
    assert reasoning.has_triggers
    sequences = reasoning.sequences
    for kind, text in (
        ("begins", "<|open|>think<|sep|>"),
        ("ends", "<|close|>think<|sep|>"),
        ("triggers", "<|open|>tools<|sep|>"),
    ):
        ways = getattr(sequences, kind)
        assert 1 < len(ways) <= 16
        assert list(ways[0]) == chat.encoded(text)
        assert {chat.tokenizer.decode(way) for way in ways} == {text}
    assert "<|open|>response<|sep|>" in {chat.tokenizer.decode(way) for way in sequences.borders}
    off = template_options(strict, {"enable_thinking": False})
    assert chat.rendered(template=off).reasoning.start == "border"
    frame = chat.rendered(template=template_options(strict), structured="json").frame
    assert FRAMED in frame
    assert "look" in frame
    none = AnswerOptions("none")
    frame = chat.rendered(template=template_options(strict), options=none, structured="json").frame
    assert FRAMED in frame
    assert frame.count('"response"') == 4  # around content
    named = AnswerOptions("function:look")
    forced = chat.rendered(template=template_options(strict), options=named)
    assert forced.reasoning.start == "reasoning"
    assert '"think"' not in forced.call_grammar


def test_a_custom_tools_format_is_enforced_or_named_and_not_shown_as_a_pattern(tokenizer):
    pattern = {"type": "string", "description": "of a", "pattern": "^(?:a+)$"}
    schema = {"type": "object", "properties": {"input": pattern}}
    custom = {"name": "spell", "parameters": schema, FORMAT_MARK: True}
    template = template_options([*TOOLS, {"type": "function", "function": custom}])
    shown = {**schema, "properties": {"input": {"type": "string", "description": "of a"}}}
    plain = template_options(
        [*TOOLS, {"type": "function", "function": {"name": "spell", "parameters": shown}}]
    )
    path = "tools.spell.parameters.properties.input.pattern"
    shows_all = "{{ tools | tojson }}" + HYBRID
    chat = Chat(tokenizer, shows_all)
    rendered = chat.rendered(template=template)
    assert rendered.token_ids == chat.rendered(template=plain).token_ids
    assert (rendered.formats, rendered.is_for_formats) == ((path,), True)
    assert rendered.reasoning.has_triggers
    assert not rendered.reasoning.is_single
    assert "a+" in rendered.call_grammar
    assert not chat.rendered(template=plain).call_grammar
    single = AnswerOptions(parallel_tool_calls=False)
    assert not chat.rendered(template=template, options=single).is_for_formats
    assert "a+" in chat.rendered(template=template, structured="json").frame
    for options in (AnswerOptions("none"), AnswerOptions("required")):
        assert not chat.rendered(template=template, options=options).formats
    chat.traits = chat.traits._replace(format=None)  # nothing is read as a call
    assert chat.rendered(template=template).formats == (path,)


def test_structured_output_stands_in_the_final_channel(tokenizer):
    chat = Chat(tokenizer_with(None, CHANNEL_TOKENS), CHANNELS, "harmony")
    tools = template_options(TOOLS)
    frame = chat.rendered(template=tools, structured="json").frame
    assert FRAMED in frame
    assert "functions.look" in frame
    assert (
        "functions"
        not in chat.rendered(template=tools, options=AnswerOptions("none"), structured="json").frame
    )
    assert not chat.rendered(template=tools).frame
    turns = (*HI, ChatMessage("assistant", "Hello"))
    template = template_options(TOOLS, add_generation_prompt=False, continue_final_message=True)
    assert not chat.rendered(turns, template, structured="json").frame


def test_structured_output_stands_beside_calls(tokenizer):
    chat = Chat(tokenizer, HYBRID)
    tools = template_options(TOOLS)
    rendered = chat.rendered(template=tools, structured="json")
    assert FRAMED in rendered.frame
    assert "look" in rendered.frame
    assert rendered.reasoning.calls  # one ends reasoning
    for options in (
        {"template": tools, "options": AnswerOptions("none")},
        {"template": TemplateOptions()},
    ):
        alone = chat.rendered(**options, structured="json")
        assert not alone.frame
        assert not alone.reasoning.calls


def test_calls_that_begin_with_text_do_not_stand_beside_a_grammar(tokenizer):
    chat = Chat(tokenizer, HYBRID, "none+llama3_json")
    tools = template_options(TOOLS)
    assert "look" in chat.rendered(template=tools, structured="json").frame
    assert not chat.rendered(template=tools, structured="grammar").frame


def test_vllm_57726_structured_output_of_a_plain_prompt_applies_at_once(tokenizer):
    """It waited for the end of reasoning that nothing had begun."""
    channels = Chat(tokenizer_with(None, CHANNEL_TOKENS), CHANNELS, "harmony")
    for chat in (Chat(tokenizer, ALWAYS_REASONS), channels):
        request = Render(1, "text", answer=AnswerOptions(), structured="json")
        answer = render(chat.tokenizer, request, chat.traits)
        assert answer.reasoning is None
        assert not answer.frame


def test_a_turn_alone_goes_on(tokenizer):
    chat = Chat(tokenizer, ENDS_CHATS)
    template = template_options(None, add_generation_prompt=False, continue_final_message=True)
    turns = (ChatMessage("assistant", "<think>so"),)
    settings = chat.rendered(turns, template).answer
    assert chat.events(settings, "so</think>\n\nwell") == THINKS


def test_without_a_generation_prompt_nothing_is_open(tokenizer):
    chat = Chat(tokenizer, ALWAYS_REASONS)
    template = template_options(TOOLS, add_generation_prompt=False)
    assert chat.events(chat.rendered(template=template).answer, "well") == THINKS[1:]


def test_a_template_that_renders_no_other_chat_is_no_error(tokenizer):
    picky = "{% if not add_generation_prompt %}{{ raise_exception('no') }}{% endif %}<think>"
    chat = Chat(tokenizer, picky)
    settings = chat.rendered().answer
    assert chat.events(settings, "well") == THINKS[1:]


def test_tool_choice_none_renders_no_tools_and_reads_no_calls(tokenizer):
    chat = Chat(tokenizer, HYBRID)
    none = chat.rendered(options=AnswerOptions("none"))
    without = chat.rendered(template=TemplateOptions())
    assert none.token_ids == without.token_ids
    assert len(u32(none.token_ids)) < len(u32(chat.rendered().token_ids))
    assert none.answer is not None
    assert none.answer == without.answer
    assert none.answer.options == AnswerOptions("none")
    found = chat.events(none.answer, f"<think>so</think>well{CALL}")
    assert found == [("REASONING", "so"), ("CONTENT", f"well{CALL}")]


def test_a_prompt_rendered_again_has_the_same_settings(tokenizer):
    chat = Chat(tokenizer, HYBRID)
    turns = (*HI, ChatMessage("assistant", "<think>a</think>b"), *HI)
    assert chat.rendered(turns) == chat.rendered(turns)
    assert replace(chat.rendered(turns), token_ids=b"") == replace(chat.rendered(), token_ids=b"")


@pytest.mark.parametrize(
    ("schema", "types"),
    [
        ({"type": "string"}, "string"),
        ({"type": ["null", "string"]}, "string|null"),
        ({"type": "file"}, ""),
        ({}, ""),
        (True, ""),
        ({"enum": ["a", 1, None, 1.5]}, "string|integer|number|null"),
        ({"enum": [True, [], {}]}, "boolean|array|object"),
        ({"const": 3}, "integer"),
        ({"anyOf": [{"type": "string"}, {"type": "null"}]}, "string|null"),
        ({"oneOf": [{"type": "string"}, {}]}, ""),
        ({"allOf": [{"type": ["string", "null"]}, {"type": "string"}, {}]}, "string"),
        ({"$ref": "#/$defs/leaf"}, "array"),
        ({"$ref": "#/$defs/missing"}, ""),
        ({"$ref": "#/$defs/loop"}, ""),
        ({"$ref": "#"}, "object"),
    ],
)
def test_types_of_properties(schema, types):
    parameters = {
        "type": "object",
        "properties": {"x": schema},
        "$defs": {"leaf": {"type": "array"}, "loop": {"anyOf": [{"$ref": "#/$defs/loop"}]}},
    }
    assert property_types({"name": "f", "parameters": parameters}) == {"x": types}


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(["type", "properties", "anyOf", "allOf", "$ref", "enum", "const", "x"]),
            inner,
            max_size=4,
        )
    ),
    max_leaves=20,
)


@given(JSON)
def test_no_schema_is_an_error(schema):
    for types in property_types({"name": "f", "parameters": schema}).values():
        assert isinstance(types, str)


def test_references_are_followed_once():
    """Without that, their number of paths would be the eighth power of a hundred."""
    loops = {"anyOf": [{"$ref": "#/$defs/loops"} for _ in range(100)]}
    parameters = {"properties": {"x": loops}, "$defs": {"loops": loops}}
    assert property_types({"parameters": parameters}) == {"x": ""}


def looking_around(width: int) -> dict[str, Any]:
    """A function whose property has `width` to the eighth paths to its own schema."""
    branches = {"anyOf": [{"$ref": "#/$defs/x"}] * width}
    properties = {"p": {"$ref": "#/$defs/x"}, "q": {"type": "string"}}
    return {"name": "f", "parameters": {"properties": properties, "$defs": {"x": branches}}}


@pytest.mark.parametrize("width", [2, 12, 100, 3000])
def test_a_schema_is_looked_at_as_often_as_it_stands_in_the_request(width: int) -> None:
    """38 functions of 12 alternatives took 5 s, in which no other prompt was rendered."""
    looks = Looks(2**20)
    found = property_types(looking_around(width), is_nested=True, looks=looks)
    assert found == {"p": "", "q": "string"}
    assert 2**20 - looks.num_left <= 4 * (width + 5)


def test_the_functions_of_a_request_share_one_budget(monkeypatch: pytest.MonkeyPatch) -> None:
    taken: list[int] = []
    take = Looks.take

    def counted(self: Looks) -> bool:
        taken.append(self.num_left)
        return take(self)

    monkeypatch.setattr(Looks, "take", counted)
    nested = {"type": "object", "properties": {"a": {"type": "string"}, "b": {"type": "array"}}}
    properties = {f"p{at}": nested | {"title": f"{at}"} for at in range(100)}
    functions = [
        {"function": {"name": f"f{at}", "parameters": {"properties": properties}}}
        for at in range(1000)
    ]
    assert compact_tools(functions, 2**30, is_nested=True)
    after = [each for each in taken if each <= 0]
    assert len(taken) - len(after) == taken[0] == 2**15
    assert len(after) <= 100 * len(functions)  # one for each property, which is not looked into


@given(
    st.recursive(
        st.just({"type": "string"})
        | st.sampled_from([{"$ref": "#/$defs/a"}, {"$ref": "#/$defs/b"}]),
        lambda inner: st.fixed_dictionaries(
            {},
            optional={
                "properties": st.dictionaries(st.sampled_from("abc"), inner, max_size=2),
                "items": inner,
                "anyOf": st.lists(inner, max_size=3),
            },
        ),
        max_leaves=8,
    ).flatmap(st.just),
    st.data(),
)
def test_all_is_found_that_a_walk_over_every_path_finds(schema: Any, data: Any) -> None:
    schemas = st.sampled_from([schema, {"properties": {"x": schema}}, {"anyOf": [schema, schema]}])
    root = {
        "properties": {"p": schema},
        "$defs": {"a": data.draw(schemas), "b": data.draw(schemas)},
    }

    @functools.cache  # by place: a schema may be walked to in very many ways
    def paths_of(place: int, depth: int) -> frozenset[str]:
        each = by_place[place]
        if not isinstance(each, dict) or depth > 8:
            return frozenset()
        found = {*each.get("properties", {}), *(["[]"] if "items" in each else [])}
        inner = list(each.get("anyOf", []))
        if "$ref" in each:
            inner.append(root["$defs"][each["$ref"][-1]])
        for branch in inner:
            found |= paths(branch, depth + 1)
        return frozenset(found)

    by_place: dict[int, Any] = {}

    def paths(each: Any, depth: int) -> frozenset[str]:
        by_place[id(each)] = each
        return paths_of(id(each), depth)

    names = {name for name, _ in _Schemas(root, Looks()).within(schema)}
    assert {"[]" if name == LIST_ITEM else name for name in names} == paths(schema, 0)


def test_tools_are_bounded():
    assert compact_tools(()) == ""
    whole = compact_tools(TOOLS)
    names = '{"look":{}}'
    assert compact_tools(TOOLS, len(whole)) == whole
    assert compact_tools(TOOLS, len(whole) - 1) == names
    assert compact_tools(TOOLS, len(names) - 1) == ""


PROPERTIES = st.dictionaries(st.text(max_size=5), st.just({"type": "string"}), max_size=5)


@given(st.dictionaries(st.text(max_size=5), PROPERTIES, min_size=1, max_size=5), st.integers(0, 99))
def test_types_that_are_too_long_are_left_out_tool_by_tool(functions, saved):
    tools = [
        {"type": "function", "function": {"name": name, "parameters": {"properties": properties}}}
        for name, properties in functions.items()
    ]
    whole = decode_tool_types(compact_tools(tools))
    max_chars = max(0, len(encode_tool_types(whole)) - saved)
    text = compact_tools(tools, max_chars)
    assert len(text) <= max_chars
    if not text:
        assert len(encode_tool_types({name: {} for name in whole})) > max_chars
        return
    known = decode_tool_types(text)
    assert known.keys() == whole.keys()
    left_out = [name for name in whole if whole[name] and not known[name]]
    assert all(known[name] in (whole[name], {}) for name in whole)
    for name in left_out:  # each of those is as long as any that is left
        assert all(
            len(encode_tool_types({"": whole[name]})) >= len(encode_tool_types({"": known[each]}))
            for each in whole
        )


def test_one_long_tool_does_not_cost_the_others_their_types():
    long = {f"property {i}": {"type": "string"} for i in range(1000)}
    tools = [*TOOLS, {"function": {"name": "long", "parameters": {"properties": long}}}]
    known = decode_tool_types(compact_tools(tools, 1000))
    assert known == {**decode_tool_types(compact_tools(TOOLS)), "long": {}}


def test_types_within_properties_travel_for_elements_that_nest() -> None:
    rows = {"type": "array", "items": {"$ref": "#/$defs/Row"}}
    row = {"properties": {"size": {"type": "integer"}, "rows": rows}}
    parameters = {"properties": {"rows": rows}, "$defs": {"Row": row}}
    tools = [{"type": "function", "function": {"name": "f", "parameters": parameters}}]
    top = decode_tool_types(compact_tools(tools))
    whole = decode_tool_types(compact_tools(tools, is_nested=True))
    assert top is not None
    assert whole is not None
    assert top == {"f": {"rows": "array"}}
    known = whole["f"]
    item = nested_key("rows", LIST_ITEM)
    assert (known["rows"], known[nested_key(item, "size")]) == ("array", "integer")
    assert known[nested_key(nested_key(nested_key(item, "rows"), LIST_ITEM), "size")] == "integer"
    assert sum(map(len, known)) <= 2**14 + len("rows")
    assert compact_tools(tools, 100, is_nested=True) == compact_tools(tools)


def test_schemas_that_refer_to_themselves_cost_little() -> None:
    many = {
        "anyOf": [{"$ref": "#/$defs/Many"}] * 1000,
        "properties": {"a": {"$ref": "#/$defs/Many"}},
    }
    parameters = {"properties": {"top": many}, "$defs": {"Many": many}}
    tools = [{"type": "function", "function": {"name": "f", "parameters": parameters}}]
    whole = decode_tool_types(compact_tools(tools, is_nested=True))
    assert whole is not None
    assert nested_key("top", "a") in whole["f"]
