"""Starts the client processes of a run, kills them and starts their successors.

- Each has its own requests. A killed process is replaced at once by one with the same requests and
  the journals of all earlier lives.
- Half of the requests begin at once. The others are held back for the rounds of faults: each round
  has its share, and the last begin when no round is left. So the requests outlast the rounds.
- They end with this process: each reads its standard input, which this process holds open.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

import msgspec

from slipstream_verify.chaos.client_process import ClientConfig
from slipstream_verify.chaos.journal import Record, read_journal
from slipstream_verify.chaos.workload.chaos_workload import ChaosRequest

_MODULES = {
    "client": "slipstream_verify.chaos.client_process",
    "http": "slipstream_verify.chaos.http_process",
}


class ChaosClient:
    """One client: its current process, and the journals of all its lives."""

    def __init__(
        self,
        kind: Literal["client", "http"],
        number: int,
        requests: Sequence[ChaosRequest],
        *,
        address: str,
        folder: Path,
        concurrency: int,
        timeout_s: float,
        num_rounds: int = 0,
    ) -> None:
        """num_rounds: of faults, which requests are held back for."""
        self.kind = kind
        self.number = number
        self.requests = tuple(requests)
        self._address = address
        self._folder = folder
        self._concurrency = concurrency
        self._timeout_s = timeout_s
        self._num_rounds = num_rounds
        self._num_allowed = num_allowed(len(self.requests), 0, num_rounds)
        self._journals: list[str] = []
        self._process = self._start()

    @property
    def pid(self) -> int:
        """The id of the current process."""
        return self._process.pid

    def has_begun(self) -> bool:
        """Whether the current process has read anything, or everything was read before."""
        with contextlib.suppress(FileNotFoundError):
            return os.path.getsize(self._journals[-1]) > 0 or self.has_ended()
        return self.has_ended()

    def has_ended(self) -> bool:
        """Whether it has read everything. Raises: RuntimeError if it ended in another way."""
        code = self._process.poll()
        if code not in (None, 0):
            raise RuntimeError(f"{self.kind} {self.number} ended by itself with code {code}")
        return code == 0

    def allow(self, num_over: int) -> None:
        """Let it begin the requests that are due when so many rounds are over."""
        num = num_allowed(len(self.requests), num_over, self._num_rounds)
        if num == self._num_allowed:
            return
        self._num_allowed = num
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # `has_ended` tells
            self._process.stdin.write(b"%d\n" % num)
            self._process.stdin.flush()

    def kill(self) -> None:
        """Kill the process and start its successor, which continues from the journals."""
        self.end()
        self._process = self._start()

    def signal(self, number: signal.Signals) -> None:
        """Send the process a signal, if it is alive."""
        with contextlib.suppress(ProcessLookupError):
            self._process.send_signal(number)

    def end(self) -> None:
        """End the client without a successor."""
        self._process.kill()
        self._process.wait()
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.close()

    def records(self) -> list[Record]:
        """The records of all its lives, in order."""
        return [
            record
            for path in self._journals
            if os.path.exists(path)
            for record in read_journal(path)
        ]

    def _start(self) -> subprocess.Popen[bytes]:
        journal = str(self._folder / f"{self.kind}-{self.number}.{len(self._journals)}.journal")
        earlier = [path for path in self._journals if os.path.exists(path)]
        config = ClientConfig(
            self._address,
            self.requests,
            journal,
            tuple(earlier),
            self._num_allowed,
            self._concurrency,
            self._timeout_s,
            is_async=(self.number + len(self._journals)) % 2 == 0,
        )
        self._journals.append(journal)
        process = subprocess.Popen(
            [sys.executable, "-P", "-m", _MODULES[self.kind]],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
        )
        assert process.stdin is not None
        process.stdin.write(msgspec.json.encode(config) + b"\n")
        process.stdin.flush()
        return process


def num_allowed(num: int, num_over: int, num_rounds: int) -> int:
    """How many of `num` requests may have begun when so many rounds are over."""
    if num_rounds == 0:
        return num
    num_free = (num + 1) // 2
    return num_free + (num - num_free) * num_over // num_rounds
