"""`slipstream bench`: which benchmarks there are."""

from __future__ import annotations

from slipstream.cli_parser import Command, Parser, add_commands

_BENCHMARKS = {
    "serve": Command(
        "a server under load, ours or any other", "slipstream.bench.serve:add_serve_benchmark"
    ),
    "chaos": Command(
        "kill its processes, and look for a difference", "slipstream.bench.chaos.command:add_chaos"
    ),
    "fuzz": Command(
        "messages that no honest peer sends, by the million",
        "slipstream.bench.fuzz.command:add_fuzz",
    ),
    "soak": Command(
        "whether anything grows over many short requests", "slipstream.bench.soak.command:add_soak"
    ),
    "throughput": Command(
        "many requests at once: tokens a second", "slipstream.bench.throughput:add_throughput"
    ),
    "latency": Command(
        "how long one batch of requests takes", "slipstream.bench.latency:add_latency"
    ),
    "output-path": Command(
        "CPU per token, from ids to deltas", "slipstream.bench.output_path.options:add_output_path"
    ),
    "overlap": Command(
        "output processing in the engine's loop or beside it",
        "slipstream.bench.overlap.options:add_overlap",
    ),
    "protocol": Command(
        "deltas against whole histories", "slipstream.bench.protocol.options:add_protocol"
    ),
    "interval": Command(
        "what a stream interval is worth", "slipstream.bench.interval.options:add_interval"
    ),
    "front": Command(
        "what a streamed event costs the HTTP front", "slipstream.bench.front.options:add_front"
    ),
    "beside": Command(
        "a CPU engine beside other processes", "slipstream.bench.beside.options:add_beside"
    ),
    "step": Command(
        "the core's parts of a decode step, and a model's", "slipstream.bench.step.options:add_step"
    ),
    "gc": Command(
        "what the shape of a step's ids costs the collector",
        "slipstream.bench.garbage.options:add_gc",
    ),
}


def add_bench(parser: Parser) -> None:
    """The benchmarks."""
    add_commands(parser, "benchmark", _BENCHMARKS)
