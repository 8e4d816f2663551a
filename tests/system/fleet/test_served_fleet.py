"""`slipstream serve --replicas`: real processes, killed and drained under load."""

from __future__ import annotations

import json
import os
import queue
import signal
import subprocess
import sys
import tempfile
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest
from tests.helpers.patience import PATIENCE_S, Patience
from tests.helpers.ports import free_port
from tests.helpers.processes import started

from slipstream import Client
from slipstream.demo_model import MODEL_PATH

MODEL = f"simulated:step_ms=10,prefill_us=20,tokenizer={MODEL_PATH},mode=chain"
PROMPTS = [f"Chapter {n}: how names are bound, and where." for n in range(16)]


class Served:
    """A fleet of two replicas that `slipstream serve` runs."""

    def __init__(self, process: subprocess.Popen[str], folder: Path, port: int) -> None:
        self.process, self.folder, self.port = process, folder, port
        sockets = [folder / f"replica-{index}" / "client.sock" for index in range(2)]
        self.address = ",".join([f"ipc://{path}" for path in sockets])
        self._lines: queue.SimpleQueue[str] = queue.SimpleQueue()
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self._lines.put(line)

    def said(self, start: str) -> str:
        """The next line that begins so."""
        patience, seen = Patience(), []
        while True:
            seen.append(self._lines.get(timeout=max(0.1, patience.left_s)))
            if seen[-1].startswith(start):
                return seen[-1]
            patience.check("".join(seen))

    def supervisor(self, index: int) -> psutil.Process:
        """That of a replica."""
        owner = (self.folder / f"replica-{index}" / "supervisor.lock").read_text()
        return psutil.Process(int(owner))

    def texts(self) -> list[str]:
        with Client(self.address) as client:
            answers = client.generate_many(PROMPTS, max_tokens=120, seed=1)
        return [answer.text for answer in answers]


@contextmanager
def served(*options: str, model: str = MODEL) -> Iterator[Served]:
    port = free_port()
    with tempfile.TemporaryDirectory(prefix="fleet-") as path:
        folder = Path(path) / "run"
        command = [sys.executable, "-m", "slipstream.cli.main", "serve", model, "--replicas", "2"]
        where = ["--runtime-dir", str(folder), "--port", str(port)]
        with started(
            [*command, *where, "--no-spare-worker", *options], stdout=subprocess.PIPE, text=True
        ) as process:
            fleet = Served(process, folder, port)
            fleet.said("serving at")
            yield fleet
            if process.poll() is None:
                process.send_signal(signal.SIGINT)
                assert process.wait(PATIENCE_S) == 0
                assert not folder.exists()


def post(port: int) -> str:
    """An answer over HTTP."""
    body = {"prompt": PROMPTS[0], "max_tokens": 120, "seed": 1}
    request = urllib.request.Request(
        f"http://127.0.0.1:{port}/v1/completions",
        json.dumps(body).encode(),
        {"Content-Type": "application/json"},
    )
    with urllib.request.urlopen(request, timeout=PATIENCE_S) as answer:
        text: str = json.load(answer)["choices"][0]["text"]
    return text


def streamed_through(fleet: Served, signal_: signal.Signals) -> tuple[list[str], int]:
    """The texts of streams one of whose replicas gets a signal in their midst, and how often the
    first of them moved.
    """
    with Client(fleet.address) as client:
        streams = [client.stream(prompt, max_tokens=120, seed=1) for prompt in PROMPTS]
        texts = [next(stream).text for stream in streams]
        index = streams[0]._state.member
        supervisor = fleet.supervisor(index)
        tree = [*supervisor.children(recursive=True), supervisor]
        for process in tree if signal_ == signal.SIGKILL else [supervisor]:
            os.kill(process.pid, signal_)
        texts = [
            text + "".join([delta.text for delta in stream])
            for text, stream in zip(texts, streams, strict=True)
        ]
        moves = streams[0]._state.moves
    fleet.said(f"replica-{index} restarted")
    assert fleet.supervisor(index).pid != supervisor.pid
    return texts, moves


@pytest.mark.process
def test_replica_killed_under_load_comes_back_and_texts_are_the_same() -> None:
    with served() as fleet:
        plain = fleet.texts()
        assert post(fleet.port) == plain[0]
        assert streamed_through(fleet, signal.SIGKILL) == (plain, 1)
        assert fleet.texts() == plain
        assert post(fleet.port) == plain[0]


