"""The listening end's turns: new requests leave room for what runs."""

from __future__ import annotations

import asyncio
from typing import Any

from slipstream.http import time_slice
from slipstream.http.config import Limits
from slipstream.http.exchange import HttpRequest
from slipstream.http.server.server import Server


class Waiting:
    """An exchange, as far as a server looks at it."""

    is_open = True


def begun_by(share_s: float, monkeypatch: Any, *, gone: int = -1) -> list[str]:
    """What happens in which order where three requests come at once and something else runs."""
    monkeypatch.setattr(time_slice, "SHARE_S", share_s)
    told: list[str] = []

    class App:
        def pattern_of(self, path: str) -> str:
            return path

        def handle(self, request: HttpRequest, _exchange: object) -> None:
            told.append(request.path)

    async def main() -> None:
        running = Server(App(), Limits())
        loop = asyncio.get_running_loop()
        for number in range(3):
            exchange = Waiting()
            exchange.is_open = number != gone
            running.handle(HttpRequest(path=str(number)), exchange)

        def other(left: int) -> None:
            told.append("other")
            if left:
                loop.call_soon(other, left - 1)

        loop.call_soon(other, 3)
        while told.count("other") < 4:  # noqa: ASYNC110  (it has the loop turn)
            await asyncio.sleep(0)
        await running.close()

    asyncio.run(main())
    return told


def test_requests_that_come_at_once_are_begun_at_once_where_there_is_time(monkeypatch):
    assert begun_by(1000.0, monkeypatch) == [*"012", *["other"] * 4]


def test_without_time_others_have_their_turns_in_between(monkeypatch):
    assert begun_by(0.0, monkeypatch) == ["0", "other", "1", "other", "2", "other", "other"]


def test_who_has_left_meanwhile_is_not_begun(monkeypatch):
    assert begun_by(1000.0, monkeypatch, gone=1) == [*"02", *["other"] * 4]
