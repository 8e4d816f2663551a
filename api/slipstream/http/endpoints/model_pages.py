"""Pages of the list of models, by `after_id`, `before_id` and `limit` as Anthropic's clients ask.

A list that is asked for without them, as OpenAI's clients do, is whole: its answer has the fields
of both.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple
from urllib.parse import parse_qs

from slipstream.http.api_errors import bad_field

PAGE_QUERY = ("after_id", "before_id", "limit")
MAX_LIMIT = 1000  # Anthropic's


class Page(NamedTuple):
    """Places of a list. has_more: in the direction in which the client goes."""

    places: range
    has_more: bool


def page_of(ids: Sequence[str], query: str) -> Page:
    """The page of `ids` that a query asks for: behind `after_id` or right before `before_id`.

    Raises ApiError for an id that is not in the list, for both, and for a limit out of its range.
    """
    given = {name: values[-1] for name, values in parse_qs(query).items() if name in PAGE_QUERY}
    after, before, limit = map(given.get, PAGE_QUERY)
    if after is not None and before is not None:
        raise bad_field("before_id", "before_id: got after_id as well, allowed: one of them")
    most = len(ids)
    if limit is not None:
        is_number = limit.isascii() and limit.isdigit() and len(limit) <= len(str(MAX_LIMIT))
        if not (is_number and 1 <= int(limit) <= MAX_LIMIT):
            what = f"limit: got {limit[:100]!r}, allowed: 1 to {MAX_LIMIT}"
            raise bad_field("limit", what)
        most = int(limit)
    if before is not None:
        end = _place(ids, before, "before_id")
        begin = max(0, end - most)
        return Page(range(begin, end), begin > 0)
    begin = 0 if after is None else 1 + _place(ids, after, "after_id")
    end = min(len(ids), begin + most)
    return Page(range(begin, end), end < len(ids))


def _place(ids: Sequence[str], wanted: str, name: str) -> int:
    if wanted not in ids:
        raise bad_field(name, f"{name}: got {wanted[:100]!r}, allowed: the id of a listed model")
    return ids.index(wanted)
