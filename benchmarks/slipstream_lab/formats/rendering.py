"""The text in which a model writes its answer, by format: reasoning, content, function calls.

An oracle for readers of answers: it knows nothing of how such a text is read. Formats have the
names of vLLM's tool parsers; a variant of one has a colon and a word after it. The texts are those
that the models' chat templates render for calls in a conversation's history.
"""

# ruff: noqa: RUF001 - DeepSeek's delimiters have full-width bars

from __future__ import annotations

import hashlib
import itertools
import json
import keyword
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

Arguments: TypeAlias = dict[str, Any]
PropertyTypes: TypeAlias = Mapping[str, Mapping[str, str]]  # JSON types: function, property


_M3 = "]<]minimax[>["  # before each tag of MiniMax M3


class SampleCall(NamedTuple):
    """A call of a function with its arguments, a JSON object."""

    name: str
    arguments: Arguments


class Rendering(NamedTuple):
    """How a format's models write an answer.

    calls: the text of all calls. added_tokens: delimiters that are tokens of the vocabularies of
    such models. call_id: of the call at an index, where the text has one. closers: spellings that a
    string argument cannot contain, as they would end it. has_bare_values: strings have no quotes,
    so only a property's type tells them from other values. has_bare_keys: neither have the names of
    nested properties. is_python: names and properties are Python identifiers. before_reasoning,
    after_reasoning, before_content, after_content: what surrounds these parts. final: what
    surrounds content without calls, where that differs. is_alone: an answer with calls has no
    content. has_elements: values within values are bare, too: lists and objects are elements.
    """

    calls: Callable[[Sequence[SampleCall]], str]
    added_tokens: tuple[str, ...] = ()
    call_id: Callable[[str, int], str] | None = None
    closers: tuple[str, ...] = ()
    has_bare_values: bool = False
    has_bare_keys: bool = False
    is_python: bool = False
    before_reasoning: str = "<think>\n"
    after_reasoning: str = "\n</think>\n\n"
    before_content: str = ""
    after_content: str = "\n"
    final: tuple[str, str] = ("", "")
    is_alone: bool = False
    has_elements: bool = False


def render(
    variant: str, calls: Sequence[SampleCall], *, content: str = "", reasoning: str = ""
) -> str:
    """The text of an answer in a format of RENDERINGS."""
    rendering = RENDERINGS[variant]
    text = ""
    if reasoning:
        text += rendering.before_reasoning + reasoning + rendering.after_reasoning
    if not calls:
        before, after = rendering.final
        return text + before + content + after
    if content:
        text += rendering.before_content + content + rendering.after_content
    return text + rendering.calls(calls)


def format_of(variant: str) -> str:
    """The name of the format that a key of RENDERINGS is a variant of."""
    return variant.partition(":")[0]


def can_render(variant: str, calls: Sequence[SampleCall], types: PropertyTypes) -> bool:
    """Whether the format's text gives these calls back exactly.

    False where a string contains what closes it, where a bare value has not the type of its
    property, or begins or ends with blanks, and where names are no identifiers in a format that
    needs them.
    """
    rendering = RENDERINGS[variant]
    for call in calls:
        if rendering.is_python and not all(map(_is_identifier, call.name.split("."))):
            return False
        for name, value in call.arguments.items():
            if rendering.is_python and not _is_identifier(name):
                return False
            if rendering.closers and (
                any(closer in string for string in _strings(value) for closer in rendering.closers)
                or not re.fullmatch(r"[\w.-]+", name)
            ):
                return False
            if rendering.has_bare_keys and not all(map(_is_identifier, _keys(value))):
                return False
            if rendering.has_elements and not _is_written_alone(value):
                return False
            if rendering.has_bare_values:
                is_string = types.get(call.name, {}).get(name) == "string"
                if isinstance(value, str) != is_string:
                    return False
                if isinstance(value, str) and value != value.strip():
                    return False
    return True


def _is_written_alone(value: object, is_inner: bool = False) -> bool:
    """Whether elements without types within say what a value is."""
    if isinstance(value, Mapping):
        return (bool(value) or not is_inner) and all(
            re.fullmatch(r"[\w.-]+", key) and _is_written_alone(each, True)
            for key, each in value.items()
        )
    if isinstance(value, list):
        return not is_inner and all(_is_written_alone(each, True) for each in value)
    if isinstance(value, str) and is_inner:
        return (
            re.fullmatch(r"(?!(true|false|null|NaN|Infinity)$)[A-Za-z][\w ]*\w", value) is not None
        )
    return True


