"""`slipstream bench compare`: the same load for several engines, settings or ways of asking.

What is compared takes turns, to and fro, so that other load on the machine affects all of it.
"""

from __future__ import annotations

from slipstream.cli.options.parser import Command, Parser, add_commands

COMPARISONS = {
    "engines": "one model served by several engines",
    "vllm": "vLLM's own server, and ours over the same engine",
    "threads": "a CPU engine with several numbers of threads, beside other processes",
    "ways": "the Python client, and HTTP, streamed and in one piece",
    "ceiling": "the processes around a device of 0 ms, and vLLM's",
    "front": "the HTTP front's cost of a streamed event, and that of bare writes",
}


def add_options(parser: Parser) -> None:
    """The comparisons; a module is imported when its comparison is named."""
    commands = {
        name: Command(purpose, f"slipstream_lab.compare.{name}:add_options")
        for name, purpose in COMPARISONS.items()
    }
    add_commands(parser, "comparison", commands)
