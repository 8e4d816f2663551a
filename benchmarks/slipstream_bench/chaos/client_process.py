"""A client process that may be killed at any moment.

`python -m slipstream_bench.chaos.client_process`, with its config (JSON) as the first line on
standard input; it ends when standard input does. It reads its requests' streams to their ends and
writes what it reads into a journal; where earlier lives left journals, it continues after them.

- Sync and asyncio clients alternate, over clients and over the lives of each.
- A slow reader pauses only its own reading; the process's other streams continue.
"""

from __future__ import annotations

import asyncio
import os
import sys
import threading
from concurrent.futures import ThreadPoolExecutor

import msgspec
from msgspec import Struct

from slipstream.client.async_client import AsyncClient
from slipstream.client.client import Client
from slipstream.errors import SlipstreamError
from slipstream_bench.chaos.chaos_workload import ChaosRequest
from slipstream_bench.chaos.follow import Follower, Read, read_before
from slipstream_bench.chaos.journal import JournalWriter

_STANDARD_INPUT = 0


class ClientConfig(Struct, frozen=True):
    """What a client reads, and where it writes.

    address: of the stack, or of its HTTP front. earlier: journals of its former lives, oldest
    first.
    """

    address: str
    requests: tuple[ChaosRequest, ...]
    journal: str
    earlier: tuple[str, ...]
    concurrency: int
    timeout_s: float
    is_async: bool


def main() -> int:
    """Read all streams to their ends; exit code 0."""
    config = read_config()
    before = read_before(config.earlier)
    journal = JournalWriter(config.journal)
    followers = [
        Follower(request, read, journal)
        for request in config.requests
        if not (read := before.get(request.index, Read())).is_over
    ]
    # running streams first: they have no other reader, and their time is limited
    followers.sort(key=lambda follower: follower.request.index not in before)
    if config.is_async:
        asyncio.run(_follow_all_async(config, followers))
    else:
        _follow_all(config, followers)
    return 0


def read_config() -> ClientConfig:
    """Read the config; from now on the process ends with its standard input."""
    config = msgspec.json.decode(sys.stdin.buffer.readline(), type=ClientConfig)
    threading.Thread(target=_end_with_parent, daemon=True).start()
    return config


def _end_with_parent() -> None:
    while os.read(_STANDARD_INPUT, 4096):  # unbuffered: an exit would wait for the buffer's lock
        pass
    os._exit(3)


def _follow_all(config: ClientConfig, followers: list[Follower]) -> None:
    nothing = threading.Event()  # never set; slow readers wait on it with a timeout

    def follow(client: Client, follower: Follower) -> None:
        while True:
            try:
                with follower.open(client) as stream:
                    for delta in stream:
                        if pause_s := follower.take(stream, delta):
                            nothing.wait(pause_s)
                return
            except SlipstreamError as error:
                if not follower.is_asked_again(error):
                    return

    with (
        Client(config.address, timeout_s=config.timeout_s) as client,
        ThreadPoolExecutor(config.concurrency) as threads,
    ):
        for done in [threads.submit(follow, client, follower) for follower in followers]:
            done.result()


async def _follow_all_async(config: ClientConfig, followers: list[Follower]) -> None:
    places = asyncio.Semaphore(config.concurrency)

    async def follow(client: AsyncClient, follower: Follower) -> None:
        async with places:
            while True:
                try:
                    async with follower.open_async(client) as stream:
                        async for delta in stream:
                            if pause_s := follower.take(stream, delta):
                                await asyncio.sleep(pause_s)
                    return
                except SlipstreamError as error:
                    if not follower.is_asked_again(error):
                        return

    async with AsyncClient(config.address, timeout_s=config.timeout_s) as client:
        await asyncio.gather(*(follow(client, follower) for follower in followers))


if __name__ == "__main__":
    sys.exit(main())
