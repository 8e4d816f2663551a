"""`slipstream bench output-path`: options, order of the measurements, medians, ratios and the
chart.
"""

from __future__ import annotations

import argparse
import platform
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path

from tokenizers import Tokenizer

from slipstream.cli.options.parser import Parser
from slipstream.demo_model import MODEL_PATH
from slipstream.errors import wrong_option
from slipstream_bench.common.measures import Row
from slipstream_bench.common.options import (
    Option,
    OptionType,
    add,
    fill_in,
    integer,
    many,
    name_of,
)
from slipstream_bench.common.pictures import lines_in_panels
from slipstream_bench.common.provenance import package_version
from slipstream_bench.common.report import (
    add_common,
    check_common,
    in_rounds,
    median_rows,
    print_rows,
    table,
    write_json,
)
from slipstream_bench.common.variants import VARIANTS, Variant
from slipstream_lab.output_path.delta_readers import READS
from slipstream_lab.output_path.in_process_path import PROCESSES, STAGES
from slipstream_lab.output_path.path_measure import (
    ENGINE,
    FLOOR,
    PathSetting,
    measure,
    measure_floor,
)
from slipstream_lab.output_path.stopwatch import measured_lap_ns
from slipstream_lab.output_path.workload import detokenizers_of, make_workload
from slipstream_lab.peers.peer_process import (
    PEERS,
    PROGRAM,
    Peer,
    checked_python,
    measure_output_path,
)

_PROMPT_LEN = 128
_KEY = ("engine", "batch", "variant", "read", "workers", "tokens")
_COLUMNS = (
    *("batch", "variant", "read", "workers", "tokens", "us_per_token"),
    *("over_one_worker", "over_one_token"),
    *(f"{stage}_us" for stage in STAGES),
    *("wire_us", "floor_us", "over_floor", "messages_per_token"),
    *("bytes_per_token", "core_bytes_per_token", "deltas_per_token"),
    *("gc_gen0", "gc_gen1", "gc_gen2"),
    *(f"{process}_gen0_per_100_steps" for process in PROCESSES),
)
_FLOOR_COLUMNS = (
    *("batch", "variant", "read", "us_per_token", "encode_us", "decode_us", "wire_us"),
    *("messages_per_token", "bytes_per_token"),
)
_ABOUT = """\
CPU us per token, from sampled ids in the core to deltas in the hands of their reader; one process,
one thread, no wire (wire_us: what the transport in use would add; not in the sum).
over_floor: with wire_us, as a multiple of floor_us: the same messages encoded, passed through a
bare Unix socket and decoded, and nothing else, measured beside it.
gc_gen0 to 2: collections of the run, all three processes in one; X_gen0_per_100_steps: what process
X would have alone while all requests run, by the containers it leaves behind.
workers: output workers among which the streams are dealt; over_one_worker: us_per_token and wire_us
as a multiple of one worker's. tokens: of a row in a step; over_one_token: likewise.
read: columns, all streams read together and not looked at; materialised, the same, every text, id
and candidate made a Python object; streams, one Stream to each; async_for, one task to each."""
_ABOUT_FLOOR = "The floor: the same messages and nothing else, by transport."
_ABOUT_PEERS = """\
Peers: the same requests through their own code; encoding, decoding and processing are counted,
taking and reading deltas are shown and not counted (of ours they are). vLLM also makes each
candidate's text. Ratio: the peer's us_per_token over ours."""

_ALONE: Row = {"workers": None, "tokens": None}  # a peer has neither
_NOT_DRAWN = ("streams", "async_for")  # ways of reading


def _span(text: str) -> tuple[int, int]:
    least, _, most = text.partition("-")
    return int(least), int(most or least)


def _is_span(span: tuple[int, int]) -> bool:
    return 1 <= span[0] <= span[1] <= 17


_OPTIONS = (
    Option("batches", many(integer(1)), "requests at a time", (1, 32, 256, 1024), (1, 256)),
    Option("variants", many(name_of(VARIANTS)), "", VARIANTS),
    Option("steps", integer(2), "of a run", 128, 64),
    Option("output_workers", many(integer(1, 64)), "processes that make text", (1,)),
    Option(
        "tokens_per_row",
        many(OptionType(_span, _is_span, "numbers in [1, 17], or spans like 2-5", "N")),
        "tokens that a step gives to a row, 2-5: drawn; default: 1",
    ),
)
_PEERS = (
    Option("against", many(name_of(PEERS)), f"any of {','.join(PEERS)}"),
    *(Option(f"{peer}_python", PROGRAM, "the interpreter of its environment") for peer in PEERS),
)


