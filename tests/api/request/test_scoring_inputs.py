"""Pairs of texts to be scored: their forms, what is refused, and scores of what comes back."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from slipstream.errors import BadRequestError
from slipstream.request.scoring_inputs import PairNames, Scores, plan_scores, ranked
from slipstream_ipc.messages import MAX_EMBEDDED, ModelCard, NamedPrompt, PoolingCard

CROSS = ModelCard(
    "c", "/nowhere", 100, 50, (), pooling=PoolingCard(1, task="classify", labels=("yes",))
)
EMBEDS = ModelCard(
    "e", "/nowhere", 100, 50, (), pooling=PoolingCard(4, None, (NamedPrompt("q", "q: "),), "q")
)
CLASSES = ModelCard(
    "k", "/nowhere", 100, 50, (), pooling=PoolingCard(2, task="classify", labels=("a", "b"))
)
GENERATES = ModelCard("g", "/nowhere", 100, 50, ())


def plan(first: Any, second: Any, model: ModelCard = CROSS, **options: Any) -> Any:
    return plan_scores(first, second, model, options)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("first", "second", "expected"),
    [
        ("a", "b", [("a", "b")]),
        ("a", ["b", "c"], [("a", "b"), ("a", "c")]),
        (["a"], ["b", "c"], [("a", "b"), ("a", "c")]),
        (["a", "d"], ["b", "c"], [("a", "b"), ("d", "c")]),
        ({"text": "a"}, [{"content": [{"type": "text", "text": "b"}]}], [("a", "b")]),
    ],
)
def test_pairs(first: Any, second: Any, expected: list[tuple[str, str]]) -> None:
    [query] = plan(first, second).queries
    assert list(zip(query.texts, query.pairs, strict=True)) == expected
    assert query.task == "classify"


def test_options() -> None:
    [query] = plan(
        "a",
        "b",
        truncate_prompt_tokens=-1,
        truncation_side="left",
        max_tokens_per_query=3,
        max_tokens_per_doc=7,
        use_activation=False,
        instruction="find",
    ).queries
    assert (query.truncate_to, query.truncates_left, query.normalizes) == (50, True, False)
    assert (query.max_first, query.max_second) == (3, 7)
    assert query.template_kwargs == '{"instruction":"find"}'


def test_an_embedder_gets_each_text() -> None:
    found = plan("a", ["b", "c"], EMBEDS, max_tokens_per_query=3, max_tokens_per_doc=7)
    first, second = found.queries
    assert (first.texts, first.max_first) == (("q: a",), 3)
    assert (second.texts, second.max_first) == (("q: b", "q: c"), 7)
    assert not first.pairs
    assert first.call == second.call
    rows = np.array([[1, 0], [0.6, 0.8], [0, 1]], np.float32)
    scores = found.scores(rows, [2, 3, 4])
    assert scores.scores.tolist() == pytest.approx([0.6, 0])
    assert scores.num_prompt_tokens == [5, 6]
    assert [found.name_of(at) for at in range(3)] == ["text_1", "text_2[0]", "text_2[1]"]


@pytest.mark.parametrize(
    ("first", "second", "model", "options", "field"),
    [
        ([], "b", CROSS, {}, "text_1"),
        ("a", [], CROSS, {}, "text_2"),
        (["a", "b"], ["c"], CROSS, {}, "text_1"),
        (["a", "b"], ["c", "d", "e"], CROSS, {}, "text_1"),
        ("a", ["b", 7], CROSS, {}, "text_2[1]"),
        ("a", {"content": [{"type": "image_url"}]}, CROSS, {}, "text_2"),
        ("a", ["b", "\ud800"], CROSS, {}, "text_2[1]"),
        ("a", "b", CROSS, {"max_tokens_per_doc": 50}, "max_tokens_per_doc"),
        ("a", "b", CROSS, {"max_tokens_per_query": -1}, "max_tokens_per_query"),
        ("a", "b", CROSS, {"truncate_prompt_tokens": 51}, "truncate_prompt_tokens"),
        ("a", "b", CROSS, {"use_activation": 1}, "use_activation"),
        ("a", "b", CROSS, {"instruction": 1}, "instruction"),
        ("a", "b", EMBEDS, {"instruction": "x"}, "instruction"),
        ("a", "b", CLASSES, {}, "model"),
        ("a", "b", GENERATES, {}, None),
    ],
)
def test_what_is_refused(
    first: Any, second: Any, model: ModelCard, options: Any, field: str | None
) -> None:
    with pytest.raises(BadRequestError) as error:
        plan(first, second, model, **options)
    assert error.value.field == field
    if field is None:
        assert "--convert classify" in str(error.value)


@given(st.lists(st.integers(0, 2**14), min_size=1, max_size=3 * MAX_EMBEDDED))
def test_queries_have_all_pairs_in_order(lens: list[int]) -> None:
    texts = [f"{at:4}".ljust(length, "x") for at, length in enumerate(lens)]
    found = plan_scores("a", texts, CROSS, {}, PairNames("query", "documents"))
    assert [text for query in found.queries for text in query.pairs] == texts
    assert {text for query in found.queries for text in query.texts} == {"a"}
    for query in found.queries:
        assert len(query.texts) == len(query.pairs) <= MAX_EMBEDDED
        assert len(query.pairs) == 1 or sum(map(len, query.pairs)) <= 2**14


@given(st.lists(st.integers(-3, 3), min_size=1, max_size=9), st.integers(0, 10))
def test_documents_are_ranked(values: list[int], top_n: int) -> None:
    documents = [str(at) for at in range(len(values))]
    scores = Scores(np.array(values, np.float32), [1] * len(values))
    found = ranked(scores, documents, top_n)
    whole = sorted(range(len(values)), key=lambda at: (-values[at], at))
    assert [each.index for each in found] == whole[: top_n or None]
    for each in found:
        assert (each.document, each.relevance_score) == (str(each.index), values[each.index])
