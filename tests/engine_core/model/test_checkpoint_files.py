"""Files of weights: what their headers tell, and that a damaged one is named."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import save_file

from slipstream_core.model.checkpoint_files import TensorHeader, read_headers
from slipstream_ipc.damaged_file import DamagedFileError

SHARD = "model-00002-of-00002.safetensors"
POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 1\n"
WEIGHTS = {"a": torch.zeros(3, 2), "b": torch.zeros(5, dtype=torch.bfloat16)}


def two_files(folder: Path) -> Path:
    """A checkpoint of two files; returns the second."""
    names = ("model-00001-of-00002.safetensors", SHARD)
    for name, (tensor, weight) in zip(names, WEIGHTS.items(), strict=True):
        save_file({tensor: weight}, folder / name)
    index = {"weight_map": dict(zip(WEIGHTS, names, strict=True))}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return folder / SHARD


def test_headers(tmp_path: Path) -> None:
    expected = {"a": TensorHeader("F32", (3, 2)), "b": TensorHeader("BF16", (5,))}
    two_files(tmp_path)
    assert read_headers(tmp_path) == expected
    save_file({"c": torch.zeros(1)}, tmp_path / "consolidated.safetensors")  # nobody reads it
    assert read_headers(tmp_path) == expected
    save_file({"c": torch.zeros(1)}, tmp_path / "model.safetensors")
    assert read_headers(tmp_path) == {"c": TensorHeader("F32", (1,))}


def test_a_folder_without_weights(tmp_path: Path) -> None:
    assert read_headers(tmp_path) is None


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"", "is empty; fetch it again"),
        (POINTER, "is a pointer of Git LFS"),
        (b"<html>404</html>", "no safetensors file"),
        (b"\x02", "no safetensors file"),
        (b"\x02" + bytes(7) + b"[]", "no safetensors file, or its header is damaged"),
        (b"\x02" + bytes(7) + b"{}abc", "bytes behind its last tensor"),
        (b"\x07" + bytes(7) + b'{"a":1}', "its header is damaged"),
    ],
)
def test_a_damaged_file_is_named(content: bytes, said: str, tmp_path: Path) -> None:
    two_files(tmp_path).write_bytes(content)
    with pytest.raises(DamagedFileError, match=said) as error:
        read_headers(tmp_path)
    assert str(error.value).startswith(f"{SHARD} ")


@given(cut=st.integers(min_value=0))
def test_every_cut_is_found(cut: int, tmp_path_factory: pytest.TempPathFactory) -> None:
    folder = tmp_path_factory.mktemp("cut")
    file = two_files(folder)
    whole = file.read_bytes()
    file.write_bytes(whole[: cut % len(whole)])
    with pytest.raises(DamagedFileError, match=SHARD):
        read_headers(folder)


def test_a_file_that_is_missing(tmp_path: Path) -> None:
    two_files(tmp_path).unlink()
    with pytest.raises(DamagedFileError, match=f"{SHARD} is missing"):
        read_headers(tmp_path)


@pytest.mark.parametrize("content", [b"{", b"[]", b'{"weight_map": 3}', POINTER])
def test_an_index_that_is_none(content: bytes, tmp_path: Path) -> None:
    two_files(tmp_path)
    (tmp_path / "model.safetensors.index.json").write_bytes(content)
    with pytest.raises(DamagedFileError, match=r"model\.safetensors\.index\.json is"):
        read_headers(tmp_path)


def test_files_of_pytorch(tmp_path: Path) -> None:
    file = tmp_path / "pytorch_model.bin"
    torch.save(WEIGHTS, file)
    assert read_headers(tmp_path) is None
    whole = file.read_bytes()
    for content, said in ((whole[:-50], "cut off"), (b"", "empty"), (POINTER, "Git LFS")):
        file.write_bytes(content)
        with pytest.raises(DamagedFileError, match=rf"pytorch_model\.bin .*{said}"):
            read_headers(tmp_path)
