"""Processes that a test starts and that never outlive it."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from os import PathLike
from typing import Any

from tests.helpers.patience import PATIENCE_S


@contextmanager
def started(
    command: Sequence[str | PathLike[str]], **options: Any
) -> Iterator[subprocess.Popen[Any]]:
    """A process that is killed where the block is left, if it runs then, and its pipes closed.

    `Popen` itself waits there for the process's own end: a test that fails would wait for ever.
    """
    with subprocess.Popen(command, **options) as process:
        try:
            yield process
        finally:
            process.kill()
            process.wait(PATIENCE_S)
