"""The access log: a line per answer, with the request's id, in the format of the other logs.

The client's address is taken from X-Forwarded-For if the peer is a trusted proxy. Query strings,
API keys and bodies are never logged.
"""

from __future__ import annotations

import logging
from typing import Any, Literal, Protocol, cast

from aiohttp import hdrs, web
from aiohttp.abc import AbstractAccessLogger

from slipstream.trusted_proxies import TrustedProxies
from slipstream_ipc.telemetry.logs import formatter, log_format, with_fields

_MAX_PATH = 500  # characters

Form = Literal["text", "json"]


class LoggedConnection(Protocol):
    """The part of a connection that the log reads. The connection may have ended.

    peer: the client's address, or `unix`.
    """

    peer: str
    has_tls: bool


class AccessLog(AbstractAccessLogger):
    """The access logger that aiohttp calls."""

    def __init__(self, logger: logging.Logger, form: Form, trusted: TrustedProxies) -> None:
        super().__init__(logger, form)
        self._trusted = trusted

    def log(
        self,
        request: web.BaseRequest,
        response: web.StreamResponse,
        time: float,  # duration in seconds; the name is aiohttp's
    ) -> None:
        """Log an answer that is complete, or whose client has disconnected. Its duration is from
        the end of the request's head to the end of the answer.
        """
        fields = self._fields(request, response, time)
        self.logger.info(
            "%s %s %s %d %.1fms",
            *(fields["client"], fields["method"], _printable(fields["path"])),
            *(fields["status"], fields["duration_ms"]),
            extra=with_fields(fields, response.headers.get("X-Request-Id", "")),
        )

    def _fields(
        self, request: web.BaseRequest, response: web.StreamResponse, seconds: float
    ) -> dict[str, Any]:
        connection = cast(LoggedConnection, request.protocol)
        peer = connection.peer
        scheme = "https" if connection.has_tls else "http"
        if self._trusted.has(peer):
            said = request.headers.get(hdrs.X_FORWARDED_PROTO, "").strip().lower()
            scheme = said if said in ("http", "https") else scheme
        return {
            "client": self._trusted.client(peer, request.headers.getall(hdrs.X_FORWARDED_FOR, ())),
            "scheme": scheme,
            "method": request.method,
            "path": request.rel_url.raw_path[:_MAX_PATH],
            "status": response.status,
            "duration_ms": round(seconds * 1000, 1),
        }


def access_logger(process: str, form: Form) -> logging.Logger:
    """The logger of the access log, whose lines do not depend on the log's level. form: JSON also
    if that is the format of the process's log.
    """
    logger = logging.getLogger("slipstream.http.access")
    logger.propagate = False
    logger.setLevel(logging.INFO)
    if not logger.handlers:
        handler = logging.StreamHandler()
        handler.setFormatter(formatter(process, "json" if form == "json" else log_format()))
        logger.addHandler(handler)
    return logger


def _printable(text: str) -> str:
    return text.encode("ascii", "backslashreplace").decode()
