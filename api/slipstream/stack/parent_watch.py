"""The process that started this one, while both live: its wish that we end, and its death.

Owns: our standard input, once the first line has been read from it. Does not know: what ends then.

Rules: each is told once. A parent's death is seen by its pidfd too, as the pipe stays open where
a fork of the parent holds its other end; an old kernel has no pidfds, there the pipe must do.
"""

from __future__ import annotations

import contextlib
import os
import selectors
from collections.abc import Callable
from functools import partial

STANDARD_INPUT = 0


def watch_parent(
    pid: int,
    selector: selectors.BaseSelector,
    on_gone: Callable[[str], None],
    cleanup: contextlib.ExitStack,
) -> None:
    """Call `on_gone` with the reason when the parent closes our standard input, or is no more.

    selector: one whose keys' data is what to call. cleanup: gives back what this takes.
    """
    os.set_blocking(STANDARD_INPUT, False)
    on_input = partial(_on_input, selector, on_gone)
    selector.register(STANDARD_INPUT, selectors.EVENT_READ, on_input)
    with contextlib.suppress(AttributeError, OSError):
        pidfd = os.pidfd_open(pid)
        cleanup.callback(os.close, pidfd)
        on_death = partial(_on_death, selector, on_gone, pidfd)
        selector.register(pidfd, selectors.EVENT_READ, on_death)
    if os.getppid() != pid:
        on_gone("parent is gone")


def _on_input(selector: selectors.BaseSelector, on_gone: Callable[[str], None]) -> None:
    """It has nothing to say there: only the end of it means something."""
    with contextlib.suppress(BlockingIOError):
        if os.read(STANDARD_INPUT, 4096) == b"":
            selector.unregister(STANDARD_INPUT)
            on_gone("parent asked")


def _on_death(selector: selectors.BaseSelector, on_gone: Callable[[str], None], pidfd: int) -> None:
    selector.unregister(pidfd)
    on_gone("parent died")
