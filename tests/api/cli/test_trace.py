"""Timelines: parts put together, the file, the picture, and those of real runs."""

from __future__ import annotations

import gzip
import json
import re
import shutil
import signal
import struct
import subprocess
import sys
import tempfile
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.helpers.patience import PATIENCE_S

from slipstream import BadRequestError
from slipstream.cli.main import main
from slipstream.tracing.part_files import checked_trace, discard_parts
from slipstream.tracing.parts import merge_parts
from slipstream.tracing.picture import PictureWindow, busy_ns, draw, window_of
from slipstream.tracing.trace_events import TraceTimeline, Track, read_timeline, write_timeline
from slipstream_ipc.telemetry.trace import NO_STEP, SpanKind, TracePart, Tracer


def leave_part(
    file: Path, process: str, *spans: tuple[SpanKind, int, int, int], capacity: int = 99
):
    """What a process that has ended leaves beside `file`."""
    tracer = Tracer(Path(f"{file}.{process}-1.part"), process, capacity)
    for span in spans:
        tracer.add(*span)
    tracer.close()


def track_of(name: str, *spans: tuple[str, int, int, int]) -> Track:
    """A track by rows: kind, begin, end, step."""
    kinds, begins, ends, steps = zip(*spans, strict=True) if spans else ((), (), (), ())
    times = (np.array(column, np.int64) for column in (begins, ends, steps))
    return Track(name, 1, np.array(kinds, np.str_), *times)


def rows_of(track: Track) -> list[tuple[str, int, int, int]]:
    """The same, the other way round."""
    columns = (track.kinds, track.begins_ns, track.ends_ns, track.steps)
    return list(zip(*(column.tolist() for column in columns), strict=True))


# ---- parts ---------------------------------------------------------------------------------


def test_parts_become_one_timeline_on_one_clock(tmp_path):
    file = tmp_path / "t.json"
    leave_part(
        file, "worker", (SpanKind.STOP_CHECK, 5_500, 6_000, 1), (SpanKind.EMIT, 6_000, 9_001, 1)
    )
    leave_part(file, "client", (SpanKind.CLIENT, 9_500, 9_900, NO_STEP))
    leave_part(
        file, "core", (SpanKind.SCHEDULE, 1_000, 2_000, 1), (SpanKind.LAUNCH, 2_000, 2_500, 1)
    )
    leave_part(file, "device", (SpanKind.DEVICE, 2_500, 5_000, 1))
    assert merge_parts(str(file))
    assert list(tmp_path.iterdir()) == [file]
    timeline = read_timeline(file)
    assert {track.name: rows_of(track) for track in timeline.tracks} == {
        "core": [("schedule", 0, 1_000, 1), ("launch", 1_000, 1_500, 1)],
        "device": [("device", 1_500, 4_000, 1)],
        "worker": [("stop check", 4_500, 5_000, 1), ("emit", 5_000, 8_001, 1)],
        "client": [("client", 8_500, 8_900, NO_STEP)],
    }
    assert [track.name for track in timeline.tracks] == ["core", "device", "worker", "client"]
    assert (timeline.duration_ns, timeline.num_dropped) == (8_900, 0)


def test_the_file_is_a_chrome_trace(tmp_path):
    file = tmp_path / "t.json"
    leave_part(
        file, "core", (SpanKind.SCHEDULE, 1_000, 2_500, 7), (SpanKind.PUBLISH, 4_000, 5_000, 7)
    )
    merge_parts(str(file))
    told = json.loads(file.read_text())
    assert told["displayTimeUnit"] == "ms"
    about = {event["name"]: event["args"] for event in told["traceEvents"] if event["ph"] == "M"}
    assert about["process_name"] == {"name": "core"}
    slices = [event for event in told["traceEvents"] if event["ph"] == "X"]
    assert slices == [
        {"ph": "X", "name": "schedule 7", "cat": "schedule", "pid": 1, "tid": 1}
        | {"ts": 0.0, "dur": 1.5, "args": {"step": 7}},
        {"ph": "X", "name": "publish 7", "cat": "publish", "pid": 1, "tid": 1}
        | {"ts": 3.0, "dur": 1.0, "args": {"step": 7}},
    ]


def test_a_name_that_ends_in_gz_is_compressed(tmp_path):
    file = tmp_path / "t.json.gz"
    leave_part(file, "core", (SpanKind.SCHEDULE, 1, 2, 7))
    merge_parts(str(file))
    assert json.loads(gzip.decompress(file.read_bytes()))["traceEvents"]
    assert rows_of(read_timeline(file).tracks[0]) == [("schedule", 0, 1, 7)]


