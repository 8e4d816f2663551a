"""What `examples/ask.py` and `examples/ask.sh` say, wherever their server runs."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from tests.helpers.patience import PATIENCE_S

EXAMPLES = Path(__file__).parents[2] / "examples"
PROMPT = "In Python,"


def by_program(address: str, keys: Path | None = None) -> str:
    """The text that the program prints."""
    known = {"SLIPSTREAM_ADDRESS": address}
    if keys is not None:
        known["SLIPSTREAM_KEYS"] = str(keys)
    return run([sys.executable, str(EXAMPLES / "ask.py"), PROMPT], **known).removesuffix("\n")


def by_curl(port: int) -> str:
    """The text in the answer that the script prints; skips where there is no curl."""
    if shutil.which("curl") is None:
        pytest.skip("there is no curl")
    [choice] = json.loads(run([str(EXAMPLES / "ask.sh")], PORT=str(port)))["choices"]
    return str(choice["text"])


def run(command: list[str], **environment: str) -> str:
    """What a command says."""
    done = subprocess.run(
        command,
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout
