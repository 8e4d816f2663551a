"""`slipstream bench output-path`: that it measures the real thing, and tells what it measured."""

from __future__ import annotations

import gc
import json
import sys
from itertools import product
from typing import get_args

import numpy as np
import pytest
from tokenizers import Tokenizer

from slipstream.cli.main import main
from slipstream.demo_model import MODEL_PATH
from slipstream.errors import SlipstreamError
from slipstream_bench.common.variants import NUM_LOGPROBS, VARIANTS, params_of
from slipstream_lab.common.collection_watch import CollectionWatch
from slipstream_lab.common.memory_wire import MemoryNetwork
from slipstream_lab.output_path import workload
from slipstream_lab.output_path.delta_readers import READS
from slipstream_lab.output_path.floor import BARE, Sent, Transport, wire_us
from slipstream_lab.output_path.in_process_path import STAGES, OutputPath
from slipstream_lab.output_path.output_path import with_ratios
from slipstream_lab.output_path.path_measure import PathSetting, measure_floor
from slipstream_lab.output_path.stopwatch import Stopwatch
from slipstream_lab.output_path.workload import detokenizers_of, make_workload
from slipstream_lab.peers import peer_process
from slipstream_lab.peers.peer_process import measure_output_path

BATCH, STEPS, PROMPT_LEN = 5, 24, 16


@pytest.fixture(autouse=True)
def _little_text(monkeypatch):
    monkeypatch.setattr(workload, "_NUM_FILES", 3)


@pytest.fixture(scope="module")
def tokenizer():
    return Tokenizer.from_file(str(MODEL_PATH / "tokenizer.json"))


# ---- the path ------------------------------------------------------------------------------


@pytest.mark.parametrize("tokens_per_row", [(1, 1), (5, 5), (1, 4)])
@pytest.mark.parametrize("variant", VARIANTS)
def test_what_is_generated_is_what_is_read(tokenizer, variant, tokens_per_row):
    load = make_workload(tokenizer, BATCH, prompt_len=PROMPT_LEN, steps=STEPS)
    watch = Stopwatch(CollectionWatch())
    path = OutputPath(
        load,
        BATCH,
        params_of(variant, STEPS),
        detokenizers_of(tokenizer),
        tokenizer.get_vocab_size(),
        watch,
        tokens_per_row=tokens_per_row,
    )
    texts, ids, entries = [""] * BATCH, [[] for _ in range(BATCH)], [[] for _ in range(BATCH)]
    try:
        while not path.is_done:
            path.step()
            for index, state in enumerate(path.states):
                while state.deltas:
                    delta = state.deltas.popleft()
                    texts[index] += delta.text
                    ids[index] += delta.token_ids
                    entries[index] += delta.logprobs or []
            path.take_reports()
        path.check_whole()
    finally:
        path.close()
    assert ids == load.outputs.tolist()
    for index in range(BATCH):
        prompt = load.prompts[index].tolist()
        whole = tokenizer.decode(prompt + ids[index], skip_special_tokens=True)
        assert whole.endswith(texts[index])
        assert texts[index].strip()
    if "logprobs5" in variant:
        for index, position in product(range(BATCH), range(STEPS)):
            candidates = entries[index][position]
            assert next(iter(candidates)) == ids[index][position]
            values = [candidate.logprob for candidate in candidates.values()]
            assert len(values) > 1
            assert set(values) <= set(load.logprobs[index].tolist())
    else:
        assert not any(entries)
    assert set(path.num_bytes) == {"core", "worker", "client"}
    assert all(path.num_bytes.values())
    assert watch.us("collect") > 0
    assert watch.us("client") > 0


def test_a_workload_is_the_same_for_everybody(tokenizer, tmp_path):
    load = make_workload(tokenizer, BATCH, prompt_len=PROMPT_LEN, steps=STEPS)
    again = make_workload(tokenizer, BATCH, prompt_len=PROMPT_LEN, steps=STEPS)
    load.save(tmp_path / "w.npz", ("plain", "stop2_logprobs5", "interval10"))
    with np.load(tmp_path / "w.npz") as arrays:
        for name in ("prompts", "outputs", "logprobs", "candidates"):
            assert (arrays[name] == getattr(again, name)).all()
        meanings = json.loads(str(arrays["variants"]))
    assert [one["logprobs"] for one in meanings] == [None, NUM_LOGPROBS, None]
    assert [len(one["stop"]) for one in meanings] == [0, 2, 0]
    assert [one["interval"] for one in meanings] == [1, 1, 10]
    assert (np.diff(load.logprobs, axis=1) <= 0).all()


