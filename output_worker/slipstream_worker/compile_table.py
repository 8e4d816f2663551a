"""Compiles a tokenizer's decoder to a `TokenTable`, and proves the table before anyone uses it.

Owns: which decoders a table can hold, what each token's bytes are, the self-test against
`Tokenizer.decode`.

Does not know: the cache, streams, who asked. It needs `tokenizers`, so it runs in a process of its
own; the worker reads the table it leaves.

Rules:
- The tokenizer is asked, never second-guessed: `id_to_token` names each token, and of an added
  token only "special" counts.
- A table that is not the tokenizer's equal is not returned. `UnsupportedDecoder` says why, and the
  caller falls back to `WindowDetokenizer`.
"""

from __future__ import annotations

import json
import random
from os.path import commonprefix
from typing import Any

from tokenizers import Tokenizer

from slipstream_worker.detokenizer import TableDetokenizerFactory
from slipstream_worker.token_table import TokenTable

__all__ = ["UnsupportedDecoder", "compile_table", "self_test"]

_SELF_TEST_LENGTHS = (1, 2, 5, 17, 64)
_IDS_BEYOND_VOCABULARY = 4


class UnsupportedDecoder(Exception):  # noqa: N818 - says what is the case; nobody made an error
    """No table can hold this tokenizer's decoder. The message says why."""


def compile_table(tokenizer: Tokenizer) -> TokenTable:
    """The tested table of `tokenizer`. Raises UnsupportedDecoder."""
    _require_byte_level(tokenizer)
    vocab_size = 1 + max(tokenizer.get_vocab(with_added_tokens=True).values(), default=-1)
    tokens = [tokenizer.id_to_token(token_id) for token_id in range(vocab_size)]
    # decode skips by a token's text, not by its id.
    special_tokens = {
        added.content for added in tokenizer.get_added_tokens_decoder().values() if added.special
    }
    byte_of_char = _byte_of_char()
    table = TokenTable(
        mode="bytelevel",
        pieces=tuple(_piece_of_token(token, byte_of_char) for token in tokens),
        special=tuple(i for i, token in enumerate(tokens) if token in special_tokens),
    )
    self_test(tokenizer, table)
    return table


def self_test(
    tokenizer: Tokenizer, table: TokenTable, *, num_trials: int = 100, seed: int = 0
) -> None:
    """Compare streams over `table` with `Tokenizer.decode`. Raises UnsupportedDecoder.

    Every token once in the order of the ids, then for each pool of ids `num_trials` random prompts
    and outputs: any ids, ids whose bytes are not UTF-8 by themselves, special ids.
    """
    factory = TableDetokenizerFactory(table)
    rng = random.Random(seed)  # noqa: S311 - reproducible, no secret
    all_ids = list(range(table.vocab_size + _IDS_BEYOND_VOCABULARY))
    broken_ids = [i for i, piece in enumerate(table.pieces) if not _is_utf8(piece)]
    for skip_special_tokens in (False, True):
        _compare(tokenizer, factory, [], all_ids, skip_special_tokens)
        for pool in (all_ids, broken_ids, list(table.special)):
            for _ in range(num_trials):
                length = rng.choice(_SELF_TEST_LENGTHS)
                ids = [
                    rng.choice(pool if pool and rng.random() < 0.5 else all_ids)
                    for _ in range(length)
                ]
                cut = rng.randint(0, length)
                _compare(tokenizer, factory, ids[:cut], ids[cut:], skip_special_tokens)


def _compare(
    tokenizer: Tokenizer,
    factory: TableDetokenizerFactory,
    prompt_ids: list[int],
    output_ids: list[int],
    skip_special_tokens: bool,
) -> None:
    prompt_text = tokenizer.decode(prompt_ids, skip_special_tokens=skip_special_tokens)
    text = tokenizer.decode(prompt_ids + output_ids, skip_special_tokens=skip_special_tokens)
    shared = commonprefix((prompt_text, text))  # noqa: RUF071 - it is characters that are meant
    expected = text[len(shared) :]
    stepped = factory.create(prompt_ids, skip_special_tokens)
    batched = factory.create(prompt_ids, skip_special_tokens)
    streams = (
        "".join([stepped.step(token_id) for token_id in output_ids]) + stepped.flush(),
        batched.step_many(output_ids) + batched.flush(),
    )
    if streams != (expected, expected):
        raise UnsupportedDecoder(
            f"self-test: prompt {prompt_ids[-8:]} and output {output_ids[:64]} "
            f"(skip_special_tokens={skip_special_tokens}) decode to {expected[:200]!r}, "
            f"the table makes {streams[0][:200]!r} of them"
        )


def _require_byte_level(tokenizer: Tokenizer) -> None:
    if tokenizer.decoder is None:
        raise UnsupportedDecoder("the tokenizer has no decoder")
    # The decoder's state, as for pickling, is its section of tokenizer.json.
    section: dict[str, Any] = json.loads(tokenizer.decoder.__getstate__())
    steps = section["decoders"] if section["type"] == "Sequence" else [section]
    names = [step["type"] for step in steps]
    if names != ["ByteLevel"]:
        raise UnsupportedDecoder(f"the decoder is {' + '.join(names)}, not ByteLevel alone")


def _piece_of_token(token: str | None, byte_of_char: dict[str, int]) -> bytes:
    if token is None:
        return b""
    try:
        return bytes([byte_of_char[char] for char in token])
    except KeyError:
        return token.encode()  # an added token written as plain text, such as "中文"


def _byte_of_char() -> dict[str, int]:
    """GPT-2's alphabet, in which a token's characters stand for bytes.

    A byte that prints in Latin-1 is its own character; the others, in order, are the characters
    from U+0100 on.
    """
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = sorted(set(range(256)) - set(printable))
    alphabet = {chr(byte): byte for byte in printable}
    return alphabet | {chr(0x100 + place): byte for place, byte in enumerate(others)}


def _is_utf8(piece: bytes) -> bool:
    try:
        piece.decode()
    except UnicodeDecodeError:
        return False
    return True
