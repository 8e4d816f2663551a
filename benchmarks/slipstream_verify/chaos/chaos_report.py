"""The result of a chaos run, as a table and as JSON, and which of its fields make a run good.

The gaps are the longest of each stream, by the kind of fault. Excluded are slow readers, which
pause by themselves, and streams that were computed again from their beginning, which takes time in
proportion to their length.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import numpy as np
from msgspec import Struct, field

from slipstream.demo.gaps import GapSpan, longest_gap
from slipstream_bench.common.process_census import Holding
from slipstream_bench.common.report import Row, table
from slipstream_verify.chaos.workload.reference_model import ReferenceSummary

_MIB = 2**20
_SHOWN = 10  # differing requests listed
_GAP_COLUMNS = ("after", "streams", "gap_p50_s", "gap_p99_s", "gap_max_s", "back_after_s")


class GapSummary(Struct, frozen=True):
    """The longest gaps of all streams at all rounds of a kind, in seconds."""

    kind: str
    num_streams: int
    p50_s: float | None
    p99_s: float | None
    max_s: float | None


def summarise_gaps(kind: str, gaps: Iterable[float]) -> GapSummary:
    """Percentiles; None without gaps."""
    every = list(gaps)
    if not every:
        return GapSummary(kind, 0, None, None, None)
    p50, p99 = (round(float(value), 4) for value in np.percentile(every, (50, 99)))
    return GapSummary(kind, len(every), p50, p99, round(max(every), 4))


def gaps_by_kind(
    streams: Iterable[Sequence[float]], spans: Sequence[GapSpan]
) -> dict[str, list[float]]:
    """All longest gaps, by the kind of round."""
    found: dict[str, list[float]] = {}
    every = list(streams)
    for span in spans:
        gaps = found.setdefault(span.kind, [])
        gaps += [gap for times in every if (gap := longest_gap(times, span)) is not None]
    return found


class ChaosResult(Struct, frozen=True, kw_only=True):
    """One run. Requests over HTTP are included in the total. commit: of the code; None if unknown.

    lost, doubled: positions, of tokens and of characters. gap_*: the longest gap of a stream at the
    exit of a worker, a core, or both. asked_again: streams that worker and core had both lost while
    no client was left to submit them; unexplained_again: the same although the two had not died
    together. orphans: processes left behind, or that nothing would have ended. combinations:
    targets that were killed within a second of each other.
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
    missed_faults: int = field(name="missed_blows")
    faults: dict[str, int] = field(name="blows")
    combinations: dict[str, int]
    gaps: list[GapSummary]
    recovery_s: dict[str, list[float]]
    memory_start: dict[str, Holding]
    memory_end: dict[str, Holding]
    duration_s: float
    num_tokens: int
    near_tie: int | None = None  # for a real model only
    reference: ReferenceSummary | None = field(default=None, name="teacher")
    different: dict[int, list[str]] = {}
    stopped: str | None = None  # why the run was aborted
    left: list[str] = []  # the orphans' command lines
    left_out: list[str] = []  # faults that could not be injected on this machine, and why
    answers: str = ""  # the format of those that were played
    tool_calls: int = 0  # whole ones, in the undisturbed answers
    forced_calls: int = 0
    interrupted: dict[str, int] = {}  # answers by what a death of the stack's fell into
    counted: dict[str, int] = {}  # by cores, as in CounterSums

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
    lines = [
        f"{load} in {result.duration_s:.1f} s, seed {result.seed}, {result.model}",
        f"{sum(result.faults.values())} faults in {result.rounds} rounds: {_counts(result.faults)}",
        f"{len(result.combinations)} combinations of deaths within a second",
        "",
        f"identical        {result.identical} of {result.total}",
    ]
    if result.http_total:
        lines.append(
            f"  over HTTP      {result.http_identical} of {result.http_total}, "
            f"requested again {result.http_asked_again} times, "
            f"{result.http_asked_afresh} from the beginning"
        )
    if result.reference is not None:
        lines.append(
            f"  near ties      {result.near_tie}, of {result.reference.num_tokens} tokens; "
            f"largest margin {result.reference.largest_margin:.2g}"
        )
    if result.tool_calls:
        lines += [
            f"answers          {result.answers}",
            f"tool calls       {result.tool_calls}, forced {result.forced_calls}",
            f"deaths within    {_counts(result.interrupted)}",
        ]
    if any(result.counted.values()):
        lines.append(f"cores counted    {_counts(result.counted)}")
    lines += [
        f"lost, doubled    {result.lost}, {result.doubled} positions",
        f"failed           {result.failed}",
        f"orphans          {result.orphans}",
    ]
    if result.asked_again:
        lines.append(
            f"requested again  {result.asked_again}, after {result.double_deaths} deaths of worker "
            f"and core together; without one: {result.unexplained_again}"
        )
    lines += [f"not injected     {what}" for what in result.left_out]
    lines += ["", *table(_gap_rows(result), _GAP_COLUMNS)] if result.gaps else []
    lines += ["", *table(_memory_rows(result))]
    for index in list(result.different)[:_SHOWN]:
        lines += ["", f"request {index}:", *(f"  {what}" for what in result.different[index])]
    if len(result.different) > _SHOWN:
        lines.append(f"and {len(result.different) - _SHOWN} more")
    lines += [f"left behind: {command}" for command in result.left]
    if result.stopped is not None:
        lines += ["", f"the run was aborted: {result.stopped}"]
    return lines


def _counts(numbers: Mapping[str, int]) -> str:
    return ", ".join(f"{name} {number}" for name, number in sorted(numbers.items())) or "-"


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
