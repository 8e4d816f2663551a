"""`slipstream bench compare engines`: one model on the same cores, served by several engines.

- One engine runs at a time. A round asks them in order and back again (A B C C B A), so that a slow
  quarter of an hour on the machine affects all of them.
- Every engine is asked by the same load generator, over HTTP; Slipstream by its Python client too.
  transformers has no server: its static batch is timed in its own process.
- Each start has a warm-up of the whole load, then one measured run per number of streams.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from tqdm import tqdm

from slipstream.cli.options.parser import Parser
from slipstream.errors import wrong_option
from slipstream_bench.common.measures import Row, cannot_measure, median_row
from slipstream_bench.common.options import Option, add, fill_in, integer, many
from slipstream_bench.common.provenance import package_version
from slipstream_bench.common.report import add_common, check_common, print_rows
from slipstream_lab.compare.serve_run import served_tokens_per_s
from slipstream_lab.peers.peer_process import FOLDER, PROGRAM
from slipstream_lab.peers.server_process import free_port, server_process

_COLUMNS = ("engine", "way", "streams", "tokens_per_s", "low", "high", "ours_over_theirs", "runs")
_ABOUT = """\
tokens_per_s: output tokens of all streams, from the first request sent to the last answer's end,
greedy, float32; medians, low and high of all turns. ours_over_theirs: Slipstream over HTTP against
this row."""
_OURS = ("slipstream", "http")
_SINGLE_REQUESTS = 4  # one after another, where one stream is measured
_OPTIONS = (
    Option("streams", many(integer(1)), "requests at a time", (64, 1)),
    Option("input_len", integer(1), "tokens of a prompt", 128, 16),
    Option("output_len", integer(1), "tokens of an answer", 128, 16),
    Option("threads", integer(1), "of the peers' models", os.cpu_count() or 1),
    Option("vllm_python", PROGRAM, "interpreter of an environment with vLLM", ""),
    Option(
        "llamacpp_python",
        PROGRAM,
        "interpreter of an environment with xllamacpp",
    ),
)


class EnginesPlan(NamedTuple):
    """What is measured. gguf: the same model for llama.cpp."""

    model: Path
    gguf: Path | None
    streams: tuple[int, ...]
    input_len: int
    output_len: int
    threads: int
    vllm_python: str | None
    llamacpp_python: str | None
    has_transformers: bool
    runs: int

    @property
    def max_model_len(self) -> int:
        """Prompt and answer, and some room that engines take for themselves."""
        return self.input_len + self.output_len + 64

    @property
    def engines(self) -> list[str]:
        """In the order of a round's first half."""
        names = ["slipstream"]
        names += ["vllm"] if self.vllm_python else []
        names += ["llama.cpp"] if self.llamacpp_python else []
        return names + (["transformers"] if self.has_transformers else [])


def add_options(parser: Parser) -> None:
    """The benchmark's options."""
    group = parser.add_argument_group("what is measured")
    group.add_argument("model", metavar="FOLDER", help="a model's, in float32")
    group.add_argument("--gguf", metavar="FILE", help="the same model for llama.cpp")
    group.add_argument("--transformers", action="store_true", help="measure its generate() too")
    add(group, _OPTIONS)
    add_common(parser, runs=2)
    parser.set_defaults(run=compare_engines)


def checked(arguments: argparse.Namespace) -> EnginesPlan:
    """Validate the options. Raises: BadRequestError."""
    check_common(arguments)
    values = fill_in(arguments, _OPTIONS)
    if not Path(arguments.model, "config.json").is_file():
        raise wrong_option("model", arguments.model, "a folder with a config.json")
    if values["llamacpp_python"] and not (arguments.gguf and Path(arguments.gguf).is_file()):
        raise wrong_option("gguf", arguments.gguf, "a file, with --llamacpp-python")
    return EnginesPlan(
        **values,
        model=Path(arguments.model),
        gguf=Path(arguments.gguf) if arguments.gguf else None,
        has_transformers=arguments.transformers,
        runs=arguments.runs,
    )


def compare_engines(arguments: argparse.Namespace) -> int:
    """Measure all engines in turns and report."""
    plan = checked(arguments)
    print(_ABOUT, flush=True)
    rows: list[Row] = []
    turns = [*plan.engines, *reversed(plan.engines)] * plan.runs
    for engine in tqdm(turns, unit="engine", disable=None, leave=False):
        rows += list(_ENGINES[engine](plan))
    print_rows(summaries(rows), arguments, _COLUMNS)
    return 0


