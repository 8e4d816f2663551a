"""The commit that a result is of."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from slipstream_bench.common import provenance


def test_a_commit_is_told_and_whether_code_was_changed_since(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def git(*words: str) -> str:
        command = ["git", "-C", str(tmp_path), "-c", "user.name=a", "-c", "user.email=a@b", *words]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()

    here, results = tmp_path / "benchmarks" / "common", tmp_path / "benchmarks" / "results"
    monkeypatch.setattr(provenance, "_HERE", here)
    for folder in (here, results):
        folder.mkdir(parents=True)
        (folder / "file").write_text("before")
    git("init", "-q")
    git("add", ".")
    git("commit", "-q", "-m", "It begins")
    head = git("rev-parse", "--short=12", "HEAD")
    assert provenance.commit() == head
    (here / "another").write_text("not tracked")
    (results / "file").write_text("a new result")  # of the same code
    assert provenance.commit() == head
    (here / "file").write_text("other code")
    assert provenance.commit() == head + "+"
