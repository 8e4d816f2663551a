"""A peer's HTTP server as a process of its own, which ends with the benchmark."""

from __future__ import annotations

import ctypes
import os
import secrets
import signal
import socket
import subprocess
import tempfile
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress

from slipstream_bench.common.measures import cannot_measure
from slipstream_bench.common.process_census import marked_pids

_START_S = 600
_END_S = 30.0
_TAIL_BYTES = 2000
_PR_SET_PDEATHSIG = 1
_MARK = "SLIPSTREAM_BENCH_SERVER"


@contextmanager
def server_process(
    name: str,
    command: Sequence[str],
    port: int,
    environment: Mapping[str, str],
    path: str = "/health",
) -> Iterator[int]:
    """Its pid, once http://127.0.0.1:`port``path` answers; the whole tree ends with the block.

    environment: added to this process's. Raises: EngineError, with the last words of `name`, if it
    does not start.
    """
    mark = secrets.token_hex(16)  # of all that it starts
    with tempfile.TemporaryFile() as log:
        process = subprocess.Popen(
            command,
            stdout=log,
            stderr=log,
            env=os.environ | environment | {_MARK: mark},
            preexec_fn=_end_with_parent,
        )
        try:
            if not _is_healthy(process, port, path):
                log.seek(max(0, log.seek(0, os.SEEK_END) - _TAIL_BYTES))
                tail = log.read().decode(errors="replace")
                raise cannot_measure(f"{name} did not start: {tail}")
            yield process.pid
        finally:
            process.terminate()
            try:
                process.wait(_END_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
            for pid in marked_pids(mark, _MARK):
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)


def free_port() -> int:
    """A port of 127.0.0.1 on which nothing listens."""
    with socket.create_server(("127.0.0.1", 0)) as one:
        port: int = one.getsockname()[1]
        return port


def _end_with_parent() -> None:
    """In the child: a benchmark that is killed leaves no server behind."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)


def _is_healthy(process: subprocess.Popen[bytes], port: int, path: str) -> bool:
    for _ in range(_START_S):
        try:
            process.wait(1.0)
            return False
        except subprocess.TimeoutExpired:
            pass
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", timeout=5):
                return True
        except (OSError, urllib.error.URLError):
            continue
    return False
