"""One chaos run: the undisturbed answers, the same requests under faults, the comparison."""

from __future__ import annotations

import asyncio
import contextlib
import time
from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
from msgspec import Struct
from tokenizers import Tokenizer

from slipstream.client.async_client import AsyncClient
from slipstream.demo.gaps import GapSpan
from slipstream.demo_model import MODEL_PATH
from slipstream.errors import SlipstreamError
from slipstream.outputs import RequestOutput
from slipstream.stack.children.roles import WORKER
from slipstream.stack.stack import Stack
from slipstream_bench.common import process_census
from slipstream_bench.common.provenance import commit
from slipstream_core.model.tokenizer_file import find_tokenizer
from slipstream_ipc.messages import EventKind, Fault, ModelCard
from slipstream_ipc.process import process_name
from slipstream_ipc.validation.simulated_model import SIMULATED
from slipstream_lab.common.served_fleet import ServedFleet
from slipstream_verify.chaos.chaos_report import ChaosResult, gaps_by_kind, summarise_gaps
from slipstream_verify.chaos.clients import ChaosClient
from slipstream_verify.chaos.compare import (
    AssembledStream,
    ChaosAnswer,
    assemble,
    exact_verdicts,
    real_verdicts,
)
from slipstream_verify.chaos.core_counters import CounterSums
from slipstream_verify.chaos.fault_injector import (
    ChaosFailed,
    FaultInjector,
    InjectedFault,
    mounted,
)
from slipstream_verify.chaos.schedule import FaultKinds, Round, make_schedule
from slipstream_verify.chaos.workload.chaos_workload import (
    ChaosRequest,
    WorkloadShape,
    make_requests,
)
from slipstream_verify.chaos.workload.hybrid_model import save_hybrid
from slipstream_verify.chaos.workload.later_turns import later_turns, predicted
from slipstream_verify.chaos.workload.played_formats import PlayedFormat, write_tokenizer
from slipstream_verify.chaos.workload.tool_workload import make_tool_requests

_UNDISTURBED_AT_ONCE = 128
_UNDISTURBED_TIMEOUT_S = 120.0
NO_SPARE = ", no spare"
SERVER_EXITS = (  # kinds of rounds whose gaps are reported for the run
    *("exit of worker", f"exit of worker{NO_SPARE}", "exit of core", f"exit of core{NO_SPARE}"),
    "exit of replica",
    "burst",
)
_SIMULATED = f"simulated:step_ms={{}},prefill_us=20,mode=chain,tokenizer={MODEL_PATH}"
_STEP_MS = 25.0  # with 500 requests, 64 at a time, most of 20 rounds find all places taken
_MOST_STEP_MS = 250.0
_DRAIN_S = 4.0  # of a replica
_LONGER_WITH_REPLICAS = 2.0  # a round, as a replica takes long to start and stays silent for long
_LEAST_BLOCKS = 257  # one request of the longest, and the null block
_MARGIN = 1.4  # over the rounds that it takes for every kind of fault to occur once
_CLIENT_TIMEOUT_S = 120.0
_STEP_TIMEOUT_S = 20.0
_PLAYED_TOKENIZER = "tokenizer"
_PLAYED_ANSWERS = "answers.jsonl"
_HYBRID = "hybrid"
_OF_CALLS = dict.fromkeys((EventKind.CALL_BEGINS, EventKind.CALL_ARGUMENTS), "a call")
_PART_NAMES = {EventKind.CONTENT: "content", EventKind.REASONING: "reasoning", **_OF_CALLS}


def undisturbed(stack: Stack, requests: Sequence[ChaosRequest]) -> list[ChaosAnswer]:
    """The answers, in the order of the requests. Raises: SlipstreamError."""
    return asyncio.run(_answers(stack.address, requests))


def _undisturbed(
    stack: Stack, options: Options, card: ModelCard
) -> tuple[list[ChaosRequest], list[ChaosAnswer]]:
    """The requests of a run, some of which follow from others' answers, and the answers."""
    requests = make_requests(options.seed, _shape(options, card))
    expected = undisturbed(stack, requests)
    if options.has_later_turns:
        later = later_turns(options.seed, requests, expected, card.max_model_len)
        for request, answer in zip(later, undisturbed(stack, later), strict=True):
            requests[request.index], expected[request.index] = request, answer
    if options.speculative_config is not None and not options.is_hybrid:  # which is not drafted
        encode = Tokenizer.from_file(str(find_tokenizer(card.path))).encode
        requests, expected = predicted(
            options.seed,
            requests,
            expected,
            lambda text: encode(text, add_special_tokens=False).ids,
        )
    return requests, expected


