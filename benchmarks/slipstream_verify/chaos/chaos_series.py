"""Every kind of fault for several seeds: `python -m slipstream_verify.chaos.chaos_series`.

Each run of `slipstream bench chaos` is a row of one file, with its commit. A run whose row is good
is not run again, so a series may take several sittings, each on any commit. Options that are
unknown here are passed on to `slipstream bench chaos`.
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import msgspec
from msgspec import Struct

from slipstream_bench.common.provenance import commit
from slipstream_bench.common.report import Row, table, write_result
from slipstream_verify.chaos.chaos_report import ChaosResult

_OF_REPLICAS = "--kill worker,core,client,front,replica --stop replica --drain-replicas"
KINDS = {
    "all": "--kill worker,core,client,front",
    "worker": "--kill worker",
    "core": "--kill core",
    "client": "--kill client",
    "front": "--kill front",
    "hangs": "--kill worker,core --stop worker,core,front,client",
    "prompts": "--kill prompts,worker --stop prompts",
    "shortages": "--kill worker --limit-files worker,core,front --fill-disk",
    "tools": "--kill worker,core,client,front --answers any",
    "ranks": "--model slipstream-demo --tensor-parallel-size 2 "
    "--kill worker,core,client,front,rank --stop rank",
    "hybrid": "--hybrid --requests 250 --kill worker,core,client,front",
    "drafts": "--model slipstream-demo --kill worker,core,client,front "
    '--speculative-config {"method":"ngram","prompt_lookup_min":1}',
    "suffix": "--model slipstream-demo --kill worker,core,client,front "
    '--speculative-config {"method":"suffix"}',
    "replicas": f"--replicas 3 {_OF_REPLICAS}",
    "drafts_replicas": f"--replicas 3 {_OF_REPLICAS} --model slipstream-demo --requests 250 "
    '--speculative-config {"method":"suffix"}',
    "tools_replicas": f"--replicas 3 {_OF_REPLICAS} --answers any",
}


class ChaosRow(Struct, frozen=True, kw_only=True):
    """One run; or several of a kind, added up.

    commits: of the code. options: of the runs, besides those of their kind. combinations: the most
    that one run had. gap_p99_s: the highest of a run. bad: what a run found. answers: the
    format of those played. interrupted: the parts of answers that deaths fell into. counted: by
    cores, of tokens drafted, accepted and cached, and of states' snapshots loaded.
    """

    kind: str
    seeds: tuple[int, ...]
    commits: tuple[str, ...]
    options: str = ""
    requests: int = 0
    identical: int = 0
    http: int = 0
    http_identical: int = 0
    tokens: int = 0
    faults: int = 0
    combinations: int = 0
    lost: int = 0
    doubled: int = 0
    orphans: int = 0
    gap_p99_s: float | None = None
    seconds: float = 0.0
    bad: tuple[str, ...] = ()
    answers: str = ""
    interrupted: dict[str, int] = {}
    counted: dict[str, int] = {}


class ChaosSeries(Struct, frozen=True):
    """The runs so far."""

    rows: tuple[ChaosRow, ...] = ()

    def has(self, kind: str, seed: int) -> bool:
        """Whether this run was good."""
        return any(row.kind == kind and seed in row.seeds and not row.bad for row in self.rows)

    def put(self, row: ChaosRow) -> ChaosSeries:
        """With the row of one run, in the place of an earlier one of the same run."""
        same = (row.kind, row.seeds)
        rows = [*(each for each in self.rows if (each.kind, each.seeds) != same), row]
        kinds = list(KINDS)
        return ChaosSeries(tuple(sorted(rows, key=lambda row: (kinds.index(row.kind), row.seeds))))


def row_of(kind: str, result: ChaosResult, options: str = "") -> ChaosRow:
    """The row of one run."""
    return ChaosRow(
        kind=kind,
        seeds=(result.seed,),
        commits=(result.commit or "unknown",),
        options=options,
        requests=result.total,
        identical=result.identical,
        http=result.http_total,
        http_identical=result.http_identical,
        tokens=result.num_tokens,
        faults=sum(result.faults.values()),
        combinations=len(result.combinations),
        lost=result.lost,
        doubled=result.doubled,
        orphans=result.orphans,
        gap_p99_s=result.gap_p99_s,
        seconds=round(result.duration_s, 1),
        bad=() if result.is_good else tuple(_why(result)),
        answers=result.answers,
        interrupted=result.interrupted,
        counted=result.counted,
    )


def _why(result: ChaosResult) -> list[str]:
    found = [f"request {at}: {what}" for at, all_ in result.different.items() for what in all_]
    found += [f"left behind: {command}" for command in result.left]
    if result.unexplained_again:
        found.append(f"requested again without a double death: {result.unexplained_again}")
    if result.stopped is not None:
        found.append(f"the run was aborted: {result.stopped}")
    return found[-10:]


def lines_of(series: ChaosSeries) -> list[str]:
    """The sums of each kind, and what the bad runs found, as lines of text."""
    by_kind = {kind: [row for row in series.rows if row.kind == kind] for kind in KINDS}
    lines = table([_total(kind, rows) for kind, rows in by_kind.items() if rows])
    for row in series.rows:
        if row.bad:
            lines += ["", f"{row.kind} {row.seeds[0]}:", *(f"  {what}" for what in row.bad)]
    return lines


def _total(kind: str, rows: Sequence[ChaosRow]) -> Row:
    def num(name: str) -> int:
        return sum(getattr(row, name) for row in rows)

    gaps = [row.gap_p99_s for row in rows if row.gap_p99_s is not None]
    return {
        "kind": kind,
        "runs": sum(len(row.seeds) for row in rows),
        "good": sum(len(row.seeds) for row in rows if not row.bad),
        "requests": num("requests"),
        "identical": num("identical"),
        "http": num("http"),
        "http_identical": num("http_identical"),
        "tokens": num("tokens"),
        "faults": num("faults"),
        "combinations": max(row.combinations for row in rows),
        "lost": num("lost"),
        "doubled": num("doubled"),
        "orphans": num("orphans"),
        "gap_p99_s": max(gaps, default=None),
        "hours": sum(row.seconds for row in rows) / 3600,
    }


def run_chaos(kind: str, seed: int, options: Sequence[str], folder: Path) -> ChaosRow:
    """One run; its report, journals and log go to the folder."""
    file = folder / "result.json"
    words = [*KINDS[kind].split(), "--seed", str(seed), *options]
    files = ["--keep", str(folder), "--json", str(file)]
    command = [sys.executable, "-m", "slipstream", "bench", "chaos", *words, *files]
    with (folder / "report.txt").open("w") as report:
        code = subprocess.run(command, stdout=report, stderr=report, check=False).returncode
    if file.exists():
        result = msgspec.json.decode(file.read_bytes(), type=ChaosResult)
        return row_of(kind, result, " ".join(options))
    why = f"no result, exit code {code}"
    return ChaosRow(kind=kind, seeds=(seed,), commits=(commit() or "unknown",), bad=(why,))


def main(arguments: Sequence[str] | None = None) -> int:
    """Exit code 0 if every run is good."""
    parser = argparse.ArgumentParser(prog="scripts/chaos-seeds", description=__doc__)
    parser.add_argument("file", type=Path, help="the rows, as in benchmarks/results/chaos.json")
    parser.add_argument("--seeds", type=int, default=12, help="of each kind; default: 12")
    parser.add_argument(
        "--kinds",
        type=lambda names: names.split(","),
        default=list(KINDS),
        help=f"the kinds of runs, of {','.join(KINDS)}; default: all",
    )
    given, options = parser.parse_known_args(arguments)
    if unknown := set(given.kinds) - set(KINDS):
        parser.error(f"--kinds: unknown {','.join(sorted(unknown))}; known: {','.join(KINDS)}")
    file: Path = given.file
    series = ChaosSeries()
    if file.exists():
        series = msgspec.json.decode(file.read_bytes(), type=ChaosSeries)
    wanted = [(kind, seed) for seed in range(1, 1 + given.seeds) for kind in given.kinds]
    for kind, seed in wanted:
        if series.has(kind, seed):
            continue
        folder = Path(tempfile.mkdtemp(prefix=f"chaos-{kind}-{seed}-"))
        is_bad = False
        try:
            row = run_chaos(kind, seed, options, folder)
            is_bad = bool(row.bad)
        finally:
            if not is_bad:
                shutil.rmtree(folder)
        ended = f"FAILED, see {folder}" if is_bad else "good"
        print(f"{kind} {seed}: identical {row.identical} of {row.requests}, {ended}", flush=True)
        series = series.put(row)
        write_result(file, series)
    print("\n".join(lines_of(series)))
    return 0 if all(series.has(kind, seed) for kind, seed in wanted) else 1


if __name__ == "__main__":
    sys.exit(main())
