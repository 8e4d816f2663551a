"""More connections than a stack can have: from clients of its own, and from strangers over TCP."""

from __future__ import annotations

import os
import resource
import signal
import socket as sockets
import struct
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest
from tests.helpers.patience import PATIENCE_S
from tests.helpers.ports import free_port

from slipstream import Client

PROMPT = "How a server ends, Chapter 3"


@contextmanager
def serve(folder: Path, soft: int, hard: int, *options: str) -> Iterator[subprocess.Popen[str]]:
    """`slipstream serve` in `folder`, whose processes may have so many files open."""

    def limited() -> None:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))

    line = [sys.executable, "-m", "slipstream", "serve", "simulated:step_ms=10,mode=chain"]
    line += ["--runtime-dir", str(folder), "--no-spare-worker", "--no-spare-core"]
    process = subprocess.Popen(
        [*line, *options],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=limited,
    )
    try:
        yield process
    finally:
        process.send_signal(signal.SIGTERM)
        process.communicate(timeout=PATIENCE_S)


def told(process: subprocess.Popen[str]) -> str:
    process.send_signal(signal.SIGTERM)
    return process.communicate(timeout=PATIENCE_S)[1]


@pytest.mark.process
@pytest.mark.parametrize("is_low", [True, False])
def test_bare_connections_end_neither_the_worker_nor_a_stream(tmp_path: Path, is_low: bool) -> None:
    """libzmq ends a process that has no descriptor left when a client connects over ipc://."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    limits = (320, 320) if is_low else (320, hard)
    port = free_port()
    tcp = f"tcp://127.0.0.1:{port}"
    folder = tmp_path / "stack"
    with (
        ExitStack() as cleanup,
        serve(folder, *limits, "--no-http", "--listen", tcp, "--insecure") as process,
    ):
        client = cleanup.enter_context(Client(tcp, insecure=True, timeout_s=PATIENCE_S))
        alone = client.generate(PROMPT, max_tokens=400, temperature=0, ignore_eos=True)
        stream = client.stream(PROMPT, max_tokens=400, temperature=0, ignore_eos=True)
        deltas = iter(stream)
        text = next(deltas).text
        bare = []
        for _ in range(500):
            bare.append(sockets.create_connection(("127.0.0.1", port), timeout=PATIENCE_S))
            cleanup.callback(bare[-1].close)
        for _ in range(3):  # who comes in the middle of it, over either way
            with Client(f"ipc://{folder}/client.sock") as local:
                assert local.generate(PROMPT, max_tokens=5, temperature=0).num_tokens == 5
        with Client(tcp, insecure=True, timeout_s=PATIENCE_S) as remote:
            assert remote.generate(PROMPT, max_tokens=5, temperature=0).num_tokens == 5
        text += "".join(delta.text for delta in deltas)
        assert text == alone.text
        log = told(process)
    assert ("files open" in log) == is_low
    assert ("too many connections" in log) == is_low
    assert "another one replaces it" not in log


@pytest.mark.process
def test_more_clients_of_ones_own_than_there_can_be(tmp_path: Path) -> None:
    folder = tmp_path / "stack"
    address = f"ipc://{folder}/client.sock"
    with ExitStack() as cleanup, serve(folder, 320, 320, "--no-http") as process:
        client = cleanup.enter_context(Client(address, timeout_s=PATIENCE_S))
        stream = client.stream(PROMPT, max_tokens=300, temperature=0, ignore_eos=True)
        deltas = iter(stream)
        next(deltas)
        patience = struct.pack("ll", int(PATIENCE_S), 0)
        for _ in range(400):
            bare = sockets.socket(sockets.AF_UNIX)
            cleanup.callback(bare.close)
            # where the queue is full, it is waited for; with `settimeout` that were an error
            bare.setsockopt(sockets.SOL_SOCKET, sockets.SO_SNDTIMEO, patience)
            bare.connect(os.fsencode(folder / "client.sock"))
        assert sum(delta.num_tokens for delta in deltas) == 299
        log = told(process)
    assert "too many connections" in log
    assert "another one replaces it" not in log
