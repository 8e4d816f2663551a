"""A recorder for CPUs that is as strict as a CUDA graph.

It notes every operator that runs while work is recorded, and runs the same ones on the same
tensors at a replay. What the host said while it was recorded stays so for ever, and asking a tensor
for its value raises: on a card both would be errors that no test on a CPU sees.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_unflatten

from slipstream_core.runner.sampling import top_tokens

Work = Callable[[], None]


class OpRecorder:
    """Implements Recorder. `num_replays` counts."""

    def __init__(self) -> None:
        self.num_replays = 0

    def record(self, work: Work) -> Work:
        tape = _Tape()
        # on a CPU it may look at values beforehand, which is no part of what is recorded
        with patch.object(top_tokens, "_may_look", lambda _logits: False):
            with _Warm():
                work()
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


class _Call:
    """An operator with its arguments, of which some are to be what the replay has made so far."""

    def __init__(
        self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], outputs: Any, made: set[int]
    ) -> None:
        """made: the ids of the tensors that earlier calls made; grows by those of this one."""
        self._func = func
        self._leaves, self._tree = tree_flatten((args, kwargs))
        self._made_before = [
            (place, id(leaf)) for place, leaf in enumerate(self._leaves) if id(leaf) in made
        ]
        self._outputs = tree_flatten(outputs)[0]  # held, so that nothing else has their ids
        given = {id(leaf) for leaf in self._leaves}
        self._makes = [
            (place, id(output))
            for place, output in enumerate(self._outputs)
            if isinstance(output, torch.Tensor) and id(output) not in given
        ]
        made.update(number for _, number in self._makes)

    def repeat(self, made: dict[int, Any]) -> None:
        """made: what stands for a tensor that was made while recording, by its id."""
        leaves = self._leaves.copy()
        for place, number in self._made_before:
            leaves[place] = made[number]
        args, kwargs = tree_unflatten(leaves, self._tree)
        outputs = tree_flatten(self._func(*args, **kwargs))[0]
        assert len(outputs) == len(self._outputs)
        for place, number in self._makes:
            made[number] = outputs[place]


class _Tape(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self._calls: list[_Call] = []
        self._made: set[int] = set()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        _refuse_values(func, args)
        kwargs = kwargs or {}
        outputs = func(*args, **kwargs)
        self._calls.append(_Call(func, args, kwargs, outputs, self._made))
        return outputs

    def replay(self) -> None:
        made: dict[int, Any] = {}
        for call in self._calls:
            call.repeat(made)


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
