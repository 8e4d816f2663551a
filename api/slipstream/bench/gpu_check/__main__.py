"""Runs the parts, each in a process of its own, and writes down what they found.

Owns: the order, the time that each part has, the files' names, the exit code: 0, or 1 where
anything that is judged is wrong, or a part failed. Does not know: what the parts do.

It never touches the card itself, so nothing that a part does to the card can reach it.
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
from datetime import UTC, datetime
from pathlib import Path

from slipstream.bench.gpu_check.report import Report, read_rows, say, write_files
from slipstream.bench.gpu_check.setting import PARTS
from slipstream.bench.measures import Row

# What each part may begin something in, seconds; together they stay under five minutes.
_SECONDS = {"environment": 20, "exactness": 90, "sampling": 20, "throughput": 60, "overlap": 60}
# Nothing is fetched, so no library need wait until it finds that there is no network.
_QUIET = {
    "HF_HUB_OFFLINE": "1",
    "HF_HUB_DISABLE_PROGRESS_BARS": "1",
    "TRANSFORMERS_VERBOSITY": "error",
    "TOKENIZERS_PARALLELISM": "false",
}
_GRACE_S = 30  # to end what was begun; then the part's process is killed


def main(argv: Sequence[str] | None = None) -> int:
    """Check the card."""
    arguments = _parser().parse_args(argv)
    started_s = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="gpu-check-") as folder:
        rows_path = Path(folder, "rows.jsonl")
        # One process for all where there is no card to lose: it imports everything only once.
        is_together = arguments.device == "cpu"
        for parts in [arguments.parts] if is_together else [[part] for part in arguments.parts]:
            _run(parts, arguments, rows_path, Path(folder), started_s)
            _write(arguments, read_rows(rows_path))
        rows = read_rows(rows_path)
    paths = _write(arguments, rows)
    failures = [row for row in rows if row["ok"] is False]
    for row in failures:
        say(started_s, f"FAILED: {row['part']}: {row['case']}")
    say(started_s, f"{len(rows)} rows, {len(failures)} failures: {paths[0]}, {paths[1]}")
    return 1 if failures else 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="gpu-check", description=__doc__)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="default: cuda")
    parser.add_argument("--quick", action="store_true", help="small models and few runs")
    parser.add_argument("--out", type=Path, default=Path("benchmarks"), help="for the two files")
    parser.add_argument(
        "--parts",
        nargs="+",
        choices=PARTS,
        default=PARTS,
        metavar="PART",
        help=f"of {', '.join(PARTS)}; default: all",
    )
    return parser


def _run(
    parts: Sequence[str],
    arguments: argparse.Namespace,
    rows_path: Path,
    folder: Path,
    started_s: float,
) -> None:
    """Run parts in one process; what it does not survive is told by a row."""
    seconds = max(_SECONDS[part] for part in parts)
    command = [sys.executable, "-u", "-m", "slipstream.bench.gpu_check.part", *parts]
    command += ["--device", arguments.device, "--rows", str(rows_path), "--folder", str(folder)]
    command += ["--started-s", str(started_s), "--seconds", str(seconds)]
    if arguments.quick:
        command.append("--quick")
    say(started_s, f"{', '.join(parts)}:")
    process = subprocess.Popen(command, env={**os.environ, **_QUIET}, start_new_session=True)
    try:
        code = process.wait(sum(_SECONDS[part] for part in parts) + _GRACE_S)
        why = f"its process ended with code {code}" if code else ""
    except subprocess.TimeoutExpired:
        why = "its process had to be killed: out of time"
    finally:
        _kill_group(process)
    if why:
        part = max(parts, key=lambda part: (_has_rows(rows_path, part), parts.index(part)))
        Report(part, rows_path, started_s).add("process", False, error=why)


def _has_rows(path: Path, part: str) -> bool:
    return any(row["part"] == part for row in read_rows(path))


def _kill_group(process: subprocess.Popen[bytes]) -> None:
    """End a part, and whatever it started and left behind."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def _write(arguments: argparse.Namespace, rows: list[Row]) -> tuple[Path, Path]:
    card = next((row["card"] for row in rows if "card" in row), arguments.device)
    slug = re.sub(r"[^a-z0-9]+", "-", str(card).lower()).strip("-")
    date = datetime.now(UTC).date().isoformat()
    quick = "-quick" if arguments.quick else ""
    return write_files(arguments.out, f"gpu-check-{date}-{slug}{quick}", rows)


if __name__ == "__main__":
    raise SystemExit(main())
