"""`slipstream bench soak`: what counts as flat, and a short run with real processes."""

from __future__ import annotations

import json
import subprocess
import sys

from tests.helpers.processes import started

from slipstream.cli.main import main
from slipstream_bench.common.process_census import Holding, holding
from slipstream_verify.soak.soak import growths

MIB = 2**20


def flat(*held: tuple[int, int]) -> bool:
    """Of own memory in MiB and descriptors; resident memory besides comes and goes."""
    (one,) = growths(
        [
            {"core": Holding((own + n * 999) * MIB, fds, own * MIB)}
            for n, (own, fds) in enumerate(held)
        ]
    )
    return one.is_flat


def test_what_grows_or_shrinks_is_not_flat():
    assert flat((1000, 20), (1049, 22), (951, 20))
    assert not flat((1000, 20), (1000, 20), (1051, 20))
    assert not flat((1000, 20), (1051, 20), (1000, 20))
    assert not flat((1000, 20), (1000, 20), (949, 20))
    assert not flat((1000, 20), (1000, 20), (1000, 23))
    assert flat((1000, 100), (1000, 104), (1000, 100))
    assert flat((30, 20), (34, 20), (30, 20))  # little, whatever the share
    assert not flat((30, 20), (30, 20), (35, 20))


def test_a_process_that_is_not_there_any_more_is_not_flat():
    samples = [
        {"core": Holding(1000, 20, 900), "worker": Holding(1000, 20, 900)},
        {"core": Holding(1000, 20, 900)},
    ]
    assert [one.is_flat for one in growths(samples)] == [True, False]


def test_memory_of_a_files_pages_is_not_a_process_s_own(tmp_path):
    path = tmp_path / "pages"
    path.write_bytes(bytes(32 * MIB))
    program = (
        "import mmap, sys\n"
        "held = bytearray(8 << 20)\n"
        f"with open({str(path)!r}, 'rb') as file:\n"
        "    mapped = mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ)\n"
        "def hold():\n"
        "    print(len(bytes(mapped[::4096])), flush=True); sys.stdin.readline()\n"
        "sys.stdin.readline(); hold()\n"
    )
    with started(
        [sys.executable, "-c", program],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    ) as process:
        process.stdin.write(b"\n")
        process.stdin.flush()
        assert process.stdout.readline() == b"8192\n"
        held = holding(process.pid)
    assert held.rss_bytes > held.own_bytes + 32 * MIB
    assert held.own_bytes > 8 * MIB
    assert holding(process.pid) is None


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
