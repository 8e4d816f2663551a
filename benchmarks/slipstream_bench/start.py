"""`slipstream bench start`: from a fresh process to the first text, and what an idle stack takes.

- A start is a command run anew: `generate`, `chat`, a program with `LLM`, and `serve` until /ready
  answers 200. Its wall time ends with the first byte of text (or of that answer); the CPU time is
  that of all its processes until then, and until the command has ended.
- An idle stack is one of `serve`, after `settle_s` without requests: each process's CPU time over
  `idle_s`, and its proportional share of memory (PSS, where a page that several processes map is
  divided among them).

CPU times hardly depend on what else runs on the machine; wall times do.
"""

from __future__ import annotations

import argparse
import contextlib
import http.client
import os
import resource
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from slipstream.cli.options.parser import Parser
from slipstream.errors import BadRequestError
from slipstream_bench.common.measures import Row, cannot_measure
from slipstream_bench.common.options import Option, add, fill_in, many, name_of, number
from slipstream_bench.common.process_census import descendants, process_cpu_s, tree_cpu_s
from slipstream_bench.common.provenance import package_version
from slipstream_bench.common.report import (
    add_common,
    check_common,
    in_rounds,
    median_rows,
    table,
    write_json,
)

WAYS = ("import", "generate", "chat", "llm", "serve")
_TEXT = "The with statement is used to"
_WITH_LLM = f"""\
from slipstream import LLM, SamplingParams
params = SamplingParams(max_tokens=64, temperature=0.0)
with LLM() as llm:
    print(llm.generate({_TEXT!r}, params)[0].outputs[0].text, flush=True)
"""
_SHORT = ("--max-tokens", "64", "--temperature", "0")
_STEP_S = 0.02  # between two looks at /ready
_MOST_S = 120.0
_END_S = 30.0
_WHOLE = "(all)"
_START_COLUMNS = ("way", "process", "wall_s", "cpu_s", "cpu_at_end_s", "pss_mib")
_IDLE_COLUMNS = ("way", "process", "cpu_percent", "pss_mib")
_OPTIONS = (
    Option("ways", many(name_of(WAYS)), "starts to measure", WAYS, ("import", "generate")),
    Option(
        "settle_s",
        number(lambda value: 0 <= value <= 600, "seconds in [0, 600]"),
        "time without requests before an idle stack is measured",
        40.0,
        2.0,
    ),
    Option(
        "idle_s",
        number(lambda value: 0 < value <= 600, "seconds in (0, 600]"),
        "how long an idle stack is measured",
        20.0,
        2.0,
    ),
)
_ABOUT = """\
wall_s: from the command's start to its first byte of text; of `serve`, to /ready. cpu_s: CPU time
of its processes until then. cpu_at_end_s: the same until the command has ended, start and end
included. pss_mib: memory at that moment, shared pages divided among the processes that map them."""


def _command(way: str) -> list[str]:
    slipstream = [sys.executable, "-m", "slipstream"]
    return {
        "import": [sys.executable, "-c", "import slipstream; print(slipstream.__name__)"],
        "generate": [*slipstream, "generate", _TEXT, "--new-stack", *_SHORT],
        "chat": [*slipstream, "chat", "What is a list?", "--new-stack", *_SHORT],
        "llm": [sys.executable, "-c", _WITH_LLM],
    }[way]


def start(way: str) -> list[Row]:
    """One start: a row for all of it, and one for each process that lives at the first text."""
    before_s = _cpu_of_ended_s()
    began = time.perf_counter()
    if way == "serve":
        with _served() as process:
            rows = _rows_at(way, process.pid, time.perf_counter() - began)
    else:
        process = subprocess.Popen(
            _command(way), stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, process_group=0
        )
        with _ended(process):
            assert process.stdout is not None
            if not process.stdout.read(1):
                raise cannot_measure(f"{way} ended without any text")
            wall_s = time.perf_counter() - began
            process.send_signal(signal.SIGSTOP)  # or it ends its stack meanwhile
            rows = _rows_at(way, process.pid, wall_s)
            process.send_signal(signal.SIGCONT)
            process.stdout.read()
    rows[0]["cpu_at_end_s"] = round(_cpu_of_ended_s() - before_s, 3)
    return rows


def idle(settle_s: float, idle_s: float) -> list[Row]:
    """What the processes of a stack take that has nothing to do."""
    with _served() as process:
        time.sleep(settle_s)
        pids = sorted(descendants(process.pid))
        before = {pid: _cpu_s(pid) for pid in pids}
        time.sleep(idle_s)
        used = {pid: _cpu_s(pid) - before[pid] for pid in pids}
        rows: list[Row] = [
            {
                "process": _name(pid),
                "cpu_percent": round(100 * used[pid] / idle_s, 4),
                "pss_mib": _pss_mib(pid),
            }
            for pid in pids
        ]
    whole: Row = {
        "process": _WHOLE,
        "cpu_percent": round(sum(float(row["cpu_percent"] or 0) for row in rows), 4),
        "pss_mib": round(sum(float(row["pss_mib"] or 0) for row in rows), 2),
    }
    return [_provenance("idle") | row for row in (whole, *rows)]


