"""`slipstream bench overlap`: what is counted is what came, and every table can be had."""

from __future__ import annotations

import json
from types import SimpleNamespace

import numpy as np
import pytest
from tests.helpers.fake_worker import Entry, deltas, end_of
from tests.helpers.new_requests import new_request
from tests.helpers.patience import PATIENCE_S, Patience

from slipstream.cli.main import main
from slipstream.errors import EngineError
from slipstream_bench.common.live_streams import LiveStreams, Window, random_prompts
from slipstream_core.config import CoreConfig
from slipstream_core.runner.simulated.simulated_runner import load_simulated
from slipstream_core.scheduler.scheduler import CacheConfig, Scheduler
from slipstream_ipc.history.token_log import TokenLog
from slipstream_ipc.messages import End, Fault, SamplingParams, Submit
from slipstream_lab.overlap import arrivals, delta_latency, stops
from slipstream_lab.overlap.arrivals import Arrival
from slipstream_lab.overlap.watched_core import RecordedRunner, StepRecord

KEYS = {"mode", "batch", "step_ms", "variant", "tpot_ms", "efficiency", "device_idle_share"}


# ---- the client ----------------------------------------------------------------------------


def _open(worker, num):
    params = SamplingParams(max_tokens=100)
    requests = [(prompt, params) for prompt in random_prompts(num)]
    live = LiveStreams(worker.address, requests, keeps_times=True)
    handles = [worker.accept(worker.expect(Submit)) for _ in range(num)]
    return live, handles


class _During:
    """In place of an event: does something, then waits until so many tokens have come."""

    def __init__(self, live, action, num_tokens):
        self._live, self._action, self._num_tokens = live, action, num_tokens

    def wait(self, _seconds):
        self._action()
        patience = Patience()
        while sum(tally.num_tokens for tally in self._live.tallies) < self._num_tokens:
            patience.check("they never came")
            self._live._is_over.wait(0.01)

    def set(self):
        pass


def test_a_window_counts_what_came_in_it(worker, monkeypatch):
    live, (one, two) = _open(worker, 2)
    with live:
        worker.send(deltas(Entry(one, "a"), Entry(two, "b")))
        live.wait_until_running(0.0)

        def more():
            worker.send(deltas(Entry(one, "bcd", chars=1), Entry(two, "c", chars=1)))
            worker.send(deltas(Entry(one, "e", chars=4)))

        monkeypatch.setattr(live, "_is_draining", _During(live, more, 7))
        window = live.window(PATIENCE_S, {})
        assert (window.num_tokens, window.num_deltas) == (5, 3)
        assert window.coalescing == pytest.approx(5 / 3)
        assert window.cpu_s.keys() == {"client"}
        assert window.cpu_us_per_token("client") > 0
    assert [tally.tokens_at for tally in live.tallies] == [[1, 4, 5], [1, 2]]
    assert all(len(tally.times_s) == len(tally.tokens_at) for tally in live.tallies)


def test_a_window_ends_when_fewer_streams_run(worker):
    live, (one, two) = _open(worker, 2)
    with live:
        worker.send(deltas(Entry(one, "a"), Entry(two, "b")))
        live.wait_until_running(0.0)
        worker.send(deltas(Entry(one, "c", chars=1, end=end_of("ac"))))
        window = live.window(PATIENCE_S, {})
        assert window.end_s - window.begin_s < PATIENCE_S
        worker.send(deltas(Entry(two, "", chars=1, ids=(), end=end_of("b"))))
        live.wait_until_over(PATIENCE_S)


def test_a_stream_that_fails_fails_the_measurement(worker):
    live, (one, _) = _open(worker, 2)
    with live:
        fault = Fault("engine", "no memory is left")
        worker.send(deltas(Entry(one, "a", end=end_of("a", "error", fault=fault))))
        with pytest.raises(EngineError, match="no memory is left"):
            live.wait_until_running(0.0)


# ---- the watched core ----------------------------------------------------------------------