# ---- the wire that is none, and the one that is ----------------------------------------------


def test_connections_in_memory_carry_messages_both_ways():
    network = MemoryNetwork()
    assert network.connect("ipc:///here") is None
    listener = network.listen("ipc:///here")
    client = network.connect("ipc:///here")
    tapped = []
    network.tap = lambda sender, data: tapped.append((sender.is_accepted, data))
    assert client.send(b"one")
    assert client.send(b"two")
    assert len(listener.ready()) == 1
    server = listener.ready().popleft()
    assert list(server.messages) == [b"one", b"two"]
    assert server.send(b"back")
    assert list(client.messages) == [b"back"]
    assert tapped == [(False, b"one"), (False, b"two"), (True, b"back")]
    client.close()
    assert server.is_broken
    assert list(listener.ready()) == [server]
    assert not server.send(b"gone")


@pytest.mark.parametrize("transport", get_args(Transport))
def test_a_real_wire_takes_some_time(transport):
    sizes = {"step": 2**21, "report": 10, "deltas": 1000, "receipt": 0}
    assert wire_us([Sent(hop, bytes(size)) for hop, size in sizes.items()], transport) > 0


def test_the_floor_is_of_messages_that_the_hops_decode(tokenizer):
    load = make_workload(tokenizer, BATCH, prompt_len=PROMPT_LEN, steps=STEPS)
    setting = PathSetting(load, detokenizers_of(tokenizer), tokenizer.get_vocab_size(), 0.0)
    rows = measure_floor(setting, BATCH, "stop2_logprobs5")
    assert [row["read"] for row in rows] == list(BARE)
    for row in rows:
        assert row["engine"] == "floor"
        parts = row["encode_us"] + row["decode_us"] + row["wire_us"]
        assert row["us_per_token"] == pytest.approx(parts, abs=0.001)
        assert row["messages_per_token"] >= 2 / BATCH  # a step and deltas


def test_a_stopwatch_takes_off_what_reading_it_costs():
    watch = Stopwatch(CollectionWatch(), lap_ns=1e12)
    watch.start()
    watch.lap("stage")
    assert watch.us("stage") == 0
    assert watch.us("another") == 0


def test_a_stopwatch_counts_what_a_stage_leaves_to_the_collector():
    gc.collect()  # what other tests have left is not to be freed in a stage of this one
    with CollectionWatch() as collections:
        watch = Stopwatch(collections)
        watch.start()
        kept = [[] for _ in range(5000)]
        watch.lap("keeps")
        for _ in range(5000):
            [].append(0)
        watch.lap("drops")
        kept.clear()
    # eighty come from the interpreter's own stock of lists, and each collection takes a few off
    assert abs(watch.num_tracked["keeps"] - 5000) < 200
    assert abs(watch.num_tracked["drops"]) < 100


# ---- the command ---------------------------------------------------------------------------


def test_the_command_tells_a_row_for_each_batch_variant_and_way_of_reading(tmp_path, capsys):
    json_file, png_file = tmp_path / "rows.json", tmp_path / "rows.png"
    words = ["--batches", "1,3", "--variants", "plain,logprobs5", "--steps", "12", "--runs", "2"]
    options = ["--json", str(json_file), "--png", str(png_file)]
    assert main(["bench", "output-path", *words, *options]) == 0
    every = json.loads(json_file.read_text())
    rows = [row for row in every if row["engine"] == "slipstream"]
    points = list(product([1, 3], ["plain", "logprobs5"]))
    found = [(row["batch"], row["variant"], row["read"]) for row in rows]
    assert found == [(*point, read) for point in points for read in READS]
    floors = [row for row in every if row["engine"] == "floor"]
    found = [(row["batch"], row["variant"], row["read"]) for row in floors]
    assert found == [(*point, transport) for point in points for transport in BARE]
    assert len(every) == len(rows) + len(floors)
    for row in rows:
        both = row["us_per_token"] + row["wire_us"]
        assert row["over_floor"] == pytest.approx(both / row["floor_us"], rel=0.3)  # medians
        assert row["us_per_token"] > 0
        stages = sum(row[f"{stage}_us"] for stage in STAGES)
        assert row["runs"] == 2
        assert stages == pytest.approx(row["us_per_token"], abs=0.01)
        assert row["deltas_per_token"] == 1
        assert row["bytes_per_token"] > row["core_bytes_per_token"] > 8
        assert {"gc_gen0", "gc_gen2", "wire_us", "worker_gen0_per_100_steps"} <= row.keys()
    assert png_file.read_bytes().startswith(b"\x89PNG")
    assert "us_per_token" in capsys.readouterr().out


