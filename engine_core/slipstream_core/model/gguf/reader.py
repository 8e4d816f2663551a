"""Reads the metadata and the table of tensors of GGUF files, and nothing that they do not hold.

Every length, count and offset is compared with the file's size, as Python integers, before
anything is allocated for it. So what a damaged file costs is bounded by its size, and each damage
is one GGUFError that names the file.

The format is described in ggml's `docs/gguf.md`; versions 2 and 3, little-endian, are read.
"""

from __future__ import annotations

import mmap
import re
from collections.abc import Mapping
from dataclasses import dataclass
from math import isfinite, prod
from pathlib import Path

import numpy as np
import numpy.typing as npt

from slipstream_core.model.gguf.tensor_types import SERVED, TensorType, type_name
from slipstream_ipc.damaged_file import DamagedFileError, refuse_placeholder

Value = int | float | bool | str | list[str] | npt.NDArray[np.generic]
"""A value of metadata; arrays of numbers are numpy's, and floats the shortest decimals that give
the file's float32.
"""

_MAGIC = b"GGUF"
_VERSIONS = (2, 3)
_MAX_KEY_BYTES = 65_535  # ggml's own limit
_MAX_NAME_BYTES = 64  # of tensors, ggml's own limit
_MAX_TEXT_BYTES = 64 << 20
_MAX_ITEMS = 1 << 24  # of an array
_MAX_DIMS = 4
_DEFAULT_ALIGNMENT, _MAX_ALIGNMENT = 32, 1 << 20
_LEAST_ENTRY, _LEAST_TENSOR = 8 + 1 + 4 + 1, 8 + 1 + 4 + 8 + 4 + 8  # bytes
_MAX_PROBLEM = 500  # characters; names in a damaged file may be long
_BOOL, _STRING, _ARRAY, _FLOAT32 = 7, 8, 9, 6
_NUMBERS = {
    0: "<u1",
    1: "<i1",
    2: "<u2",
    3: "<i2",
    4: "<u4",
    5: "<i4",
    6: "<f4",
    7: "<u1",
    10: "<u8",
    11: "<i8",
    12: "<f8",
}
_PART = re.compile(r"(?P<stem>.+)-(?P<number>\d{5})-of-(?P<count>\d{5})\.gguf")
_SPLIT = "split."


class GGUFError(ValueError):
    """A GGUF file cannot be served; the message names it and says why."""

    def __init__(self, file: Path, problem: str) -> None:
        short = problem if len(problem) <= _MAX_PROBLEM else f"{problem[:_MAX_PROBLEM]}…"
        super().__init__(f"{file.name} {short}")
        self.file = file


@dataclass(frozen=True, slots=True)
class Tensor:
    """A tensor of a file. shape: outermost first, as torch has it. Its values lie in `nbytes` bytes
    from `start`.
    """

    name: str
    type: TensorType
    shape: tuple[int, ...]
    file: Path
    start: int
    nbytes: int

    def read(self) -> npt.NDArray[np.uint8]:
        """Its bytes as a mapping of the file, read-only: [rows, bytes of a row]."""
        mapped = np.memmap(self.file, np.uint8, "r", self.start, (self.nbytes,))
        return mapped.reshape(prod(self.shape[:-1]), -1)


@dataclass(frozen=True, slots=True)
class GGUFModel:
    """The metadata and tensors of a model, from one file or all parts of a split one."""

    files: tuple[Path, ...]
    metadata: Mapping[str, Value]
    tensors: Mapping[str, Tensor]
    headers: bytes  # of all parts, up to the tensors' values


@dataclass(frozen=True, slots=True)
class _Part:
    metadata: dict[str, Value]
    tensors: dict[str, Tensor]
    header: bytes


