"""The reader takes what the package `gguf` writes, and refuses damage in one line without cost."""

from __future__ import annotations

import os
import random
import shutil
import struct
import tracemalloc
from collections.abc import Callable
from pathlib import Path

import gguf
import numpy as np
import pytest
from tests.helpers.gguf_damage import damaged
from tests.helpers.gguf_models import make_model, write_gguf

from slipstream_core.model.gguf.folder import unfold
from slipstream_core.model.gguf.reader import GGUFError, GGUFModel, read_gguf

# with 100,000 it takes a quarter of an hour
NUM_DAMAGED = int(os.environ.get("SLIPSTREAM_DAMAGED_FILES", "500"))
HEADER = 24  # magic, version, two counts


def write(path: Path, fill: Callable[[gguf.GGUFWriter], None] | None = None) -> Path:
    writer = gguf.GGUFWriter(path, "llama")
    if fill is not None:
        fill(writer)
    writer.add_tensor("a.weight", np.arange(64, dtype=np.float32).reshape(2, 32))
    writer.add_tensor(
        "b.weight", np.zeros((2, 34), np.uint8), raw_dtype=gguf.GGMLQuantizationType.Q8_0
    )
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def refusal(path: Path, of: Path | None = None) -> str:
    with pytest.raises(GGUFError) as refused:
        read_gguf(path)
    said = str(refused.value)
    assert said.startswith(f"{(of or path).name} ")
    assert "\n" not in said
    return said


def replaced(path: Path, old: bytes, new: bytes) -> Path:
    content = path.read_bytes()
    assert content.count(old) == 1
    path.write_bytes(content.replace(old, new))
    return path


def test_values_are_those_that_were_written(tmp_path: Path) -> None:
    def fill(writer: gguf.GGUFWriter) -> None:
        writer.add_uint8("a.u8", 200)
        writer.add_int64("a.i64", -(2**40))
        writer.add_float32("a.eps", 1e-6)
        writer.add_float64("a.f64", 0.1)
        writer.add_bool("a.flag", True)
        writer.add_string("a.text", "h\u00e9llo\n")
        writer.add_array("a.texts", ["", "\u4f60"])
        writer.add_array("a.numbers", [1, -2, 3])
        writer.add_array("a.floats", [0.5, 1.5])

    model = read_gguf(write(tmp_path / "x.gguf", fill))
    values = dict(model.metadata)
    assert list(values.pop("a.numbers")) == [1, -2, 3]
    assert list(values.pop("a.floats")) == [0.5, 1.5]
    assert values == {
        "general.architecture": "llama",
        "a.u8": 200,
        "a.i64": -(2**40),
        "a.eps": 1e-6,  # the shortest decimal, not 9.99999997e-07
        "a.f64": 0.1,
        "a.flag": True,
        "a.text": "h\u00e9llo\n",
        "a.texts": ["", "\u4f60"],
    }
    assert [(each.name, each.shape, each.type.name) for each in model.tensors.values()] == [
        ("a.weight", (2, 32), "F32"),
        ("b.weight", (2, 32), "Q8_0"),
    ]
    assert model.tensors["a.weight"].read().view("<f4").ravel().tolist() == list(range(64))


def table_entry(name: bytes, dims: tuple[int, ...], kind: int, offset: int) -> bytes:
    text = struct.pack("<Q", len(name)) + name
    return text + struct.pack(f"<I{len(dims)}QIQ", len(dims), *dims, kind, offset)