@pytest.mark.process
def test_a_client_of_one_replica_goes_on_at_the_other() -> None:
    with served() as fleet:
        plain = fleet.texts()
        with Client(fleet.address.split(",")[0]) as client:
            patience = Patience()
            while not client._io._cluster.is_fleet:
                patience.wait("it learns the members")
            while len(client._io._cluster._moves.open_members()) < 2:
                patience.wait("both are attached")
            streams = [client.stream(prompt, max_tokens=120, seed=1) for prompt in PROMPTS]
            texts = [next(stream).text for stream in streams]
            assert {stream._state.member for stream in streams} == {0, 1}
            supervisor = fleet.supervisor(0)
            for process in [*supervisor.children(recursive=True), supervisor]:
                os.kill(process.pid, signal.SIGKILL)
            texts = [
                text + "".join([delta.text for delta in stream])
                for text, stream in zip(texts, streams, strict=True)
            ]
        assert texts == plain


def said_by(*words: str) -> tuple[int, str]:
    """The exit code of a command, and what it printed."""
    command = [sys.executable, "-m", "slipstream.cli.main", *words]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return done.returncode, done.stdout + done.stderr


@pytest.mark.process
def test_replicas_are_shown_and_one_is_drained_by_its_name() -> None:
    with served() as fleet:
        code, table = said_by("replicas", *fleet.address.split(","))
        assert code == 0
        head, *rows = [line.split() for line in table.splitlines()]
        assert head[:5] == ["REPLICA", "MODEL", "STATE", "RUNNING", "WAITING"]
        told = [[row[0], *row[2:5]] for row in rows]
        assert told == [[f"replica-{n}", "serving", "0", "0"] for n in (0, 1)]
        assert {row[1] for row in rows} == {MODEL}
        assert [row[-1] for row in rows] == fleet.address.split(",")
        where = ("--runtime-dir", str(fleet.folder))
        supervisor = fleet.supervisor(1).pid
        assert said_by("drain", "replica-1", *where)[0] == 0
        fleet.said("replica-1 restarted")
        assert fleet.supervisor(1).pid != supervisor
        code, error = said_by("drain", "replica-7", *where)
        assert code == 2
        assert "one of replica-0, replica-1" in error
        assert said_by("drain", *where)[0] == 2
        assert said_by("drain", "replica-0", "--all", *where)[0] == 2
        assert said_by("drain", "replica-0", "--within", "5", *where)[0] == 2
        assert said_by("drain", "--all", "--within=-1", *where)[0] == 2
        code, said = said_by("drain", "--all", "--within", "0", *where)
        assert (code, "replica-0 does not serve again" in said) == (1, True)


def test_a_process_with_the_pid_of_a_killed_supervisor_is_left_alone(tmp_path: Path) -> None:
    lock = tmp_path / "replica-0" / "supervisor.lock"
    lock.parent.mkdir()
    with subprocess.Popen(["sleep", "1000"]) as other:
        lock.write_text(str(other.pid))
        code, error = said_by("drain", "replica-0", "--runtime-dir", str(tmp_path))
        assert (code, "a replica that runs" in error) == (2, True)
        assert other.poll() is None
        other.kill()


def test_of_replicas_that_are_not_there_no_command_makes_a_table(tmp_path: Path) -> None:
    code, error = said_by("drain", "replica-0", "--runtime-dir", str(tmp_path))
    assert (code, "of a server with replicas" in error) == (2, True)
    code, error = said_by("replicas", f"ipc://{tmp_path}/a.sock,ipc://{tmp_path}/b.sock")
    assert code == 1
    assert error.count("away") == 2


@pytest.mark.process
def test_replica_drained_under_load_starts_again_and_texts_are_the_same() -> None:
    with served("--drain-s", "0.1") as fleet:
        plain = fleet.texts()
        assert streamed_through(fleet, signal.SIGTERM) == (plain, 1)
        assert fleet.texts() == plain


@pytest.mark.process
def test_a_replica_whose_supervisor_hangs_is_replaced_and_texts_are_the_same() -> None:
    with served("--hang-timeout-s", "2") as fleet:
        plain = fleet.texts()
        texts, _ = streamed_through(fleet, signal.SIGSTOP)
        assert texts == plain
        assert fleet.texts() == plain


