"""Runs the sections of a part, each in its own process, and writes their rows. The exit code is 1
if a check or a section failed, 0 otherwise.

- This process never uses the card, so nothing that a section does to the card can affect it.
- The files are written as rows arrive: a run that is ended by its caller keeps what it found.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from slipstream_bench.common.measures import Row
from slipstream_bench.common.report import table
from slipstream_verify.gpu_check.gpu_report import (
    GpuReport,
    headline,
    read_rows,
    say,
    write_files,
)
from slipstream_verify.gpu_check.setting import GRACE_S, NAMED_ONLY, PARTS, Section

_CARDS = ("H100", "H200")
_WRITE_S = 1.0  # interval of writing new rows
_KILLED_S = 10.0  # at most, until a process that is killed has ended
# Nothing is downloaded, so no library needs to wait for a network timeout.
_QUIET = {
    "HF_HUB_OFFLINE": "1",
    "HF_HUB_DISABLE_PROGRESS_BARS": "1",
    "TRANSFORMERS_VERBOSITY": "error",
    "TOKENIZERS_PARALLELISM": "false",
}
# As a core has it unless it is set (`runner.factory`): torch reads it when it first uses a card,
# which sections do before they load a runner.
_AS_SERVED = {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}


@dataclass(frozen=True, slots=True)
class _SectionRun:
    """The run of one part."""

    part: str
    device: str
    is_quick: bool
    folder: Path  # removed after the run
    out: Path
    tensor_parallel_size: int
    began: datetime
    started_s: float
    written: set[Path] = field(default_factory=set)  # under `out`

    @property
    def rows_path(self) -> Path:
        return self.folder / "rows.jsonl"


def main(argv: Sequence[str] | None = None) -> int:
    """Check the card; returns the exit code."""
    arguments = _parser().parse_args(argv)
    parts = arguments.parts or [part for part in PARTS if part not in NAMED_ONLY]
    if unknown := sorted(set(parts) - set(PARTS)):
        _parser().error(f"no part {unknown[0]!r}; there are {', '.join(PARTS)}")
    if arguments.predict:
        return _predict(arguments.card)
    known = {section.name for part in parts for section in PARTS[part]}
    if unknown := sorted(set(arguments.sections or known) - known):
        _parser().error(f"no section {unknown[0]!r}; there are {', '.join(sorted(known))}")
    before = signal.signal(signal.SIGTERM, _end)
    try:
        return max([_run_part(part, arguments) for part in parts])
    finally:
        signal.signal(signal.SIGTERM, before)


def _end(_number: int, _frame: Any) -> None:
    raise SystemExit(128 + signal.SIGTERM)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="gpu-check", description="Check exactness and speed on an NVIDIA card."
    )
    parser.add_argument(
        "parts",
        nargs="*",
        metavar="PART",
        help=f"of {', '.join(PARTS)}; default: all but {' and '.join(NAMED_ONLY)}",
    )
    parser.add_argument(
        "--sections", nargs="+", metavar="NAME", help="only these sections of the parts"
    )
    parser.add_argument(
        "--tensor-parallel-size",
        type=int,
        choices=range(2, 65),
        metavar="N",
        default=2,
        help="ranks beside one, of the part about them; default: %(default)s",
    )
    parser.add_argument("--quick", action="store_true", help="small models and few runs")
    parser.add_argument("--dry-run", action="store_true", help="--quick, on the CPU")
    parser.add_argument(
        "--predict",
        action="store_true",
        help="print how long steps should take on --card, by counts, and run nothing",
    )
    parser.add_argument(
        "--card", choices=_CARDS, default=_CARDS[0], help="of --predict; default: %(default)s"
    )
    parser.add_argument(
        "--out",
        type=Path,
        default=Path("benchmarks/gpu"),
        help="folder of the result files; default: %(default)s",
    )
    return parser


def _predict(card: str) -> int:
    """Print the prediction for a card; needs none."""
    from slipstream_verify.gpu_check.prediction import CARDS, predicted_rows  # with torch

    [found] = [each for each in CARDS if each.name == card]
    sys.stdout.write("\n".join((*table(predicted_rows(found)), "")))
    return 0


def _run_part(part: str, arguments: argparse.Namespace) -> int:
    device = "cpu" if arguments.dry_run else "cuda"
    names = arguments.sections or [it.name for it in PARTS[part]]
    # results need the environment that they were measured in
    wanted = [it for it in PARTS[part] if it.name in ("environment", *names)]
    with tempfile.TemporaryDirectory(prefix="gpu-check-") as folder:
        run = _SectionRun(
            part,
            device,
            arguments.dry_run or arguments.quick,
            Path(folder),
            arguments.out,
            arguments.tensor_parallel_size,
            datetime.now(UTC),
            time.monotonic(),
        )
        _run_sections(run, wanted)
        rows = read_rows(run.rows_path)
        paths = _write(run, rows)
    for row in headline(rows):
        goal = row["goal_share"]
        of_goal = "" if goal is None else f" (goal {goal:g})"
        share = f"{row['share_of_bound']:.3f} of the bound{of_goal}"
        say(run.started_s, f"{row['section']}: {row['case']}: {share}")
    failures = [row for row in rows if row["ok"] is False]
    for name, found in (
        ("SKIPPED", [row for row in rows if "skipped" in row]),
        ("BELOW ITS GOAL", [row for row in rows if row.get("meets_goal") is False]),
        ("FAILED", failures),
    ):
        for row in found:
            say(run.started_s, f"{name}: {row['section']}: {row['case']}")
    say(run.started_s, f"{len(rows)} rows, {len(failures)} failures: {paths[0]}, {paths[1]}")
    return 1 if failures else 0


def _run_sections(run: _SectionRun, sections: Sequence[Section]) -> None:
    """Run the sections; on the CPU all in one process, which imports everything only once."""
    together = [list(sections)] if run.device == "cpu" else [[it] for it in sections]
    # a dry run must also pass on a busy machine
    stretched = 10 if run.device == "cpu" else 1
    seconds = 0
    for group in together:
        seconds += stretched * sum(section.seconds for section in group)
        _run_group(run, group, run.started_s + seconds)


def _run_group(run: _SectionRun, sections: Sequence[Section], deadline_s: float) -> None:
    """Run sections in one process; a crash or timeout becomes a row."""
    names = [section.name for section in sections]
    command = [
        sys.executable,
        "-u",
        "-m",
        "slipstream_verify.gpu_check.section_process",
        run.part,
        *names,
    ]
    command += ["--device", run.device, "--rows", str(run.rows_path), "--folder", str(run.folder)]
    command += ["--started-s", str(run.started_s), "--deadline-s", str(deadline_s)]
    command += ["--tensor-parallel-size", str(run.tensor_parallel_size)]
    if run.is_quick:
        command.append("--quick")
    say(run.started_s, f"{run.part}: {', '.join(names)}:")
    process = subprocess.Popen(command, env=_environment(run), process_group=0)
    try:
        code = _wait(run, process, deadline_s + GRACE_S)
        why = f"its process ended with code {code}" if code else ""
    except subprocess.TimeoutExpired:
        why = "its process had to be killed: out of time"
    finally:
        _kill_group(process)
        _write_known(run)
    if why:
        name = max(names, key=lambda name: (_has_rows(run.rows_path, name), names.index(name)))
        GpuReport(name, run.rows_path, run.started_s).add("process", False, error=why)


def _environment(run: _SectionRun) -> dict[str, str]:
    """Of a section's process. On a card's machine nothing is left in the user's cache."""
    environment = {**_AS_SERVED, **os.environ, **_QUIET}
    if run.device != "cpu":
        environment["XDG_CACHE_HOME"] = str(run.folder / "cache")
    return environment


