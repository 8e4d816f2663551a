"""The undisturbed run: one client, no faults. It shares only the library with the clients of the
disturbed run.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

from slipstream.client.async_client import AsyncClient
from slipstream.outputs import RequestOutput
from slipstream.stack.stack import Stack
from slipstream_bench.chaos.chaos_workload import ChaosRequest
from slipstream_bench.chaos.compare import ChaosAnswer

_CONCURRENCY = 128
_TIMEOUT_S = 120.0


def undisturbed(
    stack: Stack, requests: Sequence[ChaosRequest], on_done: Callable[[], object]
) -> list[ChaosAnswer]:
    """The answers, in the order of the requests. Raises: SlipstreamError."""
    return asyncio.run(_all(stack.address, requests, on_done))


async def _all(
    address: str, requests: Sequence[ChaosRequest], on_done: Callable[[], object]
) -> list[ChaosAnswer]:
    places = asyncio.Semaphore(_CONCURRENCY)

    async def one(client: AsyncClient, request: ChaosRequest) -> ChaosAnswer:
        async with places:
            done = await client.generate(
                request.prompt, request.params, stream_id=request.stream_id
            )
        on_done()
        return _answer(done)

    async with AsyncClient(address, timeout_s=_TIMEOUT_S) as client:
        return await asyncio.gather(*(one(client, request) for request in requests))


def _answer(done: RequestOutput) -> ChaosAnswer:
    logprobs = done.logprobs
    return ChaosAnswer(
        done.text,
        tuple(done.token_ids),
        None
        if logprobs is None
        else tuple(
            tuple((each.token_id, each.logprob, each.rank) for each in token.values())
            for token in logprobs
        ),
        done.finish_reason,
        done.stop_reason,
        tuple(done.prompt_token_ids),
    )
