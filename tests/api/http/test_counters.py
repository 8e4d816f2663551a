"""What a front counts of its answers, whichever way they end."""

from __future__ import annotations

import select
from http import HTTPStatus
from types import SimpleNamespace
from typing import Any, get_args

import msgspec
import pytest
from tests.helpers.front_app import app_over

from slipstream.client.placing.router_counters import LONGEST_NAME, MovedWhy, RouterCounters
from slipstream.http.counters import CLIENT_CLOSED, HttpCounters, with_router
from slipstream.http.exchange import Exchange, HttpRequest
from slipstream.http.openai.response_bodies import Version
from slipstream.http.response_encoding import json_response
from slipstream_ipc.messages import Status
from slipstream_ipc.telemetry.statistics import FrontCounters, FrontGauges, FrontNumbers

SINK: Any = SimpleNamespace(
    write=lambda _: None, respond=lambda _: None, begin_stream=lambda _: None, finish=lambda: None
)


def exchange(counters: HttpCounters) -> Exchange:
    return Exchange(HttpRequest(path="/p"), SINK, counters)


def numbers(num_open: int, num_chunks: int, **answers: int) -> FrontNumbers:
    """Answers as _200=1."""
    by_kind = {f"{status[1:]} /p": num for status, num in answers.items()}
    return FrontNumbers(FrontGauges(1, num_open), FrontCounters(by_kind, num_chunks))


def test_a_whole_answer() -> None:
    counters = HttpCounters()
    for status in (200, 404, 200):
        exchange(counters).respond(json_response(status, Version("x")))
    assert counters.numbers(1) == numbers(0, 0, _200=2, _404=1)


def test_a_streamed_answer() -> None:
    counters = HttpCounters()
    streamed = exchange(counters)
    streamed.begin_stream()
    streamed.write(b"data: 1\n\n")
    assert counters.numbers(1) == numbers(1, 1, _200=1)
    streamed.write(b"data: 2\n\n")
    streamed.finish()
    assert counters.numbers(1) == numbers(0, 2, _200=1)


def test_a_client_that_leaves() -> None:
    counters = HttpCounters()
    early, late, after = exchange(counters), exchange(counters), exchange(counters)
    early.disconnect()
    late.begin_stream()
    late.disconnect()
    late.write(b"data: 1\n\n")
    after.respond(json_response(200, Version("x")))
    after.disconnect()
    assert counters.numbers(1) == numbers(0, 0, _499=1, _200=2)


@pytest.mark.parametrize(
    ("path", "pattern"),
    [
        ("/v1/completions", "/v1/completions"),
        ("/v1/streams/cmpl-abc", "/v1/streams/{id}"),
        ("/v1/models", "/v1/models"),
        ("/v1/models/x", "/v1/models/{id}"),
        ("/wp-login.php", "other"),
        ("", "other"),
    ],
)
def test_what_clients_make_up_makes_no_new_counters(path: str, pattern: str) -> None:
    io: Any = SimpleNamespace(models=())
    app = app_over(io)
    assert app.pattern_of(path) == pattern


@pytest.mark.parametrize("letter", ["m", "\u6a21", "\x00"])
def test_whatever_clients_do_the_numbers_fit_into_a_beat(letter: str) -> None:
    """Every path with every status, all often: what does not fit would never be told again."""
    io: Any = SimpleNamespace(models=())
    app = app_over(io)
    counters = HttpCounters(app.pattern_of)
    paths = [*app.endpoints, *app._page_handlers, "/nonsense"]
    statuses = [each.value for each in HTTPStatus if each >= 200] + [CLIENT_CLOSED]
    for status in sorted(statuses, reverse=True):
        for path in paths:
            counters.answered(path, status)
    told = counters.numbers(2**20)
    assert sum(told.counters.answers.values()) == len(paths) * len(statuses)
    assert {f"200 {app.pattern_of(path)}" for path in paths} <= told.counters.answers.keys()
    often = dict.fromkeys(told.counters.answers, 10**9)
    router = RouterCounters(choose_s=10**6 + 0.123456789)
    room = LONGEST_NAME - len("000-")
    letters = {"m": room, "\u6a21": room // 3, "\x00": room // 6}
    for number in range(100):
        model = f"{number:03}-" + letter * letters[letter]
        for why in get_args(MovedWhy):
            router.note_moved(model, why)
        for why in ("home", "second", "load", "last", "waited"):
            router.note_placed(model, why)
    assert sum(router.moved.values()) == 100 * len(get_args(MovedWhy))
    router.placed = dict.fromkeys(router.placed, 10**9)
    router.moved = dict.fromkeys(router.moved, 10**9)
    most = FrontNumbers(FrontGauges(2**20, 2**20), FrontCounters(often, 10**12))
    most = with_router(most, router)
    assert len(msgspec.json.encode(Status(beat=True, numbers=most))) < select.PIPE_BUF
