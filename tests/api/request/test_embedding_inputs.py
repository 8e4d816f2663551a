"""Inputs of calls for embeddings: their forms, what is refused, how they are cut into queries."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from slipstream.errors import BadRequestError
from slipstream.request.embedding_inputs import embed_queries, embedding_inputs
from slipstream_ipc.columns import pack_u32, u32
from slipstream_ipc.messages import MAX_EMBEDDED, ModelCard, NamedPrompt, PoolingCard

PROMPTS = NamedPrompt("query", "query: "), NamedPrompt("none", "")
CARD = PoolingCard(32, (8, 16), PROMPTS, "query")
MODEL = ModelCard("m", "/nowhere", 100, 50, (), pooling=CARD)


def queries(given: Any, **options: Any) -> Any:
    return embed_queries(embedding_inputs(given), MODEL, options)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ("a", ("query: a",)),
        (["a", "b"], ("query: a", "query: b")),
        ({"prompt": "a"}, ("query: a",)),
        ([{"prompt": "a"}, "b"], ("query: a", "query: b")),
    ],
)
def test_texts(given: Any, expected: tuple[str, ...]) -> None:
    [query] = queries(given)
    assert (query.texts, query.token_ids) == (expected, b"")


@pytest.mark.parametrize(
    "given",
    [
        [1, 2, 3],
        [[1, 2, 3]],
        np.array([1, 2, 3]),
        {"prompt_token_ids": [1, 2, 3]},
        [{"prompt_token_ids": [1, 2, 3]}],
    ],
)
def test_token_ids(given: Any) -> None:
    [query] = queries(given)
    assert (query.token_ids, query.counts) == (pack_u32([1, 2, 3]), pack_u32([3]))


def test_options() -> None:
    [query] = queries(
        "a",
        prompt_name="none",
        dimensions=8,
        truncate_prompt_tokens=-1,
        truncation_side="left",
        normalize=False,
        add_special_tokens=False,
    )
    assert (query.texts, query.dimensions, query.truncate_to) == (("a",), 8, 50)
    assert (query.truncates_left, query.normalizes, query.add_special_tokens) == (
        True,
        False,
        False,
    )
    assert queries("a", dimensions=32)[0].dimensions == 32


@pytest.mark.parametrize(
    ("given", "options", "field"),
    [
        ([], {}, "input"),
        (7, {}, "input"),
        (b"a", {}, "input"),
        ([[]], {}, "input"),
        (["a", 7], {}, "input[1]"),
        (["a", [1]], {}, "input[1]"),
        (["a", "\ud800"], {}, "input[1]"),
        ([[1, -1]], {}, "input"),
        ("a", {"dimensions": 0}, "dimensions"),
        ("a", {"dimensions": 7}, "dimensions"),
        ("a", {"dimensions": 64}, "dimensions"),
        ("a", {"dimensions": True}, "dimensions"),
        ("a", {"truncate_prompt_tokens": 0}, "truncate_prompt_tokens"),
        ("a", {"truncate_prompt_tokens": 51}, "truncate_prompt_tokens"),
        ("a", {"truncation_side": "up"}, "truncation_side"),
        ("a", {"prompt_name": "passage"}, "prompt_name"),
        ([1], {"prompt_name": "query"}, "prompt_name"),
        ("a", {"normalize": 1}, "normalize"),
    ],
)
def test_what_is_refused(given: Any, options: Any, field: str) -> None:
    with pytest.raises(BadRequestError) as error:
        queries(given, **options)
    assert error.value.field == field
    assert str(error.value).startswith(f"{field}: got ")


def test_a_model_that_generates() -> None:
    with pytest.raises(BadRequestError, match="'m' generates text: it is not served for embedd"):
        embed_queries(["a"], ModelCard("m", "/nowhere", 100, 50, ()), {})


@given(st.lists(st.integers(0, 2**15), min_size=1, max_size=3 * MAX_EMBEDDED))
def test_queries_have_all_inputs_in_order(lens: list[int]) -> None:
    texts = [f"{at:4}".ljust(length, "x") for at, length in enumerate(lens)]
    found = queries(texts, prompt_name="none")
    assert [text for query in found for text in query.texts] == texts
    for query in found:
        assert len(query.texts) == 1 or sum(map(len, query.texts)) <= 2**14
        assert len(query.texts) <= MAX_EMBEDDED
    assert len({query.call for query in found}) == 1
    columns = [[at] * (1 + length % 99) for at, length in enumerate(lens)]
    found = queries(columns)
    assert b"".join(each.token_ids for each in found) == b"".join(map(pack_u32, columns))
    counts = b"".join(each.counts for each in found)
    assert u32(counts).tolist() == [len(column) for column in columns]
