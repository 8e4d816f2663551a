"""Measures one point: the requests of a variant, generated to their end and read in one way.

- The garbage collector keeps its default thresholds. Objects that exist before the requests are
  frozen, as the product's processes do after loading.
- Work that does not belong to the output path runs between the laps of the stopwatch.
- The wire is measured apart, by the sizes of the run's messages, with both ends in this process.
"""

from __future__ import annotations

import gc
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

import uvloop

from slipstream_bench.common.measures import Row
from slipstream_bench.common.variants import Variant, params_of
from slipstream_lab.common.collection_watch import CollectionWatch
from slipstream_lab.output_path.delta_readers import (
    Read,
    StreamsReader,
    TaskReader,
    TogetherReader,
)
from slipstream_lab.output_path.floor import BARE, Bare, Sent, Transport, floor_of, wire_us
from slipstream_lab.output_path.in_process_path import PROCESSES, STAGES, OutputPath
from slipstream_lab.output_path.stopwatch import Stopwatch
from slipstream_lab.output_path.workload import Workload
from slipstream_worker.detokenizer.factory import DetokenizerFactory

ENGINE, FLOOR = "slipstream", "floor"
_IN_USE: Transport = "local"  # between the product's processes on one machine
_BARE_IN_USE: Bare = "unix"


@dataclass(frozen=True, slots=True)
class PathSetting:
    """What all measurements share."""

    workload: Workload
    detokenizers: DetokenizerFactory
    vocab_size: int
    lap_ns: float  # see `Stopwatch`


