"""Logs a warning that comes again and again only once, while its cause lasts."""

from __future__ import annotations

import logging
from collections import deque

_NUM_KEPT = 8  # causes that take turns


class RecentWarnings:
    """Writes warnings to a logger, without repeating the latest ones."""

    def __init__(self, logger: logging.Logger) -> None:
        self._logger = logger
        self._texts: deque[str] = deque(maxlen=_NUM_KEPT)

    def warn(self, message: str, *args: object) -> None:
        """Log a warning, unless it is one of the last few. Parameters as of `Logger.warning`."""
        text = message % args
        if text not in self._texts:
            self._texts.append(text)
            self._logger.warning(message, *args)

    def forget(self) -> None:
        """The cause is gone: a warning that comes now is logged."""
        self._texts.clear()