def read_gguf(file: Path) -> GGUFModel:
    """Read a file, or all parts that its name says it is one of. Raises GGUFError, OSError, and
    DamagedFileError for what is empty or no file of its own.
    """
    files = part_files(file)
    parts = [_read(each) for each in files]
    first = parts[0]
    said = first.metadata.get(f"{_SPLIT}count", 1)
    if said != len(files):
        raise GGUFError(
            file, f"is one of {said} parts, as split.count says, and {len(files)} by name"
        )
    tensors: dict[str, Tensor] = {}
    for number, (each, part) in enumerate(zip(files, parts, strict=True)):
        if len(files) > 1 and part.metadata.get(f"{_SPLIT}no") != number:
            raise GGUFError(each, f"is not part {number + 1} as split.no counts them")
        if repeated := sorted(tensors.keys() & part.tensors.keys()):
            raise GGUFError(each, f"has tensor {repeated[0]!r}, as another part has")
        for key in sorted(part.metadata) if number else ():
            if not key.startswith(_SPLIT) and not _equal(
                part.metadata[key], first.metadata.get(key)
            ):
                raise GGUFError(each, f"says otherwise than the first part what {key!r} is")
        tensors |= part.tensors
    counted = first.metadata.get(f"{_SPLIT}tensors.count", len(tensors))
    if counted != len(tensors):
        raise GGUFError(file, f"has {len(tensors)} tensors in all parts, and says {counted}")
    metadata = {key: each for key, each in first.metadata.items() if not key.startswith(_SPLIT)}
    return GGUFModel(tuple(files), metadata, tensors, b"".join(part.header for part in parts))


def part_files(file: Path) -> list[Path]:
    """The files that `NAME-00001-of-0000N.gguf` and its like stand for, in their order. Raises
    GGUFError for a part that is missing.
    """
    found = _PART.fullmatch(file.name)
    if found is None:
        return [file]
    count = int(found["count"])
    if not 1 <= int(found["number"]) <= count:
        raise GGUFError(file, "has a name that counts its parts wrongly")
    names = (f"{found['stem']}-{number:05}-of-{count:05}.gguf" for number in range(1, count + 1))
    files: list[Path] = []
    for name in names:  # ends at the first that is missing: the count may be anything
        files.append(file.with_name(name))
        if not files[-1].is_file():
            raise GGUFError(file, f"is a part of a model, and the part {name} is missing")
    return files


def _equal(one: Value, other: Value | None) -> bool:
    if isinstance(one, np.ndarray) or isinstance(other, np.ndarray):
        return bool(np.array_equal(one, other if other is not None else []))
    return one == other


def _read(file: Path) -> _Part:
    try:
        refuse_placeholder(file)
    except DamagedFileError as error:
        raise GGUFError(file, str(error).removeprefix(f"{file.name} ")) from None
    with file.open("rb") as opened:
        mapped = mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_READ)
        with mapped:
            return _Header(file, mapped).read()


