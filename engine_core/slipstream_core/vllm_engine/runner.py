"""Runs vLLM's engine core on a thread of its own, a turn for each step that the loop launches.

- Everything that touches vLLM's scheduler runs on that thread. The loop's thread only queues turns,
  aborts and masks.
- vLLM's model, scheduler and cache are as its own server makes them; of its engine core, the
  scheduler's `schedule`, `update_from_output` and `get_grammar_bitmask` are wrapped.
"""

from __future__ import annotations

import logging
import sys
from collections import deque
from dataclasses import replace
from typing import Any

from slipstream_core.adapters.first_adapters import as_left, read_first
from slipstream_core.config import CoreConfig, LoraConfig
from slipstream_core.load_error import ModelLoadError
from slipstream_core.step.awaited_masks import AwaitedMasks
from slipstream_core.step.device_thread import DeviceThread
from slipstream_core.step.plan import ModelInfo, StepFailed, StepResult
from slipstream_core.vllm_engine import settings
from slipstream_core.vllm_engine.adapters import VllmAdapters
from slipstream_core.vllm_engine.engine_requests import Objections
from slipstream_core.vllm_engine.masks import grammar_output
from slipstream_core.vllm_engine.resume import begin
from slipstream_core.vllm_engine.turn import VllmTurn, result_of
from slipstream_ipc.arrays import Int32s
from slipstream_ipc.messages import SamplingDefaults

logger = logging.getLogger(__name__)

# how long vLLM's thread may hold the GIL while the loop's wants it, in seconds; by default 5 ms
_SWITCH_S = 0.0002


class VllmRunner:
    """Implements TurnRunner over vLLM's `EngineCore`.

    objections: what vLLM cannot compute. num_preemptions: requests that vLLM has preempted.
    """

    def __init__(self, core: Any, info: ModelInfo, version: str) -> None:
        """version: vLLM's."""
        self.info, self._core = info, core
        config = core.vllm_config
        self.num_blocks: int = config.cache_config.num_gpu_blocks
        self.objections = Objections(config, version)
        drafts = config.speculative_config
        self.max_tokens_per_turn = 1 + (0 if drafts is None else drafts.num_speculative_tokens)
        self.num_preemptions = 0
        self._pool = core.scheduler.kv_cache_manager.block_pool
        self._aborted: deque[str] = deque()  # ids to abort at the start of the next turn
        self._masks = AwaitedMasks()
        self._launched: deque[VllmTurn] = deque()
        # on vLLM's thread: the turn that runs, and the output that it was given for it
        self._turn: VllmTurn | None = None
        self._model_output: Any = None
        self._wrap(core.scheduler)
        self._thread: DeviceThread[StepResult] = DeviceThread("vllm", lambda: None)
        self.adapters = VllmAdapters(core, self._thread.call)

    @property
    def num_free_blocks(self) -> int:
        """Blocks that no request of vLLM's holds."""
        return int(self._pool.get_num_free_blocks())

    def abort(self, request_id: str) -> None:
        """Abort a request at the start of the next turn."""
        self._aborted.append(request_id)

    def load_adapters(self, lora: LoraConfig, *, is_left_out: bool) -> None:
        """Let vLLM read all adapters. Raises ModelLoadError for one that it cannot have, unless
        those are left out.
        """
        served, retired = read_first(self.info.name, self.adapters, lora, is_left_out=is_left_out)
        self.info = replace(
            self.info, adapters=served, retired_adapters=retired, adapter_store=self.adapters
        )

    def launch(self, plan: VllmTurn) -> None:
        """Queue a turn."""
        self._launched.append(plan)
        self._thread.submit(lambda: self._run(plan))

    def sample(self, plan: VllmTurn, masks: Int32s) -> None:
        """Pass the masks of a turn's `masked_ids`, [G, ceil(vocab / 32)]."""
        self._masks.give(plan.step, masks)

    def collect(self) -> StepResult:
        """Wait for the oldest turn and return its tokens. Raises StepFailed."""
        turn = self._launched.popleft()
        try:
            return self._thread.collect()
        except Exception as error:
            raise StepFailed(turn.step, error) from error

    def done(self) -> bool:
        """True if collect() would return without waiting."""
        return self._thread.done()

    def fileno(self) -> int:
        """A descriptor that is readable while a finished turn waits to be collected."""
        return self._thread.fileno()

    def done_at(self) -> None:
        """A turn's end is not known ahead."""
        return

    def close(self) -> None:
        """Stop the thread and vLLM's executor. Idempotent."""
        self._masks.close()
        self._thread.close()
        if self._core is not None:
            self._core.shutdown()
            self._core = None

    def _run(self, turn: VllmTurn) -> StepResult:
        """A turn of vLLM's loop, on its thread."""
        core = self._core
        aborted = [self._aborted.popleft() for _ in range(len(self._aborted))]
        if aborted:
            core.abort_requests(aborted)
        for made in turn.begins:
            begin(core, made)
        self._turn, self._model_output = turn, None
        outputs, has_executed = core.step_fn()
        core.post_step(has_executed)
        every = [out for each in (outputs or {}).values() for out in each.outputs]
        return result_of(turn, every, self._model_output)

    def _wrap(self, scheduler: Any) -> None:
        schedule, update = scheduler.schedule, scheduler.update_from_output

        def scheduled(*args: Any, **kwargs: Any) -> Any:
            output = schedule(*args, **kwargs)
            if self._turn is not None and self._turn.masked_ids:
                output.has_structured_output_requests = True  # so that the sampler takes masks
            self.num_preemptions += len(output.scheduled_cached_reqs.resumed_req_ids)
            return output

        def updated(scheduled: Any, model_output: Any) -> Any:
            self._model_output = model_output
            if self._turn is not None:
                self._turn.num_tokens = scheduled.total_num_scheduled_tokens
            return update(scheduled, model_output)

        def bitmask(scheduled: Any) -> Any:
            assert self._turn is not None
            return grammar_output(self._masks, self._turn, scheduled, scheduler.requests)

        scheduler.schedule, scheduler.update_from_output = scheduled, updated
        scheduler.get_grammar_bitmask = bitmask