TRACKS = st.lists(
    st.lists(
        st.tuples(
            st.sampled_from(["device", "stop check", "emit"]),
            st.integers(0, 2**50),
            st.integers(0, 2**40),
            st.integers(NO_STEP, 2**40),
        ),
        max_size=20,
    ),
    max_size=4,
)


@given(TRACKS, st.integers(0, 100))
def test_what_is_written_is_read_again(tmp_path_factory, tracks, num_dropped):
    file = tmp_path_factory.getbasetemp() / "timeline.json"
    spans = [
        [(kind, begin, begin + length, step) for kind, begin, length, step in sorted(track)]
        for track in tracks
    ]
    timeline = TraceTimeline(
        tuple(track_of(f"track {at}", *rows) for at, rows in enumerate(spans)), num_dropped
    )
    write_timeline(file, timeline)
    again = read_timeline(file)
    assert [sorted(rows_of(track)) for track in again.tracks] == spans
    assert [track.name for track in again.tracks] == [track.name for track in timeline.tracks]
    assert again.num_dropped == num_dropped


def test_a_missing_or_broken_part_costs_its_own_track_and_a_warning(tmp_path, caplog):
    file = tmp_path / "t.json"
    leave_part(file, "core", (SpanKind.SCHEDULE, 1, 2, 1))
    (tmp_path / "t.json.worker-7.part").touch()  # as a killed process leaves it
    (tmp_path / "t.json.http-7.part").write_bytes(b"\xc1 no msgpack")
    torn = TracePart(
        process="device", pid=1, num_dropped=0, kinds=b"\3\3", begins_ns=b"", ends_ns=b"", steps=b""
    )
    (tmp_path / "t.json.device-7.part").write_bytes(msgspec.msgpack.encode(torn))
    assert merge_parts(str(file))
    assert [track.name for track in read_timeline(file).tracks] == ["core"]
    assert "t.json.worker-7.part: its process was killed; its track is missing" in caplog.text
    assert "t.json.http-7.part: its track is missing" in caplog.text
    assert "t.json.device-7.part: its track is missing: columns of" in caplog.text
    assert list(tmp_path.iterdir()) == [file]


def test_spans_that_were_dropped_are_told(tmp_path, caplog, capsys):
    file = tmp_path / "t.json"
    spans = [(SpanKind.SCHEDULE, 10 * at, 10 * at + 1, at) for at in range(5)]
    leave_part(file, "core", *spans, capacity=2)
    merge_parts(str(file))
    assert "core: the timeline lacks its 3 oldest spans" in caplog.text
    assert read_timeline(file).num_dropped == 3
    assert main(["trace", str(file)]) == 0
    assert "the 3 oldest spans were dropped" in capsys.readouterr().out


def test_parts_of_a_stack_that_was_killed_are_gone_before_the_next(tmp_path):
    file = tmp_path / "t.json"
    leave_part(file, "core", (SpanKind.SCHEDULE, 1, 2, 1))
    leave_part(tmp_path / ".t.json", "worker", (SpanKind.EMIT, 1, 2, 1))  # as if it were unfinished
    leave_part(tmp_path / "other.json", "core", (SpanKind.SCHEDULE, 1, 2, 1))
    file.write_text("an older timeline")
    discard_parts(str(file))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["other.json.core-1.part", "t.json"]


def test_no_timeline_is_a_warning(tmp_path, caplog):
    assert not merge_parts(str(tmp_path / "nowhere" / "t.json"))
    assert "cannot write the timeline" in caplog.text


