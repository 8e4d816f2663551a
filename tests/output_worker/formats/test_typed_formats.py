"""Whole answers in each format of typed arguments, and of JSON in tags: what was rendered is given
back, at any division, with the delimiters as text or as tokens.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.helpers import answers
from tests.helpers.answers import Item, delimiter_tokens, to_items
from tests.helpers.scanning import cuts, divided

from slipstream_ipc.formats.table import CALLS, REASONING, compose
from slipstream_ipc.messages.answer import AnswerEvent, AnswerOptions, EventKind
from slipstream_worker.formats.compiled_format import CompiledFormat, compile_format
from slipstream_worker.formats.scanners.json_scanner import JsonScanner
from slipstream_worker.formats.scanners.scanner import ScanStatus

Calls = list[tuple[str, dict[str, Any]]]

TOOLS = {
    "get_weather": {"city": "string", "days": "integer", "units": "string|null"},
    "write.file-2": {
        "path": "string",
        "content": "string",
        "mode": "integer",
        "lines": "array",
        "options": "object",
        "force": "boolean",
        "share": "number",
    },
    "now": {},
}

MARKUP = [
    "</parameter",
    "</arg_value",
    "</\uff5cDSML\uff5cparameter",
    "<escape",
    '<|"',
    "</function>",
]
texts = st.text(st.characters(codec="utf-8", exclude_characters="<"), max_size=20) | st.lists(
    st.sampled_from(["a", " ", "\n", '"', "'", "\\", ">", "{", "1", "é"]), max_size=12
).map("".join)
bare_texts = st.text("abc XYZ.,;-", max_size=12).map(str.strip)
keys = st.from_regex(r"[a-z_][a-z0-9_]{0,6}", fullmatch=True)
leaves = st.none() | st.booleans() | st.integers(-(2**60), 2**60) | texts
deep = st.recursive(
    leaves,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(keys, inner, max_size=3),
    max_leaves=5,
)
VALUES = {
    "string": texts,
    "integer": st.integers(-(2**60), 2**60),
    "boolean": st.booleans(),
    "number": st.floats(allow_nan=False, allow_infinity=False),
    "array": st.lists(deep, max_size=3),
    "object": st.dictionaries(keys, deep, max_size=3),
    "string|null": st.none() | bare_texts.filter(lambda text: text not in ("null", "None")),
}


@st.composite
def calls(draw: st.DrawFn) -> Calls:
    made = []
    for _ in range(draw(st.integers(1, 3))):
        name = draw(st.sampled_from(sorted(TOOLS)))
        chosen = draw(st.sets(st.sampled_from(sorted(TOOLS[name])))) if TOOLS[name] else set()
        made.append((name, {key: draw(VALUES[TOOLS[name][key]]) for key in sorted(chosen)}))
    return made


def or_json(value: object) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def or_printed(value: object) -> str:
    return value if isinstance(value, str) else str(value)


def qwen3_coder(made: Calls) -> str:
    def written(value: object) -> str:
        return or_json(value) if isinstance(value, list | dict) else or_printed(value)

    return "".join(
        f"\n<tool_call>\n<function={name}>\n"
        + "".join(f"<parameter={k}>\n{written(v)}\n</parameter>\n" for k, v in arguments.items())
        + "</function>\n</tool_call>"
        for name, arguments in made
    )


def seed_oss(made: Calls) -> str:
    return "".join(
        f"\n<seed:tool_call>\n<function={name}>\n"
        + "".join(f"<parameter={k}>{or_printed(v)}</parameter>\n" for k, v in arguments.items())
        + "</function>\n</seed:tool_call>"
        for name, arguments in made
    )


def glm(line: str) -> Callable[[Calls], str]:
    def render(made: Calls) -> str:
        return "".join(
            f"\n<tool_call>{name}{line}"
            + "".join(
                f"<arg_key>{k}</arg_key>{line}<arg_value>{or_json(v)}</arg_value>{line}"
                for k, v in arguments.items()
            )
            + "</tool_call>"
            for name, arguments in made
        )

    return render


M3 = "]<]minimax[>["


def minimax_m3(made: Calls) -> str:
    inner = "".join(
        f'{M3}<invoke name="{name}">\n'
        + "".join(f"{M3}<{k}>{or_json(v)}{M3}</{k}>\n" for k, v in arguments.items())
        + f"{M3}</invoke>\n"
        for name, arguments in made
    )
    return f"\n{M3}<tool_call>\n{inner}{M3}</tool_call>"


def kimi_k3(made: Calls) -> str:
    def kind(value: object) -> str:
        if isinstance(value, bool):
            return "boolean"
        names = {str: "string", list: "array", dict: "object", type(None): "null"}
        return names.get(type(value), "number")

    inner = "".join(
        f'<|open|>call tool="{name}" index="{index}"<|sep|>'
        + "".join(
            f'<|open|>argument key="{k}" type="{kind(v)}"<|sep|>{or_json(v)}'
            "<|close|>argument<|sep|>"
            for k, v in arguments.items()
        )
        + "<|close|>call<|sep|>"
        for index, (name, arguments) in enumerate(made, 1)
    )
    return f"<|open|>tools<|sep|>{inner}<|close|>tools<|sep|>"


def minimax_m2(made: Calls) -> str:
    inner = "".join(
        f'<invoke name="{name}">\n'
        + "".join(f'<parameter name="{k}">{or_json(v)}</parameter>\n' for k, v in arguments.items())
        + "</invoke>\n"
        for name, arguments in made
    )
    return f"\n<minimax:tool_call>\n{inner}</minimax:tool_call>"


def dsml(tag: str) -> Callable[[Calls], str]:
    p = "\uff5cDSML\uff5c"

    def render(made: Calls) -> str:
        inner = "\n".join(
            f'<{p}invoke name="{name}">\n'
            + "\n".join(
                f'<{p}parameter name="{k}" string="{"true" if isinstance(v, str) else "false"}">'
                f"{or_json(v)}</{p}parameter>"
                for k, v in arguments.items()
            )
            + f"\n</{p}invoke>"
            for name, arguments in made
        )
        return f"\n\n<{p}{tag}>\n{inner}\n</{p}{tag}>"

    return render


def python_call(name: str, arguments: dict[str, Any]) -> str:
    return f"{name}({', '.join(f'{key}={value!r}' for key, value in arguments.items())})"


def pythonic(made: Calls) -> str:
    return f"[{', '.join(python_call(*call) for call in made)}]"


def pythonic_of_json(made: Calls) -> str:
    """Gemma 3's template."""
    inner = ", ".join(
        f"{name}({', '.join(f'{k}={json.dumps(v)}' for k, v in arguments.items())})"
        for name, arguments in made
    )
    return f"[{inner}]"


