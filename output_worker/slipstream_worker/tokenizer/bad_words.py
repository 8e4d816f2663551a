"""Token sequences of bad words.

- As in vLLM, each word is tokenised without a leading blank and with one, since tokenizers have
  separate tokens for words that begin after a blank. The second sequence is left out if the first
  is its end, as forbidding that forbids both. (vLLM leaves it out whenever its number of tokens
  differs, and lets such a word through after a blank.)
- A word of blanks alone stands for itself.
- A word that the vocabulary cannot write is rejected: its tokens would be another word's.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from slipstream_ipc.errors import BadRequest
from slipstream_ipc.validation.token_constraints import MAX_BAD_WORD_TOKENS


def bad_word_ids(tokenizer: Any, words: Sequence[str]) -> list[list[int]]:
    """The distinct token sequences of `words`; `tokenizer` is a transformers tokenizer.

    Raises BadRequest.
    """
    found: dict[tuple[int, ...], None] = {}
    for word in words:
        bare = word.lstrip()
        if not bare:
            found[_ids(tokenizer, word, word)] = None
            continue
        plain = _ids(tokenizer, bare, word)
        behind_blank = _ids(tokenizer, " " + bare, word)
        found[plain] = None
        if behind_blank[-len(plain) :] != plain:
            found[behind_blank] = None
    return [list(ids) for ids in found]


def _ids(tokenizer: Any, text: str, word: str) -> tuple[int, ...]:
    ids = tuple(tokenizer(text, add_special_tokens=False)["input_ids"])
    unknown = tokenizer.unk_token_id
    if not ids or (unknown in ids and tokenizer.unk_token not in word):
        raise BadRequest("bad_words", word, "words that the model's vocabulary can write")
    if len(ids) > MAX_BAD_WORD_TOKENS:
        allowed = f"words of at most {MAX_BAD_WORD_TOKENS} tokens"
        raise BadRequest("bad_words", f"one of {len(ids)} tokens", allowed)
    return ids
