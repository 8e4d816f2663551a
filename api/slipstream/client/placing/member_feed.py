"""A process that says where the members of a fleet are, in lines.

A line is JSON: a list of addresses, or a text, which says why none are known. The process ends when
its standard input does. It is started again when it ends by itself.
"""

from __future__ import annotations

import logging
import subprocess
import threading
import time
from collections.abc import Callable, Sequence

import msgspec

from slipstream_ipc.restart_backoff import RestartBackoff

_END_S = 5.0
_BEGIN_S = 30.0
_MAX_LINE_BYTES = 64 * 1024
_LINE = msgspec.json.Decoder(list[str] | str)

logger = logging.getLogger(__name__)


class MemberFeed:
    """Keeps the process, and hands on what it says in a thread of its own."""

    def __init__(self, command: Sequence[str], take: Callable[[list[str] | str], None]) -> None:
        """take: called with each line, or with why there is none."""
        self._command = command
        self._take = take
        self._process: subprocess.Popen[bytes] | None = None
        self._thread: threading.Thread | None = None
        self._lock = threading.Lock()  # guards _process against a close while it is started
        self._is_closed = threading.Event()
        self._has_said = False
        self._began_at = 0.0

    @property
    def is_beginning(self) -> bool:
        """True if the process was just started for the first time and has not reported anything."""
        is_started = self._thread is not None and not self._has_said
        return is_started and time.monotonic() < self._began_at + _BEGIN_S

    def start(self) -> None:
        """Start the process, unless it was started. Never blocks. Where no thread can be started,
        `take` is told, and a later call tries again.
        """
        if self._thread is None:
            thread = threading.Thread(target=self._run, name="slipstream-members", daemon=True)
            self._began_at = time.monotonic()
            try:
                thread.start()
            except RuntimeError as error:  # there may be no more threads
                self._take(str(error))
            else:
                self._thread = thread

    def close(self) -> None:
        """End the process. Idempotent; waits for a few seconds at most."""
        self._is_closed.set()
        with self._lock:
            process = self._process
        if process is not None:
            assert process.stdin is not None
            process.stdin.close()  # tells it to end
            try:
                process.wait(_END_S)
            except subprocess.TimeoutExpired:
                process.kill()
        if self._thread is not None:
            self._thread.join(_END_S)

    def _run(self) -> None:
        backoff = RestartBackoff()
        pause_s = 0.0
        while not self._is_closed.wait(pause_s):
            began = time.monotonic()
            try:
                num_lines = self._read()
            except OSError as error:
                num_lines = 0
                self._take(f"{self._command[0]} cannot be started: {error.strerror}")
            self._has_said = True
            pause_s = backoff.after(time.monotonic() - began if num_lines else 0.0)

    def _read(self) -> int:
        """Run the process to its end. Returns how many lines it has said."""
        with self._lock:
            if self._is_closed.is_set():
                return 0
            process = subprocess.Popen(
                self._command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,  # what it has to say is in its lines
                start_new_session=True,  # a terminal's Ctrl-C is for us
            )
            self._process = process
        num_lines = 0
        assert process.stdout is not None
        with process.stdout as said:
            while line := said.readline(_MAX_LINE_BYTES):
                try:
                    self._take(_LINE.decode(line))
                    num_lines += 1
                    self._has_said = True
                except (msgspec.MsgspecError, RecursionError):
                    logger.warning("a line that is no list of members: %r", line[:100])
        code = process.wait()
        assert process.stdin is not None
        process.stdin.close()
        if not self._is_closed.is_set():
            logger.warning("the process that knows the members ended (code %d)", code)
        return num_lines
