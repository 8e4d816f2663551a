"""Many runs of chaos as one table: `python -m slipstream_bench.chaos.chaos_summary FOLDER`.

Reads the complete results of a folder (`KIND-SEED.json`, as scripts/chaos-seeds names them). `--has
FILE` tells by its exit code whether a complete result exists, so that a series of runs can resume.
`--json FILE` writes the rows, and every deviation that a run found.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec
from msgspec import Struct

from slipstream_bench.chaos.chaos_report import ChaosResult
from slipstream_bench.common.report import Row, table, write_result

_decode = msgspec.json.Decoder(ChaosResult).decode


class Summary(Struct, frozen=True):
    """rows: one per kind. bad: the reasons, by the name of the run that is not good."""

    commits: list[str]
    rows: list[Row]
    bad: dict[str, list[str]]


def read_result(path: Path) -> ChaosResult | None:
    """A run's result; None if it is missing or incomplete."""
    try:
        return _decode(path.read_bytes())
    except (OSError, msgspec.DecodeError):
        return None


def summarise(results: Mapping[str, ChaosResult]) -> Summary:
    """The rows of all runs. results: by `KIND-SEED`."""
    kinds: dict[str, list[ChaosResult]] = {}
    for name, result in sorted(results.items(), key=lambda each: _sort_key(each[0])):
        kinds.setdefault(_kind(name), []).append(result)
    return Summary(
        sorted({result.commit or "unknown" for result in results.values()}),
        [_row(kind, each) for kind, each in kinds.items()],
        {name: _why(result) for name, result in results.items() if not result.is_good},
    )


def _kind(name: str) -> str:
    return name.rpartition("-")[0]


def _sort_key(name: str) -> tuple[str, int]:
    kind, _, seed = name.rpartition("-")
    return kind, int(seed)


def _row(kind: str, results: Sequence[ChaosResult]) -> Row:
    gaps = [each.gap_p99_s for each in results if each.gap_p99_s is not None]
    return {
        "kind": kind,
        "runs": len(results),
        "good": sum(each.is_good for each in results),
        "requests": sum(each.total for each in results),
        "identical": sum(each.identical for each in results),
        "http": sum(each.http_total for each in results),
        "http_identical": sum(each.http_identical for each in results),
        "tokens": sum(each.num_tokens for each in results),
        "blows": sum(sum(each.faults.values()) for each in results),
        "combinations": len({name for each in results for name in each.combinations}),
        "lost": sum(each.lost for each in results),
        "doubled": sum(each.doubled for each in results),
        "orphans": sum(each.orphans for each in results),
        "gap_p99_max_s": max(gaps, default=None),
        "hours": round(sum(each.duration_s for each in results) / 3600, 2),
    }


def _why(result: ChaosResult) -> list[str]:
    found = [f"request {at}: {what}" for at, all_ in result.different.items() for what in all_]
    found += [f"left behind: {command}" for command in result.left]
    if result.unexplained_again:
        found.append(f"requested again without a double death: {result.unexplained_again}")
    if result.stopped is not None:
        found.append(f"the run was aborted: {result.stopped}")
    return found


def lines_of(summary: Summary) -> list[str]:
    """The summary as lines of text."""
    lines = [f"commit {', '.join(summary.commits) or '-'}", "", *table(summary.rows)]
    for name, why in summary.bad.items():
        lines += ["", f"{name}:", *(f"  {what}" for what in why[:10])]
    return lines


def main(arguments: Sequence[str] | None = None) -> int:
    """Exit code 0 if every run is good, or if `--has` finds a result."""
    parser = argparse.ArgumentParser(prog="chaos summary", description=__doc__)
    parser.add_argument("folder", nargs="?", type=Path)
    parser.add_argument("--has", type=Path, metavar="FILE")
    parser.add_argument("--json", type=Path, metavar="FILE")
    given = parser.parse_args(arguments)
    if given.has is not None:
        return 0 if read_result(given.has) is not None else 1
    if given.folder is None:
        parser.error("a folder of results, or --has FILE")
    found = {path.stem: read_result(path) for path in given.folder.glob("*-*.json")}
    results = {
        name: result
        for name, result in found.items()
        if result is not None and name.rpartition("-")[2].isdigit()
    }
    summary = summarise(results)
    print("\n".join(lines_of(summary)))
    write_result(given.json, summary)
    return 0 if results and not summary.bad else 1


if __name__ == "__main__":
    sys.exit(main())
