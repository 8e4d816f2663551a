"""Errors as HTTP answers, with OpenAI's error bodies, and Anthropic's at the paths of its API.

Status codes are decided here alone:

    400  invalid request                       413  body too large
    401  no API key, or a wrong one            415  body not declared as JSON
    403  Host or Origin not allowed            417  unknown expectation
    404  no such path, model or stream         431  headers too large
    405  method not allowed                    500  the engine or the server failed
    408  request not received in time          503  overloaded, starting or stopping,
    409  conflict, superseded, or diverged          with Retry-After
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from enum import Enum

from msgspec import UNSET, Struct, UnsetType

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
from slipstream.http.response_encoding import Headers, Response, json_response
from slipstream_ipc.messages import Fault

_INVALID = "invalid_request_error"
_SERVER_ERROR = "server_error"
_API_ERROR = "api_error"
_ANTHROPIC_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    503: "overloaded_error",
}
_MESSAGES = "/v1/messages"
_UNKNOWN_MODEL = "model_not_found"
_RETRY_SOON = ((b"retry-after", b"1"),)


class ErrorFields(Struct, frozen=True):
    """The fields of an OpenAI error."""

    message: str
    type: str
    param: str | None
    code: str | None


class ErrorBody(Struct, frozen=True):
    """An error as a response's body, or as the last event of a stream."""

    error: ErrorFields


class AnthropicErrorDetails(Struct, frozen=True):
    """Details that distinguish errors of one type."""

    error_code: str


class AnthropicErrorFields(Struct, frozen=True):
    """The fields of an Anthropic error."""

    type: str
    message: str
    details: AnthropicErrorDetails | UnsetType = UNSET


class AnthropicErrorBody(Struct, frozen=True, tag_field="type", tag="error"):
    """An Anthropic error as a response's body, or as the last event of a stream."""

    error: AnthropicErrorFields
    request_id: str | UnsetType = UNSET


class ErrorShape(Enum):
    """The API whose error bodies a path has."""

    OPENAI = "openai"
    ANTHROPIC = "anthropic"


def error_shape(path: str) -> ErrorShape:
    """The shape of the errors of a path, which need not exist."""
    is_messages = path == _MESSAGES or path.startswith(_MESSAGES + "/")
    return ErrorShape.ANTHROPIC if is_messages else ErrorShape.OPENAI


class ApiError(Exception):
    """A refused or failed request, with its HTTP status and OpenAI error body."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        headers: Headers = (),
        anthropic_message: str = "",
    ) -> None:
        """anthropic_message: in place of the message where the body is Anthropic's."""
        super().__init__(message)
        self.status = status
        self._anthropic_message = anthropic_message or message
        kind = _SERVER_ERROR if status >= 500 else _INVALID
        self.body = ErrorBody(ErrorFields(message, kind, param, code))
        self._headers = headers

    def response(self, path: str = "", request_id: str = "") -> Response:
        """The complete answer to a request of `path`."""
        body = self.body_as(error_shape(path), request_id)
        return json_response(self.status, body, self._headers)

    def body_as(self, shape: ErrorShape, request_id: str = "") -> ErrorBody | AnthropicErrorBody:
        """The error's body."""
        if shape == ErrorShape.OPENAI:
            return self.body
        kind = _ANTHROPIC_TYPES.get(self.status, _API_ERROR if self.status >= 500 else _INVALID)
        code = self.body.error.code
        details = UNSET if code is None else AnthropicErrorDetails(code)
        return AnthropicErrorBody(
            AnthropicErrorFields(kind, self._anthropic_message, details),
            request_id if request_id else UNSET,
        )


def bad_field(param: str | None, message: str, code: str | None = None) -> ApiError:
    """400: an invalid field of the request, named by `param`."""
    return ApiError(400, message, param=param, code=code)


def unknown_model(name: str, served: str) -> ApiError:
    """404: the request names a model that is not served. served: what is, for the message."""
    message = f"model: got {name!r}, allowed: {served}"
    return ApiError(404, message, param="model", code=_UNKNOWN_MODEL)


