"""Work for the I/O thread from other threads.

Owns: the queue, and the descriptor that wakes a poll loop for it. Does not know: what the work is.

Rules:
- `post` appends first and looks afterwards whether the thread was rung for; the thread takes back
  the ring first and runs the queue afterwards. So no command is left lying.
- Once the thread has ended, whoever posts runs the queue: every command runs, exactly once.
"""

from __future__ import annotations

import socket
from collections import deque
from collections.abc import Callable


class Mailbox:
    """Callables without arguments, run in the order in which they were posted."""

    def __init__(self) -> None:
        self._queue: deque[Callable[[], None]] = deque()
        self._is_rung = False
        self._is_ended = False
        self._wakeup, self._rope = socket.socketpair()
        self._wakeup.setblocking(False)
        self._rope.setblocking(False)
        self.fd = self._wakeup.fileno()  # readable when there is work

    def post(self, command: Callable[[], None]) -> None:
        """From any thread; never waits."""
        self._queue.append(command)
        if not (self._is_ended or self._is_rung):
            self._is_rung = True
            try:
                self._rope.send(b"!")
            except OSError:  # closed between the look and the call
                assert self._is_ended
        if self._is_ended:
            self._run_queue()

    def run(self, *, is_rung: bool) -> None:
        """In the I/O thread. `is_rung`: the descriptor is readable."""
        if is_rung:
            self._wakeup.recv(64)
        self._is_rung = False
        self._run_queue()

    def end(self) -> None:
        """The I/O thread does nothing more after this."""
        self._is_ended = True
        self._run_queue()
        self._wakeup.close()
        self._rope.close()

    def _run_queue(self) -> None:
        while True:
            try:
                command = self._queue.popleft()
            except IndexError:
                return
            command()