@pytest.mark.process
def test_a_server_whose_own_supervisor_hangs_is_unhealthy_until_it_goes_on() -> None:
    """No lost replica would be started again."""
    with served("--hang-timeout-s", "2") as fleet:
        fleet.process.send_signal(signal.SIGSTOP)
        until_health_is(fleet.port, 503, "unhealthy")
        assert fleet.texts(), "replicas serve on"
        fleet.process.send_signal(signal.SIGCONT)
        until_health_is(fleet.port, 200, "ok")


def until_health_is(port: int, code: int, status: str) -> None:
    patience = Patience()
    while True:
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/health") as answer:
                found = answer.status, json.load(answer)["status"]
        except urllib.error.HTTPError as error:
            found = error.code, json.load(error)["status"]
        if found == (code, status):
            return
        patience.wait(f"/health is {found}")


@pytest.mark.process
def test_rolling_update_under_load_loses_nothing() -> None:
    """One replica after another is drained, while answers are asked for."""
    with served("--drain-s", "0.1") as fleet:
        plain = fleet.texts()
        is_updated = threading.Event()
        found: list[list[str]] = []

        def ask() -> None:
            while not is_updated.is_set():
                found.append(fleet.texts())

        with ThreadPoolExecutor() as pool:
            asking = pool.submit(ask)
            try:
                before = [fleet.supervisor(index).pid for index in range(2)]
                code, said = said_by("drain", "--all", "--runtime-dir", str(fleet.folder))
                assert code == 0, said
                assert said.splitlines() == [
                    f"replica-{index} {what}"
                    for index in range(2)
                    for what in ("drains, then starts again", "serves again")
                ]
                assert not set(before) & {fleet.supervisor(index).pid for index in range(2)}
            finally:
                is_updated.set()
            asking.result(PATIENCE_S)
        assert found
        assert all(texts == plain for texts in found)


@pytest.mark.process
def test_replicas_that_used_up_their_restarts_are_left_out_and_the_last_ends_the_fleet() -> None:
    with served("--max-restarts", "0") as fleet:
        plain = fleet.texts()
        fleet.supervisor(0).kill()
        assert fleet.texts() == plain
        assert post(fleet.port) == plain[0]
        fleet.supervisor(1).kill()
        assert fleet.process.wait(PATIENCE_S) == 1
    assert not fleet.folder.exists()


@pytest.mark.process
def test_every_stack_ends_with_the_process_that_was_started() -> None:
    with served() as fleet:
        processes = psutil.Process(fleet.process.pid).children(recursive=True)
        assert len(processes) > 6  # three supervisors, two cores, two workers, a front
        fleet.process.kill()
        _, left = psutil.wait_procs(processes, timeout=PATIENCE_S)
        assert left == []
        fleet.process.wait(PATIENCE_S)


@pytest.mark.process
def test_every_process_of_a_replica_has_its_share_of_the_cores() -> None:
    allowed = os.sched_getaffinity(0)
    if len(allowed) < 2:
        pytest.skip("there is one core")
    with served() as fleet:
        shares = []
        for index in range(2):
            supervisor = fleet.supervisor(index)
            found = [supervisor, *supervisor.children(recursive=True)]
            shares.append({frozenset(process.cpu_affinity()) for process in found})
        [first], [second] = shares
        assert not first & second
        assert first | second == allowed


def test_replicas_that_cannot_be_are_refused_before_anything_starts() -> None:
    command = [sys.executable, "-m", "slipstream.cli.main", "serve", MODEL, "--replicas"]
    for given in ("0", "two"):
        done = subprocess.run(
            [*command, given], capture_output=True, text=True, timeout=PATIENCE_S, check=False
        )
        assert done.returncode == 2
        assert "--replicas" in done.stderr
        assert done.stdout == ""


@pytest.mark.process
def test_a_stack_that_cannot_start_ends_the_fleet() -> None:
    with served() as fleet:
        command = [sys.executable, "-m", "slipstream.cli.main", "serve", MODEL, "--replicas", "2"]
        with tempfile.TemporaryDirectory(prefix="fleet-") as path:
            where = ["--runtime-dir", f"{path}/run", "--port", str(fleet.port)]
            done = subprocess.run(
                [*command, *where],
                capture_output=True,
                text=True,
                timeout=PATIENCE_S,
                check=False,
            )
            assert not list(Path(path).iterdir())
        assert done.returncode == 1
        assert f"cannot listen at http://127.0.0.1:{fleet.port}" in done.stderr
