"""How one request of a load can fail, in words that can be counted."""

from __future__ import annotations


class RequestFailedError(Exception):
    """A request that got no whole answer.

    reason: what kind of failure, in snake_case (`http_503`, `connect`, `disconnected`, `timeout`,
    `malformed`, `incomplete`, `error_event`, ...). detail: what was said about it.
    """

    def __init__(self, reason: str, detail: str = "") -> None:
        super().__init__(f"{reason}: {detail}" if detail else reason)
        self.reason = reason
        self.detail = detail
