"""The commit and the versions that a result belongs to."""

from __future__ import annotations

import subprocess
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

_HERE = Path(__file__).resolve().parent


def commit() -> str | None:
    """The abbreviated hash of HEAD in the repository of this file, with a trailing `+` if tracked
    files other than benchmarks' results are modified; None outside a repository.
    """
    try:
        head = _git("rev-parse", "--short=12", "HEAD")
        code = (":/", ":(top,exclude)benchmarks/results")
        has_changes = bool(_git("status", "--porcelain", "--untracked-files=no", "--", *code))
    except (OSError, subprocess.CalledProcessError):
        return None
    return head + "+" * has_changes


def package_version(name: str = "slipstream") -> str | None:
    """The version of an installed package; None if it is not installed, as in gpu-check."""
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def _git(*words: str) -> str:
    command = ["git", "-C", str(_HERE), *words]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
