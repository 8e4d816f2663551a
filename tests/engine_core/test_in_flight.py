"""The note of what is computed: true at every moment, and read by whoever comes next."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from tests.patience import PATIENCE_S

from slipstream_core.in_flight import InFlightNote, read_note

MAX_NUM_SEQS = 8


def ids_of(*streams: int) -> np.ndarray[tuple[int, int], np.dtype[np.uint64]]:
    return np.array([[n, 2**64 - 1 - n] for n in streams], np.uint64)


IDS = ids_of(*range(100, 140))  # by row


def names(*rows: int) -> tuple[bytes, ...]:
    return tuple(IDS[row].tobytes() for row in rows)


def test_what_is_in_flight_is_read(tmp_path: Path) -> None:
    note = InFlightNote(tmp_path, MAX_NUM_SEQS)
    assert read_note(tmp_path) == ()
    note.launch(1, IDS, np.array([30, 2]))
    assert read_note(tmp_path) == names(30, 2)
    note.launch(2, IDS, np.array([2, 7]))
    assert sorted(read_note(tmp_path)) == sorted(names(30, 2, 7))
    note.collect(1)
    assert read_note(tmp_path) == names(2, 7)
    note.launch(3, IDS, np.arange(MAX_NUM_SEQS))
    note.collect(2)
    assert read_note(tmp_path) == names(*range(MAX_NUM_SEQS))
    note.collect(3)
    assert read_note(tmp_path) == ()
    note.close()
    note.close()


def test_it_outlives_its_process(tmp_path: Path) -> None:
    code = f"""
import os, signal
from pathlib import Path
import numpy as np
from slipstream_core.in_flight import InFlightNote
note = InFlightNote(Path({str(tmp_path)!r}), {MAX_NUM_SEQS})
note.launch(5, np.array({IDS.tolist()!r}, np.uint64), np.array([3, 4]))
os.kill(os.getpid(), signal.SIGKILL)
"""
    ended = subprocess.run([sys.executable, "-c", code], check=False, timeout=PATIENCE_S)
    assert ended.returncode == -9
    assert read_note(tmp_path) == names(3, 4)


def test_a_new_note_begins_empty(tmp_path: Path) -> None:
    before = InFlightNote(tmp_path, MAX_NUM_SEQS)
    before.launch(1, IDS, np.array([1]))
    before.close()
    assert read_note(tmp_path) == names(1)
    after = InFlightNote(tmp_path, 2)
    assert read_note(tmp_path) == ()
    after.close()


@pytest.mark.parametrize("damage", ["absent", "empty", "short", "long", "foreign", "wild"])
def test_what_is_no_note_is_passed_over(tmp_path: Path, damage: str) -> None:
    note = InFlightNote(tmp_path, MAX_NUM_SEQS)
    note.launch(1, IDS, np.array([1]))
    note.close()
    [path] = tmp_path.iterdir()
    data = path.read_bytes()
    if damage == "absent":
        path.unlink()
    elif damage == "wild":  # a size that overflows
        path.write_bytes(data[:8] + b"\xff" * 8 + data[16:])
    else:
        changed = {"empty": b"", "short": data[:-3], "long": data + b"12345678"}
        path.write_bytes(changed.get(damage, b"x" * len(data)))
    assert read_note(tmp_path) == ()


def test_a_count_beyond_its_page_is_cut(tmp_path: Path) -> None:
    note = InFlightNote(tmp_path, 2)
    note.launch(2, IDS, np.array([1, 2]))
    note.close()
    [path] = tmp_path.iterdir()
    words = np.fromfile(path, np.uint64)
    words[2] = 2**60
    words.tofile(path)
    assert read_note(tmp_path) == names(1, 2)
