"""The error of an adapter that cannot be served."""

from __future__ import annotations

from slipstream_ipc.messages import ChangeFault


class AdapterError(ValueError):
    """An adapter cannot be served. The message says what was found, and what is allowed."""

    def __init__(self, message: str, why: ChangeFault = "") -> None:
        """why: its kind; empty: the files are wrong, or do not fit the model."""
        super().__init__(message)
        self.why: ChangeFault = why
