"""`slipstream bench scale`: real stacks over simulated devices, behind one client."""

from __future__ import annotations

import json

from slipstream.cli.main import main
from slipstream_lab.fleet.scale import _compare


def test_throughput_is_compared_with_n_times_one():
    rows = [
        {"replicas": replicas, "output_tokens_per_s": speed, "over_n_times_one": None}
        for replicas, speed in ((1, 100.0), (4, 390.0))
    ]
    _compare(rows)
    assert [row["over_n_times_one"] for row in rows] == [1.0, 0.975]


def test_two_replicas_compute_more_than_one(tmp_path):
    file = tmp_path / "rows.json"
    words = ["--replicas", "1,2", "--streams", "4", "--output-len", "20", "--runs", "1"]
    picture = tmp_path / "rows.png"
    assert main(["bench", "scale", *words, "--json", str(file), "--png", str(picture)]) == 0
    assert picture.stat().st_size > 0
    one, two = json.loads(file.read_text())
    assert one["failed_requests"] == two["failed_requests"] == 0
    assert two["output_tokens_per_s"] > one["output_tokens_per_s"] > 0
