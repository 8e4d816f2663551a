"""Ranks that serve tiny models in lockstep: each schedules for itself, so no plan travels.

Run as a program it is one rank: it reads folders of models, a line each, and answers each with a
line of JSON: the outputs by variant, or the error.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tests.helpers.patience import PATIENCE_S

ROOT = Path(__file__).parents[2]


class LockstepRanks:
    """Processes that hold a slice each of one model after another."""

    def __init__(self, processes: list[subprocess.Popen[str]]) -> None:
        self._processes = processes

    def serve(self, folder: Path) -> list[dict[str, Any]]:
        """What each rank says of this model."""
        for process in self._processes:
            assert process.stdin is not None
            process.stdin.write(f"{folder}\n")
            process.stdin.flush()
        answers = []
        for process in self._processes:
            assert process.stdout is not None
            line = process.stdout.readline()
            assert line, f"a rank has ended: {process.wait(PATIENCE_S)}"
            answers.append(json.loads(line))
        return answers


@contextmanager
def lockstep_ranks(size: int) -> Iterator[LockstepRanks]:
    """`size` ranks, which end with the block."""
    meeting = os.memfd_create("meeting")
    processes = [
        subprocess.Popen(
            [sys.executable, __file__, str(index), str(size), str(meeting)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            pass_fds=(meeting,),
            env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        )
        for index in range(size)
    ]
    os.close(meeting)
    try:
        yield LockstepRanks(processes)
    finally:
        for process in processes:
            process.kill()
            process.communicate()


def main() -> None:
    import torch

    from slipstream_bench.models import tiny_models
    from slipstream_core.ranks.group import join_group
    from slipstream_core.runner.model.loader import load_model
    from slipstream_core.runner.sharding.rank import Rank

    index, size, meeting = map(int, sys.argv[1:])
    rank = Rank(index, size)
    torch.set_num_threads(1)
    join_group(rank, "cpu", meeting, PATIENCE_S)
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    for line in sys.stdin:
        said: dict[str, Any] = {}
        try:
            model = load_model(line.strip(), device="cpu", dtype="float32", rank=rank)
            said["weights"] = sum(each.nbytes for each in model.module.parameters())
            said["cache"] = sum(each.bytes_per_token(model.dtype) for each in model.geometry)
            for variant, served in zip(
                tiny_models.VARIANTS, tiny_models.serve(model, *tiny_models.VARIANTS), strict=True
            ):
                said[variant.name] = served.outputs
        except ValueError as error:
            said["error"] = str(error)
        answers.write(json.dumps(said) + "\n")
        answers.flush()


if __name__ == "__main__":
    main()
