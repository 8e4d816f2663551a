"""The other machine of a model's ranks: `slipstream serve --node-rank 1` as a process."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tests.helpers.patience import PATIENCE_S
from tests.helpers.processes import started


def nodes_of(host: str, port: int, keys: Path) -> dict[str, Any]:
    """The settings of two machines with a rank each."""
    return {
        "device": "cpu",
        "tensor_parallel_size": 2,
        "nnodes": 2,
        "master_addr": host,
        "master_port": port,
        "keys": str(keys),
        "hang_timeout_s": 4.0,
    }


def command_of(settings: dict[str, Any], folder: Path, model: Path) -> list[str]:
    """What runs the other machine's rank. folder: for its own files."""
    given = {**settings, "node_rank": 1, "runtime_dir": folder / "node"}
    options = [
        word
        for name, value in given.items()
        for word in (f"--{name.replace('_', '-')}", str(value))
    ]
    return [sys.executable, "-m", "slipstream.cli.main", "serve", str(model), *options]


@contextmanager
def other_machine(command: Sequence[str]) -> Iterator[subprocess.Popen[str]]:
    """The process, once its rank waits for a core."""
    with started(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        timer = threading.Timer(2 * PATIENCE_S, process.kill)
        timer.start()
        assert any("waiting for the core at tcp://" in line for line in process.stdout)
        timer.cancel()
        yield process
