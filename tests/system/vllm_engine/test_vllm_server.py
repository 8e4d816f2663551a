"""The real vLLM behind a stack: the same tokens as vLLM's own `LLM`, through deaths too.

SLIPSTREAM_VLLM_PYTHON names the Python of an environment that has vLLM for a CPU (decision 003);
without it nothing here runs.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import psutil
import pytest
from tests.helpers.patience import Patience

from slipstream import BadRequestError, Client, Stack, StructuredOutputs
from slipstream.client.client import Stream
from slipstream.demo_model import MODEL_PATH
from slipstream_core.vllm_engine.settings import minor_version

PYTHON = os.environ.get("SLIPSTREAM_VLLM_PYTHON")
OPTIONS: dict[str, Any] = {
    "dtype": "float32",
    "max_model_len": 512,
    "max_num_seqs": 16,
    "enforce_eager": True,
}
KINDS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0},
    "seeded": {"temperature": 1.0, "seed": 7, "top_p": 0.9, "top_k": 50},
    "penalties": {
        "temperature": 0.8,
        "seed": 9,
        "frequency_penalty": 0.7,
        "presence_penalty": 0.4,
        "repetition_penalty": 1.2,
    },
    "greedy and a penalty": {"temperature": 0, "frequency_penalty": 0.7},
    "log-probabilities": {"temperature": 0, "logprobs": 5},
    "min_p": {"temperature": 1.0, "seed": 3, "min_p": 0.05},
    "bias": {"temperature": 0, "logit_bias": {400: 5, 500: -100}},
    "allowed": {"temperature": 1.0, "seed": 11, "allowed_token_ids": [400, 401, 402, 500]},
}
NUM_EACH, NUM_TOKENS = 3, 48
MASKED_SINCE = "0.31"  # earlier releases apply a request's allowed ids to others, too

pytestmark = pytest.mark.skipif(PYTHON is None, reason="SLIPSTREAM_VLLM_PYTHON names none")


def prompt_of(i: int) -> list[int]:
    return [300 + (37 * i + 11 * at) % 1500 for at in range(24)]


@cache
def version() -> str:
    """The version of PYTHON's vLLM."""
    assert PYTHON is not None
    program = "from vllm.version import __version__; print(__version__)"
    return subprocess.check_output([PYTHON, "-c", program], text=True).split()[-1]


def has_masks() -> bool:
    return minor_version(version()) >= minor_version(MASKED_SINCE)


def requests() -> list[tuple[list[int], dict[str, Any]]]:
    return [
        (prompt_of(i), {**params, "max_tokens": NUM_TOKENS, "ignore_eos": True})
        for name, params in KINDS.items()
        if name != "allowed" or has_masks()
        for i in range(NUM_EACH)
    ]


@pytest.fixture(scope="module")
def answers() -> list[dict[str, Any]]:
    """vLLM's own, of all requests at once."""
    assert PYTHON is not None
    asked = {
        "model": str(MODEL_PATH),
        "options": {**OPTIONS, "kv_cache_memory_bytes": 2**29},
        "requests": [{"prompt": prompt, "params": params} for prompt, params in requests()],
    }
    program = Path(__file__).with_name("llm_answers.py")
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [PYTHON, str(program)],
        input=json.dumps(asked),
        capture_output=True,
        text=True,
        env=environment,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    found: list[dict[str, Any]] = json.loads(done.stdout.splitlines()[-1])
    return found


@pytest.fixture(scope="module")
def stack() -> Iterator[Stack]:
    options = {**OPTIONS, "kv_cache_gib": 0.5, "threads": 1, "log_stats_interval_s": 0.0}
    with Stack(engine="vllm", engine_python=PYTHON, **options) as stack:
        yield stack


def streams_of(client: Client) -> list[Stream]:
    return [client.stream(prompt, **params) for prompt, params in requests()]


def pid_of(stack: Stack, name: str) -> int:
    for process in psutil.Process().children(recursive=True):
        if Path(f"/proc/{process.pid}/comm").read_text().strip() == name:
            return process.pid
    raise AssertionError(f"there is no {name}")


class Answer(NamedTuple):
    """The ids of a stream, and its log-probabilities, of the ids in order."""

    ids: list[int]
    logprobs: list[list[float]]


def answers_of(streams: list[Stream], halfway: Callable[[], object] | None = None) -> list[Answer]:
    """All that the streams send. halfway: called when the first one has a third of its tokens."""
    found = []
    for stream in streams:
        answer = Answer([], [])
        for delta in stream:
            answer.ids.extend(delta.token_ids)
            for each in delta.logprobs or ():
                answer.logprobs.append([each[i].logprob for i in sorted(each)])
            if halfway is not None and len(answer.ids) >= NUM_TOKENS // 3:
                halfway()
                halfway = None
        found.append(answer)
    assert halfway is None
    return found


def text_of(stream: Stream) -> str:
    return "".join(delta.text for delta in stream)


def test_tokens_and_log_probabilities_are_vllms(
    stack: Stack, answers: list[dict[str, Any]]
) -> None:
    with stack.client() as client:
        found = answers_of(streams_of(client))
    assert [each.ids for each in found] == [each["ids"] for each in answers]
    assert sum(len(each.logprobs) for each in found) == NUM_EACH * NUM_TOKENS
    for ours, theirs in zip(found, answers, strict=True):
        for one, other in zip(ours.logprobs, theirs["logprobs"], strict=True):
            assert one == pytest.approx(other, abs=1e-4)


@pytest.mark.parametrize("victim", ["slip:worker", "slip:core"])
def test_a_death_in_mid_stream_changes_no_token(
    stack: Stack, answers: list[dict[str, Any]], victim: str
) -> None:
    killed = pid_of(stack, victim)
    with stack.client() as client:
        found = answers_of(streams_of(client), lambda: os.kill(killed, signal.SIGKILL))
    assert [each.ids for each in found] == [each["ids"] for each in answers]
    patience = Patience()
    while pid_of(stack, victim) == killed:
        patience.check()


def test_a_grammar_of_ours_is_obeyed(stack: Stack) -> None:
    regex = StructuredOutputs(regex="(yes|no)( (yes|no)){5}")
    with stack.client() as client:
        params = {"temperature": 1.0, "max_tokens": 60, "structured_outputs": regex}
        streams = [client.stream(prompt_of(i), seed=i, **params) for i in range(4)]
        texts = set(map(text_of, streams))
    assert all(set(text.split()) <= {"yes", "no"} and len(text.split()) == 6 for text in texts)
    assert len(texts) > 1


def test_allowed_ids_are_refused_where_vllm_applies_them_to_others(stack: Stack) -> None:
    with stack.client() as client:
        stream = client.stream(prompt_of(0), allowed_token_ids=[400, 401], max_tokens=4)
        if has_masks():
            assert {400, 401} >= {token_id for delta in stream for token_id in delta.token_ids}
        else:
            with pytest.raises(BadRequestError, match=r"allowed_token_ids: vLLM .* other requests"):
                text_of(stream)
