"""vLLM as far as the adapter knows it: its modules, and an engine core that computes ids by a rule.

A token depends on the prompt, the outputs before it, what the parameters say and the seed, and on
where the prompt ends: outputs that came as a part of the prompt would be followed by others. What
happens in an engine is put into `EngineCore.plan`: preemptions, several tokens, failures.
"""

from __future__ import annotations

import enum
import json
import sys
from collections import deque
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

VERSION = "0.32.0"
MAX_NUM_SEQS = 4
NUM_BLOCKS, BLOCK_SIZE = 512, 16
EOS = 2


class FinishReason(enum.IntEnum):
    """As vLLM's."""

    STOP = 0
    LENGTH = 1
    ABORT = 2
    ERROR = 3

    def __str__(self) -> str:
        return self.name.lower()


class SamplingParams(SimpleNamespace):
    """As vLLM's, but that nothing is derived."""

    extra_args: dict[str, Any] | None = None
    _bad_words_token_ids: list[list[int]] | None = None

    def verify(self, model_config: Any, *_others: Any) -> None:
        if self.logit_bias and any(i >= model_config.get_vocab_size() for i in self.logit_bias):
            raise ValueError("logit_bias contains out-of-vocab token ids")


@dataclass
class Request:
    """A request in the engine."""

    id: str
    prompt: list[int]
    params: SamplingParams
    salt: str | None
    priority: int
    outputs: list[int] = field(default_factory=list)
    lora: int = 0  # the number of its adapter; 0: none
    num_computed: int = 0
    was_preempted: bool = False
    is_new: bool = True
    is_prefill_chunk: bool = False

    def append_output_token_ids(self, token_ids: list[int]) -> None:
        self.outputs += token_ids

    def next_id(self, vocab_size: int) -> int:
        tokens, params = self.prompt + self.outputs, self.params
        seed = params.seed or 0
        mixed = 31 * tokens[-1] + 7 * len(tokens) + 101 * len(self.prompt) + 13 * (seed % 997)
        mixed += int(17 * params.frequency_penalty) * sum(self.outputs) + 41 * self.lora
        return 5 + mixed % (vocab_size - 5)


@dataclass
class LoRARequest:
    """As vLLM's."""

    lora_name: str
    lora_int_id: int
    lora_path: str = ""


class _Scheduler:
    def __init__(self, core: EngineCore) -> None:
        self._core = core
        self.requests: dict[str, Request] = {}
        pool = SimpleNamespace(get_num_free_blocks=lambda: NUM_BLOCKS - len(self.requests) - 1)
        self.kv_cache_manager = SimpleNamespace(block_pool=pool)

    def schedule(self, _throttle: bool = False) -> Any:
        resumed = {each.id for each in self.requests.values() if each.was_preempted}
        some = sorted(self.requests.values(), key=lambda each: each.priority)[:MAX_NUM_SEQS]
        nums = {}
        for each in some:
            each.was_preempted = False
            left = len(each.prompt) + len(each.outputs) - each.num_computed
            nums[each.id] = min(left, self._core.chunk_len)
            each.is_prefill_chunk = nums[each.id] < left
        return SimpleNamespace(
            num_scheduled_tokens=nums,
            total_num_scheduled_tokens=sum(nums.values()),
            scheduled_cached_reqs=SimpleNamespace(resumed_req_ids=resumed),
            has_structured_output_requests=False,
        )

    def get_grammar_bitmask(self, scheduled: Any) -> Any:
        raise AssertionError("vLLM's own grammars are not asked")

    def update_from_output(self, scheduled: Any, output: Any) -> dict[int, Any]:
        made = []
        for at, (request_id, num) in enumerate(scheduled.num_scheduled_tokens.items()):
            request = self.requests[request_id]
            request.num_computed += num
            new = output.sampled_token_ids[at]
            if not new:
                continue
            made.append(self._core.output_of(request, new))
            if made[-1].finish_reason is not None:
                del self.requests[request_id]
        return {0: SimpleNamespace(outputs=made)}


