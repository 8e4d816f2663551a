"""`slipstream bench quantised`: one model with matrices of 16, 8 and 4 bits beside float32.

It has random weights, about 145 M of them as layers of Qwen3, and runs on the CPU: a checkpoint of
bfloat16 as it is, quantised as it is loaded, and the same numbers as a checkpoint of float32. A
round measures decode steps of each once; ratios are of medians over rounds. A line a goal says what
was to be reached.

Another model, of experts as layers of Qwen3-MoE, is measured as well; beside it stands the same in
float32 as transformers computes it, with its grouped products of torch.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import transformers

from slipstream.cli.options.parser import Parser
from slipstream_bench.common.measures import Row
from slipstream_bench.common.options import Option, add, fill_in, integer
from slipstream_bench.common.report import add_common, check_common, print_rows
from slipstream_core.config import CoreConfig
from slipstream_core.model.loader import load_model
from slipstream_core.runner import torch_factory
from slipstream_core.runner.torch_runner import KernelConfig, TorchRunner
from slipstream_lab.common.goals import Goal
from slipstream_lab.models.model_steps import decode_step, timed

_BATCHES = (1, 8, 64)
_CONTEXT = 64  # tokens in front of a decode step
_WIDE = "float32"
_FORMATS = {_WIDE: None, "bfloat16": None, "q8_0": "q8_0", "q4_0": "q4_0"}
_AS_IT_IS = "as transformers has them"
_LEAST_OF_EXPERTS = 3.0
_LEAST = {
    ("bfloat16", 1): 1.5,
    ("q8_0", 1): 1.8,
    ("q8_0", 8): 1.4,
    ("q8_0", 64): 0.97,
    ("q4_0", 1): 2.2,
    ("q4_0", 8): 1.6,
    ("q4_0", 64): 0.97,
}
_MODEL: dict[str, Any] = {
    "vocab_size": 32_000,
    "hidden_size": 768,
    "intermediate_size": 2304,
    "num_attention_heads": 12,
    "num_key_value_heads": 4,
    "head_dim": 64,
    "tie_word_embeddings": False,
}
_EXPERTS: dict[str, Any] = _MODEL | {
    "vocab_size": 8_000,
    "num_experts": 64,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 384,
}
_MODELS = {"qwen3": _MODEL, "qwen3_moe": _EXPERTS}

_OPTIONS = (
    Option("steps", integer(1), "decode steps of a round; default: 8, with --quick 2"),
    Option("threads", integer(1), "threads that compute the model"),
    Option("layers", integer(1), "of the model", 14),
    Option("expert_layers", integer(1), "of the model of experts", 4),
)


def add_options(parser: Parser) -> None:
    """The benchmark's options."""
    add(parser.add_argument_group("what is measured"), _OPTIONS)
    add_common(parser, runs=5)
    parser.set_defaults(run=bench_quantised)


def bench_quantised(arguments: argparse.Namespace) -> int:
    """Measure and report."""
    check_common(arguments)
    values = fill_in(arguments, _OPTIONS)
    steps = arguments.steps or (2 if arguments.quick else 8)
    rows: list[Row] = []
    for model, layers in (("qwen3", "layers"), ("qwen3_moe", "expert_layers")):
        with tempfile.TemporaryDirectory() as folder:
            _save(Path(folder), model, values[layers])
            names = [*_FORMATS, *([_AS_IT_IS] if model == "qwen3_moe" else [])]
            seconds = _measure(Path(folder), names, steps, values["threads"], arguments.runs)
        rows += [
            {
                "model": model,
                "weights": name,
                "streams": batch,
                "ms": 1e3 * statistics.median(each),
                "tokens_per_s": batch / statistics.median(each),
                "runs": len(each),
            }
            for (name, batch), each in seconds.items()
        ]
    print_rows(rows, arguments, ("model", "weights", "streams", "ms", "tokens_per_s", "runs"))
    for goal in goals(rows):
        print(goal)
    return 0


def goals(rows: list[Row]) -> list[Goal]:
    """How fast coded matrices are, in times the speed of float32, and experts, in times that of
    transformers' own.
    """
    ms: dict[Any, Any] = {(row["model"], row["weights"], row["streams"]): row["ms"] for row in rows}
    return [
        Goal(
            f"{name}, streams at once: {batch}, times float32's speed",
            ms["qwen3", _WIDE, batch] / ms["qwen3", name, batch],
            least,
        )
        for (name, batch), least in _LEAST.items()
    ] + [
        Goal(
            f"experts, {name}, streams at once: {batch}, times the speed of transformers' own",
            ms["qwen3_moe", _AS_IT_IS, batch] / ms["qwen3_moe", name, batch],
            _LEAST_OF_EXPERTS,
        )
        for name in _FORMATS
        for batch in _BATCHES
    ]


def _measure(
    folder: Path, names: Sequence[str], steps: int, threads: int | None, rounds: int
) -> dict[tuple[str, int], list[float]]:
    """Seconds of a decode step of each format and number of streams, by round."""
    if threads is not None:
        torch.set_num_threads(threads)
    seconds: dict[tuple[str, int], list[float]] = {}
    runners = {name: _load(folder, name, threads) for name in names}
    try:
        parts = [
            (name, batch, timed(runner, decode_step(batch, _CONTEXT), steps))
            for batch in _BATCHES
            for name, runner in runners.items()
        ]
        for _, _, measure in parts:
            measure()  # buffers grow
        for at in range(rounds):  # in turns, there and back
            for name, batch, measure in parts if at % 2 else reversed(parts):
                seconds.setdefault((name, batch), []).append(measure())
    finally:
        for runner in runners.values():
            runner.close()
    return seconds


def _save(folder: Path, model_type: str, layers: int) -> None:
    """A checkpoint of bfloat16, and its numbers in float32."""
    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(
        model_type, **_MODELS[model_type], num_hidden_layers=layers
    )
    model: Any = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    num = sum(each.numel() for each in model.parameters())
    print(f"the model has {num / 1e6:.1f} M parameters", flush=True)
    model.save_pretrained(folder / "narrow")
    model.config.dtype = torch.float32
    model.float().save_pretrained(folder / "wide")


def _load(folder: Path, name: str, threads: int | None) -> TorchRunner:
    if name == _AS_IT_IS:
        model = load_model(str(folder / "wide"), device="cpu", dtype="float32")
        return TorchRunner(
            model,
            num_blocks=2 + (_CONTEXT + 1) // 16,
            block_size=16,
            max_num_seqs=max(_BATCHES),
            kernel_config=KernelConfig(packs=False, threads=threads),
        )
    return torch_factory.load_runner(
        CoreConfig(
            model=str(folder / ("wide" if name == _WIDE else "narrow")),
            address="none",
            device="cpu",
            dtype="float32",
            quantization=_FORMATS[name],
            max_num_seqs=max(_BATCHES),
            max_model_len=_CONTEXT + 1,
            num_blocks=2 + (_CONTEXT + 1) // 16,
            threads=threads,
        )
    )
