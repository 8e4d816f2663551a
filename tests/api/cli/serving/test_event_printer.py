"""What `serve` and `route` tell the terminal, event by event."""

from __future__ import annotations

import errno
import io
import subprocess
from pathlib import Path
from typing import Any

import pytest

from slipstream.cli.serving.event_printer import EventPrinter, key_hint
from slipstream.client.endpoints import default_address
from slipstream.stack.supervisor_events import (
    ProcessEnded,
    ProcessReady,
    ProcessRestarted,
    ProcessStarted,
    RequestsRunning,
    StackDraining,
    StackFailed,
    StackReady,
)
from slipstream_ipc.messages import PoolingCard
from slipstream_ipc.validation.pooling import pooling_detail

NAMES = {"max_restarts": "--max-restarts", "http_port": "--port"}


def printer() -> EventPrinter:
    return EventPrinter("a-model", NAMES)


def test_what_is_started_is_said_once(capsys: pytest.CaptureFixture[str]) -> None:
    tell = printer()
    tell(ProcessStarted("core", 12))
    tell(ProcessStarted("worker", 13))
    assert capsys.readouterr() == ("starting a-model ...\n", "")


def test_ranks_of_another_machine_wait_and_serve_nobody(
    capsys: pytest.CaptureFixture[str],
) -> None:
    tell = EventPrinter("rank 1 of a-model", NAMES, serves=False)
    tell(StackReady("tcp://10.0.0.5:29501"))
    said = "\nrank 1 of a-model: waiting for the core at tcp://10.0.0.5:29501; Ctrl-C ends this\n"
    assert capsys.readouterr() == (said, "")


def test_restarts_take_one_line_each(capsys: pytest.CaptureFixture[str]) -> None:
    tell = printer()
    tell(ProcessEnded("worker", 12, "signal SIGKILL"))  # the log has it
    tell(ProcessRestarted("worker", 34, "signal SIGKILL", 0.125))
    about = "process 34, 0.12 s after the end of the one before: signal SIGKILL"
    assert capsys.readouterr() == (f"worker restarted ({about})\n", "")


@pytest.mark.parametrize(
    ("detail", "said"),
    [
        ("serving on http://127.0.0.1:8000", "open http://127.0.0.1:8000 in a browser, or try:"),
        ("serving on http://0.0.0.0:8105", "open http://localhost:8105 in a browser, or try:"),
        ("serving on https://[::]:8105", "open https://localhost:8105 in a browser, or try:"),
        ("serving on http://:81", "open http://localhost:81 in a browser, or try:"),
        ("serving on http://gpu1.example:81", "open http://gpu1.example:81 in a browser, or try:"),
        ("serving on unix:/run/http.sock", "try:"),
        (None, "try:"),
    ],
)
def test_a_stack_that_serves_says_where_to_look(
    capsys: pytest.CaptureFixture[str], detail: str | None, said: str
) -> None:
    tell = printer()
    if detail is not None:
        tell(ProcessReady("http", 12, detail, 0.5))
    tell(StackReady("ipc:///run/client.sock"))
    lines = capsys.readouterr().out.splitlines()
    first = lines.index("serving at ipc:///run/client.sock; Ctrl-C ends it")
    assert lines[first + 1] == said
    assert len(lines[first + 2 :]) == (1 if detail is None else 2)


@pytest.mark.parametrize("form", ["text", "json"])
def test_a_server_that_is_open_to_others_says_so_last(
    capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture, form: Any
) -> None:
    """On standard error, with every level of logs but the errors alone."""
    tell = EventPrinter("a-model", NAMES, open_host="0.0.0.0", form=form)
    tell(ProcessReady("http", 12, "serving on http://0.0.0.0:8105", 0.5))
    shown = capsys.readouterr()
    assert "without an API key" not in shown.out + shown.err
    tell(StackReady(default_address()))
    said = "--host 0.0.0.0 without an API key: everybody who reaches this address is served"
    shown = capsys.readouterr()
    if form == "text":
        assert shown.err.startswith(f"warning: {said}")
        assert shown.err.count("\n") == 1
    else:
        assert caplog.records[-1].message.startswith(said)
        assert caplog.records[-1].levelname == "WARNING"
    EventPrinter("a-model", NAMES)(StackReady(default_address()))
    assert capsys.readouterr().err == ""


