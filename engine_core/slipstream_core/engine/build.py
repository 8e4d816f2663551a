"""Assembles an engine core from its parts.

Nothing here depends on processes or signals, so benchmarks and tests build the same core
in-process. `engine_of` alone asks which engine computes: all other parts know the protocols
`Scheduling` and `TurnRunner`.
"""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import zmq

from slipstream_core.adapters.names_file import read_names
from slipstream_core.config import CoreConfig
from slipstream_core.drafting.answer_memory import AnswerMemory
from slipstream_core.drafting.drafter import Drafter
from slipstream_core.drafting.model_drafter import ModelDrafter
from slipstream_core.drafting.ngram_drafter import NgramDrafter
from slipstream_core.drafting.prediction_drafter import PredictionDrafter
from slipstream_core.drafting.step_costs import StepCosts
from slipstream_core.drafting.suffix_drafter import SuffixDrafter
from slipstream_core.engine.engine import Engine
from slipstream_core.grammar.bitmasks import GrammarBitmasks
from slipstream_core.grammar.compiler import GrammarCompiler
from slipstream_core.grammar.grammar_drafter import GrammarDrafter
from slipstream_core.grammar.llguidance_backend import Vocabulary
from slipstream_core.media.preparer import MediaPreparer
from slipstream_core.model.fingerprint import fingerprint_of
from slipstream_core.model.host_memory import read_host_memory
from slipstream_core.model.tokenizer_file import find_tokenizer
from slipstream_core.runner.factory import import_runner, load_runner, with_device_defaults
from slipstream_core.scheduler.engine_counters import EngineCounters
from slipstream_core.scheduler.logprob_budget import LogprobBudget
from slipstream_core.scheduler.scheduler import CacheConfig, Scheduler
from slipstream_core.scheduler.scheduling import Scheduling
from slipstream_core.step.plan import NOT_DRAFTED, ModelInfo, TurnRunner
from slipstream_core.workers.adapter_changes import AdapterChanges
from slipstream_core.workers.adapters import Adapters
from slipstream_core.workers.admission import Admission
from slipstream_core.workers.crash_note_writer import CrashNote, Succession, begin_note
from slipstream_core.workers.handler import WorkerHandler
from slipstream_core.workers.kept_answers import KeptAnswersByWorker
from slipstream_core.workers.pending import PendingAdmissions
from slipstream_core.workers.sender import CoreAcceptor
from slipstream_core.workers.stream_store import CoreStreamStore
from slipstream_core.workers.streams import StreamManager
from slipstream_ipc.crash_note import read_note
from slipstream_ipc.history.logprob_log import LogprobLog
from slipstream_ipc.history.token_log import TokenLog
from slipstream_ipc.messages import ModelCard
from slipstream_ipc.telemetry.statistics import CoreNumbers
from slipstream_ipc.telemetry.trace import Tracer, open_tracer
from slipstream_ipc.transport.codec import core_codec
from slipstream_ipc.transport.link import WINDOW
from slipstream_ipc.transport.router import Router
from slipstream_ipc.transport.sockets import ServerSockets, listen

logger = logging.getLogger(__name__)

# A request that was accepted once may exceed `max_waiting`, but not without bound: the limit is
# this many times what previous cores can have held.
_READMITTED_FACTOR = 16


# Bytes per waiting token: in the core's history and registration, and the same in the worker. By
# default all waiting tokens may take 1 / _WAITING_SHARE of the machine's memory.
_WAITING_TOKEN_BYTES = 16
_WAITING_SHARE = 16
_UNKNOWN_MEMORY = 16 * 2**30  # bytes, assumed where the machine does not report its memory


