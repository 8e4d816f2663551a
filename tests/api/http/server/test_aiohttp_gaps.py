"""What aiohttp does not do, for which `ClientConnection` has code of its own.

Where one of these fails, aiohttp has mended it, and that code can go.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest
from aiohttp import web
from aiohttp.http import HttpProcessingError, HttpRequestParser

GET = b"GET /version HTTP/1.1\r\nHost: localhost\r\n\r\n"
POST = b"POST /x HTTP/1.1\r\nHost: localhost\r\n"


def with_parser(test: Callable[[HttpRequestParser], None]) -> None:
    """Run it on the parser of a connection."""

    async def main() -> None:
        async def handler(_: web.BaseRequest) -> web.StreamResponse:
            return web.Response()

        protocol = web.Server(handler)()
        loop = asyncio.get_running_loop()
        options: Any = {"max_line_size": 8190, "max_field_size": 8190}
        test(HttpRequestParser(protocol, loop, 2**16, **options))

    asyncio.run(main())


def test_a_request_is_lost_with_the_error_behind_it():
    def test(parser: HttpRequestParser) -> None:
        with pytest.raises(HttpProcessingError):
            parser.feed_data(GET + b"nonsense\r\n\r\n")
        with pytest.raises(HttpProcessingError):  # nor does it come with the next bytes
            parser.feed_data(b"")

    with_parser(test)


def test_a_body_waits_for_ever_behind_a_chunk_that_is_none():
    def test(parser: HttpRequestParser) -> None:
        [(_, payload)], _, _ = parser.feed_data(POST + b"Transfer-Encoding: chunked\r\n\r\n")
        with pytest.raises(HttpProcessingError):
            parser.feed_data(b"nonsense\r\n")
        assert (payload.is_eof(), payload.exception()) == (False, None)

    with_parser(test)


def test_what_follows_the_body_of_a_wish_to_upgrade_is_lost():
    def test(parser: HttpRequestParser) -> None:
        wish = b"Connection: Upgrade\r\nUpgrade: h2c\r\nContent-Length: 1\r\n\r\n{"
        messages, is_upgraded, rest = parser.feed_data(POST + wish + GET)
        assert (len(messages), is_upgraded, rest) == (1, False, b"")
        assert not parser.feed_data(b"")[0]

    with_parser(test)


def test_a_head_may_be_as_large_as_all_of_its_fields():
    def test(parser: HttpRequestParser) -> None:
        fields = b"".join(b"a%d: %b\r\n" % (number, 8000 * b"x") for number in range(100))
        [(message, _)], _, _ = parser.feed_data(GET[:-2] + fields + b"\r\n")
        assert sum(len(value) for _, value in message.raw_headers) > 800_000

    with_parser(test)
