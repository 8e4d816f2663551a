"""The note of what is computed: true at every moment, and read by whoever comes next."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from tests.helpers.patience import PATIENCE_S

from slipstream_core.workers.crash_note_writer import CrashNote, begin_note
from slipstream_ipc.crash_note import HEADER_WORDS, IMAGE_WORD, read_note

MAX_NUM_SEQS = 8


def ids_of(*streams: int) -> np.ndarray[tuple[int, int], np.dtype[np.uint64]]:
    return np.array([[n, 2**64 - 1 - n] for n in streams], np.uint64)


IDS = ids_of(*range(100, 140))  # by row


def names(*rows: int) -> tuple[bytes, ...]:
    return tuple(IDS[row].tobytes() for row in rows)


def test_what_is_in_flight_is_read(tmp_path: Path) -> None:
    note = CrashNote(tmp_path, MAX_NUM_SEQS)
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


def test_the_stream_whose_image_is_encoded_is_read(tmp_path: Path) -> None:
    note = CrashNote(tmp_path, MAX_NUM_SEQS)
    [seen] = names(9)
    note.encode(seen)
    assert read_note(tmp_path) == (seen,)
    note.launch(1, IDS, np.array([30, 2]))
    note.encoded()
    assert read_note(tmp_path) == names(30, 2)
    note.encode(seen)
    note.collect(1)
    assert read_note(tmp_path) == (seen,)
    note.close()
    assert read_note(tmp_path) == (seen,)


def test_it_outlives_its_process(tmp_path: Path) -> None:
    code = f"""
import os, signal
from pathlib import Path
import numpy as np
from slipstream_core.workers.crash_note_writer import CrashNote
note = CrashNote(Path({str(tmp_path)!r}), {MAX_NUM_SEQS})
note.launch(5, np.array({IDS.tolist()!r}, np.uint64), np.array([3, 4]))
os.kill(os.getpid(), signal.SIGKILL)
"""
    ended = subprocess.run([sys.executable, "-c", code], check=False, timeout=PATIENCE_S)
    assert ended.returncode == -9
    assert read_note(tmp_path) == names(3, 4)


def test_a_new_note_begins_empty(tmp_path: Path) -> None:
    before = CrashNote(tmp_path, MAX_NUM_SEQS)
    before.launch(1, IDS, np.array([1]))
    before.close()
    assert read_note(tmp_path) == names(1)
    after = CrashNote(tmp_path, 2)
    assert read_note(tmp_path) == ()
    after.close()


@pytest.mark.parametrize("damage", ["absent", "empty", "short", "long", "foreign", "wild"])
def test_what_is_no_note_is_passed_over(tmp_path: Path, damage: str) -> None:
    note = CrashNote(tmp_path, MAX_NUM_SEQS)
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
    assert read_note(tmp_path) is None


def test_a_count_beyond_its_page_is_cut(tmp_path: Path) -> None:
    note = CrashNote(tmp_path, 2)
    note.launch(2, IDS, np.array([1, 2]))
    note.close()
    [path] = tmp_path.iterdir()
    words = np.fromfile(path, np.uint64)
    words[HEADER_WORDS] = words[IMAGE_WORD] = 2**60
    words.tofile(path)
    assert read_note(tmp_path) == (*names(1, 2), bytes(16))


# A file system of 64 KiB, in a mount namespace that ends with the process, and nothing left on it.
IN_A_FULL_FILE_SYSTEM = """
mount -t tmpfs -o size=64k tmpfs "$1" || exit 77
cat /dev/zero > "$1/full" 2> /dev/null
exec "$2" -c "$3" "$1"
"""
KEEPS_A_NOTE = f"""
import logging, sys
from pathlib import Path
import numpy as np
from slipstream_core.workers.crash_note_writer import begin_note
logging.basicConfig(format="%(levelname)s %(message)s")
note = begin_note(Path(sys.argv[1]), 256)
if note is not None:
    note.launch(5, np.array({IDS.tolist()!r}, np.uint64), np.array([3, 4]))
print(note, [path.name for path in Path(sys.argv[1]).iterdir()])
"""


def test_a_full_file_system_costs_the_note_alone(tmp_path: Path) -> None:
    folder = str(tmp_path)
    ended = subprocess.run(
        [
            *("unshare", "--user", "--map-root-user", "--mount"),
            *("sh", "-c", IN_A_FULL_FILE_SYSTEM, "sh", folder, sys.executable, KEEPS_A_NOTE),
        ],
        check=False,
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
    )
    if ended.returncode == 77 or ended.stderr.startswith("unshare:"):
        pytest.skip(f"file systems cannot be mounted here: {ended.stderr}")
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout == "None ['full']\n"
    assert ended.stderr.startswith("ERROR cannot write the crash note: [Errno 28]")


def test_where_there_is_no_room_no_others_note_is_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = CrashNote(tmp_path, MAX_NUM_SEQS)
    before.launch(1, IDS, np.array([1]))
    before.close()

    def no_room(*_: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.posix_fallocate", no_room)
    assert begin_note(tmp_path, MAX_NUM_SEQS) is None
    assert not [*tmp_path.iterdir()]
    assert read_note(tmp_path) is None
