"""Pages of the list of models, against a walk through the whole of it."""

from __future__ import annotations

from urllib.parse import urlencode

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slipstream.http.api_errors import ApiError
from slipstream.http.endpoints.model_pages import MAX_LIMIT, page_of

IDS = st.lists(st.text(min_size=1, max_size=6), unique=True, max_size=12)


def query(**fields: object) -> str:
    return urlencode(fields)


@given(IDS, st.integers(1, 5))
def test_pages_forwards_are_the_list(ids: list[str], limit: int) -> None:
    found: list[str] = []
    page = page_of(ids, query(limit=limit))
    while True:
        assert len(page.places) <= limit
        found += [ids[at] for at in page.places]
        if not page.has_more:
            break
        page = page_of(ids, query(limit=limit, after_id=found[-1]))
    assert found == ids


@given(IDS.filter(bool), st.integers(1, 5))
def test_pages_backwards_are_the_list(ids: list[str], limit: int) -> None:
    found = [ids[-1]]
    has_more = True
    while has_more:
        places, has_more = page_of(ids, query(limit=limit, before_id=found[0]))
        assert len(places) <= limit
        found = [ids[at] for at in places] + found
    assert found == ids


def test_a_list_without_a_page_is_whole() -> None:
    ids = [str(number) for number in range(50)]
    for asked in ("", "beta=true", "limit=", "x=y&after_id="):
        assert page_of(ids, asked) == (range(50), False)
    assert page_of(ids, "after_id=49") == (range(50, 50), False)
    assert page_of(ids, "before_id=0") == (range(0), False)


@pytest.mark.parametrize(
    ("asked", "name"),
    [
        ("limit=0", "limit"),
        (f"limit={MAX_LIMIT + 1}", "limit"),
        ("limit=-1", "limit"),
        ("limit=²", "limit"),
        ("limit=99999999999", "limit"),
        ("after_id=c", "after_id"),
        ("before_id=c", "before_id"),
        ("after_id=a&before_id=b", "before_id"),
    ],
)
def test_what_is_refused(asked: str, name: str) -> None:
    with pytest.raises(ApiError, match=f"^{name}: got ") as caught:
        page_of(["a", "b"], asked)
    assert (caught.value.status, caught.value.body.error.param) == (400, name)
