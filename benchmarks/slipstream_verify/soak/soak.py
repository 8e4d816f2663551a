"""`slipstream bench soak`: does anything grow over many short requests?

Flat means: halfway and at the end, each process's own memory (anonymous, swapped out or not) is
within TOLERANCE of its size after a tenth of the requests, and its file descriptors within that or
two of them. The exit code is 0 if all processes are flat and no request failed.

Processes are measured when nothing runs and the grace time is over, so what they hold then is a
leak or a cache.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import time

from msgspec import Struct
from tqdm import tqdm

from slipstream.cli.options.parser import Parser
from slipstream.client.async_client import AsyncClient
from slipstream.stack.plan.log_level import log_level
from slipstream.stack.stack import Stack
from slipstream.stack.supervisor_events import SpareReady
from slipstream_bench.common import process_census
from slipstream_bench.common.options import Option, add, fill_in, integer
from slipstream_bench.common.process_census import Holding
from slipstream_bench.common.report import Row, add_result, check_files, table, write_result
from slipstream_verify.soak.soak_load import SoakLoad

TOLERANCE = 0.05
SHARES = (0.1, 0.5, 1.0)

_MODEL = "simulated:step_ms=1,prefill_us=0"
_LEAST_WARM_UP = 4_000  # first of all: arenas grow to the size that the load needs
_GRACE_S = 0.2  # how long ended streams are kept: little beside what may grow
_CLIENT_TIMEOUT_S = 1.0
_WITHIN_S = 60.0  # for the spares to be ready, and for the stack to be idle
_LOOK_S = 0.1
_HELD = ("num_requests_running", "num_requests_waiting", "num_streams_kept")
_CLIENTS = 2  # the load's, and the front
_NUM_BLOCKS = 4096  # small enough for a full prefix cache, all memory touched, before measuring
_FEW_FDS = 2
_FEW_BYTES = 4 * 2**20  # left with an allocator by a busy moment; 42 bytes a request over 100,000
_CLIENT = "this client"


class Growth(Struct, frozen=True):
    """One process at the three moments. growth: the largest relative change from the first."""

    process: str
    own_bytes: list[int]
    num_fds: list[int]
    own_growth: float
    fds_growth: float
    is_flat: bool


class SoakResult(Struct, frozen=True, kw_only=True):
    """The result of a run. requests: their number by kind."""

    model: str
    seed: int
    num_requests: int
    duration_s: float
    requests: dict[str, int]
    failures: dict[str, int]
    shares: list[float]
    processes: list[Growth]
    tolerance: float
    is_flat: bool
    orphans: int

    @property
    def is_good(self) -> bool:
        """Whether nothing grew, failed or was left behind."""
        return self.is_flat and not self.failures and not self.orphans


_OPTIONS = (
    Option("requests", integer(1), "how many", 100_000, 4_000),
    Option("concurrency", integer(1), "requests at a time", 128),
    Option("seed", integer(0), "of the requests", 0),
)


def add_options(parser: Parser) -> None:
    """The benchmark's options."""
    add(parser, _OPTIONS)
    parser.add_argument("--model", metavar="MODEL", default=_MODEL, help="default: %(default)s")
    add_result(parser)
    parser.add_argument("--verbose", action="store_true", help="show the processes' logs")
    parser.set_defaults(run=bench_soak)


def bench_soak(arguments: argparse.Namespace) -> int:
    """Run and report. Raises: BadRequestError."""
    check_files(arguments)
    fill_in(arguments, _OPTIONS)
    num_requests = arguments.requests
    with process_census.marked() as mark, log_level("INFO" if arguments.verbose else "ERROR"):
        with Stack(
            arguments.model,
            http_port=0,
            grace_s=_GRACE_S,
            client_timeout_s=_CLIENT_TIMEOUT_S,
            num_blocks=_NUM_BLOCKS,
        ) as stack:
            spares = _await_spares(stack)
            begin_s = time.monotonic()
            load, samples = asyncio.run(_soak(stack, spares, num_requests, arguments))
            duration_s = time.monotonic() - begin_s
        left = process_census.marked_pids(mark)
    processes = growths(samples)
    result = SoakResult(
        model=arguments.model,
        seed=arguments.seed,
        num_requests=num_requests,
        duration_s=round(duration_s, 3),
        requests=dict(load.counts),
        failures=dict(load.failures),
        shares=list(SHARES),
        processes=processes,
        tolerance=TOLERANCE,
        is_flat=all(one.is_flat for one in processes),
        orphans=len(left),
    )
    print("\n".join(lines_of(result)), flush=True)
    write_result(arguments.json, result)
    return 0 if result.is_good else 1


