"""What `slipstream bench beside` can be told.

Owns: the options, their ranges and defaults. What measures is imported when it is to measure.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from urllib.parse import urlsplit

from slipstream.cli_parser import Parser
from slipstream.errors import wrong_option
from slipstream_bench.common.report_options import add_common, check_common

SITUATIONS = ("quiet", "1 spinner", "2 spinners", "quota of 1.5 CPUs")
# the README's S: 19.8 million parameters
MODEL = (
    "random:llama-3.1-8b,hidden_size=256,intermediate_size=768,num_hidden_layers=4,"
    "num_attention_heads=4,num_key_value_heads=4,vocab_size=32000,max_position_embeddings=16384"
)
_THREADS = (1, 2)
_OUTPUT_LEN, _QUICK_OUTPUT_LEN = 128, 24


@dataclass(frozen=True, slots=True)
class Plan:
    """What is to be measured. `peers`: servers that run already, URLs by name."""

    model: str
    threads: list[int]
    streams: int
    input_len: int
    output_len: int
    situations: list[str]
    peers: dict[str, str]
    runs: int


def add_options(parser: Parser) -> None:
    """The benchmark's options."""
    group = parser.add_argument_group("what is measured")
    group.add_argument("--model", default=MODEL, help="default: 19.8 M parameters, random weights")
    listed = ",".join(map(str, _THREADS))
    group.add_argument(
        "--threads",
        metavar="N,...",
        default=listed,
        help="what the default is compared with; default: %(default)s",
    )
    group.add_argument(
        "--situations",
        metavar="NAME,...",
        default=",".join(SITUATIONS),
        help="beside what; default: %(default)s",
    )
    group.add_argument(
        "--streams", type=int, metavar="N", default=8, help="at a time; default: %(default)s"
    )
    group.add_argument(
        "--input-len", type=int, metavar="N", default=32, help="tokens; default: %(default)s"
    )
    group.add_argument(
        "--output-len",
        type=int,
        metavar="N",
        help=f"tokens; default: {_OUTPUT_LEN}, with --quick {_QUICK_OUTPUT_LEN}",
    )
    group.add_argument(
        "--peer",
        action="append",
        metavar="NAME=URL",
        help="an OpenAI-compatible server that runs already, measured too; may be repeated",
    )
    add_common(parser, runs=5)
    parser.set_defaults(run=_run)


def checked(arguments: argparse.Namespace) -> Plan:
    """Refuse what cannot be. Raises: BadRequestError."""
    check_common(arguments)
    if arguments.output_len is None:
        arguments.output_len = _QUICK_OUTPUT_LEN if arguments.quick else _OUTPUT_LEN
    for name in ("streams", "input_len", "output_len"):
        if getattr(arguments, name) < 1:
            raise wrong_option(name, getattr(arguments, name), "an integer >= 1")
    threads = arguments.threads.split(",")
    if not all(each.isdecimal() and int(each) >= 1 for each in threads):
        raise wrong_option("threads", arguments.threads, "integers >= 1, with commas between")
    situations = arguments.situations.split(",")
    if not set(situations) <= set(SITUATIONS):
        raise wrong_option("situations", arguments.situations, f"of {', '.join(SITUATIONS)}")
    peers = {}
    for peer in arguments.peer or ():
        name, _, url = peer.partition("=")
        if not name or urlsplit(url).scheme not in ("http", "https"):
            raise wrong_option("peer", peer, "NAME=http://HOST:PORT")
        peers[name] = url
    return Plan(
        arguments.model,
        [int(each) for each in threads],
        arguments.streams,
        arguments.input_len,
        arguments.output_len,
        situations,
        peers,
        arguments.runs,
    )


def _run(arguments: argparse.Namespace) -> int:
    from slipstream_bench.beside.beside import bench_beside

    return bench_beside(arguments)
