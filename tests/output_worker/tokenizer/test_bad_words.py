"""Bad words as tokens: with a blank in front and without, each sequence once."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from tokenizers import Tokenizer
from transformers import PreTrainedTokenizerFast

from slipstream_ipc.columns import u32
from slipstream_ipc.errors import BadRequest
from slipstream_ipc.messages import Render
from slipstream_worker.tokenizer.bad_words import bad_word_ids
from slipstream_worker.tokenizer.prompt_rendering import render

KINDS = ["byte_level", "llama_2", "metaspace_always", "word_piece"]
WORDS = ["the", "return value", "list", "é漢"]


def wrapped(tokenizer: Tokenizer) -> Any:
    vocab = tokenizer.get_vocab()
    unknown = next((token for token in ("<unk>", "[UNK]") if token in vocab), None)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token=unknown)


def plain_ids(tokenizer: Any, text: str) -> list[int]:
    ids: list[int] = tokenizer(text, add_special_tokens=False)["input_ids"]
    return ids


def holds(ids: list[int], word: list[int]) -> bool:
    return any(ids[i : i + len(word)] == word for i in range(len(ids)))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("word", WORDS[:3])
def test_a_word_is_found_wherever_it_is_written(
    tokenizer_of: Callable[[str], Tokenizer], kind: str, word: str
) -> None:
    tokenizer = wrapped(tokenizer_of(kind))
    sequences = bad_word_ids(tokenizer, [word])
    assert 1 <= len(sequences) <= 2
    for text in (word, f" {word}"):
        ids = plain_ids(tokenizer, text)
        assert any(holds(ids, sequence) for sequence in sequences)


def test_a_word_has_another_token_behind_a_blank(byte_level: Tokenizer) -> None:
    tokenizer = wrapped(byte_level)
    found = bad_word_ids(tokenizer, ["the", " the", "the"])
    assert found == [plain_ids(tokenizer, "the"), plain_ids(tokenizer, " the")]
    assert found[0] != found[1]


def test_what_is_forbidden_already_is_not_said_again() -> None:
    class Blanks:  # as a vocabulary does where a blank is always a token of its own
        unk_token = unk_token_id = None

        def __call__(self, text: str, *, add_special_tokens: bool) -> dict[str, list[int]]:
            assert not add_special_tokens
            return {"input_ids": [ord(char) for char in text]}

    assert bad_word_ids(Blanks(), ["ab", "  ab", "b"]) == [[97, 98], [98]]
    assert bad_word_ids(Blanks(), ["\n", " "]) == [[10], [32]]


@pytest.mark.parametrize("kind", ["word_piece", "metaspace_always"])
def test_a_word_that_the_vocabulary_cannot_write_is_refused(
    tokenizer_of: Callable[[str], Tokenizer], kind: str
) -> None:
    tokenizer = wrapped(tokenizer_of(kind))
    assert tokenizer.unk_token_id in plain_ids(tokenizer, "\U0001f9ff")
    with pytest.raises(BadRequest, match="vocabulary can write") as caught:
        bad_word_ids(tokenizer, ["the", "\U0001f9ff"])
    assert caught.value.field == "bad_words"
    assert bad_word_ids(tokenizer, [tokenizer.unk_token])  # who means it may have it


def test_a_word_of_many_tokens_is_refused(byte_level: Tokenizer) -> None:
    with pytest.raises(BadRequest, match="at most 32 tokens") as caught:
        bad_word_ids(wrapped(byte_level), ["漢字" * 30])
    assert caught.value.field == "bad_words"


def test_the_prompt_process_answers_with_both(byte_level: Tokenizer) -> None:
    tokenizer = wrapped(byte_level)
    both = render(tokenizer, Render(7, "the list", bad_words=("the", "return value")))
    assert both.fault is None
    assert u32(both.token_ids).tolist() == plain_ids(tokenizer, "the list")
    words = bad_word_ids(tokenizer, ["the", "return value"])
    assert u32(both.bad_word_ids).tolist() == [token_id for word in words for token_id in word]
    assert u32(both.bad_word_counts).tolist() == [len(word) for word in words]
    alone = render(tokenizer, Render(8, bad_words=("the",)))
    assert (alone.token_ids, alone.fault) == (b"", None)
    assert len(u32(alone.bad_word_counts)) == 2
    refused = render(tokenizer, Render(9, "the", bad_words=("漢字" * 30,)))
    assert refused.fault is not None
    assert refused.fault.field == "bad_words"