def test_two_workers_are_compared_with_one(tmp_path, capsys):
    json_file = tmp_path / "rows.json"
    # as many streams as are certain to be dealt to both workers
    words = ["--batches", "32", "--variants", "stop2", "--steps", "8", "--runs", "1"]
    options = ["--output-workers", "1,2", "--json", str(json_file)]
    assert main(["bench", "output-path", *words, *options]) == 0
    rows = [row for row in json.loads(json_file.read_text()) if row["engine"] == "slipstream"]
    [two] = [row for row in rows if row["workers"] == 2]
    assert two["read"] == "columns"
    assert two["over_one_worker"] > 0
    assert two["messages_per_token"] > rows[0]["messages_per_token"]
    assert not any("over_one_worker" in row for row in rows if row["workers"] == 1)
    capsys.readouterr()


def test_what_cannot_be_is_refused(capsys, tmp_path):
    for words, said in (
        (["--batches", "0"], "batches"),
        (["--batches", "8,x"], "batches"),
        (["--variants", "plain,none"], "variants"),
        (["--variants", ""], "variants"),
        (["--steps", "1"], "steps"),
        (["--tokenizer", str(tmp_path)], "tokenizer"),
        (["--against", "nobody"], "against"),
        (["--against", "vllm"], "--vllm-python:"),
        (["--against", "sglang", "--sglang-python", str(tmp_path / "none")], "--sglang-python:"),
    ):
        assert main(["bench", "output-path", "--quick", *words]) == 2
        assert said in capsys.readouterr().err


def test_ratios_compare_what_is_alike():
    def row(engine: str, read: str, us: float) -> dict[str, object]:
        return {
            "engine": engine,
            "batch": 8,
            "variant": "plain",
            "read": read,
            "us_per_token": us,
        }

    rows = [
        row("slipstream", "columns", 1.0),
        row("slipstream", "materialised", 2.0),
        row("slipstream", "async_for", 4.0),
        row("vllm", "materialised", 10.0),
        row("vllm", "async_for", 16.0),
        row("sglang", "materialised", 30.0),
    ]
    rows += [row("floor", "unix", 1.5), row("floor", "zeromq", 3.0)]
    columns, materialised, async_for, *theirs = with_ratios(rows)
    assert "ratio_to_floor" not in columns
    assert (columns["ratio_to_vllm"], columns["ratio_to_sglang"]) == (10, 30)
    assert (materialised["ratio_to_vllm"], materialised["ratio_to_sglang"]) == (5, 15)
    assert async_for["ratio_to_vllm"] == 4
    assert "ratio_to_sglang" not in async_for
    assert theirs == rows[3:]


# ---- peers ---------------------------------------------------------------------------------

SCRIPT = """
import json, sys
options = dict(zip(sys.argv[1::2], sys.argv[2::2]))
json.dump([{"engine": "vllm", "batch": int(options["--batches"])}], open(options["--json"], "w"))
"""


@pytest.fixture
def ask_peer(tmp_path, monkeypatch):
    monkeypatch.setattr(peer_process, "FOLDER", tmp_path)

    def ask(script: str) -> list[dict[str, object]]:
        (tmp_path / "vllm_output_path.py").write_text(script)
        return measure_output_path(
            "vllm",
            sys.executable,
            model=tmp_path,
            workload=tmp_path / "workload.npz",
            batches=[3],
            variants=["plain"],
            runs=1,
        )

    return ask


def test_a_peers_rows_are_read(ask_peer):
    assert ask_peer(SCRIPT) == [{"engine": "vllm", "batch": 3}]


def test_a_peer_that_fails_says_why(ask_peer):
    with pytest.raises(SlipstreamError, match="no module of that name"):
        ask_peer("raise SystemExit('no module of that name')")


def test_the_peers_programs_are_there():
    for peer in peer_process.PEERS:
        assert (peer_process.FOLDER / f"{peer}_output_path.py").is_file()