async def _answers(address: str, requests: Sequence[ChaosRequest]) -> list[ChaosAnswer]:
    places = asyncio.Semaphore(_UNDISTURBED_AT_ONCE)

    async def one(client: AsyncClient, request: ChaosRequest) -> ChaosAnswer:
        async with places:
            done = await client.generate(
                request.prompt, request.params, stream_id=request.stream_id
            )
        return _answer(done)

    async with AsyncClient(address, timeout_s=_UNDISTURBED_TIMEOUT_S) as client:
        return await asyncio.gather(*(one(client, request) for request in requests))


def _answer(done: RequestOutput) -> ChaosAnswer:
    logprobs = done.logprobs
    return ChaosAnswer(
        done.text,
        tuple(done.token_ids),
        None
        if logprobs is None
        else tuple(
            tuple((each.token_id, each.logprob, each.rank) for each in token.values())
            for token in logprobs
        ),
        done.finish_reason,
        done.stop_reason,
        tuple(done.prompt_token_ids),
    )


def _undisturbed_in_clients(
    stack: Stack, requests: Sequence[ChaosRequest], options: Options, folder: Path
) -> list[ChaosAnswer]:
    """As `undisturbed`, by the clients that read under faults. Raises: SlipstreamError."""
    folder.mkdir()
    clients = _clients(stack, requests, options, folder)
    try:
        FaultInjector(stack, (), set()).run(clients, options.timeout_s)
    except ChaosFailed as error:
        raise SlipstreamError(Fault("engine", f"the undisturbed run: {error}")) from None
    finally:
        for one in clients:
            one.end()
    streams = assemble((record for one in clients for record in one.records()), len(requests))
    for each in streams:
        if each.error is not None or each.lost or each.doubled or not each.is_over:
            why = f"undisturbed, request {each.index} was not answered: {each.error}"
            raise SlipstreamError(Fault("engine", why))
    return [each.answer for each in streams]


class Options(Struct, frozen=True, kw_only=True):
    """The command line's options. model: None is the simulated model whose tokens depend on all
    before, or, with `played`, one that plays answers, or, with `is_hybrid`, a tiny one with
    recurrent states. speculative_config: of the stack under faults.
    """

    model: str | None
    num_requests: int
    faults: FaultKinds
    seed: int
    num_rounds: int
    concurrency: int
    num_clients: int
    min_len: int
    max_len: int
    hang_timeout_s: float
    timeout_s: float
    has_spares: bool
    is_quick: bool
    num_fronts: int = 1
    num_workers: int = 1
    num_replicas: int = 1
    num_ranks: int = 1
    played: PlayedFormat | None = None
    is_hybrid: bool = False
    speculative_config: str | None = None

    @property
    def has_later_turns(self) -> bool:
        """True if some requests continue the answers of others."""
        return self.is_hybrid or self.speculative_config is not None

    @property
    def is_simulated(self) -> bool:
        """True if no model computes."""
        if self.model is None:
            return not self.is_hybrid
        return self.model.startswith(SIMULATED)


class _FaultRun(Struct):
    """The outcome of the run under faults."""

    injector: FaultInjector
    streams: list[AssembledStream]
    begin_s: float
    end_s: float
    memory_start: dict[str, process_census.Holding]
    memory_end: dict[str, process_census.Holding]
    stopped: str | None
    strays: list[str]
    left_out: list[str]
    counted: dict[str, int]  # as in CounterSums


