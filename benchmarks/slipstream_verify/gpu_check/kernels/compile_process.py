"""A process that compiles some of a list of kernels: `... compile_process LIST --share I N`.

It prints a line of JSON for each kernel. Its results are in Triton's cache folder, where later
processes find them. With a card it also makes the launchers, which need one; without, it compiles
for `--capability` and says what the kernels take.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch

from slipstream_core.attention import kv_cache
from slipstream_core.attention.geometry import LayerGeometry
from slipstream_core.attention.triton_backend import Launch, TritonAttention
from slipstream_core.kernels.card.dependent_launch import MOST_TOKENS, SOON
from slipstream_core.kernels.card.tiles import H100_SHARED_LIMIT
from slipstream_core.model.random_weights import random_config
from slipstream_core.sampling.whole_vocab_sampling import WholeVocabSampler
from slipstream_verify.gpu_check.kernels.compile_target import compile_for, resources
from slipstream_verify.gpu_check.kernels.tile_sweep import (
    LAYERS,
    candidates,
    launches_to_compile,
    tile_cases,
    tile_name,
)
from slipstream_verify.gpu_check.models import SMALL_BLOCK, SMALL_VOCAB
from slipstream_verify.gpu_check.reference_cases import attention_cases

LISTS = ("exactness", "models", "tiles")
_EARLY_GENERATION = 90  # the first compute capability that has it

_BFLOAT16, _FLOAT32 = torch.bfloat16, torch.float32
# of `models.ARCHITECTURES`: heads, those of keys, dim twice, window, softcap, sinks
SMALL_LAYERS = tuple(
    LayerGeometry(4, *others)
    for others in (
        (2, 32, 32, None, None, False),
        (2, 32, 32, 11, None, False),
        (2, 32, 32, None, 50.0, False),
        (2, 32, 32, 11, 50.0, False),
        (2, 32, 32, None, None, True),
        (2, 32, 32, 11, None, True),
        (4, 32, 32, None, None, False),
    )
)


class CompileJob(NamedTuple):
    """Some kernels."""

    name: str
    launches: Callable[[], list[Launch]]
    is_early: bool = True  # steps of few tokens launch them as well


def main() -> int:
    """Compile; the exit code is 0 also if kernels failed, which their lines say."""
    parser = argparse.ArgumentParser()
    parser.add_argument("list", choices=LISTS)
    parser.add_argument("--share", nargs=2, type=int, required=True, metavar=("I", "N"))
    parser.add_argument("--device", choices=("cuda", "cpu"), required=True)
    parser.add_argument("--capability", type=int, default=90)
    parser.add_argument("--shared-bytes", type=int, default=H100_SHARED_LIMIT)
    parser.add_argument("--quick", action="store_true")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    if arguments.device == "cpu":
        compile_for(arguments.capability)
        capability = arguments.capability
    else:
        major, minor = torch.cuda.get_device_capability()
        capability = 10 * major + minor
    index, num = arguments.share
    jobs = list(jobs_of(arguments.list, arguments.shared_bytes, is_quick=arguments.quick))
    with tempfile.TemporaryDirectory() as folder:
        for job in jobs[index::num]:
            line = json.dumps(_compiled(job, arguments.device, capability, Path(folder)))
            sys.stdout.write(line + "\n")
            sys.stdout.flush()
    return 0


def jobs_of(which: str, shared_bytes: int, *, is_quick: bool) -> Iterator[CompileJob]:
    """The jobs of a list, always in the same order."""
    if which == "tiles":
        cases = tile_cases(is_quick=is_quick)
        few = {(it.step, it.layer) for it in cases if it.num_tokens <= MOST_TOKENS}
        for name, (step, layer, tile) in _tiles(is_quick=is_quick).items():
            launches = partial(launches_to_compile, step, layer, tile)
            yield CompileJob(name, launches, is_early=(step, layer) in few)
        return
    layers: dict[tuple[LayerGeometry, int, torch.dtype], None] = {}
    if which == "models":
        layers.update({(layer, 16, _BFLOAT16): None for layer in LAYERS.values()})
        vocabs = [(random_config(f"random:{shape}").vocab_size, _BFLOAT16) for shape in LAYERS]
    else:
        for dtype in (_BFLOAT16, _FLOAT32):
            layers.update({(layer, SMALL_BLOCK, dtype): None for layer in SMALL_LAYERS})
        vocabs = [(SMALL_VOCAB, dtype) for dtype in (_BFLOAT16, _FLOAT32)]
    of_models = [_attention_job(*layer, shared_bytes) for layer in layers]
    if is_quick:
        yield from of_models[:3]
        return
    yield from of_models
    for vocab_size, dtype in dict.fromkeys(vocabs):
        yield from _sampling_jobs(vocab_size, dtype)
    if which == "exactness":
        for dtype in (_BFLOAT16, torch.float16, _FLOAT32):
            of_cases = {(it.geometry(), it.block_size, dtype) for it in attention_cases(long=True)}
            for layer in sorted(of_cases - layers.keys(), key=str):
                yield _attention_job(*layer, shared_bytes)


def _attention_job(
    layer: LayerGeometry, block_size: int, dtype: torch.dtype, shared_bytes: int
) -> CompileJob:
    name = f"{layer}, blocks of {block_size}, {str(dtype).removeprefix('torch.')}"
    return CompileJob(name, partial(_every_launch, layer, block_size, dtype, shared_bytes))


def _sampling_jobs(vocab_size: int, dtype: torch.dtype) -> Iterator[CompileJob]:
    """One per kernel, of recorded steps with logits of `dtype` and of others."""
    sampler, device = WholeVocabSampler(), torch.device("cpu")
    launches = sampler.every_launch(vocab_size, device)
    launches += sampler.every_launch(vocab_size, device, dtype, recorded=True)
    for at, it in enumerate(launches):
        name = f"sampling of {vocab_size}, {str(dtype).removeprefix('torch.')}, kernel {at}"
        launch = Launch(it.kernel, it.grid, it.arguments)
        yield CompileJob(name, partial(list, [launch]))


def _tiles(*, is_quick: bool) -> dict[str, Any]:
    """What a sweep compiles, by name: cases with the same layer share their kernels."""
    found: dict[Any, None] = {}
    for case in tile_cases(is_quick=is_quick):
        for tile in candidates(case.step, is_quick=is_quick):
            found[case.step, case.layer, tile] = None
    return {
        f"{step}, {layer.num_heads} heads, {layer.num_kv_heads} of keys: {tile_name(tile)}": (
            step,
            layer,
            tile,
        )
        for step, layer, tile in found
    }


def _every_launch(
    layer: LayerGeometry, block_size: int, dtype: torch.dtype, shared_bytes: int
) -> list[Launch]:
    device = torch.device("cpu")
    cache = kv_cache.allocate(
        [layer], num_blocks=2, block_size=block_size, dtype=dtype, device=device
    )
    attention = TritonAttention(
        cache, block_size=block_size, device=device, shared_bytes=shared_bytes
    )
    return attention.every_launch(0, layer, dtype)


def with_early(job: CompileJob, launches: list[Launch], capability: int) -> list[Launch]:
    """A job's launches, and those that a card of this generation starts early."""
    if not job.is_early or capability < _EARLY_GENERATION:
        return launches
    late = [it for it in launches if it.arguments.get("EARLY") is False]
    return launches + [replace(it, arguments=it.arguments | SOON) for it in late]


def _compiled(job: CompileJob, device: str, capability: int, folder: Path) -> dict[str, Any]:
    began = time.perf_counter()
    line: dict[str, Any] = {"job": job.name}
    try:
        for launch in with_early(job, job.launches(), capability):
            if device == "cuda":
                launch.load()
                continue
            for name, value in resources(launch.compile(), folder).items():
                line[name] = max(value, line.get(name, 0))
    except Exception as error:
        line["error"] = f"{type(error).__name__}: {error}"[:300]
    return {**line, "seconds": round(time.perf_counter() - began, 3)}


if __name__ == "__main__":
    raise SystemExit(main())
