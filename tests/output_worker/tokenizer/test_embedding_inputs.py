"""Texts of queries for embeddings become the ids that transformers gives, cut as it cuts them."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.helpers.embedders import WORDS, new_tokenizer

from slipstream_ipc.columns import u32
from slipstream_ipc.messages import Render
from slipstream_worker.tokenizer.prompt_rendering import render

TOKENIZER = new_tokenizer()
TEXTS = st.lists(
    st.lists(st.sampled_from(["cat", "cats", "walked", *WORDS]), max_size=12).map(" ".join),
    min_size=1,
    max_size=4,
)


def ids_of(request: Render) -> list[list[int]]:
    answer = render(TOKENIZER, request)
    assert answer.fault is None
    ids, found, begin = u32(answer.token_ids).tolist(), [], 0
    for num in u32(answer.counts).tolist():
        found.append(ids[begin : begin + num])
        begin += num
    return found


@given(TEXTS, st.integers(2, 9), st.booleans())
def test_ids_are_transformers_own(texts: list[str], most: int, from_left: bool) -> None:
    side = "left" if from_left else "right"
    # another one, as truncation changes it for good
    other = new_tokenizer()
    other.truncation_side = side
    cut = other(texts, truncation=True, max_length=most)["input_ids"]
    request = Render(0, texts=tuple(texts), truncate_to=most, truncates_left=from_left)
    assert ids_of(request) == cut
    assert ids_of(Render(0, texts=tuple(texts), max_tokens=99)) == TOKENIZER(texts)["input_ids"]


def test_special_tokens_may_be_left_out() -> None:
    request = Render(0, texts=("the cat",), add_special_tokens=False, truncate_to=1)
    assert ids_of(request) == [TOKENIZER("the", add_special_tokens=False)["input_ids"]]


@pytest.mark.parametrize("given", [("a", "a b c d"), ("a", "a b " * 2**16)])
def test_a_text_that_is_too_long_is_named(given: tuple[str, ...]) -> None:
    answer = render(TOKENIZER, Render(0, texts=given, max_tokens=4))
    assert answer.index == 1
    assert answer.fault is not None
    assert answer.fault.field == "input"
    assert "allowed: 1 to 4 tokens" in answer.fault.message


def test_a_text_without_tokens_is_named() -> None:
    request = Render(0, texts=("a", ""), add_special_tokens=False, max_tokens=4)
    answer = render(TOKENIZER, request)
    assert (answer.index, answer.fault is not None) == (1, True)
    # "" of a tokenizer that puts its own tokens around a text has some
    assert ids_of(Render(0, texts=("",), max_tokens=4)) == [[2, 3]]
