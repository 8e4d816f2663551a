"""Real processes that die, hang or are attacked: what users of the peers saw, and what ours see."""

from __future__ import annotations

import http.client
import json
import os
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from urllib.parse import urlsplit

import msgspec
import psutil
import pytest
import zmq
from tests.helpers.patience import PATIENCE_S, Patience
from tests.helpers.pickles import payloads
from tests.helpers.stacks import spareless_stack

from slipstream import Stack
from slipstream.demo_model import MODEL_PATH
from slipstream.stack.supervisor_events import (
    ProcessEnded,
    ProcessRestarted,
    SpareReady,
    StackEvent,
)
from slipstream_bench.common import process_census
from slipstream_ipc.messages import Status

pytestmark = pytest.mark.process

HANG_TIMEOUT_S = 4  # of which other work on the machine may take a part
PROMPTS = [f"Chapter {n}: how names are bound, and where." for n in range(4)]
SERVE = [sys.executable, "-m", "slipstream.cli.main", "serve"]


@pytest.fixture(scope="module")
def stack() -> Iterator[Stack]:
    """One for all: each test finds it as the one before has left it."""
    model = "simulated:step_ms=5,mode=chain"
    with Stack(model, http_port=0, hang_timeout_s=HANG_TIMEOUT_S, max_restarts=1000) as stack:
        yield stack


def wait_for(stack: Stack, kind: type[StackEvent], name: str) -> StackEvent:
    """The next event of this kind."""
    while event := stack.next_event(PATIENCE_S):
        if isinstance(event, kind) and event.name == name:
            return event
    raise AssertionError(f"no {kind.__name__} of {name}")


def connect(stack: Stack) -> http.client.HTTPConnection:
    where = urlsplit(stack.http_address)
    return http.client.HTTPConnection(where.hostname, where.port, timeout=PATIENCE_S)


def ask(connection: http.client.HTTPConnection, **fields: object) -> http.client.HTTPResponse:
    body = {"temperature": 0, "ignore_eos": True, **fields}
    headers = {"Content-Type": "application/json"}
    connection.request("POST", "/v1/completions", json.dumps(body), headers)
    return connection.getresponse()


def status_of(stack: Stack, path: str) -> int:
    connection = connect(stack)
    try:
        connection.request("GET", path)
        return connection.getresponse().status
    finally:
        connection.close()


def streamed(stack: Stack, disturb: Callable[[], object] = lambda: None) -> list[str]:
    """What answers say over HTTP; `disturb` runs when each of them has said something."""
    found = [""] * len(PROMPTS)
    have_begun = threading.Barrier(len(PROMPTS) + 1)

    def read(index: int) -> None:
        connection = connect(stack)
        answer = ask(connection, prompt=PROMPTS[index], max_tokens=150, stream=True)
        assert answer.status == 200
        is_first = True
        for line in iter(answer.readline, b""):
            if line.startswith(b"data: {"):
                found[index] += json.loads(line[6:])["choices"][0]["text"]
                if is_first:
                    have_begun.wait(PATIENCE_S)
                is_first = False
        connection.close()

    threads = [threading.Thread(target=read, args=(index,)) for index in range(len(PROMPTS))]
    for thread in threads:
        thread.start()
    have_begun.wait(PATIENCE_S)
    disturb()
    for thread in threads:
        thread.join(PATIENCE_S)
        assert not thread.is_alive()
    return found


# ---- death and hangs ---------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["core", "worker"])
def test_answers_survive_a_dead_engine_vllm_39863_27194_32193_sglang_9329_36900(
    stack, name
) -> None:
    """There the server went on answering /health for an engine that was dead, and nothing else;
    here the engine is replaced, and the answers that were being streamed are whole."""
    plain = streamed(stack)

    def kill() -> None:
        os.kill(stack.pids[name], signal.SIGKILL)
        assert status_of(stack, "/health") == 200  # the front lives, and the engine is replaced

    stack.events()
    assert streamed(stack, kill) == plain
    assert wait_for(stack, ProcessEnded, name).how == "signal SIGKILL"
    assert wait_for(stack, ProcessRestarted, name)
    patience = Patience()
    while (status := status_of(stack, "/ready")) != 200:
        patience.wait(status)  # the front has yet to hear of it


