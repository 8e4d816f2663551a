"""The options of a command that become sampling parameters."""

from __future__ import annotations

import argparse
from typing import Any

import msgspec

from slipstream.cli.options.option_values import Several
from slipstream.errors import wrong_option
from slipstream.request.requests import checked_params
from slipstream_ipc.messages import SamplingParams
from slipstream_ipc.validation.field_types import of_text, values_of

_SAMPLING = {field.name: field.type for field in msgspec.structs.fields(SamplingParams)}
_OPTIONS = (
    ("temperature", "T", "randomness; 0 always takes the most likely token (default: 1)"),
    ("top-p", "P", "draw from the most likely tokens whose probabilities sum up to P (1 is off)"),
    ("top-k", "K", "draw from the K most likely tokens (0 is off)"),
    ("min-p", "P", "draw from tokens at least P times as likely as the most likely (0 is off)"),
    ("seed", "N", "the same seed and prompt give the same tokens (default: a random one)"),
    ("min-tokens", "N", "the least length, in tokens (default: 0)"),
    ("presence-penalty", "X", "lowers tokens that were output before, -2 to 2 (default: 0)"),
    ("frequency-penalty", "X", "the same for each time they were output, -2 to 2 (default: 0)"),
    ("repetition-penalty", "X", "above 1 lowers tokens of prompt and output (default: 1)"),
)


def add_sampling(parser: argparse.ArgumentParser, *, max_tokens: int | None) -> None:
    """Add options for the sampling parameters."""
    group = parser.add_argument_group("sampling")
    shown = "up to the model's end or its length" if max_tokens is None else max_tokens
    group.add_argument(
        "--max-tokens",
        metavar="N",
        default=max_tokens,
        help=f"maximum length of the answer, in tokens (default: {shown})",
    )
    for name, metavar, meaning in _OPTIONS:
        group.add_argument(
            f"--{name}",
            metavar=metavar,
            default=argparse.SUPPRESS,
            help=meaning,
        )
    group.add_argument(
        "--stop",
        action=Several,
        metavar="TEXT",
        default=argparse.SUPPRESS,
        help="end the answer before this text (may be given several times)",
    )
    group.add_argument(
        "--ignore-eos",
        action="store_true",
        help="go on after the model's end-of-sequence token",
    )


def sampling_params_of(arguments: argparse.Namespace) -> SamplingParams:
    """The sampling parameters given on the command line. Raises: BadRequestError."""
    given = {name: value for name, value in vars(arguments).items() if name in _SAMPLING}
    options: dict[str, Any] = {}
    for name, value in given.items():
        try:
            options[name] = of_text(value, _SAMPLING[name])
        except msgspec.ValidationError as error:
            allowed = values_of(msgspec.inspect.type_info(_SAMPLING[name]), in_python=False)
            raise wrong_option(name, value, allowed) from error
    return checked_params(None, options)
