"""Which commit of this repository a measurement was made with."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path


def commit_hash() -> str | None:
    """Of the checkout that this package runs from; with `+` where files differ from it. None where
    it runs from no checkout, or git is not there.
    """
    folder, git = Path(__file__).resolve().parent, shutil.which("git")
    if git is None:
        return None
    found = []
    for argv in (["rev-parse", "HEAD"], ["status", "--porcelain", "--untracked-files=no"]):
        try:
            done = subprocess.run(
                [git, "-C", str(folder), *argv], capture_output=True, text=True, check=True
            )
        except (OSError, subprocess.CalledProcessError):
            return None
        found.append(done.stdout.strip())
    return found[0] + ("+" if found[1] else "")