def test_the_example_over_http_works_as_it_is(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """With the certificate, and with a key of the file; a key of the command line is not shown."""
    keys = tmp_path / "api keys"
    keys.write_text("\na-secret\nanother\n")
    tell = EventPrinter(
        "a-model", NAMES, key=key_hint(None, str(keys)), certificate="/etc/my cert.pem"
    )
    tell(ProcessReady("http", 12, "serving on https://0.0.0.0:8105", 0.5))
    tell(StackReady(default_address()))
    command = capsys.readouterr().out.splitlines()[-1].strip()
    assert command.startswith("curl -N https://localhost:8105/v1/")
    shown = f"set -- {command.removeprefix('curl ')}; printf '%s\\n' \"$@\""
    words = subprocess.run(["sh", "-c", shown], capture_output=True, text=True, check=True).stdout
    assert "Authorization: Bearer a-secret\n" in words
    assert "--cacert\n/etc/my cert.pem\n" in words


@pytest.mark.parametrize(
    ("in_environment", "file", "hint"),
    [
        ("set", "keys", "$SLIPSTREAM_API_KEY"),
        (None, "keys", "$(grep -m1 . keys)"),
        ("", None, "YOUR_KEY"),
    ],
)
def test_where_the_example_takes_its_key_from(
    in_environment: str | None, file: str | None, hint: str
) -> None:
    assert key_hint(in_environment, file) == hint


def test_the_example_names_an_address_where_it_is_needed(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("SLIPSTREAM_ADDRESS", raising=False)
    printer()(StackReady(default_address()))
    question = "'What is an assert statement?' --temperature 0"
    assert capsys.readouterr().out.endswith(f" chat {question}\n")
    printer()(StackReady("ipc:///a b/client.sock"))
    said = f" chat {question} --address 'ipc:///a b/client.sock'\n"
    assert capsys.readouterr().out.endswith(said)


def test_what_a_signal_does_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    tell = printer()
    tell(StackDraining(2.5))
    assert capsys.readouterr() == ("stopping\n", "")
    tell(RequestsRunning(1, 2.5))
    tell(RequestsRunning(3, 1.25))
    assert capsys.readouterr().out.splitlines() == [
        "1 request may go on for 2.5 s; Ctrl-C again ends them now",
        "3 requests may go on for 1.25 s; Ctrl-C again ends them now",
    ]


def test_a_failure_goes_to_standard_error(capsys: pytest.CaptureFixture[str]) -> None:
    printer()(StackFailed("core (process 7) ended: signal SIGKILL"))
    said = "slipstream serve: core (process 7) ended: signal SIGKILL\n"
    assert capsys.readouterr() == ("", said)
    printer()(StackFailed("the port is in use (http_port sets another); see max_restarts"))
    said = "slipstream serve: the port is in use (--port sets another); see --max-restarts\n"
    assert capsys.readouterr() == ("", said)


class FullDisk(io.StringIO):
    """A log that cannot be written."""

    def flush(self) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")


@pytest.mark.parametrize("stream", [FullDisk(), None])
def test_a_stack_outlives_a_log_that_cannot_be_written(
    monkeypatch: pytest.MonkeyPatch, stream: io.StringIO | None
) -> None:
    """What the teller raises would end the supervisor, and with it every stream."""
    monkeypatch.setattr("sys.stdout", stream)
    monkeypatch.setattr("sys.stderr", stream)
    tell = printer()
    tell(ProcessRestarted("worker", 34, "signal SIGKILL", 0.125))
    tell(StackFailed("core (process 7) ended: signal SIGKILL"))


@pytest.mark.parametrize(
    ("pooling", "path"),
    [
        (PoolingCard(384), "/v1/embeddings"),
        (PoolingCard(1, task="classify", labels=("yes",)), "/classify"),
    ],
)
def test_a_server_for_pooling_is_asked_for_no_chat(
    pooling: PoolingCard, path: str, capsys: pytest.CaptureFixture[str]
) -> None:
    tell = printer()
    tell(ProcessReady("core", 12, pooling_detail("a-model", pooling), 1.0))
    tell(StackReady(default_address()))
    assert "chat" not in capsys.readouterr().out
    tell(ProcessReady("http", 13, "serving on http://127.0.0.1:8000", 1.0))
    tell(StackReady(default_address()))
    *_, first, example = capsys.readouterr().out.splitlines()
    assert first == "try:"
    assert example.startswith(f"  curl -N http://127.0.0.1:8000{path} ")
