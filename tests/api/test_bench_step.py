"""`slipstream bench step`: real parts, each timed once a step, and what cannot be is refused."""

from __future__ import annotations

import json

import pytest

from slipstream.bench.step import model_parts
from slipstream.bench.step.core_parts import DEVICE, PARTS, CoreParts
from slipstream.cli import main
from slipstream.demo import MODEL_PATH
from slipstream_core.runner import torch_runner


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
    before = torch_runner.sample, torch_runner.TorchRunner._forward
    longest = 20 + model_parts.num_outputs(3, 20, 4)
    runner = model_parts.load(str(MODEL_PATH), batches=[1, 3], longest=longest, threads=1)
    try:
        us = model_parts.measure(runner, 3, prompt_len=20, steps=4)
    finally:
        runner.close()
    assert (torch_runner.sample, torch_runner.TorchRunner._forward) == before
    assert {name: len(times) for name, times in us.items()} == dict.fromkeys(model_parts.PARTS, 4)
    for attention, matmul, sampling, device in zip(*us.values(), strict=True):
        assert min(attention, matmul, sampling) > 0
        assert attention + matmul + sampling < device


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


def test_what_cannot_be_is_refused(capsys):
    for words in (["--batches", "0"], ["--steps", "0"], ["--prompt-len", "0"], ["--threads", "0"]):
        assert main(["bench", "step", *words]) == 2
        assert words[0].removeprefix("--").replace("-", "_") in capsys.readouterr().err
