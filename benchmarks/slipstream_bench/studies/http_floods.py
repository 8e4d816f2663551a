"""Idle connections and malformed requests by the million, beside streams of an honest client.

    python -m slipstream_bench.studies.http_floods [--idle N] [--malformed N] [--json FILE]

A stack with a simulated device serves one honest client, which asks for the same streamed answer
over and over. Idle connections have one request answered and stay open; malformed requests come
over new connections, 64 at a time, from changing loopback addresses, as each leaves a port in
TIME_WAIT. Printed are the front's memory and how many of the honest answers were identical; the
exit code is 1 where one was not, or where a malformed request was answered by anything but a 4xx.
"""

from __future__ import annotations

import argparse
import asyncio
import http.client
import json
import random
import sys
import time
from collections.abc import Callable
from typing import Any

import psutil

import slipstream
from slipstream_bench.common.process_census import allow_many_files

_MIB = 2**20
_AT_ONCE = 64
_HONEST = {"prompt": [1, 2, 3], "max_tokens": 64, "temperature": 0, "stream": True}
_POST = b"POST /v1/completions HTTP/1.1\r\nHost: 127.0.0.1\r\n"
_MALFORMED = [
    b"nonsense\r\n\r\n",
    b"\x16\x03\x01\0\0",
    b"\0" * 100,
    b"GET / HTTP/1.1\r\n\r\n",
    b"GET / HTTP/1.1\r\nHost: 127.0.0.1\r\nHost: 127.0.0.1\r\n\r\n",
    _POST + b"Content-Length: -1\r\n\r\n",
    _POST + b"Content-Length: 1\r\nTransfer-Encoding: chunked\r\n\r\n",
    _POST + b"Transfer-Encoding: chunked\r\n\r\nzz\r\n",
    b"GET / HTTP/9.9\r\nHost: 127.0.0.1\r\n\r\n",
    b"GET / HTTP/1.1\r\nHost: 127.0.0.1\r\nA\0B: c\r\n\r\n",
]


class Honest:
    """Asks for one streamed answer again and again, and compares the events' text."""

    def __init__(self, port: int) -> None:
        self._port = port
        self.num_answers = 0
        self.num_identical = 0
        self.longest_s = 0.0

    def ask(self) -> list[str]:
        """The texts of one answer's events, joined by choice."""
        connection = http.client.HTTPConnection("127.0.0.1", self._port, timeout=120)
        body = json.dumps({"model": "m", **_HONEST})
        connection.request("POST", "/v1/completions", body, {"Content-Type": "application/json"})
        lines = connection.getresponse().read().decode().splitlines()
        connection.close()
        events = [json.loads(line[6:]) for line in lines if line.startswith("data: {")]
        text = "".join(event["choices"][0]["text"] for event in events if event["choices"])
        return [text, "[DONE]" if "data: [DONE]" in lines else "cut off"]

    def compare_until(self, is_over: Callable[[], bool], expected: list[str]) -> None:
        """Ask until `is_over`."""
        while not is_over():
            begin = time.monotonic()
            self.num_identical += self.ask() == expected
            self.num_answers += 1
            self.longest_s = max(self.longest_s, time.monotonic() - begin)


async def hold_idle(port: int, num: int) -> list[asyncio.StreamWriter]:
    """Connections that stay open after one request each."""
    held: list[asyncio.StreamWriter] = []
    for number in range(num):
        local = (f"127.0.1.{number % 250 + 1}", 0)
        reader, writer = await asyncio.open_connection("127.0.0.1", port, local_addr=local)
        writer.write(b"GET /version HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n")
        await reader.readuntil(b"}")
        held.append(writer)
    return held


async def send_malformed(port: int, num: int, seed: int) -> dict[str, int]:
    """How often each status came back; "closed" where the connection ended without one."""
    statuses: dict[str, int] = {}
    rng = random.Random(seed)  # noqa: S311  (a load, no secret)
    left = num

    async def work() -> None:
        nonlocal left
        while left > 0:
            left -= 1
            local = (f"127.0.{rng.randrange(2, 250)}.{rng.randrange(1, 250)}", 0)
            reader, writer = await asyncio.open_connection("127.0.0.1", port, local_addr=local)
            try:
                writer.write(rng.choice(_MALFORMED))
                line = await reader.readline()
            except ConnectionError:
                line = b""
            status = line.split(b" ")[1].decode() if line.startswith(b"HTTP/1.1 ") else "closed"
            statuses[status] = statuses.get(status, 0) + 1
            writer.transport.abort()

    await asyncio.gather(*(work() for _ in range(_AT_ONCE)))
    return statuses


def measure(num_idle: int, num_malformed: int) -> dict[str, Any]:
    """One run."""
    allow_many_files()
    with slipstream.Stack("simulated:step_ms=2", http_port=0) as stack:
        assert stack.http_address is not None
        port = int(stack.http_address.rpartition(":")[2])
        front = psutil.Process(stack.pids["http"])
        honest = Honest(port)
        expected = honest.ask()
        rss = [front.memory_info().rss]

        async def run() -> tuple[int, dict[str, int], float]:
            held = await hold_idle(port, num_idle)
            rss.append(front.memory_info().rss)
            begin = time.monotonic()
            flood = asyncio.create_task(send_malformed(port, num_malformed, 0))
            await asyncio.to_thread(honest.compare_until, flood.done, expected)
            statuses, seconds = await flood, time.monotonic() - begin
            rss.append(front.memory_info().rss)
            still_open = sum(not writer.transport.is_closing() for writer in held)
            for writer in held:
                writer.transport.abort()
            return still_open, statuses, seconds

        still_open, statuses, seconds = asyncio.run(run())
        honest.compare_until(lambda: honest.num_answers > 0, expected)
        return {
            "benchmark": "http-floods",
            "idle_connections": num_idle,
            "idle_still_open": still_open,
            "malformed_requests": num_malformed,
            "statuses": statuses,
            "seconds": round(seconds, 1),
            "honest_answers": honest.num_answers,
            "honest_identical": honest.num_identical,
            "longest_honest_answer_s": round(honest.longest_s, 3),
            "front_mib_before": round(rss[0] / _MIB, 1),
            "front_mib_with_idle": round(rss[1] / _MIB, 1),
            "front_mib_after": round(rss[2] / _MIB, 1),
            "front_is_the_same_process": front.is_running(),
        }


def main() -> int:
    """Measure, print, judge."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--idle", type=int, default=16_384, metavar="N")
    parser.add_argument("--malformed", type=int, default=1_000_000, metavar="N")
    parser.add_argument("--json", metavar="FILE")
    arguments = parser.parse_args()
    row = measure(arguments.idle, arguments.malformed)
    for name, value in row.items():
        print(f"{name:27} {value}")
    if arguments.json:
        with open(arguments.json, "w", encoding="utf-8") as file:
            file.write(json.dumps([row], indent=2) + "\n")
    is_good = row["honest_identical"] == row["honest_answers"] and row["front_is_the_same_process"]
    return 0 if is_good and all(each.startswith("4") for each in row["statuses"]) else 1


if __name__ == "__main__":
    sys.exit(main())
