"""Short requests of all kinds, many of which are not read to their ends.

- The same seed and number give the same kinds in the same order.
- Requests to be cut short (aborted, closed, disconnected) ask for far more than is read, so that
  they are running when they are cut.
- A client that vanishes is a process, `python -m slipstream_verify.soak.soak_load ADDRESS
  NUM_STREAMS`: it opens its streams, reads a delta of each, reports that, and is killed.
"""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections import Counter, defaultdict
from collections.abc import Callable
from functools import partial
from typing import Literal, get_args
from urllib.parse import urlsplit

import msgspec
import numpy as np
from prometheus_client.parser import text_string_to_metric_families

from slipstream.client.async_client import AsyncClient
from slipstream.client.client import Client
from slipstream_bench.common.load.http_client import HttpClient, RequestFailedError
from slipstream_ipc.messages import SamplingParams

LONG = SamplingParams(max_tokens=2000)
Kind = Literal["read", "aborted", "closed", "http", "http_disconnected", "vanished"]
KINDS: tuple[Kind, ...] = get_args(Kind)
VANISHING = 50  # streams per vanishing client
_SHARES = (0.70, 0.06, 0.06, 0.10, 0.06, 0.02)
_MOST_TOKENS = 8


def main() -> int:
    """Open the streams, report, and wait to be killed."""
    address, num_streams = sys.argv[1], int(sys.argv[2])
    with Client(address) as client:
        streams = [client.stream([100 + number], LONG) for number in range(num_streams)]
        for stream in streams:
            next(stream)
        print("ready", flush=True)
        sys.stdin.buffer.read()
    return 0


class SoakLoad:
    """Sends requests to one stack, over one lasting client."""

    def __init__(self, client: AsyncClient, http_address: str, seed: int, concurrency: int) -> None:
        self.counts: Counter[str] = Counter()
        self.failures: Counter[str] = Counter()
        self._client = client
        self._http_address = http_address
        self._http = HttpClient(urlsplit(http_address), {})
        self._random = np.random.default_rng(seed)
        self._concurrency = concurrency
        self._vanishing: list[asyncio.Task[None]] = []
        self._is_vanishing = asyncio.Semaphore(1)
        self._num_to_vanish = 0
        self.num_accepted = 0  # of all streams that were opened

    async def gauges(self) -> dict[str, float]:
        """The stack's metrics by their names without the prefix, as sums over all labels."""
        body = bytearray()
        try:
            await self._http.exchange("GET", "/metrics", None, body.extend)
        finally:
            self._http.close()  # the number of idle connections varies
        families = text_string_to_metric_families(body.decode())
        sums: defaultdict[str, float] = defaultdict(float)  # over the processes
        for sample in (sample for family in families for sample in family.samples):
            sums[sample.name.partition(":")[2]] += sample.value
        return sums

    async def run(self, num_requests: int, on_done: Callable[[int], object]) -> None:
        """Run `num_requests` requests to their ends."""
        places = asyncio.Semaphore(self._concurrency)
        running: set[asyncio.Task[None]] = set()

        def done(task: asyncio.Task[None]) -> None:
            running.discard(task)
            places.release()
            on_done(1)
            if not task.cancelled() and task.exception() is not None:
                error = task.exception()
                self.failures[f"{type(error).__name__}: {error}"[:200]] += 1

        for _ in range(num_requests):
            await places.acquire()
            kind = KINDS[int(self._random.choice(len(KINDS), p=_SHARES))]
            length, *prompt = self._random.integers(1, 1000, 5).tolist()
            task = asyncio.ensure_future(self._one(kind, prompt, 1 + length % _MOST_TOKENS))
            running.add(task)
            task.add_done_callback(done)
        while running:
            await asyncio.wait(running)
        self._flush_vanishing()
        await asyncio.gather(*self._vanishing)
        self._vanishing.clear()
        self._http.close()  # the number of idle connections varies

    async def _one(self, kind: Kind, prompt: list[int], length: int) -> None:
        params = SamplingParams(max_tokens=length)
        match kind:
            case "read":
                await self._client.generate(prompt, params)
            case "aborted":
                stream = self._client.stream(prompt, LONG)
                await anext(stream)
                stream.abort()
                async for _ in stream:
                    pass
            case "closed":
                async with self._client.stream(prompt, LONG) as stream:
                    await anext(stream)
            case "http":
                await self._over_http(prompt, length)
            case "http_disconnected":
                await self._disconnect(prompt)
            case "vanished":
                self._num_to_vanish += 1
                if self._num_to_vanish == VANISHING:
                    self._flush_vanishing()
        self.counts[kind] += 1
        self.num_accepted += kind != "vanished"

    async def _over_http(self, prompt: list[int], length: int) -> None:
        body = {"prompt": prompt, "max_tokens": length, "stream": True}
        await self._http.exchange(
            "POST", "/v1/completions", msgspec.json.encode(body), lambda piece: None
        )

    async def _disconnect(self, prompt: list[int]) -> None:
        """Request a long answer and disconnect when something arrives."""
        address = urlsplit(self._http_address)
        body = msgspec.json.encode(
            {"prompt": prompt, "max_tokens": LONG.max_tokens, "stream": True}
        )
        reader, writer = await asyncio.open_connection(address.hostname, address.port)
        head = f"POST /v1/completions HTTP/1.1\r\nHost: {address.netloc}\r\n"
        head += f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
        writer.write(head.encode() + body)
        try:
            if not (await reader.read(64)).startswith(b"HTTP/1.1 200"):
                raise RequestFailedError("refused")
        finally:
            writer.transport.abort()

    def _flush_vanishing(self) -> None:
        num, self._num_to_vanish = self._num_to_vanish, 0
        if num:
            self._vanishing.append(asyncio.ensure_future(self._vanish(num)))

    async def _vanish(self, num_streams: int) -> None:
        """Run one vanishing client at a time, beside everything else."""
        async with self._is_vanishing:
            died = partial(_start_and_kill, self._client.address, num_streams)
            if await asyncio.to_thread(died):
                self.num_accepted += num_streams
            else:
                self.failures["a client that was to vanish did not get its streams"] += 1


def _start_and_kill(address: str, num_streams: int) -> bool:
    argv = [sys.executable, "-P", "-m", "slipstream_verify.soak.soak_load", address]
    with subprocess.Popen(
        [*argv, str(num_streams)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as process:
        assert process.stdout is not None
        is_ready = process.stdout.readline() == b"ready\n"
        process.kill()
    return is_ready


if __name__ == "__main__":
    sys.exit(main())
