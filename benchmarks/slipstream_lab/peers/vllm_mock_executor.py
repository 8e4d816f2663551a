"""An executor for vLLM that computes nothing, so that its servers can be measured without a model.

    PYTHONPATH=slipstream_lab/peers VENV/bin/python -m vllm.entrypoints.openai.api_server \
        --model FOLDER --distributed-executor-backend vllm_mock_executor.MockExecutor

(`slipstream bench compare ceiling --vllm-python VENV/bin/python` calls it.) vLLM keeps all of its
own processes: API servers, its engine core with scheduler and block pool, and their sockets.
Only the worker and its model are missing: a step's tokens are there at once, and are those of a
text that every Python has, from a place of the request's own. Steps are scheduled ahead, as on a
GPU.
"""

from __future__ import annotations

from concurrent.futures import Future
from itertools import count
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

import torch
from tokenizers import Tokenizer
from vllm.v1.executor.abstract import Executor
from vllm.v1.kv_cache_interface import FullAttentionSpec
from vllm.v1.outputs import ModelRunnerOutput

_MEMORY_BYTES = 2**28  # of blocks that are only numbers: 4 million tokens
_STRIDE = 1_009  # tokens between the places where two requests begin
_BLOCK_SIZE = 16


class MockExecutor(Executor):
    """Says at once which tokens a step has sampled."""

    def _init_executor(self) -> None:
        file = Path(self.model_config.tokenizer) / "tokenizer.json"
        text = "\n\n".join(topics[name] for name in sorted(topics))
        self._ids = Tokenizer.from_file(str(file)).encode(text[:400_000]).ids
        self._numbers = count()
        self._left: dict[str, int] = {}  # tokens of the prompt that no step has had
        self._next: dict[str, int] = {}  # place in the text
        self._output = ModelRunnerOutput([], {})

    def execute_model(self, scheduler_output: Any, non_block: bool = False) -> Any:
        """Nothing is computed; `sample_tokens` gives the result."""
        for request_id in scheduler_output.finished_req_ids:
            self._left.pop(request_id, None)
            self._next.pop(request_id, None)
        for request in scheduler_output.scheduled_new_reqs:
            self._left[request.req_id] = len(request.prompt_token_ids) - request.num_computed_tokens
            self._next[request.req_id] = next(self._numbers) * _STRIDE
        scheduled = scheduler_output.num_scheduled_tokens
        sampled = [self._sampled(*one) for one in scheduled.items()]
        names = list(scheduled)
        self._output = ModelRunnerOutput(
            names, dict(zip(names, range(len(names)), strict=True)), sampled
        )
        # a step without tokens is not sampled
        return _done(None if scheduled else self._output, non_block)

    def sample_tokens(self, grammar_output: Any, non_block: bool = False) -> Any:
        """The tokens of the step that `execute_model` was last called with."""
        assert grammar_output is None
        return _done(self._output, non_block)

    def _sampled(self, request_id: str, num_tokens: int) -> list[int]:
        left = self._left[request_id]
        if left > 0:
            self._left[request_id] = left = left - num_tokens
            if left > 0:
                return []
        at = self._next[request_id]
        self._next[request_id] = at + 1
        return [self._ids[at % len(self._ids)]]

    # ---- starting and stopping -------------------------------------------------------------------

    @property
    def supported_tasks(self) -> tuple[str, ...]:
        """Generating text."""
        return ("generate",)

    def get_kv_cache_specs(self) -> list[dict[str, Any]]:
        """One layer with small heads."""
        layer = FullAttentionSpec(
            block_size=_BLOCK_SIZE, num_kv_heads=1, head_size=16, dtype=torch.float16
        )
        return [{"layers.0": layer}]

    def get_supported_kv_cache_layouts(self) -> list[list[str]]:
        """Any will do."""
        from vllm.v1.kv_cache_interface import KVCacheLayout

        return [[layout.name for layout in KVCacheLayout]]

    def determine_available_memory(self) -> list[int]:
        """In bytes."""
        return [_MEMORY_BYTES]

    def collective_rpc(self, method: Any, *_more: Any, **_options: Any) -> list[Any]:
        """There is no worker to ask."""
        return [None]

    def initialize_from_config(self, kv_cache_configs: Any) -> None:
        """Allocate nothing."""

    def compile_or_warm_up_model(self) -> None:
        """Compile nothing."""

    def check_health(self) -> None:
        """Always healthy."""

    @classmethod
    def supports_async_scheduling(cls) -> bool:
        """As executors of GPUs do."""
        return True


def _done(value: Any, non_block: bool) -> Any:
    if not non_block:
        return value
    future: Future[Any] = Future()
    future.set_result(value)
    return future
