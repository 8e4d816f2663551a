"""Command-line options shared by several commands, and their conversion to settings, sampling
parameters and a connected client. The options of a stack are generated from `StackSettings`.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import msgspec

from slipstream.client.client import Client
from slipstream.errors import wrong_option
from slipstream.requests import checked_params
from slipstream.stack.settings import (
    SHORT_LIVED,
    StackSettings,
    allowed_values,
    description,
    settings_from,
)
from slipstream.stack.stack import Stack
from slipstream.tracing.parts import checked_trace
from slipstream_ipc.messages import SamplingParams

_ACCESS = ("keys", "insecure")  # the stack's with --listen, the client's with --address
_SAMPLING = {field.name: field.type for field in msgspec.structs.fields(SamplingParams)}


def add_settings(parser: argparse.ArgumentParser) -> None:
    """Add MODEL, and an option for each of a stack's settings."""
    parser.add_argument("model", nargs="?", metavar="MODEL", help=description("model"))
    group = parser.add_argument_group("stack")
    for field in msgspec.structs.fields(StackSettings):
        if field.name == "model":
            continue
        details = [allowed_values(field.name).removesuffix(" or None")]
        if field.default is not None:
            details.append(f"default: {field.default}")
        elif details == ["a string"]:
            details = []
        option = f"--{field.name.replace('_', '-')}"
        if field.default is False:
            about = description(field.name)
            group.add_argument(option, action="store_true", default=argparse.SUPPRESS, help=about)
            continue
        is_list = isinstance(field.default, tuple)
        if is_list:
            details = ["may be given several times"]
        if field.default is True:
            group.add_argument(
                f"--no-{field.name.replace('_', '-')}",
                dest=field.name,
                action="store_const",
                const=False,
                default=argparse.SUPPRESS,
                help=f"the same as {option} false",
            )
        group.add_argument(
            option,
            action="append" if is_list else "store",
            default=argparse.SUPPRESS,
            metavar="X",
            help=description(field.name) + (f" ({'; '.join(details)})" if details else ""),
        )


def given_settings(arguments: argparse.Namespace) -> dict[str, Any]:
    """The settings given on the command line. Raises: BadRequestError."""
    names = StackSettings.__struct_fields__
    given = {name: value for name, value in vars(arguments).items() if name in names}
    settings = settings_from(given, from_text=True)
    return {name: getattr(settings, name) for name, value in given.items() if value is not None}


def add_connection(parser: argparse.ArgumentParser) -> None:
    """Add the options that select the stack of a command."""
    parser.add_argument(
        "--address",
        help="a running stack's (ipc://..., or tcp://... with --keys or --insecure); "
        "default: start one, and end it afterwards",
    )
    parser.add_argument("--verbose", action="store_true", help="show the processes' logs")


@contextmanager
def address_of(arguments: argparse.Namespace) -> Iterator[str]:
    """The address of the selected stack; a stack started for the command ends on exit.

    Raises: BadRequestError, StackError.
    """
    settings = given_settings(arguments)
    if arguments.address is None:
        with Stack(verbose=arguments.verbose, **{**SHORT_LIVED, **settings}) as stack:
            yield stack.address
        return
    for name, value in settings.items():
        if name in _ACCESS:
            continue  # options of the client here
        raise wrong_option(name, value, "nothing where --address is given: that stack runs already")
    yield arguments.address


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
    """A client of the selected stack."""
    trace = trace_of(arguments)
    access = access_of(arguments)
    with address_of(arguments) as address, Client(address, trace=trace, **access) as client:
        yield client


def add_sampling(parser: argparse.ArgumentParser, *, max_tokens: int | None) -> None:
    """Add options for the sampling parameters."""
    group = parser.add_argument_group("sampling")
    shown = "what the model's length allows" if max_tokens is None else max_tokens
    group.add_argument("--max-tokens", metavar="N", default=max_tokens, help=f"default: {shown}")
    for name, meaning in (
        ("temperature", "0 takes the likeliest token; default: 1"),
        ("top-p", "in (0, 1]; default: 1"),
        ("top-k", "0 is off; default: 0"),
        ("min-p", "in [0, 1]; default: 0"),
        ("seed", "the same seed gives the same tokens; default: a random one"),
        ("min-tokens", "default: 0"),
        ("presence-penalty", "in [-2, 2], on tokens that were output; default: 0"),
        ("frequency-penalty", "in [-2, 2], the same each time; default: 0"),
        ("repetition-penalty", "above 0, on tokens that were there; default: 1"),
    ):
        group.add_argument(f"--{name}", metavar="X", default=argparse.SUPPRESS, help=meaning)
    group.add_argument(
        "--stop",
        action="append",
        metavar="TEXT",
        default=argparse.SUPPRESS,
        help="end before this text; may be given several times",
    )
    group.add_argument(
        "--ignore-eos",
        action="store_true",
        help="go on where the model would end",
    )


def sampling_params_of(arguments: argparse.Namespace) -> SamplingParams:
    """The sampling parameters given on the command line. Raises: BadRequestError."""
    given = {name: value for name, value in vars(arguments).items() if name in _SAMPLING}
    options: dict[str, Any] = {}
    for name, value in given.items():
        try:
            options[name] = msgspec.convert(value, _SAMPLING[name], strict=False)
        except msgspec.ValidationError as error:
            raise wrong_option(name, value, str(error).removeprefix("Expected ")) from error
    return checked_params(None, options)
