"""A tracer against a list of tuples."""

from __future__ import annotations

import sys
from collections import deque

import msgspec
import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from slipstream_ipc.telemetry.trace import NO_STEP, SpanKind, TracePart, Tracer, open_tracer

INT64 = st.integers(-(2**63), 2**63 - 1)
SPANS = st.tuples(st.sampled_from(SpanKind), INT64, INT64, INT64)


def spans_of(part: TracePart) -> list[tuple[int, int, int, int]]:
    """The columns as rows."""
    kinds = np.frombuffer(part.kinds, np.uint8).tolist()
    times = (
        np.frombuffer(column, "<i8").tolist()
        for column in (part.begins_ns, part.ends_ns, part.steps)
    )
    return list(zip(kinds, *times, strict=True))


def test_off_is_none():
    assert open_tracer(None, "core") is None


@given(st.lists(SPANS, max_size=40), st.integers(1, 12))
def test_the_latest_spans_are_kept_in_order_and_the_others_counted(
    tmp_path_factory, spans, capacity
):
    tracer = Tracer(tmp_path_factory.getbasetemp() / "ring.part", "core", capacity)
    oracle: deque[tuple[int, int, int, int]] = deque(maxlen=capacity)
    for span in spans:
        tracer.add(*span)
        oracle.append(span)
    assert spans_of(tracer.part()) == list(oracle)
    assert tracer.num_dropped == tracer.part().num_dropped == len(spans) - len(oracle)


def test_a_span_may_belong_to_no_step(tmp_path):
    tracer = Tracer(tmp_path / "one.part", "client")
    tracer.add(SpanKind.CLIENT, 1, 2)
    assert spans_of(tracer.part()) == [(SpanKind.CLIENT, 1, 2, NO_STEP)]


def test_the_part_file_is_empty_until_the_tracer_is_closed(tmp_path):
    tracer = open_tracer(tmp_path / "trace.json", "worker")
    assert tracer is not None
    tracer.add(SpanKind.DECODE, 1, 2, 3)
    (path,) = tmp_path.iterdir()
    assert path.name.startswith("trace.json.worker-")
    assert path.name.endswith(".part")
    assert path.read_bytes() == b""
    tracer.add(SpanKind.EMIT, 10, 20, 3)
    tracer.close()
    (path,) = tmp_path.iterdir()
    part = msgspec.msgpack.decode(path.read_bytes(), type=TracePart)
    assert (part.process, part.num_dropped) == ("worker", 0)
    assert spans_of(part) == [(SpanKind.DECODE, 1, 2, 3), (SpanKind.EMIT, 10, 20, 3)]
    path.unlink()
    tracer.close()
    assert not list(tmp_path.iterdir())


def test_two_tracers_of_a_process_have_files_of_their_own(tmp_path):
    tracers = [open_tracer(str(tmp_path / "t"), "client") for _ in range(5)]
    for tracer in tracers:
        assert tracer is not None
        tracer.add(SpanKind.CLIENT, 1, 2)
        tracer.close()
    assert len(list(tmp_path.iterdir())) == 5


def test_who_recorded_nothing_leaves_nothing(tmp_path):
    tracer = open_tracer(tmp_path / "trace.json", "worker")
    assert tracer is not None
    tracer.close()
    assert not list(tmp_path.iterdir())


def test_recording_keeps_no_objects(tmp_path):
    tracer = Tracer(tmp_path / "t.part", "core")
    tracer.add(SpanKind.DEVICE, 10**18, 10**18, 10**18)
    before = sys.getallocatedblocks()
    for number in range(10**18, 10**18 + 10_000):
        tracer.add(SpanKind.DEVICE, number, number + 1, number + 2)
    assert sys.getallocatedblocks() - before < 1000


def test_a_part_that_cannot_be_written_is_a_warning(tmp_path, caplog):
    folder = tmp_path / "gone"
    folder.mkdir()
    tracer = open_tracer(folder / "t.json", "core")
    assert tracer is not None
    folder.rmdir()
    tracer.add(SpanKind.LAUNCH, 1, 2, 3)
    tracer.close()
    assert "cannot write the trace" in caplog.text
