"""The benchmarks of `slipstream bench` by name. The command line finds them by an entry point.

Those of `slipstream_lab` and `slipstream_verify` put the engine's parts together, start other
engines, or need the tests' models: they run from a clone of the repository, and are not in the
wheel.
"""

from __future__ import annotations

from collections.abc import Sequence
from importlib.util import find_spec
from typing import NoReturn

from slipstream.cli.options.parser import Command, Parser, add_commands

BENCHMARKS = {
    "start": ("from a fresh process to the first text; an idle stack", "slipstream_bench.start"),
    "serve": ("load test of an HTTP server, Slipstream or another", "slipstream_bench.serve"),
    "throughput": (
        "throughput of many requests at the same time",
        "slipstream_bench.throughput",
    ),
    "latency": ("latency of one batch of requests", "slipstream_bench.latency"),
    "chaos": (
        "kill processes under load and compare every answer",
        "slipstream_verify.chaos.chaos",
    ),
    "fuzz": ("send malformed messages and requests", "slipstream_verify.fuzz.fuzz"),
    "soak": ("look for leaks over many short requests", "slipstream_verify.soak.soak"),
    "compare": (
        "the same load for several engines, settings or ways of asking",
        "slipstream_lab.compare.compare",
    ),
    "output-path": (
        "CPU time per token, from ids to deltas",
        "slipstream_lab.output_path.output_path",
    ),
    "formats": ("cost and correctness of reading tool calls", "slipstream_lab.formats.formats"),
    "overlap": (
        "output processing in the engine's loop, or beside it",
        "slipstream_lab.overlap.overlap",
    ),
    "protocol": ("cost of deltas against whole histories", "slipstream_lab.protocol.protocol"),
    "interval": ("effect of the stream interval", "slipstream_lab.interval"),
    "step": ("parts of a decode step, in the core and in the model", "slipstream_lab.step.step"),
    "tp": (
        "one model in several processes: plans to ranks, decode steps",
        "slipstream_lab.tensor_parallel.tensor_parallel",
    ),
    "route": (
        "CPU time of placing a request on one of many replicas",
        "slipstream_lab.fleet.route",
    ),
    "scale": ("throughput of several replicas behind one client", "slipstream_lab.fleet.scale"),
    "conversations": (
        "chats through a router to several replicas",
        "slipstream_lab.fleet.conversations",
    ),
    "failover": (
        "throughput while replicas are killed one after another",
        "slipstream_lab.fleet.failover",
    ),
    "hybrid": (
        "a model with recurrent states beside a dense one and transformers",
        "slipstream_lab.models.hybrid",
    ),
    "speculation": (
        "drafts from a request's own text: steps, speed, cost where nothing repeats",
        "slipstream_lab.speculation",
    ),
    "lora": (
        "decode steps whose rows have adapters, beside the same steps without",
        "slipstream_lab.adapters",
    ),
    "lora-load": (
        "gaps of streams while an adapter is loaded beside them",
        "slipstream_lab.adapter_loads",
    ),
    "embeddings": (
        "vectors of texts from a stack, beside sentence-transformers",
        "slipstream_lab.embeddings",
    ),
    "quantised": (
        "a model with matrices of 16, 8 and 4 bits beside float32",
        "slipstream_lab.models.quantised",
    ),
    "gc": ("cost of a step's ids to the garbage collector", "slipstream_lab.gc_pauses"),
}
# names that are no longer benchmarks, answered in 0.1; what to say of each
FORMER = {
    **{
        name: f"is now `slipstream bench compare {comparison}`"
        for name, comparison in (
            ("end-to-end", "engines"),
            ("beside", "threads"),
            ("http-overhead", "ways"),
            ("ceiling", "ceiling"),
            ("front", "front"),
        )
    },
    "fleet-simulation": "was removed; `slipstream bench conversations` measures real replicas",
}
_PACKAGE = "slipstream_bench"


def add_benchmarks(parser: Parser) -> None:
    """Add the benchmarks to `parser`; a benchmark's module is imported when it is named."""
    commands = {}
    for name, (purpose, module) in BENCHMARKS.items():
        package = module.partition(".")[0]
        if package == _PACKAGE or find_spec(package) is not None:
            commands[name] = Command(purpose, f"{module}:add_options")
        else:
            about = f"{purpose} (from a clone)"
            commands[name] = Command(about, "slipstream_bench.commands:refuse_outside_a_clone")
    commands |= {
        name: Command("", "slipstream_bench.commands:refuse_former_name") for name in FORMER
    }
    add_commands(parser, "benchmark", commands)


def refuse_outside_a_clone(parser: Parser) -> None:
    """Let it end with exit code 2 and the reason, whatever follows its name."""
    _refuse(
        parser,
        "runs from a clone of Slipstream's repository (scripts/set-up dev, then "
        ".venv/bin/slipstream bench ...): it takes Slipstream apart, or runs beside other engines, "
        "and what it needs for that is not in the wheel",
    )


def refuse_former_name(parser: Parser) -> None:
    """Let it end with exit code 2 and the name to use, whatever follows its name."""
    _refuse(parser, FORMER[parser.prog.rpartition(" ")[2]])


def _refuse(parser: Parser, why: str) -> None:
    def refuse(_words: Sequence[str]) -> NoReturn:
        parser.exit(2, f"{parser.prog}: {why}\n")

    parser.translate = refuse


BENCH = Command("measure a server and its parts", "slipstream_bench.commands:add_benchmarks")
"""`slipstream bench`, for the command line."""
