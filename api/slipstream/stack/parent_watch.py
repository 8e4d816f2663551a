"""Watches the parent process: its request to end, and its death.

The request is the end of standard input, after the config line. Death is detected by a pidfd as
well, as a fork of the parent may hold the pipe open; kernels without pidfds rely on the pipe. Each
is reported once. A process that is stopped notices neither: see `go_on_after_parent`.
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
    """Call `on_gone` with the reason when the parent closes our standard input, or has died.

    selector: its keys' data are the callbacks. cleanup: closes the pidfd.
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
        on_gone("the parent has ended")


def _on_input(selector: selectors.BaseSelector, on_gone: Callable[[str], None]) -> None:
    """Discard input; only its end has a meaning."""
    with contextlib.suppress(BlockingIOError):
        if os.read(STANDARD_INPUT, 4096) == b"":
            selector.unregister(STANDARD_INPUT)
            on_gone("the parent requested it")


def _on_death(selector: selectors.BaseSelector, on_gone: Callable[[str], None], pidfd: int) -> None:
    selector.unregister(pidfd)
    on_gone("the parent has ended")