@dataclass(frozen=True, slots=True)
class Core:
    """An assembled core. name: of the model, as clients see it."""

    name: str
    engine: Engine[Any]
    handler: WorkerHandler
    manager: StreamManager
    scheduler: Scheduling[Any]
    tokens: TokenLog
    logprobs: LogprobLog
    logprob_budget: LogprobBudget
    runner: TurnRunner[Any]
    sockets: ServerSockets
    tracer: Tracer | None
    note: CrashNote | None
    compiler: GrammarCompiler
    counters: EngineCounters
    changes: AdapterChanges
    images: MediaPreparer | None = None

    def numbers(self) -> CoreNumbers:
        """Counters and gauges of this core, as of now."""
        return self.counters.numbers(self.scheduler, self.handler.num_pending, time.monotonic())

    @property
    def load(self) -> tuple[int, int]:
        """Number of running requests, and of waiting ones."""
        return self.scheduler.num_running, self.scheduler.num_waiting + self.handler.num_pending

    @property
    def detail(self) -> str:
        """The served model, for the log."""
        num_blocks = self.runner.num_blocks - 1  # without the null block, as in the metrics
        return f"{self.name}, {num_blocks} cache blocks"

    def run_once(self) -> None:
        """One turn of the loop."""
        self.engine.run_once()

    def running_s(self, now: float) -> float:
        """Seconds that the oldest step in flight has been running; 0 where there is none."""
        return self.engine.running_s(now)

    def close(self, *, keeps_runner: bool = False) -> None:
        """Close sockets and threads, and the runner unless it is kept for another core."""
        if not keeps_runner:
            self.runner.close()
        self.sockets.close()
        self.compiler.close()
        self.changes.close()
        if self.images is not None:
            self.images.close()
        if self.tracer is not None:
            self.tracer.close()
        if self.note is not None:
            self.note.close()


class ServingCore(Protocol):
    """A core as its process drives it: with streams, or one that answers queries alone."""

    @property
    def detail(self) -> str:
        """The served model, for the log."""

    @property
    def load(self) -> tuple[int, int]:
        """Number of running requests, and of waiting ones."""

    def run_once(self) -> None:
        """One turn of the loop."""

    def running_s(self, now: float) -> float:
        """Seconds that the oldest step in flight has been running; 0 where there is none."""

    def numbers(self) -> CoreNumbers:
        """Counters and gauges, as of now."""

    def close(self) -> None:
        """Close sockets and threads."""


class CoreEngine(Protocol):
    """An engine that schedules and computes: this project's parts, or vLLM's engine core."""

    def import_modules(self, config: CoreConfig, *, is_awaited: bool = False) -> None:
        """Import what `load` needs, which takes seconds and does not depend on the model.

        is_awaited: say so in the log.
        """

    def with_defaults(self, config: CoreConfig) -> CoreConfig:
        """The settings with the engine's defaults for this machine."""

    def load(self, config: CoreConfig) -> TurnRunner[Any]:
        """The runner of `config.model`. Raises ValueError if it cannot be loaded."""

    def scheduler(
        self,
        config: CoreConfig,
        runner: TurnRunner[Any],
        tokens: TokenLog,
        logprob_budget: LogprobBudget,
        grammars: GrammarBitmasks,
    ) -> Scheduling[Any]:
        """The scheduler for `runner`, over `tokens`. Raises ValueError where settings and model are
        incompatible.
        """


def engine_of(config: CoreConfig) -> CoreEngine:
    """The engine that is configured. vLLM's is imported only where it is chosen."""
    if config.engine == "vllm":
        from slipstream_core.vllm_engine.core_engine import VllmEngine

        return VllmEngine()
    return _OwnEngine()


