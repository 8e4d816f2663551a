"""The result of a chaos run, as a table and as JSON, and which of its fields make a run good."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import msgspec
from msgspec import Struct

from slipstream_bench.chaos.gaps import GapSummary
from slipstream_bench.chaos.reference_model import ReferenceSummary
from slipstream_bench.common.process_census import Holding
from slipstream_bench.common.tables import Row, table

_MIB = 2**20
_SHOWN = 10  # differing requests listed


class ChaosResult(Struct, frozen=True, kw_only=True):
    """One run. Requests over HTTP are included in the total. commit: of the code; None if unknown.

    lost, doubled: positions, of tokens and of characters. gap_*: the longest gap of a stream at the
    exit of a worker, a core, or both. asked_again: streams that worker and core had both lost while
    no client was left to submit them; unexplained_again: the same although the two had not died
    together. orphans: processes left behind, or that nothing would have ended. combinations: places
    whose processes were killed within a second of each other.
    """

    seed: int
    commit: str | None
    model: str
    identical: int
    total: int
    lost: int
    doubled: int
    failed: int
    gap_p50_s: float | None
    gap_p99_s: float | None
    orphans: int
    http_identical: int
    http_total: int
    http_asked_again: int
    http_asked_afresh: int  # of those asked again, the ones read from the beginning
    asked_again: int
    unexplained_again: int
    double_deaths: int
    rounds: int
    planned_rounds: int
    missed_blows: int
    blows: dict[str, int]
    combinations: dict[str, int]
    gaps: list[GapSummary]
    recovery_s: dict[str, list[float]]
    memory_start: dict[str, Holding]
    memory_end: dict[str, Holding]
    duration_s: float
    num_tokens: int
    near_tie: int | None = None  # for a real model only
    teacher: ReferenceSummary | None = None
    different: dict[int, list[str]] = {}
    stopped: str | None = None  # why the run was aborted
    left: list[str] = []  # the orphans' command lines
    left_out: list[str] = []  # faults that could not be injected on this machine, and why

    @property
    def is_good(self) -> bool:
        """Whether no fault was visible to any client."""
        return (
            self.identical == self.total
            and not (self.lost or self.doubled or self.orphans or self.unexplained_again)
            and self.stopped is None
        )


def lines_of(result: ChaosResult) -> list[str]:
    """The result as lines of text."""
    load = f"{result.total} requests, {result.num_tokens} tokens"
    blows = ", ".join(f"{name} {number}" for name, number in sorted(result.blows.items()))
    lines = [
        f"{load} in {result.duration_s:.1f} s, seed {result.seed}, {result.model}",
        f"{sum(result.blows.values())} blows in {result.rounds} rounds: {blows or '-'}",
        f"{len(result.combinations)} combinations of deaths within a second",
        "",
        f"identical        {result.identical} of {result.total}",
    ]
    if result.http_total:
        lines.append(
            f"  over HTTP      {result.http_identical} of {result.http_total}, "
            f"asked again {result.http_asked_again} times, "
            f"{result.http_asked_afresh} from the beginning"
        )
    if result.teacher is not None:
        lines.append(
            f"  near ties      {result.near_tie}, of {result.teacher.num_tokens} tokens; "
            f"largest margin {result.teacher.largest_margin:.2g}"
        )
    lines += [
        f"lost, doubled    {result.lost}, {result.doubled} positions",
        f"failed           {result.failed}",
        f"orphans          {result.orphans}",
    ]
    if result.asked_again:
        lines.append(
            f"asked again      {result.asked_again}, after {result.double_deaths} deaths of worker "
            f"and core together; without one: {result.unexplained_again}"
        )
    lines += [f"left out         {what}" for what in result.left_out]
    if result.rounds < result.planned_rounds:
        lines.append(f"the requests were over before {result.planned_rounds} rounds were")
    lines += ["", *table(_gap_rows(result), _GAP_COLUMNS)] if result.gaps else []
    lines += ["", *table(_memory_rows(result))]
    for index in list(result.different)[:_SHOWN]:
        lines += ["", f"request {index}:", *(f"  {what}" for what in result.different[index])]
    if len(result.different) > _SHOWN:
        lines.append(f"and {len(result.different) - _SHOWN} more")
    lines += [f"left: {command}" for command in result.left]
    if result.stopped is not None:
        lines += ["", f"the run broke off: {result.stopped}"]
    return lines


def json_of(result: ChaosResult) -> bytes:
    """The result as a JSON object."""
    return msgspec.json.format(msgspec.json.encode(result), indent=2) + b"\n"


def count(names: Sequence[str]) -> dict[str, int]:
    """Occurrences of each name."""
    return dict(Counter(names))


_GAP_COLUMNS = ("after", "streams", "gap_p50_s", "gap_p99_s", "gap_max_s", "back_after_s")


def _gap_rows(result: ChaosResult) -> list[Row]:
    rows: list[Row] = []
    for gap in result.gaps:
        back = result.recovery_s.get(gap.kind, [])
        rows.append(
            {
                "after": gap.kind,
                "streams": gap.num_streams,
                "gap_p50_s": gap.p50_s,
                "gap_p99_s": gap.p99_s,
                "gap_max_s": gap.max_s,
                "back_after_s": round(sum(back) / len(back), 3) if back else None,
            }
        )
    return rows


def _memory_rows(result: ChaosResult) -> list[Row]:
    names = dict.fromkeys([*result.memory_start, *result.memory_end])
    rows: list[Row] = []
    for name in names:
        row: Row = {"process": name}
        for when, held in (("start", result.memory_start), ("end", result.memory_end)):
            one = held.get(name)
            row[f"{when}_mib"] = None if one is None else round(one.rss_bytes / _MIB, 1)
            row[f"{when}_fds"] = None if one is None else one.num_fds
        rows.append(row)
    return rows
