"""Products with a model's weights, each of them one object: a matrix, its layout and its bias.

A recorded forward calls `project` for each product, with a projection that its graph holds. What is
done to weights is done to projections: those with the same input are joined, matrices are laid out
anew or packed, and the part of a rank says how it comes together with the others'. Another kind of
matrix is another subclass. One that neither joins nor packs is left alone, and computes itself.

In a model that is not recorded torch's modules compute products, but for those that ranks share.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import nn
from torch.fx import GraphModule

from slipstream_core.kernels.codes.coded_matrix import CodedMatrix
from slipstream_core.kernels.codes.coded_parameter import CodedParameter, product
from slipstream_core.kernels.cpu.kernels import Kernels
from slipstream_core.sharding.collectives import gather_over_ranks, sum_over_ranks

logger = logging.getLogger(__name__)

_linear = torch.nn.functional.linear
_TRIAL_ROWS = 3
_TRIAL_OUTPUTS = 64  # of a coded matrix
_TOLERANCE = 1e-4  # relative to the largest result: the order of sums differs


class Projection(nn.Module):
    """The product of x [..., K] with a matrix [N, K], plus a bias if there is one: [..., N]."""

    num_outputs: int  # N

    def __init__(self, num_outputs: int, **tensors: torch.Tensor | None) -> None:
        """Hold these tensors by their names; a model's parameters stay its parameters."""
        super().__init__()
        self.num_outputs = num_outputs
        for name, tensor in tensors.items():
            if isinstance(tensor, nn.Parameter):
                self.register_parameter(name, tensor)
            else:
                self.register_buffer(name, tensor)

    def tensors(self) -> Iterator[torch.Tensor]:
        """Everything that it holds."""
        yield from self.parameters()
        yield from self.buffers()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """The product, of x's type."""
        raise NotImplementedError

    def packed(self, kernels: Kernels) -> Projection | None:
        """The same product by our kernels, from memory of its own; None if it cannot be."""
        return None


