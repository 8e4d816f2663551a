"""Compiles a tokenizer's decoder to a `TokenTable`, and tests the table before it is used.

Needs `tokenizers`, so it runs in the tokenizer process; the worker reads the table that it writes.

- The tokenizer's own answers are used, never a reimplementation: `id_to_token` names each token, of
  an added token only "special" matters, and each decoder step is run to see what it makes of a
  token.
- The steps of a Sequence are compiled one by one. Steps on single tokens come first (Replace,
  Metaspace, WordPiece, Strip), then at most one that makes bytes (ByteLevel, ByteFallback), then
  Fuse, and on the whole text Strip at its start. BPEDecoder must stand alone.
- A table that does not match the tokenizer is not returned. `UnsupportedDecoder` says why, and the
  caller falls back to the window.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from tokenizers import Tokenizer
from tokenizers.decoders import Decoder

from slipstream_worker.detokenizer.panics import is_panic
from slipstream_worker.detokenizer.reference import byte_of_token, decoder_steps
from slipstream_worker.detokenizer.table import TokenTable
from slipstream_worker.detokenizer.verify import find_mismatch

__all__ = ["UnsupportedDecoder", "compile_table"]

_ANCHOR = "a"  # a neighbour, to see how a token reads that is not first, or not last

_Texts = list[str | None]  # by token id; None: no token has this id
_Pieces = tuple[bytes | None, ...]


class UnsupportedDecoder(Exception):  # noqa: N818 - says what is the case; nobody made an error
    """No table can represent this tokenizer's decoder. The message says why."""


def compile_table(tokenizer: Tokenizer) -> TokenTable:
    """The tested table of `tokenizer`. Raises UnsupportedDecoder."""
    vocab_size = 1 + max(tokenizer.get_vocab(with_added_tokens=True).values(), default=-1)
    tokens: _Texts = [tokenizer.id_to_token(token_id) for token_id in range(vocab_size)]
    # decode skips by a token's text, not by its id.
    special_tokens = {
        added.content for added in tokenizer.get_added_tokens_decoder().values() if added.special
    }
    special = tuple(i for i, token in enumerate(tokens) if token in special_tokens)
    try:
        table = _compile(decoder_steps(tokenizer), tokens, special)
        mismatch = find_mismatch(tokenizer, table)
    except BaseException as error:
        if is_panic(error):
            raise UnsupportedDecoder(f"the decoder panics: {error}") from error
        raise
    if mismatch is not None:
        raise UnsupportedDecoder(f"self-test: {mismatch}")
    return table


def _compile(steps: list[dict[str, Any]], tokens: _Texts, special: tuple[int, ...]) -> TokenTable:
    names = [step["type"] for step in steps]
    if not steps:  # decode joins tokens with blanks
        others = _map(lambda token: " " + token, tokens)
        return TokenTable("text", _encoded(others), special, first_pieces=_encoded(tokens))
    if names == ["BPEDecoder"]:
        followed, last = _followed_and_last(steps[0], tokens)
        return TokenTable("text", _encoded(followed), special, last_pieces=_encoded(last))

    first, texts = tokens, tokens
    maker = ""  # the step that made bytes
    is_fused = False
    num_stripped = 0
    for name, step in zip(names, steps, strict=True):
        if name == "Strip" and step["stop"]:
            raise _refusal(
                names, "Strip removes text at the end, which a stream does not know in advance"
            )
        if name == "Fuse":
            is_fused = True
        elif name == "Strip" and is_fused and maker != "ByteLevel" and step["content"] == " ":
            num_stripped += step["start"]
        elif maker or is_fused:
            raise _refusal(names, f"{name} follows {maker or 'Fuse'}")
        elif name in ("ByteLevel", "ByteFallback"):
            maker = name
        elif name in ("Replace", "Metaspace", "WordPiece", "Strip"):
            first, texts = _first_and_other(step, first, texts)
        else:
            raise _refusal(names, f"{name} is not known")

    if maker == "ByteLevel":
        if first != texts:
            raise _refusal(names, "ByteLevel follows a rule for the first token")
        byte_of_char = _byte_of_char()
        pieces = [None if text is None else _bytes_of_text(text, byte_of_char) for text in texts]
        return TokenTable("bytelevel", tuple(pieces), special)
    bytes_of = _bytes_of_tokens(texts) if maker else {}
    if maker and first != texts and bytes_of != _bytes_of_tokens(first):
        raise _refusal(names, "a token is a byte in one place and none in another")
    return TokenTable(
        "text",
        _encoded(texts, bytes_of),
        special,
        byte_ids=tuple(bytes_of),
        first_pieces=() if first == texts else _encoded(first, bytes_of),
        num_stripped=num_stripped,
    )


