"""The lines of the log, in both formats."""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slipstream_ipc.telemetry.logs import LogFormat, formatter, of_requests, with_fields


def line(form: LogFormat, message: str, *args: object, **more: Any) -> str:
    logger = logging.Logger("slipstream.some.module")
    exc_info, extra = more.pop("exc_info", None), more.pop("extra", None)
    record = logger.makeRecord(
        logger.name, logging.WARNING, "file.py", 1, message, args, exc_info, extra=extra
    )
    return formatter("worker", form).format(record)


def decoded(message: str, *args: object, **more: Any) -> dict[str, Any]:
    text = line("json", message, *args, **more)
    assert "\n" not in text
    found: dict[str, Any] = json.loads(text)
    return found


def test_a_line_of_text_has_the_ids_of_its_requests() -> None:
    assert line("text", "%d failed", 7).endswith(" worker WARNING 7 failed")
    one = line("text", "failed", extra=of_requests("mine"))
    assert one.endswith(" worker WARNING [mine] failed")
    assert line("text", "x", extra=of_requests("a", "b")).endswith(" WARNING [a b] x")
    assert line("text", "x", extra=of_requests("")).endswith(" WARNING x"), "it has no id"


def test_a_line_of_json_has_them_as_a_field() -> None:
    found = decoded("%d failed", 7)
    assert set(found) == {"time", "level", "process", "pid", "logger", "message"}
    assert (found["level"], found["process"], found["pid"]) == ("warning", "worker", os.getpid())
    assert (found["logger"], found["message"]) == ("slipstream.some.module", "7 failed")
    assert found["time"].endswith("Z")
    assert decoded("x", extra=of_requests("mine"))["request_id"] == "mine"
    assert decoded("x", extra=of_requests("a", "b"))["request_ids"] == ["a", "b"]
    assert len(decoded("x", extra=of_requests(*"abcdefghijklmnopqrstuvwxyz"))["request_ids"]) == 16
    figures = decoded("x", extra=with_fields({"rate": 0.5}, "mine"))
    assert (figures["rate"], figures["request_id"]) == (0.5, "mine")


def test_a_traceback_is_in_the_line_of_its_message() -> None:
    try:
        raise ValueError("no\nmore")
    except ValueError:
        found = decoded("failed", exc_info=sys.exc_info())
    assert found["message"] == "failed"
    assert found["exception"].startswith("Traceback")
    assert found["exception"].endswith("ValueError: no\nmore")


@given(st.text(st.characters(exclude_categories=()), max_size=40))
def test_no_id_that_a_client_chooses_can_pass_for_more_than_an_id(name: str) -> None:
    """Lines are split at line ends, ids at blanks; terminals obey control characters."""
    text = line("text", "MESSAGE", extra=of_requests(name))
    _, _, rest = text.partition(" WARNING ")
    assert rest.endswith("MESSAGE")
    ids = rest.removesuffix("MESSAGE").strip()
    assert ids.isascii()
    assert ids.isprintable()
    assert ids.count("]") == ids.count(" ") + bool(name) == bool(name)
    found = decoded("MESSAGE", extra=of_requests(name))
    if name.isascii():
        assert found.get("request_id", "") == name


CHILD = """
import logging, sys, warnings
from msgspec import Struct
from slipstream_ipc.process import start_child
class Config(Struct):
    pass
start_child("child", Config)
warnings.warn("something old")
logging.getLogger("it").info("said")
raise ValueError("that is all")
"""


@pytest.mark.parametrize("form", ["text", "json"])
def test_all_that_a_process_says_has_the_format(form: str) -> None:
    """Warnings and the exception that ends it, too."""
    done = _run_child({"SLIPSTREAM_LOG_FORMAT": form})
    assert done.returncode == 1
    if form == "text":
        assert " child WARNING <string>:" in done.stderr
        assert " child INFO said\n" in done.stderr
        assert " child CRITICAL ValueError: that is all\nTraceback" in done.stderr
        return
    warning, info, last = map(json.loads, done.stderr.splitlines())
    assert "something old" in warning["message"]
    assert info["message"] == "said"
    assert (last["level"], last["message"]) == ("critical", "ValueError: that is all")
    assert last["exception"].endswith("ValueError: that is all")


def test_a_process_of_a_replica_says_which_one_it_is_of() -> None:
    done = _run_child({"SLIPSTREAM_LOG_REPLICA": "replica-1"})
    assert " replica-1/child INFO said\n" in done.stderr


def _run_child(environment: dict[str, str]) -> subprocess.CompletedProcess[str]:
    read_end, status = os.pipe()
    done = subprocess.run(
        [sys.executable, "-c", CHILD],
        input="{}",
        capture_output=True,
        text=True,
        pass_fds=(status,),
        env={
            **os.environ,
            "SLIPSTREAM_LOG_LEVEL": "INFO",
            "SLIPSTREAM_STATUS_FD": str(status),
            "SLIPSTREAM_PARENT_PID": str(os.getpid()),
            **environment,
        },
    )
    os.close(read_end)
    os.close(status)
    return done