def _is_identifier(name: str) -> bool:
    return name.isidentifier() and not keyword.iskeyword(name)


def _keys(value: object) -> list[str]:
    """The names of all properties within a JSON value."""
    if isinstance(value, Mapping):
        return [*value, *(key for part in value.values() for key in _keys(part))]
    return [key for part in value for key in _keys(part)] if isinstance(value, list) else []


def _strings(value: object) -> list[str]:
    """All strings of a JSON value, names of properties included."""
    if isinstance(value, str):
        return [value]
    if isinstance(value, Mapping):
        return [found for pair in value.items() for part in pair for found in _strings(part)]
    if isinstance(value, list):
        return [found for part in value for found in _strings(part)]
    return []


def _json(value: object) -> str:
    return json.dumps(value, ensure_ascii=False)


def _bare(value: object) -> str:
    return value if isinstance(value, str) else _json(value)


def _objects(calls: Sequence[SampleCall], arguments: str = "arguments") -> list[str]:
    return [_json({"name": call.name, arguments: call.arguments}) for call in calls]


def _array(calls: Sequence[SampleCall]) -> str:
    return f"[{', '.join(_objects(calls))}]"


def _lines_in(tag: str) -> Callable[[Sequence[SampleCall]], str]:
    def calls_of(calls: Sequence[SampleCall]) -> str:
        return "\n".join(f"<{tag}>\n{text}\n</{tag}>" for text in _objects(calls))

    return calls_of


def _llama3_json(calls: Sequence[SampleCall]) -> str:
    return "; ".join(_objects(calls, "parameters"))


def _nine_letters(name: str, index: int) -> str:
    return hashlib.sha256(f"{name} {index}".encode()).hexdigest()[:9]


def _mistral(calls: Sequence[SampleCall]) -> str:
    texts = [
        _json({"name": call.name, "arguments": call.arguments, "id": _nine_letters(call.name, i)})
        for i, call in enumerate(calls)
    ]
    return f"[TOOL_CALLS] [{', '.join(texts)}]"


def _mistral_ids(calls: Sequence[SampleCall]) -> str:
    return "".join(
        f"[TOOL_CALLS]{call.name}[CALL_ID]{_nine_letters(call.name, i)}"
        f"[ARGS]{_json(call.arguments)}"
        for i, call in enumerate(calls)
    )


def _mistral_args(calls: Sequence[SampleCall]) -> str:
    return "".join(f"[TOOL_CALLS]{call.name}[ARGS]{_json(call.arguments)}" for call in calls)


def _deepseek_v3(calls: Sequence[SampleCall]) -> str:
    texts = [
        f"<｜tool▁call▁begin｜>function<｜tool▁sep｜>{call.name}\n```json\n{_json(call.arguments)}\n"
        "```<｜tool▁call▁end｜>"
        for call in calls
    ]
    return "<｜tool▁calls▁begin｜>" + "\n".join(texts) + "<｜tool▁calls▁end｜>"


def _deepseek_v31(calls: Sequence[SampleCall]) -> str:
    texts = [
        f"<｜tool▁call▁begin｜>{call.name}<｜tool▁sep｜>{_json(call.arguments)}<｜tool▁call▁end｜>"
        for call in calls
    ]
    return "<｜tool▁calls▁begin｜>" + "".join(texts) + "<｜tool▁calls▁end｜>"


def _dsml(block: str) -> Callable[[Sequence[SampleCall]], str]:
    def calls_of(calls: Sequence[SampleCall]) -> str:
        text = f"<｜DSML｜{block}>\n"
        for call in calls:
            text += f'<｜DSML｜invoke name="{call.name}">\n'
            for name, value in call.arguments.items():
                is_string = "true" if isinstance(value, str) else "false"
                text += f'<｜DSML｜parameter name="{name}" string="{is_string}">'
                text += f"{_bare(value)}</｜DSML｜parameter>\n"
            text += "</｜DSML｜invoke>\n"
        return text + f"</｜DSML｜{block}>"

    return calls_of


def _kimi_id(name: str, index: int) -> str:
    return f"functions.{name}:{index}"


