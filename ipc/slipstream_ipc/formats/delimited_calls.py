"""The table's entries of tool calls whose names stand between delimiters, and whose arguments are a
JSON object. Names are those of vLLM's tool parsers.
"""

# ruff: noqa: RUF001 - DeepSeek's delimiters have full-width bars

from __future__ import annotations

from slipstream_ipc.formats.answer_format import (
    Alternative,
    Blank,
    CallFormat,
    CallSection,
    Delimiter,
    Element,
    JsonObject,
    LiteralText,
    Name,
    NamedCallId,
    Repeat,
    Signature,
)


def _with_or_without(begin: str, calls: Element, end: str) -> tuple[CallSection, ...]:
    """Calls between two delimiters, or, as models also write them, without these."""
    optional_end = Alternative(((Delimiter(end),), ()))
    return (
        CallSection((Delimiter(begin), Blank("\n"), calls, Blank("\n"), optional_end)),
        CallSection((calls, Blank("\n"), optional_end)),
    )


_DEEPSEEK_V3_CALL = (
    Delimiter("<｜tool▁call▁begin｜>"),
    LiteralText("function"),
    Delimiter("<｜tool▁sep｜>"),
    Name(),
    Blank("\n"),
    LiteralText("```json"),
    Blank("\n"),
    JsonObject(),
    Blank("\n"),
    LiteralText("```"),
    Delimiter("<｜tool▁call▁end｜>"),
)
_DEEPSEEK_V31_CALL = (
    Delimiter("<｜tool▁call▁begin｜>"),
    Name(),
    Delimiter("<｜tool▁sep｜>"),
    JsonObject(may_be_empty=True),
    Delimiter("<｜tool▁call▁end｜>"),
)
_KIMI_CALL = (
    Delimiter("<|tool_call_begin|>"),
    NamedCallId("functions.", ":"),
    Delimiter("<|tool_call_argument_begin|>"),
    JsonObject(may_be_empty=True),
    Delimiter("<|tool_call_end|>"),
)

DELIMITED_CALL_FORMATS = (
    CallFormat(
        name="deepseek_v3",
        sections=_with_or_without(
            "<｜tool▁calls▁begin｜>",
            Repeat(_DEEPSEEK_V3_CALL, separator=(Blank("\n"),)),
            "<｜tool▁calls▁end｜>",
        ),
        signatures=(Signature(in_template=("<｜tool▁calls▁begin｜>", "```json")),),
    ),
    CallFormat(
        name="deepseek_v31",
        sections=_with_or_without(
            "<｜tool▁calls▁begin｜>", Repeat(_DEEPSEEK_V31_CALL), "<｜tool▁calls▁end｜>"
        ),
        signatures=(
            Signature(in_template=("<｜tool▁calls▁begin｜>",), not_in_template=("```json",)),
        ),
    ),
    CallFormat(
        name="kimi_k2",
        sections=_with_or_without(
            "<|tool_calls_section_begin|>", Repeat(_KIMI_CALL), "<|tool_calls_section_end|>"
        ),
        signatures=(Signature(tokens=("<|tool_call_argument_begin|>",)),),
    ),
)