@pytest.mark.parametrize("name", ["core", "worker", "http"])
def test_a_stalled_loop_is_noticed_and_replaced_vllm_36451(stack, name) -> None:
    """There a process that was alive and did nothing counted as healthy, for ever."""
    stack.events()
    os.kill(stack.pids[name], signal.SIGSTOP)
    ended = wait_for(stack, ProcessEnded, name)
    assert ended.how == f"hung: no heartbeat for {HANG_TIMEOUT_S} s"
    wait_for(stack, ProcessRestarted, name)
    answer = ask(connect(stack), prompt="a", max_tokens=3)
    assert answer.status == 200
    assert json.loads(answer.read())["usage"]["completion_tokens"] == 3


def test_a_long_prefill_is_not_death_sglang_22511_40809() -> None:
    """There the health check waited for tokens, and a server with a long prompt was killed."""
    model = "simulated:step_ms=1,prefill_us=5000"
    with spareless_stack(model, hang_timeout_s=6, http_port=0) as stack:
        pids, begin = stack.pids, time.monotonic()
        connection = connect(stack)
        body = {"prompt": [7] * 1500, "max_tokens": 2}
        headers = {"Content-Type": "application/json"}
        connection.request("POST", "/v1/completions", json.dumps(body), headers)
        while not select.select([connection.sock], [], [], 0.1)[0]:  # its answer, or its end
            assert status_of(stack, "/health") == status_of(stack, "/ready") == 200
        assert connection.getresponse().status == 200
        assert time.monotonic() - begin > 6, "it did take longer than hang_timeout_s"
        assert not [event for event in stack.events() if isinstance(event, ProcessEnded)]
        assert stack.pids == pids


# ---- the end of the server -----------------------------------------------------------------------


def serve(folder: Path, *options: str) -> tuple[subprocess.Popen[str], dict[str, int]]:
    """A server that is ready, and its processes by name."""
    process = subprocess.Popen(
        [*SERVE, "simulated:step_ms=5", "--no-http", "--runtime-dir", str(folder), *options],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    pids = {}
    for line in process.stdout:
        if line.startswith("serving at"):
            break
        name, said, rest = line.partition(" ready (process ")
        if said:
            pids[name] = int(rest.partition(",")[0])
    assert set(pids) == {"core", "worker"}
    return process, pids


@pytest.mark.parametrize("name", ["core", "worker"])
def test_exit_code_is_not_zero_after_a_failure_vllm_48966(tmp_path, name) -> None:
    """There the server whose engine had died ended in good order, with code 0, and whoever was to
    restart it on failure did not."""
    process, pids = serve(tmp_path / "run", "--max-restarts", "0")
    os.kill(pids[name], signal.SIGKILL)
    _, errors = process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 1
    assert f"slipstream serve: {name} (process {pids[name]}) ended: signal SIGKILL" in errors


def test_exit_code_is_not_zero_after_a_failed_start_vllm_48966(tmp_path) -> None:
    """The same at the start, of which vLLM has tests."""
    command = [*SERVE, "simulated:stp_ms=5", "--no-http", "--runtime-dir", str(tmp_path / "run")]
    failed = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_S)
    assert failed.returncode == 2  # of the configuration: systemd does not start it again
    assert "stp_ms" in failed.stderr


def test_nobody_is_left_and_a_restart_succeeds_sglang_15165(tmp_path) -> None:
    """There processes of a killed server lived on and kept the device, and the next one could not
    start."""
    folder = tmp_path / "run"
    first, _ = serve(folder)
    family = psutil.Process(first.pid).children(recursive=True)
    assert len(family) >= 3
    first.kill()
    first.communicate(timeout=PATIENCE_S)
    second, pids = serve(folder)  # at once, at the same place
    _, alive = psutil.wait_procs(family, PATIENCE_S)
    assert not alive
    assert set(pids.values()).isdisjoint(process.pid for process in family)
    second.terminate()
    second.communicate(timeout=PATIENCE_S)
    assert second.returncode == 0
    assert [path.name for path in folder.iterdir()] == [], "nor any socket"


