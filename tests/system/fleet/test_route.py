"""`slipstream route`: HTTP over servers that were started elsewhere."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families
from tests.helpers.http_front import Raw
from tests.helpers.patience import Patience
from tests.helpers.routing import routing
from tests.helpers.stacks import spareless_stack

from slipstream.demo_model import MODEL_PATH
from slipstream.http.admin.metrics import PREFIX

MODEL = f"simulated:step_ms=10,prefill_us=20,tokenizer={MODEL_PATH},mode=chain"
BODY = {"prompt": "Chapter 1", "max_tokens": 200, "ignore_eos": True, "logprobs": 1, "seed": 3}


def completion(port: int) -> dict:
    with Raw(port) as raw:
        raw.post("/v1/completions", BODY)
        answer = raw.read()
    assert answer.status == 200, answer.body
    return answer.json["choices"][0]


def get(port: int, path: str) -> dict:
    with Raw(port) as raw:
        return raw.get(path).json


def samples(port: int, name: str) -> dict[tuple[str, ...], float]:
    """A metric's samples, by the labels that are its own."""
    with Raw(port) as raw:
        text = raw.get("/metrics").body.decode()
    return {
        tuple(
            value
            for label, value in sorted(sample.labels.items())
            if label not in ("model_name", "process")
        ): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
        if sample.name == PREFIX + name
    }


def status(port: int) -> int:
    with Raw(port) as raw:
        return raw.get("/ready").status


@pytest.mark.process
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


@pytest.mark.process
def test_a_router_tells_of_its_replicas(tmp_path: Path) -> None:
    with spareless_stack(MODEL) as first, spareless_stack(MODEL) as second:
        address = f"{first.address},{second.address}"
        with routing(tmp_path, address) as (_, port):
            for _ in range(3):
                completion(port)
            patience = Patience()
            while sum(samples(port, "router_requests_total").values()) < 3:
                patience.wait("three streams were placed")
            assert samples(port, "router_moves_total") == {}
            assert set(samples(port, "replica_state")) == {
                (first.address, "serving"),
                (second.address, "serving"),
            }
            while running(port) or get(port, "/live")["running"]:
                patience.wait("what has ended does not run")
            assert get(port, "/live")["replicas"].keys() == {first.address, second.address}
            os.kill(first.pids["supervisor"], signal.SIGKILL)
            patience = Patience()
            while get(port, "/health")["replicas"][first.address] != "away":
                patience.wait("the killed replica is away")
            assert get(port, "/health")["status"] == "ok"
            assert status(port) == 200
            while (first.address, "away") not in samples(port, "replica_state"):
                patience.wait("the metrics say so, too")
            os.kill(second.pids["supervisor"], signal.SIGKILL)
            patience = Patience()
            while status(port) == 200:
                patience.wait("a router without replicas is not ready")
            assert get(port, "/health")["status"] == "recovering"


@pytest.mark.process
def test_moves_are_counted(tmp_path: Path) -> None:
    with ExitStack() as opened:
        first, second = (opened.enter_context(spareless_stack(MODEL)) for _ in range(2))
        _, port = opened.enter_context(routing(tmp_path, f"{first.address},{second.address}"))
        with Raw(port) as raw:
            raw.post("/v1/completions", {**BODY, "stream": True})
            raw.read_until(b"data: ")
            patience = Patience()
            while not (busy := running(port)):
                patience.wait("a replica says that it runs the request")
            stack = first if busy == {first.address} else second
            os.kill(stack.pids["supervisor"], signal.SIGKILL)
            raw.read_until(b"[DONE]")
            patience = Patience()
            while samples(port, "router_moves_total") != {("lost",): 1.0}:
                patience.wait(str(samples(port, "router_moves_total")))


def running(port: int) -> set[str]:
    """The replicas that run something."""
    found = samples(port, "replica_requests_running")
    return {labels[0] for labels, number in found.items() if number}


@pytest.mark.process
def test_one_server_that_is_gone_leaves_the_fronts(tmp_path: Path) -> None:
    with spareless_stack(MODEL) as stack, routing(tmp_path, stack.address) as (process, port):
        completion(port)
        stack.stop()
        patience = Patience()
        while status(port) == 200:
            patience.wait("the fronts are ready without a server")
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
