"""What can go wrong, by whose fault it is.

SlipstreamError
├── RequestError             the caller's fault
│   ├── BadRequestError      a field is wrong (`field` names it); a ValueError too
│   ├── ConflictError        the stream id is taken by another request
│   └── UnknownStreamError   no stream of this id runs, or is still kept
├── OverloadedError          nobody's fault: try again later
├── SupersededError          nobody's fault: another reader has taken the stream over
├── EngineError              ours: the stream cannot go on
│   └── StreamLostError      the server does not have this stream any more
├── ConnectionLostError      no server there, or it went away; a ConnectionError too
└── ClosedError              the client was closed while the call waited

Owns: these classes, and which one a fault from the wire becomes. Does not know: HTTP.
"""

from __future__ import annotations

from slipstream_ipc.errors import BadRequest
from slipstream_ipc.messages import Fault

_SECRETS = ("api_key",)  # options whose values are never shown


class SlipstreamError(Exception):
    """Everything this package raises on purpose.

    fault: what was told to us, as it travels. text: what the stream had delivered before it
    failed; empty where nothing had.
    """

    def __init__(self, fault: Fault) -> None:
        super().__init__(fault)
        self.fault = fault
        self.text = ""

    def __str__(self) -> str:
        return self.fault.message


class RequestError(SlipstreamError):
    """The request cannot be done as it was asked for."""


class BadRequestError(RequestError, ValueError):
    """A field of the request is wrong; the message says what was given and what is allowed."""

    @property
    def field(self) -> str | None:
        """The field's name, where one is to blame."""
        return self.fault.field


class ConflictError(RequestError):
    """The stream id belongs to a request of other content."""


class UnknownStreamError(RequestError):
    """The server knows no stream of this id: it never did, or has forgotten it since it ended."""


class OverloadedError(SlipstreamError):
    """The server has too much to do at the moment."""


class SupersededError(SlipstreamError):
    """Another reader has taken this stream over; `text` holds what had come before."""


class EngineError(SlipstreamError):
    """The engine failed this stream; `text` holds what it had delivered."""


class StreamLostError(EngineError):
    """The server does not have this stream any more, or has another one in its place."""


class ConnectionLostError(SlipstreamError, ConnectionError):
    """No server answered in time."""


class ClosedError(SlipstreamError):
    """The client is closed."""


_CLASSES: dict[str, type[SlipstreamError]] = {
    "bad_request": BadRequestError,
    "conflict": ConflictError,
    "unknown_stream": UnknownStreamError,
    "overloaded": OverloadedError,
    "superseded": SupersededError,
    "diverged": StreamLostError,
    "engine": EngineError,
}


def error_from(fault: Fault) -> SlipstreamError:
    """The error that a fault from the wire is."""
    return _CLASSES[fault.code](fault)


def bad_request(error: BadRequest) -> BadRequestError:
    """The public form of an early check's refusal."""
    return BadRequestError(error.fault)


def wrong_option(name: str, given: object, allowed: str) -> BadRequestError:
    """The error for an option's value that is not allowed."""
    shown = "(not shown)" if name in _SECRETS else given
    return bad_request(BadRequest(name, shown, allowed))
