"""The messages that `serve` and `route` print about the processes that they run."""

from __future__ import annotations

import contextlib
import logging
import os
import shlex
import shutil
import sys
from collections.abc import Mapping
from typing import TextIO
from urllib.parse import urlsplit

from slipstream.cli.options.option_names import with_option_names
from slipstream.client.endpoints import UNIX, default_address, http_address_in
from slipstream.stack.plan.front_plan import API_KEY_VARIABLE, is_front
from slipstream.stack.supervisor_events import (
    ProcessReady,
    ProcessRestarted,
    ProcessStarted,
    RequestsRunning,
    StackDraining,
    StackEvent,
    StackFailed,
    StackReady,
)
from slipstream_ipc.messages import PoolingTask
from slipstream_ipc.telemetry.logs import LogFormat
from slipstream_ipc.validation.pooling import task_in

_logger = logging.getLogger(__name__)
_QUESTION = "What is an assert statement?"  # which the demo model answers, and others too
_TURNS = f'[{{"role": "user", "content": "{_QUESTION}"}}]'
# by what the model is served for
_BODIES: dict[PoolingTask | None, tuple[str, str]] = {
    None: (
        "/v1/chat/completions",
        f'{{"messages": {_TURNS}, "temperature": 0, "stream": true}}',
    ),
    "embed": ("/v1/embeddings", '{"input": ["a text", "another one"]}'),
    "classify": ("/classify", '{"input": ["a text", "another one"]}'),
}


class EventPrinter:
    """Prints the supervisor's events to the terminal; where the log is JSON, logs them.

    about: what is started. names: what errors call options, by keyword. key: an API key as a shell
    knows it. certificate: the file of the HTTP server's. command: the one that runs. serves:
    whether clients can use what runs. open_host: where everybody who reaches it is served.
    """

    def __init__(
        self,
        about: str,
        names: Mapping[str, str],
        *,
        command: str = "serve",
        key: str | None = None,
        certificate: str | None = None,
        listen: str | None = None,
        serves: bool = True,
        open_host: str | None = None,
        form: LogFormat = "text",
    ) -> None:
        self._about = about
        self._command = command
        self._names = names
        self._has_begun = False
        self._key = key
        self._certificate = certificate
        self._listen = listen
        self._serves = serves
        self._open_host = open_host
        self._is_logged = form == "json"
        self._http_address: str | None = None
        self._task: PoolingTask | None = None  # None: it generates

    def __call__(self, event: StackEvent) -> None:
        match event:
            case ProcessStarted() if not self._has_begun:
                self._has_begun = True
                self._say(f"starting {self._about} ...")
            case ProcessReady(name=name, pid=pid, detail=detail, seconds=seconds):
                about = f": {detail}" if detail else ""
                self._say(f"{name} ready (process {pid}, {seconds:.1f} s){about}")
                self._task = self._task or task_in(detail)
                if is_front(name):
                    self._http_address = _reachable(http_address_in(detail))
            case StackReady(address=address) if not self._serves:
                self._say(f"\n{self._about}: waiting for the core at {address}; Ctrl-C ends this")
            case StackReady(address=address):
                examples = []
                if self._task is None:
                    is_default = address == default_address()  # where `chat` looks
                    where = "" if is_default else f" --address {shlex.quote(address)}"
                    question = shlex.quote(_QUESTION)
                    examples.append(f"{_program()} chat {question} --temperature 0{where}")
                if self._http_address is not None:
                    path, body = _BODIES[self._task]
                    curl = _curl(self._http_address, path, body, self._key, self._certificate)
                    examples.append(curl)
                where = address if self._listen is None else f"{address} and {self._listen}"
                self._say(f"\nserving at {where}; Ctrl-C ends it")
                if examples:
                    first = _browse(self._http_address) if self._task is None else "try"
                    self._say("\n  ".join([f"{first}:", *examples]))
                if self._open_host is not None:
                    self._warn(
                        f"warning: --host {self._open_host} without an API key: everybody who "
                        "reaches this address is served (--api-key-file FILE asks for a key)"
                    )
            case ProcessRestarted(name=name, pid=pid, how=how, seconds=seconds):
                about = f"process {pid}, {seconds:.2f} s after the end of the one before: {how}"
                self._say(f"{name} restarted ({about})")
            case StackDraining():
                self._say("stopping")
            case RequestsRunning(num=num, within_s=within_s):
                what = "1 request" if num == 1 else f"{num} requests"
                until = f"for {within_s:.3g} s; Ctrl-C again ends them now"
                self._say(f"{what} may go on {until}")
            case StackFailed(error=error):
                self._fail(f"slipstream {self._command}: {with_option_names(error, self._names)}")

    def _say(self, text: str) -> None:
        if self._is_logged:
            _logger.info("%s", text.strip())
        else:
            write_line(sys.stdout, text)

    def _warn(self, text: str) -> None:
        if self._is_logged:
            _logger.warning("%s", text.removeprefix("warning: "))
        else:
            write_line(sys.stderr, text)

    def _fail(self, text: str) -> None:
        if self._is_logged:
            _logger.error("%s", text)
        else:
            write_line(sys.stderr, text)


def key_hint(in_environment: str | None, file: str | None) -> str:
    """One of the server's API keys, as a user can type it within double quotes in a shell."""
    if in_environment:
        return f"${API_KEY_VARIABLE}"
    return "YOUR_KEY" if file is None else f"$(grep -m1 . {shlex.quote(file)})"


def _reachable(address: str) -> str:
    """The address of a front by a name that a program on this machine can use: a front that listens
    at every address is none of them.
    """
    if address.startswith(UNIX):
        return address
    parts = urlsplit(address)
    is_any = parts.hostname in (None, "0.0.0.0", "::")  # noqa: S104  (nothing is bound)
    return f"{parts.scheme}://localhost:{parts.port}" if is_any else address


def _browse(address: str | None) -> str:
    is_page = address is not None and not address.startswith(UNIX)
    return f"open {address} in a browser, or try" if is_page else "try"


def _curl(address: str, path: str, body: str, key: str | None, certificate: str | None) -> str:
    header = "" if key is None else f' -H "Authorization: Bearer {key}"'
    trust = "" if certificate is None else f" --cacert {shlex.quote(certificate)}"
    json = "-H 'Content-Type: application/json'"
    if address.startswith(UNIX):
        address = f"--unix-socket {shlex.quote(address.removeprefix(UNIX))} http://localhost"
    return f"curl -N {address}{path} {json}{header}{trust} -d '{body}'"


def _program() -> str:
    """The program's name or path, as a user can type it in a shell."""
    name = os.path.basename(sys.argv[0])
    found = shutil.which(name)
    return name if found and os.path.samefile(found, sys.argv[0]) else shlex.quote(sys.argv[0])


def write_line(stream: TextIO | None, text: str) -> None:
    """Write a line. A full disk or a closed terminal is no error, as streams go on."""
    if stream is None:  # the descriptor was closed at start-up
        return
    with contextlib.suppress(OSError):
        stream.write(f"{text}\n")
        stream.flush()
