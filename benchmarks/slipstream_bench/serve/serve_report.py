"""Formats a row of `bench serve` as the table that the field's reports have."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from slipstream_bench.common.measures import FAILED, Row, percentile_name

_SPREADS = (
    ("TTFT, to the first chunk", "ttft", "ms"),
    ("TPOT, a further token", "tpot", "ms"),
    ("ITL, between chunks", "itl", "ms"),
    ("E2E, to the end", "e2e", "s"),
)
_COUNTED = {
    "tokens": "tokens were seen one by one",
    "usage": "tokens as the server counts them (usage)",
    "requested": "tokens as asked for (the server sends no usage)",
    "chunks": "a chunk taken for a token (no usage, ended early)",
}


def report(row: Row, percentiles: Sequence[float], problems: Mapping[str, str]) -> list[str]:
    """The lines of the report. problems: the message of the first failure of each kind."""
    columns = ["mean", "median", *map(percentile_name, percentiles)]
    lines = [
        "{model} at {target}".format_map(row),
        _load(row),
        _line("duration", row["duration_s"], "s"),
        _line("requests", row["requests_per_s"], "/s"),
        _line("output tokens", row["output_tokens_per_s"], "/s"),
        _line("total tokens", row["total_tokens_per_s"], "/s"),
        _line("", *columns, ""),
        *(
            _line(meaning, *(row[f"{name}_{column}_{unit}"] for column in columns), unit)
            for meaning, name, unit in _SPREADS
        ),
        _line("chunks per token", row["chunks_per_token"], ""),
        *(
            _line(
                f"{side} CPU",
                f"{per_token:.2f}",
                f"us/token, {row[f'{side}_cpu_percent']} % of a core",
            )
            for side in ("client", "server")
            if (per_token := row.get(f"{side}_cpu_us_per_token")) is not None
        ),
    ]
    if (counted := row["tokens_counted_by"]) is not None:
        lines.append("; ".join(_COUNTED[one] for one in str(counted).split("+")))
    if row[f"{FAILED}requests"]:
        lines.append(f"failed requests, in none of the numbers: {row[f'{FAILED}requests']}")
    for name, number in row.items():
        if name.startswith(FAILED) and name != f"{FAILED}requests":
            reason = name.removeprefix(FAILED)
            said = f"; the first: {problems[reason][:200]}" if problems.get(reason) else ""
            lines.append(f"  {reason}: {number}{said}")
    return lines


def _load(row: Row) -> str:
    rate, places = row["request_rate"], row["concurrency"]
    parts = [f"{row['num_requests']} requests"]
    if rate is not None:
        parts.append(f"{rate} a second (Poisson)")
    if places is not None:
        parts.append(f"{places} at a time")
    elif rate is None:
        parts.append("all at once")
    if row["dataset"] is not None:
        parts.append(f"of {row['dataset']}")
    else:
        spread = f" +-{100 * float(row['range_ratio'] or 0):g} %" if row["range_ratio"] else ""
        parts.append(f"{row['input_len']} + {row['output_len']} tokens{spread}")
    form = "token ids" if row["prompt_form"] == "token_ids" else "text prompts"
    parts += [form, "streamed" if row["is_streamed"] else "not streamed"]
    return ", ".join(parts)


def _line(name: str, *cells: object) -> str:
    *values, unit = map(_shown, cells)
    return f"{name:<26}{''.join(f'{value:>12}' for value in values)} {unit}".rstrip()


def _shown(cell: object) -> str:
    """Floats with five digits, or more if the integer part needs them."""
    if cell is None:
        return "-"
    if not isinstance(cell, float):
        return str(cell)
    num_whole = len(str(int(abs(cell)))) if abs(cell) >= 1 else 0
    return f"{cell:.{max(0, 5 - max(1, num_whole))}f}"
