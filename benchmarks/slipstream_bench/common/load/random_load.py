"""Random prompts and answers of fixed lengths, for `bench latency` and `bench throughput`: options,
requests and the columns that describe them.

The end of sequence is ignored, so lengths are exact. The same --seed gives the same prompts in the
same order.
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
from msgspec import structs

from slipstream.cli.options.parser import Parser
from slipstream.cli.options.stack_options import add_settings
from slipstream.cli.server_choice import add_connection
from slipstream.client.async_client import AsyncClient
from slipstream.errors import wrong_option
from slipstream_bench.common.measures import RequestTimeline, Row
from slipstream_bench.common.options import Option, add
from slipstream_bench.common.report import write_json
from slipstream_bench.common.variants import VARIANTS, params_of
from slipstream_ipc.messages import ModelCard
from slipstream_ipc.validation.simulated_model import SIMULATED

_NOTE = "The model is simulated: time passes, nothing is computed. This is no model's speed."

Prompt = npt.NDArray[np.uint32]


def add_random_load(parser: Parser, sizes: Sequence[Option]) -> argparse._ArgumentGroup:
    """Add the options of the stack and of the load; returns the group of the latter.

    sizes: options of the load's size, with input_len and output_len among them.
    """
    add_settings(parser, is_brief=True)
    load = parser.add_argument_group("load")
    add(load, sizes)
    load.add_argument(
        "--variant",
        choices=VARIANTS,
        default="plain",
        help="stop2: two stop strings that never occur; logprobs5: of the five likeliest tokens; "
        "interval10: a delta for ten tokens; default: plain",
    )
    load.add_argument("--temperature", type=float, default=1.0, metavar="X", help="default: 1")
    load.add_argument("--seed", type=int, default=0, metavar="N", help="of the prompts; default: 0")
    load.add_argument("--quick", action="store_true", help="a load that takes seconds")
    parser.add_argument("--json", metavar="FILE", help="write the rows there, a list of objects")
    add_connection(parser)
    return load


class RandomLoad:
    """The requests of one run, for a connected client."""

    def __init__(self, client: AsyncClient, arguments: argparse.Namespace) -> None:
        """Raises: BadRequestError if the model does not allow the lengths."""
        self._client = client
        self._vocab_size = client.model.vocab_size
        self._input_len: int = arguments.input_len
        length, longest = arguments.input_len + arguments.output_len, client.model.max_model_len
        if length > longest:
            allowed = f"together at most max_model_len, {longest}"
            raise wrong_option("input_len + output_len", length, allowed)
        self._random = np.random.default_rng(arguments.seed)
        self._params = structs.replace(
            params_of(arguments.variant, arguments.output_len),
            temperature=arguments.temperature,
            seed=arguments.seed,
        )

    def prompts(self, num: int) -> list[Prompt]:
        """The next `num` prompts."""
        shape = (num, self._input_len)
        return list(self._random.integers(0, self._vocab_size, shape, np.uint32))

    async def run(self, prompt: Prompt) -> RequestTimeline:
        """Run one request; returns its timeline."""
        timeline = RequestTimeline(time.perf_counter(), len(prompt))
        async for delta in self._client.stream(prompt, self._params):
            if delta.num_tokens:
                timeline.note(time.perf_counter(), delta.num_tokens)
        return timeline


def row_of(
    benchmark: str, card: ModelCard, arguments: argparse.Namespace, sizes: Sequence[Option]
) -> Row:
    """The columns that describe the run; results are added by the caller."""
    return {
        "benchmark": benchmark,
        "model": card.name,
        "is_simulated": card.name.startswith(SIMULATED),
        **{size.name: getattr(arguments, size.name) for size in sizes},
        "variant": arguments.variant,
        "num_cpus": os.cpu_count(),
    }


def print_lines(row: Row, lines: Sequence[str], path: str | None) -> None:
    """Print the lines below the model's, and write the row to `path` if given."""
    note = [_NOTE] if row["is_simulated"] else []
    print("\n".join([f"model: {row['model']}", *note, *lines]), flush=True)
    if path is not None:
        write_json([row], path)
