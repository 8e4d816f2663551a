"""One chaos run: the undisturbed answers, the same requests under faults, the comparison."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from msgspec import Struct

from slipstream.demo.gaps import GapSpan
from slipstream.demo_model import MODEL_PATH
from slipstream.stack.process_plan import SIMULATED
from slipstream.stack.stack import Stack
from slipstream_bench.chaos.chaos_report import ChaosResult, count
from slipstream_bench.chaos.chaos_workload import ChaosRequest, WorkloadShape, make_requests
from slipstream_bench.chaos.checks import exact_verdicts, real_verdicts
from slipstream_bench.chaos.clients import ClientLives
from slipstream_bench.chaos.compare import Streamed, assemble
from slipstream_bench.chaos.fault_injector import ChaosFailed, FaultInjector, Struck
from slipstream_bench.chaos.gaps import gaps_by_kind
from slipstream_bench.chaos.gaps import summarise as summarise_gaps
from slipstream_bench.chaos.reference import undisturbed
from slipstream_bench.chaos.schedule import Blows, Round, make_schedule
from slipstream_bench.chaos.volume import mounted
from slipstream_bench.common import process_census
from slipstream_bench.common.commit import commit
from slipstream_ipc.messages import ModelCard

NO_SPARE = ", no spare"
SERVER_EXITS = (  # kinds of rounds whose gaps are reported for the run
    *("exit of worker", f"exit of worker{NO_SPARE}", "exit of core", f"exit of core{NO_SPARE}"),
    "burst",
)
_SIMULATED = f"simulated:step_ms={{}},prefill_us=20,mode=chain,tokenizer={MODEL_PATH}"
_STEP_MS = 25.0  # so 500 requests, 64 at a time, last until 20 rounds are over
_MOST_STEP_MS = 250.0
_MARGIN = 1.4  # over the rounds that it takes for every kind of fault to occur once
_CLIENT_TIMEOUT_S = 120.0


class Options(Struct, frozen=True, kw_only=True):
    """The command line's options. model: None is the simulated model whose tokens depend on all
    before.
    """

    model: str | None
    num_requests: int
    blows: Blows
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


class _Played(Struct):
    """The outcome of the run under faults."""

    injector: FaultInjector
    streams: list[Streamed]
    begin_s: float
    end_s: float
    memory_start: dict[str, process_census.Holding]
    memory_end: dict[str, process_census.Holding]
    stopped: str | None
    strays: list[str]
    left_out: list[str]


def chaos(options: Options, folder: Path, tell: Callable[[str], object]) -> ChaosResult:
    """Run all of it. folder: for the journals. Raises: SlipstreamError if no stack starts."""
    is_simulated = options.model is None or options.model.startswith(SIMULATED)
    with process_census.marked() as mark:
        tell("the undisturbed run")
        with Stack(options.model or _SIMULATED.format(1), **_settings(options, {})) as stack:
            with stack.client() as client:
                card = client.model
            requests = make_requests(options.seed, _shape(options, card))
            expected = undisturbed(stack, requests, lambda: None)
        schedule = make_schedule(
            options.seed,
            options.blows,
            options.num_rounds,
            is_quick=options.is_quick,
            is_exact=is_simulated,
        )
        tell(f"{len(requests)} requests under fire")
        played = _play(options, requests, schedule, folder, mark)
        left = played.strays + list(process_census.marked_pids(mark).values())
    tell("the comparison")
    teacher = None
    if is_simulated:
        verdicts = exact_verdicts(requests, expected, played.streams)
    else:
        verdicts, teacher = real_verdicts(requests, expected, played.streams, card)
    http = [request.index for request in requests if request.via == "http"]
    is_http = set(http)
    again = sum(one.num_again for one in played.streams if one.index not in is_http)
    injector = played.injector
    by_kind, recovery_s = _gaps(played, requests)
    of_exits = [gap for kind in SERVER_EXITS for gap in by_kind.get(kind, [])]
    whole = summarise_gaps("all", of_exits)
    return ChaosResult(
        seed=options.seed,
        commit=commit(),
        model=options.model or _SIMULATED.format(_step_ms(options)),
        identical=sum(one.is_identical for one in verdicts),
        total=len(requests),
        lost=sum(one.lost for one in verdicts),
        doubled=sum(one.doubled for one in verdicts),
        failed=sum(one.error is not None for one in played.streams),
        gap_p50_s=whole.p50_s,
        gap_p99_s=whole.p99_s,
        orphans=len(left),
        http_identical=sum(verdicts[index].is_identical for index in http),
        http_total=len(http),
        http_asked_again=sum(played.streams[index].num_again for index in http),
        http_asked_afresh=sum(played.streams[index].num_afresh for index in http),
        asked_again=again,
        unexplained_again=0 if injector.num_double_deaths else again,
        double_deaths=injector.num_double_deaths,
        rounds=injector.num_rounds,
        planned_rounds=len(schedule),
        missed_blows=injector.num_missed,
        blows=count([one.blow.name for one in injector.struck]),
        combinations=count(_combinations(injector.struck)),
        gaps=[summarise_gaps(kind, gaps) for kind, gaps in sorted(by_kind.items())],
        recovery_s=recovery_s,
        memory_start=played.memory_start,
        memory_end=played.memory_end,
        duration_s=round(played.end_s - played.begin_s, 3),
        num_tokens=sum(len(one.token_ids) for one in played.streams),
        near_tie=None if teacher is None else teacher.num_near_ties,
        teacher=teacher,
        different={one.index: list(one.differences) for one in verdicts if not one.is_identical},
        stopped=played.stopped,
        left=left,
        left_out=played.left_out,
    )


def _play(
    options: Options,
    requests: Sequence[ChaosRequest],
    schedule: Sequence[Round],
    folder: Path,
    mark: str,
) -> _Played:
    has_http = any(request.via == "http" for request in requests)
    settings: dict[str, Any] = {}
    if has_http:
        settings = {"http_port": 0, "http_workers": options.num_fronts}
    if options.model is None:
        # fewer places and blocks than requests: some wait, some are preempted
        places = max(4, options.concurrency * 3 // 4)
        settings |= {"max_num_seqs": places, "num_blocks": 2 + places * options.max_len // 20 + 64}
    spares = {"worker", "core"} if options.has_spares else set()
    settings |= {f"spare_{name}": name in spares for name in ("worker", "core")}
    settings |= {"max_restarts": 10 + 4 * len(schedule), "hang_timeout_s": options.hang_timeout_s}
    model = options.model or _SIMULATED.format(_step_ms(options))
    with contextlib.ExitStack() as stack_of:
        volume = None
        left_out = []
        if options.blows.fill:
            found = stack_of.enter_context(mounted(folder / "disk"))
            if isinstance(found, str):
                left_out.append(f"fill disk: {found}")
            else:
                volume = found
                settings["runtime_dir"] = volume.runtime_dir
        stack = stack_of.enter_context(Stack(model, **_settings(options, settings)))
        injector = FaultInjector(stack, schedule, spares, volume)
        injector.settle()
        memory_start = _memory(stack, injector)
        clients = _clients(stack, requests, options, folder)
        begin_s = time.monotonic()
        stopped = None
        try:
            injector.run(clients, options.timeout_s)
            with stack.client() as client:
                client.generate("Is anybody there?", max_tokens=4)
            injector.settle()
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
    return _Played(
        injector, streams, begin_s, end_s, memory_start, memory_end, stopped, strays, left_out
    )


def _step_ms(options: Options) -> float:
    """A step time long enough for the requests to outlast the rounds."""
    if options.is_quick:
        return _STEP_MS
    load = options.num_requests / options.concurrency / (500 / 64)
    rounds = max(options.num_rounds, _MARGIN * min(options.blows.num_rounds, options.num_rounds))
    longer = max(1.0, rounds / 20 / load)
    return min(round(_STEP_MS * longer, 1), _MOST_STEP_MS)


def _settings(options: Options, more: Mapping[str, Any]) -> dict[str, Any]:
    is_simulated = options.model is None or options.model.startswith(SIMULATED)
    # near ties are counted in float32
    return dict(more) if is_simulated else {"dtype": "float32", **more}


def _shape(options: Options, card: ModelCard) -> WorkloadShape:
    most = max(2, card.max_model_len // 2)
    return WorkloadShape(
        options.num_requests,
        min(options.min_len, most),
        min(options.max_len, most),
        options.num_clients,
        True,  # requests over HTTP
        card.vocab_size,
        has_grammars=_has_grammars(options),
    )


def _has_grammars(options: Options) -> bool:
    model = options.model
    return model is None or not model.startswith(SIMULATED) or "tokenizer=" in model


def _clients(
    stack: Stack, requests: Sequence[ChaosRequest], options: Options, folder: Path
) -> list[ClientLives]:
    """One client per share of the requests; the one over HTTP is the last."""
    shared: dict[str, Any] = {
        "folder": folder,
        "concurrency": max(1, options.concurrency // options.num_clients),
        "timeout_s": _CLIENT_TIMEOUT_S,
    }
    clients: list[ClientLives] = []
    for number in range(options.num_clients):
        own = [one for one in requests if one.via == "client" and one.client == number]
        if own:
            clients.append(ClientLives("client", number, own, address=stack.address, **shared))
    over_http = [one for one in requests if one.via == "http"]
    if over_http:
        assert stack.http_address is not None
        clients.append(ClientLives("http", 0, over_http, address=stack.http_address, **shared))
    return clients


def _memory(stack: Stack, injector: FaultInjector) -> dict[str, process_census.Holding]:
    names = {pid: f"spare {name}" for name, pid in injector.spares.items()}
    names |= {pid: name for name, pid in stack.pids.items()}
    return process_census.holdings(process_census.tree_pids(stack.pids["supervisor"], names))


def _gaps(
    played: _Played, requests: Sequence[ChaosRequest]
) -> tuple[dict[str, list[float]], dict[str, list[float]]]:
    """Longest gaps, and recovery times, by the kind of round."""
    struck = played.injector.struck
    rounds = sorted({one.round for one in struck})
    begins = {number: min(one.at_s for one in struck if one.round == number) for number in rounds}
    spans: list[GapSpan] = []
    recovery_s: dict[str, list[float]] = {}
    for at, number in enumerate(rounds):
        blows = [one for one in struck if one.round == number]
        kind = _kind(blows)
        end_s = begins[rounds[at + 1]] if at + 1 < len(rounds) else played.end_s
        spans.append(GapSpan(kind, begins[number], end_s))
        for one in blows:
            is_exit = one.blow.means in ("kill", "stop") and one.blow.place != "client"
            if one.recovered_s is not None and is_exit:
                recovery_s.setdefault(kind, []).append(round(one.recovered_s - one.at_s, 4))
    times = [
        streamed.times_s
        for request, streamed in zip(requests, played.streams, strict=True)
        if request.via == "client" and not (request.pauses or streamed.num_again)
    ]
    return gaps_by_kind(times, spans), recovery_s


def _combinations(struck: Sequence[Struck]) -> list[str]:
    """The places killed together, for each round with several kills."""
    places: dict[int, set[str]] = {}
    for one in struck:
        if one.blow.means == "kill":
            places.setdefault(one.round, set()).add(one.blow.place)
    return [", ".join(sorted(each)) for each in places.values() if len(each) > 1]


def _kind(struck: Sequence[Struck]) -> str:
    """The kind of a round: hangs, exits, bursts and shortages, by place."""
    places = {one.blow.place for one in struck}
    means = {one.blow.means for one in struck}
    if "stop" in means:
        return "hang of " + ", ".join(sorted(places))
    if "fill" in means:
        return "full disk"
    if "limit" in means:
        return "no more files for " + ", ".join(sorted(places))
    if len(struck) > 1:
        return "burst with client" if "client" in places else "burst"
    (one,) = struck
    has_none = one.blow.place in ("worker", "core") and not one.had_spare
    return f"exit of {one.blow.place}" + (NO_SPARE if has_none else "")
