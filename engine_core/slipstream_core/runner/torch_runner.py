"""A Runner over a transformers model: one step is one forward of a flattened batch [1, T].

Owns the order of a step's work and the tensors that outlive it: the cache and each slot's last
sampled token. Knows no requests and decides nothing: what to compute is in the plan.

Steps run one after another on the device's thread, so a step may be launched before the one
before it is done: its input ids are gathered on the device from what that one left in
`last_token`.

Rules:
- A launched plan's arrays belong to the runner until its step is collected; on the CPU they are
  read in place, by another thread.
- A step that raises leaves the runner as it was, but for cache slots and last tokens of its own
  rows.
- A plan that awaits masks stops between its forward pass and sampling until they are here. Masks of
  a step that raised before it wanted them are passed over by the next one.
"""

from __future__ import annotations

import logging
import time
from functools import partial
from queue import SimpleQueue

import numpy as np
import numpy.typing as npt
import torch

from slipstream_core.config import CoreConfig
from slipstream_core.runner import kv_cache
from slipstream_core.runner.attention.cpu import CpuAttention, Scratch, scratch_bytes
from slipstream_core.runner.attention.interface import AttentionContext
from slipstream_core.runner.attention.native import NativeContext
from slipstream_core.runner.candidates import candidates
from slipstream_core.runner.context import ForwardContext
from slipstream_core.runner.device import DeviceThread
from slipstream_core.runner.loader import LoadedModel, load_model
from slipstream_core.runner.native.kernels import kernels
from slipstream_core.runner.plan import (
    Candidates,
    Int32s,
    Logprobs,
    ModelInfo,
    PromptPlan,
    StepFailed,
    StepPlan,
    StepResult,
)
from slipstream_core.runner.refusals import ModelLoadError
from slipstream_core.runner.rule_keeper import RuleKeeper
from slipstream_core.runner.sampler import RawLogprobs, sample
from slipstream_core.runner.traced import Forward, eager, trace
from slipstream_ipc.trace import Span, Tracer, open_tracer
from slipstream_ipc.wide_logprobs import MAX_NARROW

logger = logging.getLogger(__name__)


_Selector = slice | npt.NDArray[np.int64]


def load_runner(config: CoreConfig) -> TorchRunner:
    """Load the model and size its cache. Raises ModelLoadError.

    To be called in a process of the core's own: this thread is left with one thread for torch's
    operators. libgomp lets a team wait for its next loop without falling asleep only while the
    process has no more such threads than cores; a team that loading left behind would cost the
    device's own team a third of its speed.
    """
    threads = config.threads or torch.get_num_threads()
    torch.set_num_threads(1)
    model = load_model(
        config.model,
        dtype=config.dtype,
        device=config.device,
        max_model_len=config.max_model_len,
        trust_remote_code=config.trust_remote_code,
    )
    num_blocks = config.num_blocks
    if num_blocks is None:
        num_blocks = _cache_bytes(config, model.device) // block_bytes(model, config.block_size)
    _check_length(model, config, num_blocks)
    return TorchRunner(
        model,
        num_blocks=num_blocks,
        block_size=config.block_size,
        max_num_seqs=config.max_num_seqs,
        threads=threads,
        tracer=open_tracer(config.trace, "device"),
        native=config.native,
    )


