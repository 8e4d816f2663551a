"""The routes, without a server."""

from __future__ import annotations

import json
from importlib.metadata import version
from types import SimpleNamespace
from typing import Any, cast

import msgspec
import pytest
from tests.helpers.front_app import app_over

from slipstream.http import app
from slipstream.http.admin import metrics
from slipstream.http.api_errors import ApiError
from slipstream.http.exchange import Exchange, HttpRequest
from slipstream.http.response_encoding import Response
from slipstream_ipc.telemetry.statistics import (
    CoreGauges,
    CoreNumbers,
    ProcessStatistics,
    Statistics,
)


class Answers:
    """A sink that keeps answers."""

    def __init__(self) -> None:
        self.bodies: list[bytes] = []

    def respond(self, response: Response) -> None:
        self.bodies.append(response.body)


def test_the_packages_metadata_is_read_once(monkeypatch: pytest.MonkeyPatch) -> None:
    names: list[str] = []

    def counted(name: str) -> str:
        names.append(name)
        return version(name)

    monkeypatch.setattr(app, "version", counted)
    no: Any = None
    routes, answers = app_over(no), Answers()
    handler = routes._handlers["/version"]["GET"]
    for _ in "ab":
        request = HttpRequest("GET", "/version")
        handler(request, Exchange(request, cast(Any, answers)))
    assert answers.bodies == [b'{"version":"%b"}' % version("slipstream").encode()] * 2
    assert names == ["slipstream"]


def test_the_version_names_an_engine_that_is_not_ours() -> None:
    no: Any = None
    routes, answers = app_over(no), Answers()
    core = CoreNumbers(CoreGauges(engine="vllm 0.32.0"))
    places = {"core": ProcessStatistics(numbers=core), "http": ProcessStatistics()}
    routes.statistics = Statistics(1.0, places)
    request = HttpRequest("GET", "/version")
    routes._handlers["/version"]["GET"](request, Exchange(request, cast(Any, answers)))
    assert msgspec.json.decode(answers.bodies[0]) == {
        "version": version("slipstream"),
        "engine": "vllm 0.32.0",
    }


def test_health_tells_the_process_ids_that_are_known() -> None:
    io: Any = SimpleNamespace(cluster=SimpleNamespace(statuses=list))
    routes, answers = app_over(io), Answers()
    request, handler = HttpRequest("GET", "/health"), routes._handlers["/health"]["GET"]
    handler(request, Exchange(request, cast(Any, answers)))
    found = {"core": ProcessStatistics("ready", 7), "worker": ProcessStatistics("restarting")}
    routes.statistics = Statistics(1.0, found)
    handler(request, Exchange(request, cast(Any, answers)))
    before, after = [json.loads(body) for body in answers.bodies]
    assert "pids" not in before
    assert after["pids"] == {"core": 7}


def test_the_metrics_of_all_replicas_are_asked_for_and_rendered_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """They were rendered for each request: 5,000 requests without a key were 56 s of standstill."""
    asked: list[Any] = []
    rendered: list[bool] = []
    now = [5.0]
    replica = SimpleNamespace(shown_name="r", model="m")
    io: Any = SimpleNamespace(
        cluster=SimpleNamespace(statuses=lambda: [replica]),
        models=[],
        inspect=lambda _, use: asked.append(use),
    )
    routes = app_over(io, clock=lambda: now[0])
    monkeypatch.setattr(metrics, "_replica_metrics", lambda *_: ())
    render = metrics._render

    def counted(registry: Any, *, is_open: bool) -> bytes:
        rendered.append(is_open)
        return render(registry, is_open=is_open)

    monkeypatch.setattr(metrics, "_render", counted)
    answers, statuses = Answers(), []

    def get(accept: bytes = b"") -> Exchange:
        request = HttpRequest("GET", "/metrics", "replicas=all", headers={b"accept": accept})
        exchange = Exchange(request, cast(Any, answers))
        try:
            routes._get_metrics(request, exchange)
        except ApiError as error:
            statuses.append(error.status)
        return exchange

    exchanges = [get((b"", b"application/openmetrics-text")[at % 2]) for at in range(1000)]
    assert len(asked) == 1
    assert statuses == [503] * (1000 - app._MAX_INSPECTORS)
    exchanges[0].disconnect()
    get()  # in its place
    assert len(statuses) == 1000 - app._MAX_INSPECTORS
    asked[0]({"r": None})
    assert len(answers.bodies) == app._MAX_INSPECTORS
    assert sorted(rendered) == [False, True]
    assert b'replica_inspected{model_name="m",replica="r"} 0.0' in answers.bodies[0]
    now[0] += 0.9
    get()
    assert len(answers.bodies) == app._MAX_INSPECTORS + 1
    assert (len(asked), len(rendered)) == (1, 2)
    now[0] += 0.2
    get()
    assert len(asked) == 2
    asked[1]({"r": None})
    assert len(rendered) == 3
