"""A process in a sandbox that does as it is asked: it answers, dies, works on, talks nonsense."""

from __future__ import annotations

import os
import signal

from slipstream_ipc.process import start_child
from slipstream_ipc.sandbox import answer_requests, bound_memory


def _answer(asked: bytes) -> bytes:
    if asked == b"die":
        os.kill(os.getpid(), signal.SIGKILL)
    while asked == b"work on":
        pass
    return b"\xc1" if asked == b"nonsense" else b'"%s"' % asked


def main() -> int:
    """Answer. The config: its socket, and why it cannot start."""
    (fd, why_not), _ = start_child("frail", tuple[int, str])
    if why_not == "exit":
        return 7
    bound_memory()
    answer_requests(fd, _answer, 0.2, why_not)
    return 0


if __name__ == "__main__":
    os._exit(main())
