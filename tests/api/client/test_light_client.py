"""A client needs msgspec, pyzmq and numpy alone."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from tests.helpers import light_client
from tests.helpers.fake_worker import Entry, FakeWorker, deltas, end_of
from tests.helpers.patience import PATIENCE_S

from slipstream_ipc.messages import Submit


def test_clients_need_three_packages(tmp_path: Path) -> None:
    def play(worker: FakeWorker, body: Any) -> None:
        if isinstance(body, Submit):
            worker.accept_from_script(body)
            worker.post(deltas(Entry(body.handle, "yes", end=end_of("yes"))))

    tmp_path.chmod(0o700)
    worker = FakeWorker(f"ipc://{tmp_path}/client.sock", play)
    program = [sys.executable, light_client.__file__, worker.address]
    try:
        done = subprocess.run(program, capture_output=True, text=True, timeout=PATIENCE_S)
    finally:
        worker.stop()
    assert done.returncode == 0, done.stderr
    texts, loaded = json.loads(done.stdout)
    assert texts == ["yes"] * 8
    assert set(loaded) == light_client.ALLOWED


def test_other_packages_are_blocked_there() -> None:
    program = "import sys; from tests.helpers.light_client import Blocked\n"
    program += "sys.meta_path.insert(0, Blocked()); import aiohttp"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 1
    assert "No module named 'aiohttp' here" in done.stderr