A, B = table_entry(b"a.weight", (32, 2), 0, 0), table_entry(b"b.weight", (32, 2), 8, 256)
ENTRIES = [
    (B, table_entry(b"b.weight", (2**62, 2), 8, 256), "ends before tensor 'b.weight': 96 of"),
    (
        B,
        table_entry(b"b.weight", (32, 3), 8, 256),
        "ends before tensor 'b.weight': 96 of 102 bytes",
    ),
    (B, table_entry(b"b.weight", (33, 2), 8, 256), "of 32 values or a multiple of that"),
    (B, table_entry(b"b.weight", (0, 2), 8, 256), "of shape (2, 0)"),
    (
        B,
        table_entry(b"b.weight", (32, 2), 8, 32),
        "tensors that overlap, 'a.weight' and 'b.weight'",
    ),
    (B, table_entry(b"b.weight", (32, 2), 8, 257), "at 257, no multiple of 32"),
    (B, table_entry(b"b.weight", (32, 2), 8, 2**63), "at 9223372036854775808"),
    (B, table_entry(b"a.weight", (32, 2), 8, 256), "two tensors of the name 'a.weight'"),
    (
        B,
        table_entry(b"b.weight", (32, 2), 19, 256),
        "'b.weight' of type IQ1_S, which is not served",
    ),
    (B, table_entry(b"b.weight", (32, 2), 34, 256), "of type TQ1_0"),
    (B, table_entry(b"b.weight", (32, 2), 999, 256), "of type number 999"),
    (B, table_entry(b"b\nweight", (32, 2), 999, 256), r"'b\nweight'"),
    (A, A.replace(struct.pack("<I", 2), struct.pack("<I", 9), 1), "of 9 dimensions"),
    (A, A.replace(struct.pack("<I", 2), struct.pack("<I", 0), 1), "of 0 dimensions"),
    (A, struct.pack("<Q", 2**63) + A[8:], "text of 9223372036854775808 bytes"),
]


@pytest.mark.parametrize(("old", "new", "said"), ENTRIES, ids=range(len(ENTRIES)))
def test_a_damaged_table_is_refused(old: bytes, new: bytes, said: str, tmp_path: Path) -> None:
    path = replaced(write(tmp_path / "x.gguf"), old, new)
    if said.startswith("at 9"):
        said = "ends before tensor 'b.weight': 0 of 68 bytes"
    assert said in refusal(path)


@pytest.mark.parametrize(
    ("at", "new", "said"),
    [
        (0, b"GGML", "is no GGUF file"),
        (4, struct.pack("<I", 1), "of version 1; served are versions 2 and 3"),
        (4, struct.pack(">I", 3), "is a GGUF file big-endian"),
        (8, struct.pack("<Q", 2**40), "it tells of 1099511627776 tensors"),
        (16, struct.pack("<Q", 2**60), "it tells of 1152921504606846976 entries of metadata"),
        (HEADER, struct.pack("<Q", 2**40), "a text of 1099511627776 bytes in entry 1"),
        (HEADER, struct.pack("<Q", 60_000), "ends within entry 1 of its metadata"),
    ],
    ids=range(7),
)
def test_a_damaged_header_is_refused(at: int, new: bytes, said: str, tmp_path: Path) -> None:
    path = write(tmp_path / "x.gguf")
    content = path.read_bytes()
    path.write_bytes(content[:at] + new + content[at + len(new) :])
    assert said in refusal(path)


VALUES = [
    (struct.pack("<IIQ", 9, 9, 1), "arrays within the array of 'k'"),
    (struct.pack("<IIQ", 9, 4, 2**40), "1099511627776 values in 'k'"),
    (struct.pack("<IIQ", 9, 4, 2**20), "it tells of 1048576 numbers in 'k'"),
    (struct.pack("<IIQ", 9, 8, 2**20), "it tells of 1048576 texts in 'k'"),
    (struct.pack("<II", 13, 0), "the unknown type 13 in 'k'"),
    (struct.pack("<IB", 7, 2), "truth value of 2 in 'k'"),
    (struct.pack("<If", 6, float("nan")), "has nan in 'k'"),
    (struct.pack("<IQ", 8, 1) + b"\xff", "text in 'k' that is not UTF-8"),
]


@pytest.mark.parametrize(("value", "said"), VALUES, ids=range(len(VALUES)))
def test_a_damaged_value_is_refused(value: bytes, said: str, tmp_path: Path) -> None:
    path = tmp_path / "x.gguf"
    key = struct.pack("<Q", 1) + b"k"
    path.write_bytes(b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + key + value + bytes(100))
    assert said in refusal(path)


