"""Compiles a tokenizer that transformers runs in Python to a `TokenTable`, and tests it likewise.

- Such a "slow" tokenizer (ByT5's, or code in a model's folder over tiktoken) has no tokenizer.json,
  and the worker does not import transformers. Its decode must therefore be one that a table can
  represent: tokens are bytes, and the text is that of the joined bytes. Bytes that belong to no
  character become U+FFFD or nothing, whichever the tokenizer does.
- A table that does not match the tokenizer's own decode is not returned.
"""

from __future__ import annotations

from collections.abc import Sequence
from os.path import commonprefix
from typing import Any, Literal

from slipstream_worker.detokenizer.compiler import UnsupportedDecoder
from slipstream_worker.detokenizer.table import TokenTable
from slipstream_worker.detokenizer.verify import find_mismatch

__all__ = ["compile_slow", "slow_pieces"]

_Pieces = tuple[bytes | None, ...]
_WAYS: tuple[Literal["replace", "ignore"], ...] = ("replace", "ignore")


def slow_pieces(tokenizer: Any) -> _Pieces:
    """The bytes of each of its tokens. Raises UnsupportedDecoder if a token is something else.

    tokenizer: a transformers tokenizer whose `is_fast` is False.
    """
    added = {i: str(token).encode() for i, token in tokenizer.added_tokens_decoder.items()}
    size = max(len(tokenizer), 1 + max(added, default=-1))
    return tuple(added[i] if i in added else _piece(tokenizer, i) for i in range(size))


def compile_slow(tokenizer: Any, pieces: _Pieces) -> TokenTable:
    """The tested table of a tokenizer with these pieces. Raises UnsupportedDecoder."""
    reference = _SlowReference(tokenizer, pieces)
    special = tuple(sorted(i for i in set(tokenizer.all_special_ids) if i < len(pieces)))
    why = None
    for errors in _WAYS:
        table = TokenTable("bytelevel", pieces, special, errors=errors)
        try:
            mismatch = find_mismatch(reference, table)
        except (ValueError, TypeError, LookupError) as error:
            raise UnsupportedDecoder(f"its decode fails: {type(error).__name__}") from error
        if mismatch is None:
            return table
        why = why or mismatch
    raise UnsupportedDecoder(f"self-test: {why}")


class _SlowReference:
    """The tokenizer's own decode, under the continuation rule (see `factory`)."""

    def __init__(self, tokenizer: Any, pieces: _Pieces) -> None:
        self._tokenizer = tokenizer
        self._pieces = pieces

    def continuation(
        self, prompt_ids: Sequence[int], output_ids: Sequence[int], skip_special_tokens: bool
    ) -> str:
        prompt = self._decode(prompt_ids, skip_special_tokens)
        whole = self._decode([*prompt_ids, *output_ids], skip_special_tokens)
        shared = commonprefix((prompt, whole))  # noqa: RUF071 - it is characters that are meant
        return whole[len(shared) :]

    def _decode(self, ids: Sequence[int], skip_special_tokens: bool) -> str:
        known = [i for i in ids if i < len(self._pieces) and self._pieces[i] is not None]
        text: str = self._tokenizer.decode(
            known, skip_special_tokens=skip_special_tokens, clean_up_tokenization_spaces=False
        )
        return text


def _piece(tokenizer: Any, token_id: int) -> bytes | None:
    try:
        token = tokenizer.convert_ids_to_tokens(token_id)
    except (ValueError, TypeError, LookupError):  # an id without a token
        return None
    if token is None or isinstance(token, bytes):
        return token
    if isinstance(token, str) and len(token) == 1 and ord(token) < 256:
        return bytes([ord(token)])
    raise UnsupportedDecoder(f"its token {token_id} ({str(token)[:20]!r}) is not made of bytes")
