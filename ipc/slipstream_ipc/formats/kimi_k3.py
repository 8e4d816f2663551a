"""The table's entries of Kimi K3, whose tags are made of tokens and of text between them.

After vLLM's `kimi_k3_tool_parser.py` and `kimi_k3_reasoning_parser.py`.
"""

from __future__ import annotations

from slipstream_ipc.formats.answer_format import (
    Blank,
    CallFormat,
    CallIndex,
    CallSection,
    Delimiter,
    LiteralText,
    Name,
    ReasoningFormat,
    Repeat,
    Signature,
    TagAttribute,
    TaggedParameters,
)

_OPEN, _CLOSE, _SEP = "<|open|>", "<|close|>", "<|sep|>"
_TOKENS = (Delimiter(_OPEN), Delimiter(_CLOSE), Delimiter(_SEP))
_SIGNATURE = Signature(in_template=(_OPEN, _SEP), tokens=(_OPEN, _CLOSE, _SEP), rank=1)
_TYPES = ("number", "boolean", "null", "object", "array")


def _opening(tag: str) -> Delimiter:
    return Delimiter(f"{_OPEN}{tag}{_SEP}")


def _closing(tag: str) -> Delimiter:
    return Delimiter(f"{_CLOSE}{tag}{_SEP}")


_RESPONSE = (_opening("response"), _closing("response"))  # around content
_CALL = (
    LiteralText(f'{_OPEN}call tool="'),
    Name(stops='"'),
    LiteralText('" index="'),
    CallIndex(stops='"'),
    LiteralText(f'"{_SEP}'),
    TaggedParameters(
        opening=LiteralText(f'{_OPEN}argument key="'),
        key_end=LiteralText('"'),
        closing=LiteralText(f"{_CLOSE}argument{_SEP}"),
        end=LiteralText(f"{_CLOSE}call{_SEP}"),
        attribute=TagAttribute("type", "string", _TYPES, _SEP, is_escaped=True),
    ),
)

KIMI_K3_REASONING = ReasoningFormat(
    name="kimi_k3",
    begins=(_opening("think"),),
    ends=(_closing("think"),),
    dropped=(*_RESPONSE, _closing("message")),
    signatures=(_SIGNATURE,),
    spelled=_TOKENS,
)
KIMI_K3_CALLS = CallFormat(
    name="kimi_k3",
    sections=(
        CallSection(
            (
                _opening("tools"),
                Blank("\n"),
                Repeat(_CALL, separator=(Blank("\n"),)),
                Blank("\n"),
                _closing("tools"),
            )
        ),
    ),
    dropped=_RESPONSE,
    signatures=(_SIGNATURE,),
    spelled=_TOKENS,
)
