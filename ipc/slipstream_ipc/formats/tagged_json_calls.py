"""The table's entries of tool calls as JSON in tags of the model's own: several in a list, or one
after another. Names are those of vLLM's tool parsers.
"""

from __future__ import annotations

from slipstream_ipc.formats.answer_format import (
    Blank,
    CallFormat,
    CallSection,
    Delimiter,
    JsonCall,
    LiteralText,
    Repeat,
    Signature,
)

_COMMA = (LiteralText(","), Blank(" "))
_LINE = (Blank("\n"),)
_CALL = JsonCall()


def _list_in(opening: str, closing: str, call: JsonCall = _CALL) -> tuple[CallSection, ...]:
    return (
        CallSection(
            (
                Delimiter(opening),
                LiteralText("["),
                Repeat((call,), _COMMA),
                LiteralText("]"),
                Delimiter(closing),
            )
        ),
    )


def _lines_in(opening: str, closing: str) -> tuple[CallSection, ...]:
    return (
        CallSection(
            (Delimiter(opening), *_LINE, Repeat((_CALL,), _LINE), *_LINE, Delimiter(closing))
        ),
    )


TAGGED_JSON_CALL_FORMATS = (
    CallFormat(
        name="hunyuan_a13b",
        sections=_list_in("<tool_calls>", "</tool_calls>"),
        signatures=(Signature(in_template=("<tool_calls>[", "\u52a9\u624b\uff1a")),),
    ),
    CallFormat(
        name="nemotron_json",  # Nemotron Nano 2, Llama Nemotron
        sections=_list_in("<TOOLCALL>", "</TOOLCALL>"),
        signatures=(Signature(in_template=("<TOOLCALL>[",)),),
    ),
    CallFormat(
        name="cohere_command3",  # Command R7B, A; tool_call_id counts through the conversation
        sections=_list_in(
            "<|START_ACTION|>",
            "<|END_ACTION|>",
            JsonCall(names=("tool_name",), arguments=("parameters",), ids=()),
        ),
        dropped=tuple(
            map(
                Delimiter,
                ("<|START_RESPONSE|>", "<|END_RESPONSE|>", "<|START_TEXT|>", "<|END_TEXT|>"),
            )
        ),
        signatures=(Signature(in_template=("<|START_ACTION|>", '"tool_name"')),),
    ),
    CallFormat(
        name="minimax",  # MiniMax M1
        sections=_lines_in("<tool_calls>", "</tool_calls>"),
        signatures=(Signature(in_template=("<tool_calls>", "<beginning_of_sentence>")),),
    ),
)