class EngineCore:
    """vLLM's engine core. plan: functions of the core, called at the start of each step."""

    latest: EngineCore

    def __init__(self, vllm_config: Any, _executor: Any, log_stats: bool) -> None:
        self.vllm_config, self.model_executor = vllm_config, self
        self.vocab_size = vllm_config.model_config.get_vocab_size()
        self.chunk_len = 64
        self.num_tokens = 1  # of each row in a step
        self.cached: dict[str, int] = {}  # tokens by prompt, of those that were computed
        self.ends_with: dict[int, FinishReason] = {}  # requests, by their first prompt id
        self.plan: deque[Any] = deque()
        self.batches: list[list[str]] = []  # ids of each step
        self.began: list[Request] = []
        self.loras: dict[int, LoRARequest] = {}
        self.step_fn = self.step
        self.scheduler = _Scheduler(self)
        type(self).latest = self

    def preprocess_add_request(self, made: Any) -> tuple[Request, int]:
        prompt, lora = list(made.prompt_token_ids), made.lora_request
        assert lora is None or self.loras[lora.lora_int_id] is lora
        request = Request(
            made.request_id, prompt, made.sampling_params, made.cache_salt, made.priority
        )
        request.lora = 0 if lora is None else self.content_of(lora)
        return request, 0

    def content_of(self, lora: LoRARequest) -> int:
        """What an adapter changes: a number for its folder's configuration."""
        config = json.loads((Path(lora.lora_path) / "adapter_config.json").read_text())
        return int(config["lora_alpha"])

    def add_lora(self, lora: LoRARequest) -> bool:
        assert self.vllm_config.lora_config.enable_lora
        assert lora.lora_int_id not in self.loras, "a number is used once"
        if self.content_of(lora) > 100:
            raise ValueError("LoRA rank 101 is greater than max_lora_rank 16.\nand more lines")
        self.loras[lora.lora_int_id] = lora
        return True

    def remove_lora(self, lora_id: int) -> bool:
        return self.loras.pop(lora_id, None) is not None

    def add_request(self, request: Request, _wave: int) -> None:
        assert request.id not in {each.id for each in self.began}, "an id is used once"
        self.began.append(request)
        self.scheduler.requests[request.id] = request

    def abort_requests(self, ids: list[str]) -> None:
        for request_id in ids:
            self.scheduler.requests.pop(request_id, None)

    def preempt(self) -> None:
        """Preempt the last request: it computes all of its tokens anew."""
        request = list(self.scheduler.requests.values())[-1]
        request.num_computed, request.was_preempted = 0, True

    def step(self) -> tuple[dict[int, Any], bool]:
        if self.plan and (event := self.plan.popleft()) is not None:
            event(self)
        if not self.scheduler.requests:
            return {}, False
        scheduled = self.scheduler.schedule()
        grammar = self.scheduler.get_grammar_bitmask(scheduled)
        assert (grammar is None) or scheduled.has_structured_output_requests
        masks = {}
        if grammar is not None:
            masks = dict(
                zip(grammar.structured_output_request_ids, grammar.grammar_bitmask, strict=True)
            )
        ids = list(scheduled.num_scheduled_tokens)
        self.batches.append(ids)
        sampled = [self._sample(self.scheduler.requests[each], masks.get(each)) for each in ids]
        flat = [token_id for tokens in sampled for token_id in tokens]
        logprobs = None
        if any(self.scheduler.requests[each].params.logprobs is not None for each in ids):
            logprobs = SimpleNamespace(
                logprobs=-np.array(flat, np.float32)[:, None]
                / (1 + np.arange(6, dtype=np.float32)),
                logprob_token_ids=np.array(flat, np.int32)[:, None] + np.arange(6, dtype=np.int32),
                sampled_token_ranks=np.array(flat, np.int32) % 3 + 1,
                cu_num_generated_tokens=np.cumsum([0, *map(len, sampled)]).tolist(),
            )
        output = SimpleNamespace(
            req_id_to_index={each: i for i, each in enumerate(ids)},
            sampled_token_ids=sampled,
            logprobs=logprobs,
        )
        return self.scheduler.update_from_output(scheduled, output), True

    def _sample(self, request: Request, mask: Any) -> list[int]:
        if request.is_prefill_chunk:
            return []
        sampled: list[int] = []
        for _ in range(self.num_tokens):
            token_id = request.next_id(self.vocab_size)
            if mask is not None:
                bits = np.unpackbits(mask.view(np.uint8), bitorder="little")[: self.vocab_size]
                allowed = np.flatnonzero(bits)
                token_id = int(allowed[token_id % len(allowed)])
            request.outputs.append(token_id)
            sampled.append(token_id)
            if self._reason(request) is not None:
                break
        return sampled

    def _reason(self, request: Request) -> FinishReason | None:
        params, num = request.params, len(request.outputs)
        if request.outputs[-1] in params.stop_token_ids and num >= params.min_tokens:
            return FinishReason.STOP
        if num > 2 and request.prompt[0] in self.ends_with:
            return self.ends_with[request.prompt[0]]
        return FinishReason.LENGTH if num >= params.max_tokens else None

    def output_of(self, request: Request, new: list[int]) -> Any:
        stats = scores = None
        if request.is_new:
            request.is_new = False
            key = f"{request.salt} {request.prompt}"
            stats = SimpleNamespace(num_cached_tokens=self.cached.get(key, 0))
            self.cached[key] = len(request.prompt) // BLOCK_SIZE * BLOCK_SIZE
            if request.params.prompt_logprobs is not None:
                ids = torch.tensor(request.prompt[1:])[:, None]
                scores = SimpleNamespace(
                    logprobs=-ids.float().repeat(1, 1 + request.params.prompt_logprobs),
                    logprob_token_ids=ids.repeat(1, 1 + request.params.prompt_logprobs),
                    selected_token_ranks=torch.ones(len(ids), dtype=torch.int64),
                )
        return SimpleNamespace(
            request_id=request.id,
            new_token_ids=new,
            finish_reason=self._reason(request),
            prefill_stats=stats,
            new_prompt_logprobs_tensors=scores,
        )

    def post_step(self, _has_executed: bool) -> None: ...
    def shutdown(self) -> None: ...


