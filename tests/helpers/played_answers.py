"""Scripts and answers of a `FakeWorker`."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

from tests.helpers.fake_worker import Entry, FakeWorker, deltas, end_of

from slipstream_ipc.messages import Submit

Found = TypeVar("Found")


def away(call: Callable[..., Found], *arguments: Any) -> Awaitable[Found]:
    """Run a blocking call of the worker in a thread, so that the event loop goes on."""
    return asyncio.to_thread(call, *arguments)


def echo(worker: FakeWorker, body: Any) -> None:
    """A script: stream the prompt back, one character per message."""
    if isinstance(body, Submit):
        worker.accept_from_script(body)
        text = body.text or ""
        for at, char in enumerate(text):
            end = end_of(text) if at == len(text) - 1 else None
            worker.post(deltas(Entry(body.handle, char, at, end=end)))


def answer(worker: FakeWorker, submit: Submit, text: str, size: int = 3) -> None:
    """From a script: accept, then stream `text` in messages of `size` characters."""
    worker.accept_from_script(submit)
    for at in range(0, len(text), size):
        end = end_of(text) if at + size >= len(text) else None
        worker.post(deltas(Entry(submit.handle, text[at : at + size], at, end=end)))
