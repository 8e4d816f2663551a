"""The exceptions of the Python interface.

SlipstreamError
├── RequestError             the request is at fault
│   ├── BadRequestError      a field is invalid (`field` names it); also a ValueError
│   │   └── UnknownOptionError   no option has the keyword's name; also a TypeError
│   ├── ConflictError        the stream id belongs to a different request
│   └── UnknownStreamError   no stream of this id runs or is still kept
├── OverloadedError          the server is overloaded: try again later
├── SupersededError          another reader has taken the stream over
├── EngineError              the server is at fault: the stream cannot continue
│   └── StreamLostError      the server no longer has this stream
├── ConnectionLostError      no server answers, or it went away; also a ConnectionError
└── ClosedError              the client was closed while the call waited
"""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from slipstream.spelling import did_you_mean
from slipstream_ipc.errors import BadRequest
from slipstream_ipc.messages import Fault

_SECRETS = ("api_key",)  # options whose values are never shown


class SlipstreamError(Exception):
    """The base class of all errors that this package raises.

    fault: the `Fault` with its code, message and field, as sent over the wire. text: the text that
    the stream had delivered before it failed; empty if there was none.
    """

    def __init__(self, fault: Fault) -> None:
        super().__init__(fault)
        self.fault = fault
        self.text = ""

    def __str__(self) -> str:
        return self.fault.message


class RequestError(SlipstreamError):
    """The request cannot be carried out as given."""


class BadRequestError(RequestError, ValueError):
    """A field of the request is invalid; the message says what was given and what is allowed."""

    @property
    def field(self) -> str | None:
        """The name of the invalid field; None where the error concerns no single field."""
        return self.fault.field


class UnknownOptionError(BadRequestError, TypeError):
    """A keyword is the name of no option; the message has the nearest one."""


class ConflictError(RequestError):
    """The stream id belongs to a request with different content."""


class UnknownStreamError(RequestError):
    """The server knows no stream of this id: it never existed, or has ended and is not kept."""


class OverloadedError(SlipstreamError):
    """The server is overloaded at the moment; the request may be tried again later."""


class SupersededError(SlipstreamError):
    """Another reader has taken this stream over; `text` holds what was delivered before."""


class EngineError(SlipstreamError):
    """The engine failed this stream; `text` holds what was delivered before."""


class StreamLostError(EngineError):
    """The server no longer has this stream, or computed a different one in its place."""


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
    """The exception for a fault from the wire."""
    return _CLASSES[fault.code](fault)


def bad_request(error: BadRequest) -> BadRequestError:
    """The public exception for an internal BadRequest."""
    return BadRequestError(error.fault)


def missing_option(name: str, what: str) -> BadRequestError:
    """The error for an option that is needed and was not given. what: what to do about it."""
    return BadRequestError(Fault("bad_request", f"{name} is missing: {what}", name))


def unknown_option(name: str, known: Iterable[str]) -> UnknownOptionError:
    """The error for a keyword that is the name of no option."""
    known = sorted(known)
    hint = did_you_mean(name, known) or f"; there are {', '.join(known)}"
    return UnknownOptionError(Fault("bad_request", f"there is no option {name}{hint}", name))


def wrong_option(name: str, given: object, allowed: str) -> BadRequestError:
    """The error for an option with an invalid value."""
    shown = "(not shown)" if name in _SECRETS else given
    return bad_request(BadRequest(name, shown, allowed))


def of_prompt(error: SlipstreamError, where: str) -> SlipstreamError:
    """The error of one prompt among several, which names the prompt.

    where: the prompt's name in the call, such as `prompts[3]`. Errors of the connection stay.
    """
    if isinstance(error, ConnectionLostError | ClosedError):
        return error
    message = f"{where}: {error.fault.message}"
    return type(error)(msgspec.structs.replace(error.fault, message=message))
