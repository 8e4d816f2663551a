"""Unknown fields of bodies: what is taken out, what is said of it, what it costs."""

from __future__ import annotations

import copy
import json
import re
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.helpers.agent_bodies import AGENT_BODIES, USER

from slipstream.http.api_errors import ApiError
from slipstream.http.openai import ignored_fields
from slipstream.http.openai.ignored_fields import MAX_NAME_CHARS, MAX_SHOWN, IgnoredFields
from slipstream.http.planning.chat import read_chat
from slipstream.http.planning.completions import read_completion

SHOWN = re.compile(r"[A-Za-z0-9_.?(), -]*")


def ignored_of(body: dict[str, Any]) -> str:
    ignored = IgnoredFields()
    read_chat(json.dumps(body).encode(), ignored)
    return str(ignored)


def objects(value: Any, path: str = "") -> list[tuple[str, dict[str, Any]]]:
    """Each object of a body whose fields are known, with its path."""
    found: list[tuple[str, dict[str, Any]]] = []
    if isinstance(value, list):
        for each in value:
            found += objects(each, path)
    elif isinstance(value, dict):
        found.append((path, value))
        for name, each in value.items():
            if name in ("messages", "content", "tool_calls", "function", "stream_options"):
                found += objects(each, f"{path}{name}.")
    return found


@given(st.data(), st.sampled_from(sorted(AGENT_BODIES)))
def test_a_body_is_read_as_if_they_were_not_there(data: st.DataObject, name: str) -> None:
    plain = AGENT_BODIES[name]
    body = copy.deepcopy(plain)
    places = objects(body)
    names = st.text("xyz", min_size=4, max_size=5)
    added = data.draw(
        st.lists(st.tuples(st.integers(0, len(places) - 1), names), max_size=8, unique=True)
    )
    for index, unknown in added:
        places[index][1][unknown] = data.draw(st.sampled_from([1, None, "x", [{}], {"a": {}}]))
    ignored = IgnoredFields()
    assert read_chat(json.dumps(body).encode(), ignored) == read_chat(json.dumps(plain).encode())
    assert bool(ignored) == bool(added)
    expected = {f"{places[index][0]}{unknown}" for index, unknown in added}
    named = [shown.partition(" ")[0] for shown in str(ignored).split(", ")] if ignored else []
    assert sorted(named) == sorted(expected)
    if added:
        with pytest.raises(ApiError, match="unknown field"):
            read_chat(json.dumps(body).encode())


@given(st.dictionaries(st.text(), st.just(1), max_size=40))
def test_what_is_shown_of_names_is_bounded_and_harmless(unknown: dict[str, int]) -> None:
    body = json.dumps({**unknown, "messages": [{**unknown, **USER}]}).encode("utf-8", "replace")
    ignored = IgnoredFields()
    try:
        read_chat(body, ignored)
    except ApiError:
        return  # a known name with a wrong type
    assert SHOWN.fullmatch(str(ignored))
    assert len(str(ignored)) < 2 * MAX_SHOWN * (MAX_NAME_CHARS + len("messages."))


def test_near_names_are_hinted_at() -> None:
    assert (
        ignored_of({"messages": [USER], "max_token": 1}) == "max_token (did you mean max_tokens?)"
    )
    hint = "guided_decoding (it is structured_outputs now)"
    assert ignored_of({"messages": [USER], "guided_decoding": {}}) == hint
    named = ignored_of({"messages": [{**USER, "rol": 1}, {**USER, "rol": 2}]})
    assert named == "messages.rol (did you mean role?)"
    ignored = IgnoredFields()
    read_completion(b'{"prompt": "x", "stream_options": {"include_usages": true}}', ignored)
    assert str(ignored) == "stream_options.include_usages (did you mean include_usage?)"


def test_headers_cannot_be_injected() -> None:
    name = 'x\r\nSet-Cookie: a=b\n, y (did you mean z?) \u2028\x00é"'
    shown = "x__Set-Cookie__a_b___y__did_you_mean_z_______"
    assert ignored_of({"messages": [USER], name: 1}) == shown
    long = ignored_of({"messages": [USER], "q" * 10**6: 1})
    assert long == "q" * (MAX_NAME_CHARS - 3) + "..."


def test_the_rest_is_counted_no_further() -> None:
    named = ignored_of({"messages": [USER], **{f"unknown_{n}": n for n in range(1000)}})
    assert named.split(", ") == [f"unknown_{n}" for n in range(MAX_SHOWN)] + ["..."]


def test_the_cost_of_many_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Near names are sought for a few; a body with very many fields is refused unread."""
    sought: list[str] = []
    monkeypatch.setattr(ignored_fields, "_hint", lambda name, known: sought.append(name) or "")
    many = {f"unknown_{n}": n for n in range(30_000)}
    text = {**USER, "content": '{"a": [":"]}' * 50_000}  # whose signs are no fields
    assert ignored_of({"messages": [text], **many}).endswith(", ...")
    assert len(sought) == ignored_fields._MAX_HINTS
    many |= {f"unheard_{n}": n for n in range(10_000)}
    with pytest.raises(ApiError, match="unknown_0: unknown field"):
        ignored_of({"messages": [USER], **many})


def test_wrong_types_are_still_named() -> None:
    for body, param in (
        ({"messages": [{**USER, "x": 1, "name": 7}]}, "messages[0].name"),
        ({"x": 1, "messages": "y"}, "messages"),
        ({"x": 1}, "messages"),
        ({"x": 1, "messages": [USER], "logit_bias": {"a": 1}}, "logit_bias"),
        ({"messages": [{"role": "user", "content": [{"text": "x", "y": 1}]}]}, None),
    ):
        with pytest.raises(ApiError) as caught:
            ignored_of(body)
        assert caught.value.status == 400
        if param is not None:
            assert caught.value.body.error.param.startswith(param)


@pytest.mark.parametrize("tail", [b"", b'"', b"\xff}", b'"y": \xff}', b"[" * 9999])
def test_what_is_malformed_behind_them_is_refused(tail: bytes) -> None:
    with pytest.raises(ApiError) as caught:
        read_completion(b'{"prompt": "x", "unknown": 1, ' + tail, IgnoredFields())
    assert caught.value.status == 400


def test_keys_of_numbers_are_read_beside_them() -> None:
    body = read_completion(b'{"prompt": "x", "x": 1, "logit_bias": {"7": 1}}', IgnoredFields())
    assert body.logit_bias == {7: 1.0}
