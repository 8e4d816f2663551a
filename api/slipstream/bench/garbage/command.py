"""`slipstream bench gc`: measuring the shapes, and telling.

Owns: what a row says, in which order things are measured. Does not know: how ids travel.

Rules:
- A step is the device's time, which is simulated and takes no time here, and behind it the host's
  CPU time, which is measured: an engine that hides nothing, like the one whose report this
  reproduces (vLLM issue 26369).
- The collector keeps its default thresholds. `is_frozen` says whether what was loaded before the
  requests was frozen, as the product does; where it is not, a full collection looks at all of it.
"""

from __future__ import annotations

import argparse
import gc
import platform
import time
from importlib.metadata import version

import numpy as np
import numpy.typing as npt
from tokenizers import Tokenizer

from slipstream.bench.collection_watch import CollectionWatch
from slipstream.bench.common_options import check_common
from slipstream.bench.garbage.shapes import Columns, Ints, ListsOfLists, Shape
from slipstream.bench.measures import Row
from slipstream.bench.output_path.path import OutputPath
from slipstream.bench.output_path.reading import TogetherReader
from slipstream.bench.output_path.stopwatch import Stopwatch
from slipstream.bench.output_path.workload import detokenizers_of, make_workload
from slipstream.bench.pictures import grouped_bars
from slipstream.bench.tables import median_rows, table, write_json
from slipstream.bench.variants import params_of
from slipstream.demo import MODEL_PATH
from slipstream.settings import wrong_option

Int64s = npt.NDArray[np.int64]

_VOCAB_SIZE = 4096
_PROMPT_LEN = 8
_STEPS, _QUICK_STEPS = 1000, 200
_WARM_UP_STEPS = 20  # the parts grow to their size, the collector forgets how they were set up
_COMPARED = ("lists_of_lists", "ints", "columns")
_SHAPES = (*_COMPARED, "product")
_COLUMNS = (
    *("shape", "is_frozen", "batch", "step_ms", "tokens_per_s", "gain_over_lists_percent"),
    *("host_us_per_step", "gc_share_percent"),
    *("gen0_per_1000_steps", "gen1_per_1000_steps", "gen2_per_1000_steps"),
    *("longest_pause_ms", "tracked_net_per_step", "blocks_net_per_step"),
)
_ABOUT = """\
A step's ids from the engine to the requests' readers. A step takes the device's time, simulated,
and behind it the host's CPU time, measured: nothing is hidden behind the device, so that one sees
what the host costs. The collector has its default thresholds {thresholds}.
lists_of_lists, ints, columns: one loop, see `slipstream.bench.garbage.shapes`; it makes a message,
encodes, decodes, keeps histories, hands deltas to readers, both sides in one process.
product: Slipstream's own path, core to client, in columns too. It does more than the loops (text,
ends, cursors, acknowledgements, reports), so compare its collections, not its speed.
is_frozen: whether what was loaded is kept from the collector (gc.freeze), as the product keeps it.
tracked_net: containers made less those freed, which is what brings collections about."""


def bench_gc(arguments: argparse.Namespace) -> int:
    """Measure all shapes, frozen and not; tell."""
    check_common(arguments)
    if arguments.batch < 1:
        raise wrong_option("batch", arguments.batch, "an integer >= 1")
    if arguments.step_ms <= 0:
        raise wrong_option("step_ms", arguments.step_ms, "milliseconds, > 0")
    steps = arguments.steps
    if steps is None:
        steps = _QUICK_STEPS if arguments.quick else _STEPS
    if steps < 1:
        raise wrong_option("steps", steps, "an integer >= 1")
    runs = [
        _measured(shape, arguments.batch, steps, arguments.step_ms, is_frozen=is_frozen)
        for _ in range(arguments.runs)
        for is_frozen in (True, False)
        for shape in _SHAPES
    ]
    rows = _with_gains(median_rows(runs, ("shape", "is_frozen")))
    print(_ABOUT.format(thresholds=gc.get_threshold()))
    print("\n".join(table(rows, _COLUMNS)), flush=True)
    if arguments.json is not None:
        write_json(rows, arguments.json)
    if arguments.png is not None:
        _draw(rows, arguments.png)
    return 0


