"""The tensors of a checkpoint's safetensors files, which stay mapped, and what is said of them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors import safe_open

from slipstream_core.model.checkpoint_files import TensorHeader, read_header, weight_files

Array = NDArray[Any]

# numpy's type for each of safetensors' types; of those that it has not, the bits
_TYPES = {
    "F32": torch.float32,
    "F16": torch.float16,
    "I64": torch.int64,
    "I32": torch.int32,
    "U32": torch.int32,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BF16": torch.uint16,
    "F8_E4M3": torch.uint8,
    "F8_E5M2": torch.uint8,
    "F8_E8M0": torch.uint8,
}


class QuantisedWeightError(ValueError):
    """A checkpoint's quantised weights contradict each other, its configuration, or are damaged."""


class Tensors:
    """A folder's tensors by name. Files are closed by `close`; arrays remain."""

    def __init__(self, folder: Path) -> None:
        """Open the files. Raises DamagedFileError, and QuantisedWeightError if there are none."""
        self._files: dict[str, Any] = {}
        self.headers: dict[str, TensorHeader] = {}
        self._opened = ExitStack()
        for path in weight_files(folder):
            if path.suffix != ".safetensors":
                continue
            file: Any = self._opened.enter_context(safe_open(path, "pt", device="cpu"))
            for name, header in read_header(path).items():
                self.headers[name] = header
                self._files[name] = file
        if not self.headers:
            raise QuantisedWeightError(f"{folder} has no safetensors files")

    def close(self) -> None:
        """Close the files."""
        self._opened.close()

    def __contains__(self, name: str) -> bool:
        return name in self.headers

    def __iter__(self) -> Iterator[str]:
        return iter(self.headers)

    def tensor(self, name: str) -> torch.Tensor:
        """A tensor, mapped."""
        found: torch.Tensor = self._files[name].get_tensor(name)
        return found

    def part(self, name: str) -> Any:
        """A tensor that is not read before it is indexed, as safetensors has it."""
        return self._files[name].get_slice(name)

    def array(self, name: str, *types: str, ndim: int | None = None) -> Array:
        """A tensor that has to be there with one of these types, mapped.

        Raises QuantisedWeightError, which names it.
        """
        header = self.headers.get(name)
        if header is None:
            raise QuantisedWeightError(f"{name} is missing")
        if header.dtype not in types:
            allowed = ", ".join(types)
            raise QuantisedWeightError(f"{name} is of type {header.dtype}, allowed: {allowed}")
        if ndim is not None and len(header.shape) != ndim:
            raise QuantisedWeightError(
                f"{name} has the shape {list(header.shape)}, allowed: {ndim} dimensions"
            )
        tensor = self.tensor(name)
        if not tensor.is_contiguous():
            tensor = tensor.contiguous()
        found: Array = tensor.view(_TYPES[header.dtype]).numpy()
        return found


def refuse_shape(name: str, shape: tuple[int, ...], allowed: tuple[int, ...]) -> None:
    """Raise QuantisedWeightError unless a tensor has the shape that it must have."""
    if tuple(shape) != allowed:
        raise QuantisedWeightError(f"{name} has the shape {list(shape)}, allowed: {list(allowed)}")


def refuse_beyond(name: str, least: int, most: int, numbers: Array) -> None:
    """Raise QuantisedWeightError for an integer that is not in [least, most]."""
    if numbers.size and not (numbers.min() >= least and numbers.max() <= most):
        raise QuantisedWeightError(
            f"{name} has numbers from {numbers.min()} to {numbers.max()}, "
            f"allowed: {least} to {most}"
        )


def unpacked(words: Array, bits: int, count: int) -> Array:
    """The first `count` integers of each row of int32 words [n, W], the lowest bits first: uint8
    [n, count].

    Widths that do not divide 32 go over the borders of words.
    """
    of_bytes = np.ascontiguousarray(words).view(np.uint8)
    if bits == 8:
        return of_bytes[:, :count]
    if bits == 4:
        pairs = np.stack((of_bytes & 15, of_bytes >> 4), axis=-1)
        found: Array = pairs.reshape(len(words), -1)[:, :count]
        return found
    single = np.unpackbits(of_bytes, axis=-1, count=bits * count, bitorder="little")
    weights = (1 << np.arange(bits)).astype(np.uint8)
    whole: Array = (single.reshape(len(words), count, bits) * weights).sum(-1, dtype=np.uint8)
    return whole


def unpacked_by_word(words: Array, bits: int, count: int) -> Array:
    """The same where each word has 32 // bits integers, and no integer parts in two words."""
    each = 32 // bits
    shifts = (np.arange(each) * bits).astype(np.uint32)
    spread = words.view(np.uint32)[:, :, None] >> shifts & np.uint32((1 << bits) - 1)
    found: Array = spread.astype(np.uint8).reshape(len(words), -1)[:, :count]
    return found
