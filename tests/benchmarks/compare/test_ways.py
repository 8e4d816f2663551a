"""`slipstream bench compare ways`: a row for each way, and the shares between them."""

from __future__ import annotations

import json

from slipstream.cli.main import main
from slipstream_lab.compare.ways import with_shares


def test_shares_are_those_of_the_same_load():
    rates = {"python": 200.0, "http": 150.0, "http_whole": 300.0}
    rows = [{"way": way, "output_tokens_per_s": rate} for way, rate in rates.items()]
    python, http, whole = with_shares(rows)
    assert (python["over_python"], python["over_whole"]) == (1, 0.667)
    assert (http["over_python"], http["over_whole"]) == (0.75, 0.5)
    assert whole["over_whole"] == 1


def test_the_command_tells_a_row_for_each_way(tmp_path, capsys):
    file = tmp_path / "rows.json"
    words = ["--quick", "--model", "simulated:step_ms=1", "--json", str(file)]
    assert main(["bench", "compare", "ways", *words]) == 0
    rows = json.loads(file.read_text())
    assert [row["way"] for row in rows] == ["python", "http", "http_whole"]
    for row in rows:
        assert row["completed_requests"] == 8
        assert row["output_tokens_per_s"] > 0
        assert row["first_over_later"] > 0
    assert rows[0]["tokens_per_chunk"] >= 1
    assert "over_python" in capsys.readouterr().out
