"""A server's rate by `slipstream bench serve`, in a process of its own."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from slipstream_bench.common.measures import cannot_measure


def served_tokens_per_s(
    target: Sequence[str],
    *,
    num_requests: int,
    concurrency: int,
    input_len: int,
    output_len: int,
    seed: int = 0,
) -> float:
    """Output tokens per second of a server that runs, without a warm-up.

    target: the options that name it. Raises: EngineError if a request is not answered.
    """
    with tempfile.NamedTemporaryFile(suffix=".json") as file:
        command = [
            *(sys.executable, "-m", "slipstream.cli.main", "bench", "serve", *target),
            *("--num-requests", str(num_requests), "--concurrency", str(concurrency)),
            *("--input-len", str(input_len), "--output-len", str(output_len)),
            *("--vocab-size", "1000", "--seed", str(seed), "--warmup", "0", "--json", file.name),
        ]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            raise cannot_measure(f"bench serve {target[-1]}: {done.stderr.strip()[-2000:]}")
        row = json.loads(Path(file.name).read_text(encoding="utf-8"))[0]
    if row["completed_requests"] != num_requests:
        raise cannot_measure(
            f"{row['completed_requests']} of {num_requests} requests were answered"
        )
    return float(row["output_tokens_per_s"])
