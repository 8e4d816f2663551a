"""`examples/tools.py`, with a worker that plays a model which calls tools."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.helpers.fake_worker import Entry, FakeWorker, deltas, end_of
from tests.helpers.patience import PATIENCE_S

from slipstream_ipc.messages import AnswerEvent, EventKind, Submit

EXAMPLE = Path(__file__).parents[2] / "examples" / "tools.py"
QUESTION = "How long is it?"
CALLS = [
    ("days_between", '{"begin": "2026-11-23", "end": "2027-01-06"}', "44"),
    ("days_between", '{"begin": "soon", "end": "later"}', "ValueError"),
    ("days_between", "{}", "TypeError"),
    ("nothing", "{}", "KeyError"),
]


def answer(worker: FakeWorker, body: Any) -> None:
    """A script: all calls first, then an answer that says what they gave."""
    if not isinstance(body, Submit):
        return
    worker.accept_from_script(body)
    if len(body.messages) == 1:
        assert '"days_between"' in body.template.tools
        for at, (name, arguments, _) in enumerate(CALLS):
            events = (
                AnswerEvent(EventKind.CALL_BEGINS, name, at),
                AnswerEvent(EventKind.CALL_ARGUMENTS, arguments, at),
                AnswerEvent(EventKind.CALL_ENDS, "", at),
            )
            worker.post(deltas(Entry(body.handle, "x", at, events=events)))
        cut = AnswerEvent(EventKind.CALL_BEGINS, "today", len(CALLS))
        end = end_of("x" * 5)
        worker.post(deltas(Entry(body.handle, "x", len(CALLS), end=end, events=(cut,))))
        return
    said = body.messages[1]
    assert said.tool_calls is not None
    results = body.messages[2:]
    assert [each.tool_call_id for each in results] == [call.id for call in said.tool_calls]
    text = "; ".join(each.content for each in results)
    worker.post(deltas(Entry(body.handle, text, end=end_of(text), kind=EventKind.CONTENT)))


@pytest.fixture
def address(tmp_path: Path) -> Iterator[str]:
    """Where the worker listens."""
    worker = FakeWorker(f"ipc://{tmp_path}/client.sock", answer)
    yield worker.address
    worker.stop()


def test_functions_are_called_and_their_results_go_back(address: str) -> None:
    done = subprocess.run(
        [sys.executable, str(EXAMPLE), QUESTION],
        env={**os.environ, "SLIPSTREAM_ADDRESS": address},
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    *called, last = done.stdout.splitlines()
    for line, (name, arguments, result) in zip(called, CALLS, strict=True):
        assert line.startswith(f"{name}({arguments}) = {result}")
    assert last.startswith("44; ValueError: ")
    assert last.count("; ") == len(CALLS) - 1