def _cache_bytes(config: CoreConfig, device: torch.device) -> int:
    """Memory for the cache: what is configured on a CPU, a share of what is free on a card."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0] * config.gpu_memory_utilization)
    return int(config.kv_cache_gib * 2**30)


def _check_length(model: LoadedModel, config: CoreConfig, num_blocks: int) -> None:
    """A length that was asked for is kept or refused; the model's own gives way to the cache."""
    room = (num_blocks - 1) * config.block_size
    if not 0 < room < model.max_model_len:
        return
    if config.max_model_len is None:
        logger.warning(
            "%s reaches %d tokens, but the cache holds %d: that is what a request may have",
            model.name,
            model.max_model_len,
            room,
        )
        return
    blocks = -(-model.max_model_len // config.block_size) + 1
    needed = blocks * block_bytes(model, config.block_size) / 2**30
    raise ModelLoadError(
        model.name,
        f"max_model_len is {model.max_model_len}, but the cache has room for {room} tokens; "
        f"give at most that, or {needed:.3f} GiB of cache ({blocks} blocks)",
    )


def block_bytes(model: LoadedModel, block_size: int) -> int:
    """Bytes of cache that one block takes over all layers."""
    return block_size * sum(layer.bytes_per_token(model.dtype) for layer in model.geometry)


class TorchRunner:
    """Implements Runner."""

    def __init__(
        self,
        model: LoadedModel,
        *,
        num_blocks: int,
        block_size: int,
        max_num_seqs: int,
        threads: int | None = None,
        tracer: Tracer | None = None,
        native: bool = True,
    ) -> None:
        """`tracer` is for the device's thread alone; `native` False leaves our own kernels out."""
        if num_blocks < 2:
            raise ModelLoadError(
                model.name,
                f"the cache has room for {num_blocks} blocks of {block_size} tokens, "
                f"{block_bytes(model, block_size)} bytes each; it needs 2 at least, "
                "the null block and another",
            )
        self.num_blocks = num_blocks
        self.info = ModelInfo(
            name=model.name,
            vocab_size=model.vocab_size,
            # a request that the whole cache could not hold would wait for ever
            max_model_len=min(model.max_model_len, (num_blocks - 1) * block_size),
            eos_token_ids=model.eos_token_ids,
            block_bytes=block_bytes(model, block_size),
            block_size=block_size,
            default_sampling=model.default_sampling,
        )
        if model.device.type == "cuda":
            # it plans anew for every shape, on the host; decode steps bring new ones all the time
            torch.backends.cuda.enable_cudnn_sdp(False)
        self._device = model.device
        self._block_size = block_size
        self._layers = kv_cache.allocate(
            model.geometry,
            num_blocks=num_blocks,
            block_size=block_size,
            dtype=model.dtype,
            device=model.device,
        )
        self._scratch = Scratch(model.dtype, model.device)
        widest = max(layer.key_blocks[0].nbytes for layer in self._layers)
        is_plain = model.device.type == "cpu" and model.dtype == torch.float32
        self._kernels = kernels() if native and is_plain else None
        self._model = self._forward_of(model)
        self._blocks_per_bucket = scratch_bytes(model.device) // widest
        # [max_num_seqs] int64: by slot, the last token sampled
        self._last_token = torch.zeros(max_num_seqs, dtype=torch.int64, device=model.device)
        self._rules = RuleKeeper(model.vocab_size, model.device)
        self._vocab = torch.arange(model.vocab_size, dtype=torch.int32, device=model.device)
        self._masks: SimpleQueue[tuple[int, Int32s] | None] = SimpleQueue()  # of which step
        self._tracer = tracer
        self._thread: DeviceThread[StepResult] = DeviceThread(
            "device", partial(torch.set_num_threads, threads or torch.get_num_threads())
        )

    def _forward_of(self, model: LoadedModel) -> Forward:
        recorded = None
        if self._kernels is not None:
            recorded = trace(model.module, self._kernels, model.vocab_size)
        return eager(model.module) if recorded is None else recorded

    def launch(self, plan: StepPlan) -> None:
        """Enqueue a step. Returns at once."""
        self._thread.submit(partial(self._run, plan))

    def sample(self, plan: StepPlan, masks: Int32s) -> None:
        """Let a launched plan that awaits masks be sampled. Returns at once."""
        self._masks.put((plan.step, masks))

    def collect(self) -> StepResult:
        """The oldest launched step's result; waits for it. Raises StepFailed."""
        return self._thread.collect()

    def done(self) -> bool:
        """Whether collect() would return without waiting."""
        return self._thread.done()

    def fileno(self) -> int:
        """A descriptor that is readable while a finished step waits to be collected."""
        return self._thread.fileno()

    def done_at(self) -> None:
        """Not known beforehand."""
        return

    def close(self) -> None:
        """Stop the device's thread, free the cache. Idempotent."""
        self._masks.put(None)  # lest it wait for some for ever
        self._thread.close()
        self._layers = []
        if self._tracer is not None:
            self._tracer.close()

    def _run(self, plan: StepPlan) -> StepResult:
        begin_ns = time.monotonic_ns()
        try:
            with torch.inference_mode():
                return self._step(plan)
        except torch.AcceleratorError:
            raise  # the device's context is beyond use: the process ends, another takes its place
        except Exception as error:
            raise StepFailed(plan.step, error) from error
        finally:
            if self._tracer is not None:
                self._tracer.add(Span.DEVICE, begin_ns, time.monotonic_ns(), plan.step)

    def _step(self, plan: StepPlan) -> StepResult:
        """On the device's thread: forward, sample, keep the tokens, bring them to the host."""
        logits = self._forward(plan)
        prompt: tuple[Candidates, ...] = ()
        if plan.prompt is not None:
            num = len(logits) - len(plan.prompt.tokens)
            logits, prompt = logits[:num], self._of_prompts(logits[num:], plan.prompt)
        if len(logits) == 0:  # prefill chunks alone
            return StepResult(plan.step, np.empty(0, np.int64), None, prompt=prompt)
        masks = self._masks_of(plan) if plan.awaits_masks else None
        logits, rules = logits.float(), plan.rules
        allowed = None if rules is None else self._rules.apply(logits, rules)
        token_ids, logprobs = sample(logits, plan, self._vocab, allowed=allowed, masks=masks)
        if rules is not None:
            self._rules.sampled(token_ids)
        self._last_token.index_copy_(0, self._to(plan.slots[plan.samples]), token_ids)
        return StepResult(
            plan.step,
            token_ids.cpu().numpy(),
            None if logprobs is None else _on_host(logprobs, len(token_ids)),
            _wide(logits, token_ids, plan) if plan.any_wide else (),
            prompt,
        )

    def _of_prompts(self, logits: torch.Tensor, prompt: PromptPlan) -> tuple[Candidates, ...]:
        """The log-probabilities of each row's prompt; `logits` is [N, vocab]."""
        targets = self._to(prompt.targets)
        ends = np.cumsum(prompt.counts)
        spans = zip(ends - prompt.counts, ends, prompt.num_logprobs, strict=True)
        return tuple(
            candidates(logits[begin:end], targets[begin:end], int(num)) for begin, end, num in spans
        )

    def _forward(self, plan: StepPlan) -> torch.Tensor:
        """Logits of the sampled rows' last tokens, [S, vocab] in the model's dtype.

        Behind them those of the plan's `prompt`, where it has one.
        """
        if self._kernels is None:
            rows, tokens, last = _by_length(plan)
        else:
            rows, tokens, last = _as_they_come(plan)
        ids, sources = self._to(plan.token_ids[tokens]), self._to(plan.gather_slots[tokens])
        ids = torch.where(sources < 0, ids, self._last_token[sources.clamp(min=0)])
        kept = last[plan.samples]
        if plan.prompt is not None:  # of chunks, which lie where the plan has them in either order
            kept = np.concatenate([kept, plan.prompt.tokens])
        return self._model(
            ids[None],
            self._to(plan.positions[tokens])[None],
            self._to(kept),
            self._context(plan, rows, tokens),
        )[0]

    def _context(self, plan: StepPlan, rows: _Selector, tokens: _Selector) -> AttentionContext:
        """Where this step's rows and tokens lie, in the order in which the model sees them."""
        if self._kernels is not None:
            return NativeContext(
                self._kernels,
                self._layers,
                num_decodes=plan.num_decodes,
                query_lens=plan.query_lens,
                kv_lens=plan.kv_lens,
                kv_slots=plan.kv_slots,
                block_tables=plan.block_tables,
                block_size=self._block_size,
                scratch=self._scratch,
            )
        attention = CpuAttention(
            num_decodes=plan.num_decodes,
            query_lens=plan.query_lens[rows],
            kv_lens=plan.kv_lens[rows],
            block_tables=plan.block_tables[rows],
            block_size=self._block_size,
            blocks_per_bucket=self._blocks_per_bucket,
            scratch=self._scratch,
        )
        begun = _begun_blocks(plan, self._block_size)
        return ForwardContext(
            self._layers,
            self._to(plan.kv_slots[tokens]),
            attention,
            self._to(begun) if len(begun) else None,
        )

    def _masks_of(self, plan: StepPlan) -> Int32s:
        """The masks of a plan, when the host has made them."""
        while True:
            given = self._masks.get()
            if given is None:
                raise RuntimeError("the runner was closed")
            step, masks = given
            if step == plan.step:
                return masks

    def _to(self, column: npt.NDArray[np.generic]) -> torch.Tensor:
        return torch.from_numpy(column).to(self._device, non_blocking=True)


def _begun_blocks(plan: StepPlan, block_size: int) -> npt.NDArray[np.int64]:
    """The blocks whose first token this step writes and whose last it does not, [n].

    A row's blocks are written in order, so only its last one can be such a block. On average that
    is one row in `block_size`, and clearing its block writes as much as storing one token per row.
    """
    numbers, num_in_last = np.divmod(plan.kv_lens, block_size)
    begun = np.flatnonzero((num_in_last > 0) & (num_in_last <= plan.query_lens))
    return plan.block_tables[begun, numbers[begun]].astype(np.int64)


def _as_they_come(plan: StepPlan) -> tuple[_Selector, _Selector, npt.NDArray[np.int64]]:
    """As _by_length, for attention that asks for no order."""
    return slice(None), slice(None), np.cumsum(plan.query_lens, dtype=np.int64) - 1


def _by_length(
    plan: StepPlan,
) -> tuple[_Selector, _Selector, npt.NDArray[np.int64]]:
    """The order in which the model sees a step: decode rows by ascending length, as CpuAttention
    wants them. Attention then finds its buckets side by side in every layer, and the way back
    costs nothing, as the rows whose logits are kept are picked by index anyhow.

    Returns what selects the rows, what selects the tokens, and for each row of the plan where
    its last token has come to lie, [R].
    """
    last = np.cumsum(plan.query_lens, dtype=np.int64) - 1
    decodes = plan.kv_lens[: plan.num_decodes]
    if len(decodes) < 2 or bool((decodes[1:] >= decodes[:-1]).all()):
        return slice(None), slice(None), last
    order = np.argsort(decodes, kind="stable")
    last[order] = np.arange(len(order))
    rows = np.concatenate([order, np.arange(len(order), plan.num_requests)])
    tokens = np.concatenate([order, np.arange(len(order), plan.num_tokens)])
    return rows, tokens, last


def _wide(
    logits: torch.Tensor, token_ids: torch.Tensor, plan: StepPlan
) -> tuple[tuple[int, Candidates], ...]:
    """Of the sampled rows that want very many, each as many as it asked for."""
    return tuple(
        (row, candidates(logits[row : row + 1], token_ids[row : row + 1], num))
        for row, num in enumerate(plan.num_logprobs.tolist())
        if num >= MAX_NARROW
    )


def _on_host(logprobs: RawLogprobs, num_rows: int) -> Logprobs:
    """Spread the rows that asked over all S sampled rows."""
    values = np.zeros((num_rows, logprobs.values.shape[1]), np.float32)
    ids = np.zeros(values.shape, np.uint32)
    ranks = np.zeros(num_rows, np.uint32)
    values[logprobs.rows] = logprobs.values.cpu().numpy()
    ids[logprobs.rows] = logprobs.ids.cpu().numpy()
    ranks[logprobs.rows] = logprobs.ranks.cpu().numpy()
    return Logprobs(values, ids, ranks)