@contextlib.contextmanager
def _served() -> Iterator[subprocess.Popen[bytes]]:
    """A stack of `serve` that is ready."""
    with tempfile.TemporaryDirectory(prefix="slipstream-start-") as folder:
        uds = Path(folder) / "http.sock"
        command = [sys.executable, "-m", "slipstream", "serve", "--uds", str(uds)]
        began = time.perf_counter()
        process = subprocess.Popen(
            [*command, "--runtime-dir", str(Path(folder) / "run")],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            process_group=0,
        )
        with _ended(process):
            while not _is_ready(uds):
                if process.poll() is not None or time.perf_counter() > began + _MOST_S:
                    raise cannot_measure("serve did not become ready")
                time.sleep(_STEP_S)
            yield process


def _is_ready(uds: Path) -> bool:
    connection = _UnixConnection(uds)
    try:
        connection.request("GET", "/ready")
        return connection.getresponse().status == 200
    except OSError:
        return False
    finally:
        connection.close()


class _UnixConnection(http.client.HTTPConnection):
    def __init__(self, path: Path) -> None:
        super().__init__("localhost", timeout=5.0)
        self._path = path

    def connect(self) -> None:
        """Connect to the socket's path."""
        self.sock = socket.socket(socket.AF_UNIX)
        self.sock.connect(str(self._path))


@contextlib.contextmanager
def _ended(process: subprocess.Popen[bytes]) -> Iterator[None]:
    """End the command's processes with the block: at first by SIGTERM, so that they are reaped."""
    try:
        yield
    finally:
        if process.poll() is None:
            process.send_signal(signal.SIGTERM)
        try:
            process.wait(_END_S)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def _rows_at(way: str, root: int, wall_s: float) -> list[Row]:
    """The whole tree at this moment, and each of its processes."""
    cpu_s = tree_cpu_s(root)  # of ended processes, too
    rows: list[Row] = [
        {"process": _name(pid), "cpu_s": round(_cpu_s(pid), 3), "pss_mib": _pss_mib(pid)}
        for pid in sorted(descendants(root))
    ]
    whole: Row = {
        "process": _WHOLE,
        "wall_s": round(wall_s, 3),
        "cpu_s": round(cpu_s, 3),
        "pss_mib": round(sum(float(row["pss_mib"] or 0) for row in rows), 2),
    }
    return [_provenance(way) | row for row in (whole, *rows)]


def _provenance(way: str) -> Row:
    return {"benchmark": "start", "version": package_version(), "way": way}


def _name(pid: int) -> str:
    """The process's role in the stack; "command" for one without."""
    try:
        name = (Path("/proc") / str(pid) / "comm").read_text().strip()
    except OSError:
        return "ended"
    return name if ":" in name else "command"


def _cpu_s(pid: int) -> float:
    with contextlib.suppress(BadRequestError):
        return process_cpu_s(pid)
    return 0.0


def _cpu_of_ended_s() -> float:
    """CPU time of this process's ended children, with theirs."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def _pss_mib(pid: int) -> float:
    """The process's proportional share of memory; 0 if it has ended."""
    try:
        lines = (Path("/proc") / str(pid) / "smaps_rollup").read_text().splitlines()
    except OSError:
        return 0.0
    kib = next((int(line.split()[1]) for line in lines if line.startswith("Pss:")), 0)
    return round(kib / 1024, 2)


def add_options(parser: Parser) -> None:
    """The benchmark's options."""
    add(parser.add_argument_group("what is measured"), _OPTIONS)
    add_common(parser, runs=5)
    parser.set_defaults(run=bench_start)


def bench_start(arguments: argparse.Namespace) -> int:
    """Measure the starts, in turn, then an idle stack, and report."""
    check_common(arguments)
    fill_in(arguments, _OPTIONS)
    print(_ABOUT)
    starts = median_rows(in_rounds(arguments.runs, arguments.ways, start), ("way", "process"))
    print("\n".join(table(starts, _START_COLUMNS)), flush=True)
    print(f"\nidle for {arguments.idle_s:g} s, {arguments.settle_s:g} s after /ready")
    quiet = idle(arguments.settle_s, arguments.idle_s)
    print("\n".join(table(quiet, _IDLE_COLUMNS)), flush=True)
    if arguments.json is not None:
        write_json([*starts, *quiet], arguments.json)
    return 0