def chaos(options: Options, folder: Path, on_phase: Callable[[str], object]) -> ChaosResult:
    """Run all of it. folder: for the journals. Raises: SlipstreamError if no stack starts."""
    with process_census.marked() as mark:
        requests = [] if options.played is None else _write_played(options, options.played, folder)
        if options.is_hybrid:
            save_hybrid(folder / _HYBRID)
        on_phase("running the requests undisturbed")
        more = {} if options.played is None else {"http_port": 0}
        with Stack(_model(options, 1, folder), **_settings(options, more)) as stack:
            with stack.client() as client:
                card = client.model
            if options.played is None:
                requests, expected = _undisturbed(stack, options, card)
            else:
                expected = _undisturbed_in_clients(stack, requests, options, folder / "undisturbed")
        schedule = make_schedule(
            options.seed,
            options.faults,
            options.num_rounds,
            is_quick=options.is_quick,
            is_exact=options.is_simulated,
        )
        on_phase(f"{len(requests)} requests under faults")
        fault_run = _run_under_faults(options, requests, schedule, folder, mark)
        left = fault_run.strays + list(process_census.marked_pids(mark).values())
    on_phase("comparing")
    reference = None
    if options.is_simulated:
        verdicts = exact_verdicts(requests, expected, fault_run.streams)
    else:
        verdicts, reference = real_verdicts(requests, expected, fault_run.streams, card)
    http = [request.index for request in requests if request.via == "http"]
    is_http = set(http)
    again = sum(one.num_again for one in fault_run.streams if one.index not in is_http)
    injector = fault_run.injector
    by_kind, recovery_s = _gaps(fault_run, requests)
    of_exits = [gap for kind in SERVER_EXITS for gap in by_kind.get(kind, [])]
    whole = summarise_gaps("all", of_exits)
    return ChaosResult(
        seed=options.seed,
        commit=commit(),
        model=_model(options, _step_ms(options), folder),
        identical=sum(one.is_identical for one in verdicts),
        total=len(requests),
        lost=sum(one.lost for one in verdicts),
        doubled=sum(one.doubled for one in verdicts),
        failed=sum(one.error is not None for one in fault_run.streams),
        gap_p50_s=whole.p50_s,
        gap_p99_s=whole.p99_s,
        orphans=len(left),
        http_identical=sum(verdicts[index].is_identical for index in http),
        http_total=len(http),
        http_asked_again=sum(fault_run.streams[index].num_again for index in http),
        http_asked_afresh=sum(fault_run.streams[index].num_afresh for index in http),
        asked_again=again,
        unexplained_again=0 if injector.num_double_deaths else again,
        double_deaths=injector.num_double_deaths,
        rounds=injector.num_rounds,
        planned_rounds=len(schedule),
        missed_faults=injector.num_missed,
        faults=dict(Counter(one.fault.name for one in injector.injected)),
        combinations=dict(Counter(_combinations(injector.injected))),
        gaps=[summarise_gaps(kind, gaps) for kind, gaps in sorted(by_kind.items())],
        recovery_s=recovery_s,
        memory_start=fault_run.memory_start,
        memory_end=fault_run.memory_end,
        duration_s=round(fault_run.end_s - fault_run.begin_s, 3),
        num_tokens=sum(len(one.token_ids) for one in fault_run.streams),
        near_tie=None if reference is None else reference.num_near_ties,
        reference=reference,
        different={one.index: list(one.differences) for one in verdicts if not one.is_identical},
        stopped=fault_run.stopped,
        left=left,
        left_out=fault_run.left_out,
        answers=options.played.name if options.played is not None else "",
        **_num_calls(requests, expected),
        interrupted=dict(_interrupted(requests, fault_run)),
        counted=fault_run.counted,
    )


def _num_calls(requests: Sequence[ChaosRequest], expected: Sequence[ChaosAnswer]) -> dict[str, int]:
    """The calls in the answers to Python clients, which are told their ends."""
    calls = [sum(each.kind == EventKind.CALL_ENDS for each in answer.events) for answer in expected]
    forced = [
        num
        for request, num in zip(requests, calls, strict=True)
        if request.chat is not None and request.chat.is_forced
    ]
    return {"tool_calls": sum(calls), "forced_calls": sum(forced)}


def _interrupted(requests: Sequence[ChaosRequest], fault_run: _FaultRun) -> Counter[str]:
    """In what part of an answer the faults of the stack's processes found it, for each of both.

    Over HTTP a call goes on up to the next part, as chunks do not say where it ends.
    """
    found: Counter[str] = Counter()
    times = [one.at_s for one in fault_run.injector.injected if one.fault.target != "client"]
    for request, streamed in zip(requests, fault_run.streams, strict=True):
        if request.chat is None:
            continue
        for at in (bisect_right(streamed.times_s, time_s) for time_s in times):
            kind = streamed.kinds[at - 1] if 0 < at < len(streamed.times_s) else None
            if kind in _PART_NAMES:
                is_forced = request.chat.is_forced and kind in _OF_CALLS
                found["a forced call" if is_forced else _PART_NAMES[kind]] += 1
    return found


