"""Pairs of texts as token ids, against transformers' own pairs and truncation."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.helpers.embedders import WORDS, new_tokenizer

from slipstream_ipc.columns import u32
from slipstream_ipc.messages import Render, Rendered
from slipstream_worker.tokenizer.pair_inputs import kept_lens
from slipstream_worker.tokenizer.prompt_rendering import ChatTraits, render

TEMPLATE = "the {% for turn in messages %}{{ turn.content }} {% endfor %}{{ instruction or '.' }}"
TOKENIZER = new_tokenizer()


def ask(
    texts: list[str], pairs: list[str], template: str | None = None, **options: Any
) -> Rendered:
    given = {"max_tokens": 100, "is_query": True, **options}
    request = Render(1, texts=tuple(texts), pairs=tuple(pairs), **given)
    return render(TOKENIZER, request, ChatTraits(pair_template=template))


def inputs_of(answer: Rendered) -> list[list[int]]:
    assert answer.fault is None
    ids, begin, found = u32(answer.token_ids).tolist(), 0, []
    for num in u32(answer.counts).tolist():
        found.append(ids[begin : begin + num])
        begin += num
    assert begin == len(ids)
    return found


words = st.lists(st.sampled_from(WORDS), max_size=12).map(" ".join)


@given(st.lists(st.tuples(words, words), min_size=1, max_size=4))
def test_pairs_are_the_tokenizers_own(pairs: list[tuple[str, str]]) -> None:
    answer = ask([first for first, _ in pairs], [second for _, second in pairs])
    # lists: one text with an empty second one is no pair to transformers
    expected = TOKENIZER([first for first, _ in pairs], [second for _, second in pairs])
    assert inputs_of(answer) == expected["input_ids"]
    num_first = [each.count(0) for each in expected["token_type_ids"]]
    assert u32(answer.first_lens).tolist() == num_first


@given(words, words, st.integers(3, 30), st.sampled_from(["left", "right"]))
def test_long_pairs_are_cut_as_transformers_cuts_them(
    first: str, second: str, most: int, side: str
) -> None:
    answer = ask([first], [second], truncate_to=most, truncates_left=side == "left")
    other = new_tokenizer()
    other.truncation_side = side
    expected = other([first], [second], truncation="longest_first", max_length=most)
    assert inputs_of(answer) == expected["input_ids"]
    assert u32(answer.first_lens).tolist() == [expected["token_type_ids"][0].count(0)]


@given(st.integers(0, 50), st.integers(0, 50), st.integers(0, 60))
def test_what_is_kept_of_two_texts(first: int, second: int, most: int) -> None:
    one, other = kept_lens(first, second, most)
    assert one + other == min(most, first + second)
    assert one <= first
    assert other <= second
    if one < first and other < second:
        assert abs(one - other) <= 1


def test_types_are_told_where_the_tokenizer_tells_them() -> None:
    request = Render(1, texts=("a",), pairs=("b",), max_tokens=100, is_query=True)
    answer = render(new_tokenizer(has_types=False), request)
    assert inputs_of(answer) == [TOKENIZER("a", "b")["input_ids"]]
    assert not answer.first_lens


def test_each_text_is_cut_by_itself() -> None:
    long = "the cat sat on the mat"
    answer = ask([long, "a"], [long, "b"], max_first=2, max_second=3)
    expected = [TOKENIZER("the cat", "the cat sat"), TOKENIZER("a", "b")]
    assert inputs_of(answer) == [each["input_ids"] for each in expected]


def test_a_template_writes_pairs() -> None:
    answer = ask(["cat", "the dog ran far"], ["sat", "away"], TEMPLATE, max_first=2)
    expected = ["the cat sat .", "the the dog away ."]
    assert inputs_of(answer) == TOKENIZER(expected)["input_ids"]
    assert not answer.first_lens
    answer = ask(["cat"], ["sat"], TEMPLATE, template_kwargs='{"instruction": "dog"}')
    assert inputs_of(answer) == TOKENIZER(["the cat sat dog"])["input_ids"]


@pytest.mark.parametrize(
    ("texts", "options", "words"),
    [
        (["a", "a " * 120], {}, "got 123 tokens, allowed: 1 to 100 tokens"),
        (["a"], {"needs_template": True}, "--chat-template FILE"),
        (["a"], {"template_kwargs": '{"instruction": "b"}'}, "instruction"),
        (["a"], {"template": TEMPLATE, "truncate_to": 9}, "max_tokens_per_doc cuts documents"),
        (["a", "a " * 120], {"template": TEMPLATE}, "allowed: 1 to 100 tokens"),
    ],
)
def test_what_is_refused(texts: list[str], options: Any, words: str) -> None:
    answer = ask(texts, ["" for _ in texts], **options)
    assert answer.fault is not None
    assert answer.fault.code == "bad_request"
    assert words in answer.fault.message
    assert answer.index == (1 if len(texts) == 2 else None)
