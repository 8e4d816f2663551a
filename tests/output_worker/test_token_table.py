"""The token table: its file, and its compilation from a tokenizer."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models

from slipstream_worker.compile_table import UnsupportedDecoder, compile_table, self_test
from slipstream_worker.token_table import (
    TableFileError,
    TokenTable,
    cache_path,
    load_table,
    save_table,
)

TABLE = TokenTable(mode="bytelevel", pieces=(b"<s>", b" the", b"\xe4\xbd", b""), special=(0,))


# The file


@settings(max_examples=50, deadline=None)
@given(pieces=st.lists(st.binary(max_size=6)), special=st.lists(st.integers(0, 100)))
def test_what_is_saved_is_loaded(
    tmp_path_factory: pytest.TempPathFactory, pieces: list[bytes], special: list[int]
) -> None:
    path = tmp_path_factory.getbasetemp() / "round-trip.msgpack"
    table = TokenTable(mode="bytelevel", pieces=tuple(pieces), special=tuple(special))
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
    [b"", b"{}", b"slipstream token table 0\n" + bytes(16), b"\x93\xa9bytelevel"],
    ids=["empty", "json", "older version", "bare msgpack"],
)
def test_foreign_file(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "foreign"
    path.write_bytes(content)
    with pytest.raises(TableFileError, match="no token table of format version"):
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
        "import sys, slipstream_worker.detokenizer, slipstream_worker.stop_strings\n"
        "heavy = {'tokenizers', 'transformers', 'torch', 'numpy'} & set(sys.modules)\n"
        "assert not heavy, heavy"
    )
    subprocess.run([sys.executable, "-c", script], check=True, timeout=60)


# The compilation


def test_pieces_of_all_kinds_of_tokens(byte_level: Tokenizer) -> None:
    table = compile_table(byte_level)

    def piece(token: str) -> bytes:
        return table.pieces[byte_level.token_to_id(token)]

    assert piece("Ġthe") == b" the"
    assert piece("Ċ") == b"\n"
    assert piece("<tool_call>") == b"<tool_call>"
    assert piece("中文 added") == "中文 added".encode()
    assert piece("é") == b"\xe9"  # its text is in the alphabet, so decode takes it for a byte
    assert piece("<|späcial 標|>") == "<|späcial 標|>".encode()
    assert table.vocab_size == 1 + max(byte_level.get_vocab().values())


def test_special_are_the_special_added_tokens_alone(byte_level: Tokenizer) -> None:
    special = {byte_level.id_to_token(token_id) for token_id in compile_table(byte_level).special}
    assert special == {"<unk>", "<s>", "</s>", "<|im_end|>", "<|späcial 標|>"}


def test_holes_in_the_vocabulary_are_empty(byte_level: Tokenizer) -> None:
    table = compile_table(byte_level)
    holes = [i for i in range(table.vocab_size) if byte_level.id_to_token(i) is None]
    assert holes
    assert {table.pieces[hole] for hole in holes} == {b""}


def test_byte_level_alone_in_a_sequence(byte_level: Tokenizer) -> None:
    wrapped = Tokenizer.from_str(byte_level.to_str())
    wrapped.decoder = decoders.Sequence([decoders.ByteLevel()])
    assert compile_table(wrapped) == compile_table(byte_level)


def test_empty_vocabulary() -> None:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.decoder = decoders.ByteLevel()
    assert compile_table(tokenizer).vocab_size == 0


@pytest.mark.parametrize(
    ("decoder", "reason"),
    [
        (None, "no decoder"),
        (decoders.WordPiece(), "WordPiece"),
        (decoders.Metaspace(), "Metaspace"),
        (
            decoders.Sequence([decoders.ByteLevel(), decoders.ByteLevel()]),
            "ByteLevel [+] ByteLevel",
        ),
        (decoders.Sequence([decoders.ByteFallback(), decoders.Fuse()]), "ByteFallback [+] Fuse"),
    ],
)
def test_unsupported_decoders_say_why(
    byte_level: Tokenizer, decoder: decoders.Decoder | None, reason: str
) -> None:
    tokenizer = Tokenizer.from_str(byte_level.to_str())
    tokenizer.decoder = decoder
    with pytest.raises(UnsupportedDecoder, match=reason):
        compile_table(tokenizer)


def test_self_test_finds_one_wrong_piece(byte_level: Tokenizer) -> None:
    table = compile_table(byte_level)
    token_id = byte_level.token_to_id("Ġthe")
    pieces = [*table.pieces[:token_id], b"the", *table.pieces[token_id + 1 :]]
    with pytest.raises(UnsupportedDecoder, match="self-test"):
        self_test(byte_level, msgspec.structs.replace(table, pieces=tuple(pieces)))


def test_self_test_finds_one_forgotten_special_token(byte_level: Tokenizer) -> None:
    table = compile_table(byte_level)
    with pytest.raises(UnsupportedDecoder, match="self-test"):
        self_test(byte_level, msgspec.structs.replace(table, special=table.special[:-1]))