class _Header:
    """Reads the header of one file from its start to its end."""

    def __init__(self, file: Path, content: mmap.mmap) -> None:
        self._file = file
        self._content = content
        self._size = len(content)
        self._at = 0
        self._where = "its header"

    def read(self) -> _Part:
        if self._content[:4] != _MAGIC:
            raise self._error("is no GGUF file")
        self._at = 4
        version = self._uint32()
        if version not in _VERSIONS:
            is_swapped = int.from_bytes(version.to_bytes(4, "little"), "big") in _VERSIONS
            said = "big-endian" if is_swapped else f"of version {version}"
            raise self._error(f"is a GGUF file {said}; served are versions 2 and 3, little-endian")
        num_tensors, num_entries = self._uint64(), self._uint64()
        self._check_count(num_entries, _LEAST_ENTRY, "entries of metadata")
        self._check_count(num_tensors, _LEAST_TENSOR, "tensors")
        metadata: dict[str, Value] = {}
        for number in range(num_entries):
            self._where = f"entry {number + 1} of its metadata"
            key = self._text(_MAX_KEY_BYTES)
            if key in metadata:
                raise self._error(f"has two values for {key!r}")
            self._where = repr(key)
            metadata[key] = self._value(self._uint32())
        alignment = metadata.get("general.alignment", _DEFAULT_ALIGNMENT)
        is_power = type(alignment) is int and alignment > 0 and alignment & (alignment - 1) == 0
        if not is_power or not isinstance(alignment, int) or alignment > _MAX_ALIGNMENT:
            raise self._error(f"has the alignment {alignment!r}; allowed: powers of 2 up to 2^20")
        entries = [self._entry(number) for number in range(num_tensors)]
        header = bytes(self._content[: self._at])
        begin = -(-self._at // alignment) * alignment
        return _Part(metadata, self._tensors(entries, begin, alignment), header)

    def _entry(self, number: int) -> tuple[str, TensorType, tuple[int, ...], int]:
        """Name, type, shape and offset of the next tensor."""
        self._where = f"tensor {number + 1} of its table"
        name = self._text(_MAX_NAME_BYTES)
        self._where = f"tensor {name!r}"
        num_dims = self._uint32()
        if not 1 <= num_dims <= _MAX_DIMS:
            raise self._error(f"has tensor {name!r} of {num_dims} dimensions; allowed: 1 to 4")
        shape = tuple(self._uint64() for _ in range(num_dims))[::-1]
        kind = self._uint32()
        offset = self._uint64()
        served = SERVED.get(kind)
        if served is None:
            raise self._error(
                f"has tensor {name!r} of type {type_name(kind)}, which is not served; served are "
                + ", ".join(each.name for each in SERVED.values())
            )
        if 0 in shape or shape[-1] % served.block_len:
            raise self._error(
                f"has tensor {name!r} of shape {shape}; the rows of type {served.name} are of "
                f"{served.block_len} values or a multiple of that"
            )
        return name, served, shape, offset

    def _tensors(
        self,
        entries: list[tuple[str, TensorType, tuple[int, ...], int]],
        begin: int,
        alignment: int,
    ) -> dict[str, Tensor]:
        tensors: dict[str, Tensor] = {}
        for name, kind, shape, offset in entries:
            nbytes = prod(shape) // kind.block_len * kind.block_bytes
            start = begin + offset
            if offset % alignment:
                raise self._error(f"has tensor {name!r} at {offset}, no multiple of {alignment}")
            if start + nbytes > self._size:
                there = max(0, self._size - start)
                raise self._error(f"ends before tensor {name!r}: {there} of {nbytes} bytes")
            if name in tensors:
                raise self._error(f"has two tensors of the name {name!r}")
            tensors[name] = Tensor(name, kind, shape, self._file, start, nbytes)
        last: Tensor | None = None
        for each in sorted(tensors.values(), key=lambda tensor: tensor.start):
            if last is not None and each.start < last.start + last.nbytes:
                raise self._error(f"has tensors that overlap, {last.name!r} and {each.name!r}")
            last = each
        return tensors

    def _value(self, kind: int) -> Value:
        if kind == _STRING:
            return self._text(_MAX_TEXT_BYTES)
        if kind == _ARRAY:
            return self._array(self._uint32(), self._uint64())
        dtype = self._dtype(kind)
        [number] = np.frombuffer(self._take(dtype.itemsize), dtype)
        if kind == _BOOL:
            if number > 1:
                raise self._error(f"has a truth value of {number} in {self._where}")
            return bool(number)
        if dtype.kind != "f":
            return int(number)
        found = float(str(number))  # 1e-06, not 9.99999997e-07
        if not isfinite(found):
            raise self._error(f"has {found} in {self._where}, which is no number")
        return found

    def _array(self, kind: int, count: int) -> Value:
        if count > _MAX_ITEMS:
            raise self._error(f"has {count} values in {self._where}; allowed: up to {_MAX_ITEMS}")
        if kind == _ARRAY:
            raise self._error(f"has arrays within the array of {self._where}")
        if kind == _STRING:
            self._check_count(count, 8, f"texts in {self._where}")
            return [self._text(_MAX_TEXT_BYTES) for _ in range(count)]
        dtype = self._dtype(kind)
        self._check_count(count, dtype.itemsize, f"numbers in {self._where}")
        found = np.frombuffer(self._take(count * dtype.itemsize), dtype)
        return found.astype(np.bool_) if kind == _BOOL else found

    def _dtype(self, kind: int) -> np.dtype[np.generic]:
        if kind not in _NUMBERS:
            raise self._error(f"has a value of the unknown type {kind} in {self._where}")
        return np.dtype(_NUMBERS[kind])

    def _text(self, most: int) -> str:
        length = self._uint64()
        if length > most:
            raise self._error(f"has a text of {length} bytes in {self._where}; allowed: {most}")
        content = self._take(length)
        try:
            return content.decode()
        except UnicodeDecodeError:
            raise self._error(f"has a text in {self._where} that is not UTF-8") from None

    def _uint32(self) -> int:
        return int.from_bytes(self._take(4), "little")

    def _uint64(self) -> int:
        return int.from_bytes(self._take(8), "little")

    def _take(self, count: int) -> bytes:
        end = self._at + count
        if end > self._size:
            raise self._error(f"ends within {self._where}")
        found = self._content[self._at : end]
        self._at = end
        return found

    def _check_count(self, count: int, least_bytes: int, what: str) -> None:
        if count * least_bytes > self._size - self._at:
            raise self._error(f"is cut off, or damaged: it tells of {count} {what}")

    def _error(self, problem: str) -> GGUFError:
        return GGUFError(self._file, problem)
