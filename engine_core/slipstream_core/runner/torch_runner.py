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
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from queue import SimpleQueue
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from slipstream_core.runner.attention import kv_cache
from slipstream_core.runner.attention.backend_choice import triton_attention
from slipstream_core.runner.attention.cpu_backend import CpuContext
from slipstream_core.runner.attention.fixed_shape import DecodeBackend, FixedShapeDecode
from slipstream_core.runner.attention.interface import AttentionContext
from slipstream_core.runner.attention.torch_backend import Scratch, TorchAttention, scratch_bytes
from slipstream_core.runner.batch_order import Selector, as_they_come, begun_blocks, by_length
from slipstream_core.runner.compilation.trace import Forward, eager, trace
from slipstream_core.runner.cpu.cpu_threads import Threads
from slipstream_core.runner.cpu.kernels import kernels
from slipstream_core.runner.cuda.cuda_thread import CudaThread
from slipstream_core.runner.cuda.decode_graphs import DecodeGraphs, GraphKind
from slipstream_core.runner.cuda.readback import DeviceSpans, EndedStep, Prompts, deliver, wide
from slipstream_core.runner.cuda.recorder import CudaRecorder, Recorder
from slipstream_core.runner.device_thread import DeviceThread
from slipstream_core.runner.forward_context import ForwardContext
from slipstream_core.runner.load_error import ModelLoadError
from slipstream_core.runner.memory import block_bytes
from slipstream_core.runner.model.loader import LoadedModel
from slipstream_core.runner.sampling.logits_processors import LogitsProcessors
from slipstream_core.runner.sampling.logprobs import arrived, candidates
from slipstream_core.runner.sampling.rejection_sampling import rejection_sampler
from slipstream_core.runner.sampling.sampler import sample
from slipstream_core.runner.staging import CardCopies, Copies, Staging, to_device
from slipstream_core.step.plan import (
    Int32s,
    ModelInfo,
    PromptPlan,
    StepFailed,
    StepPlan,
    StepResult,
)
from slipstream_ipc.telemetry.trace import SpanKind, Tracer

logger = logging.getLogger(__name__)


