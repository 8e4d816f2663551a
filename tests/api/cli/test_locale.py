"""Commands under a locale that knows nothing but ASCII, with names that are not."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from tests.helpers.patience import PATIENCE_S
from tests.helpers.stacks import spareless_stack

from slipstream.demo_model import MODEL_PATH

pytestmark = pytest.mark.process
ASCII = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
NAME = "größe-模型"


def run(*words: str, cwd: Path) -> tuple[int, bytes, bytes]:
    done = subprocess.run(
        [sys.executable, "-m", "slipstream", *words],
        cwd=cwd,
        env={**os.environ, **ASCII, "USER": "müller", "LOGNAME": "müller"},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        timeout=PATIENCE_S,
    )
    return done.returncode, done.stdout, done.stderr


def test_a_batch_in_folders_of_any_name(tmp_path: Path) -> None:
    folder = tmp_path / "modell-ä"
    shutil.copytree(MODEL_PATH, folder)
    body = {"model": NAME, "messages": [{"role": "user", "content": "é"}], "max_tokens": 2}
    request = {"custom_id": "ü", "method": "POST", "url": "/v1/chat/completions", "body": body}
    text = json.dumps(request, ensure_ascii=False)
    (tmp_path / "aufträge.jsonl").write_text(text, "utf-8")
    options = ["--served-model-name", NAME, "--new-stack", "--verbose"]
    code, _, said = run(
        "run-batch", "aufträge.jsonl", "antwörten.jsonl", str(folder), *options, cwd=tmp_path
    )
    assert code == 0, said
    assert f"loaded {folder}".encode() in said  # a line of the log
    answer = json.loads((tmp_path / "antwörten.jsonl").read_bytes())
    assert answer["custom_id"] == "ü"
    assert answer["response"]["body"]["model"] == NAME


def test_a_chat_with_a_model_of_any_name(tmp_path: Path) -> None:
    answers = tmp_path / "antworten.jsonl"
    answers.write_text(json.dumps({"text": "Schön: 日本"}), "utf-8")
    with spareless_stack(f"simulated:answers={answers}", served_model_name=NAME) as stack:
        assert stack.address is not None
        code, answer, said = run("chat", "--address", stack.address, "Größe?", cwd=tmp_path)
    assert code == 0, said
    assert answer.decode().strip() == "Schön: 日本"
