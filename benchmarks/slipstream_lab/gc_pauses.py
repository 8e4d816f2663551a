"""`slipstream bench gc`: what the shape of a step's token ids costs the garbage collector.

- A step is the device's time, which is simulated and takes no time here, followed by the host's CPU
  time, which is measured: an engine that overlaps nothing, like the one in the report that this
  reproduces (vLLM issue 26369).
- The collector keeps its default thresholds. `is_frozen` tells whether objects loaded before the
  requests were frozen, as the product does; otherwise a full collection traverses all of them.

A step's ids, one per request, travel to the requests' readers in one loop of three shapes, or on
the product's own path. In every shape they arrive as an array from the device, are put into a
message, encoded, decoded on the client-facing side, added to each request's history there, and
handed to its reader, which takes and drops them. There is no detokenizing and no stop check. Both
sides are in one process, so its collector sees what two would share.
- lists_of_lists: an object per request with a list of its new ids, although there is always one, as
  in engines that allow several tokens per step.
- ints: the same with the id itself.
- columns: the ids of all requests are bytes; a reader looks up its own there.
"""

from __future__ import annotations

import argparse
import gc
import platform
import time
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Protocol

import msgspec
import numpy as np
from msgspec import Struct
from tokenizers import Tokenizer

from slipstream.cli.options.parser import Parser
from slipstream.demo_model import MODEL_PATH
from slipstream_bench.common.measures import Row
from slipstream_bench.common.options import Option, add, fill_in, integer, number
from slipstream_bench.common.pictures import grouped_bars
from slipstream_bench.common.provenance import package_version
from slipstream_bench.common.report import add_common, check_common, median_rows, print_rows
from slipstream_bench.common.variants import params_of
from slipstream_ipc.arrays import Int64s
from slipstream_ipc.columns import pack_u32, u32
from slipstream_lab.common.collection_watch import CollectionWatch
from slipstream_lab.output_path.delta_readers import TogetherReader
from slipstream_lab.output_path.in_process_path import OutputPath
from slipstream_lab.output_path.stopwatch import Stopwatch
from slipstream_lab.output_path.workload import detokenizers_of, make_workload

COMPARED = ("lists_of_lists", "ints", "columns")
SHAPES = (*COMPARED, "product")
WARM_UP_STEPS = 20  # until buffers have grown and the setup has been collected
_PROMPT_LEN = 8
_VOCAB_SIZE = 4096
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
lists_of_lists, ints, columns: one loop, see `slipstream_lab.gc_pauses`; it makes a
message, encodes, decodes, keeps histories, hands deltas to readers, both sides in one process.
product: Slipstream's own path, core to client, in columns too. It does more than the loops (text,
ends, cursors, acknowledgements, reports), so compare its collections, not its speed.
is_frozen: whether what was loaded is kept from the collector (gc.freeze), as the product keeps it.
tracked_net: containers made less those freed, which is what brings collections about."""
_OPTIONS = (
    Option("batch", integer(1), "requests", 1024),
    Option(
        "step_ms",
        number(lambda value: value > 0, "milliseconds, > 0"),
        "the device's time for a step, simulated",
        2.0,
    ),
    Option("steps", integer(1), "of a run", 1000, 200),
)


class HeapShape(Protocol):
    """Requests whose ids travel in one of the shapes."""

    def step(self, ids: Int64s) -> None:
        """One id for every request, int64 [batch], all the way to its reader."""

    def check_end(self, ids: Int64s) -> None:
        """Check that each request's history ends with its id in `ids`."""


class _ListOutput(Struct, array_like=True, gc=False):
    request_id: str
    new_token_ids: list[int]


class _IntOutput(Struct, array_like=True, gc=False):
    request_id: str
    new_token_id: int


class _ColumnOutputs(Struct, array_like=True, gc=False):
    rows: bytes
    token_ids: bytes


@dataclass(slots=True)
class _ListRequest:
    token_ids: list[int] = field(default_factory=list)
    unread: deque[_ListOutput] = field(default_factory=deque)


@dataclass(slots=True)
class _IntRequest:
    token_ids: list[int] = field(default_factory=list)
    unread: deque[_IntOutput] = field(default_factory=deque)


class ListsOfLists:
    """The shape `lists_of_lists`."""

    def __init__(self, batch: int) -> None:
        self._requests = {_name(index): _ListRequest() for index in range(batch)}
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder = msgspec.msgpack.Decoder(list[_ListOutput])

    def step(self, ids: Int64s) -> None:
        """See `HeapShape`."""
        new: list[list[int]] = ids[:, None].tolist()
        outputs = list(map(_ListOutput, self._requests, new))
        for output in self._decoder.decode(self._encoder.encode(outputs)):
            request = self._requests[output.request_id]
            request.token_ids.extend(output.new_token_ids)
            request.unread.append(output)
        for request in self._requests.values():
            request.unread.popleft()

    def check_end(self, ids: Int64s) -> None:
        """See `HeapShape`."""
        assert [request.token_ids[-1] for request in self._requests.values()] == ids.tolist()


