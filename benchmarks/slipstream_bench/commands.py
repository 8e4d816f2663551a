"""The benchmarks of `slipstream bench` by name. The command line finds them by an entry point."""

from __future__ import annotations

from slipstream.cli.parser import Command, Parser, add_commands

BENCHMARKS = {
    "serve": ("a server under load, ours or any other", "serve.serve"),
    "chaos": ("kill its processes, and look for a difference", "chaos.chaos"),
    "fuzz": ("messages that no honest peer sends, by the million", "fuzz.fuzz"),
    "soak": ("whether anything grows over many short requests", "soak.soak"),
    "throughput": ("many requests at once: tokens a second", "throughput.throughput"),
    "latency": ("how long one batch of requests takes", "latency.latency"),
    "output-path": ("CPU per token, from ids to deltas", "output_path.output_path"),
    "overlap": (
        "output processing in the engine's loop or beside it",
        "overlap.overlap",
    ),
    "protocol": ("deltas against whole histories", "protocol.protocol"),
    "interval": ("what a stream interval is worth", "interval.interval"),
    "front": ("what a streamed event costs the HTTP front", "http_front.http_front"),
    "beside": ("a CPU engine beside other processes", "beside.beside"),
    "step": ("the core's parts of a decode step, and a model's", "step.step"),
    "gc": ("what the shape of a step's ids costs the collector", "gc_pauses.gc_pauses"),
}


def add_benchmarks(parser: Parser) -> None:
    """Add the benchmarks to `parser`; a benchmark's module is imported when it is named."""
    commands = {
        name: Command(purpose, f"slipstream_bench.{module}:add_options")
        for name, (purpose, module) in BENCHMARKS.items()
    }
    add_commands(parser, "benchmark", commands)


BENCH = Command("measure a stack", "slipstream_bench.commands:add_benchmarks")
"""`slipstream bench`, for the command line."""
