"""A matrix [N, K] as its checkpoint has it: codes, and what groups of them share.

It is read in parts, a range of rows at a time, out of memory that may be a file's mapping; nothing
of it is ever whole but the result that is asked for.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
import torch
from numpy.lib.array_utils import byte_bounds
from numpy.typing import NDArray

from slipstream_core.kernels.codes import mapped_memory
from slipstream_core.kernels.codes.formats import Codes, Format, check_codes, decoded

Rows = slice | NDArray[np.int64]
Read = Callable[[Rows], Codes]  # of some rows: a slice without step, or their numbers

_PART_ELEMENTS = 1 << 20  # that are read at once, so few that scratch stays small


@dataclass(frozen=True, slots=True)
class _Piece:
    """Consecutive outputs from one source."""

    num_outputs: int
    read: Read
    memory: tuple[NDArray[Any], ...] = ()


class CodedMatrix:
    """num_outputs N rows of num_inputs K weights, in one format."""

    def __init__(
        self,
        form: Format,
        num_outputs: int,
        num_inputs: int,
        read: Read,
        memory: Sequence[NDArray[Any]] = (),
    ) -> None:
        """read: gives the codes of some rows, of which numbers may come more than once and in any
        order. It must give the same whenever it is called.

        memory: what it reads, where that is the mapping of a file; `release` gives it back.
        """
        self.format = form
        self.num_outputs = num_outputs
        self.num_inputs = num_inputs
        self._pieces: tuple[_Piece, ...] = (_Piece(num_outputs, read, tuple(memory)),)

    @property
    def shape(self) -> tuple[int, int]:
        """N and K."""
        return self.num_outputs, self.num_inputs

    @property
    def nbytes(self) -> int:
        """Bytes of its codes and of what groups share, as a file holds them."""
        return self.num_outputs * self.format.row_bytes(self.num_inputs)

    def release(self) -> None:
        """Give mapped memory back; the matrix would have to be read from its file again."""
        for piece in self._pieces:
            for array in piece.memory:
                first, last = byte_bounds(array)
                mapped_memory.release(first, last - first)

    def dequantised(self) -> torch.Tensor:
        """The matrix in float32. Raises ValueError for numbers that are not finite."""
        whole = torch.empty(self.shape)
        for first, part in self.parts():
            values = decoded(self.format, part)
            whole[first : first + len(values)] = torch.from_numpy(values)
        return whole

    def rows(self, ids: torch.Tensor) -> torch.Tensor:
        """The rows of these numbers, of any shape [...]: float32 [..., K].

        Raises IndexError for a number that is not in [0, N).
        """
        flat = ids.reshape(-1).numpy().astype(np.int64)
        if flat.size and not (flat.min() >= 0 and flat.max() < self.num_outputs):
            raise IndexError(f"row {flat.min()} or {flat.max()} of {self.num_outputs}")
        found = np.empty((flat.size, self.num_inputs), np.float32)
        start = 0
        for piece in self._pieces:
            mine = np.flatnonzero((start <= flat) & (flat < start + piece.num_outputs))
            if mine.size:
                part = piece.read(flat[mine] - start)
                check_codes(self.format, part, mine.size, self.num_inputs)
                found[mine] = decoded(self.format, part)
            start += piece.num_outputs
        return torch.from_numpy(found).reshape(*ids.shape, self.num_inputs)

    def joined(self, others: Sequence[CodedMatrix]) -> CodedMatrix:
        """This one's outputs and then those of `others`, which stay where they are.

        Raises ValueError unless all have the same format and the same number of inputs.
        """
        for other in others:
            if (other.format, other.num_inputs) != (self.format, self.num_inputs):
                raise ValueError(
                    f"{other.format.name} of {other.num_inputs} inputs does not join "
                    f"{self.format.name} of {self.num_inputs}"
                )
        whole = CodedMatrix(self.format, 0, self.num_inputs, self._pieces[0].read)
        whole._pieces = tuple(piece for each in (self, *others) for piece in each._pieces)
        whole.num_outputs = sum(piece.num_outputs for piece in whole._pieces)
        return whole

    def sliced(self, rows: slice, columns: slice) -> CodedMatrix:
        """Some consecutive outputs and inputs of a matrix that is not joined, read where it is.

        Raises ValueError unless groups of inputs are whole.
        """
        [piece] = self._pieces
        first, last, _ = rows.indices(self.num_outputs)
        begin, end, _ = columns.indices(self.num_inputs)
        if (begin, end) == (0, self.num_inputs):
            of_group = of_scale = columns = slice(None)
        else:
            unit = self.format.supergroup or self.format.group
            if unit and (begin % unit or (end % unit and end != self.num_inputs)):
                raise ValueError(
                    f"{self.format.name}: inputs {begin} to {end} are no whole groups of {unit}"
                )
            of_group = _of_columns(begin, end, self.format.group)
            of_scale = _of_columns(begin, end, unit)

        def read(own: Rows) -> Codes:
            if isinstance(own, slice):
                start, stop, _ = own.indices(last - first)
                part = piece.read(slice(first + start, first + stop))
            else:
                part = piece.read(first + own)
            return Codes(
                part.codes[:, columns],
                scales=_cut(part.scales, of_scale),
                scale_factors=_cut(part.scale_factors, of_group),
                offsets=_cut(part.offsets, of_scale),
                offset_factors=_cut(part.offset_factors, of_group),
                zeros=_cut(part.zeros, of_group),
            )

        return CodedMatrix(self.format, last - first, end - begin, read, piece.memory)

    def reordered(self, order: NDArray[np.int64]) -> CodedMatrix:
        """The outputs of these numbers, in this order; they stay where they are."""
        memory = [array for piece in self._pieces for array in piece.memory]
        return CodedMatrix(
            self.format, len(order), self.num_inputs, lambda rows: self.codes(order[rows]), memory
        )

    def codes(self, ids: NDArray[np.int64]) -> Codes:
        """The codes of the outputs of these numbers, in this order."""
        if len(ids) and ids[-1] - ids[0] == len(ids) - 1 and (np.diff(ids) == 1).all():
            start = 0
            for piece in self._pieces:  # a view, where one has them side by side
                first, last = int(ids[0]) - start, int(ids[-1]) - start + 1
                if first >= 0 and last <= piece.num_outputs:
                    return piece.read(slice(first, last))
                start += piece.num_outputs
        found: dict[str, NDArray[Any]] = {}
        start, least, most = 0, int(ids.min()), int(ids.max())
        for piece in self._pieces:
            if start > most or start + piece.num_outputs <= least:
                start += piece.num_outputs
                continue
            mine = np.flatnonzero((start <= ids) & (ids < start + piece.num_outputs))
            part = piece.read(ids[mine] - start)
            for field in fields(Codes):
                array = getattr(part, field.name)
                if array is not None:
                    whole = found.setdefault(
                        field.name, np.empty((len(ids), array.shape[1]), array.dtype)
                    )
                    whole[mine] = array
            start += piece.num_outputs
        return Codes(**found)

    def parts(self, multiple: int = 1) -> Iterator[tuple[int, Codes]]:
        """All rows in order: the number of the first, and the codes of some.

        multiple: where parts begin, unless a joined matrix does. Raises ValueError as `dequantised`
        does.
        """
        step = max(_PART_ELEMENTS // max(self.num_inputs, 1) // multiple, 1) * multiple
        start = 0
        for piece in self._pieces:
            for first in range(0, piece.num_outputs, step):
                last = min(first + step, piece.num_outputs)
                part = piece.read(slice(first, last))
                check_codes(self.format, part, last - first, self.num_inputs)
                yield start + first, part
            start += piece.num_outputs


def _of_columns(begin: int, end: int, group: int) -> slice:
    """The groups that these inputs are in; of 0, the one of a row."""
    return slice(begin // group, -(-end // group)) if group else slice(None)


def _cut(array: NDArray[Any] | None, columns: slice) -> NDArray[Any] | None:
    return None if array is None else array[:, columns]


def of_tensor(weight: torch.Tensor, form: Format) -> CodedMatrix:
    """A matrix of 16-bit numbers in the memory of `weight` [N, K], bfloat16 or float16."""
    bits = weight.detach().view(torch.uint16).numpy()
    num_outputs, num_inputs = bits.shape
    return CodedMatrix(form, num_outputs, num_inputs, lambda rows: Codes(bits[rows]), [bits])


def of_experts(weight: torch.Tensor, form: Format, is_turned: bool) -> CodedMatrix:
    """The outputs of all experts, one expert's behind the other's, of 16-bit numbers in the memory
    of `weight` [experts, N, K], or [experts, K, N] where it is turned.
    """
    num_experts, num_outputs, num_inputs = weight.shape
    if not is_turned:
        return of_tensor(weight.view(-1, num_inputs), form)
    num_inputs, num_outputs = num_outputs, num_inputs
    bits = weight.detach().view(torch.uint16).numpy()

    def read(rows: Rows) -> Codes:
        ids = np.arange(num_experts * num_outputs)[rows]
        return Codes(bits[ids // num_outputs, :, ids % num_outputs])

    return CodedMatrix(form, num_experts * num_outputs, num_inputs, read, [bits])
