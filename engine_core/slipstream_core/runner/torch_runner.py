"""Runs a transformers model: one step is one forward of a flattened batch [1, T].

The runner holds the tensors that outlive a step: the KV cache, and the block table, the last
sampled token and the recurrent states, if the model has any, of each slot. What to compute is in
the plan. Steps run one after another on the device's thread. A step may be launched before its
predecessor has finished: its input ids are gathered on the device from `last_token`.

- A launched plan's arrays belong to the runner until its step is collected; on a CPU they are read
  in place, by another thread.
- A step that raises changes nothing but the cache slots, tables, last tokens and states of its own
  rows.
- A forward of one of several ranks that raises ends the process, as the other ranks would wait for
  it for ever.
- The rows of a plan that have drafts are unfolded into rows of one token (`step/drafts`). Only what
  is accepted leaves the runner.
- What becomes of logits, also among ranks, is in `sample_stage`.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from msgspec import structs

from slipstream_core.adapters.adapter_store import FolderAdapters
from slipstream_core.adapters.adapter_table import AdapterTable
from slipstream_core.adapters.first_adapters import read_first
from slipstream_core.adapters.sites import Site, why_no_site
from slipstream_core.attention import kv_cache
from slipstream_core.attention.backend_choice import (
    AttentionBackend,
    BackendName,
    triton_attention,
)
from slipstream_core.attention.batch_order import Selector
from slipstream_core.attention.block_tables import BlockTables, table_width
from slipstream_core.attention.cpu_backend import CpuBackend, CpuContext
from slipstream_core.attention.interface import AttentionContext
from slipstream_core.attention.kv_cache import widest_block
from slipstream_core.attention.torch_backend import Scratch, TorchBackend
from slipstream_core.config import LoraConfig
from slipstream_core.forward.forward_ops import ForwardOps
from slipstream_core.forward.operations import OperationList
from slipstream_core.forward.trace import DecodesInOneCall, Forward, eager, kernels_mix, trace
from slipstream_core.forward.trace_card import trace_for_card
from slipstream_core.kernels.cpu.cpu_threads import Threads
from slipstream_core.kernels.cpu.kernels import kernels
from slipstream_core.load_error import ModelLoadError
from slipstream_core.model.loader import LoadedModel
from slipstream_core.model.quantization import widen_codes
from slipstream_core.runner.cuda_thread import CudaThread
from slipstream_core.runner.decode_graphs import DecodeGraphs, GraphKind
from slipstream_core.runner.draft_model import DraftModel
from slipstream_core.runner.graph_capture import NO_CAPTURE, CaptureConfig, CudaRecorder
from slipstream_core.runner.kv_cache_size import block_bytes
from slipstream_core.runner.mixed_forwards import StaticForward
from slipstream_core.runner.readback import DeviceSpans, EndedStep
from slipstream_core.runner.sample_stage import SampleStage
from slipstream_core.sharding.collectives import (
    all_ranks_say,
    gather_over_ranks,
)
from slipstream_core.states.flat_mixers import mixers_by_kernels
from slipstream_core.states.flat_step import FlatContext, FlatStep
from slipstream_core.states.mixers import MixingContext
from slipstream_core.states.state_pool import StatePool, StateStep
from slipstream_core.step.device_thread import DeviceThread
from slipstream_core.step.drafts import unfold
from slipstream_core.step.plan import (
    NOT_DRAFTED,
    MediaPlan,
    ModelInfo,
    StepFailed,
    StepPlan,
    StepResult,
)
from slipstream_core.step.staging import CardCopies, Copies, Staging, to_device
from slipstream_ipc.arrays import Int32s, Int64s
from slipstream_ipc.telemetry.trace import SpanKind, Tracer

logger = logging.getLogger(__name__)


_STAGING_BYTES = 1 << 20  # for a step's columns; grows on demand
_TOUCHED_BYTES = 4 << 20  # of a layer's keys, between two looks at the clock


@dataclass(frozen=True, slots=True)
class KernelConfig:
    """The kernels of a runner's forwards, the threads that run them, and what is recorded."""

    native: bool = True  # our kernels; else torch's operators
    attention_backend: BackendName = "auto"
    packs: bool = True  # weights are laid out anew for the kernels; else they stay as loaded
    threads: int | None = None  # of a CPU; None: as many as torch has
    capture: CaptureConfig = NO_CAPTURE
    copies: Copies | None = None  # in tests: in place of a card's; a CPU takes a card's path then


