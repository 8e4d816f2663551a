"""Models whose templates and tokens fit several entries of the table, and the one they get."""

from __future__ import annotations

import pytest

from slipstream_ipc.formats.choose import choose_format

THINK = "<think>...</think>"
HERMES = '<tool_call>{"name": "f", "arguments": {}}</tool_call>'
COHERE = '<|START_THINKING|><|END_THINKING|><|START_ACTION|>[{"tool_name"'
GRANITE = "<|start_of_role|> between <think></think> and between <response></response>"


@pytest.mark.parametrize(
    ("template", "tokens", "name"),
    [
        # Kimi K2 Thinking
        (THINK, ("<think>", "</think>", "<|tool_call_argument_begin|>"), "kimi_k2+kimi_k2"),
        # Magistral 2506, 2507
        (f"[INST]{THINK}[TOOL_CALLS]", ("[INST]", "[TOOL_CALLS]"), "mistral+mistral"),
        ("[THINK]", ("[INST]", "[TOOL_CALLS]", "[THINK]", "[/THINK]"), "mistral+mistral"),
        # Granite 3.3
        (GRANITE + "<|tool_call|>", (), "granite33+granite"),
        # Command A Reasoning
        (COHERE + "<|START_TEXT|>", (), "cohere_command3+cohere_command3"),
        (COHERE + "<|START_RESPONSE|>", (), "cohere_command3+cohere_command3"),
        # MiniMax M1
        (
            "<beginning_of_sentence><tool_calls></tool_calls>",
            ("<tool_calls>", "</tool_calls>"),
            "none+minimax",
        ),
        # MiniMax M3
        (
            ']<]minimax[>[<tool_call><invoke name="</invoke></tool_call><mm:think></mm:think>',
            ("]<]minimax[>[", "<tool_call>", "</tool_call>", "<mm:think>", "</mm:think>"),
            "minimax_m3+minimax_m3",
        ),
        # Kimi K3
        (
            '<|open|>message role="assistant"<|sep|><|close|>message<|sep|>',
            ("<|open|>", "<|close|>", "<|sep|>", "<|end_of_msg|>"),
            "kimi_k3+kimi_k3",
        ),
        # Hermes 3 on Llama 3.1, Hermes 2 on Mistral: the vocabulary is that of the base model
        (HERMES + '"parameters": ', ("<|python_tag|>",), "none+hermes"),
        (HERMES, ("[INST]", "[TOOL_CALLS]"), "none+hermes"),
        (THINK, (), "deepseek_r1+none"),
    ],
)
def test_the_entry_of_a_model(template: str, tokens: tuple[str, ...], name: str) -> None:
    found = choose_format(template, tokens)
    assert not found.is_ambiguous
    assert found.format is not None
    assert found.format.name == name