@dataclass(frozen=True, slots=True)
class OutputPathPlan:
    """What to measure. `pythons`: the interpreter of each peer."""

    batches: tuple[int, ...]
    variants: tuple[Variant, ...]
    steps: int
    output_workers: tuple[int, ...]
    tokens_per_row: tuple[tuple[int, int], ...]
    runs: int
    tokenizer: Path  # path of a tokenizer.json
    pythons: dict[Peer, str]


def add_options(parser: Parser) -> None:
    """The benchmark's options."""
    group = parser.add_argument_group("what is measured")
    add(group, _OPTIONS)
    group.add_argument(
        "--tokenizer",
        metavar="PATH",
        default=str(MODEL_PATH),
        help="a folder with a tokenizer.json, for SGLang with a model's config.json too; "
        "default: the demo model's",
    )
    add(parser.add_argument_group("peers (slipstream_lab/peers/README.md)"), _PEERS)
    add_common(parser, runs=5)
    parser.set_defaults(run=bench_output_path)


def checked(arguments: argparse.Namespace) -> OutputPathPlan:
    """Validate the options. Raises: BadRequestError."""
    check_common(arguments)
    values = fill_in(arguments, _OPTIONS)
    fill_in(arguments, _PEERS)
    given = Path(arguments.tokenizer)
    tokenizer = given / "tokenizer.json" if given.is_dir() else given
    if not tokenizer.is_file():
        allowed = "a tokenizer.json, or a folder with one"
        raise wrong_option("tokenizer", arguments.tokenizer, allowed)
    pythons = {
        peer: checked_python(peer, getattr(arguments, f"{peer}_python"))
        for peer in PEERS
        if peer in (arguments.against or ())
    }
    values["tokens_per_row"] = values["tokens_per_row"] or ((1, 1),)
    return OutputPathPlan(
        **values, runs=arguments.runs, tokenizer=tokenizer.absolute(), pythons=pythons
    )


def bench_output_path(arguments: argparse.Namespace) -> int:
    """Measure Slipstream, the floor and the peers in turns, and report."""
    plan = checked(arguments)
    tokenizer = Tokenizer.from_file(str(plan.tokenizer))
    workload = make_workload(tokenizer, max(plan.batches), prompt_len=_PROMPT_LEN, steps=plan.steps)
    setting = PathSetting(
        workload,
        detokenizers_of(tokenizer),
        tokenizer.get_vocab_size(with_added_tokens=True),
        measured_lap_ns(),
    )
    with tempfile.TemporaryDirectory(prefix="slipstream-peers-") as folder:
        file = Path(folder) / "workload.npz"
        workload.save(file, plan.variants)
        rows = with_ratios(median_rows(_measured(setting, plan, file), _KEY))
    rows = [row | _about(plan) for row in rows]
    print(_ABOUT, flush=True)
    print_rows(_of(rows, ENGINE), arguments, _COLUMNS)
    print("\n" + _ABOUT_FLOOR)
    print("\n".join(table(_of(rows, FLOOR), _FLOOR_COLUMNS)), flush=True)
    for peer in plan.pythons:
        theirs = [row for row in rows if str(row["engine"]).startswith(peer)]
        print("\n" + "\n".join(table(theirs)), flush=True)
    if plan.pythons:
        print("\n" + _ABOUT_PEERS)
        print("\n".join(table(list(_ratios(rows)))), flush=True)
    if arguments.json is not None:
        write_json(rows, arguments.json)
    if arguments.png is not None:
        _draw(rows, arguments.png)
    return 0


def _of(rows: Sequence[Row], engine: str) -> list[Row]:
    return [row for row in rows if row["engine"] == engine]


