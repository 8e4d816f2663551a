"""`slipstream bench lora`: speed of decode steps whose rows have adapters, beside the same steps
without them.

The scheduler and the runner alone, one step ahead, on the CPU in float32. Two runners of one model
are loaded, one of them with room for adapters, which are random, of rank 16 at every linear layer
but the head, in float32 and in bfloat16. In a round each kind of batch is driven on both, in turn.
A batch's speed is the median of its decode steps, and the ratio that is reported the median of the
rounds'. A line a goal says what was to be reached.

- `adapter`: every row has the same adapter. `adapters`: each row has its own; `adapters16`: of 16
  bits.
- `enabled`: no row has one, where there is room for some. `beside`: half of the rows have none.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Sequence
from typing import Any

import torch

from slipstream.cli.options.parser import Parser
from slipstream_bench.common.measures import Row
from slipstream_bench.common.options import Option, add, fill_in, integer, name_of
from slipstream_bench.common.report import add_common, check_common, print_rows
from slipstream_core.adapters.adapter_file import Factors
from slipstream_core.config import CoreConfig, LoraConfig
from slipstream_core.runner import torch_factory
from slipstream_core.runner.torch_runner import TorchRunner
from slipstream_lab.common.bare_loop import (
    LoopRequest,
    decode_intervals_s,
    drive,
    random_prompts,
)
from slipstream_lab.common.goals import Goal
from slipstream_lab.compare.small_model import SMALL_MODEL

_RANK, _NUM_ADAPTERS, _PROMPT_LEN = 16, 64, 8
_MODELS = {
    "S": SMALL_MODEL,
    "M": "random:qwen3-0.6b,hidden_size=768,intermediate_size=2304,num_hidden_layers=14,"
    "num_attention_heads=12,num_key_value_heads=4,head_dim=64,vocab_size=32000",
}
_LEAST = {("adapter", streams): 0.97 for streams in (1, 8, 64)}
_LEAST |= {("enabled", streams): 0.99 for streams in (1, 8, 64)}
_LEAST |= {("beside", 8): 0.99, ("adapters", 64): 0.9, ("adapters16", 64): 0.9}

_OPTIONS = (
    Option("size", name_of(("S", "M")), "model, as docs/benchmarks.md has them", "S"),
    Option("tokens", integer(8, 512), "tokens of each answer; default: 96, with --quick 12"),
    Option("threads", integer(1), "threads that compute the model"),
)


def add_options(parser: Parser) -> None:
    """The benchmark's options."""
    add(parser.add_argument_group("what is measured"), _OPTIONS)
    add_common(parser, runs=5)
    parser.set_defaults(run=bench_adapters)


def bench_adapters(arguments: argparse.Namespace) -> int:
    """Measure and report."""
    check_common(arguments)
    values = fill_in(arguments, _OPTIONS)
    num_tokens = arguments.tokens or (12 if arguments.quick else 96)
    config: dict[str, Any] = {
        "model": _MODELS[values["size"]],
        "address": "",
        "device": "cpu",
        "dtype": "float32",
        "max_num_seqs": _NUM_ADAPTERS,
        "max_model_len": 1024,
        "kv_cache_gib": 0.5,
        "threads": values["threads"],
    }
    plain = torch_factory.load_runner(CoreConfig(**config))
    lora = LoraConfig(max_rank=_RANK, max_loras=2 * _NUM_ADAPTERS)
    adapted = torch_factory.load_runner(CoreConfig(**config, lora=lora))
    try:
        num_bytes = add_random_adapters(adapted)
        ratios = _in_rounds(plain, adapted, arguments.runs, num_tokens)
    finally:
        plain.close()
        adapted.close()
    rows: list[Row] = [
        {
            "kind": kind,
            "streams": streams,
            "speed": statistics.median(ratio for ratio, _ in found),
            "without_ms": 1e3 * statistics.median(seconds for _, seconds in found),
            "adapter_mb": num_bytes / 1e6,
        }
        for (kind, streams), found in ratios.items()
    ]
    print_rows(rows, arguments, ("kind", "streams", "speed", "without_ms", "adapter_mb"))
    print(*goals(rows), sep="\n")
    return 0


def goals(rows: Sequence[Row]) -> list[Goal]:
    """Return the goals, and whether they were met."""
    return [
        Goal(
            f"{row['kind']}, {row['streams']} streams, times the speed without adapters",
            float(row["speed"] or 0),
            _LEAST[str(row["kind"]), int(row["streams"] or 0)],
        )
        for row in rows
    ]


def add_random_adapters(runner: TorchRunner) -> int:
    """Fill the places of a runner, the second half in bfloat16, with changes of each layer but the
    head, as peft's `all-linear` has them; returns the bytes of one adapter in float32.
    """
    table = runner.adapters
    assert table is not None
    torch.manual_seed(0)
    num_bytes = 0
    for place in range(_NUM_ADAPTERS):
        factors = {
            name: Factors(
                torch.randn(_RANK, site.num_inputs) / site.num_inputs,
                torch.randn(_RANK, site.num_outputs) / _RANK,
            )
            for name, site in table.sites.items()
            if name != "lm_head"
        }
        table.put(place, factors)
        halves = {name: Factors(a.bfloat16(), b.bfloat16()) for name, (a, b) in factors.items()}
        table.put(_NUM_ADAPTERS + place, halves)
        num_bytes = sum(each.nbytes for both in factors.values() for each in both)
    return num_bytes


def _in_rounds(
    plain: TorchRunner, adapted: TorchRunner, rounds: int, num_tokens: int
) -> dict[tuple[str, int], list[tuple[float, float]]]:
    """Return, by kind and round, the speed relative to that without, and its seconds of a step."""
    found: dict[tuple[str, int], list[tuple[float, float]]] = {key: [] for key in _LEAST}
    for at in range(rounds):
        for kind, streams in found:
            seconds = {}
            for is_adapted in (True, False) if at % 2 else (False, True):
                requests = _requests(kind if is_adapted else "", streams, num_tokens, plain)
                driven = drive(adapted if is_adapted else plain, requests, budget=1024)
                taken = decode_intervals_s(driven.steps, streams)
                seconds[is_adapted] = statistics.median(taken)
            found[kind, streams].append((seconds[False] / seconds[True], seconds[False]))
    return found


def _requests(kind: str, streams: int, num_tokens: int, runner: TorchRunner) -> list[LoopRequest]:
    places = {
        "adapter": [0] * streams,
        "adapters": list(range(streams)),
        "adapters16": list(range(_NUM_ADAPTERS, _NUM_ADAPTERS + streams)),
        "beside": [at if at % 2 else -1 for at in range(streams)],
    }.get(kind, [-1] * streams)
    prompts = random_prompts(streams, _PROMPT_LEN, runner.info.vocab_size)
    return [
        LoopRequest(prompt, num_tokens, adapter=place)
        for prompt, place in zip(prompts, places, strict=True)
    ]
