"""Which stack a command talks to: one that runs, or one that is started for it."""

from __future__ import annotations

import io
import os
import socket
import subprocess
import sys
import threading
from typing import Any

import pytest
from msgspec.structs import replace
from tests.helpers.fake_worker import MODEL as CARD
from tests.helpers.fake_worker import Entry, FakeWorker, deltas, end_of
from tests.helpers.patience import PATIENCE_S
from tests.helpers.stacks import spareless_stack

from slipstream import Client
from slipstream.cli.main import main
from slipstream.client.endpoints import ADDRESS_VARIABLE
from slipstream.errors import ConnectionLostError
from slipstream.progress import Progress
from slipstream_ipc.messages import AdapterRef, Fault, Submit

MODEL = "simulated:step_ms=1,mode=chain"
ANSWER = ["--max-tokens", "4", "--temperature", "0"]


@pytest.fixture(scope="module")
def runtime_dir(tmp_path_factory):
    """$XDG_RUNTIME_DIR of a user whose server runs."""
    base = tmp_path_factory.mktemp("run", numbered=False)
    folder = base / f"slipstream-{os.getuid()}" / "default"
    folder.parent.mkdir(mode=0o700)
    with spareless_stack(MODEL, runtime_dir=folder):
        yield base


@pytest.fixture
def served(runtime_dir, monkeypatch):
    """That user; the text that the server gives to `In Python`."""
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(runtime_dir))
    monkeypatch.delenv(ADDRESS_VARIABLE, raising=False)
    with Client() as client:
        return client.generate("In Python", max_tokens=4, temperature=0).text


@pytest.fixture
def alone(tmp_path, monkeypatch):
    """A user without a running server."""
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    monkeypatch.delenv(ADDRESS_VARIABLE, raising=False)


def test_of_several_models_a_command_names_one(tmp_path, capsys):
    def play(worker: FakeWorker, body: Any) -> None:
        if isinstance(body, Submit):
            text = body.adapter or worker.model.name
            worker.accept_from_script(body)
            worker.post(deltas(Entry(body.handle, text, end=end_of(text))))

    tmp_path.chmod(0o700)
    cards = [replace(CARD, name=name, path=f"/models/{name}") for name in ("one", "two")]
    cards[0] = replace(cards[0], adapters=(AdapterRef("tone", "/loras/tone", b"tone"),))
    workers = [FakeWorker(f"ipc://{tmp_path}/{card.name}", play, card) for card in cards]
    where = ["--address", ",".join([worker.address for worker in workers])]
    try:
        assert main(["generate", "x", *ANSWER, *where, "--model", "two"]) == 0
        assert capsys.readouterr().out == "two"
        assert main(["generate", "x", *ANSWER, *where, "--model", "tone"]) == 0
        assert capsys.readouterr().out == "tone"
        for named in ("one", "tone"):
            assert main(["chat", named, "-q", "x", *where]) == 0
            assert capsys.readouterr().out == f"{named}\n"
        for named in ([], ["--model", "three"]):
            assert main(["generate", "x", *where, *named]) == 2
            assert "--model: got" in (said := capsys.readouterr().err)
            assert "allowed: one of 'one', 'tone', 'two'" in said
    finally:
        for worker in workers:
            worker.stop()


# ---- a server that runs --------------------------------------------------------------------


def test_generate_uses_the_users_running_server(served, capsys):
    assert main(["generate", "In Python", *ANSWER]) == 0
    assert capsys.readouterr() == (served, "")


def test_one_of_several_addresses_may_have_no_server(served, runtime_dir, capsys, tmp_path):
    there = f"ipc://{runtime_dir}/slipstream-{os.getuid()}/default/client.sock"
    tmp_path.chmod(0o700)
    gone = f"ipc://{tmp_path}/client.sock"
    assert main(["generate", "In Python", *ANSWER, "--address", f"{gone},{there}"]) == 0
    assert capsys.readouterr() == (served, "")
    assert main(["generate", "x", "--address", f"{gone}, {gone}2"]) == 1
    assert f"at {gone}, {gone}2: there is no such socket" in capsys.readouterr().err


