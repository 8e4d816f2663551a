"""The formats of played answers, and the folder of a tokenizer that has their delimiters."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from slipstream.demo_model import MODEL_PATH
from slipstream_lab.formats.rendering import RENDERINGS

_TOKENIZER = "tokenizer.json"
_TEMPLATE = "chat_template.jinja"
_GENERATION = "generation_config.json"
_COPIED = (_TOKENIZER, "tokenizer_config.json", _TEMPLATE, _GENERATION)
_THINK = ("<think>", "</think>")
_HARMONY_TEMPLATE = (
    "{%- for message in messages -%}"
    "{{ '<|start|>' + message['role'] + '<|message|>' + (message['content'] or '') + '<|end|>' }}"
    "{%- endfor -%}{%- if add_generation_prompt -%}{{ '<|start|>assistant' }}{%- endif -%}"
)


class PlayedFormat(NamedTuple):
    """How the answers of a run are written and read.

    rendering: a key of RENDERINGS. tool_format, reasoning_format: of the stack. has_tokens: its
    delimiters are tokens, not text. opens_reasoning: the prompt ends with the
    beginning of reasoning.
    """

    name: str
    rendering: str
    tool_format: str
    reasoning_format: str | None
    has_tokens: bool = True
    opens_reasoning: bool = False

    @property
    def settings(self) -> dict[str, Any]:
        """The stack's settings."""
        return {"tool_format": self.tool_format, "reasoning_format": self.reasoning_format}


_FORMATS = (
    PlayedFormat("hermes", "hermes", "hermes", "qwen3"),
    PlayedFormat("qwen3_coder", "qwen3_coder", "qwen3_coder", "qwen3"),
    PlayedFormat("harmony", "harmony", "harmony", None),
    PlayedFormat("deepseek_v3", "deepseek_v3", "deepseek_v3", "deepseek_r1", opens_reasoning=True),
    PlayedFormat("hermes_text", "hermes", "hermes", "qwen3", has_tokens=False),
    PlayedFormat("kimi_k2", "kimi_k2", "kimi_k2", "kimi_k2"),
    PlayedFormat("kimi_k3", "kimi_k3", "kimi_k3", "kimi_k3"),
)
PLAYED_FORMATS = {each.name: each for each in _FORMATS}
ANY_FORMAT = "any"  # stands for the one that the seed chooses


def find_played_format(name: str, seed: int) -> PlayedFormat:
    """The format with this name, a key of PLAYED_FORMATS or ANY_FORMAT."""
    if name == ANY_FORMAT:
        return _FORMATS[seed % len(_FORMATS)]
    return PLAYED_FORMATS[name]


def write_tokenizer(folder: Path, played: PlayedFormat) -> None:
    """Write the bundled model's tokenizer into a new folder, with the format's delimiters."""
    folder.mkdir()
    for name in _COPIED:
        shutil.copyfile(Path(MODEL_PATH) / name, folder / name)
    if played.has_tokens:
        _add_tokens(folder / _TOKENIZER, (*RENDERINGS[played.rendering].added_tokens, *_THINK))
    if played.tool_format == "harmony":
        (folder / _TEMPLATE).write_text(_HARMONY_TEMPLATE)
        # the bundled model's end of text is harmony's end of a message
        (folder / _GENERATION).write_text('{"eos_token_id": 0}')
    elif played.opens_reasoning:
        with (folder / _TEMPLATE).open("a") as template:
            template.write("{%- if add_generation_prompt -%}{{ '<think>\\n' }}{%- endif -%}")


def _add_tokens(file: Path, tokens: Sequence[str]) -> None:
    """Append those to a tokenizer's added tokens that it does not have."""
    tokenizer = msgspec.json.decode(file.read_bytes())
    added = tokenizer["added_tokens"]
    known = {each["content"] for each in added}
    first = len(tokenizer["model"]["vocab"])
    new = [token for token in dict.fromkeys(tokens) if token not in known]
    for token_id, token in enumerate(new, first):
        added.append({**added[0], "id": token_id, "content": token, "special": False})
    file.write_bytes(msgspec.json.encode(tokenizer))
