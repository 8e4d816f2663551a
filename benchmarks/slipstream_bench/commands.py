"""The benchmarks of `slipstream bench` by name. The command line finds them by an entry point."""

from __future__ import annotations

from slipstream.cli.options.parser import Command, Parser, add_commands

BENCHMARKS = {
    "start": ("from a fresh process to the first text; an idle stack", "start"),
    "serve": ("load test of an HTTP server, Slipstream or another", "serve"),
    "chaos": ("kill processes under load and compare every answer", "chaos.chaos"),
    "fuzz": ("send malformed messages and requests", "fuzz.fuzz"),
    "soak": ("look for leaks over many short requests", "soak.soak"),
    "throughput": ("throughput of many requests at the same time", "throughput"),
    "latency": ("latency of one batch of requests", "latency"),
    "output-path": ("CPU time per token, from ids to deltas", "output_path.output_path"),
    "formats": ("cost and correctness of reading tool calls", "formats.formats"),
    "overlap": (
        "output processing in the engine's loop, or beside it",
        "overlap.overlap",
    ),
    "protocol": ("cost of deltas against whole histories", "protocol.protocol"),
    "interval": ("effect of the stream interval", "interval"),
    "front": ("cost of a streamed event in the HTTP server", "http_front.http_front"),
    "beside": ("CPU engine that shares its cores with other processes", "beside"),
    "step": ("parts of a decode step, in the core and in the model", "step.step"),
    "tp": (
        "one model in several processes: plans to ranks, decode steps",
        "tensor_parallel.tensor_parallel",
    ),
    "http-overhead": ("the same load by the Python client and over HTTP", "http_overhead"),
    "end-to-end": ("one model served by several engines in turns", "end_to_end"),
    "ceiling": ("throughput of the processes around a device of 0 ms", "ceiling.ceiling"),
    "route": ("CPU time of placing a request on one of many replicas", "fleet.route"),
    "scale": ("throughput of several replicas behind one client", "fleet.scale"),
    "conversations": ("chats through a router to several replicas", "fleet.conversations"),
    "failover": ("throughput while replicas are killed one after another", "fleet.failover"),
    "fleet-simulation": (
        "policies of placing over simulated replicas",
        "fleet.fleet_simulation",
    ),
    "gc": ("cost of a step's ids to the garbage collector", "gc_pauses"),
}


def add_benchmarks(parser: Parser) -> None:
    """Add the benchmarks to `parser`; a benchmark's module is imported when it is named."""
    commands = {
        name: Command(purpose, f"slipstream_bench.{module}:add_options")
        for name, (purpose, module) in BENCHMARKS.items()
    }
    add_commands(parser, "benchmark", commands)


BENCH = Command("measure a server and its parts", "slipstream_bench.commands:add_benchmarks")
"""`slipstream bench`, for the command line."""
