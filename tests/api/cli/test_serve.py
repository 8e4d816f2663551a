"""What `slipstream serve` tells the terminal, event by event."""

from __future__ import annotations

import errno
import io

import pytest

from slipstream.cli.serve import _Teller
from slipstream.stack.events import ProcessEnded, ProcessRestarted, StackDraining, StackFailed


def test_restarts_take_one_line_each(capsys: pytest.CaptureFixture[str]) -> None:
    tell = _Teller(has_keys=False)
    tell(ProcessEnded("worker", 12, "signal SIGKILL"))  # the log has it
    tell(ProcessRestarted("worker", 34, "signal SIGKILL", 0.125))
    about = "process 34, 0.12 s after the end of the one before: signal SIGKILL"
    assert capsys.readouterr() == (f"worker restarted ({about})\n", "")


def test_what_a_signal_does_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    _Teller(has_keys=False)(StackDraining(2.5))
    said = "stopping; what runs may take 2.5 s more; another Ctrl-C ends it now\n"
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
