"""`slipstream bench compare threads`: situations end with their block, others are refused."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from slipstream.cli.main import main
from slipstream_lab.compare.threads import SITUATIONS, _with_shares, quota, spinners

TINY = (
    "random:llama-3.1-8b,hidden_size=64,intermediate_size=96,num_hidden_layers=2,"
    "num_attention_heads=2,num_key_value_heads=2,vocab_size=2000,max_position_embeddings=16384"
)


def test_spinners_end_with_the_block():
    with spinners(2) as pids:
        assert len(set(pids)) == 2
        for pid in pids:
            os.kill(pid, 0)
    for pid in pids:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)


def test_a_quota_ends_with_the_block():
    try:
        with quota(1.5):
            within = Path("/proc/self/cgroup").read_text()
    except OSError as error:
        pytest.skip(f"no cgroup can be made here: {error}")
    after = Path("/proc/self/cgroup").read_text()
    name = f"slipstream-bench-{os.getpid()}"
    assert name in within
    assert name not in after
    assert not list(Path("/sys/fs/cgroup").glob(f"*/**/{name}"))


def test_where_no_cgroup_can_be_made_it_says_so(tmp_path):
    with pytest.raises(OSError, match="slipstream-bench"), quota(1.5, tmp_path / "none"):
        raise AssertionError("not within")


def test_the_default_is_compared_with_the_best_fixed_number():
    rates = {("a", "1"): 40.0, ("a", "2"): 50.0, ("a", "default"): 45.0, ("a", "peer"): 90.0}
    rates |= {("b", "1"): 10.0, ("b", "2"): 5.0, ("b", "default"): 11.0}
    rows = [
        {"situation": situation, "threads": threads, "tokens_per_s": rate}
        for (situation, threads), rate in rates.items()
    ]
    shares = {row["situation"]: row["of_best"] for row in _with_shares(rows) if row["of_best"]}
    assert shares == {"a": 0.9, "b": 1.1}


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("--threads", "1,0"),
        ("--situations", "noisy"),
        ("--peer", "vllm"),
        ("--peer", "vllm=ftp://a"),
        ("--streams", "0"),
        ("--output-len", "0"),
    ],
)
def test_what_cannot_be_is_refused(capsys, option, value):
    assert main(["bench", "compare", "threads", option, value]) == 2
    assert option.lstrip("-").replace("-", "_") in capsys.readouterr().err.replace("-", "_")


def test_the_command_tells_every_situation(tmp_path, capsys):
    file = tmp_path / "rows.json"
    sizes = ["--streams", "2", "--input-len", "4", "--output-len", "4", "--threads", "1"]
    words = ["--model", TINY, "--quick", "--json", str(file), *sizes]
    assert main(["bench", "compare", "threads", *words]) == 0
    rows = json.loads(file.read_text())
    told = [(row["situation"], row["threads"]) for row in rows]
    assert told[:6] == [(each, n) for each in SITUATIONS[:3] for n in ("1", "default")]
    assert len(told) == 8 or "left out" in capsys.readouterr().out
    assert all(row["tokens_per_s"] > 0 for row in rows)
    assert all((row["of_best"] is not None) == (row["threads"] == "default") for row in rows)