def test_a_detokeniser_that_cannot_start_says_so_sglang_21471(tmp_path) -> None:
    """There its constructor failed, nobody was told, and the server answered 503 until somebody
    lost patience."""
    broken = tmp_path / "model"
    broken.mkdir()
    (broken / "tokenizer.json").write_text("{")
    (broken / "tokenizer_config.json").write_text(
        (MODEL_PATH / "tokenizer_config.json").read_text()
    )
    config = {
        "tokenizer": str(broken),
        "client_address": f"ipc://{tmp_path}/client.sock",
        "core_address": f"ipc://{tmp_path}/core.sock",
        "runtime_dir": str(tmp_path),
        "cache_dir": str(tmp_path),
    }
    read_fd, write_fd = os.pipe()
    worker = subprocess.run(
        [sys.executable, "-m", "slipstream_worker.main"],
        input=msgspec.json.encode(config),
        capture_output=True,
        pass_fds=(write_fd,),
        env={**os.environ, "SLIPSTREAM_STATUS_FD": str(write_fd)},
        timeout=PATIENCE_S,
    )
    os.close(write_fd)
    with os.fdopen(read_fd, "rb") as statuses:
        told = [msgspec.json.decode(line, type=Status).error for line in statuses]
    assert worker.returncode == 1
    assert any(str(broken) in error for error in told), told


# ---- overload and attacks ------------------------------------------------------------------------


def test_overload_is_503_with_retry_after_vllm_18826() -> None:
    """There one asked for a way to be turned away; without it all requests only got slower."""
    with spareless_stack(
        "simulated:step_ms=20", http_port=0, max_num_seqs=1, max_waiting=1
    ) as stack:
        # it outlasts what comes until all room is taken
        running = ask(connect(stack), prompt="a", max_tokens=1000, stream=True)
        running.readline()
        waiting = connect(stack)
        body = json.dumps({"prompt": "a", "max_tokens": 1})
        waiting.request("POST", "/v1/completions", body, {"Content-Type": "application/json"})
        answer, patience = None, Patience()
        while answer is None or answer.status == 200:  # until that one waits
            patience.wait("no request is refused")
            connection = connect(stack)
            answer = ask(connection, prompt="a", max_tokens=1)
        assert answer.status == 503
        assert int(answer.headers["Retry-After"]) > 0
        assert json.loads(answer.read())["error"]["code"] == "overloaded"
        assert b"[DONE]" in running.read(), "who ran was not disturbed"
        assert waiting.getresponse().status == 200
        assert ask(connection, prompt="a", max_tokens=1).status == 200  # later, on the same line


def test_nothing_listens_on_the_network_cve_2025_30202_2025_32444_2025_47277(stack) -> None:
    """There sockets that were meant for one's own processes were open to the network."""
    supervisor = psutil.Process(stack.pids["supervisor"])
    family = [supervisor, *supervisor.children(recursive=True)]
    listening = {
        (connection.laddr.ip, connection.laddr.port)
        for process in family
        for connection in process.net_connections("inet")
        if connection.status == psutil.CONN_LISTEN
    }
    assert listening == {("127.0.0.1", urlsplit(stack.http_address).port)}
    folder = Path(stack.address.removeprefix("ipc://")).parent
    own = {
        Path(connection.laddr)
        for process in family
        for connection in process.net_connections("unix")
        if connection.laddr
    }
    assert own, "there are sockets to look at"
    assert {path.parent for path in own} == {folder}
    assert folder.stat().st_mode & 0o777 == 0o700


