"""`slipstream bench compare front`: CPU time of the HTTP front's process per streamed event.

A stack over the simulated model streams one token a step to every stream over HTTP, all running at
once. Measured is the CPU time, user and system, of the front's process alone while all of them run:
receiving from the worker, decoding, formatting, writing, accounting. The same run measures a server
that only writes chunks of the same size at the same pace: no front is cheaper than that.

The client reads with plain sockets, in this process, on the same cores. Steps are long enough that
no process runs out of CPU time, since events would then carry several tokens: `tokens_per_event`
shows whether they did.

The variants of chat, responses and messages stream the same answers in three shapes, so that
`over_chat` is what a shape costs. Those of calls play an answer that is one tool call, and stream
its argument.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any, Literal, NamedTuple, get_args
from urllib.parse import urlsplit

import msgspec

from slipstream.cli.options.parser import Parser
from slipstream.stack.plan.front_plan import FRONT
from slipstream_bench.common.options import Option, add, fill_in, integer, many, name_of
from slipstream_bench.common.pictures import grouped_bars
from slipstream_bench.common.process_census import allow_many_files, process_cpu_s
from slipstream_bench.common.report import (
    Row,
    add_common,
    check_common,
    in_rounds,
    median_rows,
    print_rows,
)
from slipstream_lab.common import simulated_stack
from slipstream_lab.common.simulated_stack import RunningStack, Simulated, simulation_note
from slipstream_lab.compare.bare_server import BareConfig
from slipstream_lab.compare.event_reader import EventSpan, read_streams

_STEP_MS = 10.0
_STEP_MS_OF_A_STREAM: dict[Variant, float] = {  # keeps two cores half idle
    "plain": 0.06,
    "chat": 0.06,
    "chat_logprobs5": 0.3,
    "resumable": 0.08,
    "logprobs5": 0.2,
    "responses": 0.08,
    "messages": 0.08,
    "chat_call": 0.1,
    "responses_call": 0.1,
    "messages_call": 0.1,
}
_BY = ("variant", "streams")
_COLUMNS = (
    *_BY,
    "front_cpu_us_per_event",
    "bare_cpu_us_per_event",
    "front_over_bare",
    "over_chat",
    "event_bytes",
    "tokens_per_event",
    "worker_cpu_us_per_event",
    "core_cpu_us_per_event",
    "client_cpu_us_per_event",
    "runs",
)
_PATHS = {
    "chat": "/v1/chat/completions",
    "responses": "/v1/responses",
    "messages": "/v1/messages",
}
_HTTP: dict[str, Any] = {"http_port": 0, "served_model_name": "simulated"}
_CALL = "_call"
_LOGPROBS = "logprobs5"
_PARAMETERS = {"type": "object", "properties": {"text": {"type": "string"}}}
_FUNCTION = {"name": "write_file", "parameters": _PARAMETERS}
_TOOLS: dict[str, dict[str, Any]] = {
    "chat": {"type": "function", "function": _FUNCTION},
    "responses": {"type": "function", **_FUNCTION},
    "messages": {"name": "write_file", "input_schema": _PARAMETERS},
}

Variant = Literal[
    "plain",
    "logprobs5",
    "chat",
    "chat_logprobs5",
    "resumable",
    "responses",
    "messages",
    "chat_call",
    "responses_call",
    "messages_call",
]
VARIANTS: tuple[Variant, ...] = get_args(Variant)


class HttpFrontPlan(NamedTuple):
    """What is measured."""

    streams: tuple[int, ...]
    variants: tuple[Variant, ...]
    events: int  # of a stream


_OPTIONS = (
    Option("streams", many(integer(1, 4096)), "at a time", (64, 512, 1024), (64, 256)),
    Option(
        "variants",
        many(name_of(VARIANTS)),
        "logprobs5: with the five likeliest tokens; resumable: with ids of events; _call: the "
        "argument of a tool call",
        VARIANTS,
        ("plain", "logprobs5"),
    ),
    Option("events", integer(8, 3000), "of a stream", 120, 60),
)


def add_options(parser: Parser) -> None:
    """The benchmark's options."""
    add(parser.add_argument_group("load"), _OPTIONS)
    add_common(parser, runs=3)
    parser.set_defaults(run=compare_front)


