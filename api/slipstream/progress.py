"""Shows on standard error what a command is waiting for."""

from __future__ import annotations

import sys
import threading
import time


class Progress:
    """Says on standard error what is waited for: a line at the beginning, which counts the seconds
    on a terminal, and one at the end.

    after_s: stay silent if it takes no longer than this. done: what to say at the end, before the
    number of seconds; on a terminal it replaces the line.
    """

    def __init__(self, text: str, *, after_s: float = 0.0, done: str | None = None) -> None:
        self._text = text
        self._after_s = after_s
        self._done = done
        self._has_ended = threading.Event()
        self._thread = threading.Thread(target=self._count, daemon=True)
        self._begin_s = 0.0
        self._was_shown = False

    def __enter__(self) -> None:
        self._begin_s = time.monotonic()
        self._thread.start()

    def __exit__(self, error: type[BaseException] | None, *_rest: object) -> None:
        self._has_ended.set()
        self._thread.join()
        seconds = time.monotonic() - self._begin_s
        begin = "\r\x1b[K" if sys.stderr.isatty() and self._was_shown else ""
        if error is None and self._done is not None:
            sys.stderr.write(f"{begin}{self._done} after {seconds:.1f} s\n")
        elif begin:
            sys.stderr.write(begin)
        sys.stderr.flush()

    def _count(self) -> None:
        if self._has_ended.wait(self._after_s):
            return
        self._was_shown = True
        if not sys.stderr.isatty():
            sys.stderr.write(f"{self._text} ...\n")
            sys.stderr.flush()
            return
        while True:
            seconds = time.monotonic() - self._begin_s
            sys.stderr.write(f"\r\x1b[K{self._text} ... {seconds:.0f} s")
            sys.stderr.flush()
            if self._has_ended.wait(1.0):
                return
