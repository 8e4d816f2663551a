"""`slipstream bench hybrid`: a model with recurrent states beside a dense one of as many
parameters, and beside transformers.

Both have random weights of about 150 M parameters and run on the CPU in float32, Qwen3.5's layers
(three gated delta nets, then attention) and Qwen3's. A round measures each once; ratios are of
medians over rounds. A row for each part of a decode step says where its time goes. The second turn
of a conversation with the hybrid is measured once (`second_turn`). The host's work of a step is
that of the core's own parts over a simulated device, with marks in the answers. A line a goal says
what was to be reached.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers

from slipstream.cli.options.parser import Parser
from slipstream_bench.common.measures import Row
from slipstream_bench.common.options import Option, add, fill_in, integer
from slipstream_bench.common.report import add_common, check_common, print_rows
from slipstream_core.config import CoreConfig
from slipstream_core.runner import torch_factory
from slipstream_core.runner.torch_runner import TorchRunner
from slipstream_core.step.plan import StepPlan, blank_plan
from slipstream_lab.common.core_parts import PARTS, CoreParts
from slipstream_lab.common.goals import Goal
from slipstream_lab.models.model_steps import decode_step, timed
from slipstream_lab.models.operation_times import decode_parts
from slipstream_lab.models.second_turn import MESSAGE_LEN, measure_second_turn

_BATCHES = (1, 64)
_CONTEXT = 64  # tokens in front of a decode step
_LEAST = {"decode 1": 0.95, "decode 64": 0.9, "prefill": 0.7, "transformers, decode 1": 2.5}
_FOUND, _SOONER = 0.9, 10.0
_HOST = 1.05  # times the dense model's time
_HOST_SNAPSHOTS = 128  # half of which may be of answers that go on
_HOST_STEPS = 256  # each row has a mark in 64
_COMMON: dict[str, Any] = {
    "vocab_size": 32_000,
    "hidden_size": 768,
    "num_hidden_layers": 12,
    "num_attention_heads": 12,
    "num_key_value_heads": 4,
    "head_dim": 64,
    "max_position_embeddings": 32_768,
    "tie_word_embeddings": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
_MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "hybrid": (
        "Qwen3_5TextConfig",
        {
            "intermediate_size": 2560,
            "linear_num_key_heads": 6,
            "linear_num_value_heads": 6,
            "linear_key_head_dim": 128,
            "linear_value_head_dim": 128,
            "layer_types": [*["linear_attention"] * 3, "full_attention"] * 3,
        },
    ),
    "dense": ("Qwen3Config", {"intermediate_size": 3072}),
}

_OPTIONS = (
    Option("steps", integer(1), "decode steps of a round; default: 8, with --quick 2"),
    Option("prefill", integer(1, 4096), "tokens of a prompt", 512),
    Option(
        "conversation",
        integer(64, 32_000),
        "tokens of a conversation's first turn; default: 8000, with --quick 400",
    ),
    Option("threads", integer(1), "threads that compute the models"),
    Option("layers", integer(4), "of both models, a multiple of 4", 12),
    Option(
        "rows",
        integer(2),
        "requests whose host's work is measured; default: 1024, with --quick 64",
    ),
)


def add_options(parser: Parser) -> None:
    """The benchmark's options."""
    add(parser.add_argument_group("what is measured"), _OPTIONS)
    add_common(parser, runs=5)
    parser.set_defaults(run=bench_hybrid)


def bench_hybrid(arguments: argparse.Namespace) -> int:
    """Measure and report."""
    check_common(arguments)
    values = fill_in(arguments, _OPTIONS)
    steps = arguments.steps or (2 if arguments.quick else 8)
    conversation = arguments.conversation or (400 if arguments.quick else 8000)
    with tempfile.TemporaryDirectory() as folder:
        seconds = _measure(
            Path(folder),
            steps=steps,
            prefill=values["prefill"],
            threads=values["threads"],
            layers=values["layers"],
            rounds=arguments.runs,
        )
        turn_goals = _second_turn(Path(folder) / "hybrid", conversation, values["threads"], seconds)
    num_rows = arguments.rows or (64 if arguments.quick else 1024)
    for _ in range(1 if arguments.quick else 3):
        for name, snapshots in (("dense", None), ("hybrid", _HOST_SNAPSHOTS)):
            part = name, f"host, decode {num_rows}"
            seconds.setdefault(part, []).append(_host_s(num_rows, snapshots))
    rows: list[Row] = [
        {"model": model, "part": part, "ms": 1e3 * statistics.median(each), "runs": len(each)}
        for (model, part), each in seconds.items()
    ]
    print_rows(rows, arguments, ("model", "part", "ms", "runs"))
    for goal in (*goals(rows), *turn_goals):
        print(goal)
    return 0


def goals(rows: list[Row]) -> list[Goal]:
    """How fast the hybrid is, in times the dense model's speed and transformers'."""
    ms: dict[tuple[Any, Any], Any] = {(row["model"], row["part"]): row["ms"] for row in rows}
    found = []
    for name, least in _LEAST.items():
        model, _, part = name.rpartition(", ")
        other = ms[model or "dense", part]
        of = "transformers'" if model else "the dense model's"
        found.append(Goal(f"{part}, times {of} speed", other / ms["hybrid", part], least))
    hosts = [ms[key] for key in sorted(ms) if str(key[1]).startswith("host")]
    if hosts:
        dense, hybrid = hosts
        name = "host's work of a step, times the dense model's"
        found.append(Goal(name, hybrid / dense, _HOST, is_most=True))
    return found