def test_the_record_says_how_many_outputs_were_computed_of_each_request():
    config = CoreConfig(
        model="simulated:step_ms=0,vocab_size=50", address="ipc:///nowhere", max_num_seqs=4
    )
    runner = RecordedRunner(load_simulated(config), keeps_seeds=True)
    tokens = TokenLog()
    scheduler = Scheduler(
        tokens=tokens,
        cache=CacheConfig(num_blocks=runner.num_blocks, block_size=runner.info.block_size),
        max_num_seqs=4,
        max_num_batched_tokens=8,  # so that prompts take several steps
        max_model_len=runner.info.max_model_len,
    )
    wanted = {3: 5, 0: 2, 70: 4}
    for row, (seed, max_tokens) in enumerate(wanted.items()):
        tokens.open(row)
        tokens.extend(row, np.arange(11, dtype=np.uint32))
        scheduler.add(
            new_request(
                row=row,
                prompt_len=11,
                max_tokens=max_tokens,
                temperature=1.0,
                top_k=0,
                top_p=1.0,
                min_p=0.0,
                seed=seed,
            )
        )
    acked = np.full(8, 1000)
    while scheduler.has_work:
        plan = scheduler.schedule(acked)
        runner.launch(plan)
        scheduler.complete(plan, runner.collect().token_ids)
    record = runner.record()
    assert {seed: record.computed[seed] for seed in wanted} == wanted
    assert sum(record.computed) == sum(wanted.values()) == sum(record.num_sampled)
    assert [len(seeds) for seeds in record.seeds] == record.num_sampled
    assert sum(seeds.count(70) for seeds in record.seeds) == wanted[70]
    columns = [record.launched_s, record.done_s, record.collected_s, record.idle_s, record.busy_s]
    assert {len(column) for column in columns} == {len(record.num_sampled)}
    assert record.launched_s == sorted(record.launched_s)
    assert all(done <= got for done, got in zip(record.done_s, record.collected_s, strict=True))


def _record(**columns):
    defaults = {
        "launched_s": [1.0, 2.0, 4.0],
        "done_s": [2.0, 3.0, 5.0],
        "collected_s": [2.001, 3.002, 5.003],
        "num_sampled": [1, 1, 1],
        "idle_s": [0.0, 0.0, 1.0],
        "busy_s": [1.0, 2.0, 3.0],
        "computed": [3],
        "seeds": [],
    }
    return StepRecord(**(defaults | columns))


def test_the_idle_share_is_that_of_the_steps_inside():
    assert _record().idle_share(0.0, 3.0) == 0.0
    assert _record().idle_share(0.0, 5.0) == pytest.approx(1 / 3)
    assert _record().idle_share(1.5, 5.0) == pytest.approx(1 / 2)
    assert _record().idle_share(8.0, 9.0) == 0.0


# ---- the other tables ----------------------------------------------------------------------


def test_an_overrun_is_what_was_computed_behind_the_stop():
    def tally(end, *times_s):
        return SimpleNamespace(state=SimpleNamespace(end=end), times_s=list(times_s))

    tallies = [
        tally(End("stop", 10, " with "), 1.1, 1.5),
        tally(End("stop", 20, " with "), 1.9),
        tally(End("stop", 30, " with "), 0.5),  # before the window
        tally(End("length", 40), 1.5),
        tally(None, 1.5),
    ]
    record = _record(computed=[11, 23, 39, 40, 50])
    window = Window(1.0, 2.0, 5000, 5000, 5000.0, {})
    row = stops._row(25, 5.0, tallies, window, record)
    assert (row["num_stopped"], row["overrun_max_steps"]) == (2, 3)
    assert row["new_per_step"] == 0.01  # 2 in 200 steps of 5 ms
    assert row["overrun_mean_steps"] == 2.0
    assert row["over_one_share"] == 0.5
    assert row["efficiency"] == 1.0


def test_latency_is_from_the_collected_step_to_the_delta(monkeypatch):
    monkeypatch.setattr(delta_latency, "_WARM_UP", 0)
    arrivals = delta_latency.Arrivals(2)
    arrivals.times_s[:] = [[2.1, 3.0025, 9.0], [3.0035, 5.1, 9.0]]
    arrivals.num_deltas = 6
    row = delta_latency._row("stream_many", 3, arrivals, _record(seeds=[[0], [1, 0], [0, 1], [1]]))
    assert (row["num_tokens"], row["tokens_per_delta"]) == (2, 1)
    assert row["from_host_p50_us"] == pytest.approx(1000)
    assert row["from_step_end_p50_us"] == pytest.approx(3000)
    with pytest.raises(EngineError, match="all at once"):
        delta_latency._row("stream_many", 3, arrivals, _record(seeds=[[0]] * 3 + [[1]] * 3))


