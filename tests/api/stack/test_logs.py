"""What a whole stack logs about a request carries the request's id, whichever process logs it."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

from tests.helpers.http_front import Raw
from tests.helpers.patience import PATIENCE_S

MARK = "plover"  # in every prompt


def lines_of_a_server(folder: Path, form: str) -> list[str]:
    """All that `slipstream serve` writes, over a request that succeeds and one with too long a
    prompt.
    """
    command = [sys.executable, "-P", "-m", "slipstream", "serve"]
    command += ["simulated:step_ms=1,max_model_len=64", "--runtime-dir", str(folder / "run")]
    command += ["--port", "0", "--spare-worker", "false", "--spare-core", "false"]
    command += ["--log-format", form, "--access-log", "text", "--drain-s", "0"]
    lines: list[str] = []
    with subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={**os.environ, "SLIPSTREAM_LOG_LEVEL": "DEBUG", "PYTHONUNBUFFERED": "1"},
    ) as process:
        try:
            assert process.stdout is not None
            while not lines or "curl -N" not in lines[-1]:  # the last of what it says at its start
                lines.append(process.stdout.readline())
                assert lines[-1], lines
            (port,) = set(re.findall(r"http://127\.0\.0\.1:(\d+)", "".join(lines)))
            ask(int(port))
            process.send_signal(signal.SIGTERM)
            rest, _ = process.communicate(timeout=PATIENCE_S)
        finally:
            process.kill()
    return lines + rest.splitlines(keepends=True)


def ask(port: int) -> None:
    body = {"prompt": MARK, "max_tokens": 3}
    with Raw(port) as raw:
        raw.post("/v1/completions", body, "X-Request-Id: good")
        assert raw.read().status == 200
        raw.post("/v1/completions", {**body, "prompt": f"{MARK} " * 99}, "X-Request-Id: long")
        assert raw.read().status == 400


def test_lines_of_text(tmp_path: Path) -> None:
    said = "".join(lines_of_a_server(tmp_path, "text"))
    assert " http INFO [good] 127.0.0.1 POST /v1/completions 200 " in said
    assert " http INFO [long] 127.0.0.1 POST /v1/completions 400 " in said
    assert " worker DEBUG [long] rejected: bad_request\n" in said
    assert MARK not in said


def test_lines_of_json(tmp_path: Path) -> None:
    """Every line is an object, what `serve` says to people included."""
    text = lines_of_a_server(tmp_path, "json")
    assert MARK not in "".join(text)
    lines: list[dict[str, Any]] = [json.loads(line) for line in text]
    found = [
        (line["request_id"], line["process"], line.get("status"))
        for line in lines
        if "request_id" in line
    ]
    assert found == [("good", "http", 200), ("long", "worker", None), ("long", "http", 400)]
    assert {line["process"] for line in lines} >= {"supervisor", "worker", "http"}
    assert any(line["message"].startswith("core ready (process ") for line in lines)