class _Inputs(NamedTuple):
    """The inputs of a step's forward."""

    ids: torch.Tensor  # [T]
    positions: torch.Tensor  # [T]
    keep: torch.Tensor  # of the tokens whose logits are wanted
    context: AttentionContext


class TorchRunner:
    """Implements Runner."""

    def __init__(
        self,
        model: LoadedModel,
        *,
        num_blocks: int,
        block_size: int,
        max_num_seqs: int,
        max_row_len: int | None = None,
        tracer: Tracer | None = None,
        kernel_config: KernelConfig = KernelConfig(),
        num_snapshots: int = 0,
        num_draft_states: int = 0,
        lora: LoraConfig | None = None,
        has_predecessor: bool = False,
    ) -> None:
        """Allocate the cache, compile the kernels and record decode steps.

        `max_row_len` is how many tokens a row may have; None: as many as the cache has room for.
        `tracer` is used by the device's thread only. `num_snapshots` is how many copies of a row's
        recurrent states there is room for, `num_draft_states` how many more for drafts. `lora`:
        its adapters; with `has_predecessor` one that cannot be read any more is left out. Raises
        ModelLoadError.
        """
        capture, copies = kernel_config.capture, kernel_config.copies
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
            # a request larger than the whole cache would wait forever
            max_model_len=min(model.max_model_len, (num_blocks - 1) * block_size),
            eos_token_ids=model.eos_token_ids,
            block_bytes=block_bytes(model, block_size),
            block_size=block_size,
            default_sampling=model.default_sampling,
            max_num_seqs=max_num_seqs,
            has_states=bool(model.states),
            caches_answers=not model.is_limited,
            num_snapshots=num_snapshots,
            num_draft_states=num_draft_states,
            media=model.sight.card,
            encoder=model.sight.encoder,
        )
        if model.device.type == "cuda":
            # cuDNN plans on the host for every new shape, and decode steps keep changing shape
            torch.backends.cuda.enable_cudnn_sdp(False)
        self.weight_bytes = sum(weight.nbytes for weight in model.module.parameters())
        self._device = model.device
        self._rank = model.rank
        self._layers = kv_cache.allocate(
            model.geometry,
            num_blocks=num_blocks,
            block_size=block_size,
            dtype=model.dtype,
            device=model.device,
            form=model.cache_format,
        )
        if copies is None and model.device.type == "cuda":
            copies = CardCopies(model.device)
        self._copies = copies
        is_cpu_float32 = model.device.type == "cpu" and model.dtype == torch.float32
        triton = None
        if kernel_config.native or kernel_config.attention_backend == "triton":
            triton = triton_attention(
                model.geometry,
                self._layers,
                block_size=block_size,
                dtype=model.dtype,
                device=model.device,
                model=model.name,
                wanted=kernel_config.attention_backend,
            )
        has_kernels = kernel_config.native and kernel_config.attention_backend == "auto"
        has_kernels &= is_cpu_float32 and triton is None
        self._kernels = kernels() if has_kernels else None
        if model.cache_format != "auto" and self._kernels is None:
            raise ModelLoadError(model.name, _no_codes(model, kernel_config))
        self._attention: AttentionBackend | None
        if triton is not None:
            self._attention = triton
        elif self._kernels is not None:
            self._attention = CpuBackend(self._kernels, self._layers, block_size)
        else:
            scratch = Scratch(model.dtype, model.device)
            self._attention = TorchBackend(self._layers, block_size, scratch)
        self._is_recorded = False
        self._mixes_by_kernels = False
        self._states: StatePool | None = None
        self._mixer_states = model.states
        if model.states:
            self._states = StatePool(
                dict(enumerate(model.states)),
                max_num_seqs,
                model.device,
                num_snapshots=num_snapshots + num_draft_states,
            )
        self._vision = model.sight.vision
        self._sites: dict[str, Site] | None = None if lora is None else {}
        if kernel_config.packs:
            self._model = self._forward_of(model, has_triton=triton is not None)
        else:
            self._model = eager(model.module)
        if model.stepped and not (self._is_recorded or self._mixes_by_kernels):
            self._step_chunks(model)
        self.adapters: AdapterTable | None = None
        if lora is not None:
            self._load_adapters(model, lora, is_left_out=has_predecessor)
        # the rest computes a row otherwise beside others, or cannot take its tokens back
        may_draft = not model.states or num_draft_states > 0
        if copies is None and model.rank is None and may_draft:
            is_exact = isinstance(self._model, DecodesInOneCall) and self._model.has_exact_rows
            self.info = replace(self.info, takes_drafts=is_exact)
        tables_device = self._attention.tables_device
        self._tables = BlockTables(
            max_num_seqs,
            table_width(max_row_len or self.info.max_model_len, block_size),
            tables_device,
            copies if tables_device == model.device else None,
        )
        self._sampling = SampleStage(
            model,
            copies,
            max_num_seqs=max_num_seqs,
            max_model_len=self.info.max_model_len,
            native=kernel_config.native,
            is_recorded=bool(capture.sizes),
        )
        self._tracer = tracer
        self._spans = None  # on a CPU a step ends with its job
        self._staging = None if copies is None else Staging(copies, model.device, _STAGING_BYTES)
        rank = model.rank if model.device.type == "cpu" else None
        share = None if rank is None else (rank.local_index, rank.num_local)
        threads = kernel_config.threads or torch.get_num_threads()
        self._threads = Threads(threads, self._kernels, share)
        self._draft_model = None
        if model.draft is not None:
            self._draft_model = self._with_draft_model(model, model.draft)
        prepare = self._prepare_thread
        self._thread: DeviceThread[StepResult] | CudaThread[StepResult]
        if copies is None:
            self._thread = DeviceThread("device", prepare)
        else:
            self._spans = None if tracer is None else DeviceSpans(tracer)
            self._thread = CudaThread("device", prepare)
        self._graphs: DecodeGraphs | None = None
        if capture.sizes:
            self._on_device(partial(self._record, capture))

    def _forward_of(self, model: LoadedModel, *, has_triton: bool) -> Forward:
        recorded = None
        if self._kernels is not None:
            agree: Callable[[bool], bool] = bool
            if self._rank is not None:
                agree = partial(all_ranks_say, device=self._device)
            traced = partial(
                trace,
                model.module,
                self._kernels,
                model.vocab_size,
                agree,
                states=model.states,
                sites=self._sites,
                keeps_module=model.sight.vision is not None,
            )
            recorded = traced()
            if recorded is None and widen_codes(model.module):
                recorded = traced()
            self._is_recorded = recorded is not None
            if recorded is None and model.states:
                self._mixes_by_kernels = kernels_mix(
                    model.module, self._kernels, model.vocab_size, model.states
                )
        elif not has_triton:
            widen_codes(model.module)
        else:
            recorded = trace_for_card(model.module, ForwardOps(), model.vocab_size, self._device)
        return eager(model.module) if recorded is None else recorded

    def _with_draft_model(self, model: LoadedModel, draft: LoadedModel) -> DraftModel:
        """Raises ModelLoadError where the model's tokens cannot be drafted."""
        if not self.info.takes_drafts:
            raise ModelLoadError(
                model.name,
                f"speculative_config.model is {draft.name!r}, but nothing is drafted of "
                f"{model.name}: {NOT_DRAFTED}",
            )
        assert self._kernels is not None
        self.info = replace(self.info, draft_model_len=draft.max_model_len)
        return DraftModel(
            draft,
            self._kernels,
            self._tables,
            self._threads,
            num_blocks=self.num_blocks,
            block_size=self.info.block_size,
            vocab_size=model.vocab_size,
        )

    def _step_chunks(self, model: LoadedModel) -> None:
        """Say that chunks are slow, and do not have more of them than without a prefix cache."""
        is_off = "; prefix caching is off, as it would cost more than it saves"
        logger.warning(
            "%s: %s, so chunks of a prompt that continue another are computed token by token, "
            "which takes longer%s",
            model.name,
            model.stepped,
            is_off if self.info.num_snapshots else "",
        )
        self.info = replace(self.info, num_snapshots=0)

    def _load_adapters(self, model: LoadedModel, lora: LoraConfig, *, is_left_out: bool) -> None:
        """Read all adapters. Raises ModelLoadError for one that cannot be read, unless those are
        left out.
        """
        if self._kernels is None or not self._is_recorded or self._rank is not None:
            why = "adapters need a model that is computed in float32 on a CPU, in one process, by "
            why += "Slipstream's own kernels, and whose forward pass can be traced"
            raise ModelLoadError(model.name, f"enable_lora: {why}")
        assert self._sites is not None
        if not self._sites:
            raise ModelLoadError(model.name, "enable_lora: it has no linear layer to change")
        self.adapters = AdapterTable(self._kernels, self._sites, lora.max_loras)
        store = FolderAdapters(
            self.adapters,
            self._sites,
            lora.max_rank,
            partial(why_no_site, model.module),
            model.vocab_size,
        )
        served, retired = read_first(model.name, store, lora, is_left_out=is_left_out)
        self.info = replace(
            self.info, adapters=served, retired_adapters=retired, adapter_store=store
        )

    def _prepare_thread(self) -> None:
        """Settings of the device's thread: CUDA's current card is a thread's own."""
        self._threads.prepare()
        if self._device.index is not None:
            torch.cuda.set_device(self._device)

    def launch(self, plan: StepPlan) -> None:
        """Enqueue a step. Returns at once."""
        self._thread.submit(partial(self._run, plan))

    def sample(self, plan: StepPlan, masks: Int32s) -> None:
        """Provide the masks that a launched plan awaits. Returns at once."""
        self._sampling.masks.give(plan.step, masks)

    def collect(self) -> StepResult:
        """Wait for the oldest launched step and return its result. Raises StepFailed."""
        return self._thread.collect()

    def done(self) -> bool:
        """True if collect() would return without waiting."""
        return self._thread.done()

    def fileno(self) -> int:
        """Return a descriptor that is readable while a finished step is not yet collected."""
        return self._thread.fileno()

    def done_at(self) -> None:
        """Return None: the end of a step is not known in advance."""
        return

    @property
    def decode_program(self) -> OperationList | None:
        """The list of operations that decode steps run on a CPU, if they are one call."""
        return self._model.program if isinstance(self._model, DecodesInOneCall) else None

    @property
    def may_slice(self) -> bool:
        """True if plans may be `sliced`; the same on all ranks."""
        return self._sampling.may_slice

    def close(self) -> None:
        """Stop the device's thread and free the cache. Idempotent."""
        self._sampling.masks.close()  # unblocks a step that waits for masks
        self._thread.close()
        if self.info.encoder is not None:
            self.info.encoder.close()
        self._graphs = self._attention = None  # both reference the cache
        self._layers, self._states, self._draft_model = [], None, None
        if self._tracer is not None:
            self._tracer.close()

    def touch_cache(self, within_s: float, clock: Callable[[], float] = time.monotonic) -> int:
        """Write zeros to the cache's blocks, lowest ids first, for `within_s`; returns how many.

        The system gives memory to a page when it is written for the first time. No step may be in
        flight, and no request may have blocks.
        """
        piece = max(1, _TOUCHED_BYTES // widest_block(self._layers))
        end_s, done = clock() + within_s, 0

        def touch() -> None:
            nonlocal done
            while done < self.num_blocks and clock() < end_s:
                blocks = slice(done, done + piece)
                for layer in self._layers:
                    for memory in layer.blocks:
                        memory[blocks].zero_()
                done = min(done + piece, self.num_blocks)

        self._on_device(touch)
        return done

    def bare_replay(self, batch: int, steps: int, *, context: int = 128) -> float:
        """Seconds that `steps` recorded decode steps take without host work between them.

        Each includes greedy sampling with log-probabilities. Overwrites the cache: for benchmarks
        only, with no step in flight. Raises ValueError if no such step is recorded.
        """

        taken: list[float] = []

        def measure() -> None:
            if self._graphs is None:
                raise ValueError("no CUDA graphs are recorded")
            kind = GraphKind(logprobs=True)
            taken.append(self._graphs.bare(batch, context, kind, self.num_blocks, steps))

        self._on_device(measure)
        return taken[0]

    def _on_device(self, work: Callable[[], None]) -> None:
        """Run `work` on the device's thread; no step may be in flight. Raises what it raises."""
        nothing = StepResult(0, np.empty(0, np.int64), None)

        def job() -> Any:
            with torch.inference_mode():
                work()
            return nothing if self._copies is None else EndedStep(nothing, self._copies.record())

        self._thread.submit(job)
        self._thread.collect()

    def _record(self, capture: CaptureConfig) -> None:
        assert self._attention is not None
        backend = self._attention.fixed_shape
        if backend is None or self._copies is None:
            logger.warning("CUDA graphs are disabled: this attention backend has no fixed shapes")
            return
        forward = self._model
        sampling = self._sampling
        if sampling.share is not None:
            forward = _of_all_columns(forward, self.info.vocab_size)
        self._graphs = DecodeGraphs(
            StaticForward(
                forward,
                backend,
                self._layers,
                sampling.last_token,
                self._tables.tensor,
                self.info.block_size,
            ),
            vocab=sampling.vocab,
            copies=self._copies,
            capture=capture,
            whole=sampling.whole,
            logits_processors=sampling.logits_processors,
        )
        free = self._free_bytes()
        agree = None if self._rank is None else partial(all_ranks_say, device=self._device)
        self._graphs.record(capture.recorder or CudaRecorder(self._device), agree)
        if free is not None and (left := self._free_bytes()) is not None:
            logger.info("recorded steps take %.2f GiB of the card", (free - left) / 2**30)

    def _free_bytes(self) -> int | None:
        """Free memory of the card; None on a CPU."""
        if self._device.type != "cuda":
            return None
        return int(torch.cuda.mem_get_info(self._device)[0])

    def _run(self, plan: StepPlan) -> Any:
        begin_ns = time.monotonic_ns()
        try:
            with torch.inference_mode():
                outcome = self._step(plan)
        except (torch.AcceleratorError, StepFailed):
            raise  # after the former the device's context is unusable: the process is replaced
        except Exception as error:
            if self._rank is not None:
                raise
            raise StepFailed(plan.step, error) from error
        finally:
            if self._tracer is not None and self._spans is None:
                self._tracer.add(SpanKind.DEVICE, begin_ns, time.monotonic_ns(), plan.step)
        if self._spans is not None:
            return self._spans.until_done(outcome, begin_ns, plan.step)
        return outcome

    def _step(self, plan: StepPlan) -> Any:
        """Forward, sample, store the last tokens and copy them to the host.

        Runs on the device's thread. Returns a StepResult; with `copies`, the work is enqueued and a
        PendingStep is returned.
        """
        if plan.proposals is not None:
            assert self._draft_model is not None
            self._tables.append(plan)
            return self._draft_model.foresee(plan)
        graphs = self._graphs if self._graphs is not None and self._graphs.takes(plan) else None
        if graphs is None or not graphs.takes_entries(plan):
            self._tables.append(plan)
        drafts, whole = None, None
        if plan.draft_lens is not None:
            drafts, whole = unfold(plan), plan
            plan = drafts.plan
        if self._device.type == "cpu":
            is_list = self._is_recorded and plan.num_decodes == len(plan.kv_lens)
            self._threads.begin_forward(is_list=is_list)
        logits = self._forward(plan, whole) if graphs is None else graphs.forward(plan)
        if self._device.type == "cpu":
            self._threads.end_forward()
        return self._sampling.result_of(plan, logits, graphs, drafts)

    def _forward(self, plan: StepPlan, whole: StepPlan | None = None) -> torch.Tensor:
        """Logits of the sampled rows' last tokens, [S, vocab] in the model's dtype.

        The logits of the plan's `prompt` positions, if any, are appended. whole: the plan before
        its drafts became rows, if it has some; states are of its rows.
        """
        assert self._attention is not None
        order = self._attention.order(plan)
        tokens, kept = order.tokens, order.last[plan.samples]
        if plan.prompt is not None:  # prefill tokens keep the plan's positions in either order
            kept = np.concatenate([kept, plan.prompt.tokens])
        positions_of = plan.positions
        if plan.rope_deltas.any():
            positions_of = positions_of + np.repeat(plan.rope_deltas, plan.query_lens)
        ids, sources, positions, keep = self._sent(
            plan.token_ids[tokens], plan.gather_slots[tokens], positions_of[tokens], kept
        )
        ids = torch.where(sources < 0, ids, self._sampling.last_token[sources.clamp(min=0)])
        context = self._attention.of_plan(plan, order, self._tables)
        if plan.media is not None:
            inputs = _Inputs(ids, positions, keep, context)
            return self._with_images(inputs, plan.media, order.tokens)
        if self.adapters is not None:
            assert isinstance(context, CpuContext)
            of_tokens = np.repeat(plan.adapters, plan.query_lens)
            context.adapters = self.adapters.of_step(of_tokens, of_tokens[kept])
        if self._states is not None:
            context = self._with_mixers(context, self._states, whole or plan, order.rows)
        return self._model(ids[None], positions[None], keep, context)[0]

    def _with_images(self, inputs: _Inputs, media: MediaPlan, tokens: Selector) -> torch.Tensor:
        """The logits of a step with images, by the model's own module. tokens: the plan's, in the
        order of the inputs.
        """
        assert self._vision is not None
        at = media.tokens
        if not isinstance(tokens, slice):
            places = np.empty(len(tokens), np.int64)
            places[tokens] = np.arange(len(tokens))
            at = places[at]
            if media.rope is not None:
                media = structs.replace(media, rope=np.ascontiguousarray(media.rope[:, tokens]))
        return self._vision.forward(*inputs, media, torch.from_numpy(at))

    def _sent(self, *columns: npt.NDArray[np.generic]) -> Sequence[torch.Tensor]:
        """The columns as device tensors; with staging, one copy moves all of them."""
        if self._staging is None:
            return [self._to(column) for column in columns]
        return self._staging.send_columns(columns)

    def _with_mixers(
        self, attention: AttentionContext, pool: StatePool, plan: StepPlan, rows: Selector
    ) -> AttentionContext:
        """The context of a model that has mixers, which find the plan's rows in it."""
        of_rows = _rows_of_states(pool, plan, rows)
        if self._kernels is None or not (self._is_recorded or self._mixes_by_kernels):
            step = StateStep(pool, **of_rows, num_decodes=plan.num_decodes)
            return MixingContext(attention, step)
        flat = FlatStep(self._kernels, pool, **of_rows)
        if self._is_recorded:
            return FlatContext(attention, flat)
        return MixingContext(attention, mixers_by_kernels(self._mixer_states, flat))

    def _to(self, column: npt.NDArray[np.generic]) -> torch.Tensor:
        return to_device(column, self._device)


def _rows_of_states(pool: StatePool, plan: StepPlan, rows: Selector) -> dict[str, Any]:
    """The plan's rows for mixers, in the model's order, as StateStep takes them; loads the
    snapshots that it names, and saves states in front of it.
    """
    query_lens, slots = plan.query_lens[rows], plan.slots
    reads: Int64s | None = None
    saves: dict[int, list[tuple[int, int]]] = {}
    if (snapshots := plan.snapshots) is not None:
        if len(snapshots.loads):
            pool.load(torch.from_numpy(snapshots.load_slots), torch.from_numpy(snapshots.loads))
        if len(snapshots.front_saves):
            places, saves_in_front = snapshots.front_places, snapshots.front_saves
            pool.save(torch.from_numpy(places), torch.from_numpy(saves_in_front))
        columns = (snapshots.save_rows, snapshots.save_lens, snapshots.saves)
        for row, length, snapshot in zip(*(each.tolist() for each in columns), strict=True):
            # a chunk has the same number in the model's order
            saves.setdefault(row, []).append((length, snapshot))
        if (alternation := snapshots.alternation) is not None:
            reads, slots = slots.astype(np.int64), slots.astype(np.int64)
            reads[alternation.rows] = alternation.reads
            slots[alternation.rows] = alternation.writes
            reads = reads[rows]
    return {
        "slots": slots[rows],
        "reads": reads,
        "query_lens": query_lens,
        "starts": plan.kv_lens[rows] - query_lens,
        "prompt_lens": plan.prompt_lens[rows],
        "saves": saves,
    }


def _of_all_columns(forward: Forward, width: int) -> Forward:
    """A forward of a rank's columns of the logits, and behind it the exchange of all `width`."""

    def whole(
        ids: torch.Tensor, positions: torch.Tensor, keep: torch.Tensor, context: AttentionContext
    ) -> torch.Tensor:
        return gather_over_ranks(forward(ids, positions, keep, context), width)

    return whole


def _no_codes(model: LoadedModel, config: KernelConfig) -> str:
    """The reason why a cache of codes is not served."""
    if model.device.type != "cpu":
        why = "a card's kernels read keys and values in the model's dtype alone"
    elif model.dtype != torch.float32:
        why = f"the model computes in {str(model.dtype).removeprefix('torch.')}, not in float32"
    elif not config.native or config.attention_backend != "auto":
        why = (
            "native is false or attention_backend is not auto, and torch's operators read no codes"
        )
    else:
        why = "the C kernels, which read them, cannot be compiled here"
    return f"kv_cache_dtype is {model.cache_format!r}, but {why}; allowed here: auto"