class _OwnEngine:
    """Implements CoreEngine with `Scheduler` and the runner of the configured device."""

    def import_modules(self, config: CoreConfig, *, is_awaited: bool = False) -> None:
        import_runner(config, is_awaited=is_awaited)

    def with_defaults(self, config: CoreConfig) -> CoreConfig:
        return with_device_defaults(config)

    def load(self, config: CoreConfig) -> TurnRunner[Any]:
        return load_runner(config)

    def scheduler(
        self,
        config: CoreConfig,
        runner: TurnRunner[Any],
        tokens: TokenLog,
        logprob_budget: LogprobBudget,
        grammars: GrammarBitmasks,
    ) -> Scheduling[Any]:
        info = runner.info
        by_model = model_drafter_of(config, info)
        return Scheduler(
            tokens=tokens,
            cache=CacheConfig(
                num_blocks=runner.num_blocks,
                block_size=info.block_size,
                enable_prefix_caching=config.enable_prefix_caching,
                has_states=info.has_states,
                num_snapshots=info.num_snapshots,
                num_draft_states=info.num_draft_states,
                caches_answers=info.caches_answers,
                has_draft_model=by_model is not None,
            ),
            max_num_seqs=min(config.max_num_seqs, info.max_num_seqs or config.max_num_seqs),
            max_num_batched_tokens=config.max_num_batched_tokens,
            max_model_len=info.max_model_len,
            logprob_budget=logprob_budget,
            drafter=drafter_of(config, info, grammars, by_model=by_model),
            by_model=by_model,
        )


