"""The access log: one line per answer on standard error, as text or as a JSON object.

The client's address is taken from X-Forwarded-For if the peer is a trusted proxy. Query strings,
API keys and bodies are never logged.
"""

from __future__ import annotations

import logging
import time
from typing import Literal

import msgspec
from aiohttp import hdrs, web
from aiohttp.abc import AbstractAccessLogger
from msgspec import Struct

from slipstream.trusted_proxies import UNIX, TrustedProxies

_MAX_PATH = 500  # characters

Form = Literal["text", "json"]


class AccessLogLine(Struct, frozen=True):
    """One answer. time: UTC. duration_ms: from the end of the request's head to the end of the
    answer.
    """

    time: str
    client: str
    scheme: str
    method: str
    path: str
    status: int
    duration_ms: float
    request_id: str


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
        """Log an answer that is complete, or whose client has disconnected."""
        line = self._line(request, response, time)
        if self.log_format == "json":
            self.logger.info("%s", msgspec.json.encode(line).decode())
        else:
            self.logger.info(
                "%s %s %s %s %d %.1fms %s",
                *(line.time, line.client, line.method, _printable(line.path)),
                *(line.status, line.duration_ms, line.request_id),
            )

    def _line(
        self, request: web.BaseRequest, response: web.StreamResponse, seconds: float
    ) -> AccessLogLine:
        peername = request.get_extra_info("peername")
        peer = peername[0] if isinstance(peername, tuple) else UNIX
        scheme = "https" if request.get_extra_info("sslcontext") is not None else "http"
        if self._trusted.has(peer):
            said = request.headers.get(hdrs.X_FORWARDED_PROTO, "").strip().lower()
            scheme = said if said in ("http", "https") else scheme
        return AccessLogLine(
            time=_now(),
            client=self._trusted.client(peer, request.headers.getall(hdrs.X_FORWARDED_FOR, ())),
            scheme=scheme,
            method=request.method,
            path=request.rel_url.raw_path[:_MAX_PATH],
            status=response.status,
            duration_ms=round(seconds * 1000, 1),
            request_id=response.headers.get("X-Request-Id", ""),
        )


def access_logger() -> logging.Logger:
    """The logger of the access log: bare lines, independent of other logging configuration."""
    logger = logging.getLogger("slipstream.http.access")
    logger.propagate = False
    logger.setLevel(logging.INFO)
    if not logger.handlers:
        handler = logging.StreamHandler()
        handler.setFormatter(logging.Formatter("%(message)s"))
        logger.addHandler(handler)
    return logger


def _now() -> str:
    seconds = time.time()
    whole = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(seconds))
    return f"{whole}.{int(seconds % 1 * 1000):03d}Z"


def _printable(text: str) -> str:
    return text.encode("ascii", "backslashreplace").decode()