def _kimi_k2(calls: Sequence[SampleCall]) -> str:
    texts = [
        f"<|tool_call_begin|>{_kimi_id(call.name, i)}<|tool_call_argument_begin|>"
        f"{_json(call.arguments)}<|tool_call_end|>"
        for i, call in enumerate(calls)
    ]
    return "<|tool_calls_section_begin|>" + "".join(texts) + "<|tool_calls_section_end|>"


def _qwen3_coder(calls: Sequence[SampleCall]) -> str:
    texts = []
    for call in calls:
        parameters = "".join(
            f"<parameter={name}>\n{_bare(value)}\n</parameter>\n"
            for name, value in call.arguments.items()
        )
        texts.append(f"<tool_call>\n<function={call.name}>\n{parameters}</function>\n</tool_call>")
    return "\n".join(texts)


def _seed_oss(calls: Sequence[SampleCall]) -> str:
    text = ""
    for call in calls:
        text += f"<seed:tool_call>\n<function={call.name}>\n"
        for name, value in call.arguments.items():
            text += f"<parameter={name}>{_bare(value)}</parameter>\n"
        text += "</function>\n</seed:tool_call>"
    return text


def _glm(blank: str) -> Callable[[Sequence[SampleCall]], str]:
    def calls_of(calls: Sequence[SampleCall]) -> str:
        texts = []
        for call in calls:
            text = f"<tool_call>{call.name}{blank}"
            for name, value in call.arguments.items():
                text += f"<arg_key>{name}</arg_key>{blank}"
                text += f"<arg_value>{_bare(value)}</arg_value>{blank}"
            texts.append(f"{text}</tool_call>")
        return blank.join(texts)

    return calls_of


def _minimax_m2(calls: Sequence[SampleCall]) -> str:
    text = "<minimax:tool_call>\n"
    for call in calls:
        text += f'<invoke name="{call.name}">\n'
        for name, value in call.arguments.items():
            text += f'<parameter name="{name}">{_bare(value)}</parameter>\n'
        text += "</invoke>\n"
    return f"{text}</minimax:tool_call>"


def _minimax_m3(calls: Sequence[SampleCall]) -> str:
    text = f"{_M3}<tool_call>\n"
    for call in calls:
        arguments = "".join(_element(key, each) + "\n" for key, each in call.arguments.items())
        text += f'{_M3}<invoke name="{call.name}">\n{arguments}{_M3}</invoke>\n'
    return f"{text}{_M3}</tool_call>"


def _kimi_k3(calls: Sequence[SampleCall]) -> str:
    text = "<|open|>tools<|sep|>"
    for index, call in enumerate(calls, start=1):
        text += f'<|open|>call tool="{_attribute(call.name)}" index="{index}"<|sep|>'
        for name, value in call.arguments.items():
            text += f'<|open|>argument key="{_attribute(name)}" type="{_json_type(value)}"<|sep|>'
            text += f"{_bare(value)}<|close|>argument<|sep|>"
        text += "<|close|>call<|sep|>"
    return f"{text}<|close|>tools<|sep|>"


def _attribute(text: str) -> str:
    return text.replace("&", "&amp;").replace('"', "&quot;")


def _json_type(value: object) -> str:
    match value:
        case str():
            return "string"
        case bool():
            return "boolean"
        case None:
            return "null"
        case list():
            return "array"
        case dict():
            return "object"
        case _:
            return "number"


def _element(name: str, value: object) -> str:
    if isinstance(value, Mapping):
        inner = "".join(itertools.starmap(_element, value.items()))
    elif isinstance(value, list):
        inner = "".join(_element("item", each) for each in value)
    else:
        inner = _bare(value)
    return f"{_M3}<{name}>{inner}{_M3}</{name}>"


def _python_calls(calls: Sequence[SampleCall]) -> list[str]:
    return [
        f"{call.name}({', '.join(f'{name}={value!r}' for name, value in call.arguments.items())})"
        for call in calls
    ]


def _pythonic(calls: Sequence[SampleCall]) -> str:
    return f"[{', '.join(_python_calls(calls))}]"


def _olmo3(calls: Sequence[SampleCall]) -> str:
    return "\n".join(("<function_calls>", *_python_calls(calls), "</function_calls>"))


def _cohere(calls: Sequence[SampleCall]) -> str:
    texts = [
        "    "
        + _json({"tool_call_id": str(i), "tool_name": call.name, "parameters": call.arguments})
        for i, call in enumerate(calls)
    ]
    return "<|START_ACTION|>[\n" + ",\n".join(texts) + "\n]<|END_ACTION|>"


def _gemma_value(value: object, quote: str) -> str:
    match value:
        case str():
            return f"{quote}{value}{quote}"
        case dict():
            inner = (f"{name}:{_gemma_value(part, quote)}" for name, part in sorted(value.items()))
            return f"{{{','.join(inner)}}}"
        case list():
            return f"[{','.join(_gemma_value(part, quote) for part in value)}]"
        case _:
            return _json(value)


def _gemma(before: str, after: str, quote: str) -> Callable[[Sequence[SampleCall]], str]:
    def calls_of(calls: Sequence[SampleCall]) -> str:
        return "".join(
            f"{before}call:{call.name}{_gemma_value(call.arguments, quote)}{after}"
            for call in calls
        )

    return calls_of


def _harmony(calls: Sequence[SampleCall]) -> str:
    texts = [
        f"<|channel|>commentary to=functions.{call.name} <|constrain|>json<|message|>"
        f"{_json(call.arguments)}<|call|>"
        for call in calls
    ]
    return "<|start|>assistant".join(texts)


_TOOL_CALL = ("<tool_call>", "</tool_call>")
_THINK = ("<think>", "</think>")
_DEEPSEEK = (
    "<｜tool▁calls▁begin｜>",
    "<｜tool▁calls▁end｜>",
    "<｜tool▁call▁begin｜>",
    "<｜tool▁call▁end｜>",
    "<｜tool▁sep｜>",
)
_DSML = Rendering(_dsml("function_calls"), ("｜DSML｜", *_THINK), closers=("</｜DSML｜parameter>",))
_PARAMETER = ("</parameter>", "<parameter", "</function>")
_GLM = (*_TOOL_CALL, *_THINK, "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>")

