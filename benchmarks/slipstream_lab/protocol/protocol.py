"""`slipstream bench protocol`: deltas against whole histories on the way from core to worker, in
the table of LMDeploy's PR #4054, which replaced the latter with the former.

Both transports use the product's core, worker and client, each in a separate process
(`cumulative`); the cumulative one sends every row's whole output at each step, ids and logprobs,
and the worker keeps what is new.

Logprobs are off, those of the sampled token, or top-5. The load is as many requests as run at a
time, of one length, submitted at once. Duration, throughput and latencies cover the whole load, as
in the field's serving benchmarks; CPU time and bytes per token cover the span in which all requests
run.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import msgspec
import uvloop

from slipstream.cli.options.parser import Parser
from slipstream_bench.common.live_streams import CLIENT, random_prompts
from slipstream_bench.common.load.datasets import DatasetRequest
from slipstream_bench.common.load.native_target import open_target, run_at_once
from slipstream_bench.common.load.openai_target import LoadRequestOptions
from slipstream_bench.common.measures import (
    RequestTimeline,
    Steady,
    cannot_measure,
    steady,
    summary,
)
from slipstream_bench.common.options import Option, add, fill_in, integer, number
from slipstream_bench.common.pictures import grouped_bars
from slipstream_bench.common.process_census import CpuSamples
from slipstream_bench.common.report import (
    Row,
    add_common,
    check_common,
    in_rounds,
    median_rows,
    table,
    write_json,
)
from slipstream_lab.common.simulated_stack import (
    WORKER,
    Program,
    RunningStack,
    ServedDevice,
    Simulated,
    assembled,
    simulation_note,
    while_all_run,
)
from slipstream_lab.protocol.cumulative import SentSteps

TRANSPORTS = ("cumulative", "delta")
_LOGPROBS: dict[str, int | None] = {"off": None, "sampled": 0, "top5": 5}
_INPUT_LEN = 170
_TIMEOUT_S = 600.0
_PROCESSES = ("core", "worker", CLIENT)


# LMDeploy's table, top to bottom: column of a row, its name in the table
_LINES = {
    "duration_s": "duration, s",
    "requests_per_s": "requests/s",
    "output_tokens_per_s": "output tokens/s",
    **{
        f"{name}_{which}_ms": f"{which} {name.upper()}, ms"
        for name in ("ttft", "tpot", "itl")
        for which in ("mean", "median", "p99")
    },
    "e2e_mean_s": "mean E2E, s",
    "e2e_median_s": "median E2E, s",
    "bytes_per_token": "bytes/token, core to worker",
    "core_cpu_us_per_token": "core CPU, us/token",
    "worker_cpu_us_per_token": "worker CPU, us/token",
    "client_cpu_us_per_token": "client CPU, us/token",
}


class ProtocolLoad(NamedTuple):
    """Requests that all run at once."""

    batch: int
    output_len: int  # tokens per answer
    step_ms: float


_OPTIONS = (
    Option("batch", integer(1, 1024), "requests, which run all at once", 64),
    Option("output_len", integer(8, 3900), "tokens of an answer", 2048, 320),
    Option(
        "step_ms",
        number(lambda value: 1 <= value <= 1000, "a number in [1, 1000]"),
        "milliseconds of a step",
        10.0,
        5.0,
    ),
)
_FULL_OUTPUT_LEN = _OPTIONS[1].default


def add_options(parser: Parser) -> None:
    """The benchmark's options."""
    add(parser.add_argument_group("load"), _OPTIONS)
    add_common(parser, runs=3)
    parser.set_defaults(run=bench_protocol)


def bench_protocol(arguments: argparse.Namespace) -> int:
    """Measure and report; exit code 0."""
    check_common(arguments)
    load = ProtocolLoad(**fill_in(arguments, _OPTIONS))
    note = simulation_note()
    device = Simulated(load.step_ms, load.batch)
    runs = in_rounds(
        arguments.runs, TRANSPORTS, lambda transport: measure_transport(transport, load, device)
    )
    rows = median_rows(runs, ("transport", "logprobs"))
    print(
        f"{note} {load.batch} requests of {_INPUT_LEN} + {load.output_len} tokens at once, steps "
        f"of {load.step_ms:g} ms, medians of {arguments.runs}."
    )
    if load.output_len < _FULL_OUTPUT_LEN:
        print(f"Answers are shorter than the {_FULL_OUTPUT_LEN} tokens of the full form.")
    print("\n".join(table(_transposed(rows))), flush=True)
    if arguments.json is not None:
        write_json(rows, arguments.json)
    if arguments.png is not None:
        _draw(rows, arguments.png, load)
    return 0