def with_ratios(rows: Sequence[Row]) -> list[Row]:
    """Slipstream's rows with `over_one_worker` and `over_one_token`, and a column `ratio_to_X` for
    each peer X measured on the same points.

    Reads by `async for` are compared with the peer's own `async for`; all others with the peer's
    deltas, which are Python objects throughout.
    """
    theirs = {
        (row["engine"], row["batch"], row["variant"], row["read"]): row["us_per_token"]
        for row in rows
        if row["engine"] != ENGINE
    }
    alone = {
        (row["batch"], row["variant"], row["read"]): float(row["us_per_token"] or 0)
        + float(row.get("wire_us") or 0)
        for row in rows
        if row["engine"] == ENGINE and row.get("workers", 1) == row.get("tokens", 1) == 1
    }
    names = [name for name in dict.fromkeys(name for name, *_ in theirs) if name != FLOOR]
    found: list[Row] = []
    for row in rows:
        if row["engine"] != ENGINE or not row["us_per_token"]:
            found.append(row)
            continue
        point, us = (row["batch"], row["variant"]), float(row["us_per_token"])
        more: Row = {}
        alone_us = alone.get((row["batch"], row["variant"], row["read"]))
        for column, ratio in (("workers", "over_one_worker"), ("tokens", "over_one_token")):
            if alone_us and row.get(column, 1) != 1:
                more[ratio] = round((us + float(row["wire_us"] or 0)) / alone_us, 3)
        read = "async_for" if row["read"] == "async_for" else "materialised"
        for name in names:
            their_us = theirs.get((name, *point, read))
            if their_us is not None:
                more[f"ratio_to_{name}"] = round(float(their_us) / us, 2)
        found.append(row | more)
    return found


def _ratios(rows: Sequence[Row]) -> Iterator[Row]:
    """The comparison's rows as they are printed."""
    for row in rows:
        ratios = {name: row[name] for name in row if name.startswith("ratio_to_")}
        if ratios:
            yield {name: row[name] for name in (*_KEY[1:], "us_per_token")} | ratios


def _measured(setting: PathSetting, plan: OutputPathPlan, workload: Path) -> list[Row]:
    """All runs of all points. Engines take turns, so that other load on the machine affects all."""
    for variant in plan.variants:  # warm-up: touching memory for the first time costs more
        measure(setting, max(plan.batches), variant, "materialised")
    loads = list(product(plan.batches, plan.variants))
    points = [
        (*load, read, number, tokens)
        for load in loads
        for read in READS
        for number, tokens in product(plan.output_workers, plan.tokens_per_row)
        if (number, tokens) == (1, (1, 1)) or read == "columns"
    ]
    rows: list[Row] = []
    for _ in range(plan.runs):
        for peer, python in plan.pythons.items():
            rows += [row | _ALONE for row in _of_peer(peer, python, plan, workload)]
        rows += in_rounds(1, points, lambda point: [measure(setting, *point)])
        for load in loads:
            rows += measure_floor(setting, *load)
    return rows


def _of_peer(peer: Peer, python: str, plan: OutputPathPlan, workload: Path) -> list[Row]:
    """One run of a peer."""
    return measure_output_path(
        peer,
        python,
        model=plan.tokenizer.parent,
        workload=workload,
        batches=plan.batches,
        variants=plan.variants,
        runs=1,
    )


def _about(plan: OutputPathPlan) -> Row:
    return {
        "benchmark": "output-path",
        "version": package_version(),
        "python": platform.python_version(),
        "tokenizer": _name_of(plan.tokenizer),
        "steps": plan.steps,
        "prompt_len": _PROMPT_LEN,
    }


def _draw(rows: Sequence[Row], file: str) -> None:
    """Chart a panel per variant, over the batches."""
    panels: dict[str, dict[str, list[tuple[float, float]]]] = {}
    for row in rows:
        is_usual = all(row.get(name, 1) in (1, None) for name in ("workers", "tokens"))
        if row["us_per_token"] and is_usual and row["read"] not in _NOT_DRAWN:
            name = _name(str(row["engine"]), str(row["read"]))
            point = (float(row["batch"] or 0), float(row["us_per_token"]))
            panels.setdefault(str(row["variant"]), {}).setdefault(name, []).append(point)
    lines_in_panels(
        file,
        panels,
        title="Output path: CPU per token, from sampled ids to deltas (floor: its bare messages)",
        x_label="requests at a time",
        y_label="CPU us per token",
    )


def _name(engine: str, read: str) -> str:
    if engine == ENGINE:
        return f"{engine}, {read}"
    return f"{engine}, {read}" if engine == FLOOR else engine.replace("_", " ")


def _name_of(tokenizer: Path) -> str:
    """The tokenizer's name for results kept in the repository, without machine-specific folders."""
    return "/".join(tokenizer.parts[-2:])
