"""The table's entries of tool calls that are JSON objects with the function's name in them. Names
are those of vLLM's tool parsers.
"""

from __future__ import annotations

from slipstream_ipc.formats.answer_format import (
    Alternative,
    Blank,
    CallFormat,
    CallId,
    CallSection,
    Delimiter,
    JsonCall,
    JsonObject,
    LiteralText,
    Name,
    Repeat,
    Signature,
)

_CALL = JsonCall()
_CALLS = Repeat((_CALL,), separator=(LiteralText(","), Blank(" ")))
_ARRAY = (LiteralText("["), _CALLS, LiteralText("]"))
_LLAMA_CALL = JsonCall(arguments=("parameters", "arguments"))
_LLAMA_ARRAY = (
    LiteralText("["),
    Repeat((_LLAMA_CALL,), separator=(LiteralText(","), Blank(" "))),
    LiteralText("]"),
)
_LLAMA_CALLS = Repeat((_LLAMA_CALL,), separator=(LiteralText(";"), Blank(" ")))


def _between(begin: str, end: str) -> tuple[CallSection, ...]:
    return (CallSection((Delimiter(begin), Blank("\n"), _CALL, Blank("\n"), Delimiter(end))),)


JSON_CALL_FORMATS = (
    CallFormat(
        name="hermes",
        sections=_between("<tool_call>", "</tool_call>"),
        quotable=True,
        signatures=(
            Signature(
                in_template=("<tool_call>", "</tool_call>", '"arguments"'),
                not_in_template=("<function=", "<arg_key>"),
            ),
            Signature(
                in_template=("<tool_call>", "</tool_call>", '\\"arguments\\"'),
                not_in_template=("<function=", "<arg_key>"),
            ),
        ),
    ),
    CallFormat(
        name="llama3_json",
        sections=(
            CallSection((Delimiter("<|python_tag|>"), _LLAMA_CALLS)),
            CallSection((_LLAMA_CALLS,), at_start=True),
        ),
        signatures=(
            Signature(
                in_template=('"parameters": ',),
                not_in_template=("<tool_call>",),
                tokens=("<|python_tag|>",),
            ),
        ),
    ),
    CallFormat(
        name="mistral",
        sections=(
            CallSection(
                (
                    Delimiter("[TOOL_CALLS]"),
                    Alternative(
                        (
                            (Blank(" "), *_ARRAY),
                            (
                                Name(),
                                Alternative(((Delimiter("[CALL_ID]"), CallId()), ())),
                                Alternative(((Delimiter("[ARGS]"),), ())),
                                JsonObject(),
                            ),
                            (_CALL,),
                        )
                    ),
                )
            ),
        ),
        call_id="mistral",
        signatures=(
            Signature(in_template=("[TOOL_CALLS]",)),
            Signature(not_in_template=("<tool_call>",), tokens=("[TOOL_CALLS]",)),
        ),
    ),
    CallFormat(
        name="granite",
        sections=(
            CallSection((Delimiter("<|tool_call|>"), *_ARRAY)),
            CallSection((Delimiter("<tool_call>"), *_ARRAY)),
        ),
        signatures=(
            Signature(in_template=("<|start_of_role|>", "<|tool_call|>")),
            Signature(
                in_template=("<|start_of_role|>", "<tool_call>"), not_in_template=("</tool_call>",)
            ),
        ),
    ),
    CallFormat(
        name="granite-20b-fc",
        sections=(CallSection((Delimiter("<function_call>"), Blank(" "), _CALL)),),
        signatures=(Signature(in_template=("<function_call> {",)),),
    ),
    CallFormat(
        name="jamba",
        sections=(
            CallSection(
                (Delimiter("<tool_calls>"), Blank("\n"), *_ARRAY, Delimiter("</tool_calls>"))
            ),
        ),
        signatures=(
            Signature(
                not_in_template=("<beginning_of_sentence>", "\u52a9\u624b\uff1a"),
                tokens=("<tool_calls>", "</tool_calls>"),
            ),
        ),
    ),
    CallFormat(
        name="longcat",
        sections=_between("<longcat_tool_call>", "</longcat_tool_call>"),
        quotable=True,
        signatures=(Signature(in_template=("<longcat_tool_call>",)),),
    ),
    CallFormat(
        name="phi4_mini_json",
        sections=(CallSection((LiteralText("functools"), *_ARRAY)),),
        signatures=(Signature(in_template=("functools[",)),),
    ),
)

# Forced calls of a model whose format of calls is not known: a grammar holds it to this one, which
# is vLLM's for a `tool_choice` of "required". It is read in such answers alone, as any answer in
# JSON would look like it.
FORCED_CALLS = CallFormat(name="json", sections=(CallSection(_LLAMA_ARRAY, at_start=True),))
