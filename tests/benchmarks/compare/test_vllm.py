"""`slipstream bench compare vllm`: goals beside vLLM's own server, and what is refused."""

from __future__ import annotations

import sys
from typing import Any

import pytest

from slipstream.cli.main import main
from slipstream.demo_model import MODEL_PATH
from slipstream_lab.compare import vllm as comparison


def row(server: str, streams: int, variant: str, **values: float) -> dict[str, Any]:
    given = {
        "output_tokens_per_s": 100.0,
        "ttft_median_ms": 10.0,
        "chunks_per_token": 1.0,
        "rest_us_per_token": 60.0,
    }
    return {"server": server, "streams": streams, "variant": variant, **given, **values}


def test_a_goal_says_what_was_reached_and_whether_that_is_enough() -> None:
    rows = [
        row("vllm", 1, "plain"),
        row("vllm", 64, "plain"),
        row("vllm", 64, "top5_stop", chunks_per_token=0.02),
        row("slipstream", 1, "plain", output_tokens_per_s=94.0),
        row("slipstream", 64, "plain", ttft_median_ms=9.0, rest_us_per_token=20.0),
        row("slipstream", 64, "top5_stop", ttft_median_ms=11.0, rest_us_per_token=20.0),
    ]
    told = [str(goal) for goal in comparison.goals(rows)]
    assert told == [
        "1 streams, plain: tokens a second, ours / vLLM's: 0.94, goal at least 0.95: not met",
        "1 streams, plain: TTFT p50, ours / vLLM's: 1.00, goal at most 1: met",
        "1 streams, plain: chunks a token: 1.00, goal at least 0.95: met",
        "64 streams, plain: tokens a second, ours / vLLM's: 1.00, goal at least 0.95: met",
        "64 streams, plain: TTFT p50, ours / vLLM's: 0.90, goal at most 1: met",
        "64 streams, plain: chunks a token: 1.00, goal at least 0.95: met",
        "64 streams, plain: CPU of the rest, vLLM's / ours: 3.00, goal at least 3: met",
        "64 streams, top5_stop: tokens a second, ours / vLLM's: 1.00, goal at least 0.95: met",
        "64 streams, top5_stop: TTFT p50, ours / vLLM's: 1.10, goal at most 1: not met",
        "64 streams, top5_stop: chunks a token: 1.00, goal at least 0.95: met",
        "64 streams, top5_stop: CPU of the rest, vLLM's / ours: 3.00, goal at least 4: not met",
    ]


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["nowhere", "--vllm-python", sys.executable], "a folder with a config.json"),
        ([str(MODEL_PATH)], "the interpreter of an environment with vllm"),
        ([str(MODEL_PATH), "--vllm-python", "/nowhere/python"], "an executable"),
    ],
)
def test_what_cannot_be_measured_is_refused(
    words: list[str], told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["bench", "compare", "vllm", *words]) != 0
    assert told in capsys.readouterr().err


def test_a_server_that_does_not_start_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    words = [str(MODEL_PATH), "--quick", "--vllm-python", sys.executable]
    assert main(["bench", "compare", "vllm", *words]) != 0
    assert "vLLM's server did not start" in capsys.readouterr().err


def test_what_a_load_asks_for_is_in_its_requests() -> None:
    from slipstream_bench.common.load.datasets import DatasetRequest
    from slipstream_bench.common.load.openai_target import LoadRequestOptions, OpenAITarget

    no: Any = None
    given = LoadRequestOptions("completions", True, 0.0, 5, True, 1.0, stop="zzqx")
    body = OpenAITarget(no, "m", given, {})._body(DatasetRequest([1, 2], 3))
    assert b'"stop":"zzqx"' in body
    assert b'"logprobs":5' in body
