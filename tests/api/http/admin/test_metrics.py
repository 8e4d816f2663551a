"""/metrics of a real stack under load: what it tells is what was done, whoever dies."""

from __future__ import annotations

import json
import os
import re
import signal
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.openmetrics import parser as openmetrics
from prometheus_client.parser import text_string_to_metric_families
from tests.helpers.patience import PATIENCE_S, Patience
from tests.helpers.stacks import spareless_stack

from slipstream import Stack
from slipstream.http.admin.metrics import Metrics
from slipstream_ipc.telemetry.statistics import (
    BOUNDS_S,
    CoreCounters,
    CoreGauges,
    CoreNumbers,
    FrontCounters,
    FrontNumbers,
    Histogram,
    ProcessStatistics,
    Statistics,
)

DASHBOARD = Path(__file__).parents[4] / "scripts" / "deploy" / "grafana.json"
PROMPT = "A dictionary maps hashable values to arbitrary objects, and it is mutable. " * 3
Samples = dict[tuple[str, frozenset[tuple[str, str]]], float]


@pytest.fixture(scope="module")
def stack() -> Iterator[Stack]:
    """One whose cache holds one request of full length, and half of another."""
    options: dict[str, Any] = {"max_model_len": 256, "num_blocks": 26, "hang_timeout_s": 600.0}
    with Stack("simulated:step_ms=1", http_port=0, **options) as running:
        yield running


def scrape(stack: Stack) -> Samples:
    with urllib.request.urlopen(f"{stack.http_address}/metrics", timeout=PATIENCE_S) as answer:
        assert answer.headers["content-type"].startswith("text/plain; version=")
        return samples_of(answer.read().decode())


