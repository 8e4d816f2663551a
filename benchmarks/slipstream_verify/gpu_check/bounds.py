"""What a device can do at most, and what a step must take at least.

- The ceilings, bytes and bf16 operations per second, are measured once for all sections of a run.
- A decode step reads every weight that one of its rows needs, once, and the cache of every row.
  Embeddings are read by row, so they count only if tied to the output's matrix. Of experts, those
  count that some row selects; the selection is taken as uniform and independent, as with random
  weights: of E, each row selecting k, that is E * (1 - (1 - k/E)**rows) on average.
- A prefill has two operations per weight and token; for the output's matrix, per sampled row. Its
  attention is counted separately: two products of 2 * head_dim per head, for each token and each
  one before it.
"""

from __future__ import annotations

import json
import statistics
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from slipstream_core.model.random_weights import random_config
from slipstream_core.step.plan import ModelInfo, Runner
from slipstream_verify.gpu_check.setting import GpuSetting

_Event: Any = torch.cuda.Event  # untyped in torch
# not annotated in transformers
_from_config: Any = AutoModelForCausalLM.from_config
_REPLAYS = 20


def bandwidth_bytes_per_s(device: str, num_bytes: int) -> float:
    """Bandwidth of a copy in the device's memory: 2 * num_bytes (read, written) / seconds."""
    source = torch.empty(num_bytes, dtype=torch.uint8, device=device).random_()
    target = torch.empty_like(source)
    return 2 * num_bytes / median_s(device, lambda: target.copy_(source))


def bf16_flops_per_s(device: str, size: int) -> float:
    """Rate of a square matrix product of random numbers: 2 * size**3 operations / seconds.

    On the CPU it is in float32, as the models of a dry run are: bfloat16 may be emulated there.
    """
    dtype = torch.float32 if device == "cpu" else torch.bfloat16
    left, right = (torch.randn(size, size, device=device).to(dtype) for _ in range(2))
    return 2 * size**3 / median_s(device, lambda: left @ right)


@dataclass(frozen=True, slots=True)
class Ceilings:
    """The limits of one device."""

    bytes_per_s: float
    bf16_flops_per_s: float


def ceilings(setting: GpuSetting) -> Ceilings:
    """The limits measured by the run's first section, with sizes well beyond the caches.

    A section asks for them before it loads a runner, which leaves a card no memory to measure them
    in: they are measured anew where the first section was killed.
    """
    path = setting.folder / "ceilings.json"
    if path.exists():
        return Ceilings(**json.loads(path.read_text()))
    found = Ceilings(
        bandwidth_bytes_per_s(setting.device, 1 << 26 if setting.is_quick else 1 << 32),
        bf16_flops_per_s(setting.device, matrix_size(setting)),
    )
    if setting.device == "cuda":
        torch.cuda.empty_cache()
    path.write_text(json.dumps(asdict(found)))
    return found


def matrix_size(setting: GpuSetting) -> int:
    """Rows and columns of the multiplied matrices."""
    return 512 if setting.is_quick else 8192


def median_s(device: str, work: Callable[[], object], *, repeats: int = 10) -> float:
    """Seconds that `work` takes on the device: the median of `repeats` after three warm-up runs."""
    times: list[float] = []
    for _ in range(3 + repeats):
        begin = time.perf_counter()
        if device == "cuda":
            first, last = (_Event(enable_timing=True) for _ in range(2))
            first.record()
            work()
            last.record()
            last.synchronize()
            times.append(first.elapsed_time(last) * 1e-3)
        else:
            work()
            times.append(time.perf_counter() - begin)
    return statistics.median(times[3:])


@dataclass(frozen=True, slots=True)
class ForwardWork:
    """A model's costs; numbers are of weights, not of bytes."""

    dense: int  # used by every token: all but embeddings, the output's matrix and experts
    output: int  # of the output's matrix
    experts: int  # of all experts of all layers
    num_experts: int  # per layer; 1 without experts
    experts_per_token: int
    attention_dims: int  # query heads * head_dim, over all layers

    def weights_read(self, rows: int) -> float:
        """Weights read by a step that decodes `rows` rows."""
        chosen = 1 - (1 - self.experts_per_token / self.num_experts) ** rows
        return self.dense + self.output + self.experts * chosen

    def linear_flops(self, tokens: int, sampled: int) -> float:
        """Operations of the linear layers over `tokens`, of which `sampled` are sampled."""
        active = self.dense + self.experts * self.experts_per_token / self.num_experts
        return 2 * (active * tokens + self.output * sampled)

    def attention_flops(self, begin: int, end: int) -> float:
        """Attention operations of one row's tokens [begin, end), each attending to all up to
        itself.
        """
        seen = (begin + 1 + end) * (end - begin) / 2
        return 4 * self.attention_dims * seen


def work_of(model: str) -> ForwardWork:
    """The work of `random:NAME`, counted on a model without memory."""
    config: Any = random_config(model)
    with torch.device("meta"):
        module = _from_config(config, dtype=torch.bfloat16)
    embeddings = module.get_input_embeddings().weight
    output = module.get_output_embeddings().weight
    experts = [p for name, p in module.named_parameters() if ".experts." in name]
    outside = {id(p) for p in (embeddings, output, *experts)}
    dense = sum(p.numel() for p in module.parameters() if id(p) not in outside)
    return ForwardWork(
        dense=dense,
        output=output.numel(),
        experts=sum(p.numel() for p in experts),
        num_experts=getattr(config, "num_experts", 1) or 1,
        experts_per_token=getattr(config, "num_experts_per_tok", 1) or 1,
        attention_dims=config.num_hidden_layers * config.num_attention_heads * config.head_dim,
    )


def replay_s(runner: Runner, batch: int, context: int) -> float | None:
    """Seconds of the step's recorded graphs alone, sampler and logprobs included: replayed back to
    back, without any host work between. Overwrites the cache.

    None if the runner records no graphs at all; raises ValueError if it did not record this one.
    """
    bare_replay: Any = getattr(runner, "bare_replay", None)
    if bare_replay is None:
        return None
    seconds: float = bare_replay(batch, _REPLAYS, context=context)
    return seconds / _REPLAYS


@dataclass(frozen=True, slots=True)
class StepWork:
    """What a step must do at least."""

    num_bytes: float  # of weights and cache, each read or written once
    flops: float

    def bound_s(self, limits: Ceilings) -> float:
        """Seconds that no implementation can save: of bytes or operations, what takes longer."""
        return max(self.num_bytes / limits.bytes_per_s, self.flops / limits.bf16_flops_per_s)


def step_work(
    info: ModelInfo, work: ForwardWork, rows: Sequence[tuple[int, int]], weight_bytes: int
) -> StepWork:
    """The work of a step over `rows`, each (tokens before, tokens now), all of them sampled."""
    num = sum(now for _, now in rows)
    cached = sum(before + now for before, now in rows)
    attention = sum(
        times * work.attention_flops(before, before + now)
        for (before, now), times in Counter(rows).items()
    )
    return StepWork(
        work.weights_read(num) * weight_bytes + cached * info.block_bytes / info.block_size,
        work.linear_flops(num, len(rows)) + attention,
    )
