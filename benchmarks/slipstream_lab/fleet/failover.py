"""`slipstream bench failover`: throughput while a fleet's replicas are killed, one after another.

A client keeps a number of streams open at replicas over simulated devices, whose steps take their
time however many streams run. Every replica is killed once, by SIGKILL to the process that
supervises it, and the next one some seconds after it has come back. Then each stream that ran at a
kill is computed once more, undisturbed, and its text is compared.

A stream's gap is the longest time between two of its deltas from the kill to the replica's return.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import signal
from collections.abc import Sequence
from dataclasses import dataclass, field
from time import monotonic
from typing import Any

import numpy as np
import uvloop

from slipstream.cli.options.parser import Parser
from slipstream.client.async_client import AsyncClient
from slipstream.demo.gaps import GapSpan, longest_gap
from slipstream.demo_model import MODEL_PATH
from slipstream.stack.plan.log_level import log_level
from slipstream.stack.supervisor_events import ProcessRestarted
from slipstream_bench.common.measures import Row, cannot_measure
from slipstream_bench.common.options import Option, add, fill_in, integer, number
from slipstream_bench.common.pictures import Mark, stacked_areas
from slipstream_bench.common.report import add_common, check_common, print_rows
from slipstream_lab.common.served_fleet import ServedFleet
from slipstream_lab.common.simulated_stack import simulation_note

_BIN_S = 0.1
_POLL_S = 0.02
_BACK_S = 120.0  # in which a killed replica must be back
_SPREAD = 0.5  # of the lengths of answers, so that they do not end together
_COLUMNS = (
    *("replica", "killed_at_s", "back_after_s", "running", "cut_off", "identical"),
    *("gap_p50_ms", "gap_max_ms", "others_gap_max_ms", "tokens_per_s_before", "tokens_per_s_away"),
)
_OPTIONS = (
    Option("replicas", integer(2, 16), "how many there are", 3, 2),
    Option("streams", integer(2, 4096), "open at a time, at all replicas", 96, 16),
    Option("output_len", integer(16, 3000), "tokens of an answer, in the mean", 400, 100),
    Option("step_ms", number(lambda value: 1 <= value <= 1000, "in [1, 1000]"), "of a step", 20.0),
    Option(
        "prefill_us",
        number(lambda value: 0 <= value <= 10_000, "in [0, 10000]"),
        "of a step for each token of a prompt, or of a stream that moves",
        20.0,
    ),
    Option(
        "steady_s",
        number(lambda value: 0.5 <= value <= 600, "seconds in [0.5, 600]"),
        "undisturbed, before each kill and behind the last one",
        4.0,
        1.0,
    ),
)


@dataclass(slots=True, eq=False)
class _Answer:
    """What has come of one stream. members: the replica that each delta came from."""

    number: int
    max_tokens: int
    times_s: list[float] = field(default_factory=list)
    num_tokens: list[int] = field(default_factory=list)
    members: list[int] = field(default_factory=list)
    text: str = ""


@dataclass(slots=True, eq=False)
class _Kill:
    """A replica's death. back_s: when it was ready again. running: streams with a first delta."""

    replica: int
    at_s: float
    running: list[_Answer]
    back_s: float = 0.0


def add_options(parser: Parser) -> None:
    """The benchmark's options."""
    add(parser.add_argument_group("load"), _OPTIONS)
    add_common(parser, runs=1)
    parser.set_defaults(run=bench_failover)


def bench_failover(arguments: argparse.Namespace) -> int:
    """Measure and report; exit code 1 if a text differs."""
    check_common(arguments)
    given = fill_in(arguments, _OPTIONS)
    note = simulation_note()
    rows: list[Row] = []
    for run in range(arguments.runs):
        load = _OpenStreams(given["streams"], given["output_len"], seed=run)
        model = (
            f"simulated:step_ms={given['step_ms']:g},prefill_us={given['prefill_us']:g},mode=chain"
        )
        with (
            log_level("ERROR"),
            ServedFleet(
                f"{model},tokenizer={MODEL_PATH}",
                given["replicas"],
                max_num_seqs=given["streams"],
                spare_worker=False,
            ) as fleet,
        ):
            kills = uvloop.run(load.run(fleet, given["replicas"], given["steady_s"]))
            again = uvloop.run(load.texts_again(fleet, kills))
        device = {"step_ms": given["step_ms"], "prefill_us": given["prefill_us"]}
        rows += [_row(load, kill, again, given["steady_s"]) | device for kill in kills]
    print(f"{note} Steps of {given['step_ms']:g} ms, {given['streams']} streams.")
    print_rows(rows, arguments, _COLUMNS)
    if arguments.png is not None:
        _draw(load, kills, given["replicas"], arguments.png)
    return 0 if all(row["identical"] == row["running"] for row in rows) else 1


