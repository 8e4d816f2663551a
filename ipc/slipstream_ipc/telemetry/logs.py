"""The log of every process: level, format, and the ids of the requests that a line is about.

Lines go to standard error, as text or as one JSON object each. A line about a request is logged
with `extra=of_requests(...)`, one with figures for programs with `extra=with_fields(...)`. Logs
never hold prompts, outputs, keys, or ids that grant something.
"""

from __future__ import annotations

import logging
import os
import sys
import time
from collections.abc import Mapping
from typing import Any, Literal, get_args

import msgspec

LogFormat = Literal["text", "json"]

LOG_LEVEL_VARIABLE = "SLIPSTREAM_LOG_LEVEL"
LOG_LEVELS = ("debug", "info", "warning", "error", "critical")
LOG_FORMAT_VARIABLE = "SLIPSTREAM_LOG_FORMAT"
LOG_REPLICA_VARIABLE = "SLIPSTREAM_LOG_REPLICA"  # which replica the processes belong to

_MAX_REQUEST_IDS = 16  # in one line
_MAX_ID_CHARS = 128


def of_requests(*request_ids: str) -> dict[str, Any]:
    """The `extra` of a line about these requests. A request without an id has the id ""."""
    return {"request_ids": request_ids}


def with_fields(fields: Mapping[str, object], *request_ids: str) -> dict[str, Any]:
    """The `extra` of a line whose figures are also fields of their own in JSON."""
    return {"fields": fields, "request_ids": request_ids}


def log_format() -> LogFormat:
    """The format that $SLIPSTREAM_LOG_FORMAT sets for this process; text unless it is valid."""
    given = os.environ.get(LOG_FORMAT_VARIABLE, "")
    return given if given in get_args(LogFormat) else "text"  # type: ignore[return-value]


def log_level() -> str:
    """The level that $SLIPSTREAM_LOG_LEVEL sets for this process; INFO unless it is valid."""
    given = os.environ.get(LOG_LEVEL_VARIABLE, "")
    return given.upper() if given.lower() in LOG_LEVELS else "INFO"


def configure_logging(process: str, form: LogFormat | None = None) -> None:
    """Log to standard error, warnings included. process: this process's name in the lines, which
    one of several replicas puts before it: `replica-0/worker`.

    form: None takes the one in the environment; a given one is put there, for child processes.
    """
    if form is not None:
        os.environ[LOG_FORMAT_VARIABLE] = form
    if replica := os.environ.get(LOG_REPLICA_VARIABLE):
        process = f"{replica}/{process}"
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(formatter(process, form or log_format()))
    logging.basicConfig(level=log_level(), handlers=[handler])
    logging.captureWarnings(True)


def formatter(process: str, form: LogFormat) -> logging.Formatter:
    """The formatter of a process's lines."""
    return _JsonFormatter(process) if form == "json" else _TextFormatter(process)


class _TextFormatter(logging.Formatter):
    """TIME PROCESS LEVEL [REQUEST IDS] MESSAGE, and the traceback on further lines."""

    def __init__(self, process: str) -> None:
        super().__init__(f"%(asctime)s {process} %(levelname)s %(requests)s%(message)s")

    def format(self, record: logging.LogRecord) -> str:
        ids = _request_ids(record)
        record.requests = f"[{' '.join(map(_printable, ids))}] " if ids else ""
        return super().format(record)


class _JsonFormatter(logging.Formatter):
    """One object per line: time (UTC), level, process, pid, logger, message; request_id, or
    request_ids where there are several; the line's own fields; exception.
    """

    def __init__(self, process: str) -> None:
        super().__init__()
        self._process = process

    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, object] = {
            "time": _utc(record.created),
            "level": record.levelname.lower(),
            "process": self._process,
            "pid": record.process,
            "logger": record.name,
            "message": record.getMessage(),
        }
        ids = _request_ids(record)
        if len(ids) == 1:
            line["request_id"] = ids[0]
        elif ids:
            line["request_ids"] = ids
        line |= getattr(record, "fields", {})
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        try:
            return msgspec.json.encode(line, enc_hook=str).decode()
        except UnicodeEncodeError:  # a lone surrogate, for example of a file's name
            return msgspec.json.encode(_encodable(line), enc_hook=str).decode()


def _request_ids(record: logging.LogRecord) -> list[str]:
    found = [each[:_MAX_ID_CHARS] for each in getattr(record, "request_ids", ()) if each]
    return found[:_MAX_REQUEST_IDS]


def _encodable(value: object) -> object:
    match value:
        case str():
            return value.encode(errors="backslashreplace").decode()
        case dict():
            return {key: _encodable(each) for key, each in value.items()}
        case list():
            return [_encodable(each) for each in value]
        case _:
            return value


def _printable(text: str) -> str:
    """A client's text that can neither end the line nor be taken for another id."""
    return ascii(text)[1:-1].replace(" ", "\\x20").replace("]", "\\x5d")


def _utc(seconds: float) -> str:
    whole = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(seconds))
    return f"{whole}.{int(seconds % 1 * 1000):03d}Z"
