"""A chat's `prediction`: what of it reaches the worker, and what is refused."""

from __future__ import annotations

import json
from typing import Any

import pytest
from tests.helpers.agent_bodies import USER
from tests.helpers.fake_worker import MODEL

from slipstream.http.api_errors import ApiError
from slipstream.http.openai.ignored_fields import IgnoredFields
from slipstream.http.planning.chat import plan_chat, read_chat

PREDICTED = "def y():\n    return 1\n"


def predictions(given: Any, ignored: IgnoredFields | None = None, **fields: Any) -> list[str]:
    body = {"messages": [USER], "prediction": given, **fields}
    plan = plan_chat(read_chat(json.dumps(body).encode(), ignored), MODEL)
    return [state.request.prediction for state in plan.states]


def test_a_text_and_its_parts_are_the_same() -> None:
    assert predictions({"type": "content", "content": PREDICTED}) == [PREDICTED]
    parts = [{"type": "text", "text": PREDICTED[:9]}, {"type": "text", "text": PREDICTED[9:]}]
    assert predictions({"type": "content", "content": parts}) == [PREDICTED]
    assert predictions(None) == [""]


def test_each_answer_has_it() -> None:
    assert predictions({"type": "content", "content": PREDICTED}, n=3) == [PREDICTED] * 3


def test_an_unknown_field_in_it_is_named() -> None:
    ignored = IgnoredFields()
    assert predictions({"type": "content", "content": "x", "of": 1}, ignored) == ["x"]
    assert str(ignored) == "prediction.of"


@pytest.mark.parametrize(
    ("given", "why"),
    [
        ({"type": "content", "content": ""}, "prediction.content: got '', allowed: the text"),
        ({"type": "content", "content": []}, "prediction.content: got '', allowed: the text"),
        ({"type": "content"}, "prediction.content: missing"),
        ({"type": "content", "content": None}, "prediction.content: got None"),
        ({"type": "content", "content": 7}, "prediction.content: got 7"),
        ({"type": "content", "content": ["x"]}, "prediction.content[0]: got 'x'"),
        (
            {"type": "content", "content": [{"type": "image_url", "image_url": {"url": "x"}}]},
            "prediction.content[0].type: got 'image_url', allowed: text",
        ),
        ({"type": "text", "content": "x"}, "prediction.type: got 'text', allowed: content"),
        ({"content": "x"}, "prediction.type: missing"),
        ({"type": "content", "content": "x", "of": 1}, "prediction.of: unknown field"),
        ("x", "prediction: got 'x'"),
        (7, "prediction: got 7"),
        ([{}], "prediction: got [{}]"),
    ],
)
def test_what_is_no_prediction_is_refused(given: Any, why: str) -> None:
    with pytest.raises(Exception) as caught:
        predictions(given)
    error = caught.value
    assert isinstance(error, ApiError)
    assert error.status == 400
    assert str(error).startswith(why)