def llama4(made: Calls) -> str:
    return f"<|python_start|>{pythonic(made)}<|python_end|>"


def lfm2(made: Calls) -> str:
    return f"<|tool_call_start|>{pythonic(made)}<|tool_call_end|>"


def olmo3(made: Calls) -> str:
    inner = "\n".join(python_call(*call) for call in made)
    return f"<function_calls>\n{inner}\n</function_calls>"


def gemma(opening: str, closing: str, quote: str) -> Callable[[Calls], str]:
    def written(value: object) -> str:
        match value:
            case str():
                return f"{quote}{value}{quote}"
            case list():
                return f"[{','.join(map(written, value))}]"
            case dict():
                return f"{{{','.join(f'{key}:{written(item)}' for key, item in value.items())}}}"
            case bool():
                return "true" if value else "false"
            case _:
                return str(value)

    def render(made: Calls) -> str:
        return "".join(
            f"{opening}call:{name}{written(arguments)}{closing}" for name, arguments in made
        )

    return render


def json_call(name: str, arguments: dict[str, Any]) -> str:
    return json.dumps({"name": name, "arguments": arguments}, ensure_ascii=False)


def json_list(opening: str, closing: str) -> Callable[[Calls], str]:
    def render(made: Calls) -> str:
        return f"{opening}[{', '.join(json_call(*call) for call in made)}]{closing}"

    return render


def cohere(made: Calls) -> str:
    inner = ",\n".join(
        f'    {{"tool_call_id": "{index}", "tool_name": "{name}", '
        f'"parameters": {json.dumps(arguments)}}}'
        for index, (name, arguments) in enumerate(made)
    )
    return f"<|START_ACTION|>[\n{inner}\n]<|END_ACTION|>"


def json_lines(opening: str, closing: str) -> Callable[[Calls], str]:
    def render(made: Calls) -> str:
        inner = "".join(json_call(*call) + "\n" for call in made)
        return f"{opening}\n{inner}{closing}"

    return render


def json_tags(opening: str, closing: str) -> Callable[[Calls], str]:
    def render(made: Calls) -> str:
        return "\n".join(f"{opening}\n{json_call(*call)}\n{closing}" for call in made)

    return render


class Case(NamedTuple):
    """A format and how its model's template writes calls; whether calls follow content."""

    calls: str
    render: Callable[[Calls], str]
    reasoning: str = "deepseek_r1"
    follows_content: bool = True


