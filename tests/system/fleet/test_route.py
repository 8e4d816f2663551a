"""`slipstream route`: HTTP over servers that were started elsewhere."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from tests.helpers.http_front import Raw
from tests.helpers.patience import Patience
from tests.helpers.stacks import spareless_stack

from slipstream.demo_model import MODEL_PATH

MODEL = f"simulated:step_ms=10,prefill_us=20,tokenizer={MODEL_PATH},mode=chain"
BODY = {"prompt": "Chapter 1", "max_tokens": 200, "ignore_eos": True, "logprobs": 1, "seed": 3}


@contextmanager
def routing(folder: Path, *words: str) -> Iterator[tuple[subprocess.Popen[str], int]]:
    """The command's process, once it serves, and its port."""
    command = [sys.executable, "-m", "slipstream.cli.main", "route", *words]
    process = subprocess.Popen(
        [*command, "--port", "0", "--runtime-dir", str(folder / "route")],
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert process.stdout is not None
        said = ""
        while (found := re.search(r"http://[\w.]+:(\d+)", said)) is None:
            line = process.stdout.readline()
            assert line, said
            said += line
        yield process, int(found[1])
    finally:
        process.kill()
        process.wait()


def completion(port: int) -> dict:
    with Raw(port) as raw:
        raw.post("/v1/completions", BODY)
        answer = raw.read()
    assert answer.status == 200, answer.body
    return answer.json["choices"][0]


def status(port: int) -> int:
    with Raw(port) as raw:
        return raw.get("/ready").status


@pytest.mark.slow
def test_answers_over_a_file_of_servers_that_come_and_go(tmp_path: Path) -> None:
    file = tmp_path / "members"
    with spareless_stack(MODEL) as first, spareless_stack(MODEL) as second:
        file.write_text(f"{first.address}\n{second.address}\n")
        with routing(tmp_path, f"file:{file}", "--http-workers", "2") as (process, port):
            plain = completion(port)
            assert len(plain["logprobs"]["tokens"]) == 200
            assert not any(token.startswith("token_id:") for token in plain["logprobs"]["tokens"])
            os.kill(first.pids["supervisor"], signal.SIGKILL)
            assert completion(port) == plain
            process.send_signal(signal.SIGTERM)
            assert process.wait() == 0


@pytest.mark.slow
def test_one_server_that_is_gone_leaves_the_fronts(tmp_path: Path) -> None:
    with spareless_stack(MODEL) as stack, routing(tmp_path, stack.address) as (process, port):
        completion(port)
        stack.stop()
        patience = Patience()
        while status(port) == 200:
            patience.check("the fronts are ready without a server")
        assert process.poll() is None


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["http://127.0.0.1:8000"], "ADDRESS"),
        (["tcp://127.0.0.1:7001"], "slipstream keys"),
        (["ipc:///a,ipc:///b", "--max-num-seqs", "4"], "--max-num-seqs"),
    ],
)
def test_what_cannot_be_routed_is_refused(tmp_path: Path, words: list[str], told: str) -> None:
    command = [sys.executable, "-m", "slipstream.cli.main", "route", *words]
    done = subprocess.run(
        [*command, "--runtime-dir", str(tmp_path)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 2
    assert told in done.stderr
