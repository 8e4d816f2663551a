"""Several output workers as processes: their deaths, what HTTP clients see, planned restarts."""

from __future__ import annotations

import json
import os
import signal
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.helpers.patience import PATIENCE_S, Patience
from tests.helpers.stacks import spareless_stack

from slipstream import Client, Stack
from slipstream_ipc.worker_deal import worker_of

MODEL = "simulated:step_ms=5,mode=chain"
PROMPTS = [f"Clause {n}: what is asked for." for n in range(12)]
PARAMS: dict[str, Any] = {"max_tokens": 200, "temperature": 0, "ignore_eos": True}

pytestmark = pytest.mark.process


def texts(client: Client, disturb: Callable[[], object] | None = None) -> list[str]:
    """What all streams say; `disturb` runs when each of them has said something."""
    found, begun = [""] * len(PROMPTS), set[int]()
    for index, delta in client.stream_many(PROMPTS, **PARAMS):
        found[index] += delta.text
        begun.add(index)
        if disturb is not None and len(begun) == len(PROMPTS):
            disturb()
            disturb = None
    return found


@pytest.fixture(scope="module")
def stack() -> Iterator[Stack]:
    settings = {"http_port": 0, "http_workers": 2, "spare_worker": True, "max_restarts": 1000}
    with spareless_stack(MODEL, output_workers=2, hang_timeout_s=4, **settings) as running:
        yield running


@pytest.fixture(scope="module")
def plain(stack: Stack) -> list[str]:
    with stack.client() as client:
        return texts(client)


def asked(stack: Stack, path: str, body: dict[str, Any] | None = None) -> Any:
    assert stack.http_address is not None
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(
        stack.http_address + path, data, {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=PATIENCE_S) as answer:
        found = answer.read().decode()
    return json.loads(found) if found.startswith("{") else found


@pytest.mark.parametrize(
    ("names", "number"),
    [
        (["worker-0"], signal.SIGKILL),
        (["worker-1"], signal.SIGSTOP),
        (["worker-0", "worker-1"], signal.SIGKILL),
        (["worker-1", "core"], signal.SIGKILL),
    ],
)
def test_streams_survive(stack: Stack, plain: list[str], names: list[str], number: int) -> None:
    def disturb() -> None:
        for name in names:
            os.kill(stack.pids[name], number)

    with stack.client() as client:
        assert texts(client, disturb) == plain


def test_http_clients_need_not_know(stack: Stack) -> None:
    """Kept responses of both workers are found, by any front; answers to a prompt share one."""
    workers, previous = set(), None
    for _ in range(40):
        more = {} if previous is None else {"previous_response_id": previous}
        body = {"input": "And then?", "max_output_tokens": 16, **more}
        previous = asked(stack, "/v1/responses", body)["id"]
        assert asked(stack, f"/v1/responses/{previous}")["id"] == previous
        workers.add(worker_of(bytes.fromhex(previous.removeprefix("resp_")), 2))
        if len(workers) == 2:
            break
    assert len(workers) == 2
    body = {"prompt": "a", "n": 3, "max_tokens": 5}
    assert len(asked(stack, "/v1/completions", body)["choices"]) == 3


def test_each_process_has_its_name(stack: Stack) -> None:
    names = {"worker-0", "worker-1", "tokenizer-0", "tokenizer-1"}
    assert names <= set(asked(stack, "/health")["processes"])
    for name in ("worker-0", "worker-1"):
        assert Path(f"/proc/{stack.pids[name]}/comm").read_text() == f"slip:{name}\n"
    told = [
        f'slipstream:num_clients{{model_name="{MODEL}",process="{name}"}}'
        for name in ("worker-0", "worker-1")
    ]
    patience = Patience()
    while not all(each in asked(stack, "/metrics") for each in told):  # numbers come with beats
        patience.wait("no number of each worker is there")


@pytest.mark.parametrize(("before", "after"), [(2, 2), (2, 1), (1, 3)])
def test_the_next_stack_at_the_address_goes_on(tmp_path: Path, before: int, after: int) -> None:
    def start(num: int) -> Stack:
        return spareless_stack(MODEL, runtime_dir=tmp_path / "s", drain_s=0.3, output_workers=num)

    with start(before) as old, old.client() as client:
        whole = texts(client)

        def replace() -> None:
            os.kill(old.pids["supervisor"], signal.SIGTERM)
            assert old._supervisor.wait(PATIENCE_S) == 0
            stacks.append(start(after))

        stacks: list[Stack] = []
        try:
            assert texts(client, replace) == whole
        finally:
            for each in stacks:
                each.stop()


def test_what_runs_on_any_worker_may_finish(tmp_path: Path) -> None:
    with (
        spareless_stack(MODEL, output_workers=2, drain_s=60) as stack,
        stack.client() as client,
    ):
        whole = texts(client)
        assert texts(client, lambda: os.kill(stack.pids["supervisor"], signal.SIGTERM)) == whole
        assert stack._supervisor.wait(PATIENCE_S) == 0