def summaries(rows: list[Row]) -> list[Row]:
    """Median, low and high per engine, way and number of streams, beside ours over HTTP."""
    groups: dict[tuple[object, ...], list[Row]] = {}
    for row in rows:
        groups.setdefault((row["engine"], row["way"], row["streams"]), []).append(row)
    found = []
    for group in groups.values():
        rates = [float(row["tokens_per_s"] or 0) for row in group]
        found.append(
            median_row(group) | {"low": min(rates), "high": max(rates), "runs": len(group)}
        )
    ours = {
        row["streams"]: float(row["tokens_per_s"] or 0)
        for row in found
        if (row["engine"], row["way"]) == _OURS
    }
    for row in found:
        row["ours_over_theirs"] = round(ours[row["streams"]] / float(row["tokens_per_s"] or 0), 3)
    return found


def _slipstream(plan: EnginesPlan) -> Iterator[Row]:
    port = free_port()
    with tempfile.TemporaryDirectory(prefix="slipstream-engines-") as folder:
        command = [
            *(sys.executable, "-m", "slipstream.cli.main", "serve", str(plan.model)),
            *("--port", str(port), "--runtime-dir", folder, "--dtype", "float32"),
            *("--max-model-len", str(plan.max_model_len), "--max-num-seqs", str(max(plan.streams))),
            "--no-enable-prefix-caching",
        ]
        with server_process("slipstream serve", command, port, {}, path="/ready"):
            targets = {
                "http": ["--url", f"http://127.0.0.1:{port}"],
                "python": ["--address", f"ipc://{folder}/client.sock"],
            }
            yield from _measured(plan, "slipstream", targets)


def _vllm(plan: EnginesPlan) -> Iterator[Row]:
    port = free_port()
    command = [
        *(str(plan.vllm_python), "-m", "vllm.entrypoints.openai.api_server"),
        *("--model", str(plan.model), "--served-model-name", "model", "--dtype", "float32"),
        *("--host", "127.0.0.1", "--port", str(port), "--enforce-eager"),
        *("--max-model-len", str(plan.max_model_len), "--max-num-seqs", str(max(plan.streams))),
        *("--no-enable-prefix-caching", "--disable-uvicorn-access-log"),
    ]
    environment = {
        "HF_HUB_OFFLINE": "1",
        "VLLM_CPU_KVCACHE_SPACE": "2",
        "VLLM_CPU_OMP_THREADS_BIND": f"0-{plan.threads - 1}",
        "VLLM_LOGGING_LEVEL": "WARNING",
        "VLLM_NO_USAGE_STATS": "1",
    }
    with server_process("vLLM's server", command, port, environment):
        yield from _measured(plan, "vllm", {"http": ["--url", f"http://127.0.0.1:{port}"]})


def _llamacpp(plan: EnginesPlan) -> Iterator[Row]:
    port = free_port()
    sizes = (port, max(plan.streams), plan.max_model_len, plan.threads)
    program = str(FOLDER / "llamacpp_server.py")
    command = [str(plan.llamacpp_python), program, str(plan.gguf), *map(str, sizes)]
    with server_process("llama.cpp's server", command, port, {}):
        yield from _measured(plan, "llama.cpp", {"http": ["--url", f"http://127.0.0.1:{port}"]})


def _transformers(plan: EnginesPlan) -> Iterator[Row]:
    for streams in plan.streams:
        sizes = (streams, plan.input_len, plan.output_len, 1, plan.threads)
        program = str(FOLDER / "transformers_generate.py")
        command = [sys.executable, program, str(plan.model), *map(str, sizes)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            raise cannot_measure(f"transformers: {done.stderr.strip()[-2000:]}")
        rates = json.loads(done.stdout.splitlines()[-1])["tokens_per_s"]
        yield from (_row(plan, "transformers", "offline", streams, rate) for rate in rates)


_ENGINES = {
    "slipstream": _slipstream,
    "vllm": _vllm,
    "llama.cpp": _llamacpp,
    "transformers": _transformers,
}


def _measured(plan: EnginesPlan, engine: str, targets: dict[str, list[str]]) -> Iterator[Row]:
    """The rows of a server that runs: each number of streams, each way of asking."""
    for target in targets.values():
        _tokens_per_s(plan, target, plan.streams[0], seed=1)  # warm-up
    for streams in plan.streams:
        for way, target in targets.items():
            rate = _tokens_per_s(plan, target, streams, seed=2)
            yield _row(plan, engine, way, streams, rate)


def _tokens_per_s(plan: EnginesPlan, target: list[str], streams: int, *, seed: int) -> float:
    return served_tokens_per_s(
        target,
        num_requests=streams if streams > 1 else _SINGLE_REQUESTS,
        concurrency=streams,
        input_len=plan.input_len,
        output_len=plan.output_len,
        seed=seed,
    )


def _row(plan: EnginesPlan, engine: str, way: str, streams: int, tokens_per_s: float) -> Row:
    return {
        "benchmark": "engines",
        "version": package_version(),
        "model": plan.model.name,
        "engine": engine,
        "way": way,
        "streams": streams,
        "input_len": plan.input_len,
        "output_len": plan.output_len,
        "tokens_per_s": round(tokens_per_s, 1),
    }
