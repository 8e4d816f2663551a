"""Records the operators that a module's forward calls, as an FX graph.

make_fx would do, but takes longer to import and to run than the model takes to load. Everything is
on the meta device, where operators compute only shapes, so the values of weights and inputs are
never read.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.fx import Graph, GraphModule, Node
from torch.fx.node import map_aggregate
from torch.utils._python_dispatch import TorchDispatchMode

_META = torch.device("meta")
_CPU = torch.device("cpu")


def record(
    module: torch.nn.Module,
    forward: Callable[..., torch.Tensor],
    inputs: Mapping[str, torch.Tensor],
    device: torch.device = _CPU,
) -> GraphModule:
    """The operators of `forward(call, *inputs)`, with an input's name for each placeholder.

    forward: is given a function that calls `module` with keyword arguments, and the inputs on the
    meta device. device: on which the graph will run. Raises whatever the module raises, which
    includes any use of a value.
    """
    recording = _Recording(device)
    for name, tensor in inputs.items():
        recording.add_input(name, tensor)
    stand_ins = {
        name: recording.stand_in(tensor)
        for name, tensor in (
            *module.named_parameters(remove_duplicate=False),
            *module.named_buffers(remove_duplicate=False),
        )
    }

    def call(**arguments: object) -> Any:
        return torch.func.functional_call(module, stand_ins, (), arguments)

    with torch.no_grad(), recording:
        result = forward(call, *recording.inputs)
    return recording.finish(result)


class _Recording(TorchDispatchMode):  # type: ignore[no-untyped-call]  # not annotated
    """A graph in the making. Its tensors are kept, as they are known by their identity."""

    def __init__(self, device: torch.device) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._device = device
        self.inputs: list[torch.Tensor] = []
        self._graph = Graph()
        self._nodes: dict[int, Node] = {}  # by tensor
        self._constants: dict[str, torch.Tensor] = {}  # by attribute
        self._real: dict[int, torch.Tensor] = {}  # what a stand-in stands for
        self._stand_ins: dict[int, torch.Tensor] = {}  # by what they stand for

    def add_input(self, name: str, tensor: torch.Tensor) -> None:
        """Add a placeholder of this shape and type."""
        on_meta = _on_meta(tensor)
        node = self._graph.placeholder(name)
        node.meta["val"] = on_meta
        self._nodes[id(on_meta)] = node
        self.inputs.append(on_meta)

    def stand_in(self, tensor: torch.Tensor) -> torch.Tensor:
        """A tensor on the meta device that stands for one that the graph will hold."""
        found = self._stand_ins.get(id(tensor))
        if found is None:
            found = self._stand_ins[id(tensor)] = _on_meta(tensor)
            self._real[id(found)] = tensor
        return found

    def finish(self, result: torch.Tensor) -> GraphModule:
        """The graph, which returns `result`."""
        self._graph.output(self._node_of(result))
        self._graph.eliminate_dead_code()
        return GraphModule(self._constants, self._graph)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        """Compute the shapes of an operator's results, and note the call."""
        arguments = (tuple(args), dict(kwargs or {}))
        node = self._graph.call_function(func, *map_aggregate(arguments, self._recorded))
        positional, named = map_aggregate(arguments, _computed)
        result = func(*positional, **named)
        if isinstance(result, torch.Tensor):
            self._note(node, result)
        elif isinstance(result, tuple | list):
            for index, each in enumerate(result):
                if isinstance(each, torch.Tensor):
                    part = self._graph.call_function(operator.getitem, (node, index))
                    self._note(part, each)
        return result

    def _note(self, node: Node, result: torch.Tensor) -> None:
        node.meta["val"] = result  # which keeps it, so that no other tensor gets its id
        self._nodes[id(result)] = node

    def _recorded(self, value: Any) -> Any:
        """An argument as the graph has it."""
        if isinstance(value, torch.Tensor):
            return self._node_of(value)
        return self._device if value == _META else value

    def _node_of(self, tensor: torch.Tensor) -> Node:
        node = self._nodes.get(id(tensor))
        if node is None:
            name = f"_constant{len(self._constants)}"
            self._constants[name] = self._real.get(id(tensor), tensor)
            node = self._graph.get_attr(name)
            self._note(node, tensor)
        return node


def _computed(value: Any) -> Any:
    """An argument for an operator on the meta device."""
    is_real = isinstance(value, torch.Tensor) and value.device != _META
    return _on_meta(value) if is_real else value


def _on_meta(tensor: torch.Tensor) -> torch.Tensor:
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=_META)
