"""The token table and its file."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.helpers.patience import PATIENCE_S

from slipstream_worker.detokenizer.table import (
    TableFileError,
    TokenTable,
    cache_path,
    load_table,
    save_table,
)

TABLE = TokenTable(mode="bytelevel", pieces=(b"<s>", b" the", b"\xe4\xbd", b""), special=(0,))
IDS = st.lists(st.integers(0, 100)).map(tuple)
PIECES = st.lists(st.none() | st.binary(max_size=6)).map(tuple)


# The file


@settings(max_examples=50, deadline=None)
@given(
    table=st.builds(
        TokenTable,
        mode=st.sampled_from(["bytelevel", "text"]),
        pieces=PIECES,
        special=IDS,
        byte_ids=IDS,
        first_pieces=PIECES,
        last_pieces=PIECES,
        num_stripped=st.integers(0, 3),
    )
)
def test_what_is_saved_is_loaded(
    tmp_path_factory: pytest.TempPathFactory, table: TokenTable
) -> None:
    path = tmp_path_factory.getbasetemp() / "round-trip.msgpack"
    save_table(path, table)
    assert load_table(path) == table


def test_save_makes_the_folder_and_leaves_no_other_file(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "cache" / "table.msgpack"
    save_table(path, TABLE)
    save_table(path, TABLE)
    assert list(path.parent.iterdir()) == [path]


def test_a_save_that_fails_leaves_the_old_file_and_no_rubbish(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "table.msgpack"
    save_table(path, TABLE)

    def fail(*_: object) -> None:
        raise OSError("no space left on device")

    monkeypatch.setattr(Path, "replace", fail)
    with pytest.raises(OSError, match="no space"):
        save_table(path, msgspec.structs.replace(TABLE, pieces=()))
    assert load_table(path) == TABLE
    assert list(tmp_path.iterdir()) == [path]


def test_missing_file(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        load_table(tmp_path / "nothing")


@pytest.mark.parametrize(
    "content",
    [b"", b"{}", b"slipstream token table 1\n" + bytes(16), b"\x93\xa9bytelevel"],
    ids=["empty", "json", "older version", "bare msgpack"],
)
def test_foreign_file(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "foreign"
    path.write_bytes(content)
    with pytest.raises(TableFileError, match="is not a token table of format version"):
        load_table(path)


@given(data=st.data())
def test_damaged_file(tmp_path_factory: pytest.TempPathFactory, data: st.DataObject) -> None:
    path = tmp_path_factory.getbasetemp() / "damaged.msgpack"
    save_table(path, TABLE)
    content = bytearray(path.read_bytes())
    place = data.draw(st.integers(0, len(content) - 1))
    if data.draw(st.booleans(), label="cut"):
        del content[place:]
    else:
        content[place] ^= data.draw(st.integers(1, 255))
    path.write_bytes(content)
    with pytest.raises(TableFileError):
        load_table(path)


def test_cache_path_depends_on_the_content(tmp_path: Path) -> None:
    path = cache_path(tmp_path, b"{}")
    assert path.parent == tmp_path
    assert path == cache_path(tmp_path, b"{}")
    assert path != cache_path(tmp_path, b"{} ")


def test_the_worker_reads_tables_without_heavy_imports() -> None:
    script = (
        "import sys, slipstream_worker.detokenizer.factory, slipstream_worker.output.stop_strings\n"
        "heavy = {'tokenizers', 'transformers', 'torch'} & set(sys.modules)\n"
        "assert not heavy, heavy"
    )
    subprocess.run([sys.executable, "-c", script], check=True, timeout=PATIENCE_S)