def growths(samples: list[dict[str, Holding]]) -> list[Growth]:
    """The growth of each process present in every sample. Pure."""
    first = samples[0]
    found: list[Growth] = []
    for name in first:
        held = [sample[name] for sample in samples if name in sample]
        own, fds = [one.own_bytes for one in held], [one.num_fds for one in held]
        own_growth = max(abs(one / own[0] - 1) for one in own)
        fds_growth = max(abs(one / fds[0] - 1) for one in fds)
        are_few = max(abs(one - fds[0]) for one in fds) <= _FEW_FDS
        is_little = max(abs(one - own[0]) for one in own) <= _FEW_BYTES
        is_flat = (
            len(held) == len(samples)
            and (own_growth <= TOLERANCE or is_little)
            and (fds_growth <= TOLERANCE or are_few)
        )
        found.append(Growth(name, own, fds, round(own_growth, 4), round(fds_growth, 4), is_flat))
    return found


def lines_of(result: SoakResult) -> list[str]:
    """The result as lines of text."""
    counts = ", ".join(f"{number} {kind}" for kind, number in sorted(result.requests.items()))
    rows: list[Row] = []
    for one in result.processes:
        row: Row = {"process": one.process}
        for share, own, fds in zip(result.shares, one.own_bytes, one.num_fds, strict=False):
            row[f"mib_at_{share:.0%}"] = round(own / 2**20, 2)
            row[f"fds_at_{share:.0%}"] = fds
        row["growth_percent"] = round(100 * one.own_growth, 2)
        row["is_flat"] = one.is_flat
        rows.append(row)
    load = f"{result.num_requests} requests after {_num_warm_up(result.num_requests)} to warm up"
    lines = [
        f"{load}, {result.duration_s:.1f} s, {result.model}",
        counts,
        f"failed {sum(result.failures.values())}, orphans {result.orphans}",
        "",
        *table(rows),
        "",
        f"flat within {result.tolerance:.0%}: {'yes' if result.is_flat else 'NO'}",
    ]
    lines += [f"failed: {number} x {why}" for why, number in result.failures.items()]
    return lines


def _num_warm_up(num_requests: int) -> int:
    return max(_LEAST_WARM_UP, round(SHARES[0] * num_requests))


async def _soak(
    stack: Stack, spares: dict[int, str], num_requests: int, arguments: argparse.Namespace
) -> tuple[SoakLoad, list[dict[str, Holding]]]:
    samples: list[dict[str, Holding]] = []
    names = spares | {pid: name for name, pid in stack.pids.items()}
    assert stack.http_address is not None
    async with AsyncClient(stack.address) as client:
        load = SoakLoad(client, stack.http_address, arguments.seed, arguments.concurrency)
        done = 0
        with tqdm(total=num_requests, unit="request", disable=None, leave=False) as bar:
            await load.run(_num_warm_up(num_requests), lambda num: None)
            await _until_idle(load)
            load.counts.clear()
            for share in SHARES:
                until = round(share * num_requests)
                await load.run(until - done, bar.update)
                done = until
                await _until_idle(load)
                pids = process_census.tree_pids(stack.pids["supervisor"], names)
                samples.append(process_census.holdings({**pids, _CLIENT: os.getpid()}))
    return load, samples


async def _until_idle(load: SoakLoad) -> None:
    """Wait until the stack knows of every request and holds none of them, nor their clients.

    If it still holds something after a while, that is a failure of the load.
    """
    held: dict[str, float] = {}
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(_WITHIN_S):
            while True:
                held = await load.gauges()
                is_known = held["requests_accepted_total"] >= load.num_accepted
                is_empty = not any(held[name] for name in _HELD)
                if is_known and is_empty and held["num_clients"] <= _CLIENTS:
                    return
                await asyncio.sleep(_LOOK_S)
    load.failures[f"still held after {_WITHIN_S:g} s: {held}"] += 1


def _await_spares(stack: Stack) -> dict[int, str]:
    """Wait for both spares, whose startup would count as growth; returns their names by pid."""
    found: dict[int, str] = {}
    deadline = time.monotonic() + _WITHIN_S
    while len(found) < 2:
        event = stack.next_event(max(0.0, deadline - time.monotonic()))
        if event is None:
            break
        if isinstance(event, SpareReady):
            found[event.pid] = f"spare {event.name}"
    return found