def test_a_trace_that_could_not_be_written_is_refused(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert checked_trace(None) is None
    assert checked_trace("t.json") == str(tmp_path / "t.json")
    for wrong in ("", str(tmp_path), str(tmp_path / "nowhere" / "t.json")):
        with pytest.raises(BadRequestError, match=r"trace: got .* allowed: a file in a folder"):
            checked_trace(wrong)


# ---- the command ---------------------------------------------------------------------------


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """A timeline of 20 steps of 10 ms; the worker works 4 ms on each while the next one runs."""
    step_ns = 10_000_000
    device = [("device", at * step_ns, (at + 1) * step_ns, at) for at in range(20)]
    core = [("schedule", at * step_ns, at * step_ns + 500_000, at) for at in range(20)]
    worker = [("emit", end + 1_000_000, end + 5_000_000, at) for _, _, end, at in device]
    path = tmp_path / "t.json"
    tracks = track_of("core", *core), track_of("device", *device), track_of("worker", *worker)
    write_timeline(path, TraceTimeline(tracks))
    return path


def size_of(png: Path) -> tuple[int, int]:
    """Width and height, as the file's head says."""
    head = png.read_bytes()[:24]
    assert head.startswith(b"\x89PNG\r\n\x1a\n")
    width, height = struct.unpack(">II", head[16:24])
    return width, height


def test_the_table(file, capsys):
    assert main(["trace", str(file)]) == 0
    told = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert told[0] == ["205.0", "ms"]
    assert told[2] == ["core", "schedule", "20", "500.0", "µs", "500.0", "µs", "4.88%"]
    assert told[4] == ["worker", "emit", "20", "4000.0", "µs", "4000.0", "µs", "39.02%"]


def test_the_picture_has_a_row_for_each_track(file, tmp_path):
    png = tmp_path / "t.png"
    assert main(["trace", str(file), "--png", str(png)]) == 0
    three_tracks = size_of(png)
    draw(TraceTimeline(read_timeline(file).tracks[:1]), PictureWindow(0, 10**8), png, "one")
    one_track = size_of(png)
    assert three_tracks[0] == one_track[0] == 1800
    assert three_tracks[1] - one_track[1] == pytest.approx(2 * 0.92 * 150, abs=2)


def test_the_picture_shows_the_window_that_is_asked_for(file, tmp_path):
    pictures = []
    for begin_ms in ("0", "100", "100"):
        png = tmp_path / f"{len(pictures)}.png"
        window = ["--begin-ms", begin_ms, "--window-ms", "30"]
        assert main(["trace", str(file), "--png", str(png), *window]) == 0
        pictures.append(png.read_bytes())
    assert pictures[0] != pictures[1] == pictures[2]


def test_the_window_is_eight_steps_from_where_half_of_the_work_is_done(file):
    timeline = read_timeline(file)
    found = window_of(timeline, None, None)
    # half of 20 * 4.5 ms of work is done in step 10 of the device
    assert found.begin_ns == pytest.approx(100_000_000, abs=2_000_000)
    assert found.end_ns == pytest.approx(180_000_000, abs=2_000_000)
    assert window_of(timeline, 50.0, None).begin_ns == 50_000_000
    assert window_of(timeline, 50.0, 7.0).end_ns == 57_000_000
    without = TraceTimeline(tuple(track for track in timeline.tracks if track.name != "device"))
    found = window_of(without, None, None)
    assert found.end_ns - found.begin_ns == 40_000_000


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--png", "p.png", "--begin-ms", "205"], "--begin-ms: got 205.0, allowed: a number in"),
        (["--png", "p.png", "--window-ms", "0"], "--window-ms: got 0.0, allowed: a number > 0"),
        (["--png", "nowhere/p.png"], "--png: got 'nowhere/p.png', allowed: a file in a folder"),
        (["--window-ms", "3"], "--window-ms: got 3.0, allowed: nothing without --png"),
    ],
)
def test_what_cannot_be_drawn_is_refused(file, monkeypatch, capsys, options, said):
    monkeypatch.chdir(file.parent)
    assert main(["trace", str(file), *options]) == 2
    assert said in capsys.readouterr().err
    assert list(file.parent.iterdir()) == [file]


@pytest.mark.parametrize("content", [b"", b"{}", b"[1, 2]", b"\x1f\x8b\x08broken", b"\xff"])
def test_a_file_that_is_none_of_ours_is_refused(tmp_path, capsys, content):
    (tmp_path / "other").write_bytes(content)
    assert main(["trace", str(tmp_path / "other")]) == 2
    assert "allowed: a file that --trace wrote" in capsys.readouterr().err
    assert main(["trace", str(tmp_path / "nowhere")]) == 1


def test_a_trace_in_which_nothing_was_served_has_no_picture(tmp_path, capsys):
    write_timeline(tmp_path / "t.json", TraceTimeline((track_of("core"),)))
    assert main(["trace", str(tmp_path / "t.json")]) == 0
    assert main(["trace", str(tmp_path / "t.json"), "--png", str(tmp_path / "t.png")]) == 2
    assert "a trace without spans" in capsys.readouterr().err


def test_parts_that_nobody_put_together_are_put_together(tmp_path, capsys):
    leave_part(tmp_path / "t.json", "core", (SpanKind.SCHEDULE, 0, 10**6, 1))
    assert main(["trace", str(tmp_path / "t.json")]) == 0
    assert "schedule" in capsys.readouterr().out