_STAGING_BYTES = 1 << 20  # of a step's columns, for a start


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
        packs: bool = True,
        graph_sizes: Sequence[int] = (),
        copies: Copies | None = None,
        recorder: Recorder | None = None,
    ) -> None:
        """`tracer` is for the device's thread alone; `native` False leaves our own kernels out,
        `packs` False the weights as they were loaded.

        `graph_sizes` are the numbers of rows whose decode steps are recorded. `copies` and
        `recorder` stand in for a card's (tests); given `copies`, a CPU works as a card does.
        """
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
        self._triton = None
        if native:
            self._triton = triton_attention(
                model.geometry,
                self._layers,
                block_size=block_size,
                dtype=model.dtype,
                device=model.device,
                model=model.name,
            )
        self._whole = None
        if native:
            self._whole = rejection_sampler(model.vocab_size, model.device, model=model.name)
        self._kernels = kernels() if native and is_plain and self._triton is None else None
        self._is_recorded = False
        self._model = self._forward_of(model) if packs else eager(model.module)
        self._blocks_per_bucket = scratch_bytes(model.device) // widest
        # [max_num_seqs + 1] int64: by slot, the last token sampled; one for padding rows
        self._last_token = torch.zeros(max_num_seqs + 1, dtype=torch.int64, device=model.device)
        self._rules = LogitsProcessors(
            model.vocab_size,
            model.device,
            num_state_slots=max_num_seqs,
            max_model_len=self.info.max_model_len,
        )
        self._vocab = torch.arange(model.vocab_size, dtype=torch.int32, device=model.device)
        self._masks: SimpleQueue[tuple[int, Int32s] | None] = SimpleQueue()  # of which step
        self._tracer = tracer
        self._spans = None  # on a CPU a step is over when its job is
        if copies is None and model.device.type == "cuda":
            copies = CardCopies(model.device)
        self._copies = copies
        self._staging = None if copies is None else Staging(copies, model.device, _STAGING_BYTES)
        self._threads = Threads(threads or torch.get_num_threads(), self._kernels)
        prepare = self._threads.prepare
        self._thread: DeviceThread[StepResult] | CudaThread[StepResult]
        if copies is None:
            self._thread = DeviceThread("device", prepare)
        else:
            self._spans = None if tracer is None else DeviceSpans(tracer)
            self._thread = CudaThread("device", prepare)
        self._graphs: DecodeGraphs | None = None
        if graph_sizes:
            self._on_device(partial(self._record, graph_sizes, recorder))

    def _forward_of(self, model: LoadedModel) -> Forward:
        recorded = None
        if self._kernels is not None:
            recorded = trace(model.module, self._kernels, model.vocab_size)
            self._is_recorded = recorded is not None
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
        self._graphs = self._triton = None  # both hold on to the cache
        self._layers = []
        if self._tracer is not None:
            self._tracer.close()

    def bare_replay(self, batch: int, steps: int, *, context: int = 128) -> float:
        """Seconds that `steps` recorded decode steps take with no work of the host between them.

        Greedy sampling with log-probabilities is part of each. Overwrites what is in the cache, so
        it is for benchmarks, with no step in flight. Raises ValueError where no such step is
        recorded.
        """

        taken: list[float] = []

        def measure() -> None:
            if self._graphs is None:
                raise ValueError("no decode steps are recorded")
            kind = GraphKind(logprobs=True)
            taken.append(self._graphs.bare(batch, context, kind, self.num_blocks, steps))

        self._on_device(measure)
        return taken[0]

    def _on_device(self, work: Callable[[], None]) -> None:
        """Do `work` on the device's thread now; no step is in flight. Raises what it raises."""
        nothing = StepResult(0, np.empty(0, np.int64), None)

        def job() -> Any:
            with torch.inference_mode():
                work()
            return nothing if self._copies is None else EndedStep(nothing, self._copies.here())

        self._thread.submit(job)
        self._thread.collect()

    def _record(self, sizes: Sequence[int], recorder: Recorder | None) -> None:
        backend = self._decode_backend()
        if backend is None or self._copies is None:
            logger.warning("decode steps are not recorded: attention here has no fixed shape")
            return
        self._graphs = DecodeGraphs(
            forward=self._model,
            backend=backend,
            layers=self._layers,
            last_token=self._last_token,
            vocab=self._vocab,
            copies=self._copies,
            sizes=sizes,
            max_blocks=-(-self.info.max_model_len // self._block_size),
            block_size=self._block_size,
            whole=self._whole,
        )
        self._graphs.record(recorder or CudaRecorder(self._device))

    def _decode_backend(self) -> DecodeBackend | None:
        """Attention for recorded steps; None where there is none that is worth it."""
        if self._triton is not None:
            return self._triton.of_decode
        return FixedShapeDecode if self._device.type == "cpu" else None

    def _run(self, plan: StepPlan) -> Any:
        begin_ns = time.monotonic_ns()
        try:
            with torch.inference_mode():
                outcome = self._step(plan)
        except torch.AcceleratorError:
            raise  # the device's context is beyond use: the process ends, another takes its place
        except Exception as error:
            raise StepFailed(plan.step, error) from error
        finally:
            if self._tracer is not None and self._spans is None:
                self._tracer.add(SpanKind.DEVICE, begin_ns, time.monotonic_ns(), plan.step)
        if self._spans is not None:
            return self._spans.until_done(outcome, begin_ns, plan.step)
        return outcome

    def _step(self, plan: StepPlan) -> Any:
        """On the device's thread: forward, sample, keep the tokens, bring them to the host.

        The StepResult; on a card all of that is enqueued, and a Pending of it is given back.
        """
        graphs = self._graphs if self._graphs is not None and self._graphs.takes(plan) else None
        if self._device.type == "cpu":
            is_list = self._is_recorded and plan.num_decodes == len(plan.kv_lens)
            self._threads.begin_forward(is_list=is_list)
        logits = self._forward(plan) if graphs is None else graphs.forward(plan)
        if self._device.type == "cpu":
            self._threads.end_forward()
        prompt: Prompts = ()
        if plan.prompt is not None:
            num = len(logits) - len(plan.prompt.tokens)
            logits, prompt = logits[:num], self._of_prompts(logits[num:], plan.prompt)
        if len(logits) == 0:  # prefill chunks alone
            nothing = StepResult(plan.step, np.empty(0, np.int64), None)
            if self._copies is None:
                return replace(nothing, prompt=tuple(map(arrived, prompt)))
            return EndedStep(nothing, self._copies.here(), prompt)
        if graphs is not None and (sampled := graphs.sample(plan)) is not None:
            return sampled
        masks = self._masks_of(plan) if plan.awaits_masks else None
        logits, rules = logits.float(), plan.rules
        allowed = None if rules is None else self._rules.apply(logits, rules)
        token_ids, logprobs = sample(
            logits, plan, self._vocab, allowed=allowed, masks=masks, whole=self._whole
        )
        if rules is not None:
            self._rules.sampled(token_ids)
        self._last_token.index_copy_(0, self._to(plan.slots[plan.samples]), token_ids)
        more = wide(logits, token_ids, plan, self._copies) if plan.any_wide else ()
        return deliver(self._copies, plan, token_ids, logprobs, more, prompt)

    def _of_prompts(self, logits: torch.Tensor, prompt: PromptPlan) -> Prompts:
        """The log-probabilities of each row's prompt; `logits` is [N, vocab]."""
        targets = self._to(prompt.targets)
        ends = np.cumsum(prompt.counts)
        spans = zip(ends - prompt.counts, ends, prompt.num_logprobs, strict=True)
        return tuple(
            candidates(logits[begin:end], targets[begin:end], int(num), self._copies)
            for begin, end, num in spans
        )

    def _forward(self, plan: StepPlan) -> torch.Tensor:
        """Logits of the sampled rows' last tokens, [S, vocab] in the model's dtype.

        Behind them those of the plan's `prompt`, where it has one.
        """
        if self._kernels is None and self._triton is None:
            rows, tokens, last = by_length(plan)
        else:
            rows, tokens, last = as_they_come(plan)
        kept = last[plan.samples]
        if plan.prompt is not None:  # of chunks, which lie where the plan has them in either order
            kept = np.concatenate([kept, plan.prompt.tokens])
        ids, sources, positions, keep = self._sent(
            plan.token_ids[tokens], plan.gather_slots[tokens], plan.positions[tokens], kept
        )
        ids = torch.where(sources < 0, ids, self._last_token[sources.clamp(min=0)])
        return self._model(ids[None], positions[None], keep, self._context(plan, rows, tokens))[0]

    def _sent(self, *columns: npt.NDArray[np.generic]) -> Sequence[torch.Tensor]:
        """Columns on the device, where one copy brings all of them."""
        if self._staging is None:
            return [self._to(column) for column in columns]
        return self._staging.send_columns(columns)

    def _context(self, plan: StepPlan, rows: Selector, tokens: Selector) -> AttentionContext:
        """Where this step's rows and tokens lie, in the order in which the model sees them."""
        if self._triton is not None:
            return self._triton.of_plan(plan)
        if self._kernels is not None:
            return CpuContext(
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
        attention = TorchAttention(
            num_decodes=plan.num_decodes,
            query_lens=plan.query_lens[rows],
            kv_lens=plan.kv_lens[rows],
            block_tables=plan.block_tables[rows],
            block_size=self._block_size,
            blocks_per_bucket=self._blocks_per_bucket,
            scratch=self._scratch,
        )
        begun = begun_blocks(plan, self._block_size)
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
        return to_device(column, self._device)
