"""A recorder for CPUs that is as strict as a CUDA graph.

It records every operator that runs, and a replay runs the same operators on the same tensors.
Values that the host computes while recording are frozen, and reading a tensor's value raises: with
CUDA graphs both are errors that a test on a CPU would otherwise miss.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_unflatten

from slipstream_core.sampling import top_tokens

Work = Callable[[], None]


class OpRecorder:
    """Implements Recorder. num_replays: of all recorded work."""

    def __init__(self) -> None:
        self.num_replays = 0

    def record(self, work: Work) -> Work:
        tape = _Tape()
        # on a CPU `top_tokens` may read values first, which cannot be recorded
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
    """For the run before recording, in which values may not be read either."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        _refuse_values(func, args)
        return func(*args, **(kwargs or {}))


class _Call:
    """A recorded operator. At a replay, arguments made by earlier calls are replaced by the
    replay's own.
    """

    def __init__(
        self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], outputs: Any, made: set[int]
    ) -> None:
        """made: ids of the tensors made by earlier calls; those of this call are added."""
        self._func = func
        self._leaves, self._tree = tree_flatten((args, kwargs))
        self._made_before = [
            (place, id(leaf)) for place, leaf in enumerate(self._leaves) if id(leaf) in made
        ]
        self._outputs = tree_flatten(outputs)[0]  # kept alive, so that their ids stay unique
        given = {id(leaf) for leaf in self._leaves}
        self._makes = [
            (place, id(output))
            for place, output in enumerate(self._outputs)
            if isinstance(output, torch.Tensor) and id(output) not in given
        ]
        made.update(number for _, number in self._makes)

    def repeat(self, made: dict[int, Any]) -> None:
        """made: the replay's tensors, by the id of the recorded tensor that each replaces."""
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
# operators whose result is a host value, or has a size that depends on values
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