def _wait(run: _SectionRun, process: subprocess.Popen[bytes], until_s: float) -> int:
    """Wait for the process and write its rows meanwhile; returns its exit code. Raises
    TimeoutExpired.
    """
    num_written = 0
    while True:
        left_s = until_s - time.monotonic()
        try:
            return process.wait(max(0.0, min(_WRITE_S, left_s)))
        except subprocess.TimeoutExpired:
            if left_s <= _WRITE_S:
                raise
        num_written = _write_known(run, num_written)


def _has_rows(path: Path, section: str) -> bool:
    return any(row["section"] == section for row in read_rows(path))


def _kill_group(process: subprocess.Popen[bytes]) -> None:
    """Kill a section's process and everything it started."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    # not for ever: a signal that raised amid `wait` may have left its lock taken
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(_KILLED_S)


def _write_known(run: _SectionRun, num_written: int = 0) -> int:
    """Write the files if there are new rows.

    Returns the number of rows written so far.
    """
    rows = read_rows(run.rows_path)
    if len(rows) > num_written:
        _write(run, rows)
        return len(rows)
    return num_written


def _write(run: _SectionRun, rows: list[Row]) -> tuple[Path, Path]:
    """Write the files, which have the device's name until some row has the card's, and the minute
    of the run, so that a later run overwrites none.
    """
    card = next((row["card"] for row in rows if "card" in row), run.device)
    slug = re.sub(r"[^a-z0-9]+", "-", str(card).lower()).strip("-")
    quick = "-quick" if run.is_quick else ""
    name = f"gpu-check-{run.part}-{run.began:%Y-%m-%d-%H%M}-{slug}{quick}"
    paths = write_files(run.out, name, rows)
    for before in run.written.difference(paths):
        before.unlink(missing_ok=True)
    run.written.clear()
    run.written.update(paths)
    return paths


if __name__ == "__main__":
    raise SystemExit(main())
