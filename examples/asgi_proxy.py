"""An ASGI application in front of a server: it checks its users, and hands everything else on.

    pip install httpx2 uvicorn
    UPSTREAM=http://127.0.0.1:8000 USER_KEYS=anna:key-of-anna python examples/asgi_proxy.py 8080

Any ASGI server runs what `app_from` makes of the environment; this file takes uvicorn. What matters
for streams:

- chunks are handed on as they come, none is collected;
- a user who leaves ends the request to the server, which ends its streams;
- `Accept` and `Last-Event-ID` pass, so that users can resume (docs/http.md).

A user chooses a path of the server, and never the server: a target with a host is refused.
"""

from __future__ import annotations

import asyncio
import hmac
import json
import os
import sys
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any
from urllib.parse import quote

import httpx2
import uvicorn

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]

PASSED_ON = (b"accept", b"content-type", b"last-event-id")
PASSED_BACK = (b"content-type", b"cache-control", b"retry-after")


class Proxy:
    """keys: of its users, by name. upstream_key: this proxy's own, where the server wants one."""

    def __init__(
        self, upstream: str, keys: dict[str, str], upstream_key: str | None = None
    ) -> None:
        self._keys = keys
        self._own = {"authorization": f"Bearer {upstream_key}"} if upstream_key else {}
        # answers take as long as they take
        self._client = httpx2.AsyncClient(base_url=upstream, timeout=httpx2.Timeout(10, read=None))

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self._live(receive, send)
        elif scope["type"] == "http":
            await self._answer(scope, receive, send)

    async def _live(self, receive: Receive, send: Send) -> None:
        await receive()
        await send({"type": "lifespan.startup.complete"})
        await receive()
        await self._client.aclose()
        await send({"type": "lifespan.shutdown.complete"})

    async def _answer(self, scope: Message, receive: Receive, send: Send) -> None:
        headers = dict(scope["headers"])
        user = self._user(headers.get(b"authorization", b""))
        if user is None:
            await _refuse(send, 401, "no key, or none of ours")
            return
        path = scope["path"]  # of some ASGI servers with the host that a target may have
        if not path.startswith("/") or path.startswith("//"):
            await _refuse(send, 400, "a path begins with one slash")
            return
        body = await _body(receive)
        if body is None:
            return
        request = self._client.build_request(
            scope["method"],
            httpx2.URL(quote(path), query=scope["query_string"]),
            headers={**self._own, **{k.decode(): v for k, v in headers.items() if k in PASSED_ON}},
            content=body,
        )
        # whichever is first: the answer's end, or the user's
        answer = asyncio.create_task(self._relay(request, send))
        leaving = asyncio.create_task(_until_gone(receive))
        await asyncio.wait((answer, leaving), return_when=asyncio.FIRST_COMPLETED)
        for task in (answer, leaving):
            task.cancel()
        for result in await asyncio.gather(answer, leaving, return_exceptions=True):
            if isinstance(result, Exception):
                raise result

    async def _relay(self, request: httpx2.Request, send: Send) -> None:
        try:
            response = await self._client.send(request, stream=True)
        except httpx2.TransportError as error:
            await _refuse(send, 502, f"no answer from the server: {type(error).__name__}")
            return
        try:
            raw = [(k.lower(), v) for k, v in response.headers.raw if k.lower() in PASSED_BACK]
            await send(
                {"type": "http.response.start", "status": response.status_code, "headers": raw}
            )
            async for chunk in response.aiter_raw():
                await send({"type": "http.response.body", "body": chunk, "more_body": True})
            await send({"type": "http.response.body", "body": b""})
        finally:
            await response.aclose()

    def _user(self, authorization: bytes) -> str | None:
        given = authorization.removeprefix(b"Bearer ")
        for name, key in self._keys.items():
            if hmac.compare_digest(given, key.encode()):
                return name
        return None


async def _body(receive: Receive) -> bytes | None:
    """The request's body; None where the user left before it was whole."""
    parts = []
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            return None
        parts.append(message.get("body", b""))
        if not message.get("more_body", False):
            return b"".join(parts)


async def _until_gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def _refuse(send: Send, status: int, message: str) -> None:
    body = json.dumps({"error": {"message": message, "type": "proxy_error"}}).encode()
    headers = [(b"content-type", b"application/json")]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})


def app_from(environment: dict[str, str]) -> Proxy:
    """UPSTREAM: the server's URL. USER_KEYS: NAME:KEY, separated by commas. UPSTREAM_KEY."""
    keys = dict(pair.split(":", 1) for pair in environment["USER_KEYS"].split(","))
    return Proxy(environment["UPSTREAM"], keys, environment.get("UPSTREAM_KEY"))


if __name__ == "__main__":
    uvicorn.run(app_from(dict(os.environ)), port=int(sys.argv[1]), log_level="warning")
