"""Mixtures of experts on a CPU, as one operator of a recorded forward.

transformers lets an implementation compute the experts of each of its classes that has them; that
here leaves a marker in a recording, and elsewhere computes them one after the other, of codes too.
The form of the activation is found by a trial, not by the name of a class: a class whose activation
is none of those that the kernels have is not recorded.
"""

from __future__ import annotations

import inspect
import itertools
import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import library, nn
from torch.fx import GraphModule
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

from slipstream_core.forward.fuse import AnyNode, is_weight, replace
from slipstream_core.forward.projection import add_projection
from slipstream_core.kernels.codes.coded_parameter import CodedParameter, expert_matrix
from slipstream_core.kernels.cpu.kernels import ACTIVATIONS, Experts, Kernels

logger = logging.getLogger(__name__)

_functional: Any = torch.nn.functional
_interface: Any = ALL_EXPERTS_FUNCTIONS
_NAME = "slipstream"
_TOLERANCE = 1e-4  # relative to the largest result: the order of sums differs
_SAME = 1e-5  # of activations
_TRIAL_ROWS = 3
_OF_EXPERTS = ("self", "hidden_states", "top_k_index", "top_k_weights")

# a marker for experts in a recording; missing from torch's annotations
_library: Any = library
_LIBRARY = _library.Library("slipstream", "FRAGMENT")
_LIBRARY.define(
    "experts(Tensor x, Tensor ids, Tensor weights, Tensor up, Tensor? up_bias, Tensor down, "
    "Tensor? down_bias, int form) -> Tensor"
)
_LIBRARY.impl("experts", lambda x, *_: torch.empty_like(x), "CompositeExplicitAutograd")


class ExpertsForm(NamedTuple):
    """The way from the first product of an expert to the second."""

    activation: str  # one of ACTIVATIONS, or "squared relu" without a gate
    is_interleaved: bool = False  # gates and what they are multiplied by alternate
    is_turned: bool = False  # matrices are [inputs, outputs]
    alpha: float = 0.0  # of the clamped one
    limit: float = 0.0

    @property
    def is_gated(self) -> bool:
        """True if the first product has gates beside what they are multiplied by."""
        return self.activation in ACTIVATIONS


class UnknownExpertsError(ValueError):
    """Experts compute something that the kernels do not."""


def has_experts(module: nn.Module) -> bool:
    """True of the modules whose experts transformers lets an implementation compute."""
    return hasattr(module, "_apply_gate") and hasattr(module, "is_transposed")


def expert_parameters(module: nn.Module) -> Iterator[tuple[str, nn.Module, str]]:
    """The names of the matrices of a model's experts, the modules that have them, and their names
    there.
    """
    for name, each in module.named_modules():
        if has_experts(each):
            for own, parameter in each.named_parameters(recurse=False):
                if parameter.dim() == 3:
                    yield f"{name}.{own}" if name else own, each, own


def compute_in_turn(module: nn.Module) -> None:
    """Let all experts of a model be computed one after the other, as those of codes have to be."""
    for each in module.modules():
        if has_experts(each):
            each.config._experts_implementation = _NAME  # type: ignore[union-attr]


def has_odd_experts(module: nn.Module) -> bool:
    """True if experts have a width of which torch's product of groups takes no rows: not a multiple
    of 16 bytes, of bfloat16.
    """
    matrices = (getattr(each, own) for _, each, own in expert_parameters(module))
    return any(width % 8 for matrix in matrices for width in matrix.shape[1:])


@contextmanager
def marked(module: nn.Module) -> Iterator[list[ExpertsForm]]:
    """Leave markers in a recording that is made meanwhile; yields the forms that they number.

    Raises UnknownExpertsError.
    """
    forms: list[ExpertsForm] = []
    numbers: dict[nn.Module, int] = {}
    for each in filter(has_experts, module.modules()):
        form = form_of(each)
        if form not in forms:
            forms.append(form)
        numbers[each] = forms.index(form)
    with _numbered(numbers):
        yield forms


@contextmanager
def without_values(module: nn.Module) -> Iterator[None]:
    """Let results of experts be shapes alone meanwhile, in a trial on the meta device.

    Of those that transformers lets no implementation compute as well (LongCat-Flash): loops over
    the experts that tokens have chosen.
    """
    modules: list[Any] = list(module.modules())
    own = [each for each in modules if _loops_over_experts(each)]
    for each in own:
        each.forward = _shape_alone
    try:
        with _numbered(dict.fromkeys(filter(has_experts, modules), 0)):
            yield
    finally:
        for each in own:
            del each.forward