def _host_s(num_rows: int, num_snapshots: int | None) -> float:
    """CPU seconds of a core's loop for a decode step, the mean; without the device."""
    parts = CoreParts(
        num_rows,
        prompt_len=128,
        steps=_HOST_STEPS,
        enable_prefix_caching=True,
        num_snapshots=num_snapshots,
    )
    try:
        for _ in range(_HOST_STEPS):
            parts.step()
        us = parts.measured_us()
    finally:
        parts.close()
    return sum(statistics.mean(us[part]) for part in PARTS) / 1e6


def _measure(
    folder: Path, *, steps: int, prefill: int, threads: int | None, layers: int, rounds: int
) -> dict[tuple[str, str], list[float]]:
    """Seconds of each part of each model, by round."""
    if threads is not None:
        torch.set_num_threads(threads)
    runners = {
        name: _load(_save(name, folder / name, layers), prefill, threads) for name in _MODELS
    }
    seconds: dict[tuple[str, str], list[float]] = {}
    plans: dict[tuple[str, int], StepPlan] = {}
    try:
        reference = transformers.AutoModelForCausalLM.from_pretrained(folder / "hybrid").eval()
        parts: list[tuple[str, str, Callable[[], float]]] = [
            ("transformers", "decode 1", lambda: _transformers_s(reference, steps))
        ]
        for name, runner in runners.items():
            for batch in _BATCHES:
                decode = decode_step(batch, _CONTEXT)
                parts.append((name, f"decode {batch}", timed(runner, decode, steps)))
                plans[name, batch] = decode
            parts.append((name, "prefill", timed(runner, _prompt(prefill), 1)))
        for _, _, measure in parts:
            measure()  # buffers grow, libraries choose
        for at in range(rounds):  # in turns, there and back
            for name, part, measure in parts if at % 2 else reversed(parts):
                seconds.setdefault((name, part), []).append(measure())
        for (name, batch), decode in plans.items():
            for part, taken in decode_parts(runners[name], decode, steps).items():
                seconds.setdefault((name, f"decode {batch}: {part}"), []).append(taken)
    finally:
        for runner in runners.values():
            runner.close()
    return seconds


def _second_turn(
    folder: Path, num_tokens: int, threads: int | None, seconds: dict[tuple[str, str], list[float]]
) -> list[Goal]:
    """Measure a conversation of the hybrid; adds the seconds until first tokens."""
    runner = _load(folder, num_tokens + MESSAGE_LEN, threads)
    try:
        turn = measure_second_turn(runner, num_tokens)
    finally:
        runner.close()
    seconds["hybrid", "second turn"] = [turn.first_token_s]
    seconds["hybrid", "second turn, cold"] = [turn.cold_s]
    sooner = turn.cold_s / turn.first_token_s
    return [
        Goal("second turn, share of the first one that is found", turn.found, _FOUND),
        Goal("second turn's first token, times as soon as a cold one's", sooner, _SOONER),
    ]


def _save(name: str, folder: Path, layers: int) -> Path:
    kind, own = _MODELS[name]
    own = _COMMON | own | {"num_hidden_layers": layers}
    if "layer_types" in own:
        own["layer_types"] = own["layer_types"][:4] * (layers // 4)
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(getattr(transformers, kind)(**own))
    num = sum(each.numel() for each in model.parameters())
    print(f"{name}: {num / 1e6:.0f} M parameters", flush=True)
    model.save_pretrained(folder)
    return folder


def _load(folder: Path, prefill: int, threads: int | None) -> TorchRunner:
    return torch_factory.load_runner(
        CoreConfig(
            model=str(folder),
            address="none",
            device="cpu",
            dtype="float32",
            max_num_seqs=max(_BATCHES),
            max_model_len=max(prefill, _CONTEXT) + 1,
            num_blocks=2 + (max(prefill, _CONTEXT) + 1) // 16,
            threads=threads,
        )
    )


def _prompt(num_tokens: int) -> StepPlan:
    lens = np.array([num_tokens], np.int32)
    return blank_plan(
        num_decodes=0,
        token_ids=np.arange(num_tokens) % 1000,
        positions=np.arange(num_tokens),
        slots=np.zeros(1, np.int64),
        query_lens=lens,
        kv_lens=lens,
        prompt_lens=lens,
        samples=np.ones(1, bool),
        temperatures=np.zeros(1, np.float32),
    )


def _transformers_s(model: Any, steps: int) -> float:
    """The median of seconds that transformers takes for a token behind others."""
    taken = []
    with torch.inference_mode():
        outputs = model(torch.arange(_CONTEXT)[None], use_cache=True, logits_to_keep=1)
        for _ in range(steps):
            begin = time.perf_counter()
            ids = outputs.logits[:, -1:].argmax(-1)
            outputs = model(ids, past_key_values=outputs.past_key_values, use_cache=True)
            taken.append(time.perf_counter() - begin)
    return statistics.median(taken)
