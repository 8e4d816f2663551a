"""A recorder for CPUs that is as strict as a CUDA graph.

It notes every operator that runs while work is recorded, and runs the same ones on the same
tensors at a replay. What the host said while it was recorded stays so for ever, and asking a tensor
for its value raises: on a card both would be errors that no test on a CPU sees.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_map

Work = Callable[[], None]


class OpRecorder:
    """Implements Recorder. `num_replays` counts."""

    def __init__(self) -> None:
        self.num_replays = 0

    def record(self, work: Work) -> Work:
        with _Warm():
            work()
        tape = _Tape()
        with tape:
            work()

        def replay() -> None:
            self.num_replays += 1
            tape.replay()

        return replay

    def check(self) -> None:
        pass


class _Warm(TorchDispatchMode):
    """Work is run once before it is recorded, and may ask for values as little."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        _refuse_values(func, args)
        return func(*args, **(kwargs or {}))


class _Tape(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self._calls: list[tuple[Any, tuple[Any, ...], Mapping[str, Any], list[Any]]] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        _refuse_values(func, args)
        kwargs = kwargs or {}
        outputs = func(*args, **kwargs)
        self._calls.append((func, args, kwargs, tree_flatten(outputs)[0]))
        return outputs

    def replay(self) -> None:
        made: dict[int, Any] = {}  # what stands for a tensor that was made while recording

        def now(value: Any) -> Any:
            return made.get(id(value), value) if isinstance(value, torch.Tensor) else value

        for func, args, kwargs, outputs in self._calls:
            given = {id(value) for value in tree_flatten((args, dict(kwargs)))[0]}
            new = tree_flatten(func(*tree_map(now, args), **tree_map(now, dict(kwargs))))[0]
            for before, after in zip(outputs, new, strict=True):
                if isinstance(before, torch.Tensor) and id(before) not in given:
                    made[id(before)] = after


_aten = torch.ops.aten
# whose result, or its size, hangs on values
_ASKING = (
    _aten._local_scalar_dense.default,
    _aten._unique2.default,
    _aten.bincount.default,
    _aten.equal.default,
    _aten.masked_select.default,
    _aten.nonzero.default,
    _aten.repeat_interleave.Tensor,
    _aten.unique_dim.default,
)


def _refuse_values(func: Any, args: tuple[Any, ...]) -> None:
    by_mask = func.overloadpacket in (_aten.index, _aten.index_put, _aten.index_put_) and any(
        it is not None and it.dtype in (torch.bool, torch.uint8) for it in args[1]
    )
    if by_mask or func in _ASKING:
        raise RuntimeError(f"the host asks for a value while work is recorded ({func})")
