"""`slipstream bench failover`: replicas killed under a client's streams."""

from __future__ import annotations

import json

from slipstream.cli.main import main


def test_every_replica_is_killed_and_every_text_is_the_same(tmp_path):
    file, png = tmp_path / "rows.json", tmp_path / "rates.png"
    words = ["--quick", "--steady-s", "0.5", "--json", str(file), "--png", str(png)]
    assert main(["bench", "failover", *words]) == 0
    rows = json.loads(file.read_text())
    assert [row["replica"] for row in rows] == ["replica-0", "replica-1"]
    for row in rows:
        assert row["identical"] == row["running"] > 0
        assert row["back_after_s"] > 0
    assert sum(row["cut_off"] for row in rows) > 0
    assert png.stat().st_size > 10_000