def unauthorized(was_given: bool) -> ApiError:
    """401: no API key, or a wrong one."""
    what = "invalid API key" if was_given else "no API key"
    message = f"{what}: send one in the header `Authorization: Bearer KEY`, or `x-api-key: KEY`"
    return ApiError(
        401, message, code="invalid_api_key", headers=((b"www-authenticate", b"Bearer"),)
    )


def not_ready(why: str) -> ApiError:
    """503: the engine behind the front does not answer yet, or at present."""
    return ApiError(503, why, code="not_ready", headers=_RETRY_SOON)


def is_draining() -> ApiError:
    """503: the server is draining and begins nothing new."""
    what = "the server is shutting down and accepts no new requests"
    return ApiError(503, what, code="draining", headers=_RETRY_SOON)


def overloaded(what: str) -> ApiError:
    """503: no capacity for the request at present."""
    return ApiError(503, f"{what}: send it again later", code="overloaded", headers=_RETRY_SOON)


@contextmanager
def callers_fields(param_names: dict[str, str]) -> Iterator[None]:
    """A BadRequestError of the block becomes an ApiError that names the caller's field: see
    `error_of`.
    """
    try:
        yield
    except BadRequestError as error:
        raise error_of(error, param_names) from None


def composed_names(inner: dict[str, str], outer: dict[str, str]) -> dict[str, str]:
    """The caller's names where `outer` renames the fields that `inner` leads to."""
    return {**outer, **{name: outer.get(theirs, theirs) for name, theirs in inner.items()}}


def error_of(error: BaseException, param_names: dict[str, str]) -> ApiError:
    """The answer for an exception. One of no known kind becomes a 500 without its text.

    param_names: the caller's name for each internal field whose name differs.
    """
    match error:
        case ApiError():
            return error
        case BadRequestError(field=field, fault=fault):
            name, message = param_names.get(field or "", field), str(error)
            if field and name and message.startswith(f"{field}:"):
                message = name + message.removeprefix(field)
            if field == "model":  # an adapter that a front's list had still
                return ApiError(404, message, param="model", code=_UNKNOWN_MODEL)
            theirs = _anthropic_message(fault)
            return ApiError(400, message, param=name, anthropic_message=theirs)
        case ConflictError():
            return ApiError(409, str(error))
        case SupersededError():
            return ApiError(409, str(error), code="superseded")
        case UnknownStreamError():
            return ApiError(404, str(error), code="unknown_stream")
        case OverloadedError(fault=Fault(code="engine")):  # the engine is leaving
            return ApiError(503, str(error), code="draining", headers=_RETRY_SOON)
        case OverloadedError():
            return ApiError(503, str(error), code="overloaded", headers=_RETRY_SOON)
        case ConnectionLostError():
            return not_ready("the engine does not respond")
        case ClosedError():
            return not_ready("the server is shutting down")
        case StreamLostError(fault=Fault(code="diverged")):
            return ApiError(409, str(error), code="diverged")
        case StreamLostError():
            return ApiError(500, str(error), code="unknown_stream")
        case SlipstreamError():
            return ApiError(500, str(error), code="engine_error")
        case _:
            return ApiError(500, "internal server error; the server's log has more")


def _anthropic_message(fault: Fault) -> str:
    """The message by which Anthropic's clients recognise a request that does not fit the model;
    empty for any other fault. Claude Code then shortens the conversation, or the answer that it
    asks for.
    """
    num, num_answer, most = fault.num_prompt_tokens, fault.num_answer_tokens, fault.max_num_tokens
    if not num:
        return ""
    if not num_answer:
        return f"prompt is too long: {num} tokens > {most} maximum"
    return (
        f"input length and `max_tokens` exceed context limit: {num} + {num_answer} > {most}, "
        "decrease input length or `max_tokens` and try again"
    )
