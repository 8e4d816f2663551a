"""A `TokenizerClient` whose tokenizer process, and clock, a test controls."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest
import zmq

from slipstream_ipc import run_delay
from slipstream_worker.tokenizer.client import TokenizerClient


class Child:
    """In place of a `ChildProcess`, which has no pidfd."""

    def __init__(self, pid: int = 0) -> None:
        self.pid = pid
        self.code: int | None = None

    def fileno(self) -> int:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    def ended(self) -> int | None:
        return self.code

    def kill(self) -> None:
        self.code = -9

    def terminate(self) -> None:
        return

    def reap(self, _within_s: float = 0.0) -> int:
        self.kill()
        return -9


class PlayedPrompts:
    """The client (`prompts`), the processes it has started, and a socket in place of theirs."""

    def __init__(
        self,
        context: zmq.Context[zmq.Socket[bytes]],
        patch: pytest.MonkeyPatch,
        path: Path,
        **options: float,
    ) -> None:
        self.children: list[Child] = []
        self.now = 0.0
        self.run_delay_s = 0.0  # of the processes' loops
        patch.setattr(run_delay, "loop_wait_s", lambda _: self.run_delay_s)
        patch.setattr(TokenizerClient, "_start", lambda _: self._start())
        self.prompts = TokenizerClient(context, f"ipc://{path}/p", {}, **options)
        self.socket = context.socket(zmq.PAIR)
        self.socket.connect(f"ipc://{path}/p")

    def _start(self) -> Child:
        self.children.append(Child(len(self.children) + 1))
        return self.children[-1]

    def close(self) -> None:
        self.socket.close(linger=0)
        self.prompts.close()
