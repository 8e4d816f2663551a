"""A stack around a runner that this process holds.

The core runs in this process, as `slipstream_core.main` runs it, so that the stack and what it is
compared with share the same weights and cache: there is no memory for two of either. The worker
(with its tokenizer process) and the client are separate processes.
"""

from __future__ import annotations

import gc
import json
import select
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import zmq

from slipstream.stack.children.process import Child, ChildSpec
from slipstream_core.config import CoreConfig
from slipstream_core.engine.build import Core, assemble_core
from slipstream_core.step.plan import Runner
from slipstream_ipc.process import Activate
from slipstream_lab.models.stand_in_tokenizer import stand_in_tokenizer
from slipstream_verify.gpu_check.setting import GpuSetting
from slipstream_worker.config import WorkerConfig

_WITHIN_S = 60.0  # limit of a run, and of the worker's start


@dataclass(frozen=True, slots=True)
class Serving:
    """A running stack."""

    core: Core
    client_address: str
    worker_pid: int

    def run_until(self, is_over: Callable[[], bool], within_s: float = _WITHIN_S) -> None:
        """Run the core's loop. Raises TimeoutError."""
        deadline = time.monotonic() + within_s
        while not is_over():
            if time.monotonic() > deadline:
                raise TimeoutError(f"not over within {within_s:g} s")
            self.core.engine.run_once()


class LoadClient:
    """A context manager: a `load_client` process, which runs one load after another."""

    def __init__(self, serving: Serving) -> None:
        self._serving = serving
        command = [sys.executable, "-m", "slipstream_verify.gpu_check.load_client"]
        self._process = subprocess.Popen(
            [*command, serving.client_address], stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )

    def __enter__(self) -> LoadClient:
        try:
            self._read(_WITHIN_S)
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_error: object) -> None:
        self._process.kill()
        self._process.wait()

    def run(self, *, within_s: float = _WITHIN_S, **load: Any) -> dict[str, Any]:
        """Serve one load (`load_client.ClientLoad`); returns the client's report. Raises
        TimeoutError.
        """
        stdin = self._process.stdin
        assert stdin is not None
        stdin.write(msgspec.json.encode(load) + b"\n")
        stdin.flush()
        return self._read(within_s)

    def _read(self, within_s: float) -> dict[str, Any]:
        stdout = self._process.stdout
        assert stdout is not None
        poll = partial(select.select, [stdout], [], [], 0)
        self._serving.run_until(lambda: bool(poll()[0]), within_s)
        line = stdout.readline()  # a line is written in one piece
        if not line:
            raise RuntimeError(f"the client ended with code {self._process.wait()}")
        found: dict[str, Any] = json.loads(line)
        if "error" in found:
            raise RuntimeError(f"the client's load failed: {found['error']}")
        return found


@contextmanager
def serving(setting: GpuSetting, config: CoreConfig, runner: Runner) -> Iterator[Serving]:
    """A stack around `runner`, which the caller closes; the stack ends with the block."""
    with tempfile.TemporaryDirectory(prefix="gpu-check-stack-") as folder:
        config = msgspec.structs.replace(config, address=f"ipc://{folder}/core")
        context = zmq.Context()
        try:
            core = assemble_core(config, runner, context, zmq.Poller())
            with _worker(setting, folder, core) as stack:
                gc.collect()
                gc.freeze()  # as the core's own process does
                try:
                    yield stack
                finally:
                    gc.unfreeze()
            core.sockets.close()
            core.compiler.close()
        finally:
            context.destroy(linger=0)


@contextmanager
def _worker(setting: GpuSetting, folder: str, core: Core) -> Iterator[Serving]:
    """A worker process, ready to serve; it ends with the block."""
    config = WorkerConfig(
        tokenizer=str(stand_in_tokenizer(setting.folder, core.runner.info.vocab_size)),
        client_address=f"ipc://{folder}/client",
        core_address=f"ipc://{folder}/core",
        runtime_dir=folder,
        cache_dir=str(Path(setting.folder, "tables")),
        ends_at_eos=False,  # the tokenizer is not the model's
    )
    argv = (sys.executable, "-m", "slipstream_worker.main")
    child = Child(ChildSpec("worker", argv, msgspec.Raw(msgspec.json.encode(config))))
    child.activate(Activate(incarnation=1))
    stack = Serving(core, config.client_address, child.pid)

    def is_ready() -> bool:
        child.read_status()
        if child.has_ended():
            raise RuntimeError(f"the worker ended: {child.error}")
        return child.state == "ready"

    try:
        stack.run_until(is_ready)
        yield stack
    finally:
        child.kill()
        child.reap()
