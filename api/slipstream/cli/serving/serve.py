"""`slipstream serve`: runs a stack in the foreground until a signal ends it."""

from __future__ import annotations

import argparse
import logging
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from slipstream.cli.options.configuration import SETTINGS, add_config
from slipstream.cli.options.parser import Parser
from slipstream.cli.options.stack_options import add_settings, given_settings
from slipstream.cli.serving.event_printer import EventPrinter, key_hint, write_line
from slipstream.client.endpoints import KEYS_VARIABLE, default_runtime_dir
from slipstream.demo_model import MODEL_NAME
from slipstream.errors import wrong_option
from slipstream.stack.children.role_statistics import SUPERVISOR
from slipstream.stack.fleet_supervisor import FleetSupervisor
from slipstream.stack.plan.fleet_plan import plan_fleet
from slipstream.stack.plan.front_plan import API_KEY_VARIABLE, has_api_keys, open_host
from slipstream.stack.plan.node_plan import plan_node
from slipstream.stack.plan.nodes import local_ranks
from slipstream.stack.plan.process_plan import plan_stack
from slipstream.stack.settings import StackSettings, settings_from
from slipstream.stack.supervisor import Supervisor
from slipstream.tracing.part_files import checked_trace, discard_parts
from slipstream_ipc.telemetry.logs import configure_logging

DEFAULT_HTTP_PORT = 8000
_logger = logging.getLogger(__name__)


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
    needs_keys = given.get("listen") or given.get("master_addr")
    if needs_keys and not {"keys", "insecure"} & given.keys():
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
    else:
        folder = Path(arguments.runtime_dir).absolute()
    if settings.node_rank and num_replicas is None:
        return _serve_ranks(settings, folder, arguments)
    fleet = None if num_replicas is None else plan_fleet(settings, folder, num_replicas)
    config = plan_stack(settings, folder) if fleet is None else None
    configure_logging(SUPERVISOR, settings.log_format)
    _log_notes(arguments)
    printer = EventPrinter(
        settings.model or MODEL_NAME,
        arguments.option_names,
        key=key_hint(os.environ.get(API_KEY_VARIABLE), settings.api_key_file)
        if has_api_keys(settings)
        else None,
        certificate=settings.ssl_certfile,
        open_host=open_host(settings),
        listen=settings.listen if fleet is None else fleet.listen,
        form=settings.log_format,
    )
    if fleet is not None:
        return _traced(FleetSupervisor(fleet, printer), fleet.traces)
    assert config is not None
    trace = checked_trace(settings.trace)
    return _traced(Supervisor(config, printer), () if trace is None else (trace,))


def _log_notes(arguments: argparse.Namespace) -> None:
    for note in arguments.notes:
        _logger.warning("%s", note)


def _serve_ranks(settings: StackSettings, folder: Path, arguments: argparse.Namespace) -> int:
    """Run this machine's ranks of a model that another one serves."""
    config = plan_node(settings, folder)
    configure_logging(SUPERVISOR, settings.log_format)
    _log_notes(arguments)
    ranks = [str(index) for index in local_ranks(settings)]
    which = f"{'rank' if len(ranks) == 1 else 'ranks'} {', '.join(ranks)}"
    about = f"{which} of {settings.model or MODEL_NAME}"
    printer = EventPrinter(about, arguments.option_names, serves=False, form=settings.log_format)
    return Supervisor(config, printer).run()


def _traced(supervisor: Supervisor | FleetSupervisor, traces: Sequence[str]) -> int:
    """Run to the end, and put each of these traces together. Returns the exit code."""
    for trace in traces:
        discard_parts(trace)
    code = supervisor.run()
    for trace in traces:
        # with numpy, which a supervisor does without
        from slipstream.tracing.parts import merge_parts

        if merge_parts(trace):
            what = f"timeline in {trace}; `slipstream trace` and ui.perfetto.dev show it"
            write_line(sys.stdout, what)
    return code


def _num_replicas(given: str | None) -> int | None:
    """The number of replicas; None for a plain stack. Raises: BadRequestError."""
    if given is None:
        return None
    try:
        return int(given)
    except ValueError:
        raise wrong_option("replicas", given, "an integer >= 1") from None
