"""`slipstream serve`: runs a stack in the foreground until a signal ends it."""

from __future__ import annotations

import argparse
import contextlib
import logging
import os
import shlex
import shutil
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TextIO
from urllib.parse import urlsplit

from slipstream.cli.options.configuration import SETTINGS, add_config
from slipstream.cli.options.option_names import with_option_names
from slipstream.cli.options.parser import Parser
from slipstream.cli.options.stack_options import add_settings, given_settings
from slipstream.client.endpoints import (
    KEYS_VARIABLE,
    UNIX,
    default_address,
    default_runtime_dir,
    http_address_in,
)
from slipstream.demo_model import MODEL_NAME
from slipstream.errors import wrong_option
from slipstream.stack.events import (
    ProcessReady,
    ProcessRestarted,
    ProcessStarted,
    RequestsRunning,
    StackDraining,
    StackEvent,
    StackFailed,
    StackReady,
)
from slipstream.stack.fleet_supervisor import FleetSupervisor
from slipstream.stack.plan.fleet_plan import plan_fleet
from slipstream.stack.plan.front_plan import API_KEY_VARIABLE, api_keys, is_front
from slipstream.stack.plan.process_plan import plan_stack
from slipstream.stack.role_statistics import SUPERVISOR
from slipstream.stack.settings import settings_from
from slipstream.stack.supervisor import Supervisor
from slipstream.tracing.part_files import checked_trace, discard_parts
from slipstream_ipc.telemetry.logs import LogFormat, configure_logging
from slipstream_ipc.transport.sockets import private_directory

DEFAULT_HTTP_PORT = 8000
_logger = logging.getLogger(__name__)
_QUESTION = "What is an assert statement?"  # which the demo model answers, and others too


def add_serve(parser: Parser) -> None:
    """Add the command's options."""
    parser.introduce(
        "[MODEL] [options]",
        (
            "slipstream serve",
            "slipstream serve Qwen/Qwen3-0.6B --port 8000 --max-model-len 4096",
            "slipstream serve --config server.yaml",
        ),
    )
    add_config(parser, SETTINGS | {"config", "port", "runtime_dir", "no_http", "replicas"})
    parser.add_argument(
        "--runtime-dir",
        metavar="DIR",
        help="folder of the server's sockets; each server on a machine needs its own "
        f"(default: {default_runtime_dir()})",
    )
    parser.add_argument(
        "--no-http", action="store_true", help="start no HTTP server; Python clients need none"
    )
    parser.add_argument(
        "--replicas",
        metavar="N",
        help="run N replicas of the whole server behind one address, each with its share of the "
        "machine's CPU cores and cards; without --spare-core none has a spare core (default: one "
        "server, which uses all)",
    )
    add_settings(parser)
    parser.epilog = (
        "Every option can also stand in a file (--config) and in a variable SLIPSTREAM_OPTION, "
        "such as SLIPSTREAM_MAX_NUM_SEQS."
    )
    parser.set_defaults(run=serve)


def serve(arguments: argparse.Namespace) -> int:
    """Run a stack and return the supervisor's exit code."""
    given = given_settings(arguments)
    if given.get("listen") and not {"keys", "insecure"} & given.keys():
        given |= {"keys": os.environ.get(KEYS_VARIABLE) or None}
        arguments.option_names["keys"] = f"${KEYS_VARIABLE}"
    if arguments.no_http:
        for name in ("http_port", "uds"):
            if name in given:
                raise wrong_option(name, given[name], "nothing where --no-http is given")
    elif "uds" not in given:
        given.setdefault("http_port", DEFAULT_HTTP_PORT)
    num_replicas = _num_replicas(arguments.replicas)
    if num_replicas is not None:
        given.setdefault("spare_core", False)  # the other replicas are the spares
    settings = settings_from(given)
    if arguments.runtime_dir is None:
        folder = default_runtime_dir()
        private_directory(folder.parent)  # otherwise its owner could replace the folder
    else:
        folder = Path(arguments.runtime_dir).absolute()
    fleet = None if num_replicas is None else plan_fleet(settings, folder, num_replicas)
    config = plan_stack(settings, folder) if fleet is None else None
    configure_logging(SUPERVISOR, settings.log_format)
    teller = Teller(
        settings.model or MODEL_NAME,
        arguments.option_names,
        key=key_hint(os.environ.get(API_KEY_VARIABLE), settings.api_key_file)
        if api_keys(settings)
        else None,
        certificate=settings.ssl_certfile,
        listen=settings.listen if fleet is None else fleet.listen,
        form=settings.log_format,
    )
    if fleet is not None:
        return FleetSupervisor(fleet, teller).run()
    assert config is not None
    supervisor = Supervisor(config, teller)
    trace = checked_trace(settings.trace)
    if trace is None:
        return supervisor.run()
    discard_parts(trace)
    code = supervisor.run()
    from slipstream.tracing.parts import merge_parts  # with numpy, which a supervisor does without

    if merge_parts(trace):
        _write(sys.stdout, f"timeline in {trace}; `slipstream trace` and ui.perfetto.dev show it")
    return code


