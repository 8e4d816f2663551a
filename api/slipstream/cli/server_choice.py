"""The stack that a command talks to: a running one, or one that is started for the command."""

from __future__ import annotations

import argparse
import os
import socket
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

from slipstream.cli.options.configuration import add_config, short_lived_settings, source_of
from slipstream.cli.options.parser import Parser
from slipstream.cli.options.stack_options import add_settings, given_settings
from slipstream.client.client import Client
from slipstream.client.endpoints import (
    ADDRESS_VARIABLE,
    KEYS_VARIABLE,
    default_address,
    default_runtime_dir,
    server_endpoint,
)
from slipstream.client.placing.discovery import DNS, FILE, RAY, names_fleet
from slipstream.client.server_presence import why_absent
from slipstream.demo_model import MODEL_NAME
from slipstream.errors import ConnectionLostError, SlipstreamError, wrong_option
from slipstream.progress import Progress
from slipstream.request.served_models import checked_model, find_model, listed_names
from slipstream.stack.plan.models.model_source import model_and_tokenizer
from slipstream.stack.plan.process_plan import plan_stack
from slipstream.stack.settings import SHORT_LIVED, settings_from
from slipstream.stack.stack import Stack
from slipstream.tracing.part_files import checked_trace
from slipstream_ipc.messages import Fault, ModelCard
from slipstream_ipc.transport.addresses import TCP

_ACCESS = ("keys", "insecure")  # the stack's with --listen, the client's with --address
_REFUSED_S = 1.0  # how long a host may take to refuse a connection
_ADDRESSES = (
    "ipc://PATH, tcp://HOST:PORT with --keys or --insecure, several, file:PATH, dns://, ray://"
)
_START_ONE = "`slipstream serve` or scripts/launch starts one"


def add_connection(parser: argparse.ArgumentParser) -> None:
    """Add the options of a command that starts a stack unless it is given an address."""
    group = parser.add_argument_group("server")
    _add_connection(group, "start one, and end it afterwards")


def add_client_options(
    parser: Parser, *, has_model_argument: bool = True, addresses: str = _ADDRESSES
) -> None:
    """Add the options of a command that uses a running stack if there is one: the stack's address,
    its model, its settings in case it has to be started, and --config. addresses: those it takes.
    """
    group = parser.add_argument_group("server")
    default = f"${ADDRESS_VARIABLE}, else this user's running server, else a new one"
    _add_connection(group, default, addresses)
    group.add_argument(
        "--new-stack",
        action="store_true",
        help="start a server for this command, even if one runs",
    )
    add_settings(parser, has_argument=has_model_argument, is_brief=True)
    add_config(parser, short_lived_settings())


def _add_connection(
    group: argparse._ArgumentGroup, default: str, addresses: str = _ADDRESSES
) -> None:
    group.add_argument(
        "--address",
        metavar="ADDRESS",
        help=f"a running server: {addresses} (default: {default})",
    )
    group.add_argument("--verbose", action="store_true", help="show the logs of a started server")


@contextmanager
def address_of(arguments: argparse.Namespace) -> Iterator[str]:
    """The address of --address, else of a stack started for the command, which ends on exit.

    Raises: BadRequestError, StackError.
    """
    settings = given_settings(arguments)
    if arguments.address is None:
        with Stack(verbose=arguments.verbose, **{**SHORT_LIVED, **settings}) as stack:
            yield stack.address
        return
    _refuse_settings(arguments, settings)
    yield arguments.address


def running_or_started(arguments: argparse.Namespace) -> AbstractContextManager[str]:
    """The address of a running stack that suits the command, else of one started for it.

    A stack in $SLIPSTREAM_ADDRESS or at this user's default address suits unless it serves another
    model than the one given, or the command line has settings for a new stack.

    Raises: BadRequestError, StackError, ConnectionLostError where $SLIPSTREAM_ADDRESS is set and
    no stack is there.
    """
    settings = given_settings(arguments)
    _name_variables(arguments)
    if arguments.address is None and any(name in settings for name in _ACCESS):
        arguments.address = os.environ.get(ADDRESS_VARIABLE) or None  # keys belong to an address
    if arguments.address is not None:
        if arguments.new_stack:
            raise wrong_option("address", arguments.address, "nothing beside --new-stack")
        settings.pop("model", None)  # it may name one of several: `model_of_command`
        _refuse_settings(arguments, settings)
        check_listening(arguments.address, arguments)
        return nullcontext(arguments.address)
    reason = _reason_to_start(arguments, settings)
    if reason is None:
        return nullcontext(default_address())
    return _started(arguments, settings, reason)


def access_of(arguments: argparse.Namespace) -> dict[str, Any]:
    """The keyword arguments of `Client` for access to a running stack."""
    if arguments.address is None:
        return {}
    return {name: value for name, value in vars(arguments).items() if name in _ACCESS}


def trace_of(arguments: argparse.Namespace) -> str | None:
    """The stack's trace file, for a client that adds its own track. Raises: BadRequestError."""
    return checked_trace(getattr(arguments, "trace", None))


