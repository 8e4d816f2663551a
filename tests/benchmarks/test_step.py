"""`slipstream bench step`: real parts, each timed once a step, and what cannot be is refused."""

from __future__ import annotations

import json
import time
from types import SimpleNamespace

import pytest

from slipstream.cli.main import main
from slipstream.demo_model import MODEL_PATH
from slipstream_core.runner import sample_stage, torch_runner
from slipstream_lab.common.core_parts import DEVICE, PARTS, CoreParts
from slipstream_lab.step import model_parts


@pytest.mark.parametrize(("batch", "enable_prefix_caching"), [(3, True), (3, False), (1024, True)])
def test_every_part_of_every_step_is_timed_and_every_token_arrives(batch, enable_prefix_caching):
    """Also of more requests than a link has credit for."""
    parts = CoreParts(batch, prompt_len=20, steps=40, enable_prefix_caching=enable_prefix_caching)
    try:
        for _ in range(40):
            parts.step()
        parts.check_whole()
        us = parts.measured_us()
        assert {name: len(times) for name, times in us.items()} == dict.fromkeys(
            (*PARTS, DEVICE), 40
        )
        assert all(time > 0 for times in us.values() for time in times)
        cache = parts._core.scheduler._blocks._cache
        assert (cache is not None) == enable_prefix_caching
        if cache is not None:
            assert len(cache._block_of) >= 3
    finally:
        parts.close()


def test_a_model_is_timed_where_all_decode_and_left_as_it_was():
    before = sample_stage.sample, torch_runner.TorchRunner._forward
    batches = [1, 3, 130]  # of 130 the prompts take two steps
    runner = model_parts.load(str(MODEL_PATH), batches=batches, prompt_len=20, steps=4, threads=1)
    try:
        found = [
            model_parts.measure(runner, n, prompt_len=20, steps=4, enable_prefix_caching=True)
            for n in batches
        ]
    finally:
        runner.close()
    assert (sample_stage.sample, torch_runner.TorchRunner._forward) == before
    for us in found:
        assert {name: len(times) for name, times in us.items()} == dict.fromkeys(
            (*PARTS, *model_parts.PARTS), 4
        )
        assert all(time > 0 for times in us.values() for time in times)
        for model, sampling, device in zip(*(us[part] for part in model_parts.PARTS), strict=True):
            assert model + sampling < device


def test_a_device_that_takes_longer_is_told_where_it_does(monkeypatch):
    """What is put into one part of a model's step is found there and in no other."""
    runner = model_parts.load(str(MODEL_PATH), batches=[2], prompt_len=8, steps=4, threads=1)
    sample, later_ns = sample_stage.sample, 0
    long_us = 1e9  # a thousand seconds, which nothing else takes

    def slowly(*arguments, **options):
        nonlocal later_ns
        later_ns += int(long_us * 1e3)
        return sample(*arguments, **options)

    clock = SimpleNamespace(perf_counter_ns=lambda: time.perf_counter_ns() + later_ns)
    monkeypatch.setattr(model_parts, "time", clock)
    monkeypatch.setattr(sample_stage, "sample", slowly)
    try:
        us = model_parts.measure(runner, 2, prompt_len=8, steps=4, enable_prefix_caching=True)
    finally:
        runner.close()
    assert min(us["sampling"]) >= long_us
    assert min(us["device"]) >= long_us
    slow = {part for part in us if max(us[part]) >= long_us}
    assert slow == {"sampling", "device"}


def test_the_command_tells_each_part_of_each_batch(tmp_path, capsys):
    json_file, png_file = tmp_path / "rows.json", tmp_path / "rows.png"
    words = ["--batches", "1,5", "--steps", "6", "--prompt-len", "8", "--runs", "2"]
    options = ["--json", str(json_file), "--png", str(png_file)]
    assert main(["bench", "step", *words, *options]) == 0
    rows = json.loads(json_file.read_text())
    assert [(row["batch"], row["part"]) for row in rows] == [
        (batch, part) for batch in (1, 5) for part in (*PARTS, "all", DEVICE)
    ]
    for row in rows:
        assert row["us_per_step"] > 0
        assert (row["steps"], row["runs"], row["prompt_len"]) == (6, 2, 8)
    assert png_file.read_bytes().startswith(b"\x89PNG")
    assert "us_per_step" in capsys.readouterr().out


def test_the_command_tells_where_a_models_step_goes(tmp_path):
    json_file = tmp_path / "rows.json"
    words = ["--batches", "2", "--steps", "3", "--prompt-len", "8", "--runs", "1"]
    options = ["--model", str(MODEL_PATH), "--threads", "1", "--json", str(json_file)]
    assert main(["bench", "step", *words, *options]) == 0
    rows = [row for row in json.loads(json_file.read_text()) if row["model"] != "simulated"]
    us = {row["part"]: row["us_per_step"] for row in rows}
    assert list(us) == [*PARTS, "all", *model_parts.PARTS]
    assert {(row["model"], row["batch"], row["steps"]) for row in rows} == {(str(MODEL_PATH), 2, 3)}
    assert all(time > 0 for time in us.values())


def test_what_cannot_be_is_refused(capsys):
    for words in (["--batches", "0"], ["--steps", "0"], ["--prompt-len", "0"], ["--threads", "0"]):
        assert main(["bench", "step", *words]) == 2
        assert f"{words[0]}: got" in capsys.readouterr().err
