"""Folders for the tests of the command line."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest


@pytest.fixture
def tmp_path() -> Iterator[Path]:
    """Shorter than pytest's own: the path of a socket has at most 100 bytes."""
    with tempfile.TemporaryDirectory(prefix="cli-") as folder:
        yield Path(folder)
