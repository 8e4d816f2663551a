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
)