def _measured(shape: str, batch: int, steps: int, step_ms: float, *, is_frozen: bool) -> Row:
    """One run."""
    gc.collect()
    if is_frozen:
        gc.freeze()
    num_loaded = len(gc.get_objects())
    num_frozen = gc.get_freeze_count()
    try:
        # one step more, behind what is watched: in it streams end
        shape_of_ids = (_WARM_UP_STEPS + steps + 1, batch)
        ids = np.random.default_rng(0).integers(0, _VOCAB_SIZE, shape_of_ids)
        loop = _loop(shape, ids)
        for some in ids[:_WARM_UP_STEPS]:
            loop.step(some)
        gc.collect()
        with CollectionWatch() as watch:
            begin = time.thread_time_ns()
            for some in ids[_WARM_UP_STEPS:-1]:
                loop.step(some)
            host_ns = time.thread_time_ns() - begin
        loop.step(ids[-1])
        loop.check_end(ids[-1])
    finally:
        gc.unfreeze()
    host_us = host_ns / steps / 1e3
    per_1000 = [round(1000 * number / steps, 2) for number in watch.num_collections]
    return {
        "benchmark": "gc",
        "version": version("slipstream"),
        "python": platform.python_version(),
        "shape": shape,
        "is_frozen": is_frozen,
        "batch": batch,
        "step_ms": step_ms,
        "steps": steps,
        "tokens_per_s": round(batch / (step_ms / 1e3 + host_us / 1e6), 1),
        "host_us_per_step": round(host_us, 2),
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


def _mean_ms(pause_ns: int, number: int) -> float | None:
    return round(pause_ns / number / 1e6, 4) if number else None


def _loop(shape: str, ids: Int64s) -> Shape:
    batch = ids.shape[1]
    if shape == "lists_of_lists":
        return ListsOfLists(batch)
    if shape == "ints":
        return Ints(batch)
    if shape == "columns":
        return Columns(batch, len(ids))
    return _Product(Tokenizer.from_file(str(MODEL_PATH / "tokenizer.json")), batch, len(ids))


class _Product:
    """Slipstream's own path, with text; its deltas are taken and not looked at."""

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
        """Its workload has ids of its own: such as make text."""
        self._path.step()
        self._reader.read()
        self._path.take_reports()

    def check_end(self, _ids: Int64s) -> None:
        """Every stream has had all of its tokens."""
        self._path.check_whole()
        self._path.close()


def _with_gains(rows: list[Row]) -> list[Row]:
    lists = {
        row["is_frozen"]: row["tokens_per_s"] for row in rows if row["shape"] == "lists_of_lists"
    }
    found: list[Row] = []
    for row in rows:
        ratio = float(row["tokens_per_s"] or 0) / float(lists[row["is_frozen"]] or 1)
        gain = None if row["shape"] == "product" else round(100 * (ratio - 1), 2)
        found.append(row | {"gain_over_lists_percent": gain})
    return found


def _draw(rows: list[Row], file: str) -> None:
    """The three loops."""
    frozen = {True: "frozen heap", False: "heap not frozen"}
    grouped_bars(
        file,
        _COMPARED,
        {
            name: [
                float(row["tokens_per_s"] or 0)
                for row in rows
                if row["is_frozen"] is is_frozen and row["shape"] in _COMPARED
            ]
            for is_frozen, name in frozen.items()
        },
        title=f"The shape of a step's ids: {rows[0]['batch']} requests, "
        f"{rows[0]['step_ms']:g} ms steps, nothing hidden behind the device",
        x_label="shape",
        y_label="tokens per second",
    )