CASES = [
    Case("qwen3_coder", qwen3_coder, "qwen3"),
    Case("seed_oss", seed_oss, "seed_oss"),
    Case("glm45", glm("\n"), "glm45"),
    Case("glm47", glm(""), "glm47"),
    Case("minimax_m2", minimax_m2, "minimax_m2"),
    Case("minimax_m3", minimax_m3, "minimax_m3"),
    Case("kimi_k3", kimi_k3, "kimi_k3"),
    Case("deepseek_v32", dsml("function_calls")),
    Case("deepseek_v4", dsml("tool_calls")),
    Case("pythonic", pythonic, follows_content=False),
    Case("pythonic", pythonic_of_json, follows_content=False),
    Case("llama4_pythonic", pythonic, follows_content=False),
    Case("llama4_pythonic", llama4),
    Case("lfm2", lfm2, "qwen3"),
    Case("lfm2", json_list("<|tool_call_start|>", "<|tool_call_end|>"), "qwen3"),
    Case("olmo3", olmo3, "qwen3"),
    Case("functiongemma", gemma("<start_function_call>", "<end_function_call>", "<escape>")),
    Case("gemma4", gemma("<|tool_call>", "<tool_call|>", '<|"|>')),
    Case("hunyuan_a13b", json_list("<tool_calls>", "</tool_calls>"), "hunyuan_a13b"),
    Case("jamba", json_list("<tool_calls>", "</tool_calls>")),
    Case("nemotron_json", json_list("<TOOLCALL>", "</TOOLCALL>")),
    Case("cohere_command3", cohere, "cohere_command3"),
    Case("minimax", json_lines("<tool_calls>", "</tool_calls>")),
    Case("longcat", json_tags("<longcat_tool_call>", "</longcat_tool_call>")),
    Case("phi4_mini_json", json_list("functools", "")),
]
IDS = [f"{case.calls}-{index}" for index, case in enumerate(CASES)]


class Format(NamedTuple):
    """A format for a vocabulary with all of its delimiters, or none."""

    compiled: CompiledFormat
    tokens: dict[str, int]


def format_of(case: Case, has_tokens: bool) -> Format:
    entry = compose(REASONING[case.reasoning], CALLS[case.calls])
    tokens = delimiter_tokens(entry) if has_tokens else {}
    return Format(compile_format(entry, tokens), tokens)


FORMATS = {
    (case, has_tokens): format_of(case, has_tokens)
    for case in CASES
    for has_tokens in (True, False)
}


def read(
    form: Format, text: str, places: list[int], tool_choice: str = "auto"
) -> list[AnswerEvent]:
    """The events of an answer whose texts are divided at these places."""
    items: list[Item] = []
    for item in to_items(text, form.tokens):
        items += [item] if isinstance(item, int) else filter(None, divided(item, places))
    return answers.read(form.compiled, items, TOOLS, AnswerOptions(tool_choice=tool_choice))


def calls_of(events: list[AnswerEvent]) -> Calls:
    """Those that have ended."""
    names = {event.call: event.text for event in events if event.kind == EventKind.CALL_BEGINS}
    ended = [event.call for event in events if event.kind == EventKind.CALL_ENDS]
    arguments = arguments_of(events)
    return [(names[call], json.loads(arguments[call])) for call in ended]


def arguments_of(events: list[AnswerEvent]) -> dict[int, str]:
    arguments: dict[int, str] = {}
    for event in events:
        if event.kind == EventKind.CALL_ARGUMENTS:
            arguments[event.call] = arguments.get(event.call, "") + event.text
    return arguments


def text_of(events: list[AnswerEvent], kind: EventKind) -> str:
    return "".join(event.text for event in events if event.kind == kind)


@pytest.mark.parametrize("has_tokens", [True, False])
@pytest.mark.parametrize("case", CASES, ids=IDS)
@settings(max_examples=15)
@given(made=calls(), places=cuts, has_text=st.booleans())
def test_what_was_rendered_is_given_back(
    case: Case, has_tokens: bool, made: Calls, places: list[int], has_text: bool
) -> None:
    form = FORMATS[case, has_tokens]
    reasoning = REASONING[case.reasoning]
    answer = f"{reasoning.begins[0].literal}hm{reasoning.ends[0].literal}"
    content = "I look." if has_text and case.follows_content else ""
    events = read(form, answer + "\n\n" + content + case.render(made), places)
    assert calls_of(events) == made
    assert text_of(events, EventKind.REASONING) == "hm"
    assert text_of(events, EventKind.CONTENT) == content


