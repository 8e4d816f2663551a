"""A card that has no values: whoever asks it for one is told that there is none.

Tensors lie on torch's meta device, which knows shapes alone. What would make the host wait on a
card raises here: `item`, `tolist`, a tensor as a condition, nonzero, boolean indices, a copy to
the host that is not the runner's own. `Watch` adds what a card would do, and wait for: indices or
other operands that lie on the host, and numbers that a list of Python's is made into there.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator, Sequence
from types import FrameType
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import AutoModelForCausalLM, PreTrainedConfig

from slipstream_core.runner.attention.fixed_shape import DecodeColumns
from slipstream_core.runner.attention.geometry import read_geometry
from slipstream_core.runner.attention.interface import ATTENTION_NAME, AttentionParams, register
from slipstream_core.runner.attention.kv_cache import LayerCache
from slipstream_core.runner.cuda.recorder import Work
from slipstream_core.runner.model.loader import LoadedModel
from slipstream_core.runner.model.rope import freeze_frequencies
from slipstream_core.runner.sampling.truncation import TruncationLimits
from slipstream_core.runner.staging import CopyMark, to_device
from slipstream_core.runner.torch_runner import TorchRunner
from slipstream_core.step.plan import StepPlan
from slipstream_ipc.messages import SamplingDefaults

META = torch.device("meta")
BLOCK = 4
MAX_MODEL_LEN = 128

_aten = torch.ops.aten
_MADE_OF_A_LIST = (_aten.lift_fresh.default, _aten.lift_fresh_copy.default)


class WaitedError(Exception):
    """Here the host would wait for the card."""


class _Calls(TorchFunctionMode):
    """What torch does before any operator runs: lists and numbers of Python's become tensors."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        is_lists = func in (torch.tensor, torch.as_tensor) and kwargs.get("device") == META
        if func in (torch.Tensor.__getitem__, torch.Tensor.__setitem__) and args[0].is_meta:
            place = args[1] if isinstance(args[1], tuple) else (args[1],)
            by_index = any(isinstance(it, torch.Tensor) and it.dim() > 0 for it in place)
            is_lists = any(isinstance(it, list) for it in place)
            # on a card the number would be copied there while the host waits
            is_lists |= by_index and func is torch.Tensor.__setitem__ and _is_number(args[2])
        if is_lists:
            raise WaitedError(f"{func}: numbers of Python's become a tensor")
        return func(*args, **kwargs)


def _is_number(value: Any) -> bool:
    return isinstance(value, bool | int | float)


class Watch(TorchDispatchMode):
    """Raises where the host would wait, in the thread that enters it. `num_ops` counts."""

    def __init__(self, *, uploads: bool) -> None:
        """`uploads`: `to_device` may bring columns to the card; not while something is recorded."""
        super().__init__()
        self._uploads = uploads
        self._calls = _Calls()
        self.num_ops = 0

    def __enter__(self) -> Watch:
        self._calls.__enter__()
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self._calls.__exit__(*error)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        self.num_ops += 1
        if self._uploads and _is_uploading():
            return func(*args, **kwargs)
        if func in _MADE_OF_A_LIST:
            raise WaitedError(f"{func}: a number of Python's becomes a tensor")
        given = [it for it in tree_leaves((args, kwargs)) if isinstance(it, torch.Tensor)]
        if any(it.dtype in (torch.bool, torch.uint8) for it in _indices(func, args)):
            raise WaitedError(f"{func}: which places a mask has is asked for")
        outputs = func(*args, **kwargs)
        made = [it for it in tree_leaves(outputs) if isinstance(it, torch.Tensor)]
        if any(it.is_meta for it in given + made):
            # a number that lies on the host is read there
            hosts = [it for it in given + made if not it.is_meta and it.dim() > 0]
            if hosts:
                raise WaitedError(f"{func}: something of it lies on the host")
        return outputs


def _is_uploading() -> bool:
    frame: FrameType | None = sys._getframe()
    while frame is not None and frame.f_code is not to_device.__code__:
        frame = frame.f_back
    return frame is not None


def _indices(func: Any, args: tuple[Any, ...]) -> Sequence[torch.Tensor]:
    if func.overloadpacket not in (_aten.index, _aten.index_put, _aten.index_put_):
        return ()
    return [it for it in args[1] if it is not None]


