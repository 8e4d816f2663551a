"""`slipstream bench formats`: what reading an answer's calls costs, and how many are read right.

- Cost: CPU time of a delta of 4 characters within a long text argument, by how much of the argument
  came before it. Our reader is given such a delta as the worker gives it; vLLM's parser as its
  server does, with `parse_delta`.
- Right: calls of BFCL, or hand-made ones, rendered in each format, divided at random into deltas of
  1 to 8 characters and read. `right`: answers whose calls have the given names and arguments.
  `same`: cases that are read alike, to the letter of arguments and content, at every division.
  Delimiters that are tokens of a model's vocabulary come as tokens.

With --vllm-python, an interpreter that has vLLM installed, vLLM's parsers read the same answers in
the same run. vLLM's constrained decoding plays no part: all answers are well-formed.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import tempfile
from collections.abc import Sequence
from pathlib import Path

import msgspec

from slipstream.cli.options.parser import Parser
from slipstream_bench.common.options import (
    Option,
    OptionType,
    add,
    fill_in,
    integer,
    many,
    name_of,
)
from slipstream_bench.common.report import Row, check_files, print_rows
from slipstream_lab.formats import our_reader
from slipstream_lab.formats.cases import MADE_CASES, AnswerCase, read_bfcl
from slipstream_lab.formats.divisions import AnswerPiece, divided, pieces
from slipstream_lab.formats.our_reader import ReadAnswer
from slipstream_lab.formats.rendering import (
    RENDERINGS,
    Arguments,
    SampleCall,
    can_render,
    format_of,
    render,
)
from slipstream_lab.peers.peer_process import PROGRAM, run_peer

LENS = (200, 2_000, 8_000, 100_000)
_NUM_TIMED = 100  # deltas
_DELTA_LEN = 4
_MAX_PIECE_LEN = 8
_LETTERS = "The quick brown fox jumps over the lazy dog, line {}.\n"
_CONTENT = "Let me see."
_SEED = 20_240


_OPTIONS = (
    Option("formats", many(name_of(tuple(RENDERINGS))), "which of them; default: all"),
    Option("lens", many(integer(1)), "characters before a measured delta", LENS, LENS[:2]),
    Option(
        "bfcl",
        OptionType(Path, Path.is_dir, "a folder: bfcl_eval/data of the package bfcl-eval", "DIR"),
        "cases of BFCL, in place of a few hand-made ones",
    ),
    Option("cases", integer(1), "of BFCL, taken at random", 40, 5),
    Option("divisions", integer(1), "of each answer", 20, 2),
    Option("runs", integer(1), "of each cost; the table has their medians", 5, 1),
    Option("vllm_python", PROGRAM, "interpreter of an environment with vLLM"),
)


def add_options(parser: Parser) -> None:
    """The benchmark's options."""
    add(parser.add_argument_group("answers"), _OPTIONS)
    parser.add_argument("--quick", action="store_true", help="a small form, in under 50 s")
    parser.add_argument("--json", metavar="FILE", help="write the rows there, a list of objects")
    parser.set_defaults(run=bench_formats)


def bench_formats(arguments: argparse.Namespace) -> int:
    """Measure and report; exit code 0."""
    check_files(arguments)
    fill_in(arguments, _OPTIONS)
    variants = arguments.formats or tuple(RENDERINGS)
    cases = _cases(arguments.bfcl, arguments.cases)
    answers = [it for name in variants for it in rendered(name, cases, arguments.divisions)]
    long_answers = [long_answer(name, size) for name in variants for size in arguments.lens]
    rows = _our_rows(answers, long_answers, arguments.runs)
    if arguments.vllm_python is not None:
        rows += _vllm_rows(arguments.vllm_python, answers, long_answers, arguments.runs)
    print_rows(rows, arguments)
    return 0


class DividedAnswer(msgspec.Struct, frozen=True):
    """One case in one format, divided in several ways. tools: in OpenAI's form."""

    variant: str
    format: str
    added_tokens: tuple[str, ...]
    case: AnswerCase
    content: str
    divisions: list[list[AnswerPiece]]


class LongAnswer(msgspec.Struct, frozen=True):
    """A call with a long text. before: what comes before the deltas that are timed."""

    variant: str
    format: str
    added_tokens: tuple[str, ...]
    num_chars: int
    before: list[AnswerPiece]
    deltas: list[AnswerPiece]


def rendered(variant: str, cases: Sequence[AnswerCase], num_divisions: int) -> list[DividedAnswer]:
    """The cases that the format can render, divided in the same ways in each run."""
    rendering = RENDERINGS[variant]
    generator = random.Random(f"{_SEED} {variant}")  # noqa: S311  (a load, no secret)
    answers = []
    for case in cases:
        if not can_render(variant, case.calls, case.types):
            continue
        content = "" if rendering.is_alone else _CONTENT
        whole = pieces(render(variant, case.calls, content=content), rendering.added_tokens)
        divisions = [divided(whole, generator, _MAX_PIECE_LEN) for _ in range(num_divisions)]
        answers.append(
            DividedAnswer(
                variant, format_of(variant), rendering.added_tokens, case, content, divisions
            )
        )
    return answers