def test_gaps_are_those_that_end_while_something_arrives():
    tallies = [SimpleNamespace(times_s=[1.0, 1.01, 1.05, 1.06])]
    gaps = arrivals._gaps(tallies, [(1.02, 1.055)])
    assert gaps == pytest.approx([40.0])
    calm = arrivals._gaps(tallies, [(0.0, 1.015)])
    row = arrivals._row("chat_500", gaps, calm, [Arrival(1.02, 1.055, 77)])
    assert row["delay_p99_ms"] == pytest.approx(30.0)
    assert (row["num_arrivals"], row["prompt_tokens"], row["num_gaps"]) == (1, 77, 1)


# ---- the command ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        ("--variants plain,plane", "variants"),
        ("--modes both", "modes"),
        ("--batches 0", "batches"),
        ("--steps-ms 0.5", "--steps-ms: got"),
        ("--against vllm", "--vllm-python"),
        ("--stops --png /tmp/stops.png", "png"),
        ("--runs 0", "runs"),
    ],
)
def test_what_cannot_be_measured_is_refused(words, complaint, capsys):
    assert main(["bench", "overlap", *words.split()]) == 2
    assert complaint in capsys.readouterr().err


def test_every_mode_is_measured(tmp_path, capsys):
    rows_file, picture = tmp_path / "rows.json", tmp_path / "bars.png"
    words = "bench overlap --quick --batches 3 --steps-ms 2 --modes in_loop,in_loop_async,worker"
    assert main([*words.split(), "--json", str(rows_file), "--png", str(picture)]) == 0
    rows = json.loads(rows_file.read_text())
    modes = {"in_loop", "in_loop_async", "worker"}
    variants = {"plain", "stop2_logprobs5"}
    assert {(row["mode"], row["variant"]) for row in rows} == {
        (mode, variant) for mode in modes for variant in variants
    }
    for row in rows:
        assert row.keys() >= KEYS
        assert row["is_simulated"]
        assert row["efficiency"] == pytest.approx(row["step_ms"] / row["tpot_ms"], abs=1e-3)
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert "simulated" in capsys.readouterr().out


def test_stops_and_latency_are_measured(tmp_path, monkeypatch):
    monkeypatch.setattr(stops, "_BATCH", 4)
    monkeypatch.setattr(stops, "_STEP_MS", 1.0)
    monkeypatch.setattr(stops, "_SETTLE_S", 0.0)  # so few streams could all have ended by then
    monkeypatch.setattr(delta_latency, "_QUICK_NUM_TOKENS", 60)
    monkeypatch.setattr(delta_latency, "_BATCHES", (1, 3))
    rows_file = tmp_path / "rows.json"
    words = ["bench", "overlap", "--stops", "--latency", "--quick", "--json", str(rows_file)]
    assert main(words) == 0
    rare, common, *read = json.loads(rows_file.read_text())
    assert (rare["stop_strings"], common["stop_strings"]) == ("rare", "common")
    for stopped in (rare, common):
        assert stopped["num_stopped"] > 0
        assert stopped["overrun_max_steps"] >= stopped["overrun_p50_steps"] >= 0
    assert [(row["batch"], row["reader"]) for row in read] == [
        *((1, reader) for reader in ("stream_many", "blocking", "asyncio")),
        (3, "stream_many"),
    ]
    assert all(row["num_tokens"] > 30 and row["from_host_p50_us"] > 0 for row in read)


def test_arrivals_are_measured(tmp_path, monkeypatch):
    monkeypatch.setattr(arrivals, "_BATCH", 3)
    kinds = (("prompt", "prompt", 3000), ("chat", "chat", 20))
    monkeypatch.setattr(arrivals, "_KINDS", kinds)
    rows_file = tmp_path / "rows.json"
    assert main(["bench", "overlap", "--arrivals", "--quick", "--json", str(rows_file)]) == 0
    none, prompt, chat = json.loads(rows_file.read_text())
    assert none["arrival"] == "none"
    assert none["delay_p99_ms"] == 0
    assert abs(prompt["prompt_tokens"] - 3000) < 30
    assert chat["prompt_tokens"] > 100
    assert all(row["num_arrivals"] == 2 and row["num_gaps"] > 0 for row in (prompt, chat))