def _run_under_faults(
    options: Options,
    requests: Sequence[ChaosRequest],
    schedule: Sequence[Round],
    folder: Path,
    mark: str,
) -> _FaultRun:
    has_http = any(request.via == "http" for request in requests)
    settings: dict[str, Any] = {}
    if has_http:
        settings = {"http_port": 0, "http_workers": options.num_fronts}
    if options.model is None or options.speculative_config is not None:
        # fewer places and blocks than requests: some wait, some are preempted
        places = max(4, options.concurrency * 3 // 4)
        if options.num_replicas > 1:  # a moved stream waits for no other, also where one is lost
            places = options.concurrency * 5 // 4 // (options.num_replicas - 1)
        blocks = max(_LEAST_BLOCKS, 2 + places * options.max_len // 20 + 64)
        settings |= {"max_num_seqs": places, "num_blocks": blocks}
    settings["output_workers"] = num = options.num_workers
    settings |= dict.fromkeys(("spare_worker", "spare_core"), options.has_spares)
    spares = {process_name(WORKER, index, num) for index in range(num)} | {"core"}
    if options.num_replicas > 1:
        settings |= {"spare_core": False, "drain_s": _DRAIN_S}
        spares = {
            f"replica-{replica}: {name}"
            for replica in range(options.num_replicas)
            for name in spares - {"core"}
        }
    spares = spares if options.has_spares else set()
    settings |= {"max_restarts": 10 + 4 * len(schedule), "hang_timeout_s": options.hang_timeout_s}
    model = _model(options, _step_ms(options), folder)
    with contextlib.ExitStack() as stack_of:
        volume = None
        left_out = []
        if options.faults.fill:
            found = stack_of.enter_context(mounted(folder / "disk"))
            if isinstance(found, str):
                left_out.append(f"fill disk: {found}")
            else:
                volume = found
                settings["runtime_dir"] = volume.runtime_dir
        stack = _started(model, options, settings)
        stack_of.enter_context(stack)
        counters = CounterSums(stack.http_address)
        injector = FaultInjector(stack, schedule, spares, volume, counters.look)
        injector.wait_until_recovered()
        memory_start = _memory(stack, injector)
        clients = _clients(stack, requests, options, folder, len(schedule))
        begin_s = time.monotonic()
        stopped = None
        try:
            injector.run(clients, options.timeout_s)
            with stack.client() as client:
                client.generate("One more request.", max_tokens=4)
            injector.wait_until_recovered()
            counters.look()
        except ChaosFailed as error:
            stopped = str(error)
        finally:
            end_s = time.monotonic()
            for one in clients:
                one.end()
        memory_end = _memory(stack, injector)
        strays = list(process_census.strays(mark).values())
    records = [record for one in clients for record in one.records()]
    streams = assemble(records, len(requests))
    return _FaultRun(
        injector,
        streams,
        begin_s,
        end_s,
        memory_start,
        memory_end,
        stopped,
        strays,
        left_out,
        counters.counted,
    )


def _started(model: str, options: Options, settings: Mapping[str, Any]) -> Stack | ServedFleet:
    given = _settings(options, settings)
    if options.speculative_config is not None:
        given["speculative_config"] = options.speculative_config
    if options.num_replicas == 1:
        return Stack(model, **given)
    return ServedFleet(model, options.num_replicas, **given)


def _step_ms(options: Options) -> float:
    """A step time with which most rounds find many requests that run."""
    if options.is_quick:
        return _STEP_MS
    load = options.num_requests / options.concurrency / (500 / 64)
    rounds = max(options.num_rounds, _MARGIN * min(options.faults.num_rounds, options.num_rounds))
    if options.num_replicas > 1:
        rounds *= _LONGER_WITH_REPLICAS
    longer = max(1.0, rounds / 20 / load)
    return min(round(_STEP_MS * longer, 1), _MOST_STEP_MS)


def _settings(options: Options, more: Mapping[str, Any]) -> dict[str, Any]:
    # near ties are counted in float32
    own: dict[str, Any] = {} if options.is_simulated else {"dtype": "float32"}
    if options.num_ranks > 1:  # a rank that is stopped is a step that does not end
        own |= {"tensor_parallel_size": options.num_ranks, "step_timeout_s": _STEP_TIMEOUT_S}
    return {**own, **(options.played.settings if options.played is not None else {}), **more}


def _model(options: Options, step_ms: float, folder: Path) -> str:
    """What the stack serves. folder: with what is played."""
    if options.is_hybrid:
        return str(folder / _HYBRID)
    if options.played is None:
        return options.model or _SIMULATED.format(step_ms)
    tokenizer, answers = folder / _PLAYED_TOKENIZER, folder / _PLAYED_ANSWERS
    return f"simulated:step_ms={step_ms},prefill_us=20,tokenizer={tokenizer},answers={answers}"


def _write_played(options: Options, played: PlayedFormat, folder: Path) -> list[ChaosRequest]:
    """The requests; their answers and the tokenizer are written into the folder."""
    shape = WorkloadShape(
        options.num_requests, options.min_len, options.max_len, options.num_clients, vocab_size=0
    )
    requests, lines = make_tool_requests(options.seed, shape, played)
    (folder / _PLAYED_ANSWERS).write_bytes(msgspec.json.Encoder().encode_lines(lines))
    write_tokenizer(folder / _PLAYED_TOKENIZER, played)
    return requests


def _shape(options: Options, card: ModelCard) -> WorkloadShape:
    most = max(2, card.max_model_len // 2)
    return WorkloadShape(
        options.num_requests,
        min(options.min_len, most),
        min(options.max_len, most),
        options.num_clients,
        card.vocab_size,
        has_grammars=_has_grammars(options),
        has_beginnings=options.is_hybrid,
        has_repeats=options.speculative_config is not None,
    )


def _has_grammars(options: Options) -> bool:
    model = options.model
    return model is None or not model.startswith(SIMULATED) or "tokenizer=" in model


def _clients(
    stack: Stack | ServedFleet,
    requests: Sequence[ChaosRequest],
    options: Options,
    folder: Path,
    num_rounds: int = 0,
) -> list[ChaosClient]:
    """One client per share of the requests; the one over HTTP is the last. num_rounds: of faults,
    all of which the requests outlast.
    """
    shared: dict[str, Any] = {
        "folder": folder,
        "concurrency": max(1, options.concurrency // options.num_clients),
        "timeout_s": _CLIENT_TIMEOUT_S,
        "num_rounds": num_rounds,
    }
    clients: list[ChaosClient] = []
    for number in range(options.num_clients):
        own = [one for one in requests if one.via == "client" and one.client == number]
        if own:
            clients.append(ChaosClient("client", number, own, address=stack.address, **shared))
    over_http = [one for one in requests if one.via == "http"]
    if over_http:
        assert stack.http_address is not None
        clients.append(ChaosClient("http", 0, over_http, address=stack.http_address, **shared))
    return clients


def _memory(
    stack: Stack | ServedFleet, injector: FaultInjector
) -> dict[str, process_census.Holding]:
    names = {pid: f"spare {name}" for name, pid in injector.spares.items()}
    names |= {pid: name for name, pid in stack.pids.items()}
    return process_census.holdings(process_census.tree_pids(stack.pids["supervisor"], names))


def _gaps(
    fault_run: _FaultRun, requests: Sequence[ChaosRequest]
) -> tuple[dict[str, list[float]], dict[str, list[float]]]:
    """Longest gaps, and recovery times, by the kind of round."""
    injected = fault_run.injector.injected
    rounds = sorted({one.round for one in injected})
    begins = {number: min(one.at_s for one in injected if one.round == number) for number in rounds}
    spans: list[GapSpan] = []
    recovery_s: dict[str, list[float]] = {}
    for at, number in enumerate(rounds):
        faults = [one for one in injected if one.round == number]
        kind = _kind(faults)
        end_s = begins[rounds[at + 1]] if at + 1 < len(rounds) else fault_run.end_s
        spans.append(GapSpan(kind, begins[number], end_s))
        for one in faults:
            is_exit = one.fault.action in ("kill", "stop") and one.fault.target != "client"
            if one.recovered_s is not None and is_exit:
                recovery_s.setdefault(kind, []).append(round(one.recovered_s - one.at_s, 4))
    times = [
        streamed.times_s
        for request, streamed in zip(requests, fault_run.streams, strict=True)
        if request.via == "client" and not (request.pauses or streamed.num_again)
    ]
    return gaps_by_kind(times, spans), recovery_s


def _combinations(injected: Sequence[InjectedFault]) -> list[str]:
    """The targets killed together, for each round with several kills."""
    targets: dict[int, set[str]] = {}
    for one in injected:
        if one.fault.action == "kill":
            targets.setdefault(one.round, set()).add(one.fault.target)
    return [", ".join(sorted(each)) for each in targets.values() if len(each) > 1]


def _kind(injected: Sequence[InjectedFault]) -> str:
    """The kind of a round: hangs, exits, bursts and shortages, by target."""
    targets = {one.fault.target for one in injected}
    action = {one.fault.action for one in injected}
    if "replica" in targets and len(injected) == 1 and action != {"kill"}:
        return "drain of replica" if "drain" in action else "silent replica"
    if "stop" in action:
        return "hang of " + ", ".join(sorted(targets))
    if "fill" in action:
        return "full disk"
    if "limit" in action:
        return "no more files for " + ", ".join(sorted(targets))
    if len(injected) > 1:
        return "burst with client" if "client" in targets else "burst"
    (one,) = injected
    has_none = one.fault.target in ("worker", "core") and not one.had_spare
    return f"exit of {one.fault.target}" + (NO_SPARE if has_none else "")
