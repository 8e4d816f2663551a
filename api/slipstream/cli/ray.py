"""`slipstream ray`: the command of another distribution, slipstream-ray, if that is installed."""

from __future__ import annotations

import argparse
from importlib import import_module
from importlib.util import find_spec
from typing import NoReturn

from slipstream.cli.options.parser import Parser
from slipstream.client.placing.discovery import INSTALL_RAY
from slipstream.errors import missing_option


def add_ray(parser: Parser) -> None:
    """Add the commands; without their distribution all of them say how to get it."""
    if find_spec("slipstream_ray") is not None:
        import_module("slipstream_ray.commands").add_ray(parser)
        return
    parser.add_argument("arguments", nargs=argparse.REMAINDER, help=argparse.SUPPRESS)
    parser.set_defaults(run=_refuse)


def _refuse(_arguments: argparse.Namespace) -> NoReturn:
    """Raises: BadRequestError."""
    raise missing_option("slipstream-ray", INSTALL_RAY)
