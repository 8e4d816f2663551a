"""The exceptions for messages and requests that are not accepted.

ProtocolError     a peer's message breaks the protocol
BadRequest        a caller's request is invalid; names the field
"""

from __future__ import annotations

from slipstream_ipc.messages import Fault

_MAX_CHARS = 300


def brief(text: str) -> str:
    """An error's text, cut to 300 characters: it may quote kilobytes of input."""
    return text if len(text) <= _MAX_CHARS else text[: _MAX_CHARS - 3] + "..."


class ProtocolError(Exception):
    """A peer's message breaks the protocol; the text says what was found and what was expected.

    `field` names the wrong field, or is None if the error is not about a single field.
    """

    def __init__(self, message: str, field: str | None = None) -> None:
        super().__init__(message)
        self.field = field


class BadRequest(ValueError):  # noqa: N818  (the outcome's name in HTTP and in this field)
    """The caller's request is invalid; `field` names the wrong field."""

    def __init__(self, field: str, given: object, allowed: str) -> None:
        shown = repr(given)
        if len(shown) > 80:
            shown = shown[:77] + "..."
        super().__init__(f"{field}: got {shown}, allowed: {allowed}")
        self.field = field

    @property
    def fault(self) -> Fault:
        """The error as a wire type."""
        return Fault("bad_request", str(self), self.field)