@dataclass
class EngineArgs:
    """The fields that the adapter sets, and one that it does not."""

    model: str = ""
    dtype: str = "auto"
    max_model_len: int | None = None
    max_num_seqs: int | None = None
    max_num_batched_tokens: int | None = None
    enforce_eager: bool = False
    enable_prefix_caching: bool = True
    gpu_memory_utilization: float = 0.9
    num_gpu_blocks_override: int | None = None
    max_logprobs: int = 20
    trust_remote_code: bool = False
    hf_overrides: Any = None
    generation_config: str = "auto"
    override_generation_config: Any = None
    scheduling_policy: str = "fcfs"
    disable_log_stats: bool = False
    async_scheduling: bool | None = None
    worker_extension_cls: str = ""
    kv_cache_memory_bytes: int | None = None
    enable_lora: bool = False
    max_loras: int = 1
    max_lora_rank: int = 16
    max_cpu_loras: int | None = None
    speculative_config: Any = None
    vocab_size: int = 997  # of this module alone

    def create_engine_config(self, _usage: Any) -> Any:
        if self.dtype == "float16":
            raise ValueError("float16 is not for this device\nand more lines")
        model = SimpleNamespace(
            get_vocab_size=lambda: self.vocab_size,
            max_model_len=self.max_model_len or 256,
            get_diff_sampling_param=lambda: {"temperature": 0.7, "max_tokens": 9},
            try_get_generation_config=lambda: {"eos_token_id": [EOS]},
        )
        drafts = self.speculative_config
        return SimpleNamespace(
            model_config=model,
            cache_config=SimpleNamespace(num_gpu_blocks=NUM_BLOCKS, block_size=BLOCK_SIZE),
            scheduler_config=SimpleNamespace(
                max_num_seqs=MAX_NUM_SEQS, async_scheduling=bool(self.async_scheduling)
            ),
            speculative_config=None if drafts is None else SimpleNamespace(**drafts),
            structured_outputs_config=None,
            lora_config=self,
        )


def install(monkeypatch: pytest.MonkeyPatch, version: str = VERSION) -> None:
    """Put these modules where vLLM's would be."""
    context = SimpleNamespace(OPENAI_API_SERVER="server")
    modules: dict[str, dict[str, Any]] = {
        "vllm": {"SamplingParams": SamplingParams},
        "vllm.version": {"__version__": version},
        "vllm.engine": {},
        "vllm.engine.arg_utils": {"EngineArgs": EngineArgs},
        "vllm.lora": {},
        "vllm.lora.request": {"LoRARequest": LoRARequest},
        "vllm.platforms": {"current_platform": SimpleNamespace(is_cpu=lambda: True)},
        "vllm.usage": {},
        "vllm.usage.usage_lib": {"UsageContext": context},
        "vllm.v1": {},
        "vllm.v1.core": {},
        "vllm.v1.core.sched": {},
        "vllm.v1.core.sched.output": {"GrammarOutput": SimpleNamespace},
        "vllm.v1.engine": {"EngineCoreRequest": SimpleNamespace},
        "vllm.v1.engine.core": {"EngineCore": EngineCore},
        "vllm.v1.executor": {"Executor": SimpleNamespace(get_class=lambda _config: None)},
    }
    for name, content in modules.items():
        module = ModuleType(name)
        module.__dict__.update(content)
        monkeypatch.setitem(sys.modules, name, module)
