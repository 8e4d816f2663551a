"""The options of `slipstream bench serve`, their ranges and defaults."""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable
from typing import Any
from urllib.parse import urlsplit

from slipstream.cli.parser import Parser
from slipstream.errors import wrong_option

_DEFAULT_URL = "http://127.0.0.1:8000"
_DEFAULT_REQUESTS = 64
_DEFAULT_INPUT_LEN = 128

_RANGES: dict[str, tuple[Callable[[Any], bool], str]] = {
    "num_requests": (lambda value: value >= 1, "an integer >= 1"),
    "request_rate": (lambda value: value > 0, "requests a second, > 0, or inf"),
    "concurrency": (lambda value: value >= 1, "an integer >= 1"),
    "input_len": (lambda value: value >= 1, "an integer >= 1"),
    "output_len": (lambda value: value >= 1, "an integer >= 1"),
    "range_ratio": (lambda value: 0 <= value < 1, "a number >= 0 and < 1"),
    "vocab_size": (lambda value: value >= 2, "an integer >= 2"),
    "warmup": (lambda value: value >= 0, "an integer >= 0"),
    "seed": (lambda value: value >= 0, "an integer >= 0"),
    "temperature": (lambda value: 0 <= value < math.inf, "a number >= 0"),
    "logprobs": (lambda value: value >= 0, "an integer >= 0"),
    "runs": (lambda value: value >= 1, "an integer >= 1"),
    "timeout": (lambda value: value > 0, "seconds, > 0"),
}


def add_serve_options(parser: Parser) -> None:
    """Add all options."""
    _add_server(parser)
    _add_load(parser)
    _add_answers(parser)
    _add_report(parser)


def checked(arguments: argparse.Namespace) -> None:
    """Validate the options and set those that depend on others. Raises: BadRequestError."""
    for name, (is_allowed, allowed) in _RANGES.items():
        value = getattr(arguments, name)
        if value is not None and not is_allowed(value):
            raise wrong_option(name, value, allowed)
    if any(not 0 < percentile < 100 for percentile in arguments.percentiles):
        raise wrong_option("percentiles", arguments.percentiles, "numbers > 0 and < 100")
    if arguments.address is not None:
        for name in ("url", "model", "api_key"):
            if (value := getattr(arguments, name)) is not None:
                raise wrong_option(name, value, "nothing where --address is given")
    else:
        arguments.url = (arguments.url or _DEFAULT_URL).rstrip("/")
        _check_url(arguments.url)
    if arguments.dataset is None:
        arguments.num_requests = arguments.num_requests or _DEFAULT_REQUESTS
        arguments.input_len = arguments.input_len or _DEFAULT_INPUT_LEN
        return
    for name in ("input_len", "range_ratio", "vocab_size"):
        if (value := getattr(arguments, name)) is not None:
            raise wrong_option(name, value, "nothing where --dataset is given")


def _check_url(url: str) -> None:
    try:
        parts = urlsplit(url)
        is_url = parts.scheme in ("http", "https") and bool(parts.hostname)
        is_url = is_url and parts.port != 0  # reading the port may raise, too
    except ValueError:
        is_url = False
    if not is_url:
        raise wrong_option("url", url, "http://HOST:PORT or https://HOST:PORT")


def _percentiles(text: str) -> list[float]:
    return [float(number) for number in text.split(",")]


def _add_server(parser: Parser) -> None:
    group = parser.add_argument_group("server")
    group.add_argument("--url", metavar="URL", help=f"default: {_DEFAULT_URL}")
    group.add_argument(
        "--address", help="a stack's (ipc://...), which is then asked by its own protocol, not HTTP"
    )
    group.add_argument("--model", metavar="NAME", help="default: the first of /v1/models")
    group.add_argument("--endpoint", choices=("completions", "chat"), default="completions")
    group.add_argument("--api-key", metavar="KEY", help="sent as the bearer token")
    group.add_argument(
        "--pid", type=int, metavar="N", help="a server on this machine, whose CPU time is wanted"
    )


def _add_load(parser: Parser) -> None:
    group = parser.add_argument_group("load")
    group.add_argument(
        "--num-requests",
        type=int,
        metavar="N",
        help=f"of each run; default: {_DEFAULT_REQUESTS}, with --dataset as many as it has",
    )
    group.add_argument(
        "--request-rate",
        type=float,
        default=math.inf,
        metavar="R",
        help="a second, at random (Poisson); default: inf, all at once",
    )
    group.add_argument(
        "--concurrency", type=int, metavar="N", help="requests at a time, at most; default: any"
    )
    group.add_argument(
        "--input-len",
        type=int,
        metavar="N",
        help=f"tokens of a prompt; default: {_DEFAULT_INPUT_LEN}",
    )
    group.add_argument(
        "--output-len", type=int, default=128, metavar="N", help="tokens of an answer; default: 128"
    )
    group.add_argument(
        "--range-ratio",
        type=float,
        metavar="R",
        help="lengths are uniform from LEN*(1-R) to LEN*(1+R); default: 0",
    )
    group.add_argument(
        "--vocab-size",
        type=int,
        metavar="N",
        help="token ids of prompts are below this; default: 1000, with --address the model's",
    )
    group.add_argument(
        "--dataset",
        metavar="FILE",
        help='JSON lines of {"prompt": text or ids, "max_tokens": n}, or ShareGPT\'s; '
        "default: random prompts",
    )
    group.add_argument(
        "--warmup", type=int, default=1, metavar="N", help="requests before the runs; default: 1"
    )
    group.add_argument(
        "--seed", type=int, default=0, metavar="N", help="of prompts and arrivals; default: 0"
    )


def _add_answers(parser: Parser) -> None:
    group = parser.add_argument_group("answers")
    group.add_argument(
        "--ignore-eos",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="go on where the model would end; default: yes",
    )
    group.add_argument(
        "--temperature", type=float, default=0.0, metavar="X", help="default: 0, greedy"
    )
    group.add_argument("--logprobs", type=int, metavar="K", help="default: none")
    group.add_argument(
        "--stream",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="read answers as they come; default: yes",
    )
    group.add_argument(
        "--timeout",
        type=float,
        default=600.0,
        metavar="S",
        help="seconds for one answer, which has failed then; default: 600",
    )


def _add_report(parser: Parser) -> None:
    group = parser.add_argument_group("report")
    group.add_argument(
        "--runs", type=int, default=1, metavar="N", help="their medians are told; default: 1"
    )
    group.add_argument(
        "--percentiles",
        type=_percentiles,
        default=[99.0],
        metavar="P,...",
        help="of the latencies, besides mean and median; default: 99",
    )
    group.add_argument(
        "--json", metavar="FILE", help="write the rows there, a list of objects: runs, then medians"
    )
