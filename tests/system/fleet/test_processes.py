"""Replicas of real processes, killed under a client's streams."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Iterator
from typing import Any

import pytest
from tests.helpers.stacks import spareless_stack

from slipstream import AsyncClient, Client, Stack
from slipstream.demo_model import MODEL_PATH

MODEL = f"simulated:step_ms=10,prefill_us=20,tokenizer={MODEL_PATH},mode=chain"
PROMPTS = [f"Chapter {n}: how names are bound, and where." for n in range(16)]


@pytest.fixture
def stacks() -> Iterator[list[Stack]]:
    """Two replicas."""
    with spareless_stack(MODEL) as first, spareless_stack(MODEL) as second:
        yield [first, second]


def kill(stack: Stack) -> None:
    """End a whole replica, as the loss of its machine does."""
    os.kill(stack.pids["supervisor"], signal.SIGKILL)


@pytest.mark.process
def test_replica_killed_under_a_client(stacks: list[Stack]) -> None:
    with stacks[1].client() as alone:
        plain = alone.generate_many(PROMPTS, max_tokens=120, seed=1)
    with Client(",".join([stack.address for stack in stacks])) as client:
        streams = [client.stream(prompt, max_tokens=120, seed=1) for prompt in PROMPTS]
        texts = [next(stream).text for stream in streams]
        kill(stacks[streams[0]._state.member])
        texts = [
            text + "".join([delta.text for delta in stream])
            for text, stream in zip(texts, streams, strict=True)
        ]
    assert texts == [answer.text for answer in plain]
    assert streams[0]._state.moves == 1


async def _texts(address: str, stacks: list[Stack]) -> tuple[list[str], list[int]]:
    async with AsyncClient(address) as client:
        streams = [client.stream(prompt, max_tokens=120, seed=1) for prompt in PROMPTS]
        firsts = [(await anext(stream)).text for stream in streams]
        kill(stacks[streams[0]._state.member])

        async def rest(stream: Any) -> str:
            return "".join([delta.text async for delta in stream])

        rests = await asyncio.gather(*[rest(stream) for stream in streams])
        texts = [first + more for first, more in zip(firsts, rests, strict=True)]
        return texts, [stream._state.moves for stream in streams]


@pytest.mark.process
def test_replica_killed_under_an_asyncio_client(stacks: list[Stack]) -> None:
    with stacks[1].client() as alone:
        plain = alone.generate_many(PROMPTS, max_tokens=120, seed=1)
    address = ",".join([stack.address for stack in stacks])
    texts, moves = asyncio.run(_texts(address, stacks))
    assert texts == [answer.text for answer in plain]
    assert moves[0] == 1
