"""Prints the tables of docs/benchmarks.md that are about the host, as Markdown, from the rows that
`scripts/host-tables FOLDER` has written:

    python -m slipstream_lab.host_tables FOLDER

Files that are missing are left out.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from slipstream_bench.common.measures import Row
from slipstream_bench.common.report import markdown_of

Lines = list[list[str]]

_ENGINE, _FLOOR = "slipstream", "floor"
_VARIANTS = ("plain", "stop2", "logprobs5")


def main() -> int:
    """Print the tables of the folder named on the command line; exit code 2 without one."""
    if len(sys.argv) != 2:
        print((__doc__ or "").strip(), file=sys.stderr)
        return 2
    for name, tables in _TABLES.items():
        file = Path(sys.argv[1]) / f"{name}.json"
        if file.is_file():
            rows: list[Row] = json.loads(file.read_text(encoding="utf-8"))
            for title, lines in tables(rows):
                print(f"### {title}\n")
                print("\n".join(markdown_of(lines)) + "\n")
    return 0


def output_path(rows: Sequence[Row]) -> Iterator[tuple[str, Lines]]:
    """CPU per token of all engines, and how many times ours the others take."""
    us = {
        (row["engine"], row["read"], row["batch"], row["variant"]): float(row["us_per_token"] or 0)
        for row in rows
    }
    lanes = [
        ("columns", _ENGINE, "columns"),
        ("everything read", _ENGINE, "materialised"),
        ("floor, Unix socket", _FLOOR, "unix"),
        ("floor, ZeroMQ", _FLOOR, "zeromq"),
        ("vLLM", "vllm", "materialised"),
        ("vLLM without statistics", "vllm_without_stats", "materialised"),
    ]
    batches = _in_order(rows, "batch")
    lines = [["streams", *(name for name, *_ in lanes)]]
    for batch in batches:
        cells = [
            ", ".join(_short(us.get((engine, read, batch, one))) for one in _VARIANTS)
            for _, engine, read in lanes
        ]
        lines.append([f"{batch:,}", *cells])
    yield "CPU µs a token: plain, 2 stop strings, top-5", lines
    names = ("over_floor", "ratio_to_vllm", "ratio_to_vllm_without_stats")
    lines = [
        ["streams", "read", "over the floor", "vLLM over ours", "without statistics over ours"]
    ]
    for batch in batches:
        for read in ("columns", "materialised"):
            found = {
                row["variant"]: row
                for row in rows
                if (row["engine"], row["read"], row["batch"]) == (_ENGINE, read, batch)
            }
            cells = [
                ", ".join(_short(found.get(one, {}).get(name)) for one in _VARIANTS)
                for name in names
            ]
            lines.append([f"{batch:,}", read, *cells])
    yield "Ratios: plain, 2 stop strings, top-5", lines


def latency(rows: Sequence[Row]) -> Iterator[tuple[str, Lines]]:
    """From the id on the host to the reader."""
    lines = [["streams", "reader", "p50 ms", "p99 ms", "tokens a delta"]]
    for row in rows:
        spans = [float(row[f"from_host_{one}_us"] or 0) / 1e3 for one in ("p50", "p99")]
        cells = [_short(value) for value in (*spans, row["tokens_per_delta"])]
        lines.append([str(row["batch"]), str(row["reader"]), *cells])
    yield "From an id on the host to its reader, 5 ms steps", lines


def stops(rows: Sequence[Row]) -> Iterator[tuple[str, Lines]]:
    """Steps computed behind a stop."""
    names = ("new_per_step", "overrun_p50_steps", "overrun_p99_steps", "efficiency")
    lines = [["stop strings", "new requests a step", "p50 steps", "p99 steps", "efficiency"]]
    lines += [[str(row["stop_strings"]), *(_short(row[name]) for name in names)] for row in rows]
    yield "What a stop costs, 1,024 streams, 5 ms steps", lines


def overlap(rows: Sequence[Row]) -> Iterator[tuple[str, Lines]]:
    """The share of the device's bound."""
    lines = [["streams", "requests", "reader", "% of the device", "CPU µs: core, worker, client"]]
    for row in rows:
        parts = ("engine", "worker", "client")
        cpu = ", ".join(_short(row.get(f"{part}_cpu_us_per_token")) for part in parts)
        share = f"{100 * float(row['efficiency'] or 0):.1f}"
        lines.append([str(row["batch"]), str(row["variant"]), str(row["read"]), share, cpu])
    yield "Overlap, 5 ms steps", lines


