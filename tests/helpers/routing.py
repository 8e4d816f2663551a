"""`slipstream route`, running."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def routing(folder: Path, *words: str) -> Iterator[tuple[subprocess.Popen[str], int]]:
    """The command's process, once it serves, and its port."""
    command = [sys.executable, "-m", "slipstream.cli.main", "route", *words]
    process = subprocess.Popen(
        [*command, "--port", "0", "--runtime-dir", str(folder / "route")],
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert process.stdout is not None
        said = ""
        while (found := re.search(r"http://[\w.]+:(\d+)", said)) is None:
            line = process.stdout.readline()
            assert line, said
            said += line
        yield process, int(found[1])
    finally:
        process.kill()
        process.wait()