@pytest.mark.parametrize("model", [["--model", MODEL], []])
def test_the_model_that_it_serves_may_be_named(served, capsys, monkeypatch, model):
    if not model:
        monkeypatch.setenv("SLIPSTREAM_MODEL", MODEL)
    assert main(["generate", "In Python", *model, *ANSWER]) == 0
    assert capsys.readouterr() == (served, "")


def test_settings_of_the_environment_are_no_reason_for_a_new_server(served, capsys, monkeypatch):
    monkeypatch.setenv("SLIPSTREAM_MAX_NUM_SEQS", "3")
    assert main(["generate", "In Python", *ANSWER]) == 0
    assert capsys.readouterr() == (served, "")


def test_the_variable_comes_before_the_users_server(
    runtime_dir, alone, served, capsys, monkeypatch
):
    where = runtime_dir / f"slipstream-{os.getuid()}" / "default" / "client.sock"
    monkeypatch.setenv(ADDRESS_VARIABLE, f"ipc://{where}")
    assert main(["generate", "In Python", *ANSWER]) == 0
    assert capsys.readouterr() == (served, "")


def test_the_prompt_may_come_from_standard_input(served, capsys, monkeypatch):
    monkeypatch.setattr("sys.stdin", io.StringIO("In Python"))
    assert main(["generate", "-", *ANSWER]) == 0
    assert capsys.readouterr() == (served, "")


def test_chat_uses_the_running_server(served, capsys, monkeypatch):
    monkeypatch.setattr("sys.stdin", io.StringIO("hello\n"))
    assert main(["chat", *ANSWER]) == 0
    with Client() as client:
        turns = [{"role": "user", "content": "hello"}]
        text = client.generate(turns, max_tokens=4, temperature=0).text
    assert capsys.readouterr() == (f"{text}\n", "")


def test_run_batch_uses_the_running_server(served, tmp_path, capsys):
    line = (
        '{"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": {"prompt": "x"}}\n'
    )
    (tmp_path / "in").write_text(line)
    assert main(["run-batch", str(tmp_path / "in"), str(tmp_path / "out")]) == 0
    assert '"status_code":200' in (tmp_path / "out").read_text()
    assert "starting" not in capsys.readouterr().err


# ---- a server that is started --------------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (["--model", "simulated:step_ms=2"], f"the running server serves {MODEL}, not simulated:"),
        (["--max-num-seqs", "4"], "--max-num-seqs is for a new server"),
        (["--new-stack"], "--new-stack is given"),
    ],
)
def test_why_a_new_server_is_started(served, capsys, monkeypatch, words, reason):
    asked = {}

    class StartedError(Exception):
        pass

    def stack(**settings):
        asked.update(settings)
        raise StartedError

    monkeypatch.setattr("slipstream.cli.server_choice.Stack", stack)
    monkeypatch.setenv("SLIPSTREAM_LOG_LEVEL", "debug")
    with pytest.raises(StartedError):
        main(["generate", "In Python", *words])
    assert capsys.readouterr().err.startswith(f"{reason}")
    assert asked["spare_core"] is False
    assert asked.get("max_num_seqs", 4) == 4


def test_a_server_is_started_where_none_runs_and_standard_error_says_so(tmp_path):
    environment = {**os.environ, "XDG_RUNTIME_DIR": str(tmp_path)}
    environment.pop(ADDRESS_VARIABLE, None)
    command = [sys.executable, "-m", "slipstream", "generate", "Once", "--model", MODEL, *ANSWER]
    done = subprocess.run(
        command, env=environment, capture_output=True, text=True, check=True, timeout=PATIENCE_S
    )
    begin, end = done.stderr.splitlines()
    assert begin == f"no server runs: starting one with {MODEL} ..."
    assert end.startswith(f"started {MODEL}: ready after ")
    assert done.stdout


def test_with_prompt_the_argument_is_the_model(alone, capsys, monkeypatch):
    assert main(["generate", "./none", "--prompt", "x"]) == 2
    assert capsys.readouterr().err.startswith("slipstream generate: MODEL: got './none'")
    assert main(["generate", "./none", "--prompt", "x", "--model", "gpt2"]) == 2
    assert capsys.readouterr().err.startswith(
        "slipstream generate: --model: got './none', allowed: one"
    )


# ---- servers that are not there ------------------------------------------------------------


def test_an_address_where_nothing_listens_fails_at_once(alone, tmp_path, capsys, monkeypatch):
    """The client alone would wait for ten seconds; it is never made here."""
    monkeypatch.setattr("slipstream.cli.server_choice.Client", None)
    tmp_path.chmod(0o700)
    address = f"ipc://{tmp_path}/client.sock"
    todo = "; `slipstream serve` or scripts/launch starts one\n"
    assert main(["generate", "x", "--address", address]) == 1
    said = f"slipstream generate: no Slipstream server at {address}: there is no such socket{todo}"
    assert capsys.readouterr().err == said
    with socket.socket(socket.AF_UNIX) as left:
        left.bind(address.removeprefix("ipc://"))  # what a killed server leaves behind
    assert main(["chat", "--address", address]) == 1
    assert f"{address}: nothing listens on that socket{todo}" in capsys.readouterr().err
    monkeypatch.setenv(ADDRESS_VARIABLE, address)
    assert main(["generate", "x"]) == 1
    said = f"no Slipstream server at $SLIPSTREAM_ADDRESS, {address}: nothing listens"
    assert said in capsys.readouterr().err


def test_a_tcp_port_where_nothing_listens_fails_at_once(alone, capsys, monkeypatch):
    monkeypatch.setattr("slipstream.cli.server_choice.Client", None)
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"tcp://127.0.0.1:{server.getsockname()[1]}"
    assert main(["generate", "x", "--address", address, "--insecure"]) == 1
    assert f"{address}: the host refuses connections to this port" in capsys.readouterr().err


def test_a_server_that_starts_just_now_is_waited_for(alone, tmp_path, capsys, monkeypatch):
    """Its folder is locked by a process that lives, and its socket is not there yet."""
    waited = []

    def client(address, **_options):
        waited.append(address)
        raise ConnectionLostError(Fault("engine", "not here"))

    monkeypatch.setattr("slipstream.cli.server_choice.Client", client)
    folder = tmp_path / f"slipstream-{os.getuid()}" / "default"
    folder.mkdir(mode=0o700, parents=True)
    (folder / "supervisor.lock").write_text(str(os.getpid()))
    assert main(["generate", "x"]) == 1
    assert waited == [f"ipc://{folder}/client.sock"]
    assert "starting" not in capsys.readouterr().err


# ---- progress ------------------------------------------------------------------------------


class Terminal(io.StringIO):
    """Standard error of a terminal; `seen` is set once it shows `text`."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self._text = text
        self.seen = threading.Event()

    def isatty(self) -> bool:
        return True

    def write(self, text: str) -> int:
        if self._text in text:
            self.seen.set()
        return super().write(text)


def test_seconds_are_counted_on_a_terminal(monkeypatch):
    terminal = Terminal("starting ... 1 s")
    monkeypatch.setattr("sys.stderr", terminal)
    with Progress("starting", done="started: ready"):
        assert terminal.seen.wait(PATIENCE_S)
    lines = terminal.getvalue().split("\r\x1b[K")
    assert lines[1:3] == ["starting ... 0 s", "starting ... 1 s"]
    assert lines[-1].startswith("started: ready after ")
    assert lines[-1].endswith(" s\n")


def test_what_does_not_last_is_not_shown(capsys):
    with Progress("waiting", after_s=PATIENCE_S):
        pass
    assert capsys.readouterr() == ("", "")


def test_a_socket_that_is_slow_is_said_and_waited_for(alone, tmp_path, capsys, monkeypatch):
    tmp_path.chmod(0o700)
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(f"{tmp_path}/client.sock")
        server.listen(8)
        assert main(["generate", "x", "--address", f"ipc://{tmp_path}/client.sock"]) == 1
    waiting, failed = capsys.readouterr().err.splitlines()
    assert waiting == f"waiting for the server at ipc://{tmp_path}/client.sock to answer ..."
    assert failed.startswith("slipstream generate: no Slipstream server at ")
