"""Commands for the I/O thread from other threads, with a descriptor that wakes its poll loop.

- `post` appends the command first and checks afterwards whether the thread has been woken; the
  thread clears the wakeup first and runs the queue afterwards. So no command is missed.
- After the thread has ended, `post` runs the queue itself. Every command runs exactly once.
"""

from __future__ import annotations

import socket
from collections import deque
from collections.abc import Callable


class Mailbox:
    """A queue of callables without arguments, run in the order of posting."""

    def __init__(self) -> None:
        self._queue: deque[Callable[[], None]] = deque()
        self._is_rung = False
        self._is_ended = False
        self._wakeup, self._rope = socket.socketpair()
        self._wakeup.setblocking(False)
        self._rope.setblocking(False)
        self.fd = self._wakeup.fileno()  # readable when there is work

    def post(self, command: Callable[[], None]) -> None:
        """Queue a command. May be called from any thread; never blocks."""
        self._queue.append(command)
        if not (self._is_ended or self._is_rung):
            self._is_rung = True
            try:
                self._rope.send(b"!")
            except OSError:  # closed since the check above
                assert self._is_ended
        if self._is_ended:
            self._run_queue()

    def run(self, *, is_rung: bool) -> None:
        """Run the queued commands, in the I/O thread. is_rung: the descriptor is readable."""
        if is_rung:
            self._wakeup.recv(64)
        self._is_rung = False
        self._run_queue()

    def end(self) -> None:
        """Run what is queued and close the descriptor. The I/O thread's last call."""
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