class Dense(Projection):
    """A matrix of the numbers that are multiplied."""

    weight: torch.Tensor  # [N, K], with any strides
    bias: torch.Tensor | None  # [N]

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None = None) -> None:
        super().__init__(len(weight), weight=weight, bias=bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """torch's product, whose order of sums depends on the number of rows."""
        return _linear(x, self.weight, self.bias)

    def packed(self, kernels: Kernels) -> Packed | None:
        """A packed copy; None without memory for it, if its product differs, and if it is not
        float32.
        """
        weight, bias = self.weight, self.bias
        if any(each is not None and each.dtype != torch.float32 for each in (weight, bias)):
            return None
        num_inputs = weight.shape[1]
        x = torch.linspace(-1, 1, _TRIAL_ROWS * num_inputs).reshape(1, _TRIAL_ROWS, -1)
        try:
            with torch.no_grad():
                expected = _linear(x, weight)
                panels = kernels.pack(weight)
                given = kernels.product(x, panels, None, len(weight))
        except (MemoryError, RuntimeError) as error:  # torch raises RuntimeError without memory
            said = str(error).partition("\n")[0][:200]
            logger.warning("a matrix of %d x %d stays as it is: %s", *weight.shape, said)
            return None
        if not (expected - given).abs().max() <= _TOLERANCE * expected.abs().max():
            logger.warning(
                "a %d x %d matrix is not packed: the packed product differs", *weight.shape
            )
            return None
        return Packed(kernels, panels, None if bias is None else bias.contiguous(), len(weight))


class Coded(Projection):
    """Codes of a matrix, which stay codes; of one, or of several side by side."""

    bias: torch.Tensor | None  # [N], of one matrix alone

    def __init__(self, weights: Sequence[CodedParameter], bias: torch.Tensor | None = None) -> None:
        named = {f"weight{index}": each for index, each in enumerate(weights)}
        super().__init__(sum(map(len, weights)), bias=bias, **named)
        self.weights = tuple(weights)

    @property
    def matrix(self) -> CodedMatrix:
        """The whole matrix, until it is given up."""
        return self.weights[0].matrix.joined([each.matrix for each in self.weights[1:]])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """torch's product with the dequantised matrix."""
        return product(x, self.matrix, self.bias)

    def packed(self, kernels: Kernels) -> Packed | None:
        """The codes in panels; in float32 where there are none for their format."""
        matrix = self.matrix
        bias = None if self.bias is None else self.bias.contiguous()
        try:
            packed = kernels.pack_codes(matrix)
        except (MemoryError, RuntimeError) as error:  # as in `Dense.packed`
            said = str(error).partition("\n")[0][:200]
            logger.warning("a matrix of %d x %d stays as it is: %s", *matrix.shape, said)
            return None
        if packed is None:
            logger.warning("%s has no panels: a matrix becomes float32", matrix.format.name)
            return Dense(matrix.dequantised(), bias).packed(kernels)
        panels, number = packed
        num_outputs, num_inputs = matrix.shape
        some = torch.arange(0, num_outputs, -(-num_outputs // _TRIAL_OUTPUTS))
        x = torch.linspace(-1, 1, _TRIAL_ROWS * num_inputs).reshape(1, _TRIAL_ROWS, -1)
        expected = _linear(x, matrix.rows(some))
        given = kernels.product(x, panels, None, num_outputs, number)[..., some]
        if not (expected - given).abs().max() <= _TOLERANCE * expected.abs().max():
            raise ValueError(f"{matrix.format.name}: a packed product differs")
        return Packed(kernels, panels, bias, num_outputs, number)


class Stacked(Projection):
    """Matrices of the numbers that are multiplied, each with its own x: [matrices, T, K] gives
    [matrices, T, N].
    """

    weight: torch.Tensor  # [matrices, K, N], with any strides

    def __init__(self, weight: torch.Tensor) -> None:
        super().__init__(weight.shape[2], weight=weight)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """torch's products, whose order of sums depends on the number of rows."""
        return torch.bmm(x, self.weight)

    def packed(self, kernels: Kernels) -> PackedStack | None:
        """A packed copy; None without memory for it, if its products differ, and if it is not
        float32.
        """
        if self.weight.dtype != torch.float32:
            return None
        count, num_inputs, _ = self.weight.shape
        x = torch.linspace(-1, 1, count * _TRIAL_ROWS * num_inputs).reshape(count, _TRIAL_ROWS, -1)
        try:
            with torch.no_grad():
                expected = self(x)
                packed = PackedStack(
                    kernels, kernels.pack_each([each.t() for each in self.weight]), self.num_outputs
                )
                given = packed(x)
        except (MemoryError, RuntimeError) as error:  # as in `Dense.packed`
            said = str(error).partition("\n")[0][:200]
            logger.warning("%d matrices stay as they are: %s", count, said)
            return None
        if not (expected - given).abs().max() <= _TOLERANCE * expected.abs().max():
            logger.warning("%d matrices are not packed: the packed products differ", count)
            return None
        return packed


class PackedStack(Projection):
    """Matrices in the panels of products.c; a row's sums do not depend on other rows."""

    panels: torch.Tensor  # [matrices, numbers], as Kernels.pack_each lays them

    def __init__(self, kernels: Kernels, panels: torch.Tensor, num_outputs: int) -> None:
        super().__init__(num_outputs, panels=panels)
        self._kernels = kernels

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x: [matrices, rows, K]."""
        return self._kernels.products(x, self.panels, self.num_outputs)


class Lookup(nn.Module):
    """Rows of a coded matrix, by their numbers."""

    def __init__(self, weight: CodedParameter) -> None:
        super().__init__()
        self.weight = weight
        self._packed: tuple[Kernels, torch.Tensor, int] | None = None
        self.num_inputs = weight.shape[1]

    def tensors(self) -> Iterator[torch.Tensor]:
        """The parameter, until it is packed."""
        yield from () if self._packed else (self.weight,)

    def read_from(self, kernels: Kernels, panels: torch.Tensor, number: int) -> None:
        """Take rows out of panels of the same matrix, a product's or its own."""
        self._packed = kernels, panels, number

    def pack(self, kernels: Kernels) -> bool:
        """Pack a matrix that no product has, unless it lies in 16 bits as it is; True if it was."""
        if self._packed is not None or self.weight.matrix.format.bits == 16:
            return False
        packed = kernels.pack_codes(self.weight.matrix)
        if packed is not None:
            self.read_from(kernels, *packed)
        return packed is not None

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """ids [...]: float32 [..., K]."""
        if self._packed is None:
            return self.weight.matrix.rows(ids)
        kernels, panels, number = self._packed
        return kernels.coded_rows(panels, number, self.num_inputs, ids)


class Packed(Projection):
    """A matrix in the panels of products.c; a row's sum does not depend on other rows."""

    panels: torch.Tensor  # as Kernels.pack or pack_codes lays them
    bias: torch.Tensor | None  # [N]

    def __init__(
        self,
        kernels: Kernels,
        panels: torch.Tensor,
        bias: torch.Tensor | None,
        num_outputs: int,
        number: int = 0,
    ) -> None:
        """number: of the format that panels of codes have."""
        super().__init__(num_outputs, panels=panels, bias=bias)
        self._kernels = kernels
        self.number = number

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x: [1, rows, K]."""
        return self._kernels.product(x, self.panels, self.bias, self.num_outputs, self.number)


class SlicedInputs(Projection):
    """A rank's columns of a matrix: the sum of all ranks' products, then the bias.

    own: the part of x that the columns belong to, where x is whole on every rank.
    """

    weight: torch.Tensor  # [N, the rank's columns]
    bias: torch.Tensor | None  # [N]

    def __init__(
        self, weight: torch.Tensor, bias: torch.Tensor | None, own: slice | None = None
    ) -> None:
        super().__init__(len(weight), weight=weight, bias=bias)
        self._own = own

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """All of the outputs, the same on every rank."""
        own = x if self._own is None else x[..., self._own]
        y = sum_over_ranks(_linear(own, self.weight))
        return y if self.bias is None else y + self.bias


class SlicedOutputs(Projection):
    """A rank's rows of a matrix: the outputs of all ranks side by side.

    is_gathered: False leaves the rank its own outputs.
    """

    weight: torch.Tensor  # [the rank's rows, K]
    bias: torch.Tensor | None  # [the rank's rows]

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None, num_outputs: int) -> None:
        super().__init__(num_outputs, weight=weight, bias=bias)
        self.is_gathered = True

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """All of the outputs, or the rank's own."""
        y = _linear(x, self.weight, self.bias)
        return gather_over_ranks(y, self.num_outputs) if self.is_gathered else y


def project(x: torch.Tensor, projection: Projection) -> torch.Tensor:
    """The product, as a recorded forward calls it."""
    return projection.forward(x)  # without what a call of a module costs


def look_up(ids: torch.Tensor, lookup: Lookup) -> torch.Tensor:
    """Rows of a coded matrix, as a recorded forward asks for them."""
    return lookup.forward(ids)


def add_projection(graph: GraphModule, projection: nn.Module) -> Any:
    """Give `projection` to the graph; returns its node, where nodes are inserted."""
    num = sum(name.startswith("projection") for name, _ in graph.named_children())
    graph.add_submodule(f"projection{num}", projection)
    return graph.graph.get_attr(f"projection{num}")


def has_rows(x: Any) -> bool:
    """True if the node x is [1, rows, k], the input of a product that is computed row by row."""
    shape = tuple(x.meta["val"].shape) if "val" in x.meta else ()
    return len(shape) == 3 and int(shape[0]) == 1


def joined(parts: Sequence[Dense]) -> Dense:
    """One projection to all outputs, in order; the parts become views of its matrix and bias."""
    bias = None
    if parts[0].bias is not None:
        bias = _below_one_another([part.bias for part in parts if part.bias is not None])
    return Dense(_below_one_another([part.weight for part in parts]), bias)


def joined_for_cpu(parts: Sequence[Dense]) -> Dense:
    """The same of parts without biases, laid out by column where that is wide."""
    weights = [part.weight for part in parts]
    num_outputs, num_inputs = sum(len(weight) for weight in weights), weights[0].shape[1]
    if num_outputs > num_inputs:
        matrix = weights[0].new_empty(num_inputs, num_outputs).t()
    else:
        matrix = weights[0].new_empty(num_outputs, num_inputs)
    _move(weights, matrix)
    return Dense(matrix)


def lay_out_by_column(dense: Dense) -> None:
    """Store a matrix with more outputs than inputs by column.

    torch's product of a single row is then bound by memory on a CPU: 3 times faster for a head of
    [32000, 256].
    """
    num_outputs, num_inputs = dense.weight.shape
    if num_outputs > num_inputs:
        _move([dense.weight], dense.weight.new_empty(num_inputs, num_outputs).t())


def num_readers(graph: GraphModule, memory: Callable[[torch.Tensor], int]) -> Counter[int]:
    """The number of operators that read each tensor of the graph, by what `memory` makes of it."""
    readers: Counter[int] = Counter()
    for node in graph.graph.find_nodes(op="get_attr"):
        held = getattr(graph, node.target)
        for tensor in (held,) if isinstance(held, torch.Tensor) else held.tensors():
            readers[memory(tensor)] += len(node.users)
    return readers


def _below_one_another(tensors: list[torch.Tensor]) -> torch.Tensor:
    """Tensors [n, ...] in one, of which they become views."""
    first, stop = tensors[0], 0
    for tensor in tensors:  # a module that is recorded again keeps its memory
        if tensor.is_meta or tensor.data_ptr() != first.data_ptr() + stop:
            break
        if tensor.untyped_storage().data_ptr() != first.untyped_storage().data_ptr():
            break
        stop += tensor.nbytes
    else:
        num = sum(len(tensor) for tensor in tensors)
        return first.detach().as_strided((num, *first.shape[1:]), first.stride())
    with torch.no_grad():
        whole = first.new_empty(sum(len(tensor) for tensor in tensors), *first.shape[1:])
    _move(tensors, whole)
    return whole


def _move(tensors: list[torch.Tensor], whole: torch.Tensor) -> None:
    """Copy tensors into `whole`, one below the other; they become views of it."""
    start = 0
    with torch.no_grad():
        for tensor in tensors:
            part = whole[start : start + len(tensor)]
            part.copy_(tensor)
            tensor.data = part
            start += len(part)
