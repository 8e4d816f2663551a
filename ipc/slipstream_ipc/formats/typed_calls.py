"""The table's entries of tool calls whose arguments are not written as JSON: in tags, as Python
calls, as Gemma writes them. Names are those of vLLM's tool parsers.
"""

from __future__ import annotations

from slipstream_ipc.formats.answer_format import (
    Alternative,
    Blank,
    CallFormat,
    CallSection,
    Delimiter,
    Element,
    JsonCall,
    KeywordArguments,
    LiteralText,
    Name,
    NestedElements,
    Repeat,
    Signature,
    TagAttribute,
    TaggedParameters,
)
from slipstream_ipc.formats.kimi_k3 import KIMI_K3_CALLS

_LINE = Blank("\n")
_MINIMAX_M3 = "]<]minimax[>["  # stands before each tag
_TOOL_CALL = Delimiter("<tool_call>")
_TOOL_CALL_END = Delimiter("</tool_call>")


def _function_tags(trims_newline: bool, writes_python: bool) -> tuple[Element, ...]:
    """`<function=NAME>`, parameters as `<parameter=KEY>VALUE</parameter>`, and `</function>`."""
    return (
        LiteralText("<function="),
        Name(stops=">\n"),
        LiteralText(">"),
        TaggedParameters(
            opening=LiteralText("<parameter="),
            key_end=LiteralText(">"),
            closing=LiteralText("</parameter>"),
            end=LiteralText("</function>"),
            trims_newline=trims_newline,
            writes_python=writes_python,
        ),
    )


def _invoke_tags(prefix: str) -> tuple[Element, ...]:
    """`<invoke name="NAME">`, its parameters as `<parameter name="KEY">VALUE</parameter>`, and
    `</invoke>`; `prefix` stands before each of these words.
    """
    return (
        LiteralText(f'<{prefix}invoke name="'),
        Name(stops='"\n'),
        LiteralText('">'),
        TaggedParameters(
            opening=LiteralText(f'<{prefix}parameter name="'),
            key_end=LiteralText('"'),
            closing=LiteralText(f"</{prefix}parameter>"),
            end=LiteralText(f"</{prefix}invoke>"),
            attribute=TagAttribute("string", "true", ("false",)),
        ),
    )


def _dsml(name: str, tag: str, signature: Signature) -> CallFormat:
    prefix = "\uff5cDSML\uff5c"
    return CallFormat(
        name=name,
        sections=(
            CallSection(
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
    section = CallSection((_TOOL_CALL, Name(), _LINE, parameters))
    return CallFormat(name=name, sections=(section,), signatures=signatures)


_PYTHON_CALL: tuple[Element, ...] = (Name(), LiteralText("("), KeywordArguments())
_COMMA = (LiteralText(","), Blank(" "))
_PYTHON_LIST: tuple[Element, ...] = (
    LiteralText("["),
    Repeat(_PYTHON_CALL, _COMMA),
    LiteralText("]"),
)


def _gemma(name: str, opening: str, closing: str, string_delimiter: str) -> CallFormat:
    return CallFormat(
        name=name,
        sections=(
            CallSection(
                (
                    Delimiter(opening),
                    LiteralText("call:"),
                    Name(),
                    LiteralText("{"),
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
            CallSection((_TOOL_CALL, _LINE, *_function_tags(True, True), _LINE, _TOOL_CALL_END)),
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
            CallSection(
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
            CallSection(
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
    CallFormat(
        name="minimax_m3",  # after vLLM 0.32's parser
        sections=(
            CallSection(
                (
                    Delimiter(f"{_MINIMAX_M3}<tool_call>"),
                    _LINE,
                    Repeat(
                        (
                            LiteralText(f'{_MINIMAX_M3}<invoke name="'),
                            Name(stops='"\n'),
                            LiteralText('">'),
                            NestedElements(prefix=_MINIMAX_M3, end="invoke"),
                        ),
                        separator=(_LINE,),
                    ),
                    _LINE,
                    Delimiter(f"{_MINIMAX_M3}</tool_call>"),
                )
            ),
        ),
        signatures=(
            Signature(
                in_template=(_MINIMAX_M3, "<invoke name="),
                not_in_template=("<minimax:tool_call>",),
                rank=1,
            ),
        ),
        spelled=tuple(map(Delimiter, (_MINIMAX_M3, "<tool_call>", "</tool_call>"))),
    ),
    KIMI_K3_CALLS,
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
        sections=(CallSection(_PYTHON_LIST, at_start=True),),
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
            CallSection(_PYTHON_LIST, at_start=True),
            CallSection(
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
            CallSection(
                (
                    Delimiter("<|tool_call_start|>"),
                    LiteralText("["),
                    Repeat((Alternative(((JsonCall(),), _PYTHON_CALL)),), _COMMA),
                    LiteralText("]"),
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
            CallSection(
                (
                    Delimiter("<function_calls>"),
                    _LINE,
                    Repeat(_PYTHON_CALL, separator=(_LINE,)),
                    _LINE,
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
