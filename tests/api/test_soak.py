"""`slipstream bench soak`: what counts as flat, and a short run with real processes."""

from __future__ import annotations

import json

import pytest

from slipstream.bench.census import Holding
from slipstream.bench.soak.command import growths
from slipstream.cli import main


def flat(*held: tuple[int, int]) -> bool:
    (one,) = growths([{"core": Holding(rss, fds)} for rss, fds in held])
    return one.is_flat


def test_what_grows_or_shrinks_is_not_flat():
    assert flat((1000, 20), (1049, 22), (951, 20))
    assert not flat((1000, 20), (1000, 20), (1051, 20))
    assert not flat((1000, 20), (1051, 20), (1000, 20))
    assert not flat((1000, 20), (1000, 20), (949, 20))
    assert not flat((1000, 20), (1000, 20), (1000, 23))
    assert flat((1000, 100), (1000, 104), (1000, 100))


def test_a_process_that_is_not_there_any_more_is_not_flat():
    samples = [
        {"core": Holding(1000, 20), "worker": Holding(1000, 20)},
        {"core": Holding(1000, 20)},
    ]
    assert [one.is_flat for one in growths(samples)] == [True, False]


@pytest.mark.slow
def test_memory_and_descriptors_stay_flat_over_short_requests(tmp_path, capsys):
    file = tmp_path / "soak.json"
    code = main(["bench", "soak", "--quick", "--json", str(file)])
    shown = capsys.readouterr().out
    assert code == 0, shown
    result = json.loads(file.read_text())
    assert sum(result["requests"].values()) == 4000
    assert min(result["requests"].values()) > 0
    names = {one["process"] for one in result["processes"]}
    assert {"supervisor", "core", "worker", "http", "spare core", "spare worker"} <= names
