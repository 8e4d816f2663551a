"""Errors of everything that crosses processes.

ProtocolError     a peer sent what the protocol does not allow
BadRequest        the caller's request cannot be taken; names the field
"""

from __future__ import annotations

from slipstream_ipc.messages import Fault

_MAX_CHARS = 300


def brief(text: str) -> str:
    """An error's text without the kilobytes that somebody may have made it quote."""
    return text if len(text) <= _MAX_CHARS else text[: _MAX_CHARS - 3] + "..."


class ProtocolError(Exception):
    """A peer's message breaks the protocol; says what was found and what was expected.

    `field` names the one that is wrong, where it is one.
    """

    def __init__(self, message: str, field: str | None = None) -> None:
        super().__init__(message)
        self.field = field


class BadRequest(ValueError):  # noqa: N818  (the outcome's name in HTTP and in this field)
    """The caller's request cannot be taken; `field` names the one that is wrong."""

    def __init__(self, field: str, given: object, allowed: str) -> None:
        shown = repr(given)
        if len(shown) > 80:
            shown = shown[:77] + "..."
        super().__init__(f"{field}: got {shown}, allowed: {allowed}")
        self.field = field

    @property
    def fault(self) -> Fault:
        """The same as a wire type."""
        return Fault("bad_request", str(self), self.field)