def test_pickles_to_any_socket_run_nothing_cve_2024_11041_2025_32444_2026_3059_3060(
    stack, tmp_path
) -> None:
    """All sockets of a real stack, and its HTTP port: nothing is run, nobody dies of it."""
    made = tmp_path / "made"
    pids = stack.pids
    context = zmq.Context()
    folder = Path(stack.address.removeprefix("ipc://")).parent
    paths = sorted(folder.glob("*.sock"))
    assert {"client.sock", "core.sock"} < {path.name for path in paths}
    for path in paths:
        is_router = path.name in ("client.sock", "core.sock")
        socket = context.socket(zmq.DEALER if is_router else zmq.PAIR)
        socket.connect(f"ipc://{path}")
        for payload in payloads(made):
            if socket.poll(0, zmq.POLLOUT) or is_router:
                socket.send(payload)
            if is_router:
                assert socket.poll(int(PATIENCE_S * 1e3))
                socket.recv()
        socket.close(linger=0)
    context.term()
    connection = connect(stack)
    for payload in payloads(made):
        for kind in ("application/json", "application/octet-stream", "application/x-pickle"):
            connection.request("POST", "/v1/completions", payload, {"Content-Type": kind})
            answer = connection.getresponse()
            answer.read()
            assert answer.status in (400, 415)
    assert ask(connection, prompt="a", max_tokens=3).status == 200
    assert stack.pids == pids
    assert not made.exists()


def wake_ups(pid: int) -> int:
    """Times that a process's threads have left the processor to wait for something, all of them."""
    num = 0
    for task in Path(f"/proc/{pid}/task").iterdir():
        for line in (task / "status").read_text().splitlines():
            if line.startswith("voluntary_ctxt_switches:"):
                num += int(line.split()[1])
    return num


AT_REST_S = 5
# a second, of all threads: of one process, which beats twice, and of a stack with two spares; a
# poller has 100 or more
MOST_WAKE_UPS, MOST_WAKE_UPS_OF_STACK = 10, 40


def woken(stack: Stack) -> dict[str, float]:
    """Wake-ups a second of each process of a stack, over a span in which nothing happens to any."""
    names = {pid: name for name, pid in stack.pids.items()}
    pids = process_census.tree_pids(stack.pids["supervisor"], names)
    before = {name: wake_ups(pid) for name, pid in pids.items()}
    begin = time.monotonic()
    assert stack.next_event(AT_REST_S) is None
    span_s = time.monotonic() - begin
    return {name: (wake_ups(pid) - before[name]) / span_s for name, pid in pids.items()}


def test_a_stack_at_rest_wakes_up_rarely_vllm_41964() -> None:
    """With its spares, a client that is attached, and a connection that is kept alive."""
    with Stack("simulated:step_ms=1", http_port=0) as stack, stack.client() as client:
        client.generate([5], max_tokens=3)
        connection = connect(stack)
        with ask(connection, prompt=[5], max_tokens=3) as response:
            assert response.status == 200
            response.read()
        spares = set()
        while len(spares) < 2:
            spares.add(wait_for_spare(stack).name)
        rates = woken(stack)
        connection.close()
    assert {"supervisor", "core", "worker", "http"} < set(rates)
    assert len(rates) >= 8, rates
    assert max(rates.values()) < MOST_WAKE_UPS, rates
    assert sum(rates.values()) < MOST_WAKE_UPS_OF_STACK, rates


def test_a_stack_whose_requests_wait_for_room_wakes_up_rarely() -> None:
    """One that waits, or is kept for its reader, is no reason to look again and again."""
    settings = {"logprobs_gib": 1e-6, "max_num_seqs": 4, "http_port": 0}
    with (
        spareless_stack("simulated:step_ms=1", **settings) as stack,
        stack.client() as client,
        client.stream([5], max_tokens=100, logprobs=5, ignore_eos=True) as first,
        client.stream([6], max_tokens=100, logprobs=5, ignore_eos=True) as second,
    ):
        assert sum(len(delta.token_ids) for delta in first) == 100
        rates = woken(stack)
        second.abort()
        assert not any(delta.token_ids for delta in second), "there was room"
    assert max(rates.values()) < MOST_WAKE_UPS, rates


def wait_for_spare(stack: Stack) -> SpareReady:
    while event := stack.next_event(PATIENCE_S):
        if isinstance(event, SpareReady):
            return event
    raise AssertionError("no spare")
