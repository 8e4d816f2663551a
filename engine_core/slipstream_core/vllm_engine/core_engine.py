"""vLLM's engine core, as a core is built over it."""

from __future__ import annotations

from typing import Any

from slipstream_core.config import CoreConfig
from slipstream_core.grammar.bitmasks import GrammarBitmasks
from slipstream_core.scheduler.logprob_budget import LogprobBudget
from slipstream_core.scheduler.scheduling import Scheduling
from slipstream_core.step.plan import TurnRunner
from slipstream_core.vllm_engine.runner import VllmRunner, load
from slipstream_core.vllm_engine.settings import import_vllm
from slipstream_core.vllm_engine.vllm_scheduler import VllmScheduler
from slipstream_ipc.history.token_log import TokenLog


class VllmEngine:
    """Implements CoreEngine."""

    def import_modules(self, _config: CoreConfig, *, is_awaited: bool = False) -> None:
        import_vllm()

    def with_defaults(self, config: CoreConfig) -> CoreConfig:
        return config  # vLLM has its own

    def load(self, config: CoreConfig) -> TurnRunner[Any]:
        return load(config)

    def scheduler(
        self,
        config: CoreConfig,
        runner: TurnRunner[Any],
        tokens: TokenLog,
        logprob_budget: LogprobBudget,
        _grammars: GrammarBitmasks,
    ) -> Scheduling[Any]:
        assert isinstance(runner, VllmRunner)
        most = runner.info.max_num_seqs or config.max_num_seqs
        return VllmScheduler(tokens, runner, most, logprob_budget)
