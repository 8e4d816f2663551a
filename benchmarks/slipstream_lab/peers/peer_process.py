"""Runs a peer's program in the interpreter of the peer's environment.

A peer that cannot be measured is an error with its reason, never a missing row.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Literal, get_args

import msgspec

from slipstream.errors import SlipstreamError, wrong_option
from slipstream_bench.common.measures import Row
from slipstream_bench.common.options import OptionType
from slipstream_ipc.messages import Fault

Peer = Literal["vllm", "sglang"]
PEERS: tuple[Peer, ...] = get_args(Peer)
PROGRAM = OptionType(str, lambda name: shutil.which(name) is not None, "an executable", "PATH")
FOLDER = Path(__file__).resolve().parent

_TAIL_LINES = 12


def checked_python(peer: Peer, python: str | None) -> str:
    """The interpreter that measures the peer, from any folder. Raises: BadRequestError if none was
    given.
    """
    if python is None:
        allowed = f"the interpreter of an environment with {peer}; see {FOLDER / 'README.md'}"
        raise wrong_option(f"{peer}_python", "nothing", allowed)
    return os.path.abspath(python) if os.sep in python else python


def run_peer(peer: Peer, program: str, python: str, arguments: Sequence[str]) -> str:
    """The program's standard output. Raises: SlipstreamError if it fails."""
    # the peer's interpreter must not import this package
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(
        [python, str(FOLDER / program), *arguments],
        capture_output=True,
        text=True,
        errors="replace",
        env=environment,
        check=False,
    )
    if done.returncode:
        tail = "\n".join((done.stdout + done.stderr).splitlines()[-_TAIL_LINES:])
        why = f"{peer} could not be measured (exit code {done.returncode}):\n{tail}"
        raise SlipstreamError(Fault("engine", why))
    return done.stdout


def measure_output_path(
    peer: Peer,
    python: str,
    *,
    model: Path,
    workload: Path,
    batches: Sequence[int],
    variants: Sequence[str],
    runs: int,
) -> list[Row]:
    """The rows of a peer's output path, with the requests, variants and batches of this run.

    model: a folder with its tokenizer. workload: a file written by `Workload.save`, in a folder for
    the results. Raises: SlipstreamError.
    """
    rows = workload.with_name(f"{peer}.json")
    arguments = [
        *("--model", str(model)),
        *("--workload", str(workload)),
        *("--batches", ",".join(map(str, batches))),
        *("--variants", ",".join(variants)),
        *("--runs", str(runs)),
        *("--json", str(rows)),
    ]
    run_peer(peer, f"{peer}_output_path.py", python, arguments)
    return msgspec.json.decode(rows.read_bytes(), type=list[Row])