def compare_front(arguments: argparse.Namespace) -> int:
    """Measure and report; exit code 0."""
    check_common(arguments)
    plan = HttpFrontPlan(**fill_in(arguments, _OPTIONS))
    allow_many_files()
    note = simulation_note()
    loads = list(product(plan.variants, plan.streams))
    runs = in_rounds(arguments.runs, loads, lambda load: [_measure(*load, plan.events)])
    rows = median_rows(runs, _BY)
    for row in rows:
        front, bare = float(row["front_cpu_us_per_event"] or 0), row["bare_cpu_us_per_event"]
        row["front_over_bare"] = round(front / float(bare), 3) if bare else None
    add_over_chat(rows)
    print(f"{note} An event to a stream and step, medians of {arguments.runs}, CPU µs to an event.")
    print_rows(rows, arguments, _COLUMNS)
    if arguments.png is not None:
        _draw(rows, plan, arguments.png)
    return 0


def add_over_chat(rows: Sequence[Row]) -> None:
    """Give responses and messages what they cost over chat with as many streams, where it ran."""
    costs = {(row["variant"], row["streams"]): row["front_cpu_us_per_event"] for row in rows}
    for row in rows:
        shape, call, _ = str(row["variant"]).partition(_CALL)
        chat = costs.get((f"chat{call}", row["streams"]))
        if shape in _PATHS and chat:
            row["over_chat"] = round(float(row["front_cpu_us_per_event"] or 0) / float(chat), 3)


def _measure(variant: Variant, streams: int, num_events: int) -> Row:
    step_ms = max(_STEP_MS, _STEP_MS_OF_A_STREAM[variant] * streams)
    with _stack(variant, step_ms, streams) as stack:
        assert stack.http_address is not None
        where = urlsplit(stack.http_address)
        assert where.hostname is not None
        assert where.port is not None
        requests = [_request(variant, number, num_events) for number in range(streams)]
        read_streams((where.hostname, where.port), requests[:1], dict)  # warm-up

        def cpu() -> dict[str, float]:
            used = {name: process_cpu_s(pid) for name, pid in stack.pids.items()}
            return used | {"client": time.process_time()}

        span = read_streams((where.hostname, where.port), requests, cpu)
    event_bytes = span.num_bytes / span.num_events
    bare = _bare(_chunk(event_bytes), step_ms, streams, num_events)
    row: Row = {
        "benchmark": "front",
        "is_simulated": True,
        "variant": variant,
        "streams": streams,
        "step_ms": step_ms,
        "events": span.num_events,
        "event_bytes": round(event_bytes, 1),
        "tokens_per_event": round(span.wall_s * 1e3 / step_ms * streams / span.num_events, 3),
        "num_cpus": os.cpu_count(),
        "bare_cpu_us_per_event": round(1e6 * bare.used["bare"] / bare.num_events, 3),
        "front_over_bare": None,
    }
    for name, seconds in span.used.items():
        shown = "front" if name == FRONT else name
        row[f"{shown}_cpu_us_per_event"] = round(1e6 * seconds / span.num_events, 3)
    return row


@contextmanager
def _stack(variant: Variant, step_ms: float, streams: int) -> Iterator[RunningStack]:
    """What is measured. Calls are played, longer than any stream."""
    model = Simulated(step_ms, streams, stream_interval=1)
    if not variant.endswith(_CALL):
        with simulated_stack.product(model, **_HTTP) as stack:
            yield stack
        return
    with tempfile.TemporaryDirectory(prefix="slipstream-bench-") as folder:
        answers = Path(folder) / "answers.jsonl"
        answers.write_bytes(msgspec.json.encode({"text": long_call()}))
        played = replace(model, answers=answers)
        with simulated_stack.product(played, **_HTTP, tool_format="hermes") as stack:
            yield stack


