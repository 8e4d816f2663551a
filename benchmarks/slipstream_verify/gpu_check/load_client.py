"""The client process of a section's loads.

`python -m slipstream_verify.gpu_check.load_client ADDRESS` runs loads on command. It prints `{}`
when ready. Then each line of JSON on standard input is a `ClientLoad`, and is answered by a line of
results on standard output. It ends with its input.

Deltas are read by column, as `Client.stream_many` reads them, so that one process keeps up with the
fastest loads; or by a task per stream, as callers of the AsyncClient have.
"""

from __future__ import annotations

import asyncio
import sys
import time

import msgspec
import numpy as np
from msgspec import Struct

from slipstream.client.async_client import AsyncClient
from slipstream.errors import SlipstreamError
from slipstream_bench.common.live_streams import CLIENT, LiveStreams
from slipstream_bench.common.measures import RequestTimeline, summary
from slipstream_bench.common.variants import Variant, params_of
from slipstream_lab.common.bare_loop import random_prompts

_WITHIN_S = 60.0


class ClientLoad(Struct, frozen=True, forbid_unknown_fields=True):
    """Requests that are submitted all at once; the prompts of two loads share prefixes.

    spread: lengths are drawn uniformly from this share of `prompt_len` and `num_tokens` to them.
    running: how many the server runs at a time, if it has the others wait; default: all.
    """

    num: int
    prompt_len: int
    num_tokens: int
    vocab_size: int
    variant: Variant = "plain"
    seed: int = 0
    pids: dict[str, int] = {}  # processes whose CPU time is measured, by name
    by_task: bool = False  # a task for each stream reads it by `async for`
    spread: float = 1.0
    running: int | None = None


def lengths_of(load: ClientLoad) -> tuple[list[int], list[int]]:
    """The prompt's and the output's length of each request."""
    if load.spread >= 1:
        return [load.prompt_len] * load.num, [load.num_tokens] * load.num
    random = np.random.default_rng((load.seed, load.num))
    prompts, tokens = (
        random.integers(max(1, int(load.spread * longest)), longest + 1, load.num).tolist()
        for longest in (load.prompt_len, load.num_tokens)
    )
    return prompts, tokens


def main() -> int:
    """Run loads until standard input ends."""
    address = sys.argv[1]
    decoder = msgspec.json.Decoder(ClientLoad)
    _write({})
    for line in sys.stdin.buffer:
        try:
            load = decoder.decode(line)
            run = _run_by_task if load.by_task else _run
            result = run(address, load)
        except SlipstreamError as error:
            result = {"error": str(error)}
        _write(result)
    return 0


def _write(what: dict[str, object]) -> None:
    sys.stdout.buffer.write(msgspec.json.encode(what) + b"\n")
    sys.stdout.buffer.flush()


def _run(address: str, load: ClientLoad) -> dict[str, object]:
    """Run a load; throughput and CPU time cover the span in which all streams run."""
    prompts = random_prompts(load.num, load.prompt_len, load.vocab_size, load.seed)
    requests = [
        (prompt[:prompt_len], params_of(load.variant, num_tokens))
        for prompt, prompt_len, num_tokens in zip(prompts, *lengths_of(load), strict=True)
    ]
    with LiveStreams(address, requests, running=load.running) as live:
        live.wait_until_running(0.0)
        window = live.window(_WITHIN_S, load.pids)
        live.wait_until_over(_WITHIN_S)
        output_tokens = sum(tally.num_tokens for tally in live.tallies)
    cpu_us = {
        f"{name}_cpu_us_per_token": round(window.cpu_us_per_token(name), 3)
        for name in (*load.pids, CLIENT)
        if window.num_tokens
    }
    return {
        "output_tokens": output_tokens,
        "window_s": round(window.end_s - window.begin_s, 4),
        "window_tokens": window.num_tokens,
        "tokens_per_s": round(window.tokens_per_s, 1),
        "tokens_per_delta": round(window.coalescing, 3),
        **cpu_us,
    }


def _run_by_task(address: str, load: ClientLoad) -> dict[str, object]:
    """Run a load; latencies are those that each task sees."""
    prompts = random_prompts(load.num, load.prompt_len, load.vocab_size, load.seed)
    params = params_of(load.variant, load.num_tokens)
    num_chars = 0

    async def read(client: AsyncClient, index: int) -> RequestTimeline:
        nonlocal num_chars
        timeline = RequestTimeline(time.perf_counter())
        async for delta in client.stream(prompts[index], params):
            num_chars += len(delta.text)
            if delta.num_tokens:
                timeline.note(time.perf_counter(), delta.num_tokens)
        return timeline

    async def read_all() -> list[RequestTimeline]:
        async with AsyncClient(address, timeout_s=_WITHIN_S) as client:
            return await asyncio.gather(*(read(client, index) for index in range(load.num)))

    return {**summary(asyncio.run(read_all())), "output_chars": num_chars}


if __name__ == "__main__":
    raise SystemExit(main())