@pytest.mark.parametrize("has_tokens", [True, False])
@pytest.mark.parametrize("case", CASES, ids=IDS)
@settings(max_examples=10)
@given(made=calls(), places=cuts, end=st.integers(0), extra=st.integers(0))
def test_a_broken_answer_reads_alike_at_any_division(
    case: Case, has_tokens: bool, made: Calls, places: list[int], end: int, extra: int
) -> None:
    form = FORMATS[case, has_tokens]
    text = case.render(made)
    place = extra % (len(text) + 1)
    text = text[:place] + " x" * (extra % 2) + text[place:] + " and so on"
    text = text[: end % (len(text) + 1)]
    events = read(form, text, places)
    assert events == read(form, text, [])
    for call in calls_of(events):
        assert call[0] in TOOLS
    for arguments in arguments_of(events).values():
        assert JsonScanner(objects_only=True).feed(arguments, 0)[1] is not ScanStatus.FAILED


@pytest.mark.parametrize("case", CASES, ids=IDS)
@given(made=calls(), places=cuts)
@settings(max_examples=4)
def test_calls_that_are_off_are_content(case: Case, made: Calls, places: list[int]) -> None:
    text = case.render(made).strip()
    for has_tokens in (True, False):
        events = read(FORMATS[case, has_tokens], text, places, tool_choice="none")
        dropped = {part.literal for part in REASONING[case.reasoning].dropped}
        if not any(literal in text for literal in dropped):
            assert events == [AnswerEvent(EventKind.CONTENT, text)]


@pytest.mark.parametrize("has_tokens", [True, False])
@pytest.mark.parametrize("case", CASES, ids=IDS)
def test_an_unknown_function_is_content(case: Case, has_tokens: bool) -> None:
    text = case.render([("unheard", {"a": "b"})]).strip()
    events = read(FORMATS[case, has_tokens], text, [])
    assert events == [AnswerEvent(EventKind.CONTENT, text)]


def test_a_forgotten_tag_costs_neither_its_value_nor_the_next_call() -> None:
    form = FORMATS[CASES[0], True]
    broken = "<tool_call>\n<function=get_weather>\n<parameter=city>\nRome</function>\n</tool_call>"
    whole = qwen3_coder([("get_weather", {"city": "Oslo"})])
    assert calls_of(read(form, broken + whole, [])) == [
        ("get_weather", {"city": "Rome"}),
        ("get_weather", {"city": "Oslo"}),
    ]


def test_a_word_that_is_a_token_elsewhere_is_text_of_a_value() -> None:
    form = FORMATS[CASES[0], True]
    text = qwen3_coder([("write.file-2", {"content": "if '</think>' in\n<think>\ntext"})])
    assert calls_of(read(form, text, [])) == [
        ("write.file-2", {"content": "if '</think>' in\n<think>\ntext"})
    ]


def test_the_letters_of_a_token_between_arguments_are_no_tag() -> None:
    form = FORMATS[next(case for case in CASES if case.calls == "glm47"), True]
    begun = to_items("<tool_call>get_weather<arg_key>city</arg_key>", form.tokens)
    value = to_items("<arg_value>Rome</arg_value></tool_call>", form.tokens)
    as_text = answers.read(form.compiled, [*begun, "<arg_value>", *value[1:]], TOOLS)
    assert calls_of(answers.read(form.compiled, [*begun, *value], TOOLS))
    assert not calls_of(as_text)


CUT = "a\nb 'c' "


@pytest.mark.parametrize("case", CASES, ids=IDS)
def test_of_a_call_that_is_cut_the_arguments_are_kept(case: Case) -> None:
    made: Calls = [("write.file-2", {"path": "p", "content": CUT * 3, "mode": 12})]
    text = case.render(made)
    for end in range(text.index("write") + 20, len(text)):
        events = read(FORMATS[case, True], text[:end], [])
        arguments = arguments_of(events).get(0, "")
        assert JsonScanner(objects_only=True).feed(arguments, 0)[1] is not ScanStatus.FAILED
        content = text_of(events, EventKind.CONTENT)
        assert not any(word in content for word in ("content", "mode", "'c'", "12"))


def test_values_may_hold_what_looks_like_a_tag() -> None:
    for case in CASES:
        if case.calls in ("functiongemma", "gemma4"):
            continue
        for markup in MARKUP:
            made: Calls = [("write.file-2", {"content": f"a{markup} b", "path": markup})]
            assert calls_of(read(FORMATS[case, False], case.render(made), [1, 3, 50])) == made
