"""Measures other engines' output paths with scripts/peers, each in its own environment.

- A peer gets the same requests, variants and batches, in the same run of the benchmark.
- A peer that cannot be measured is an error with its reason, never a missing row.
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
from slipstream_ipc.messages import Fault

Peer = Literal["vllm", "sglang"]
PEERS: tuple[Peer, ...] = get_args(Peer)

_TAIL_LINES = 12


def scripts_folder() -> Path:
    """The folder of the peers' scripts: in the repository, not in an installed package."""
    return Path(__file__).resolve().parents[3] / "scripts" / "peers"


def check_peer(peer: Peer, python: str | None) -> str:
    """The interpreter that measures the peer. Raises: BadRequestError if it cannot be measured."""
    option = f"{peer}_python"
    if python is None:
        allowed = f"the interpreter of an environment with {peer}; scripts/peers/README.md says how"
        raise wrong_option(option, "nothing", allowed)
    if shutil.which(python) is None:
        raise wrong_option(option, python, "an executable")
    if not _script(peer).is_file():
        raise wrong_option("against", peer, f"only in a checkout, which has {_script(peer)}")
    # the script runs in another folder
    return os.path.abspath(python) if os.sep in python else python


def measure_peer(
    peer: Peer,
    python: str,
    *,
    model: Path,
    workload: Path,
    batches: Sequence[int],
    variants: Sequence[str],
    runs: int,
) -> list[Row]:
    """The peer's rows.

    model: a folder with its tokenizer. workload: a file written by `Workload.save`.

    Raises: SlipstreamError.
    """
    told = workload.with_name(f"{peer}.json")
    command = [
        *(python, str(_script(peer))),
        *("--model", str(model)),
        *("--workload", str(workload)),
        *("--batches", ",".join(map(str, batches))),
        *("--variants", ",".join(variants)),
        *("--runs", str(runs)),
        *("--json", str(told)),
    ]
    # the peer's interpreter must not import this package
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        cwd=workload.parent,
        env=environment,
        check=False,
    )
    if done.returncode or not told.is_file():
        tail = "\n".join(done.stdout.splitlines()[-_TAIL_LINES:])
        why = f"{peer} could not be measured (exit code {done.returncode}):\n{tail}"
        raise SlipstreamError(Fault("engine", why))
    return msgspec.json.decode(told.read_bytes(), type=list[Row])


def _script(peer: Peer) -> Path:
    return scripts_folder() / f"{peer}_output_path.py"
