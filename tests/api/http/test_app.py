"""The routes, without a server."""

from __future__ import annotations

import json
from importlib.metadata import version
from types import SimpleNamespace
from typing import Any, cast

import pytest

from slipstream.http import app
from slipstream.http.auth import ApiKeys
from slipstream.http.config import Limits
from slipstream.http.exchange import Exchange, HttpRequest
from slipstream.http.response_encoding import Response
from slipstream_ipc.telemetry.statistics import ProcessStatistics, Statistics


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
    routes, answers = app.App(no, ApiKeys(()), no, Limits()), Answers()
    handler = routes._handlers["/version"]["GET"]
    for _ in "ab":
        request = HttpRequest("GET", "/version")
        handler(request, Exchange(request, cast(Any, answers)))
    assert answers.bodies == [b'{"version":"%b"}' % version("slipstream").encode()] * 2
    assert names == ["slipstream"]


def test_health_tells_the_process_ids_that_are_known() -> None:
    no: Any = None
    io: Any = SimpleNamespace(replicas=[])
    routes, answers = app.App(io, ApiKeys(()), no, Limits()), Answers()
    request, handler = HttpRequest("GET", "/health"), routes._handlers["/health"]["GET"]
    handler(request, Exchange(request, cast(Any, answers)))
    found = {"core": ProcessStatistics("ready", 7), "worker": ProcessStatistics("restarting")}
    routes.statistics = Statistics(1.0, found)
    handler(request, Exchange(request, cast(Any, answers)))
    before, after = [json.loads(body) for body in answers.bodies]
    assert "pids" not in before
    assert after["pids"] == {"core": 7}
