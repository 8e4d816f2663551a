"""The error of a failed request, with a reason that can be counted."""

from __future__ import annotations


class RequestFailedError(Exception):
    """A request without a complete answer.

    reason: the kind of failure, in snake_case (`http_503`, `connect`, `disconnected`, `timeout`,
    `malformed`, `incomplete`, `error_event`, ...). detail: the message that came with it.
    """

    def __init__(self, reason: str, detail: str = "") -> None:
        super().__init__(f"{reason}: {detail}" if detail else reason)
        self.reason = reason
        self.detail = detail