def measure_transport(transport: str, load: ProtocolLoad, device: ServedDevice) -> list[Row]:
    """A row for each logprobs setting; `load` holds the device's step time."""
    with tempfile.TemporaryDirectory(prefix="slipstream-bench-") as folder:
        path = Path(folder) / "record.json"
        more = {"transport": transport, "record": str(path)}
        core = Program("core", "slipstream_lab.protocol.core_process", ("core",), more)
        worker = WORKER
        if transport == "cumulative":
            worker = Program("worker", "slipstream_lab.protocol.worker_process", ("worker",))
        with assembled(device, [core, worker]) as stack:
            measured = {
                name: uvloop.run(while_all_run(stack, _measure(stack, load, k)))
                for name, k in _LOGPROBS.items()
            }
        sent = msgspec.json.decode(path.read_bytes(), type=SentSteps)
    return [
        _row(transport, name, load, timelines, samples, sent)
        for name, (timelines, samples) in measured.items()
    ]


async def _measure(
    stack: RunningStack, load: ProtocolLoad, logprobs: int | None
) -> tuple[list[RequestTimeline], CpuSamples]:
    request_options = LoadRequestOptions("completions", True, 0.0, logprobs, True, _TIMEOUT_S)
    prompts = random_prompts(load.batch, _INPUT_LEN)
    requests = [DatasetRequest(prompt.tolist(), load.output_len) for prompt in prompts]
    async with open_target(request_options, address=stack.address) as target:
        return await run_at_once(target, requests, None, stack.pids)


def _row(
    transport: str,
    logprobs: str,
    load: ProtocolLoad,
    timelines: list[RequestTimeline],
    samples: CpuSamples,
    sent: SentSteps,
) -> Row:
    span: Steady | None = steady(timelines, load.batch)
    if span is None:
        why = f"answers of {load.output_len} tokens are too short: not all requests ran at once"
        raise cannot_measure(why)
    per_token = sent.bytes_per_token(span.begin_s, span.end_s)
    cpu_s = samples.between(span.begin_s, span.end_s)
    row: Row = {
        "benchmark": "protocol",
        "is_simulated": True,
        "transport": transport,
        "logprobs": logprobs,
        "step_ms": load.step_ms,
        "batch": load.batch,
        "input_len": _INPUT_LEN,
        "output_len": load.output_len,
        **summary(timelines),
        "bytes_per_token": None if per_token is None else round(per_token, 1),
    }
    for name in _PROCESSES:
        row[f"{name}_cpu_us_per_token"] = round(1e6 * cpu_s[name] / span.num_tokens, 3)
    return row


def _transposed(rows: Sequence[Row]) -> list[Row]:
    """The table in LMDeploy's form: a line per measure, before and after side by side."""
    ordered = sorted(
        rows,
        key=lambda row: (
            list(_LOGPROBS).index(str(row["logprobs"])),
            TRANSPORTS.index(str(row["transport"])),
        ),
    )
    return [
        _line(called, {f"{row['logprobs']} {row['transport']}": row.get(name) for row in ordered})
        for name, called in _LINES.items()
    ]


def _line(called: str, cells: Row) -> Row:
    return {"logprobs": called, **cells}


def _draw(rows: Sequence[Row], file: str, load: ProtocolLoad) -> None:
    """Chart the CPU time per token of core and worker."""
    found = {(row["transport"], row["logprobs"]): _cpu_us(row, "core", "worker") for row in rows}
    grouped_bars(
        file,
        [f"log-probabilities: {name}" for name in _LOGPROBS],
        {
            transport: [found.get((transport, name)) for name in _LOGPROBS]
            for transport in TRANSPORTS
        },
        title=f"CPU of core and worker, {load.batch} streams of {load.output_len} tokens "
        "(simulated device)",
        x_label="what each token carries",
        y_label="CPU us per token",
    )


def _cpu_us(row: Row, *names: str) -> float:
    return sum(float(row[f"{name}_cpu_us_per_token"] or 0) for name in names)