def _loops_over_experts(module: nn.Module) -> bool:
    names = inspect.signature(type(module).forward).parameters
    return not has_experts(module) and tuple(names) == _OF_EXPERTS


def _shape_alone(x: torch.Tensor, *_: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(x)


@contextmanager
def _numbered(numbers: Mapping[nn.Module, int]) -> Iterator[None]:
    """Let experts be markers meanwhile. numbers: of their forms."""
    modules: list[Any] = list(numbers)
    configs = {id(each.config): each.config for each in modules}
    before = {key: config._experts_implementation for key, config in configs.items()}
    try:
        for each in modules:
            each._slipstream_form = numbers[each]
            each.config._experts_implementation = _NAME
        yield
    finally:
        for each in modules:
            each.__dict__.pop("_slipstream_form", None)
        for key, config in configs.items():
            config._experts_implementation = before[key]


def _experts_forward(
    module: Any, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor
) -> torch.Tensor:
    """An implementation for transformers: x [T, K], ids and weights [T, chosen] give [T, N]."""
    up, up_bias, down, down_bias = _tensors(module)
    form = module.__dict__.get("_slipstream_form")
    if form is not None:
        found: torch.Tensor = torch.ops.slipstream.experts(
            x, ids, weights, up, up_bias, down, down_bias, form
        )
        return found
    activate = module._apply_gate if module.has_gate else module.act_fn

    def of_one(rows: torch.Tensor, expert: int) -> torch.Tensor:
        matrices = (expert_matrix(each, expert, module.is_transposed) for each in (up, down))
        first, second = (matrix.to(rows.dtype) for matrix in matrices)
        biases = (None if each is None else each[expert] for each in (up_bias, down_bias))
        one, two = biases
        out = _functional.linear(activate(_functional.linear(rows, first, one)), second, two)
        normed: torch.Tensor = module.post_expert_norm(out) if module.has_post_expert_norm else out
        return normed

    return _in_turn(x, ids, weights, of_one)


_interface.register(_NAME, _experts_forward)


def _in_turn(
    x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor, of_one: Any
) -> torch.Tensor:
    """The weighted sums of `of_one(rows, expert)`, each expert's rows at once."""
    ids = ids.to(torch.int64)
    total: torch.Tensor | None = None
    for expert in torch.unique(ids).tolist():
        tokens, places = torch.where(ids == expert)
        out = of_one(x[tokens], expert) * weights[tokens, places, None]
        if total is None:
            total = out.new_zeros(len(x), out.shape[1])
        total.index_add_(0, tokens, out.to(total.dtype))
    return torch.zeros_like(x) if total is None else total.to(x.dtype)


def _tensors(module: Any) -> tuple[Any, Any, Any, Any]:
    """Both parameters of a module's experts, each with its bias or None."""
    first = "gate_up_proj" if module.has_gate else "up_proj"
    names = (first, f"{first}_bias", "down_proj", "down_proj_bias")
    has_bias = module.has_bias
    up, up_bias, down, down_bias = (getattr(module, each, None) for each in names)
    return up, up_bias if has_bias else None, down, down_bias if has_bias else None


def form_of(module: Any) -> ExpertsForm:
    """The form of a module's experts, by a trial of its activation.

    Raises UnknownExpertsError if it is none of those that are known.
    """
    if module.has_post_expert_norm:
        raise UnknownExpertsError("experts have a norm behind them")
    turned = bool(module.is_transposed)
    # on both sides of any limit, and 0
    values = torch.cat([torch.linspace(-4, 4, 65), torch.tensor([-40.0, 40.0, 9.0, -9.0, 0.0])])
    gates, ups = (each.reshape(-1) for each in torch.meshgrid(values, values, indexing="ij"))
    with torch.no_grad():
        if not module.has_gate:
            if _equal(module.act_fn(gates), torch.relu(gates).square()):
                return ExpertsForm("squared relu", is_turned=turned)
            raise UnknownExpertsError("the activation of experts without a gate is not known")
        beside = torch.stack([gates, ups], dim=-1)  # a row of one gate: both layouts are the same
        given = module._apply_gate(beside).reshape(-1)
        found = next(
            (each for each in _candidates(module) if _equal(given, gated(each, gates, ups))), None
        )
        if found is None:
            raise UnknownExpertsError("the activation of experts is not known")
        both = torch.stack([gates, gates.roll(7), ups, ups.roll(3)], dim=-1)
        given = module._apply_gate(both)
        for is_interleaved in (False, True):
            halves = (both[:, ::2], both[:, 1::2]) if is_interleaved else both.chunk(2, dim=-1)
            if _equal(given, gated(found, *halves)):
                return found._replace(is_interleaved=is_interleaved, is_turned=turned)
    raise UnknownExpertsError("gates of experts lie in another way")


def _candidates(module: Any) -> Iterator[ExpertsForm]:
    yield from (ExpertsForm(each) for each in ACTIVATIONS[:3])
    numbers = {
        float(each)
        for each in vars(module).values()
        if isinstance(each, int | float) and not isinstance(each, bool)
    }
    for alpha, limit in itertools.permutations(sorted(numbers), 2):
        yield ExpertsForm("clamped swiglu", alpha=alpha, limit=limit)


def gated(form: ExpertsForm, gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """The activated gates times `up`."""
    match form.activation:
        case "silu":
            return _functional.silu(gate) * up  # type: ignore[no-any-return]
        case "gelu":
            return _functional.gelu(gate) * up  # type: ignore[no-any-return]
        case "tanh gelu":
            return _functional.gelu(gate, approximate="tanh") * up  # type: ignore[no-any-return]
        case _:
            gate, up = gate.clamp(max=form.limit), up.clamp(-form.limit, form.limit)
            return (up + 1) * (gate * torch.sigmoid(gate * form.alpha))


def _equal(one: torch.Tensor, other: torch.Tensor) -> bool:
    return one.shape == other.shape and torch.allclose(one, other, rtol=_SAME, atol=_SAME)


class Mixture(nn.Module):
    """Experts as a model has them: matrices and biases of all of them, and their form."""

    def __init__(
        self,
        up: nn.Parameter,
        up_bias: torch.Tensor | None,
        down: nn.Parameter,
        down_bias: torch.Tensor | None,
        form: ExpertsForm,
    ) -> None:
        """up: [experts, 2 * inner, K], gates first, or as `form` says; down: [experts, N, inner].
        Biases are [experts, 2 * inner] and [experts, N].
        """
        super().__init__()
        self.up, self.down, self.form = up, down, form
        self.up_bias, self.down_bias = up_bias, down_bias

    def tensors(self) -> Iterator[torch.Tensor]:
        """Everything that it holds."""
        for each in (self.up, self.down, self.up_bias, self.down_bias):
            if each is not None:
                yield each

    def forward(self, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """The sums [T, N], by torch; x [T, K], ids and weights [T, chosen]."""
        return _in_turn(x, ids, weights, self._of_one)

    def _of_one(self, rows: torch.Tensor, expert: int) -> torch.Tensor:
        first, one = self._first(expert), self.up_bias
        bias = None if one is None else one[expert][self._order(len(first))]
        both = _functional.linear(rows, first, bias)
        if self.form.is_gated:
            inner = gated(self.form, *both.chunk(2, dim=-1))
        else:
            inner = torch.relu(both).square()
        second = expert_matrix(self.down, expert, self.form.is_turned)
        two = None if self.down_bias is None else self.down_bias[expert]
        out: torch.Tensor = _functional.linear(inner, second, two)
        return out

    def _first(self, expert: int) -> torch.Tensor:
        """The matrix of the first product, gates first."""
        matrix = expert_matrix(self.up, expert, self.form.is_turned)
        return matrix[self._order(len(matrix))] if self.form.is_interleaved else matrix

    def _order(self, num_outputs: int) -> torch.Tensor:
        """The outputs of the first product, gates first."""
        order = torch.arange(num_outputs)
        return torch.cat([order[::2], order[1::2]]) if self.form.is_interleaved else order

    def packed(self, kernels: Kernels) -> PackedMixture | None:
        """The same experts by our kernels; None without memory for them, and if they differ."""
        tensors = [each for each in self.tensors() if not isinstance(each, CodedParameter)]
        if any(each.dtype != torch.float32 for each in tensors):
            return None
        try:
            up = self._panels(kernels, self.up, is_first=True)
            down = self._panels(kernels, self.down, is_first=False)
            packed = PackedMixture(kernels, self, up, down)
        except (MemoryError, RuntimeError) as error:  # torch raises RuntimeError without memory
            logger.warning("experts stay as they are: %s", str(error).partition("\n")[0][:200])
            return None
        experts = packed.num_experts
        x = torch.linspace(-1, 1, _TRIAL_ROWS * packed.num_inputs).reshape(_TRIAL_ROWS, -1)
        ids = torch.tensor([[0, experts - 1], [experts // 2, 0], [experts - 1, experts // 2]])
        ids = ids[:, : min(experts, 2)]
        weights = torch.linspace(0.25, 1, ids.numel()).reshape(ids.shape)
        with torch.no_grad():
            expected, given = self(x, ids, weights), packed(x, ids, weights)
        if not (expected - given).abs().max() <= _TOLERANCE * expected.abs().max():
            logger.warning("experts of %s are not packed: they differ", tuple(self.up.shape))
            return None
        return packed

    def _panels(
        self, kernels: Kernels, parameter: nn.Parameter, *, is_first: bool
    ) -> tuple[torch.Tensor, int]:
        """The panels of all experts' matrices, [experts, …], and the number of their format."""
        experts = len(parameter)
        if isinstance(parameter, CodedParameter):
            matrix = parameter.matrix
            num_outputs = matrix.num_outputs // experts
            order = np.arange(num_outputs)
            if is_first:
                order = self._order(num_outputs).numpy()
            parts = [matrix.reordered(each * num_outputs + order) for each in range(experts)]
            found = kernels.pack_codes_each(parts)
            if found is not None:
                return found
            logger.warning("%s has no panels: experts become float32", matrix.format.name)
        if is_first:
            return kernels.pack_each(list(map(self._first, range(experts)))), 0
        turned = self.form.is_turned
        return kernels.pack_each(
            [expert_matrix(parameter, each, turned) for each in range(experts)]
        ), 0


class PackedMixture(nn.Module):
    """Experts whose matrices are panels of products.c; a row's sums do not depend on other rows."""

    def __init__(
        self,
        kernels: Kernels,
        mixture: Mixture,
        up: tuple[torch.Tensor, int],
        down: tuple[torch.Tensor, int],
    ) -> None:
        super().__init__()
        form = mixture.form
        self._kernels = kernels
        self.num_experts = len(mixture.up)
        first, second = (
            expert_matrix(each, 0, form.is_turned) for each in (mixture.up, mixture.down)
        )
        self.num_inputs, self.num_outputs = first.shape[1], len(second)
        bias = mixture.up_bias
        if bias is not None:
            bias = bias[:, mixture._order(bias.shape[1])]
        self._held = [
            None if each is None else each.detach().contiguous()
            for each in (up[0], down[0], bias, mixture.down_bias)
        ]
        self.call = Experts(
            up_bytes=up[0].stride(0) * up[0].itemsize,
            down_bytes=down[0].stride(0) * down[0].itemsize,
            experts=self.num_experts,
            k=self.num_inputs,
            inner=second.shape[1],
            n=self.num_outputs,
            up_format=up[1],
            down_format=down[1],
            is_gated=form.is_gated,
            activation=ACTIVATIONS.index(form.activation) if form.is_gated else 0,
            alpha=form.alpha,
            limit=form.limit,
        )
        self.call.up, self.call.down, self.call.up_bias, self.call.down_bias = (
            None if each is None else each.data_ptr() for each in self._held
        )

    def tensors(self) -> Iterator[torch.Tensor]:
        """Everything that it holds."""
        return (each for each in self._held if each is not None)

    def of_choices(self, chosen: int) -> tuple[torch.Tensor, int]:
        """The memory of a call of so many choices a row, and its floats of scratch for a row."""
        call = Experts.from_buffer_copy(self.call)
        call.chosen = chosen
        return torch.frombuffer(call, dtype=torch.uint8), self._kernels.experts_scratch(call)

    def forward(self, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """The sums [T, N]; shapes as Mixture has them."""
        return self._kernels.experts(x, weights, ids, self.call)


def mix(
    x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor, mixture: Mixture | PackedMixture
) -> torch.Tensor:
    """The weighted sums of experts, as a recorded forward asks for them."""
    return mixture.forward(x, ids, weights)


def as_mixture(graph: GraphModule, marker: AnyNode, forms: list[ExpertsForm]) -> None:
    """Replace a marker by a call of `mix`."""
    x, ids, weights, *tensors, form = marker.args
    if not all(each is None or is_weight(each) for each in tensors):
        raise UnknownExpertsError("matrices of experts are not parameters")
    held: list[Any] = [None if each is None else getattr(graph, each.target) for each in tensors]
    up, up_bias, down, down_bias = held
    with graph.graph.inserting_before(marker):
        mixture = add_projection(graph, Mixture(up, up_bias, down, down_bias, forms[form]))
    replace(graph.graph, marker, mix, (x, ids, weights, mixture))