def _num_replicas(given: str | None) -> int | None:
    """The number of replicas; None for a plain stack. Raises: BadRequestError."""
    if given is None:
        return None
    try:
        return int(given)
    except ValueError:
        raise wrong_option("replicas", given, "an integer >= 1") from None


class Teller:
    """Prints the supervisor's events to the terminal; where the log is JSON, logs them.

    about: what is started. names: what errors call options, by keyword. key: an API key as a shell
    knows it. certificate: the file of the HTTP server's. command: the one that runs.
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
        form: LogFormat = "text",
    ) -> None:
        self._about = about
        self._command = command
        self._names = names
        self._has_begun = False
        self._key = key
        self._certificate = certificate
        self._listen = listen
        self._is_logged = form == "json"
        self._http_address: str | None = None

    def __call__(self, event: StackEvent) -> None:
        match event:
            case ProcessStarted() if not self._has_begun:
                self._has_begun = True
                self._say(f"starting {self._about} ...")
            case ProcessReady(name=name, pid=pid, detail=detail, seconds=seconds):
                about = f": {detail}" if detail else ""
                self._say(f"{name} ready (process {pid}, {seconds:.1f} s){about}")
                if is_front(name):
                    self._http_address = _reachable(http_address_in(detail))
            case StackReady(address=address):
                is_default = address == default_address()  # where `chat` looks
                where = "" if is_default else f" --address {shlex.quote(address)}"
                examples = f"\n  {_program()} chat {shlex.quote(_QUESTION)} --temperature 0{where}"
                if self._http_address is not None:
                    examples += f"\n  {_curl(self._http_address, self._key, self._certificate)}"
                where = address if self._listen is None else f"{address} and {self._listen}"
                self._say(f"\nserving at {where}; Ctrl-C ends it")
                self._say(f"{_browse(self._http_address)}:{examples}")
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
            _write(sys.stdout, text)

    def _fail(self, text: str) -> None:
        if self._is_logged:
            _logger.error("%s", text)
        else:
            _write(sys.stderr, text)


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


def _curl(address: str, key: str | None, certificate: str | None) -> str:
    header = "" if key is None else f' -H "Authorization: Bearer {key}"'
    trust = "" if certificate is None else f" --cacert {shlex.quote(certificate)}"
    turns = f'[{{"role": "user", "content": "{_QUESTION}"}}]'
    body = f'{{"messages": {turns}, "temperature": 0, "stream": true}}'
    json = "-H 'Content-Type: application/json'"
    if address.startswith(UNIX):
        address = f"--unix-socket {shlex.quote(address.removeprefix(UNIX))} http://localhost"
    return f"curl -N {address}/v1/chat/completions {json}{header}{trust} -d '{body}'"


def _program() -> str:
    """The program's name or path, as a user can type it in a shell."""
    name = os.path.basename(sys.argv[0])
    found = shutil.which(name)
    return name if found and os.path.samefile(found, sys.argv[0]) else shlex.quote(sys.argv[0])


def _write(stream: TextIO | None, text: str) -> None:
    """Write a line. A full disk or a closed terminal is no error, as streams go on."""
    if stream is None:  # the descriptor was closed at start-up
        return
    with contextlib.suppress(OSError):
        stream.write(f"{text}\n")
        stream.flush()
