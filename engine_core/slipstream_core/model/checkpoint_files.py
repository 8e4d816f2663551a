"""The files that hold a checkpoint's weights: their headers, and which of them is damaged.

A file that is cut off, empty, or a pointer in place of a file is found here by its size and header,
because what the libraries say of one does not name it.
"""

from __future__ import annotations

import json
import struct
import zipfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from slipstream_ipc.damaged_file import DamagedFileError, refuse_placeholder

_MAX_HEADER_BYTES = 100 << 20  # safetensors' own limit
_SAFETENSORS, _PYTORCH = "model.safetensors", "pytorch_model.bin"
_METADATA = "__metadata__"
_ZIP = b"PK\x03\x04"


@dataclass(frozen=True, slots=True)
class TensorHeader:
    """A tensor of a safetensors file, as its header has it."""

    dtype: str  # in safetensors' own spelling, such as F8_E4M3
    shape: tuple[int, ...]


def read_headers(folder: Path) -> dict[str, TensorHeader] | None:
    """The tensors of a folder's checkpoint by name; None where it has no safetensors files.

    Raises DamagedFileError, which names the file. Files of PyTorch are looked at, too.
    """
    files = weight_files(folder)
    found: dict[str, TensorHeader] = {}
    for file in files:
        if file.suffix == ".safetensors":
            found |= read_header(file)
        else:
            _check_pytorch(file)
    return found or None


def read_header(file: Path) -> dict[str, TensorHeader]:
    """The tensors of one safetensors file by name. Raises DamagedFileError."""
    refuse_placeholder(file)
    size = file.stat().st_size
    try:
        with file.open("rb") as opened:
            [length] = struct.unpack("<Q", opened.read(8))
            if length > min(_MAX_HEADER_BYTES, size - 8):
                raise DamagedFileError(
                    file,
                    f"is cut off, or no safetensors file: it begins with a header of {length} "
                    f"bytes, and the file has {size}",
                )
            header: dict[str, Any] = json.loads(opened.read(length))
        header.pop(_METADATA, None)
        found = {
            name: TensorHeader(str(each["dtype"]), tuple(map(int, each["shape"])))
            for name, each in header.items()
        }
        ends = [int(each["data_offsets"][1]) for each in header.values()]
    except (struct.error, ValueError, KeyError, TypeError, AttributeError, IndexError) as error:
        if isinstance(error, DamagedFileError):
            raise
        raise DamagedFileError(file, "is no safetensors file, or its header is damaged") from error
    needed = 8 + length + max(ends, default=0)
    if size != needed:
        what = "is cut off" if size < needed else "has bytes behind its last tensor"
        raise DamagedFileError(file, f"{what}: its header tells of {needed} bytes, it has {size}")
    return found


def weight_files(folder: Path) -> list[Path]:
    """The weight files that transformers reads, in its order of preference. Raises
    DamagedFileError.
    """
    for name in (_SAFETENSORS, _PYTORCH):
        if (folder / name).is_file():
            return [folder / name]
        if (index := folder / f"{name}.index.json").is_file():
            return _indexed(index)
    return []


def _indexed(index: Path) -> list[Path]:
    refuse_placeholder(index)
    try:
        names = sorted(set(json.loads(index.read_bytes())["weight_map"].values()))
        files = [index.parent / name for name in names]
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise DamagedFileError(index, "is no index of a checkpoint's files") from error
    for file in files:
        if not file.is_file():
            raise DamagedFileError(file, f"is missing, though {index.name} names it")
    return files


def _check_pytorch(file: Path) -> None:
    refuse_placeholder(file)
    with file.open("rb") as opened:
        is_zip = opened.read(len(_ZIP)) == _ZIP
    if is_zip and not zipfile.is_zipfile(file):  # whose directory is at the end
        raise DamagedFileError(file, "is cut off")
