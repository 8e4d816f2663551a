"""Measures one point: the requests of a variant, generated to their end and read in one way.

- The garbage collector keeps its default thresholds. Objects that exist before the requests are
  frozen, as the product's processes do after loading.
- Work that does not belong to the output path runs between the laps of the stopwatch.
- The wire is measured apart, by the sizes of the run's messages: ZeroMQ over a Unix socket with
  both ends in this process.
"""

from __future__ import annotations

import gc
import secrets
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import uvloop
import zmq

from slipstream_bench.common.collection_watch import CollectionWatch
from slipstream_bench.common.measures import Row
from slipstream_bench.common.variants import Variant, params_of
from slipstream_bench.output_path.delta_readers import (
    Read,
    StreamsReader,
    TaskReader,
    TogetherReader,
)
from slipstream_bench.output_path.in_process_path import PROCESSES, STAGES, OutputPath
from slipstream_bench.output_path.stopwatch import Stopwatch
from slipstream_bench.output_path.workload import Workload
from slipstream_ipc.transport.sockets import bind_router, new_dealer
from slipstream_worker.detokenizer.factory import DetokenizerFactory

_PATIENCE_MS = 10_000
_AT_ONCE = 4  # messages, about as many as a step sends
ENGINE = "slipstream"


def wire_us(sizes: Sequence[int]) -> float:
    """CPU microseconds of this process, ZeroMQ's own thread included, to send, poll and receive
    messages of the given sizes in bytes.

    Messages pass a few at a time: one by one, either end would sleep in between, and the cost of
    waking up would dominate, two to four times as much in a virtual machine.
    """
    with tempfile.TemporaryDirectory(prefix="slipstream-wire-") as folder:
        address = f"ipc://{Path(folder) / 'wire'}"
        context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        try:
            receiver = bind_router(context, address)
            sender = new_dealer(context, address, secrets.token_bytes(16))
            poller = zmq.Poller()
            poller.register(receiver, zmq.POLLIN)
            messages = [bytes(size) for size in sizes]
            _pass([b""], sender, receiver, poller)  # waits until connected
            begin = time.process_time_ns()
            for at in range(0, len(messages), _AT_ONCE):
                _pass(messages[at : at + _AT_ONCE], sender, receiver, poller)
            return (time.process_time_ns() - begin) / 1e3
        finally:
            context.destroy(linger=0)


def _pass(
    messages: Sequence[bytes],
    sender: zmq.Socket[bytes],
    receiver: zmq.Socket[bytes],
    poller: zmq.Poller,
) -> None:
    for message in messages:
        sender.send(message, zmq.NOBLOCK)
    for _ in messages:
        if not poller.poll(_PATIENCE_MS):
            raise TimeoutError("a message was lost between two sockets of this process")
        receiver.recv_multipart(zmq.NOBLOCK)


@dataclass(frozen=True, slots=True)
class PathSetting:
    """What all measurements share."""

    workload: Workload
    detokenizers: DetokenizerFactory
    vocab_size: int
    lap_ns: float  # see `Stopwatch`


def measure(setting: PathSetting, batch: int, variant: Variant, read: Read) -> Row:
    """One run."""
    collections = CollectionWatch()
    watch = Stopwatch(collections, lap_ns=setting.lap_ns)
    steps = setting.workload.outputs.shape[1]
    gc.collect()
    gc.freeze()
    try:
        path = OutputPath(
            setting.workload,
            batch,
            params_of(variant, steps),
            setting.detokenizers,
            setting.vocab_size,
            watch,
            is_together=read in ("columns", "materialised"),
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
    num_tokens = batch * steps
    stages = {stage: watch.us(stage) / num_tokens for stage in STAGES}
    return {
        "engine": ENGINE,
        "batch": batch,
        "variant": variant,
        "read": read,
        "us_per_token": round(sum(stages.values()), 4),
        **{f"{stage}_us": round(us, 4) for stage, us in stages.items()},
        "wire_us": round(wire_us(path.messages) / num_tokens, 4),
        "bytes_per_token": round(sum(path.num_bytes.values()) / num_tokens, 3),
        "core_bytes_per_token": round(path.num_bytes["core"] / num_tokens, 3),
        "deltas_per_token": round(num_deltas / num_tokens, 4),
        **{
            f"gc_gen{generation}": number
            for generation, number in enumerate(collections.num_collections)
        },
        **_by_process(path.num_tracked, steps - 2),
    }


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