def long_answer(variant: str, num_chars: int) -> LongAnswer:
    """A call whose text argument has `num_chars` characters before the deltas that are timed."""
    rendering = RENDERINGS[variant]
    length = num_chars + 2 * _NUM_TIMED * _DELTA_LEN
    lines = "".join(_LETTERS.format(i) for i in range(length // len(_LETTERS) + 1))
    arguments: Arguments = {"path": "a.txt", "text": lines[:length]}
    text = render(variant, [SampleCall("write_file", arguments)])
    at = text.index(lines[:20]) + num_chars
    before = pieces(text[:at], rendering.added_tokens)
    deltas = [
        AnswerPiece(text[begin : begin + _DELTA_LEN], False)
        for begin in range(at, at + _NUM_TIMED * _DELTA_LEN, _DELTA_LEN)
    ]
    return LongAnswer(
        variant, format_of(variant), rendering.added_tokens, num_chars, before, deltas
    )


def is_right(read: ReadAnswer, calls: Sequence[SampleCall]) -> bool:
    """Whether just these calls were read, whole and with these arguments."""
    if [call.name for call in read.calls] != [call.name for call in calls]:
        return False
    try:
        arguments = [json.loads(call.arguments) for call in read.calls]
    except ValueError:
        return False
    return all(call.is_whole for call in read.calls) and arguments == [
        call.arguments for call in calls
    ]


def result_row(answers: Sequence[DividedAnswer], results: Sequence[Sequence[ReadAnswer]]) -> Row:
    """How many answers of one format were read right, and how many cases alike."""
    return {
        "answers": sum(map(len, results)),
        "right": sum(
            is_right(read, answer.case.calls)
            for answer, reads in zip(answers, results, strict=True)
            for read in reads
        ),
        "cases": len(results),
        "same": sum(len(set(reads)) == 1 for reads in results),
    }


def _cases(folder: Path | None, num_cases: int) -> list[AnswerCase]:
    if folder is None:
        return list(MADE_CASES)
    found = read_bfcl(folder)
    generator = random.Random(_SEED)  # noqa: S311  (a load, no secret)
    return generator.sample(found, min(num_cases, len(found)))


def _our_rows(
    answers: Sequence[DividedAnswer], long_answers: Sequence[LongAnswer], runs: int
) -> list[Row]:
    costs = []
    for long in long_answers:
        times = [
            our_reader.us_per_delta(long.variant, long.before, long.deltas) for _ in range(runs)
        ]
        found = [time for time in times if time is not None]
        costs.append(statistics.median(found) if found else None)
    results = [
        [our_reader.read(answer.variant, cut, answer.case.types) for cut in answer.divisions]
        for answer in answers
    ]
    return _rows("slipstream", answers, results, long_answers, costs)


def _rows(
    reader: str,
    answers: Sequence[DividedAnswer],
    results: Sequence[Sequence[ReadAnswer | None]],
    long_answers: Sequence[LongAnswer],
    costs: Sequence[float | None],
) -> list[Row]:
    """A row for each format that the reader has."""
    rows: dict[str, Row] = {}
    for long, cost in zip(long_answers, costs, strict=True):
        row = rows.setdefault(long.variant, {"format": long.variant, "reader": reader})
        row[f"us_per_delta_{long.num_chars}"] = cost
    for variant, row in rows.items():
        own = [i for i, answer in enumerate(answers) if answer.variant == variant]
        reads = [[read for read in results[i] if read is not None] for i in own]
        if all(reads):
            row |= result_row([answers[i] for i in own], reads)
    return [row for row in rows.values() if any(value is not None for value in [*row.values()][2:])]


class _PeerResults(msgspec.Struct):
    """What the peer's program writes: in the order of what it was given."""

    version: str
    us_per_delta: list[float | None]
    results: list[list[ReadAnswer | None]]


def _vllm_rows(
    python: str, answers: Sequence[DividedAnswer], long_answers: Sequence[LongAnswer], runs: int
) -> list[Row]:
    with tempfile.TemporaryDirectory(prefix="slipstream-bench-") as folder:
        given, found = Path(folder) / "answers.json", Path(folder) / "results.json"
        given.write_bytes(
            msgspec.json.encode({"answers": answers, "long_answers": long_answers, "runs": runs})
        )
        run_peer("vllm", "vllm_formats.py", python, ["--answers", str(given), "--json", str(found)])
        peer = msgspec.json.decode(found.read_bytes(), type=_PeerResults)
    reader = f"vllm {peer.version}"
    return _rows(reader, answers, peer.results, long_answers, peer.us_per_delta)
