"""Products of a few rows with a weight: plain torch, oneDNN and Slipstream with a packed weight.

    python -m slipstream_bench.studies.packed_products [--threads 2]

Prints the median time of each in milliseconds, for the shapes [k, n] of two small models. The
weights of all layers take turns, so that they come from memory as a model's would. With one thread,
CPU time is measured, so that a busy machine shows the same.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable

import torch

from slipstream_core.runner.cpu.kernels import kernels

SHAPES = ((256, 768), (256, 1536), (768, 768), (768, 1280), (768, 4608), (2304, 768), (256, 32000))
ROWS = (1, 2, 4, 16, 64, 512)
_CACHE_BYTES = 64 << 20  # larger than the CPU's caches


def _median_ms(
    product: Callable[..., object],
    x: torch.Tensor,
    weights: list[torch.Tensor],
    rest: tuple[object, ...],
    clock: Callable[[], float],
) -> float:
    for weight in weights:
        product(x, weight, *rest)
    times = []
    for turn in range(max(9, len(weights))):
        weight = weights[turn % len(weights)]
        begin = clock()
        product(x, weight, *rest)
        times.append(clock() - begin)
    return statistics.median(times) * 1e3


def _say(line: str) -> None:
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--threads", type=int, default=2)
    threads = parser.parse_args().threads
    torch.set_num_threads(threads)
    clock = time.thread_time if threads == 1 else time.perf_counter
    ours = kernels()
    if ours is None:
        raise SystemExit("our kernels could not be compiled")
    reorder, onednn = torch.ops.mkldnn._reorder_linear_weight, torch.ops.mkldnn._linear_pointwise
    _say(f"{'[k, n]':>14} {'rows':>5} {'plain ms':>9} {'oneDNN ms':>9} {'ours ms':>9}")
    with torch.inference_mode():
        for k, n in SHAPES:
            copies = max(1, _CACHE_BYTES // (4 * k * n))
            plain = [torch.randn(k, n).t() for _ in range(copies)]
            theirs = [reorder(weight, 64) for weight in plain]
            packed = [ours.pack(weight) for weight in plain]
            for rows in ROWS:
                x = torch.randn(1, rows, k)
                calls: list[
                    tuple[Callable[..., object], list[torch.Tensor], tuple[object, ...]]
                ] = [
                    (torch.nn.functional.linear, plain, ()),
                    (onednn, theirs, (None, "none", [], "")),
                    (ours.product, packed, (None, n)),
                ]
                each = " ".join(
                    f"{_median_ms(product, x, weights, rest, clock):9.3f}"
                    for product, weights, rest in calls
                )
                shape = f"[{k}, {n}]"
                _say(f"{shape:>14} {rows:>5} {each}")


if __name__ == "__main__":
    main()