class Ints:
    """The shape `ints`."""

    def __init__(self, batch: int) -> None:
        self._requests = {_name(index): _IntRequest() for index in range(batch)}
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder = msgspec.msgpack.Decoder(list[_IntOutput])

    def step(self, ids: Int64s) -> None:
        """See `HeapShape`."""
        new: list[int] = ids.tolist()
        outputs = list(map(_IntOutput, self._requests, new))
        for output in self._decoder.decode(self._encoder.encode(outputs)):
            request = self._requests[output.request_id]
            request.token_ids.append(output.new_token_id)
            request.unread.append(output)
        for request in self._requests.values():
            request.unread.popleft()

    def check_end(self, ids: Int64s) -> None:
        """See `HeapShape`."""
        assert [request.token_ids[-1] for request in self._requests.values()] == ids.tolist()


class Columns:
    """The shape `columns`."""

    def __init__(self, batch: int, max_steps: int) -> None:
        self._rows = np.arange(batch)
        self._history = np.zeros((batch, max_steps), np.uint32)
        self._lengths = np.zeros(batch, np.int64)
        self._unread: deque[_ColumnOutputs] = deque()
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder = msgspec.msgpack.Decoder(_ColumnOutputs)

    def step(self, ids: Int64s) -> None:
        """See `HeapShape`."""
        outputs = _ColumnOutputs(pack_u32(self._rows), pack_u32(ids))
        received = self._decoder.decode(self._encoder.encode(outputs))
        rows = u32(received.rows)
        self._history[rows, self._lengths[rows]] = u32(received.token_ids)
        self._lengths[rows] += 1
        self._unread.append(received)  # shared by all readers, which index into it
        self._unread.popleft()

    def check_end(self, ids: Int64s) -> None:
        """See `HeapShape`."""
        assert (self._history[self._rows, self._lengths - 1] == ids).all()


def _name(index: int) -> str:
    return f"cmpl-{index:032x}"


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
        "version": package_version(),
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


def add_options(parser: Parser) -> None:
    """The benchmark's options."""
    add(parser.add_argument_group("what is measured"), _OPTIONS)
    add_common(parser, runs=3)
    parser.set_defaults(run=bench_gc)


def bench_gc(arguments: argparse.Namespace) -> int:
    """Measure all shapes, frozen and not, and report."""
    check_common(arguments)
    fill_in(arguments, _OPTIONS)
    runs = [
        _measured(shape, arguments.batch, arguments.steps, arguments.step_ms, is_frozen=is_frozen)
        for _ in range(arguments.runs)
        for is_frozen in (True, False)
        for shape in SHAPES
    ]
    rows = with_gains(median_rows(runs, ("shape", "is_frozen")))
    print(_ABOUT.format(thresholds=gc.get_threshold()))
    print_rows(rows, arguments, _COLUMNS)
    if arguments.png is not None:
        _draw(rows, arguments.png)
    return 0


def _measured(shape: str, batch: int, steps: int, step_ms: float, *, is_frozen: bool) -> Row:
    """One run."""
    shape_of_ids = (WARM_UP_STEPS + steps + 1, batch)
    ids = np.random.default_rng(0).integers(0, _VOCAB_SIZE, shape_of_ids)
    row = measure(shape, batch, steps, iter(ids), is_frozen=is_frozen)
    host_us = float(row["host_us_per_step"] or 0)
    tokens_per_s = round(batch / (step_ms / 1e3 + host_us / 1e6), 1)
    return row | {"step_ms": step_ms, "tokens_per_s": tokens_per_s}


def _draw(rows: list[Row], file: str) -> None:
    """Chart the three loops."""
    frozen = {True: "frozen heap", False: "heap not frozen"}
    grouped_bars(
        file,
        COMPARED,
        {
            name: [
                float(row["tokens_per_s"] or 0)
                for row in rows
                if row["is_frozen"] is is_frozen and row["shape"] in COMPARED
            ]
            for is_frozen, name in frozen.items()
        },
        title=f"The shape of a step's ids: {rows[0]['batch']} requests, "
        f"{rows[0]['step_ms']:g} ms steps, nothing hidden behind the device",
        x_label="shape",
        y_label="tokens per second",
    )
