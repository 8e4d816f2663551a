"""The table's entries of reasoning. Names are those of vLLM's reasoning parsers."""

from __future__ import annotations

from slipstream_ipc.formats.answer_format import Delimiter, ReasoningFormat, Signature

_THINK = (Delimiter("<think>"),)
_THINK_END = (Delimiter("</think>"),)

REASONING_FORMATS = (
    ReasoningFormat(
        name="qwen3",
        begins=_THINK,
        ends=_THINK_END,
        calls_within=True,
        signatures=(Signature(in_template=("<think>", "<|im_start|>"), tokens=("<|im_end|>",)),),
    ),
    ReasoningFormat(
        name="deepseek_r1",
        begins=_THINK,
        ends=_THINK_END,
        signatures=(
            Signature(in_template=("<\uff5cAssistant\uff5c>", "</think>")),
            Signature(in_template=("<think>",), not_in_template=("<|im_start|>",)),
        ),
    ),
    ReasoningFormat(
        name="kimi_k2",
        begins=_THINK,
        ends=_THINK_END,
        calls_within=True,
        signatures=(Signature(tokens=("<think>", "<|tool_call_argument_begin|>")),),
    ),
    ReasoningFormat(
        name="mistral",
        begins=(Delimiter("[THINK]"), Delimiter("<think>")),
        ends=(Delimiter("[/THINK]"), Delimiter("</think>")),
        signatures=(
            Signature(tokens=("[THINK]", "[/THINK]")),
            Signature(in_template=("<think>",), tokens=("[INST]",)),
        ),
    ),
    ReasoningFormat(
        name="granite",
        begins=(
            Delimiter("Here is my thought process:", as_text=True),
            Delimiter("Here's my thought process:", as_text=True),
        ),
        ends=(
            Delimiter("Here is my response:", as_text=True),
            Delimiter("Here's my response:", as_text=True),
        ),
        signatures=(Signature(in_template=("Here is my thought process:",)),),
    ),
)