class _OpenStreams:
    """Streams that follow one another, `num_streams` at a time."""

    def __init__(self, num_streams: int, output_len: int, seed: int) -> None:
        self._num_streams = num_streams
        self._output_len = output_len
        self._random = np.random.default_rng(seed)
        self._is_over = False
        self._running: set[_Answer] = set()
        self.answers: list[_Answer] = []
        self.begin_s = self.end_s = 0.0

    async def run(self, fleet: ServedFleet, num_replicas: int, steady_s: float) -> list[_Kill]:
        """Read streams while every replica is killed once. Raises: EngineError."""
        async with AsyncClient(fleet.address) as client, asyncio.TaskGroup() as readers:
            for _ in range(self._num_streams):
                readers.create_task(self._read_on(client))
            self.begin_s = monotonic()
            kills = []
            for replica in range(num_replicas):
                await asyncio.sleep(steady_s)
                kills.append(await self._kill(fleet, replica))
            await asyncio.sleep(steady_s)
            self.end_s = monotonic()
            self._is_over = True
        return kills

    async def texts_again(self, fleet: ServedFleet, kills: Sequence[_Kill]) -> dict[int, str]:
        """The texts of all streams that a kill found running, computed once more, by number."""
        wanted = {answer for kill in kills for answer in kill.running}
        places = asyncio.Semaphore(self._num_streams)

        async def one(client: AsyncClient, answer: _Answer) -> tuple[int, str]:
            async with places:
                options = self._options(answer)
                return answer.number, (await client.generate(_prompt(answer), **options)).text

        async with AsyncClient(fleet.address) as client:
            return dict(await asyncio.gather(*(one(client, answer) for answer in wanted)))

    async def _read_on(self, client: AsyncClient) -> None:
        """Read one stream after another to its end."""
        while not self._is_over:
            low, high = (self._output_len * (1 + sign * _SPREAD) for sign in (-1, 1))
            answer = _Answer(len(self.answers), int(self._random.integers(int(low), int(high))))
            self.answers.append(answer)
            self._running.add(answer)
            stream = client.stream(_prompt(answer), **self._options(answer))
            async for delta in stream:
                answer.times_s.append(monotonic())
                answer.num_tokens.append(delta.num_tokens)
                answer.members.append(stream._state.member)
                answer.text += delta.text
            self._running.discard(answer)

    async def _kill(self, fleet: ServedFleet, replica: int) -> _Kill:
        """Kill a replica and wait until it is back. Raises: EngineError."""
        name = f"replica-{replica}"
        pid = fleet.pids[name]
        kill = _Kill(replica, monotonic(), [each for each in self._running if each.times_s])
        os.kill(pid, signal.SIGKILL)
        while not kill.back_s:
            if monotonic() > kill.at_s + _BACK_S or not fleet.is_running:
                raise cannot_measure(f"{name} was killed and is not back after {_BACK_S:g} s")
            event = fleet.next_event(0.0)
            if event is None:
                await asyncio.sleep(_POLL_S)
            elif isinstance(event, ProcessRestarted) and event.name == name:
                kill.back_s = monotonic()
        return kill

    def _options(self, answer: _Answer) -> dict[str, Any]:
        return {"max_tokens": answer.max_tokens, "seed": answer.number, "stream_interval": 1}


def _prompt(answer: _Answer) -> str:
    return f"Chapter {answer.number}: how names are bound, and where."


def _row(load: _OpenStreams, kill: _Kill, again: dict[int, str], steady_s: float) -> Row:
    span = GapSpan("", kill.at_s, kill.back_s)
    gaps: dict[bool, list[float]] = {True: [], False: []}
    for answer in kill.running:
        gap = longest_gap(answer.times_s, span)
        if gap is not None:
            at = sum(time_s <= kill.at_s for time_s in answer.times_s) - 1
            gaps[answer.members[at] == kill.replica].append(1e3 * gap)
    cut_off, others = gaps[True], gaps[False]
    return {
        "benchmark": "failover",
        "is_simulated": True,
        "replica": f"replica-{kill.replica}",
        "killed_at_s": round(kill.at_s - load.begin_s, 2),
        "back_after_s": round(kill.back_s - kill.at_s, 2),
        "running": len(kill.running),
        "cut_off": len(cut_off),
        "identical": sum(again[answer.number] == answer.text for answer in kill.running),
        "gap_p50_ms": round(float(np.median(cut_off)), 1) if cut_off else None,
        "gap_max_ms": round(max(cut_off), 1) if cut_off else None,
        "others_gap_max_ms": round(max(others), 1) if others else None,
        "tokens_per_s_before": round(_rate(load, kill.at_s - steady_s / 2, kill.at_s), 1),
        "tokens_per_s_away": round(_rate(load, kill.at_s, kill.back_s), 1),
    }


def _rate(load: _OpenStreams, begin_s: float, end_s: float) -> float:
    """Tokens a second that the client received."""
    num_tokens = sum(
        num
        for answer in load.answers
        for time_s, num in zip(answer.times_s, answer.num_tokens, strict=True)
        if begin_s < time_s <= end_s
    )
    return num_tokens / (end_s - begin_s)


def _draw(load: _OpenStreams, kills: Sequence[_Kill], num_replicas: int, file: str) -> None:
    edges = np.arange(load.begin_s, load.end_s, _BIN_S)
    rates: dict[str, list[float]] = {}
    for replica in range(num_replicas):
        times_s, weights = [], []
        for answer in load.answers:
            for at, member in enumerate(answer.members):
                if member == replica:
                    times_s.append(answer.times_s[at])
                    weights.append(answer.num_tokens[at])
        counts, _ = np.histogram(times_s, edges, weights=weights)
        rates[f"replica-{replica}"] = (counts / _BIN_S).tolist()
    marks = [
        mark
        for kill in kills
        for mark in (
            Mark(kill.at_s - load.begin_s, f"replica-{kill.replica} killed", is_strong=True),
            Mark(kill.back_s - load.begin_s, "back", is_strong=False),
        )
    ]
    stacked_areas(
        file,
        (edges[:-1] - load.begin_s).tolist(),
        rates,
        marks,
        title="Tokens a second that a client reads while replicas are killed (simulated devices)",
        x_label="seconds",
        y_label="tokens a second",
    )
