"""The table's entries of reasoning. Names are those of vLLM's reasoning parsers."""

from __future__ import annotations

from slipstream_ipc.formats.answer_format import Delimiter, ReasoningFormat, Signature
from slipstream_ipc.formats.kimi_k3 import KIMI_K3_REASONING

_THINK = (Delimiter("<think>"),)
_THINK_END = (Delimiter("</think>"),)
_HUNYUAN = "\u52a9\u624b\uff1a"  # what its template writes before an answer

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
            Signature(in_template=("<think>",), not_in_template=("<|im_start|>", _HUNYUAN)),
        ),
    ),
    *(
        # known by these names to users of vLLM; the data are those of `deepseek_r1`
        ReasoningFormat(name=name, begins=_THINK, ends=_THINK_END)
        for name in ("glm45", "glm47", "minimax_m2", "nemotron_v3", "step3p5")
    ),
    ReasoningFormat(
        name="minimax_m3",  # after vLLM 0.32's parser: the markers also come as text, in pieces
        begins=(Delimiter("<mm:think>", as_text=True),),
        ends=(Delimiter("</mm:think>", as_text=True),),
        signatures=(Signature(in_template=("<mm:think>", "</mm:think>")),),
    ),
    ReasoningFormat(
        name="seed_oss",
        begins=(Delimiter("<seed:think>"),),
        ends=(Delimiter("</seed:think>"),),
        signatures=(Signature(in_template=("<seed:tool_call>", "</seed:think>")),),
    ),
    ReasoningFormat(
        name="hunyuan_a13b",
        begins=_THINK,
        ends=_THINK_END,
        dropped=(Delimiter("<answer>"), Delimiter("</answer>")),
        signatures=(Signature(in_template=("<think>", _HUNYUAN)),),
    ),
    ReasoningFormat(
        name="cohere_command3",
        begins=(Delimiter("<|START_THINKING|>"),),
        ends=(Delimiter("<|END_THINKING|>"),),
        dropped=(
            Delimiter("<|START_RESPONSE|>"),
            Delimiter("<|END_RESPONSE|>"),
            Delimiter("<|START_TEXT|>"),
            Delimiter("<|END_TEXT|>"),
        ),
        signatures=(Signature(in_template=("<|START_THINKING|>",)),),
    ),
    ReasoningFormat(
        name="kimi_k2",
        begins=_THINK,
        ends=_THINK_END,
        calls_within=True,
        signatures=(Signature(tokens=("<think>", "<|tool_call_argument_begin|>"), rank=1),),
    ),
    KIMI_K3_REASONING,
    ReasoningFormat(
        name="mistral",
        begins=(Delimiter("[THINK]"), Delimiter("<think>")),
        ends=(Delimiter("[/THINK]"), Delimiter("</think>")),
        signatures=(
            Signature(tokens=("[THINK]", "[/THINK]"), rank=1),
            Signature(in_template=("<think>", "[INST]"), tokens=("[INST]",), rank=1),
        ),
    ),
    ReasoningFormat(
        name="gemma4",
        begins=(Delimiter("<|channel>"),),
        ends=(Delimiter("<channel|>"),),
        signatures=(Signature(in_template=("<|channel>", "<channel|>")),),
        label="thought",
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
    ReasoningFormat(
        name="granite33",  # Granite 3.3
        begins=_THINK,
        ends=_THINK_END,
        dropped=(Delimiter("<response>"), Delimiter("</response>")),
        signatures=(
            Signature(
                in_template=("<|start_of_role|>", "<think></think>", "<response></response>"),
                rank=1,
            ),
        ),
    ),
)
