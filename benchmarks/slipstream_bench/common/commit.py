"""Which commit of the code a result belongs to."""

from __future__ import annotations

import subprocess
from pathlib import Path

_HERE = Path(__file__).resolve().parent


def commit() -> str | None:
    """The hash of the commit that this file lies in, `+` behind it where tracked files differ from
    it; None where it lies in no repository.
    """
    try:
        head = _git("rev-parse", "--short=12", "HEAD")
        has_changes = bool(_git("status", "--porcelain", "--untracked-files=no"))
    except (OSError, subprocess.CalledProcessError):
        return None
    return head + "+" * has_changes


def _git(*words: str) -> str:
    command = ["git", "-C", str(_HERE), *words]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