RENDERINGS: Mapping[str, Rendering] = {
    "hermes": Rendering(_lines_in("tool_call"), (*_TOOL_CALL, *_THINK)),
    "granite": Rendering(lambda calls: f"<|tool_call|>{_array(calls)}", ("<|tool_call|>",)),
    "granite:text": Rendering(lambda calls: f"<tool_call>{_array(calls)}"),
    "llama3_json": Rendering(_llama3_json, ("<|python_tag|>",), is_alone=True),
    "llama3_json:tag": Rendering(
        lambda calls: f"<|python_tag|>{_llama3_json(calls)}", ("<|python_tag|>",), is_alone=True
    ),
    "mistral": Rendering(_mistral, ("[TOOL_CALLS]",)),
    "mistral:ids": Rendering(_mistral_ids, ("[TOOL_CALLS]", "[CALL_ID]", "[ARGS]"), _nine_letters),
    "mistral:args": Rendering(
        _mistral_args,
        ("[TOOL_CALLS]", "[ARGS]", "[THINK]", "[/THINK]"),
        before_reasoning="[THINK]",
        after_reasoning="[/THINK]",
    ),
    "deepseek_v3": Rendering(_deepseek_v3, (*_DEEPSEEK, *_THINK)),
    "deepseek_v31": Rendering(_deepseek_v31, (*_DEEPSEEK, *_THINK)),
    "deepseek_v32": _DSML,
    "deepseek_v4": _DSML._replace(calls=_dsml("tool_calls")),
    "kimi_k2": Rendering(
        _kimi_k2,
        (
            "<|tool_calls_section_begin|>",
            "<|tool_calls_section_end|>",
            "<|tool_call_begin|>",
            "<|tool_call_argument_begin|>",
            "<|tool_call_end|>",
        ),
        _kimi_id,
    ),
    "granite-20b-fc": Rendering(
        lambda calls: "".join(f"<function_call> {text}" for text in _objects(calls))
    ),
    "jamba": Rendering(
        lambda calls: f"<tool_calls>{_array(calls)}</tool_calls>", ("<tool_calls>", "</tool_calls>")
    ),
    "longcat": Rendering(
        _lines_in("longcat_tool_call"),
        ("<longcat_tool_call>", "</longcat_tool_call>"),
    ),
    "minimax": Rendering(
        lambda calls: "\n".join(("<tool_calls>", *_objects(calls), "</tool_calls>"))
    ),
    "nemotron_json": Rendering(lambda calls: f"<TOOLCALL>{_array(calls)}</TOOLCALL>"),
    "phi4_mini_json": Rendering(lambda calls: f"functools{_array(calls)}"),
    "hunyuan_a13b": Rendering(
        lambda calls: f"<tool_calls>{_array(calls)}</tool_calls>", is_alone=True
    ),
    "qwen3_coder": Rendering(
        _qwen3_coder,
        (*_TOOL_CALL, *_THINK),
        closers=(*_PARAMETER, *_TOOL_CALL),
        has_bare_values=True,
    ),
    "seed_oss": Rendering(
        _seed_oss,
        ("<seed:tool_call>", "</seed:tool_call>", "<seed:think>", "</seed:think>"),
        closers=(*_PARAMETER, "<seed:tool_call>", "</seed:tool_call>"),
        has_bare_values=True,
        before_reasoning="<seed:think>\n",
        after_reasoning="\n</seed:think>\n",
    ),
    "glm45": Rendering(_glm("\n"), _GLM, closers=_GLM, has_bare_values=True),
    "glm47": Rendering(_glm(""), _GLM, closers=_GLM, has_bare_values=True),
    "minimax_m2": Rendering(
        _minimax_m2,
        ("<minimax:tool_call>", "</minimax:tool_call>", *_THINK),
        closers=("</parameter>", "<parameter", "</invoke>", "<minimax:", "</minimax:"),
        has_bare_values=True,
    ),
    "minimax_m3": Rendering(
        _minimax_m3,
        closers=(_M3[0],),
        has_bare_values=True,
        before_reasoning="<mm:think>\n",
        after_reasoning="\n</mm:think>\n\n",
        has_elements=True,
    ),
    "kimi_k3": Rendering(
        _kimi_k3,
        ("<|open|>", "<|close|>", "<|sep|>"),
        closers=("<|open|>", "<|close|>", "<|sep|>"),
        before_reasoning="<|open|>think<|sep|>",
        after_reasoning="<|close|>think<|sep|>",
        before_content="<|open|>response<|sep|>",
        after_content="<|close|>response<|sep|>",
        final=("<|open|>response<|sep|>", "<|close|>response<|sep|><|close|>message<|sep|>"),
    ),
    "pythonic": Rendering(_pythonic, is_python=True, is_alone=True),
    "llama4_pythonic": Rendering(
        lambda calls: f"<|python_start|>{_pythonic(calls)}<|python_end|>",
        ("<|python_start|>", "<|python_end|>"),
        is_python=True,
        is_alone=True,
    ),
    "lfm2": Rendering(
        lambda calls: f"<|tool_call_start|>{_pythonic(calls)}<|tool_call_end|>",
        ("<|tool_call_start|>", "<|tool_call_end|>"),
        is_python=True,
    ),
    "olmo3": Rendering(_olmo3, is_python=True),
    "functiongemma": Rendering(
        _gemma("<start_function_call>", "<end_function_call>", "<escape>"),
        ("<start_function_call>", "<end_function_call>", "<escape>"),
        closers=("<escape>",),
        has_bare_keys=True,
    ),
    "gemma4": Rendering(
        _gemma("<|tool_call>", "<tool_call|>", '<|"|>'),
        ("<|tool_call>", "<tool_call|>", '<|"|>', "<|channel>", "<channel|>"),
        closers=('<|"|>',),
        has_bare_keys=True,
        before_reasoning="<|channel>thought\n",
        after_reasoning="<channel|>",
    ),
    "cohere_command3": Rendering(
        _cohere,
        (
            "<|START_THINKING|>",
            "<|END_THINKING|>",
            "<|START_ACTION|>",
            "<|END_ACTION|>",
            "<|START_RESPONSE|>",
            "<|END_RESPONSE|>",
        ),
        before_reasoning="<|START_THINKING|>",
        after_reasoning="<|END_THINKING|>",
        final=("<|START_RESPONSE|>", "<|END_RESPONSE|>"),
        is_alone=True,
    ),
    "harmony": Rendering(
        _harmony,
        (
            "<|start|>",
            "<|channel|>",
            "<|message|>",
            "<|constrain|>",
            "<|end|>",
            "<|call|>",
            "<|return|>",
        ),
        before_reasoning="<|channel|>analysis<|message|>",
        after_reasoning="<|end|><|start|>assistant",
        before_content="<|channel|>commentary<|message|>",
        after_content="<|end|><|start|>assistant",
        final=("<|channel|>final<|message|>", "<|return|>"),
    ),
}
"""Renderings by format and variant."""
