"""A stand-in for a GPU that detects host synchronization, on torch's meta device.

Meta tensors have shapes but no values, so operations that would make the host wait for a GPU raise:
`item`, `tolist`, a tensor as a condition, nonzero, boolean indices, a copy to the host other than
the runner's. `Watch` adds those that would copy from the host and wait: operands or indices on the
host, and Python lists or numbers that become tensors.
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
from transformers import PreTrainedConfig

from slipstream_core.attention.batch_order import BatchOrder, plan_order
from slipstream_core.attention.block_tables import BlockTables
from slipstream_core.attention.fixed_shape import DecodeColumns, FixedShapeBackend, MixedColumns
from slipstream_core.attention.geometry import read_geometry
from slipstream_core.attention.interface import AttentionParams, register
from slipstream_core.attention.kv_cache import LayerCache
from slipstream_core.attention.latent_attention import cache_latents
from slipstream_core.model.loader import LoadedModel
from slipstream_core.model.rope import freeze_frequencies
from slipstream_core.model.text_tower import (
    TowerFinder,
    attention_of,
    auto_class,
    remove_towers,
)
from slipstream_core.runner.graph_capture import CaptureConfig, Work
from slipstream_core.runner.torch_runner import KernelConfig, TorchRunner
from slipstream_core.sampling.top_k_top_p import TruncationLimits
from slipstream_core.sampling.whole_vocab_sampling import Chosen, Draws, RowEdits
from slipstream_core.step.plan import StepPlan
from slipstream_core.step.staging import CopyEvent, to_device
from slipstream_ipc.messages import SamplingDefaults

META = torch.device("meta")
BLOCK = 4
MAX_MODEL_LEN = 128

_aten = torch.ops.aten
_MADE_OF_A_LIST = (_aten.lift_fresh.default, _aten.lift_fresh_copy.default)


class WaitedError(Exception):
    """On a GPU, the host would wait here."""


class _Calls(TorchFunctionMode):
    """Catches what torch does before an operator is dispatched: Python values become tensors."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        is_lists = func in (torch.tensor, torch.as_tensor) and kwargs.get("device") == META
        if func in (torch.Tensor.__getitem__, torch.Tensor.__setitem__) and args[0].is_meta:
            place = args[1] if isinstance(args[1], tuple) else (args[1],)
            by_index = any(isinstance(it, torch.Tensor) and it.dim() > 0 for it in place)
            is_lists = any(isinstance(it, list) for it in place)
            # on a GPU the number would be copied while the host waits
            is_lists |= by_index and func is torch.Tensor.__setitem__ and _is_number(args[2])
        if is_lists:
            raise WaitedError(f"{func}: numbers of Python's become a tensor")
        return func(*args, **kwargs)


def _is_number(value: Any) -> bool:
    return isinstance(value, bool | int | float)


class Watch(TorchDispatchMode):
    """Raises WaitedError where the host would wait, in the thread that enters it.

    num_ops: operators dispatched so far.
    """

    def __init__(self, *, uploads: bool) -> None:
        """uploads: whether `to_device` may copy columns; not allowed while work is recorded."""
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
            # a zero-dimensional tensor on the host is a number, which needs no copy
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
    """Implements Copies. Host buffers stay zero."""

    def host(self, size: int) -> torch.Tensor:
        return torch.zeros(size, dtype=torch.uint8)

    def upload(self, source: torch.Tensor, target: torch.Tensor) -> CopyEvent:
        return _PAST

    def fetch(self, source: torch.Tensor, target: torch.Tensor) -> CopyEvent:
        assert source.is_meta
        assert source.shape == target.shape
        return _PAST

    def wait_for(self, event: CopyEvent) -> None:
        pass

    def record(self) -> CopyEvent:
        return _PAST


class _Past:
    def synchronize(self) -> None:
        pass


_PAST = _Past()


class WatchedRecorder:
    """Implements Recorder: copies to the device raise while work is recorded."""

    def __init__(self) -> None:
        self.num_recorded = 0

    def record(self, work: Work) -> Work:
        work()  # lazy initialization of libraries
        with Watch(uploads=False) as watch:
            work()
        assert watch.num_ops > 0
        self.num_recorded += 1
        return work

    def check(self) -> None:
        pass


