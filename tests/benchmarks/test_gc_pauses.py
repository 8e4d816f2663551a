"""`slipstream bench gc`: the shapes carry the same ids, and the collector is watched rightly."""

from __future__ import annotations

import gc
import json

import numpy as np
import pytest

from slipstream.cli.main import main
from slipstream_lab.common.collection_watch import CollectionWatch
from slipstream_lab.gc_pauses import Columns, Ints, ListsOfLists
from slipstream_lab.output_path import workload

BATCH = 7


@pytest.mark.parametrize(
    "shape", [ListsOfLists(BATCH), Ints(BATCH), Columns(BATCH, 3)], ids=lambda it: type(it).__name__
)
def test_every_shape_brings_the_ids_to_the_histories(shape):
    ids = np.random.default_rng(1).integers(0, 2**31, (3, BATCH))
    for some in ids:
        shape.step(some)
        shape.check_end(some)
    with pytest.raises(AssertionError):
        shape.check_end(ids[0])


def test_the_watch_counts_as_the_collector_does():
    gc.collect()
    thresholds = gc.get_threshold()
    before = [generation["collections"] for generation in gc.get_stats()]
    with CollectionWatch() as watch:
        kept = [[] for _ in range(20 * thresholds[0])]
    after = [generation["collections"] for generation in gc.get_stats()]
    assert watch.num_collections == [a - b for a, b in zip(after, before, strict=True)]
    assert sum(watch.num_collections) >= 19
    assert abs(watch.num_tracked_net - len(kept)) < thresholds[0] // 2
    assert watch.num_blocks_net >= len(kept)
    assert 0 < watch.longest_pause_ns <= max(watch.pause_ns)
    assert gc.get_threshold() == thresholds


def test_the_watch_leaves_no_trace():
    callbacks = list(gc.callbacks)
    with CollectionWatch():
        assert len(gc.callbacks) == len(callbacks) + 1
    assert gc.callbacks == callbacks


def test_the_command_tells_every_shape_frozen_and_not(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(workload, "_NUM_FILES", 3)
    json_file, png_file = tmp_path / "rows.json", tmp_path / "rows.png"
    words = ["--batch", "4", "--steps", "6", "--runs", "1"]
    options = ["--json", str(json_file), "--png", str(png_file)]
    assert main(["bench", "gc", *words, *options]) == 0
    rows = json.loads(json_file.read_text())
    shapes = ["lists_of_lists", "ints", "columns", "product"]
    assert [(row["shape"], row["is_frozen"]) for row in rows] == [
        *((shape, True) for shape in shapes),
        *((shape, False) for shape in shapes),
    ]
    for row in rows:
        assert 0 < row["tokens_per_s"] < 4 / 0.002
        assert row["host_us_per_step"] > 0
        assert {
            "gen0_per_1000_steps",
            "gen1_per_1000_steps",
            "gen2_per_1000_steps",
            "longest_pause_ms",
            "tracked_net_per_step",
            "blocks_net_per_step",
        } <= row.keys()
        assert (row["num_frozen_objects"] > 1000) == row["is_frozen"]
    assert png_file.read_bytes().startswith(b"\x89PNG")
    assert "lists_of_lists" in capsys.readouterr().out


def test_what_cannot_be_is_refused(capsys):
    for words in (["--batch", "0"], ["--step-ms", "0"], ["--steps", "0"]):
        assert main(["bench", "gc", "--quick", *words]) == 2
        assert words[0].removeprefix("--").split("-")[0] in capsys.readouterr().err
