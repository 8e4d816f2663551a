"""What `slipstream serve` tells the terminal, event by event."""

from __future__ import annotations

import errno
import io

import pytest

from slipstream.cli.serve import _Teller
from slipstream.client.endpoints import default_address
from slipstream.stack.events import (
    ProcessEnded,
    ProcessReady,
    ProcessRestarted,
    StackDraining,
    StackFailed,
    StackReady,
)


def test_restarts_take_one_line_each(capsys: pytest.CaptureFixture[str]) -> None:
    tell = _Teller(has_keys=False)
    tell(ProcessEnded("worker", 12, "signal SIGKILL"))  # the log has it
    tell(ProcessRestarted("worker", 34, "signal SIGKILL", 0.125))
    about = "process 34, 0.12 s after the end of the one before: signal SIGKILL"
    assert capsys.readouterr() == (f"worker restarted ({about})\n", "")


@pytest.mark.parametrize(
    ("detail", "said"),
    [
        ("serving on http://127.0.0.1:8000", "open http://127.0.0.1:8000 in a browser, or try:"),
        ("serving on unix:/run/http.sock", "try:"),
        (None, "try:"),
    ],
)
def test_a_stack_that_serves_says_where_to_look(
    capsys: pytest.CaptureFixture[str], detail: str | None, said: str
) -> None:
    tell = _Teller(has_keys=False)
    if detail is not None:
        tell(ProcessReady("http", 12, detail, 0.5))
    tell(StackReady("ipc:///run/client.sock"))
    lines = capsys.readouterr().out.splitlines()
    first = lines.index("serving at ipc:///run/client.sock; Ctrl-C ends it")
    assert lines[first + 1] == said
    assert len(lines[first + 2 :]) == (1 if detail is None else 2)


def test_the_example_names_an_address_where_it_is_needed(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("SLIPSTREAM_ADDRESS", raising=False)
    _Teller(has_keys=False)(StackReady(default_address()))
    assert capsys.readouterr().out.endswith(" generate 'In Python,'\n")
    _Teller(has_keys=False)(StackReady("ipc:///a b/client.sock"))
    said = " generate 'In Python,' --address 'ipc:///a b/client.sock'\n"
    assert capsys.readouterr().out.endswith(said)


def test_what_a_signal_does_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    _Teller(has_keys=False)(StackDraining(2.5))
    said = "stopping; running requests may take 2.5 s more; Ctrl-C again ends them now\n"
    assert capsys.readouterr() == (said, "")


def test_a_failure_goes_to_standard_error(capsys: pytest.CaptureFixture[str]) -> None:
    _Teller(has_keys=False)(StackFailed("core (process 7) ended: signal SIGKILL"))
    said = "slipstream serve: core (process 7) ended: signal SIGKILL\n"
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
    tell = _Teller(has_keys=False)
    tell(ProcessRestarted("worker", 34, "signal SIGKILL", 0.125))
    tell(StackFailed("core (process 7) ended: signal SIGKILL"))
