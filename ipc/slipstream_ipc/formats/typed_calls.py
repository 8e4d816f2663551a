"""The table's entries of tool calls whose arguments are not written as JSON: in tags, as Python
calls, as Gemma writes them. Names are those of vLLM's tool parsers.
"""

from __future__ import annotations

from slipstream_ipc.formats.answer_format import (
    Alternative,
    Blank,
    CallFormat,
    Delimiter,
    Element,
    JsonCall,
    KeywordArguments,
    Name,
    Repeat,
    Section,
    Signature,
    TaggedParameters,
    Text,
)

_LINE = Blank("\n")
_TOOL_CALL = Delimiter("<tool_call>")
_TOOL_CALL_END = Delimiter("</tool_call>")


def _function_tags(trims_newline: bool, writes_python: bool) -> tuple[Element, ...]:
    """`<function=NAME>`, parameters as `<parameter=KEY>VALUE</parameter>`, and `</function>`."""
    return (
        Text("<function="),
        Name(stops=">\n"),
        Text(">"),
        TaggedParameters(
            opening=Text("<parameter="),
            key_end=Text(">"),
            closing=Text("</parameter>"),
            end=Text("</function>"),
            trims_newline=trims_newline,
            writes_python=writes_python,
        ),
    )


def _invoke_tags(prefix: str) -> tuple[Element, ...]:
    """`<invoke name="NAME">`, its parameters as `<parameter name="KEY">VALUE</parameter>`, and
    `</invoke>`; `prefix` stands before each of these words.
    """
    return (
        Text(f'<{prefix}invoke name="'),
        Name(stops='"\n'),
        Text('">'),
        TaggedParameters(
            opening=Text(f'<{prefix}parameter name="'),
            key_end=Text('"'),
            closing=Text(f"</{prefix}parameter>"),
            end=Text(f"</{prefix}invoke>"),
            has_attributes=True,
        ),
    )


def _dsml(name: str, tag: str, signature: Signature) -> CallFormat:
    prefix = "\uff5cDSML\uff5c"
    return CallFormat(
        name=name,
        sections=(
            Section(
                (
                    Delimiter(f"<{prefix}{tag}>"),
                    _LINE,
                    Repeat(_invoke_tags(prefix), separator=(_LINE,)),
                    _LINE,
                    Delimiter(f"</{prefix}{tag}>"),
                )
            ),
        ),
        signatures=(signature,),
    )


def _pair_tags(name: str, signatures: tuple[Signature, ...] = ()) -> CallFormat:
    """GLM 4.5 puts line breaks between the tags, GLM 4.7 does not."""
    parameters = TaggedParameters(
        opening=Delimiter("<arg_key>"),
        key_end=Delimiter("</arg_key>"),
        closing=Delimiter("</arg_value>"),
        end=_TOOL_CALL_END,
        value_opening=Delimiter("<arg_value>"),
    )
    section = Section((_TOOL_CALL, Name(), _LINE, parameters))
    return CallFormat(name=name, sections=(section,), signatures=signatures)


_PYTHON_CALL: tuple[Element, ...] = (Name(), Text("("), KeywordArguments())
_COMMA = (Text(","), Blank(" "))
_PYTHON_LIST: tuple[Element, ...] = (Text("["), Repeat(_PYTHON_CALL, _COMMA), Text("]"))


def _gemma(name: str, opening: str, closing: str, string_delimiter: str) -> CallFormat:
    return CallFormat(
        name=name,
        sections=(
            Section(
                (
                    Delimiter(opening),
                    Text("call:"),
                    Name(),
                    Text("{"),
                    KeywordArguments("{", ":", Delimiter(string_delimiter)),
                    Delimiter(closing),
                )
            ),
        ),
        signatures=(Signature(in_template=(opening, closing)),),
    )


TYPED_CALL_FORMATS = (
    CallFormat(
        name="qwen3_coder",  # and Qwen 3.5, Nemotron 3, Step 3.5
        sections=(
            Section((_TOOL_CALL, _LINE, *_function_tags(True, True), _LINE, _TOOL_CALL_END)),
        ),
        signatures=(
            Signature(
                in_template=("<tool_call>", "<function=", "<parameter="),
                not_in_template=("<seed:tool_call>",),
            ),
        ),
    ),
    CallFormat(
        name="seed_oss",
        sections=(
            Section(
                (
                    Delimiter("<seed:tool_call>"),
                    _LINE,
                    *_function_tags(False, True),
                    _LINE,
                    Delimiter("</seed:tool_call>"),
                )
            ),
        ),
        signatures=(Signature(in_template=("<seed:tool_call>", "<function=")),),
    ),
    _pair_tags("glm45", (Signature(in_template=("<tool_call>", "<arg_key>", "<arg_value>")),)),
    _pair_tags("glm47"),
    CallFormat(
        name="minimax_m2",
        sections=(
            Section(
                (
                    Delimiter("<minimax:tool_call>"),
                    _LINE,
                    Repeat(_invoke_tags(""), separator=(_LINE,)),
                    _LINE,
                    Delimiter("</minimax:tool_call>"),
                )
            ),
        ),
        signatures=(Signature(in_template=("<minimax:tool_call>", "<invoke name=")),),
    ),
    _dsml(
        "deepseek_v32",
        "function_calls",
        Signature(in_template=("\uff5cDSML\uff5c", "function_calls>")),
    ),
    _dsml(
        "deepseek_v4",
        "tool_calls",
        Signature(
            in_template=("\uff5cDSML\uff5c", "tool_calls>"), not_in_template=("function_calls>",)
        ),
    ),
    CallFormat(
        name="pythonic",  # Llama 3.2, ToolACE, Gemma 3 with a template that asks for it
        sections=(Section(_PYTHON_LIST, at_start=True),),
        signatures=(
            Signature(
                in_template=("[func_name1(",),
                not_in_template=("<|header_start|>", "<|tool_call_start|>", "<function_calls>"),
            ),
        ),
    ),
    CallFormat(
        name="llama4_pythonic",
        sections=(
            Section(_PYTHON_LIST, at_start=True),
            Section(
                (
                    Delimiter("<|python_start|>"),
                    *_PYTHON_LIST,
                    Alternative(((Delimiter("<|python_end|>"),), ())),
                )
            ),
        ),
        signatures=(Signature(in_template=("<|header_start|>", "[func_name1(")),),
    ),
    CallFormat(
        name="lfm2",
        sections=(
            Section(
                (
                    Delimiter("<|tool_call_start|>"),
                    Text("["),
                    Repeat((Alternative(((JsonCall(),), _PYTHON_CALL)),), _COMMA),
                    Text("]"),
                    Delimiter("<|tool_call_end|>"),
                )
            ),
        ),
        signatures=(
            Signature(
                in_template=("<|im_start|>",),
                tokens=("<|tool_call_start|>", "<|tool_call_end|>"),
            ),
        ),
    ),
    CallFormat(
        name="olmo3",
        sections=(
            Section(
                (
                    Delimiter("<function_calls>"),
                    Repeat(_PYTHON_CALL, separator=(_LINE,)),
                    Delimiter("</function_calls>"),
                )
            ),
        ),
        signatures=(
            Signature(in_template=("<function_calls>",), not_in_template=("\uff5cDSML\uff5c",)),
        ),
    ),
    _gemma("functiongemma", "<start_function_call>", "<end_function_call>", "<escape>"),
    _gemma("gemma4", "<|tool_call>", "<tool_call|>", '<|"|>'),
)