@lru_cache(1)  # numbers come twice a second, and are asked for far more often
def samples_of(text: str) -> Samples:
    return {
        (sample.name.removeprefix("slipstream:"), frozenset(sample.labels.items())): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def value(samples: Samples, name: str, **labels: str) -> float:
    """The sum of all samples of that name with these labels."""
    return sum(
        number
        for (found, its), number in samples.items()
        if found == name and labels.items() <= dict(its).items()
    )


def wait_for(stack: Stack, condition: Callable[[Samples], bool]) -> Samples:
    """Until the numbers, which come twice a second, say so; asking is what takes the time.

    The front may die meanwhile.
    """
    patience = Patience()
    while True:
        patience.wait("the numbers never said so")
        try:
            if condition(samples := scrape(stack)):
                return samples
        except urllib.error.HTTPError:
            raise
        except OSError:
            continue  # the next one is on its way


def quiet(stack: Stack) -> Samples:
    """Everybody's numbers of a moment behind this call, when nothing runs.

    A front tells how often it was asked for them, every half second, others more often: when that
    has gone up three times, everybody has told twice.
    """

    def num_asked(samples: Samples) -> float:
        return value(samples, "http_requests_total", path="/metrics")

    last = num_asked(scrape(stack))
    for _ in range(3):
        last = num_asked(wait_for(stack, lambda samples, last=last: num_asked(samples) > last))
    return wait_for(stack, lambda samples: not value(samples, "num_requests_running"))


def complete(stack: Stack, **fields: Any) -> Any:
    """A completion's answer."""
    given = {"prompt": PROMPT, "max_tokens": 20, "temperature": 0, "ignore_eos": True, **fields}
    request = urllib.request.Request(
        f"{stack.http_address}/v1/completions",
        json.dumps(given).encode(),
        {"Content-Type": "application/json"},
    )
    with urllib.request.urlopen(request, timeout=PATIENCE_S) as answer:
        return answer.read().decode() if given.get("stream") else json.load(answer)


@pytest.mark.process
def test_a_request_for_several_answers_counts_once(stack: Stack) -> None:
    before = quiet(stack)
    for n in (1, 3, 7):
        complete(stack, n=n, temperature=1.0)
    after = quiet(stack)
    for name, expected in (("count", 3), ("sum", 11)):
        full = f"request_params_n_{name}"
        assert value(after, full) - value(before, full) == expected
    for bound, expected in (("1.0", 1), ("5.0", 2), ("10.0", 3)):
        samples = [value(each, "request_params_n_bucket", le=bound) for each in (before, after)]
        assert samples[1] - samples[0] == expected


@pytest.mark.process
def test_counts_are_what_was_sent(stack: Stack) -> None:
    """Answers are long enough to come in several deltas on a busy machine, as times need."""
    before = quiet(stack)
    with ThreadPoolExecutor(8) as pool:
        answers = list(
            pool.map(lambda n: complete(stack, max_tokens=n, cache_salt=str(n)), range(50, 62))
        )
    num, usages = len(answers), [answer["usage"] for answer in answers]
    after = quiet(stack)

    def more(name: str, **labels: str) -> float:
        return value(after, name, **labels) - value(before, name, **labels)

    num_tokens = sum(usage["completion_tokens"] for usage in usages)
    assert num_tokens == sum(range(50, 62))
    assert more("prompt_tokens_total") == sum(usage["prompt_tokens"] for usage in usages)
    assert more("generation_tokens_total", process="core") == num_tokens
    assert more("delivered_tokens_total", process="worker") == num_tokens
    assert more("requests_accepted_total") == num
    assert more("request_success_total", finished_reason="length") == num
    assert more("request_success_total") == num
    for name in (
        "time_to_first_token_seconds",
        "request_time_per_output_token_seconds",
        "e2e_request_latency_seconds",
        "request_queue_time_seconds",
    ):
        assert more(f"{name}_count") == more(f"{name}_bucket", le="+Inf") == num, name
    assert more("inter_token_latency_seconds_count") == more("deltas_total") - num
    assert 1 <= more("client_messages_total") <= more("deltas_total") <= num_tokens
    assert more("step_time_seconds_count") == more("engine_steps_total") >= 61
    assert more("step_time_seconds_sum") == pytest.approx(more("device_busy_seconds_total"))
    assert more("step_time_seconds_sum") >= 0.001 * 61
    assert more("computed_tokens_total") >= num_tokens
    # a first token cannot be there before its request has waited, nor all before the first
    assert more("time_to_first_token_seconds_sum") >= more("request_queue_time_seconds_sum")
    assert more("e2e_request_latency_seconds_sum") > more("time_to_first_token_seconds_sum")


@pytest.mark.process
def test_the_front_tells_of_its_answers(stack: Stack) -> None:
    before = scrape(stack)
    text = complete(stack, stream=True, max_tokens=30)
    num_events = text.count("data: ")
    with pytest.raises(urllib.error.HTTPError):
        complete(stack, max_tokens="many")
    with pytest.raises(urllib.error.HTTPError):
        urllib.request.urlopen(f"{stack.http_address}/of/my/own/making", timeout=PATIENCE_S)
    answers = {("/v1/completions", "200"), ("/v1/completions", "400"), ("other", "404")}

    def more(samples: Samples, name: str, **labels: str) -> float:
        return value(samples, name, **labels) - value(before, name, **labels)

    after = wait_for(
        stack,
        lambda samples: all(
            more(samples, "http_requests_total", path=path, status=status) == 1
            for path, status in answers
        ),
    )
    assert 0 < more(after, "http_stream_chunks_total") <= num_events
    assert value(after, "http_open_streams") == 0


@pytest.mark.process
def test_open_streams_running_and_cache_use_are_seen(stack: Stack) -> None:
    with stack.client() as client:
        # it cannot end before it is seen: its worker has to hear of each 64 tokens
        streams = [
            client.stream(PROMPT, max_tokens=180, temperature=0, ignore_eos=True) for _ in range(3)
        ]
        seen = wait_for(stack, lambda samples: value(samples, "deltas_total") > 0)
        for stream in streams:
            assert sum(delta.num_tokens for delta in stream) == 180
    assert value(seen, "num_kv_cache_blocks") == 25
    after = quiet(stack)
    assert 0 <= value(after, "kv_cache_usage_perc") < 1
    assert value(after, "num_preemptions_total") > 0, "three of 200 tokens, room for one and a half"


@pytest.mark.process
def test_as_many_run_as_streams_run() -> None:
    """From when all of them have begun until the first of them ends, whichever step it is."""
    num = 32
    with spareless_stack("simulated:step_ms=20", http_port=0) as stack, stack.client() as client:
        streams = [client.stream("x", max_tokens=4000, ignore_eos=True) for _ in range(num)]
        for stream in streams:
            next(stream)
        patience, seen = Patience(), set[float]()
        while value(scrape(stack), "num_requests_running") != num:
            patience.wait()
        while len(seen) < 5:  # times that it was told since
            samples = scrape(stack)
            assert value(samples, "num_requests_running") == num
            assert value(samples, "num_requests_waiting") == 0
            seen.add(value(samples, "engine_steps_total"))
            patience.wait()
        for stream in streams:
            stream.abort()
        while value(scrape(stack), "num_requests_running"):
            patience.wait()


@pytest.mark.process
def test_prefix_hits_are_counted(stack: Stack) -> None:
    before = quiet(stack)
    for _ in range(2):
        complete(stack, cache_salt="this test's")
    after = quiet(stack)
    queries = value(after, "prefix_cache_queries_total") - value(
        before, "prefix_cache_queries_total"
    )
    hits = value(after, "prefix_cache_hits_total") - value(before, "prefix_cache_hits_total")
    assert 0 < hits < queries
    assert hits >= queries / 2 - 16


@pytest.mark.process
def test_a_reader_that_is_slow_gets_more_at_a_time(stack: Stack) -> None:
    before = quiet(stack)
    front = stack.pids["http"]
    body = {"prompt": PROMPT, "max_tokens": 150, "temperature": 0, "ignore_eos": True}
    request = urllib.request.Request(
        f"{stack.http_address}/v1/completions",
        json.dumps({**body, "stream": True}).encode(),
        {"Content-Type": "application/json"},
    )
    with stack.client() as client, urllib.request.urlopen(request, timeout=PATIENCE_S) as answer:
        assert answer.readline().startswith(b"data: ")
        os.kill(front, signal.SIGSTOP)
        try:  # what takes as long as the rest of that answer
            client.generate("A list is", max_tokens=150, ignore_eos=True)
        finally:
            os.kill(front, signal.SIGCONT)
        assert answer.read().endswith(b"data: [DONE]\n\n")
    after = quiet(stack)
    num_tokens = value(after, "delivered_tokens_total") - value(before, "delivered_tokens_total")
    num_deltas = value(after, "deltas_total") - value(before, "deltas_total")
    assert num_tokens == 300
    assert num_tokens / num_deltas > 1
    chunks = "http_stream_chunks_total"
    assert value(after, chunks) - value(before, chunks) < 100


def falls(before: Samples, after: Samples) -> list[Any]:
    """The counters that are less than they were."""
    kinds = ("_total", "_count", "_bucket", "_sum")
    return [
        (key, before[key], after.get(key))
        for key in before
        if key[0].endswith(kinds) and after.get(key, -1.0) < before[key]
    ]


@pytest.mark.process
@pytest.mark.parametrize("name", ["worker", "core", "http"])
def test_counters_outlive_a_process(stack: Stack, name: str) -> None:
    for _ in range(3):
        complete(stack)
    before = quiet(stack)
    num_restarts = value(before, "process_restarts_total", process=name)
    pid = stack.pids[name]
    with stack.client() as client:
        stream = client.stream(PROMPT, max_tokens=200, temperature=0, ignore_eos=True)
        next(stream)
        os.kill(pid, signal.SIGKILL)
        assert sum(delta.num_tokens for delta in stream) >= 190
    patience = Patience()
    last = before
    is_back = False
    while not is_back:
        patience.wait(f"no new {name} was told of")
        # a front that has just begun may know of no process yet
        samples = wait_for(stack, lambda samples: value(samples, "process_up") > 0)
        assert falls(last, samples) == []
        last = samples
        num = value(samples, "process_restarts_total", process=name)
        is_back = num == num_restarts + 1 and value(samples, "process_up", process=name) == 1
    complete(stack)
    after = wait_for(
        stack,
        lambda samples: (
            value(samples, "requests_accepted_total") > value(before, "requests_accepted_total")
            and value(samples, "generation_tokens_total")
            >= value(before, "generation_tokens_total") + 20
        ),
    )
    assert falls(last, after) == []


@pytest.mark.process
def test_a_new_front_names_the_model_before_a_worker_has_told_it(stack: Stack) -> None:
    """Else its first samples would be other series, and all counters seem to begin anew."""
    names = {dict(labels)["model_name"] for _, labels in quiet(stack)}
    worker, front = stack.pids["worker"], stack.pids["http"]
    os.kill(worker, signal.SIGSTOP)
    try:
        os.kill(front, signal.SIGKILL)
        samples = wait_for(
            stack,
            lambda samples: (
                value(samples, "process_up", process="core") == 1
                and value(samples, "process_up", process="http") == 0
            ),
        )
        assert {dict(labels)["model_name"] for _, labels in samples} == names
    finally:
        os.kill(worker, signal.SIGCONT)
    wait_for(stack, lambda samples: value(samples, "process_up", process="http") == 1)


@pytest.mark.process
def test_a_wedged_front_stops_nobody(stack: Stack) -> None:
    front, worker = stack.pids["http"], stack.pids["worker"]
    os.kill(front, signal.SIGSTOP)
    try:
        os.kill(worker, signal.SIGKILL)
        patience = Patience()
        while stack.pids.get("worker") in (worker, None):
            patience.check()
            stack.next_event(1.0)
        with stack.client() as client:
            text = client.generate("A list is", max_tokens=20, ignore_eos=True)
            assert text.num_tokens == 20
    finally:
        os.kill(front, signal.SIGCONT)
    before = quiet(stack)
    complete(stack)
    wait_for(
        stack,
        lambda samples: (
            value(samples, "requests_accepted_total") > value(before, "requests_accepted_total")
        ),
    )


@pytest.mark.process
def test_cpu_and_memory_of_every_process(stack: Stack) -> None:
    samples = quiet(stack)
    for name in ("core", "worker", "tokenizer", "http", "supervisor"):
        assert value(samples, "process_cpu_seconds_total", process=name) > 0
        assert value(samples, "process_resident_memory_bytes", process=name) > 2**20
        assert value(samples, "process_up", process=name) == 1
    assert {dict(labels)["model_name"] for _, labels in samples} == {"simulated:step_ms=1"}


@pytest.mark.process
def test_the_dashboard_asks_for_what_there_is(stack: Stack) -> None:
    with pytest.raises(urllib.error.HTTPError):
        complete(stack, max_tokens=10_000)  # so that something was refused
    with pytest.raises(urllib.error.HTTPError):
        complete(stack, bad_words=["e"] * 100_000)
    complete(stack)
    quiet(stack)
    told = {f"slipstream:{name}" for name, _ in scrape(stack)}
    dashboard = json.loads(DASHBOARD.read_text())
    exprs = [target["expr"] for panel in dashboard["panels"] for target in panel.get("targets", ())]
    asked = {name for expr in exprs for name in re.findall(r"slipstream:\w+", expr)}
    assert len(exprs) >= 15
    assert asked <= told, asked - told
    families = {re.sub("_(total|bucket|sum|count)$", "", name) for name in told}
    shown = {re.sub("_(total|bucket|sum|count)$", "", name) for name in asked}
    assert families - shown <= NOT_SHOWN, "no panel shows these"


NOT_SHOWN = {  # sizes that stay
    "slipstream:num_kv_cache_blocks",
    "slipstream:num_state_snapshots",
    "slipstream:cache_config_info",
    "slipstream:engine_info",
}


# ---- the rendering ---------------------------------------------------------------------------

COUNTS = tuple(range(1, len(BOUNDS_S) + 2))
STATISTICS = Statistics(
    1.0,
    {
        "core": ProcessStatistics(
            "ready",
            7,
            2,
            3.5,
            100,
            CoreNumbers(
                CoreGauges(
                    num_running=3,
                    num_blocks=10,
                    num_used_blocks=5,
                    num_state_snapshots=8,
                    num_used_state_snapshots=2,
                ),
                CoreCounters(
                    num_steps=9,
                    step_s=Histogram(COUNTS, 1.25),
                    num_state_snapshots_loaded=6,
                    num_state_snapshots_evicted=1,
                    num_drafts=4,
                    num_draft_tokens=11,
                    num_accepted_tokens_per_pos=(4, 2, 1),
                    draft_s=0.75,
                ),
            ),
        ),
        "http": ProcessStatistics(
            "silent",
            8,
            0,
            0.5,
            50,
            FrontNumbers(
                counters=FrontCounters(
                    {"200 /a b": 4},
                    5,
                    {"home org/one": 7, "load": 2},
                    {"lost org/one": 1},
                    0.25,
                )
            ),
        ),
        "tokenizer": ProcessStatistics("restarting", num_restarts=1),
    },
)


def test_no_series_is_given_twice() -> None:
    """The only model that is left names the front, and has streams that were not counted apart."""
    counters = FrontCounters(placed={"home one": 5, "home": 3, "load one": 1})
    rows = {"http": ProcessStatistics("ready", numbers=FrontNumbers(counters=counters))}
    text = Metrics().response(Statistics(1.0, rows), "one", "").body.decode()
    lines = [line for line in text.splitlines() if line.startswith("slipstream:router_requests_")]
    assert sorted(lines) == [
        f'slipstream:router_requests_total{{model_name="one",process="http",why="{why}"}} {num}'
        for why, num in (("home", "8.0"), ("load", "1.0"))
    ]


def test_an_engine_that_is_not_ours_is_named() -> None:
    def lines(engine: str) -> list[str]:
        core = ProcessStatistics("ready", numbers=CoreNumbers(CoreGauges(engine=engine)))
        text = Metrics().response(Statistics(1.0, {"core": core}), "m", "").body.decode()
        return [line for line in text.splitlines() if line.startswith("slipstream:engine_info")]

    labels = 'engine="vllm 0.32.0",model_name="m",process="core"'
    assert lines("vllm 0.32.0") == [f"slipstream:engine_info{{{labels}}} 1.0"]
    assert not lines("")


@pytest.mark.parametrize("accept", ["", "application/openmetrics-text; version=1.0.0"])
def test_rendered_in_both_formats(accept: str) -> None:
    response = Metrics().response(STATISTICS, 'a "model"\n', accept)
    text = response.body.decode()
    parse: Any = text_string_to_metric_families
    if accept:
        assert response.content_type.startswith(b"application/openmetrics-text")
        parse = openmetrics.text_string_to_metric_families
    found = {
        (sample.name, tuple(sample.labels[key] for key in sorted(sample.labels))): sample.value
        for family in parse(text)
        for sample in family.samples
    }
    model = 'a "model"\n'
    assert found["slipstream:num_requests_running", (model, "core")] == 3
    assert found["slipstream:kv_cache_usage_perc", (model, "core")] == 0.5
    assert found["slipstream:num_state_snapshots", (model, "core")] == 8
    assert found["slipstream:state_snapshot_usage_perc", (model, "core")] == 0.25
    assert found["slipstream:state_snapshots_loaded_total", (model, "core")] == 6
    assert found["slipstream:state_snapshots_evicted_total", (model, "core")] == 1
    assert found["slipstream:spec_decode_num_drafts_total", (model, "core")] == 4
    assert found["slipstream:spec_decode_num_draft_tokens_total", (model, "core")] == 11
    assert found["slipstream:spec_decode_num_accepted_tokens_total", (model, "core")] == 7
    at_place = "slipstream:spec_decode_num_accepted_tokens_per_pos_total"
    assert [found[at_place, (model, str(at), "core")] for at in range(3)] == [4, 2, 1]
    assert found["slipstream:draft_seconds_total", (model, "core")] == 0.75
    assert found["slipstream:engine_steps_total", (model, "core")] == 9
    assert found["slipstream:process_restarts_total", (model, "core")] == 2
    assert found["slipstream:process_up", (model, "http")] == 0
    assert found["slipstream:process_up", (model, "tokenizer")] == 0
    assert found["slipstream:process_restarts_total", (model, "tokenizer")] == 1
    assert found["slipstream:http_requests_total", (model, "/a b", "http", "200")] == 4
    assert found["slipstream:router_requests_total", ("org/one", "http", "home")] == 7
    assert found["slipstream:router_requests_total", (model, "http", "load")] == 2
    assert found["slipstream:router_moves_total", ("org/one", "http", "lost")] == 1
    assert found["slipstream:router_choose_seconds_total", (model, "http")] == 0.25
    assert found["slipstream:step_time_seconds_count", (model, "core")] == sum(COUNTS)
    assert found["slipstream:step_time_seconds_sum", (model, "core")] == 1.25
    le = [
        found["slipstream:step_time_seconds_bucket", (str(bound), model, "core")]
        for bound in BOUNDS_S
    ]
    assert le == [sum(COUNTS[: n + 1]) for n in range(len(BOUNDS_S))]
    assert ("slipstream:num_clients", (model, "worker")) not in found


def test_rendered_once_for_each_statistics() -> None:
    metrics = Metrics()
    first = metrics.response(STATISTICS, "m", "").body
    assert metrics.response(STATISTICS, "m", "text/plain").body is first
    newer = Statistics(2.0, STATISTICS.processes)
    assert metrics.response(newer, "m", "").body is not first
    assert b'model_name="n"' in metrics.response(newer, "n", "").body


def test_nobody_has_told_anything() -> None:
    """As with a front that just began: there are names, and no numbers."""
    families = list(
        text_string_to_metric_families(Metrics().response(Statistics(), "", "").body.decode())
    )
    assert families
    assert not any(family.samples for family in families)


# what the panels of vLLM's own dashboards query (its examples, as of 0.33), without the prefix
VLLMS_PANELS = (
    "e2e_request_latency_seconds_bucket",
    "prompt_tokens_total",
    "generation_tokens_total",
    "inter_token_latency_seconds_bucket",
    "num_requests_running",
    "num_requests_waiting",
    "time_to_first_token_seconds_bucket",
    "kv_cache_usage_perc",
    "request_prompt_tokens_bucket",
    "request_generation_tokens_bucket",
    "request_success_total",
    "request_queue_time_seconds_sum",
    "request_prefill_time_seconds_sum",
    "request_decode_time_seconds_sum",
    "request_inference_time_seconds_sum",
    "request_max_num_generation_tokens_sum",
    "request_params_max_tokens_sum",
    "request_params_n_bucket",
    "iteration_tokens_total_sum",
    "cache_config_info",
)


def test_what_vllms_dashboards_ask_for_is_there_under_its_prefix() -> None:
    from slipstream_ipc.telemetry.statistics import (
        BriefHistogram,
        CoreCounters,
        CoreGauges,
        CoreNumbers,
        ProcessStatistics,
        Statistics,
        WorkerCounters,
        WorkerNumbers,
    )

    core = CoreNumbers(
        CoreGauges(num_blocks=7, block_size=16),
        CoreCounters(num_steps=2, num_computed_tokens=9, prefill_s=BriefHistogram((3,), 1.5)),
    )
    worker = WorkerNumbers(
        counters=WorkerCounters(
            finished={"stop": 1},
            prompt_tokens=BriefHistogram((0, 1, 0, 0, 0, 1), 200_011.0),
            num_answers=BriefHistogram((3, 0, 1, 0, 0, 0), 7.0),
        )
    )
    processes = {
        name: ProcessStatistics("ready", numbers=numbers)
        for name, numbers in (("core", core), ("worker", worker))
    }
    text = Metrics("vllm:").response(Statistics(1.0, processes), "m", "").body.decode()
    samples = {line.partition("{")[0] for line in text.splitlines() if line[:1] != "#"}
    assert {f"vllm:{name}" for name in VLLMS_PANELS} <= samples
    assert "slipstream:" not in text
    labels = 'model_name="m",process="core"'
    [cache] = [line for line in text.splitlines() if line.startswith("vllm:cache_config_info{")]
    assert 'block_size="16"' in cache
    assert 'num_gpu_blocks="7"' in cache
    assert f"vllm:request_prefill_time_seconds_sum{{{labels}}} 1.5" in text
    assert f"vllm:iteration_tokens_total_count{{{labels}}} 2.0" in text
    of_worker = 'model_name="m",process="worker"'
    assert f'vllm:request_prompt_tokens_bucket{{le="100.0",{of_worker}}} 1.0' in text
    assert f'vllm:request_prompt_tokens_bucket{{le="+Inf",{of_worker}}} 2.0' in text
    assert f'vllm:request_params_n_bucket{{le="1.0",{of_worker}}} 3.0' in text
    assert f'vllm:request_params_n_bucket{{le="5.0",{of_worker}}} 4.0' in text
    assert f"vllm:request_params_n_sum{{{of_worker}}} 7.0" in text