class MetaCopies:
    """Implements Copies. What comes back to the host is zeros."""

    def host(self, size: int) -> torch.Tensor:
        return torch.zeros(size, dtype=torch.uint8)

    def upload(self, source: torch.Tensor, target: torch.Tensor) -> CopyMark:
        return _PAST

    def fetch(self, source: torch.Tensor, target: torch.Tensor) -> CopyMark:
        assert source.is_meta
        assert source.shape == target.shape
        return _PAST

    def before_reuse(self, mark: CopyMark) -> None:
        pass

    def here(self) -> CopyMark:
        return _PAST


class _Past:
    def synchronize(self) -> None:
        pass


_PAST = _Past()


class WatchedRecorder:
    """Implements Recorder: nothing may be brought to the card while work is recorded."""

    def __init__(self) -> None:
        self.num_recorded = 0

    def record(self, work: Work) -> Work:
        work()  # libraries set themselves up
        with Watch(uploads=False) as watch:
            work()
        assert watch.num_ops > 0
        self.num_recorded += 1
        return work

    def check(self) -> None:
        pass


class MetaAttention:
    """In place of Triton's, whose own tests see to it: shapes alone."""

    def of_plan(self, plan: StepPlan) -> MetaAttention:
        return self

    def of_decode(self, layers: Sequence[LayerCache], columns: DecodeColumns) -> MetaAttention:
        return self

    def attend(
        self,
        layer: int,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        params: AttentionParams,
    ) -> torch.Tensor:
        return query.new_empty(*query.shape[:2], value.shape[2])


def meta_model(config: PreTrainedConfig, dtype: torch.dtype = torch.bfloat16) -> LoadedModel:
    """A model without values, as the loader would give it."""
    register()
    config.pad_token_id = None  # as the loader has it
    make: Any = AutoModelForCausalLM.from_config
    with META:
        module = make(config, dtype=dtype, attn_implementation=ATTENTION_NAME).eval()
    freeze_frequencies(module)
    text = config.get_text_config()
    return LoadedModel(
        name=type(config).__name__,
        module=module,
        geometry=read_geometry(module, text.num_hidden_layers, text.vocab_size),
        vocab_size=text.vocab_size,
        max_model_len=MAX_MODEL_LEN,
        eos_token_ids=(),
        default_sampling=SamplingDefaults(),
        dtype=dtype,
        device=META,
    )


class MetaDraws:
    """In place of `RejectionSampler`, likewise."""

    def all(self, scaled: torch.Tensor, keys: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
        assert keys.shape == (2, len(scaled))
        assert wanted.shape == (len(scaled),)
        assert wanted.dtype == torch.int32
        return scaled.new_empty(len(scaled), dtype=torch.int64)

    def further(
        self, limits: TruncationLimits, keys: Any, wanted: Any, token_ids: Any, masses: Any
    ) -> None:
        assert wanted.dtype == torch.bool
        assert wanted.shape == token_ids.shape == masses[:, 0].shape == keys[0].shape


@contextlib.contextmanager
def meta_runner(
    model: LoadedModel, graph_sizes: Sequence[int] = (), max_num_seqs: int = 8
) -> Iterator[tuple[TorchRunner, WatchedRecorder]]:
    """A runner on such a card; its steps are recorded, watched."""
    runner = TorchRunner(
        model,
        num_blocks=100,
        block_size=BLOCK,
        max_num_seqs=max_num_seqs,
        threads=1,
        native=False,
        copies=MetaCopies(),
    )
    recorder = WatchedRecorder()
    try:
        attention: Any = MetaAttention()
        draws: Any = MetaDraws()
        runner._triton, runner._whole = attention, draws
        if graph_sizes:
            with torch.inference_mode():  # here, not on the device's thread: modes are a thread's
                runner._record(graph_sizes, recorder)
        yield runner, recorder
    finally:
        runner.close()


def step(runner: TorchRunner, plan: StepPlan) -> Any:
    """Run a step's enqueuing part, watched; what it gives back."""
    with torch.inference_mode(), Watch(uploads=True) as watch:
        pending = runner._step(plan)
    assert watch.num_ops > 0
    return pending