def assemble_core(
    config: CoreConfig,
    runner: TurnRunner[Any],
    context: zmq.Context[zmq.Socket[bytes]],
    poller: zmq.Poller,
) -> Core:
    """A core at `config.address` that drives `runner`, with its descriptors in `poller`.

    Raises ValueError where settings and model are incompatible, OSError or zmq.ZMQError where the
    address cannot be bound.
    """
    info = runner.info
    store = CoreStreamStore()
    logprob_budget = LogprobBudget(int(config.logprobs_gib * 2**30))
    grammars = GrammarBitmasks(store.tokens, info.vocab_size)
    scheduler = engine_of(config).scheduler(config, runner, store.tokens, logprob_budget, grammars)
    suspects: tuple[bytes, ...] = ()
    note = None
    if config.runtime_dir is not None:
        directory = Path(config.runtime_dir)
        if config.died_within:
            suspects = read_note(directory) or ()
        note = begin_note(directory, scheduler.max_in_step)
    waiting_tokens = _max_waiting_tokens(config, info.max_model_len)
    codec = core_codec()
    sockets = listen(context, config.address, max_message_bytes=codec.max_message_bytes)
    acceptor: CoreAcceptor = Router(sockets.router, codec, window=WINDOW, local=sockets.local)
    acceptor.register(poller)
    name = info.name if config.served_model_name is None else config.served_model_name
    card = ModelCard(
        name,
        config.model,
        info.vocab_size,
        info.max_model_len,
        info.eos_token_ids,
        info.default_sampling,
        config.max_logprobs if info.max_logprobs is None else info.max_logprobs,
        fingerprint=fingerprint_of(config, info),
        aliases=config.aliases,
        adapters=info.adapters,
        is_drafted=config.speculative_config is not None and info.takes_drafts,
        media=info.media,
    )
    images = None
    if info.media is not None and info.encoder is not None:
        images = MediaPreparer(info.encoder, card, info.media, note)
        poller.register(images.fileno(), zmq.POLLIN)
    compiler = GrammarCompiler(
        lambda: Vocabulary(
            find_tokenizer(config.tokenizer or config.model), info.vocab_size, info.eos_token_ids
        )
    )
    poller.register(compiler.fileno(), zmq.POLLIN)
    max_loras = 0 if config.lora is None else config.lora.max_loras
    adapters = Adapters(
        info.adapters,
        info.retired_adapters,
        num_places=max_loras,
        store=info.adapter_store,
        now=time.monotonic(),
    )
    has_predecessor = config.predecessor_ended_s > 0
    changes = AdapterChanges(
        adapters,
        (card.name, *card.aliases),
        config.lora,
        info.adapter_store,
        config.runtime_dir,
        read_names(config.runtime_dir, has_predecessor=has_predecessor),
        _free_bytes,
    )
    poller.register(changes.fileno(), zmq.POLLIN)
    counters = EngineCounters(info.engine, adapters.name_at, max_loras)
    manager = StreamManager(
        scheduler,
        store,
        grammars=grammars,
        logprob_budget=logprob_budget,
        counters=counters,
        adapters=adapters,
        images=images,
    )
    handler = WorkerHandler(
        acceptor,
        card,
        scheduler,
        manager,
        admission=Admission(
            card,
            fits=lambda num_tokens: -(-num_tokens // info.block_size) < runner.num_blocks,
            max_waiting=config.max_waiting,
            max_readmitted=_READMITTED_FACTOR * (config.max_waiting + scheduler.max_num_seqs),
            max_waiting_tokens=waiting_tokens,
            max_readmitted_tokens=_READMITTED_FACTOR * waiting_tokens,
            adapters=adapters,
            engine_objection=scheduler.objection,
        ),
        pending=PendingAdmissions(compiler, logprob_budget, adapters, images),
        changes=changes,
        held=KeptAnswersByWorker(int(config.response_store_mib * 2**20)),
        succession=Succession(config.incarnation, suspects, config.predecessor_ended_s, note),
    )
    tracer = open_tracer(config.trace, "core")
    engine = Engine(
        runner,
        scheduler,
        store.logprobs,
        handler,
        manager,
        poller,
        tracer,
        grammars=grammars,
        counters=counters,
        images=images,
    )
    return Core(
        card.name,
        engine,
        handler,
        manager,
        scheduler,
        store.tokens,
        store.logprobs,
        logprob_budget,
        runner,
        sockets,
        tracer,
        note,
        compiler,
        counters,
        changes,
        images,
    )


def _free_bytes() -> int | None:
    memory = read_host_memory()
    return None if memory is None else memory.available


def drafter_of(
    config: CoreConfig,
    info: ModelInfo,
    grammars: GrammarBitmasks,
    *,
    memory: AnswerMemory | None = None,
    by_model: ModelDrafter | None = None,
) -> GrammarDrafter | None:
    """The drafter that is configured; None without one, and where the model's runner takes none.

    memory: of answers that were given before, where they are drafted from; None: a new one.
    by_model: `model_drafter_of` these, which it then asks.
    """
    given = config.speculative_config
    if given is None:
        return None
    if not info.takes_drafts:
        logger.warning(
            "speculative_config has no effect: tokens of %s are not drafted, as %s",
            info.name,
            NOT_DRAFTED,
        )
        return None
    costs, most = StepCosts(info.decode_s), given.num_speculative_tokens
    drafter: Drafter = by_model or NgramDrafter(
        num_speculative_tokens=most,
        prompt_lookup_min=given.prompt_lookup_min,
        prompt_lookup_max=given.prompt_lookup_max,
        costs=costs,
    )
    if given.method == "suffix":
        if memory is None:
            memory = AnswerMemory(given.suffix_cache_mib << 20)
        drafter = SuffixDrafter(drafter, memory, num_speculative_tokens=most, costs=costs)
    drafter = PredictionDrafter(drafter, num_speculative_tokens=most, costs=costs)
    return GrammarDrafter(drafter, grammars, num_speculative_tokens=most, costs=costs)


def model_drafter_of(config: CoreConfig, info: ModelInfo) -> ModelDrafter | None:
    """The part of the drafter that a draft model drafts for; None where the runner has none."""
    given = config.speculative_config
    if given is None or not info.draft_model_len:
        return None
    return ModelDrafter(
        num_speculative_tokens=given.num_speculative_tokens,
        max_len=info.draft_model_len,
        costs=StepCosts(info.decode_s),
        draft_costs=StepCosts(info.draft_s, info.draft_share),
    )


def _max_waiting_tokens(config: CoreConfig, max_model_len: int) -> int:
    """Tokens that may wait, as configured or by this machine's memory; at least `max_model_len`."""
    given = config.max_waiting_tokens
    if given is None:
        memory = read_host_memory()
        total = _UNKNOWN_MEMORY if memory is None else memory.total
        given = total // _WAITING_SHARE // _WAITING_TOKEN_BYTES
    return max(given, max_model_len)
