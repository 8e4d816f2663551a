"""Errors of everything that crosses processes.

ProtocolError     a peer sent what the protocol does not allow
BadRequest        the caller's request cannot be taken; names the field
"""

from __future__ import annotations

from slipstream_ipc.messages import Fault


class ProtocolError(Exception):
    """A peer's message breaks the protocol; says what was found and what was expected."""


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
