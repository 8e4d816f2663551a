"""An ASGI application with an answer of its own: a page asks, text streams back.

    pip install uvicorn
    python examples/asgi_app.py 8080
    curl -sN http://127.0.0.1:8080 -d "Explain lambda."

Any ASGI server runs `app`; this file takes uvicorn. It talks to `slipstream serve` on this
machine, or to $SLIPSTREAM_ADDRESS.

- A status can be sent only once, before any text. `accepted` waits until the server has accepted
  the request, so one that it refuses is a 400 or a 503 and no broken 200.
- A user who leaves cancels the answer, which ends its stream.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

import uvicorn

import slipstream

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]


class App:
    """POST a question, get the answer's text as it is generated."""

    _client: slipstream.AsyncClient

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self._live(receive, send)
        elif scope["type"] == "http":
            question = await body_of(receive)
            answer = asyncio.create_task(self._answer(question.decode(errors="replace"), send))
            leaving = asyncio.create_task(until_gone(receive))
            await asyncio.wait((answer, leaving), return_when=asyncio.FIRST_COMPLETED)
            for task in (answer, leaving):
                task.cancel()
            for result in await asyncio.gather(answer, leaving, return_exceptions=True):
                if isinstance(result, Exception):
                    raise result

    async def _live(self, receive: Receive, send: Send) -> None:
        await receive()
        async with slipstream.AsyncClient() as self._client:
            await send({"type": "lifespan.startup.complete"})
            await receive()
        await send({"type": "lifespan.shutdown.complete"})

    async def _answer(self, question: str, send: Send) -> None:
        try:
            turns = [{"role": "user", "content": question}]
            stream = self._client.stream(turns, max_tokens=200, temperature=0)
            await stream.accepted()
        except slipstream.RequestError as error:
            await respond(send, 400, f"{error}\n")
        except slipstream.SlipstreamError as error:
            await respond(send, 503, f"{error}\n")
        else:
            await begin(send, 200)
            async for delta in stream:
                await write(send, delta.text)
            await write(send, "\n", more=False)


async def body_of(receive: Receive) -> bytes:
    """The request's body."""
    parts, more = [], True
    while more:
        message = await receive()
        parts.append(message.get("body", b""))
        more = message.get("more_body", False)
    return b"".join(parts)


async def until_gone(receive: Receive) -> None:
    """Wait until the user has left."""
    while (await receive())["type"] != "http.disconnect":
        pass


async def respond(send: Send, status: int, text: str) -> None:
    """A whole answer."""
    await begin(send, status)
    await write(send, text, more=False)


async def begin(send: Send, status: int) -> None:
    """The status and headers of an answer."""
    headers = [(b"content-type", b"text/plain; charset=utf-8")]
    await send({"type": "http.response.start", "status": status, "headers": headers})


async def write(send: Send, text: str, *, more: bool = True) -> None:
    """A part of an answer."""
    await send({"type": "http.response.body", "body": text.encode(), "more_body": more})


app = App()

if __name__ == "__main__":
    uvicorn.run(app, port=int(sys.argv[1]), log_level="warning")
