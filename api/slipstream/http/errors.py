"""Which HTTP answer an error is: the one place where status codes are decided.

Owns: OpenAI's error bodies. Does not know: sockets, handlers.

    400 the request is wrong     401 no or a wrong key        403 another name or page is meant
    404 no such path, model or stream
    405 another method is meant  408 it did not come in time  409 it is another's, or another text
    413 431 it is too large      415 it is no JSON            417 unknown expectation
    500 the engine failed it     503 not now: overloaded, starting, stopping (with Retry-After)
"""

from __future__ import annotations

from msgspec import Struct

from slipstream.errors import (
    BadRequestError,
    ClosedError,
    ConflictError,
    ConnectionLostError,
    OverloadedError,
    SlipstreamError,
    StreamLostError,
    SupersededError,
    UnknownStreamError,
)
from slipstream.http.wire import Response, json_response
from slipstream_ipc.messages import Fault

_INVALID = "invalid_request_error"
_OURS = "server_error"
_RETRY_SOON = ((b"retry-after", b"1"),)


class ErrorFields(Struct, frozen=True):
    """What an OpenAI client reads of an error."""

    message: str
    type: str
    param: str | None
    code: str | None


class ErrorBody(Struct, frozen=True):
    """An error, as a response's body or as a stream's last event."""

    error: ErrorFields


class ApiError(Exception):
    """A refusal: what the client is answered."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        headers: tuple[tuple[bytes, bytes], ...] = (),
    ) -> None:
        super().__init__(message)
        self.status = status
        kind = _OURS if status >= 500 else _INVALID
        self.body = ErrorBody(ErrorFields(message, kind, param, code))
        self._headers = headers

    def response(self) -> Response:
        """The whole answer."""
        return json_response(self.status, self.body, self._headers)


def bad_field(param: str | None, message: str, code: str | None = None) -> ApiError:
    """The caller's fault; `param` names the field."""
    return ApiError(400, message, param=param, code=code)


def unknown_model(name: str, served: str) -> ApiError:
    """Another model is asked for than the one served."""
    message = f"model: got {name!r}, allowed: {served!r}"
    return ApiError(404, message, param="model", code="model_not_found")


def unauthorized(was_given: bool) -> ApiError:
    """No key, or a wrong one."""
    what = "the API key is not one of this server's" if was_given else "no API key"
    message = f"{what}: send one in the header `Authorization: Bearer KEY`"
    return ApiError(
        401, message, code="invalid_api_key", headers=((b"www-authenticate", b"Bearer"),)
    )


def not_ready(why: str) -> ApiError:
    """There is no engine behind us, for now."""
    return ApiError(503, why, code="not_ready", headers=_RETRY_SOON)


def is_draining() -> ApiError:
    """The server ends when what runs has ended; nothing new is begun."""
    what = "the server is shutting down, and begins nothing new"
    return ApiError(503, what, code="draining", headers=_RETRY_SOON)


def overloaded(what: str) -> ApiError:
    """There is no room for a request, for now."""
    return ApiError(503, f"{what}: send it again later", code="overloaded", headers=_RETRY_SOON)


def error_of(error: BaseException, param_names: dict[str, str]) -> ApiError:
    """The answer to what went wrong with a stream.

    param_names: our fields' names by the caller's, where they differ.
    """
    match error:
        case ApiError():
            return error
        case BadRequestError(field=field):
            name = param_names.get(field, field) if field is not None else None
            return bad_field(name, str(error))
        case ConflictError():
            return ApiError(409, str(error))
        case SupersededError():
            return ApiError(409, str(error), code="superseded")
        case UnknownStreamError():
            return ApiError(404, str(error), code="unknown_stream")
        case OverloadedError():
            return ApiError(503, str(error), code="overloaded", headers=_RETRY_SOON)
        case ConnectionLostError():
            return not_ready("the engine behind this server does not answer")
        case ClosedError():
            return not_ready("the server is shutting down")
        case StreamLostError(fault=Fault(code="diverged")):
            return ApiError(409, str(error), code="diverged")
        case StreamLostError():
            return ApiError(500, str(error), code="unknown_stream")
        case SlipstreamError():
            return ApiError(500, str(error), code="engine_error")
        case _:
            return ApiError(500, "a fault of the server's own; its log has more")