@contextmanager
def connected(arguments: argparse.Namespace) -> Iterator[Client]:
    """A client of a running stack, or of one started for the command: see `running_or_started`."""
    trace = trace_of(arguments)
    with running_or_started(arguments) as address:
        with Progress(f"waiting for the server at {address} to answer", after_s=1.0):
            client = Client(address, trace=trace, **access_of(arguments))
        with client:
            yield client


def model_of_command(arguments: argparse.Namespace, client: Client) -> str:
    """The name of the served model that a command is for: the one that it names, by its name or its
    path, else the only one. Raises: BadRequestError.
    """
    settings = given_settings(arguments)
    card = _named(client.models, settings) if "model" in settings else None
    if card is not None:
        return card.name
    if "model" not in settings or (arguments.address is None and len(client.models) == 1):
        return client.model.name  # the server suits the command
    return checked_model(client.models, settings["model"]).name


def served_names(arguments: argparse.Namespace) -> tuple[str, ...]:
    """The names of what the running server serves that a command would talk to; none where no
    server answers.
    """
    if arguments.new_stack:
        return ()
    address = arguments.address or default_address()
    try:
        if _why_no_answer(address):
            return ()
        with Client(address, **access_of(arguments)) as client:
            return tuple(name for card in client.models for name in listed_names(card))
    except SlipstreamError:
        return ()


def check_listening(address: str, arguments: argparse.Namespace) -> None:
    """Check that something listens at a given address, so that a wrong one fails at once.

    Raises: BadRequestError for an invalid address; ConnectionLostError.
    """
    server_endpoint(address, **access_of(arguments))
    if why := _why_no_answer(address):
        raise _no_server(f"no Slipstream server at {address}: {why}")


def _name_variables(arguments: argparse.Namespace) -> None:
    """Let errors name the variables that stand for an address or keys that are not given."""
    for name, variable in (("address", ADDRESS_VARIABLE), ("keys", KEYS_VARIABLE)):
        if getattr(arguments, name, None) is None and os.environ.get(variable):
            arguments.option_names[name] = f"${variable}"


def _refuse_settings(arguments: argparse.Namespace, settings: dict[str, Any]) -> None:
    for name in settings:
        if name not in _ACCESS and source_of(arguments, name) is None:
            allowed = "nothing where --address is given: that stack runs already"
            raise wrong_option(name, settings[name], allowed)


@contextmanager
def _started(arguments: argparse.Namespace, settings: dict[str, Any], reason: str) -> Iterator[str]:
    plan_stack(settings_from(settings), default_runtime_dir())  # raises what is wrong, before:
    model = settings.get("model", MODEL_NAME)
    with Progress(f"{reason}: starting one with {model}", done=f"started {model}: ready"):
        stack = Stack(verbose=arguments.verbose, **{**SHORT_LIVED, **settings})
    with stack:
        yield stack.address


def _reason_to_start(arguments: argparse.Namespace, settings: dict[str, Any]) -> str | None:
    """The reason to start a stack for the command; None if one that runs can be used."""
    if arguments.new_stack:
        return "--new-stack is given"
    address = server_endpoint().address
    for name in settings:
        if name != "model" and source_of(arguments, name) is None:
            return f"--{name.replace('_', '-')} is for a new server"
    if why := _why_no_answer(address):
        if os.environ.get(ADDRESS_VARIABLE):
            raise _no_server(f"no Slipstream server at ${ADDRESS_VARIABLE}, {address}: {why}")
        return "no server runs"
    model = settings.get("model")
    if model is None:
        return None
    with (
        Progress(f"waiting for the server at {address} to answer", after_s=1.0),
        Client(address) as client,
    ):
        cards = client.models
    if _named(cards, settings) is not None:
        return None
    names = ", ".join([card.name for card in cards])
    return f"the running server serves {names}, not {model}"


def _named(cards: Sequence[ModelCard], settings: dict[str, Any]) -> ModelCard | None:
    """The served model that settings name, by its name or its path."""
    model = settings["model"]
    for card in cards:
        if model in listed_names(card):
            return find_model(cards, model)
    path, _ = model_and_tokenizer(model, settings.get("tokenizer"))
    return next((card for card in cards if card.path == path), None)


def _why_no_answer(address: str) -> str | None:
    """The reason why no server answers at an address, of several members at none; None if one
    may.
    """
    if not names_fleet(address):
        return why_absent(address) or _why_refused(address)
    if address.startswith((FILE, DNS, RAY)):
        return None  # its members may change while the client waits
    whys = [_why_no_answer(each.strip()) for each in address.split(",")]
    return None if None in whys else whys[0]


def _why_refused(address: str) -> str | None:
    """The reason why no server answers at a tcp:// address; None if one may, or at other
    addresses.
    """
    if not address.startswith(TCP):
        return None
    host, _, port = address.removeprefix(TCP).rpartition(":")
    try:
        socket.create_connection((host.strip("[]"), int(port)), _REFUSED_S).close()
    except ConnectionRefusedError:
        return "the host refuses connections to this port"
    except socket.gaierror as error:
        return f"its name is not known ({error.strerror})"
    except OSError:
        pass  # the network may be slow: the client waits
    return None


def _no_server(text: str) -> ConnectionLostError:
    return ConnectionLostError(Fault("engine", f"{text}; {_START_ONE}"))