class MetaAttention:
    """In place of Triton's attention, which has its own tests: computes shapes only."""

    tables_device = META

    @property
    def fixed_shape(self) -> FixedShapeBackend:
        return FixedShapeBackend(self.of_decode, self.of_mixed)

    def order(self, plan: StepPlan) -> BatchOrder:
        return plan_order(plan)

    def of_plan(self, plan: StepPlan, order: BatchOrder, tables: BlockTables) -> MetaAttention:
        return self

    def of_decode(self, layers: Sequence[LayerCache], columns: DecodeColumns) -> MetaAttention:
        return self

    def of_mixed(self, layers: Sequence[LayerCache], columns: MixedColumns) -> MetaAttention:
        assert columns.query_starts.shape == (len(columns.kv_lens) + 1,)
        assert len(columns.slots) == len(columns.kv_lens)
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
    """A model on the meta device, as the loader returns it."""
    register()
    config.pad_token_id = None  # as the loader sets it
    make: Any = auto_class(config).from_config
    with META:
        module = make(config, dtype=dtype, attn_implementation=attention_of(config)).eval()
    freeze_frequencies(module)
    cache_latents(module)
    text = config.get_text_config()
    with TowerFinder(module) as finder:
        geometry = read_geometry(module, text.num_hidden_layers, text.vocab_size)
    remove_towers(module, () if text is config else finder.towers())
    return LoadedModel(
        name=type(config).__name__,
        module=module,
        geometry=geometry,
        vocab_size=text.vocab_size,
        max_model_len=MAX_MODEL_LEN,
        eos_token_ids=(),
        default_sampling=SamplingDefaults(),
        dtype=dtype,
        device=META,
    )


class MetaDraws:
    """In place of `WholeVocabSampler`: checks and computes shapes only."""

    def choose(
        self,
        logits: torch.Tensor,
        *,
        draws: Draws | None = None,
        edits: RowEdits | None = None,
        totals: bool = False,
        undefined: torch.Tensor | None = None,
    ) -> Chosen:
        num = len(logits)
        assert undefined is None or undefined.shape == (num,)
        if draws is not None:
            assert draws.keys.shape == (2, num)
            assert draws.divisors.shape == draws.drawn.shape == (num,)
            assert draws.drawn.dtype == torch.int32
        self._check(logits, edits)
        own, total = (logits.new_empty(num, dtype=torch.float32) for _ in range(2))
        token_ids = logits.new_empty(num, dtype=torch.int64)
        return Chosen(token_ids, own if totals else None, total if totals else None)

    def scaled(
        self, logits: torch.Tensor, divisors: torch.Tensor, edits: RowEdits | None = None
    ) -> torch.Tensor:
        assert divisors.shape == (len(logits),)
        self._check(logits, edits)
        return logits.new_empty(logits.shape, dtype=torch.float32)

    def _check(self, logits: torch.Tensor, edits: RowEdits | None) -> None:
        if edits is not None:
            num, vocab_size = logits.shape
            assert edits.edit_rows.shape == edits.mask_rows.shape == (num,)
            assert edits.edited.shape[1] == vocab_size
            assert edits.masks.shape[1] == -(-vocab_size // 32)

    def most_likely(self, logits: torch.Tensor, num: int) -> tuple[torch.Tensor, torch.Tensor]:
        shape = (len(logits), num)
        values = logits.new_empty(shape, dtype=torch.float32)
        return values, logits.new_empty(shape, dtype=torch.int64)

    def logprob_columns(
        self, logits: torch.Tensor, chosen: Chosen, num: int
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        assert chosen.own is not None
        assert chosen.totals is not None
        values, ids = self.most_likely(logits, num + 1)
        return values, ids, logits.new_empty(len(logits), dtype=torch.int64)

    def further(
        self, limits: TruncationLimits, keys: Any, wanted: Any, token_ids: Any, masses: Any
    ) -> None:
        assert wanted.dtype == torch.bool
        assert wanted.shape == token_ids.shape == masses[:, 0].shape == keys[0].shape


@contextlib.contextmanager
def meta_runner(
    model: LoadedModel,
    graph_sizes: Sequence[int] = (),
    max_num_seqs: int = 8,
    token_buckets: Sequence[int] = (),
) -> Iterator[tuple[TorchRunner, WatchedRecorder]]:
    """A runner on the meta device; steps of these sizes are recorded under `Watch`."""
    runner = TorchRunner(
        model,
        num_blocks=100,
        block_size=BLOCK,
        max_num_seqs=max_num_seqs,
        kernel_config=KernelConfig(threads=1, native=False, copies=MetaCopies()),
    )
    recorder = WatchedRecorder()
    try:
        draws: Any = MetaDraws()
        runner._attention, runner._sampling.whole = MetaAttention(), draws
        if graph_sizes:
            with torch.inference_mode():  # modes are per thread, so not on the device's thread
                runner._record(CaptureConfig(graph_sizes, token_buckets, recorder))
        yield runner, recorder
    finally:
        runner.close()


def step(runner: TorchRunner, plan: StepPlan) -> Any:
    """Run the enqueuing part of a step under `Watch`, and return its result."""
    with torch.inference_mode(), Watch(uploads=True) as watch:
        pending = runner._step(plan)
    assert watch.num_ops > 0
    return pending