def ceiling(rows: Sequence[Row]) -> Iterator[tuple[str, Lines]]:
    """Tokens per second, and per second of CPU."""
    columns = {
        "tokens/s": "tokens_per_s",
        "per CPU second": "tokens_per_core_s",
        "fronts alone": "front_tokens_per_core_s",
        "workers alone": "worker_tokens_per_core_s",
        "core alone": "core_tokens_per_core_s",
        "over vLLM": "ratio_to_vllm",
        "without the cores": "text_ratio_to_vllm",
        "tokens an event": "tokens_per_event",
    }
    lines = [["engine", "streams", "fronts", "workers", *columns]]
    for row in rows:
        point = [str(row[name]) for name in ("engine", "streams", "fronts", "workers")]
        lines.append([*point, *(_short(row.get(name)) for name in columns.values())])
    yield "A device of 0 ms", lines


def http_overhead(rows: Sequence[Row]) -> Iterator[tuple[str, Lines]]:
    """Ways of asking the same."""
    columns = {
        "tokens/s": "output_tokens_per_s",
        "over Python": "over_python",
        "over whole answers": "over_whole",
        "first run over later": "first_over_later",
        "tokens an event": "tokens_per_chunk",
        "TTFT p99, ms": "ttft_p99_ms",
        "client's cores": "client_cores",
    }
    lines = [["way", *columns]]
    lines += [
        [str(row["way"]), *(_short(row.get(name)) for name in columns.values())] for row in rows
    ]
    yield "{model}, {concurrency} at a time".format_map(rows[0]), lines


def start(rows: Sequence[Row]) -> Iterator[tuple[str, Lines]]:
    """From a fresh process to the first text, and an idle stack."""
    names = ("wall_s", "cpu_s", "cpu_at_end_s", "cpu_percent", "pss_mib")
    lines = [["way", "process", "s", "CPU s", "CPU s at the end", "% of a core, idle", "PSS MiB"]]
    for row in rows:
        cells = [_short(row.get(name)) for name in names]
        lines.append([str(row["way"]), str(row["process"]), *cells])
    yield "Starts, and an idle stack", lines


def front(rows: Sequence[Row]) -> Iterator[tuple[str, Lines]]:
    """A streamed event."""
    names = ("front_cpu_us_per_event", "bare_cpu_us_per_event", "front_over_bare")
    lines = [["", "streams", "front µs", "bare µs", "ratio", "tokens an event"]]
    for row in rows:
        cells = [_short(row[name]) for name in (*names, "tokens_per_event")]
        lines.append([str(row["variant"]), str(row["streams"]), *cells])
    yield "The HTTP front, per event", lines


_TABLES: dict[str, Callable[[Sequence[Row]], Iterator[tuple[str, Lines]]]] = {
    "output_path": output_path,
    "latency": latency,
    "stops": stops,
    "overlap": overlap,
    "ceiling": ceiling,
    "http_s": http_overhead,
    "http_1024": http_overhead,
    "start": start,
    "front": front,
}


def _in_order(rows: Sequence[Row], name: str) -> list[int]:
    return list(dict.fromkeys(int(row[name] or 0) for row in rows))


def _short(value: str | float | None) -> str:
    if value is None:
        return "-"
    number = float(value)
    if number >= 100:
        return f"{number:,.0f}"
    return f"{number:.1f}" if number >= 10 else f"{number:.2f}"


if __name__ == "__main__":
    sys.exit(main())
