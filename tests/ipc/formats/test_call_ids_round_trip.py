"""Ids of calls as clients are given them, and what a template is shown of those that come back."""

from __future__ import annotations

import re

from hypothesis import given
from hypothesis import strategies as st

from slipstream_ipc.formats.call_ids import repeated_id, safe_id, written_id

WRITTEN = st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=60).filter(
    lambda text: re.search(r"__call[0-9]{1,4}\Z", text) is None and not text.startswith("toolu_e_")
)


@given(WRITTEN, st.integers(0, 1023))
def test_what_a_model_wrote_comes_back(call_id: str, index: int) -> None:
    for given_id in (call_id, repeated_id(call_id, index)):
        assert written_id(given_id) == call_id
        assert re.fullmatch(r"[a-zA-Z0-9_-]+", safe_id(given_id))
        assert written_id(safe_id(given_id)) == call_id


@given(WRITTEN, WRITTEN)
def test_different_ids_stay_different(one: str, other: str) -> None:
    assert (safe_id(one) == safe_id(other)) == (one == other)


def test_ids_that_others_have_made_stay_as_they_are() -> None:
    for call_id in ("toolu_01A09q90qw90lq917835lq9", "call_0123456789abcdef01234567", "abcdefghi"):
        assert safe_id(call_id) == written_id(call_id) == call_id
    assert safe_id("functions.look:0") == "toolu_e_functions_2elook_3a0"
    assert repeated_id("functions.look:0", 1) == "functions.look:0__call1"
    for call_id in ("toolu_e_", "toolu_e_a_zz", "toolu_e__ff"):  # no encoding of ours
        assert written_id(call_id) == call_id