def _refusal(names: list[str], reason: str) -> UnsupportedDecoder:
    return UnsupportedDecoder(f"the decoder is {' + '.join(names)}: {reason}")


def _first_and_other(step: dict[str, Any], first: _Texts, others: _Texts) -> tuple[_Texts, _Texts]:
    """The texts that `step` makes of each token as the first of a sequence, and as any other.

    `first` and `others` are the results of the steps before it.
    """
    decoder = _decoder_of(step)
    anchor = decoder.decode([_ANCHOR])

    def as_other(text: str) -> str:
        return decoder.decode([_ANCHOR, text]).removeprefix(anchor)

    return _map(lambda text: decoder.decode([text]), first), _map(as_other, others)


def _followed_and_last(step: dict[str, Any], tokens: _Texts) -> tuple[_Texts, _Texts]:
    """The texts that `step` makes of each token if others follow, and as the last of a sequence."""
    decoder = _decoder_of(step)
    anchor = decoder.decode([_ANCHOR])

    def as_followed(text: str) -> str:
        return decoder.decode([text, _ANCHOR]).removesuffix(anchor)

    return _map(as_followed, tokens), _map(lambda text: decoder.decode([text]), tokens)


def _decoder_of(step: dict[str, Any]) -> Decoder:
    """A decoder with this step alone."""
    tokenizer_json = {
        "version": "1.0",
        "added_tokens": [],
        "decoder": step,
        "model": {"type": "BPE", "vocab": {}, "merges": []},
    }
    decoder: Decoder | None = Tokenizer.from_str(json.dumps(tokenizer_json)).decoder
    assert decoder is not None
    return decoder


def _map(function: Callable[[str], str], texts: _Texts) -> _Texts:
    return [None if text is None else function(text) for text in texts]


def _encoded(texts: _Texts, bytes_of: dict[int, bytes] | None = None) -> _Pieces:
    pieces = [None if text is None else text.encode() for text in texts]
    for token_id, byte in (bytes_of or {}).items():
        pieces[token_id] = byte
    return tuple(pieces)


def _bytes_of_tokens(texts: _Texts) -> dict[int, bytes]:
    """The byte tokens, by id."""
    bytes_of = ((i, byte_of_token(text)) for i, text in enumerate(texts) if text is not None)
    return {token_id: bytes([byte]) for token_id, byte in bytes_of if byte is not None}


def _bytes_of_text(text: str, byte_of_char: dict[str, int]) -> bytes:
    try:
        return bytes([byte_of_char[char] for char in text])
    except KeyError:
        return text.encode()  # an added token written as plain text, such as "中文"


def _byte_of_char() -> dict[str, int]:
    """GPT-2's alphabet, which maps the characters of a token to bytes.

    A byte that is printable in Latin-1 is its own character; the others, in order, are the
    characters from U+0100 on.
    """
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = sorted(set(range(256)) - set(printable))
    alphabet = {chr(byte): byte for byte in printable}
    return alphabet | {chr(0x100 + place): byte for place, byte in enumerate(others)}
