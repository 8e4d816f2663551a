"""An error names the prompt that it is about, where a call has several."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from tests.helpers.fake_worker import FakeWorker
from tests.helpers.played_answers import answer

from slipstream import AsyncClient, BadRequestError, Client, EngineError
from slipstream_ipc.messages import Fault, Rejected, Submit

FAULTS = {
    "long": Fault("bad_request", "prompt: got 9000 tokens, allowed: at most 2047", "prompt"),
    "deadly": Fault("engine", "the forward pass failed"),
}
NAMED = {
    "long": (BadRequestError, "prompts[1]: prompt: got 9000 tokens, allowed: at most 2047"),
    "deadly": (EngineError, "prompts[1]: the forward pass failed"),
}


def reject(worker: FakeWorker, body: Any) -> None:
    """A script: reject some prompts, with all their answers."""
    if not isinstance(body, Submit):
        return
    fault = FAULTS.get(body.text or "")
    if fault is None:
        answer(worker, body, "fine")
    else:
        worker.post(*[Rejected(each.handle, fault) for each in (body, *body.others)])


@pytest.mark.parametrize("prompt", NAMED)
def test_the_prompt_of_a_list_is_named(worker: FakeWorker, prompt: str) -> None:
    worker.script = reject
    kind, text = NAMED[prompt]
    with Client(worker.address) as client:
        for ask in (
            lambda: client.generate_many(["short", prompt]),
            lambda: client.generate_many(["short", prompt], n=2),
            lambda: list(client.stream_many(["short", prompt], n=2)),
        ):
            with pytest.raises(kind) as caught:
                ask()
            assert str(caught.value) == text
            assert caught.value.fault.field == FAULTS[prompt].field

    async def main() -> None:
        async with AsyncClient(worker.address) as client:
            with pytest.raises(kind) as caught:
                await client.generate_many(["short", prompt])
            assert str(caught.value) == text
            with pytest.raises(kind) as caught:
                async for _ in client.stream_many(["short", prompt]):
                    pass
            assert str(caught.value) == text

    asyncio.run(main())


def test_the_only_prompt_needs_no_name(worker: FakeWorker) -> None:
    worker.script = reject
    with Client(worker.address) as client:
        for options in ({}, {"n": 2}):
            with pytest.raises(BadRequestError, match=r"^prompt: got 9000 tokens"):
                client.generate("long", **options)
            with pytest.raises(BadRequestError, match=r"^prompt: got 5, allowed: "):
                client.generate(5, **options)  # type: ignore[arg-type]
        with pytest.raises(BadRequestError, match=r"^prompts\[1\]: prompt: got 5, allowed: "):
            client.generate_many(["short", 5])  # type: ignore[list-item]


def test_errors_of_the_connection_name_no_prompt(worker: FakeWorker) -> None:
    client = Client(worker.address)
    streams = client.stream_many(["one", "two"])
    worker.expect(Submit)
    client.close()
    with pytest.raises(Exception, match="closed") as caught:
        list(streams)
    assert "prompts[" not in str(caught.value)
