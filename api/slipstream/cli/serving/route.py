"""`slipstream route`: HTTP fronts over servers that run elsewhere, until a signal ends them."""

from __future__ import annotations

import argparse
import os
from pathlib import Path

from slipstream.cli.options.configuration import SETTINGS, add_config
from slipstream.cli.options.parser import Parser
from slipstream.cli.options.stack_options import add_settings, given_settings
from slipstream.cli.serving.event_printer import EventPrinter, key_hint
from slipstream.cli.serving.serve import DEFAULT_HTTP_PORT
from slipstream.client.endpoints import KEYS_VARIABLE, default_runtime_dir, server_endpoint
from slipstream.stack.children.role_statistics import SUPERVISOR
from slipstream.stack.plan.front_plan import API_KEY_VARIABLE, has_api_keys, open_host
from slipstream.stack.plan.process_plan import plan_fronts
from slipstream.stack.settings import HTTP, group_of, settings_from
from slipstream.stack.supervisor import Supervisor
from slipstream_ipc.telemetry.logs import configure_logging

_OTHERS = {
    "tokenizer",
    "keys",
    "insecure",
    "hang_timeout_s",
    "max_restarts",
    "restart_window_s",
    "drain_s",
    "log_format",
}
ROUTE_SETTINGS = frozenset(
    name for name in (*SETTINGS, "api_key") if group_of(name) == HTTP
) | frozenset(_OTHERS)
"""The settings of a stack that count where there are fronts alone."""


def add_route(parser: Parser) -> None:
    """Add the command's options."""
    parser.introduce(
        "ADDRESS... [options]",
        (
            "slipstream route tcp://10.0.0.5:7001 tcp://10.0.0.6:7001 --keys KEYS",
            "slipstream route dns://replicas.default.svc:7001 --keys KEYS",
            "slipstream route file:members.txt --http-workers 4",
        ),
    )
    parser.add_argument(
        "addresses",
        nargs="+",
        metavar="ADDRESS",
        help="the servers, of one model or several: ipc://PATH or tcp://HOST:PORT of each, "
        "file:PATH of a file with one on each line, dns://NAME:PORT, or ray://NAME of `slipstream "
        "ray up`; files and names are read again as they change",
    )
    add_config(parser, (ROUTE_SETTINGS & SETTINGS) | {"config", "port", "runtime_dir"})
    parser.add_argument(
        "--runtime-dir",
        metavar="DIR",
        help="folder of this command's own; each one on a machine needs another "
        f"(default: {_default_folder()})",
    )
    add_settings(parser, has_argument=False, names=ROUTE_SETTINGS)
    parser.set_defaults(run=route)


def route(arguments: argparse.Namespace) -> int:
    """Run the fronts and return the supervisor's exit code."""
    given = given_settings(arguments)
    if not {"keys", "insecure"} & given.keys():
        given |= {"keys": os.environ.get(KEYS_VARIABLE) or None}
        arguments.option_names["keys"] = f"${KEYS_VARIABLE}"
    if "uds" not in given:
        given.setdefault("http_port", DEFAULT_HTTP_PORT)
    settings = settings_from(given)
    if arguments.runtime_dir is None:
        folder = _default_folder()
    else:
        folder = Path(arguments.runtime_dir).absolute()
    arguments.option_names["address"] = "ADDRESS"
    address = ",".join(arguments.addresses)
    server_endpoint(address, settings.keys, insecure=settings.insecure)  # raises what is wrong
    config = plan_fronts(settings, address, folder, keys=settings.keys)
    configure_logging(SUPERVISOR, settings.log_format)
    printer = EventPrinter(
        f"HTTP over {address}",
        arguments.option_names,
        command="route",
        key=key_hint(os.environ.get(API_KEY_VARIABLE), settings.api_key_file)
        if has_api_keys(settings)
        else None,
        certificate=settings.ssl_certfile,
        open_host=open_host(settings),
        form=settings.log_format,
    )
    return Supervisor(config, printer).run()


def _default_folder() -> Path:
    return default_runtime_dir().parent / "route"
