"""`slipstream bench lora-load`: the gaps of streams while an adapter is loaded beside them.

A stack of its own serves a random model on the CPU. While `streams` answers run, an adapter is
loaded and unloaded again and again, with pauses as long as a load took. A gap is the time between
two deltas of one stream, of one step each. Gaps that a load overlaps are compared with those of the
pauses: loading is to delay no stream by more than one step, so the longest gap beside a load is at
most the longest in pauses and one median gap more.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import torch
import uvloop
from safetensors.torch import save_file

from slipstream import AsyncClient, SamplingParams, Stack
from slipstream.cli.options.parser import Parser
from slipstream.demo_model import MODEL_PATH
from slipstream_bench.common.measures import Row
from slipstream_bench.common.options import Option, add, fill_in, integer
from slipstream_bench.common.report import add_common, check_common, print_rows
from slipstream_lab.common.goals import Goal

_RANK = 128


class Shape(NamedTuple):
    """The sizes of a Qwen3 whose layers all have an adapter."""

    hidden_size: int = 768
    intermediate_size: int = 2304
    num_layers: int = 14
    num_heads: int = 12
    num_kv_heads: int = 4
    head_dim: int = 64

    @property
    def model(self) -> str:
        """It with random weights, as `--model` takes it."""
        return (
            f"random:qwen3-0.6b,hidden_size={self.hidden_size},"
            f"intermediate_size={self.intermediate_size},num_hidden_layers={self.num_layers},"
            f"num_attention_heads={self.num_heads},num_key_value_heads={self.num_kv_heads},"
            f"head_dim={self.head_dim},vocab_size=32000"
        )

    def sites(self) -> dict[str, tuple[int, int]]:
        """The inputs and outputs of each linear layer but the head, by its name."""
        hidden, inner = self.hidden_size, self.intermediate_size
        queries, keys = self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim
        layer = {
            "self_attn.q_proj": (hidden, queries),
            "self_attn.k_proj": (hidden, keys),
            "self_attn.v_proj": (hidden, keys),
            "self_attn.o_proj": (queries, hidden),
            "mlp.gate_proj": (hidden, inner),
            "mlp.up_proj": (hidden, inner),
            "mlp.down_proj": (inner, hidden),
        }
        return {
            f"model.layers.{at}.{name}": sizes
            for at in range(self.num_layers)
            for name, sizes in layer.items()
        }


_SHAPE = Shape()
_OPTIONS = (
    Option("streams", integer(1, 64), "answers that run at a time", 8),
    Option("loads", integer(1, 1000), "loads in a run", 8, 2),
)


class Times(NamedTuple):
    """Beginnings and ends, in seconds of one clock: of each stream's gaps, and of the loads."""

    gaps: list[tuple[float, float]]
    loads: list[tuple[float, float]]


def add_options(parser: Parser) -> None:
    """The benchmark's options."""
    add(parser.add_argument_group("what is measured"), _OPTIONS)
    add_common(parser, runs=3)
    parser.set_defaults(run=bench_loads)


def bench_loads(arguments: argparse.Namespace) -> int:
    """Measure and report."""
    check_common(arguments)
    values = fill_in(arguments, _OPTIONS)
    streams, loads = int(values["streams"]), int(values["loads"])
    with tempfile.TemporaryDirectory(prefix="slipstream-bench-") as folder:
        num_bytes = write_random_adapter(Path(folder) / "adapter")
        with Stack(
            model=_SHAPE.model,
            tokenizer=str(MODEL_PATH),
            device="cpu",
            dtype="float32",
            max_num_seqs=streams,
            max_model_len=4096,
            kv_cache_gib=1.0,
            stream_interval=1,
            enable_lora=True,
            max_lora_rank=_RANK,
            max_loras=2,
            allow_runtime_lora_updating=True,
            lora_root=folder,
            spare_core=False,
            spare_worker=False,
        ) as stack:
            runs = [
                uvloop.run(_load_beside(stack.address, folder, streams, loads))
                for _ in range(arguments.runs)
            ]
    rows = [row(times, streams, num_bytes) for times in runs]
    print_rows(rows, arguments)
    print(goal(rows))
    return 0


def row(times: Times, streams: int, num_bytes: int) -> Row:
    """Return a run's row: a gap that any load overlaps is one of the loads."""
    loading: list[float] = []
    pausing: list[float] = []
    for began, ended in times.gaps:
        overlaps = any(began < end and start < ended for start, end in times.loads)
        (loading if overlaps else pausing).append(ended - began)
    return {
        "streams": streams,
        "adapter_mb": num_bytes / 1e6,
        "load_ms": 1e3 * statistics.median(end - start for start, end in times.loads),
        "pause_median_ms": 1e3 * statistics.median(pausing),
        "pause_longest_ms": 1e3 * max(pausing),
        "load_median_ms": 1e3 * statistics.median(loading),
        "load_longest_ms": 1e3 * max(loading),
    }


def goal(rows: Sequence[Row]) -> Goal:
    """Return the goal, in steps, of the median run, and whether it was met."""
    delays = [
        (float(row["load_longest_ms"] or 0) - float(row["pause_longest_ms"] or 0))
        / float(row["pause_median_ms"] or 1)
        for row in rows
    ]
    return Goal("longest delay by a load, in steps", statistics.median(delays), 1, is_most=True)


def write_random_adapter(folder: Path) -> int:
    """Write an adapter of all linear layers but the head as peft does; returns its bytes."""
    folder.mkdir()
    torch.manual_seed(0)
    tensors = {}
    for name, (inputs, outputs) in _SHAPE.sites().items():
        site = f"base_model.model.{name}"
        tensors[f"{site}.lora_A.weight"] = torch.randn(_RANK, inputs) / inputs
        tensors[f"{site}.lora_B.weight"] = torch.randn(outputs, _RANK) / _RANK
    save_file(tensors, folder / "adapter_model.safetensors")
    config = {
        "peft_type": "LORA",
        "r": _RANK,
        "lora_alpha": _RANK,
        "target_modules": sorted({name.rpartition(".")[2] for name in _SHAPE.sites()}),
        "bias": "none",
        "task_type": "CAUSAL_LM",
    }
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return sum(each.nbytes for each in tensors.values())


async def _load_beside(address: str, folder: str, streams: int, loads: int) -> Times:
    """Load while `streams` answers run, and note all gaps from the first load on."""
    times = Times([], [])
    num_begun = 0
    all_run = asyncio.Event()
    params = SamplingParams(max_tokens=4000, ignore_eos=True)

    async def read(client: AsyncClient, number: int) -> None:
        nonlocal num_begun
        while True:
            async with client.stream(f"Stream {number}", params) as stream:
                await anext(stream)
                before = time.perf_counter()
                num_begun += 1
                if num_begun == streams:
                    all_run.set()
                async for _ in stream:
                    now = time.perf_counter()
                    times.gaps.append((before, now))
                    before = now

    async with AsyncClient(address) as client, asyncio.TaskGroup() as tasks:
        readers = [tasks.create_task(read(client, number)) for number in range(streams)]
        await all_run.wait()
        times.gaps.clear()
        for at in range(loads):
            began = time.perf_counter()
            await client.load_lora_adapter(f"adapter-{at}", f"{folder}/adapter")
            ended = time.perf_counter()
            times.loads.append((began, ended))
            await asyncio.sleep(ended - began)
            await client.unload_lora_adapter(f"adapter-{at}")
        for reader in readers:
            reader.cancel()
    return times
