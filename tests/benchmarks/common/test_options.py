"""The table of a benchmark's options: defaults, --quick, what is given, what is refused."""

from __future__ import annotations

import argparse
from typing import Any

import pytest

from slipstream.errors import BadRequestError
from slipstream_bench.common.options import Option, add, fill_in, integer, many, name_of, number

OPTIONS = (
    Option("batches", many(integer(1, 64)), "requests at a time", (1, 32), (8,)),
    Option("output_len", integer(1), "tokens", 128),
    Option("step_ms", number(lambda value: value > 0, "milliseconds, > 0"), "", 2.5, 1.0),
    Option("names", many(name_of(("plain", "stop2"))), "", ("plain",)),
    Option("threads", integer(1), "default: the engine's"),
)


def parser_of() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser()
    parser.add_argument("--quick", action="store_true")
    add(parser, OPTIONS)
    return parser


def values(*words: str) -> dict[str, Any]:
    arguments = parser_of().parse_args(words)
    found = fill_in(arguments, OPTIONS)
    assert {name: getattr(arguments, name) for name in found} == found
    return found


def test_what_is_not_given_has_its_default() -> None:
    assert values() == {
        "batches": (1, 32),
        "output_len": 128,
        "step_ms": 2.5,
        "names": ("plain",),
        "threads": None,
    }


def test_quick_has_defaults_where_they_differ() -> None:
    quick = values("--quick")
    assert (quick["batches"], quick["step_ms"], quick["output_len"]) == ((8,), 1.0, 128)
    assert values("--quick", "--batches", "2,3")["batches"] == (2, 3)


def test_what_is_given_is_parsed() -> None:
    found = values("--names", "stop2,plain", "--step-ms", "0.5", "--threads", "2")
    assert (found["names"], found["step_ms"], found["threads"]) == (("stop2", "plain"), 0.5, 2)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("--batches 8,65", "batches: got '8,65', allowed: an integer in [1, 64]; several with"),
        ("--batches 8,", "batches: got '8,', allowed: "),
        ("--batches 1.5", "batches: got '1.5', allowed: "),
        ("--output-len 0", "output_len: got 0, allowed: an integer >= 1"),
        ("--output-len x", "output_len: got 'x', allowed: an integer >= 1"),
        ("--step-ms nan", "step_ms: got nan, allowed: milliseconds, > 0"),
        ("--names plain,other", "names: got 'plain,other', allowed: any of plain,stop2"),
    ],
)
def test_what_is_not_allowed_is_refused(words: str, said: str) -> None:
    with pytest.raises(BadRequestError) as refused:
        values(*words.split())
    assert said in str(refused.value)


def test_help_names_both_defaults() -> None:
    shown = " ".join(parser_of().format_help().split())
    assert "--batches N,... requests at a time; default: 1,32, with --quick 8" in shown
    assert "--step-ms X default: 2.5, with --quick 1" in shown
    assert "--threads N default: the engine's" in shown
