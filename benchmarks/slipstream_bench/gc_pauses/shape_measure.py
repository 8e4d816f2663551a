"""One run of `slipstream bench gc`: drives a shape with the ids of a device, simulated or real, and
measures its collections and host time.

A step's host time is the CPU time of this thread while the shape handles the ids; producing the ids
is excluded.
"""

from __future__ import annotations

import gc
import platform
import time
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, version

import numpy as np
import numpy.typing as npt
from tokenizers import Tokenizer

from slipstream.demo_model import MODEL_PATH
from slipstream_bench.common.collection_watch import CollectionWatch
from slipstream_bench.common.measures import Row
from slipstream_bench.common.variants import params_of
from slipstream_bench.gc_pauses.shapes import Columns, HeapShape, Ints, ListsOfLists
from slipstream_bench.output_path.delta_readers import TogetherReader
from slipstream_bench.output_path.in_process_path import OutputPath
from slipstream_bench.output_path.stopwatch import Stopwatch
from slipstream_bench.output_path.workload import detokenizers_of, make_workload

Int64s = npt.NDArray[np.int64]

COMPARED = ("lists_of_lists", "ints", "columns")
SHAPES = (*COMPARED, "product")
WARM_UP_STEPS = 20  # until buffers have grown and the setup has been collected

_PROMPT_LEN = 8


def measure(shape: str, batch: int, steps: int, ids: Iterator[Int64s], *, is_frozen: bool) -> Row:
    """One run over the next WARM_UP_STEPS + steps + 1 arrays of `ids`, int64 [batch] each.

    `wall_s` covers the measured steps, including what produces their ids.
    """
    gc.collect()
    if is_frozen:
        gc.freeze()
    num_loaded = len(gc.get_objects())
    num_frozen = gc.get_freeze_count()
    try:
        # one step after the measured ones, in which streams end
        loop = _loop(shape, batch, WARM_UP_STEPS + steps + 1)
        for _ in range(WARM_UP_STEPS):
            loop.step(next(ids))
        gc.collect()
        host_ns = 0
        began = time.perf_counter()
        with CollectionWatch() as watch:
            for _ in range(steps):
                some = next(ids)
                begin = time.thread_time_ns()
                loop.step(some)
                host_ns += time.thread_time_ns() - begin
        wall_s = time.perf_counter() - began
        last = next(ids)
        loop.step(last)
        loop.check_end(last)
    finally:
        gc.unfreeze()
    per_1000 = [round(1000 * number / steps, 2) for number in watch.num_collections]
    return {
        "benchmark": "gc",
        "version": _version(),
        "python": platform.python_version(),
        "shape": shape,
        "is_frozen": is_frozen,
        "batch": batch,
        "steps": steps,
        "wall_s": round(wall_s, 6),
        "host_us_per_step": round(host_ns / steps / 1e3, 2),
        "gc_share_percent": round(100 * sum(watch.pause_ns) / host_ns, 2),
        **{f"gen{generation}_per_1000_steps": number for generation, number in enumerate(per_1000)},
        **{
            f"gen{generation}_pause_mean_ms": _mean_ms(pause_ns, number)
            for generation, (pause_ns, number) in enumerate(
                zip(watch.pause_ns, watch.num_collections, strict=True)
            )
        },
        "longest_pause_ms": round(watch.longest_pause_ns / 1e6, 4),
        "tracked_net_per_step": round(watch.num_tracked_net / steps, 2),
        "blocks_net_per_step": round(watch.num_blocks_net / steps, 2),
        "num_loaded_objects": num_loaded,
        "num_frozen_objects": num_frozen,
    }


def with_gains(rows: list[Row]) -> list[Row]:
    """The rows, each with its gain in tokens per second over lists of lists."""
    lists = {
        row["is_frozen"]: row["tokens_per_s"] for row in rows if row["shape"] == "lists_of_lists"
    }
    found: list[Row] = []
    for row in rows:
        ratio = float(row["tokens_per_s"] or 0) / float(lists[row["is_frozen"]] or 1)
        gain = None if row["shape"] == "product" else round(100 * (ratio - 1), 2)
        found.append(row | {"gain_over_lists_percent": gain})
    return found


def _version() -> str | None:
    try:
        return version("slipstream")
    except PackageNotFoundError:  # run from source (gpu-check)
        return None


def _mean_ms(pause_ns: int, number: int) -> float | None:
    return round(pause_ns / number / 1e6, 4) if number else None


def _loop(shape: str, batch: int, num_steps: int) -> HeapShape:
    if shape == "lists_of_lists":
        return ListsOfLists(batch)
    if shape == "ints":
        return Ints(batch)
    if shape == "columns":
        return Columns(batch, num_steps)
    return _Product(Tokenizer.from_file(str(MODEL_PATH / "tokenizer.json")), batch, num_steps)


class _Product:
    """Slipstream's own path, with text; its deltas are taken but not inspected."""

    def __init__(self, tokenizer: Tokenizer, batch: int, steps: int) -> None:
        self._path = OutputPath(
            make_workload(tokenizer, batch, prompt_len=_PROMPT_LEN, steps=steps),
            batch,
            params_of("plain", steps),
            detokenizers_of(tokenizer),
            tokenizer.get_vocab_size(with_added_tokens=True),
            Stopwatch(CollectionWatch()),
            is_together=True,
        )
        assert self._path.group is not None
        self._reader = TogetherReader(self._path.group, is_materialised=False)

    def step(self, _ids: Int64s) -> None:
        """One step of its workload, whose own ids decode to text; the given ids are ignored."""
        self._path.step()
        self._reader.read()
        self._path.take_reports()

    def check_end(self, _ids: Int64s) -> None:
        """Every stream has received all of its tokens."""
        self._path.check_whole()
        self._path.close()
