"""`slipstream ray`: the command of another distribution, slipstream-ray, if that is installed."""

from __future__ import annotations

from collections.abc import Sequence
from importlib import import_module
from importlib.util import find_spec
from typing import NoReturn

from slipstream.cli.options.parser import Parser
from slipstream.client.placing.discovery import INSTALL_RAY


def add_ray(parser: Parser) -> None:
    """Add the commands. Without their distribution whatever follows `ray` ends with exit code 2 and
    how to get it.
    """
    if find_spec("slipstream_ray") is not None:
        import_module("slipstream_ray.commands").add_ray(parser)
        return

    def refuse(_words: Sequence[str]) -> NoReturn:
        parser.exit(2, f"{parser.prog}: slipstream-ray is missing: {INSTALL_RAY}\n")

    parser.translate = refuse