def measure(
    setting: PathSetting,
    batch: int,
    variant: Variant,
    read: Read,
    num_workers: int = 1,
    tokens_per_row: tuple[int, int] = (1, 1),
) -> Row:
    """One run."""
    collections = CollectionWatch()
    watch = Stopwatch(collections, lap_ns=setting.lap_ns)
    path, num_deltas = _run_path(
        setting, batch, variant, read, watch, collections, num_workers, tokens_per_row
    )
    steps = setting.workload.outputs.shape[1]
    num_tokens = batch * steps
    messages, num_bytes = path.messages, path.num_bytes
    stages = {stage: watch.us(stage) / num_tokens for stage in STAGES}
    wire, floor = _beside_floor(messages)
    path_us = sum(stages.values()) + wire / num_tokens
    return {
        "engine": ENGINE,
        "batch": batch,
        "variant": variant,
        "read": read,
        "workers": num_workers,
        "tokens": name_of_span(tokens_per_row),
        "us_per_token": round(sum(stages.values()), 4),
        **{f"{stage}_us": round(us, 4) for stage, us in stages.items()},
        "wire_us": round(wire / num_tokens, 4),
        "floor_us": round(floor / num_tokens, 4),
        "over_floor": round(path_us * num_tokens / floor, 3),
        "messages_per_token": round(len(messages) / num_tokens, 4),
        "bytes_per_token": round(num_bytes.total() / num_tokens, 3),
        "core_bytes_per_token": round(num_bytes["core"] / num_tokens, 3),
        "deltas_per_token": round(num_deltas / num_tokens, 4),
        **{
            f"gc_gen{generation}": number
            for generation, number in enumerate(collections.num_collections)
        },
        **_by_process(path.num_tracked, 2 * steps // sum(tokens_per_row) - 2),
    }


def name_of_span(tokens_per_row: tuple[int, int]) -> int | str:
    """The spelling that the option takes: `2` or `2-5`."""
    least, most = tokens_per_row
    return least if least == most else f"{least}-{most}"


def _beside_floor(messages: Sequence[Sent]) -> tuple[float, float]:
    """CPU microseconds of the messages on the wire in use, and of their floor; medians of some that
    are measured in turns, as the machine may be twice as fast a second later.
    """
    turns = [(wire_us(messages, _IN_USE), floor_of(messages, (_BARE_IN_USE,))) for _ in range(3)]
    floors = [each.encode_us + each.decode_us + each.wire_us[_BARE_IN_USE] for _, each in turns]
    return median(wire for wire, _ in turns), median(floors)


def measure_floor(setting: PathSetting, batch: int, variant: Variant) -> list[Row]:
    """The floor of a run's messages: a row per transport."""
    collections = CollectionWatch()
    path, _ = _run_path(setting, batch, variant, "columns", Stopwatch(collections), collections)
    num_tokens = batch * setting.workload.outputs.shape[1]
    messages, num_bytes = path.messages, path.num_bytes.total()
    floor = floor_of(messages)
    rows: list[Row] = []
    for transport in BARE:
        parts = {
            "encode_us": floor.encode_us,
            "decode_us": floor.decode_us,
            "wire_us": floor.wire_us[transport],
        }
        rows.append(
            {
                "engine": FLOOR,
                "batch": batch,
                "variant": variant,
                "read": transport,
                "workers": 1,
                "tokens": 1,
                "us_per_token": round(sum(parts.values()) / num_tokens, 4),
                **{name: round(us / num_tokens, 4) for name, us in parts.items()},
                "messages_per_token": round(len(messages) / num_tokens, 4),
                "bytes_per_token": round(num_bytes / num_tokens, 3),
            }
        )
    return rows


def _run_path(
    setting: PathSetting,
    batch: int,
    variant: Variant,
    read: Read,
    watch: Stopwatch,
    collections: CollectionWatch,
    num_workers: int = 1,
    tokens_per_row: tuple[int, int] = (1, 1),
) -> tuple[OutputPath, int]:
    """The path, run to its end and closed, and the number of deltas read."""
    gc.collect()
    gc.freeze()
    try:
        path = OutputPath(
            setting.workload,
            batch,
            params_of(variant, setting.workload.outputs.shape[1]),
            setting.detokenizers,
            setting.vocab_size,
            watch,
            is_together=read in ("columns", "materialised"),
            num_workers=num_workers,
            tokens_per_row=tokens_per_row,
        )
        try:
            if read == "async_for":
                num_deltas = uvloop.run(_run_in_loop(path, watch, collections))
            else:
                num_deltas = _run(path, watch, collections, read)
            path.check_whole()
        finally:
            path.close()
    finally:
        gc.unfreeze()
    return path, num_deltas


def _by_process(num_tracked: Counter[str], steps: int) -> Row:
    """Young collections per 100 steps that each process would see, from the containers that its
    stages leave behind.

    A single container that crosses from one process's stages into another's, as some of this
    benchmark's own do, shows as 0.14 here and -0.14 there.
    """
    a_collection = gc.get_threshold()[0] + 1
    found: Row = {}
    for process, stages in PROCESSES.items():
        number = 100 * sum(num_tracked[stage] for stage in stages) / a_collection
        found[f"{process}_gen0_per_100_steps"] = round(number / steps, 3) if steps > 0 else None
    return found


def _run(path: OutputPath, watch: Stopwatch, collections: CollectionWatch, read: Read) -> int:
    """Run all steps; returns the number of deltas read."""
    reader: StreamsReader | TogetherReader
    if path.group is None:
        reader = StreamsReader(path.io, path.states)
    else:
        reader = TogetherReader(path.group, is_materialised=read == "materialised")
    gc.collect()
    with collections:
        watch.clear()
        while not path.is_done:
            path.step()
            reader.read()
            watch.lap("read")
            path.take_reports()
    return reader.num_deltas


async def _run_in_loop(path: OutputPath, watch: Stopwatch, collections: CollectionWatch) -> int:
    reader = TaskReader(path.io, path.states)
    await reader.read()  # until the tasks wait for their first deltas
    gc.collect()
    with collections:
        watch.clear()
        while not path.is_done:
            path.step()
            await reader.read()
            watch.lap("read")
            path.take_reports()
    await reader.finish()
    return reader.num_deltas
