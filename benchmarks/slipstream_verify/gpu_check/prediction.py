"""How long a step should take on a card, from counts: what a first run on one is held against.

A decode step is recorded, so it costs its launches and the bytes that it reads; a prefill costs its
launches and its operations, or its bytes where they take longer. Launches are counted in the fused
forward, recorded on the meta device with a few layers; a layer more adds what the largest one has.
An operator of torch counts as one launch, attention as two, as three where it stores keys and
values, sampling as `_SAMPLING`.

The model leaves out what no count tells: how near a kernel comes to the card's limits, which
kernels overlap, and what one of torch's operators launches beside its own kernel. `LAUNCH_US` is an
H100's: what a replay of one row took beside the bytes, over the launches counted here, was 2.9 µs
for Qwen3-0.6B and 2.8 for Llama-3.1-8B. Since one row has products of its own, whose kernels start
while those before them end, it is `ROW_LAUNCH_US` for Llama-3.1-8B.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from slipstream_bench.common.measures import Row
from slipstream_core.attention.interface import ATTENTION_NAME, register
from slipstream_core.forward.forward_ops import ForwardOps
from slipstream_core.forward.fuse_card import launches_by_layer, num_launches
from slipstream_core.forward.product_patterns import Launches
from slipstream_core.forward.trace_card import fused_graph
from slipstream_core.model.random_weights import random_config
from slipstream_core.model.rope import freeze_frequencies
from slipstream_verify.gpu_check.bounds import ForwardWork, work_of
from slipstream_verify.gpu_check.setting import SHAPES

BATCHES = (1, 32, 256)
CONTEXT = 1024  # tokens before each row of a decode step
PREFILL_TOKENS = 8192
LAUNCH_US = 2.8
ROW_LAUNCH_US = 1.9  # in a step of one row
WEIGHT_BYTES = 2  # bfloat16
_META = torch.device("meta")
_COUNTED_LAYERS = 3
_SAMPLING = 18  # launches behind the logits: sampling and what the next step needs

# not annotated in transformers
_from_config: Any = AutoModelForCausalLM.from_config


@dataclass(frozen=True, slots=True)
class Card:
    """A card's limits: bytes and dense bf16 operations per second."""

    name: str
    bytes_per_s: float
    bf16_flops_per_s: float


# An H100 as measured (benchmarks/gpu; its data sheet says 3.35 and 989), and NVIDIA's data sheet of
# the H200 SXM
CARDS = (Card("H100", 2.95e12, 785e12), Card("H200", 4.8e12, 989e12))


@dataclass(frozen=True, slots=True)
class StepTime:
    """What a step costs. launch_s and the larger of the other two make up its time."""

    launch_s: float
    bytes_s: float
    flops_s: float

    @property
    def total_s(self) -> float:
        """Of the whole step."""
        return self.launch_s + max(self.bytes_s, self.flops_s)

    @property
    def bound_share(self) -> float:
        """The share of it that no better host or fewer kernels could save."""
        return max(self.bytes_s, self.flops_s) / self.total_s


def launches_of(shape: str) -> Launches:
    """Launches of a step of `random:SHAPE`, fused, sampling included."""
    config: Any = random_config(f"random:{shape}")
    num_layers: int = config.num_hidden_layers
    config.num_hidden_layers = _COUNTED_LAYERS
    config.pad_token_id = None  # as the loader sets it
    register()
    with _META:
        kind = torch.bfloat16
        module = _from_config(config, dtype=kind, attn_implementation=ATTENTION_NAME).eval()
    freeze_frequencies(module)
    graph = fused_graph(module, ForwardOps(), _META).graph

    def counted(*, one_row: bool) -> int:
        of_layer = max(launches_by_layer(graph, one_row=one_row))
        more = (num_layers - _COUNTED_LAYERS) * of_layer
        return num_launches(graph, one_row=one_row) + more + _SAMPLING

    return Launches(counted(one_row=False), counted(one_row=True))


def decode_time(
    work: ForwardWork, kv_bytes: float, launches: Launches, batch: int, card: Card
) -> StepTime:
    """A decode step of `batch` rows. kv_bytes: of one token's cache."""
    num_bytes = work.weights_read(batch) * WEIGHT_BYTES + batch * CONTEXT * kv_bytes
    flops = work.linear_flops(batch, batch) + batch * work.attention_flops(CONTEXT, CONTEXT + 1)
    if batch == 1 and launches.of_one_row < launches.num:
        return _step_time(launches.of_one_row * ROW_LAUNCH_US, num_bytes, flops, card)
    return _step_time(launches.num * LAUNCH_US, num_bytes, flops, card)


def prefill_time(work: ForwardWork, kv_bytes: float, launches: Launches, card: Card) -> StepTime:
    """A prefill of one prompt of PREFILL_TOKENS tokens in one step, recorded."""
    tokens = PREFILL_TOKENS
    num_bytes = work.weights_read(tokens) * WEIGHT_BYTES + tokens * kv_bytes
    flops = work.linear_flops(tokens, 1) + work.attention_flops(0, tokens)
    return _step_time(launches.num * LAUNCH_US, num_bytes, flops, card)


def predicted_rows(card: Card) -> list[Row]:
    """The table of all shapes."""
    rows: list[Row] = []
    for shape in SHAPES:
        config: Any = random_config(f"random:{shape}")
        work, launches = work_of(shape), launches_of(shape)
        heads = config.num_key_value_heads * config.head_dim * config.num_hidden_layers
        kv_bytes = 2.0 * heads * WEIGHT_BYTES
        times = {f"decode {batch}": (batch, batch) for batch in BATCHES}
        times[f"prefill {PREFILL_TOKENS}"] = (0, PREFILL_TOKENS)
        for case, (batch, tokens) in times.items():
            time = (
                decode_time(work, kv_bytes, launches, batch, card)
                if batch
                else prefill_time(work, kv_bytes, launches, card)
            )
            rows.append(
                {
                    "model": shape,
                    "step": case,
                    "launches": launches.of_one_row if batch == 1 else launches.num,
                    "launch_ms": time.launch_s * 1e3,
                    "bytes_ms": time.bytes_s * 1e3,
                    "flops_ms": time.flops_s * 1e3,
                    "step_ms": time.total_s * 1e3,
                    "bound_share": time.bound_share,
                    "tokens_per_s": tokens / time.total_s,
                }
            )
    return rows


def _step_time(launch_us: float, num_bytes: float, flops: float, card: Card) -> StepTime:
    return StepTime(launch_us * 1e-6, num_bytes / card.bytes_per_s, flops / card.bf16_flops_per_s)