def test_a_line_stays_short_whatever_is_in_the_file(tmp_path: Path) -> None:
    path = tmp_path / "x.gguf"
    key = b"general.\n" + 9000 * b"k"
    entry = struct.pack("<Q", len(key)) + key + struct.pack("<II", 99, 0)
    path.write_bytes(b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + entry)
    said = refusal(path)
    assert "the unknown type 99 in 'general.\\nkkk" in said
    assert len(said) < 600


def test_two_values_for_a_key_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "x.gguf"
    entry = struct.pack("<Q", 1) + b"k" + struct.pack("<IB", 7, 1)
    path.write_bytes(b"GGUF" + struct.pack("<IQQ", 3, 0, 2) + 2 * entry)
    assert "has two values for 'k'" in refusal(path)


@pytest.mark.parametrize("alignment", [0, 3, 2**31])
def test_an_alignment_that_is_none_is_refused(alignment: int, tmp_path: Path) -> None:
    path = write(tmp_path / "x.gguf", lambda writer: writer.add_uint32("general.alignmenu", 32))
    replaced(
        path,
        b"general.alignmenu" + struct.pack("<II", 4, 32),
        b"general.alignment" + struct.pack("<II", 4, alignment),
    )
    assert f"has the alignment {alignment}" in refusal(path)


def test_what_is_no_file_of_its_own_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "x.gguf"
    path.touch()
    assert "is empty" in refusal(path)
    path.write_bytes(b"version https://git-lfs.github.com/spec/v1\noid sha256:0\n")
    assert "is a pointer of Git LFS" in refusal(path)


def split(folder: Path) -> list[Path]:
    """A model in four parts."""
    folder.mkdir()
    write_gguf(folder / "x.gguf", "llama", make_model("llama"), split_max_tensors=6)
    return sorted(folder.iterdir())


def test_any_part_of_a_split_file_stands_for_all(tmp_path: Path) -> None:
    parts = split(tmp_path / "parts")
    assert [each.name for each in parts[:1]] == [f"x-00001-of-{len(parts):05}.gguf"]
    whole = read_gguf(write_gguf(tmp_path / "y.gguf", "llama", make_model("llama")))
    for part in parts:
        model = read_gguf(part)
        assert model.files == tuple(parts)
        assert contents(model) == contents(whole)


def contents(model: GGUFModel) -> dict[str, bytes]:
    return {name: tensor.read().tobytes() for name, tensor in model.tensors.items()}


def test_a_missing_and_a_foreign_part_are_named(tmp_path: Path) -> None:
    parts = split(tmp_path / "parts")
    held = parts[1].read_bytes()
    parts[1].unlink()
    assert f"the part {parts[1].name} is missing" in refusal(parts[0])
    parts[1].write_bytes(parts[2].read_bytes())
    assert "is not part 2 as split.no counts them" in refusal(parts[0], of=parts[1])
    parts[1].write_bytes(held)
    alone = parts[0].rename(parts[0].with_name("alone.gguf"))
    assert f"is one of {len(parts)} parts" in refusal(alone)


@pytest.mark.timeout(3600)
def test_damaged_files_end_in_one_line_and_bounded_memory(tmp_path: Path) -> None:
    """Nothing of outside software reads them: unfolding is this project's code alone."""
    seed = random.randrange(2**32)
    draw = random.Random(seed)
    original = write_gguf(tmp_path / "x.gguf", "llama", make_model("llama"))
    content = original.read_bytes()
    path = tmp_path / "damaged.gguf"
    said: list[str] = []
    tracemalloc.start()
    for number in range(NUM_DAMAGED):
        path.write_bytes(damaged(content, draw))
        tracemalloc.reset_peak()
        before, _ = tracemalloc.get_traced_memory()
        if (problem := refused_with(path, tmp_path / "cache")) is not None:
            said.append(problem)
        _, peak = tracemalloc.get_traced_memory()
        assert peak - before < 16 * len(content) + (1 << 20), (seed, number)
    tracemalloc.stop()
    assert [each for each in said if "\n" in each or len(each) > 1000] == [], seed
    assert len(said) > NUM_DAMAGED // 2


def refused_with(path: Path, cache: Path) -> str | None:
    try:
        shutil.rmtree(unfold(path, cache=cache))
    except GGUFError as error:
        return str(error)
    return None
