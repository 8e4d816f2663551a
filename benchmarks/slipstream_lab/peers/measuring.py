"""What the programs of peers share: their command line, their requests, CPU time by stage, rows. It
needs numpy alone, as it runs in the peers' own environments.

- The requests are those that `slipstream bench output-path` has measured itself with: it writes
  them into the file that --workload names, with its variants and batches.
- CPU time is this thread's, without the cost of reading the clock.
- The garbage collector keeps its default thresholds. Objects that exist before the requests are
  frozen, as the peers' own servers do or can be configured to.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

Row = dict[str, Any]

_NUM_TRIALS = 20_000


@dataclass(frozen=True)
class PeerVariant:
    """What the requests ask for."""

    name: str
    stop: list[str]
    logprobs: int | None
    interval: int


@dataclass(frozen=True)
class PeerWorkload:
    """The requests, and what a model would have made of them. B of them, T steps."""

    prompts: list[list[int]]  # [B][prompt length]
    outputs: list[list[int]]  # [B][T]
    logprobs: np.ndarray  # [B, 6] float32, the same at every step
    candidates: np.ndarray  # [B, 6] int32; column 0 is to be the sampled token
    variants: list[PeerVariant]

    @property
    def steps(self) -> int:
        return len(self.outputs[0])


class PeerStopwatch:
    """Adds up the CPU time of this thread: `start`, then `lap` at the end of each stage."""

    lap_ns = 0.0  # what one `lap` costs by itself; measured once, by `main`

    def __init__(self) -> None:
        self.ns: Counter[str] = Counter()
        self.num_laps: Counter[str] = Counter()
        self._last = 0

    def start(self) -> None:
        self._last = time.thread_time_ns()

    def lap(self, stage: str) -> None:
        now = time.thread_time_ns()
        self.ns[stage] += now - self._last
        self.num_laps[stage] += 1
        self._last = now

    def us(self, stage: str) -> float:
        return max(0.0, self.ns[stage] - self.lap_ns * self.num_laps[stage]) / 1e3


@dataclass
class PeerRun:
    """What one run over all steps gave."""

    watch: PeerStopwatch
    num_bytes: int = 0
    num_deltas: int = 0
    collections: tuple[int, ...] = ()


class Collections:
    """Freezes what there is on entering; counts collections from `begin` on."""

    def __enter__(self) -> Collections:
        gc.collect()
        gc.freeze()
        return self

    def __exit__(self, *_error: object) -> None:
        gc.unfreeze()

    def begin(self) -> None:
        gc.collect()  # what setting up has left behind
        self._before = self._so_far()

    def counted(self) -> tuple[int, ...]:
        return tuple(n - b for n, b in zip(self._so_far(), self._before, strict=True))

    def _so_far(self) -> list[int]:
        return [generation["collections"] for generation in gc.get_stats()]


def options(description: str) -> argparse.Namespace:
    """The command line that all programs have."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--model", required=True, help="folder with tokenizer and config.json")
    parser.add_argument("--workload", required=True, type=Path, help="an .npz file of requests")
    parser.add_argument("--batches", default="1,32,256,1024")
    parser.add_argument("--variants", help="default: all that the workload names")
    parser.add_argument(
        "--runs", type=int, default=3, help="runs of each point; the rows hold their medians"
    )
    parser.add_argument("--json", type=Path, help="default: standard output")
    return parser.parse_args()


def load_workload(file: Path) -> PeerWorkload:
    """What `slipstream bench output-path` wrote."""
    with np.load(file) as arrays:
        return PeerWorkload(
            prompts=arrays["prompts"].tolist(),
            outputs=arrays["outputs"].tolist(),
            logprobs=arrays["logprobs"].astype(np.float32),
            candidates=arrays["candidates"].astype(np.int32),
            variants=[PeerVariant(**one) for one in json.loads(str(arrays["variants"]))],
        )


def measure_all(
    arguments: argparse.Namespace,
    workload: PeerWorkload,
    measure: Callable[[int, PeerVariant], PeerRun],
    *,
    counted: tuple[str, ...],
    shown: tuple[str, ...],
    about: Row,
) -> list[Row]:
    """A row for each batch and variant.

    counted: the stages that `us_per_token` adds up. shown: further stages, which it does not.
    about: columns that all rows have.
    """
    PeerStopwatch.lap_ns = _measured_lap_ns()
    wanted = arguments.variants.split(",") if arguments.variants else None
    variants = [one for one in workload.variants if wanted is None or one.name in wanted]
    batches = [int(batch) for batch in arguments.batches.split(",")]
    for variant in variants:  # warm-up: touching memory for the first time costs more
        measure(max(batches), variant)
    rows = []
    for batch in batches:
        for variant in variants:
            runs = [measure(batch, variant) for _ in range(arguments.runs)]
            rows.append(about | _row(runs, batch, variant, workload.steps, counted, shown))
    return rows


def write_rows(rows: list[Row], file: Path | None) -> None:
    """As JSON: a list of objects."""
    text = json.dumps(rows, indent=2) + "\n"
    if file is None:
        sys.stdout.write(text)
    else:
        file.write_text(text, encoding="utf-8")


def _row(
    runs: list[PeerRun],
    batch: int,
    variant: PeerVariant,
    steps: int,
    counted: tuple[str, ...],
    shown: tuple[str, ...],
) -> Row:
    num_tokens = batch * steps

    def median(values: Iterable[float]) -> float:
        return round(statistics.median(values), 4)

    def us(stage: str) -> float:
        return median(run.watch.us(stage) / num_tokens for run in runs)

    return {
        "batch": batch,
        "variant": variant.name,
        "us_per_token": median(sum(map(run.watch.us, counted)) / num_tokens for run in runs),
        **{f"{stage}_us": us(stage) for stage in counted + shown},
        "bytes_per_token": median(run.num_bytes / num_tokens for run in runs),
        "deltas_per_token": median(run.num_deltas / num_tokens for run in runs),
        **{
            f"gc_gen{generation}": int(median(run.collections[generation] for run in runs))
            for generation in range(3)
        },
        "steps": steps,
        "runs": len(runs),
    }


def _measured_lap_ns() -> float:
    watch = PeerStopwatch()
    watch.start()
    for _ in range(_NUM_TRIALS):
        watch.lap("nothing")
    return watch.ns["nothing"] / _NUM_TRIALS