def load(config: CoreConfig) -> VllmRunner:
    """Build vLLM's engine core for a core's settings. Raises ModelLoadError."""
    version = settings.version_of_vllm(config.model)
    settings.set_threads(config.threads)
    sys.setswitchinterval(_SWITCH_S)
    from vllm.engine.arg_utils import EngineArgs
    from vllm.platforms import current_platform
    from vllm.usage.usage_lib import UsageContext
    from vllm.v1.engine.core import EngineCore
    from vllm.v1.executor import Executor

    args = settings.engine_args(config, is_cpu=current_platform.is_cpu())
    settings.check_names(config.model, args, EngineArgs)
    try:
        vllm_config = EngineArgs(**args).create_engine_config(UsageContext.OPENAI_API_SERVER)
        core = EngineCore(vllm_config, Executor.get_class(vllm_config), log_stats=False)
    except (ValueError, RuntimeError, OSError) as error:
        refusal = settings.refusal(error)
        raise ModelLoadError(config.model, f"vLLM {version}: {refusal}") from error
    logger.info(
        "vLLM %s: executor %s, asynchronous scheduling %s, runner V%d",
        version,
        type(core.model_executor).__name__,
        "on" if vllm_config.scheduler_config.async_scheduling else "off",
        2 if getattr(vllm_config, "use_v2_model_runner", False) else 1,
    )
    runner = VllmRunner(core, _info(config, vllm_config, version), version)
    if config.lora is not None:
        try:
            runner.load_adapters(
                as_left(config, config.lora), is_left_out=config.predecessor_ended_s > 0
            )
        except ModelLoadError:
            runner.close()
            raise
    return runner


def _info(config: CoreConfig, vllm_config: Any, version: str) -> ModelInfo:
    model = vllm_config.model_config
    given = model.get_diff_sampling_param()
    return ModelInfo(
        name=config.model,
        vocab_size=model.get_vocab_size(),
        max_model_len=model.max_model_len,
        eos_token_ids=_eos_token_ids(model),
        block_bytes=0,
        block_size=vllm_config.cache_config.block_size,
        default_sampling=SamplingDefaults(
            **{n: given[n] for n in SamplingDefaults.__struct_fields__ if given.get(n) is not None}
        ),
        max_num_seqs=vllm_config.scheduler_config.max_num_seqs,
        max_logprobs=settings.max_logprobs(config),
        engine=f"vllm {version}",
    )


def _eos_token_ids(model: Any) -> tuple[int, ...]:
    """The ids that end an answer, by the model's generation_config.json or its config.json."""
    given = (model.try_get_generation_config() or {}).get("eos_token_id")
    if given is None:
        given = getattr(model.hf_text_config, "eos_token_id", None)
    if given is None:
        return ()
    return (given,) if isinstance(given, int) else tuple(given)