def long_call() -> str:
    """A tool call that has more tokens than a stream has events."""
    text = "".join(f"The quick brown fox jumps over the lazy dog, line {i}. " for i in range(1000))
    call = msgspec.json.encode({"name": "write_file", "arguments": {"text": text}}).decode()
    return f"<tool_call>\n{call}\n</tool_call>"


def _request(variant: Variant, number: int, num_events: int) -> bytes:
    """A request as it goes over the wire."""
    shape, call, _ = variant.removesuffix(f"_{_LOGPROBS}").partition(_CALL)
    body: dict[str, Any] = {"temperature": 0, "stream": True}
    turns = [{"role": "user", "content": f"question {number}"}]
    match shape:
        case "responses":
            body |= {"max_output_tokens": num_events, "ignore_eos": True, "input": turns}
        case "messages":  # without `ignore_eos`; nothing simulated ends a text
            body |= {
                "max_tokens": num_events,
                "model": _HTTP["served_model_name"],
                "messages": turns,
            }
        case "chat":
            body |= {"max_tokens": num_events, "ignore_eos": True, "messages": turns}
        case _:
            body |= {"max_tokens": num_events, "ignore_eos": True, "prompt": f"question {number}"}
    if call:
        body["tools"] = [_TOOLS[shape]]
    if variant == _LOGPROBS:
        body["logprobs"] = 5
    elif variant.endswith(_LOGPROBS):
        body |= {"logprobs": True, "top_logprobs": 5}
    return http_request(
        _PATHS.get(shape, "/v1/completions"), msgspec.json.encode(body), variant == "resumable"
    )


def http_request(path: str, body: bytes, wants_events: bool = False) -> bytes:
    """A POST as it goes over the wire."""
    lines = [
        f"POST {path} HTTP/1.1",
        "Host: localhost",
        "Content-Type: application/json",
        f"Content-Length: {len(body)}",
        *(["Accept: text/event-stream"] if wants_events else []),
        "\r\n",
    ]
    return "\r\n".join(lines).encode() + body


def _chunk(num_bytes: float) -> bytes:
    """An event of `num_bytes` in all, framed as a chunk."""
    framed = b"%x\r\n%b\r\n"
    data = b"data: " + b"x" * max(1, round(num_bytes) - 8 - len(framed % (500, b""))) + b"\n\n"
    return framed % (len(data), data)


def _bare(chunk: bytes, step_ms: float, streams: int, num_events: int) -> EventSpan:
    config = BareConfig(chunk, step_ms / 1e3, streams, num_events)
    with _bare_server(config) as (pid, port):
        requests = [b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n"] * streams
        return read_streams(("127.0.0.1", port), requests, lambda: {"bare": process_cpu_s(pid)})


@contextmanager
def _bare_server(config: BareConfig) -> Iterator[tuple[int, int]]:
    command = [sys.executable, "-P", "-m", "slipstream_lab.compare.bare_server"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        try:
            assert process.stdin is not None
            assert process.stdout is not None
            process.stdin.write(msgspec.json.encode(config) + b"\n")
            process.stdin.flush()
            yield process.pid, int(process.stdout.readline())
        finally:
            process.kill()


def _draw(rows: Sequence[Row], plan: HttpFrontPlan, file: str) -> None:
    def values(column: str, variant: Variant) -> list[float | None]:
        found = {row["streams"]: row[column] for row in rows if row["variant"] == variant}
        return [float(value) if (value := found.get(num)) else None for num in plan.streams]

    bars: dict[str, list[float | None]] = {
        variant: values("front_cpu_us_per_event", variant) for variant in plan.variants
    }
    bars["bare writes"] = values("bare_cpu_us_per_event", plan.variants[0])
    grouped_bars(
        file,
        [f"{number} streams" for number in plan.streams],
        bars,
        title="CPU time of the HTTP front to a streamed event",
        x_label="",
        y_label="µs",
    )