@given(st.lists(st.tuples(st.integers(0, 60), st.integers(0, 20)), max_size=12))
def test_busy_time_is_what_a_calendar_of_units_says(spans):
    units = {unit for begin, length in spans for unit in range(begin, begin + length)}
    begins = np.array([begin for begin, _ in spans], np.int64)
    ends = np.array([begin + length for begin, length in spans], np.int64)
    assert busy_ns(begins, ends) == len(units)


# ---- real runs -----------------------------------------------------------------------------


@pytest.fixture(scope="module")
def real(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What `bench throughput` has traced."""
    file = tmp_path_factory.mktemp("real") / "t.json"
    load = ["--num-requests", "16", "--input-len", "8", "--output-len", "24"]
    command = ["bench", "throughput", "simulated:step_ms=10", *load, "--variant", "stop2"]
    assert main([*command, "--trace", str(file)]) == 0
    return file


def test_a_benchmark_leaves_a_timeline_of_every_process(real):
    assert list(real.parent.iterdir()) == [real]
    timeline = read_timeline(real)
    tracks = {track.name: track for track in timeline.tracks}
    assert list(tracks) == ["core", "device", "worker", "client"]
    assert timeline.num_dropped == 0
    assert set(tracks["core"].kinds) == {"schedule", "launch", "collect", "publish"}
    assert {"decode", "stop check", "detokenise", "emit"} <= set(tracks["worker"].kinds)
    assert set(tracks["client"].kinds) == {"client"}
    assert tracks["core"].process_id != tracks["worker"].process_id
    for track in timeline.tracks:
        assert (track.begins_ns <= track.ends_ns).all()


def test_the_device_does_one_step_at_a_time_in_their_order(real):
    device = next(track for track in read_timeline(real).tracks if track.name == "device")
    assert len(device.steps) >= 2 * 24  # a request that goes ahead, and the others
    order = np.argsort(device.begins_ns, kind="stable")
    assert (np.diff(device.steps[order]) == 1).all()
    assert (device.begins_ns[order][1:] >= device.ends_ns[order][:-1]).all()
    assert (device.ends_ns - device.begins_ns >= 9_999_000).all()


def test_the_worker_works_on_a_step_while_a_later_one_runs(real):
    tracks = {track.name: track for track in read_timeline(real).tracks}
    worker, device = tracks["worker"], tracks["device"]
    within = (
        (worker.begins_ns[:, None] >= device.begins_ns)
        & (worker.ends_ns[:, None] <= device.ends_ns)
        & (worker.steps[:, None] < device.steps)
        & (worker.steps[:, None] != NO_STEP)
    )
    assert within.any()
    for step in np.unique(worker.steps[worker.steps != NO_STEP]):
        first = worker.begins_ns[worker.steps == step].min()
        assert first >= device.ends_ns[device.steps == step][0], f"step {step} was not over"


def test_the_picture_of_a_real_run(real, tmp_path):
    png = tmp_path / "t.png"
    assert main(["trace", str(real), "--png", str(png)]) == 0
    assert size_of(png)[0] == 1800
    assert 10_000 < png.stat().st_size < 200_000


@pytest.fixture
def folder() -> Iterator[Path]:
    """Short enough for a socket."""
    path = Path(tempfile.mkdtemp())
    yield path
    shutil.rmtree(path)


@pytest.mark.process
def test_serve_leaves_a_timeline_with_the_fronts_track(folder):
    file = folder / "t.json.gz"
    options = ["--http-port", "0", "--runtime-dir", str(folder / "run"), "--trace", str(file)]
    process = subprocess.Popen(
        [sys.executable, "-m", "slipstream.cli.main", "serve", "simulated:step_ms=1", *options],
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    try:
        said = ""
        while "curl" not in said:
            line = process.stdout.readline()
            assert line, "it ended"
            said += line
        url = re.search(r"http://127\.0\.0\.1:\d+", said)
        assert url is not None
        body = json.dumps({"prompt": "In Python,", "max_tokens": 5, "stream": True}).encode()
        request = urllib.request.Request(
            f"{url[0]}/v1/completions", body, {"Content-Type": "application/json"}
        )
        with urllib.request.urlopen(request, timeout=PATIENCE_S) as answer:
            assert b"[DONE]" in answer.read()
        process.send_signal(signal.SIGTERM)
        told, _ = process.communicate(timeout=PATIENCE_S)
    finally:
        process.kill()
        process.wait(PATIENCE_S)
    assert process.returncode == 0
    assert f"timeline in {file}" in told
    tracks = {track.name: track for track in read_timeline(file).tracks}
    assert list(tracks) == ["core", "device", "worker", "http"]
    assert len(tracks["http"].kinds) > 0
    assert len(tracks["device"].steps) >= 5
