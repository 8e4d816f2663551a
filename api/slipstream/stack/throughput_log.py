"""Logs one line on the throughput of the whole stack every few seconds, while there is work.

The rates are averages since the last line, or since the stack was last idle. They are made of the
counters in children's beats, so they lag by up to half a second.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from dataclasses import dataclass

from slipstream.stack.children.role_statistics import RoleStatistics
from slipstream_ipc.telemetry.logs import with_fields
from slipstream_ipc.telemetry.statistics import CoreNumbers, Numbers, WorkerNumbers

_logger = logging.getLogger(__name__)


@dataclass(slots=True)
class _Totals:
    """The sums behind the line, over all processes of a stack. Blocks are those of the cache."""

    num_prompt_tokens: int = 0
    num_sampled_tokens: int = 0
    num_prefix_queries: int = 0
    num_prefix_hits: int = 0
    num_running: int = 0
    num_waiting: int = 0
    num_blocks: int = 0
    num_used_blocks: int = 0


class ThroughputLog:
    """The throughput lines of one stack. interval_s: between two lines; 0 logs none."""

    def __init__(self, statistics: RoleStatistics, interval_s: float) -> None:
        self._statistics = statistics
        self._interval_s = interval_s
        self._before = _Totals()  # as of the last line, or the last idle moment
        self._since = 0.0  # the time of that; CLOCK_MONOTONIC

    def tick(self, now: float) -> None:
        """Log the line if it is due. Call it several times per interval."""
        if not self._interval_s:
            return
        totals, before = _totals(self._statistics.numbers()), self._before
        num_prompt_tokens = totals.num_prompt_tokens - before.num_prompt_tokens
        num_sampled_tokens = totals.num_sampled_tokens - before.num_sampled_tokens
        has_requests = bool(totals.num_running or totals.num_waiting)
        is_idle = not (has_requests or num_prompt_tokens or num_sampled_tokens)
        took_s = now - self._since
        if not is_idle and took_s < self._interval_s:
            return
        self._before, self._since = totals, now
        if is_idle:
            return
        num_queries = totals.num_prefix_queries - before.num_prefix_queries
        num_hits = totals.num_prefix_hits - before.num_prefix_hits
        fields = {
            "prompt_throughput": num_prompt_tokens / took_s,
            "generation_throughput": num_sampled_tokens / took_s,
            "num_requests_running": totals.num_running,
            "num_requests_waiting": totals.num_waiting,
            "kv_cache_usage_perc": totals.num_used_blocks / max(1, totals.num_blocks),
            "prefix_cache_hit_rate": num_hits / max(1, num_queries),
        }
        fields = {name: round(value, 4) for name, value in fields.items()}
        _logger.info(
            "Avg prompt throughput: %.1f tokens/s, Avg generation throughput: %.1f tokens/s, "
            "Running: %d reqs, Waiting: %d reqs, KV cache usage: %.1f%%, "
            "Prefix cache hit rate: %.1f%%",
            *list(fields.values())[:4],
            100 * fields["kv_cache_usage_perc"],
            100 * fields["prefix_cache_hit_rate"],
            extra=with_fields(fields),
        )


def _totals(numbers: Iterable[Numbers]) -> _Totals:
    totals = _Totals()
    for each in numbers:
        match each:
            case CoreNumbers(gauges=gauges, counters=counters):
                totals.num_sampled_tokens += counters.num_sampled_tokens
                totals.num_prefix_queries += counters.num_prefix_queries
                totals.num_prefix_hits += counters.num_prefix_hits
                totals.num_running += gauges.num_running
                totals.num_waiting += gauges.num_waiting
                totals.num_blocks += gauges.num_blocks
                totals.num_used_blocks += gauges.num_used_blocks
            case WorkerNumbers(counters=of_worker):
                totals.num_prompt_tokens += of_worker.num_prompt_tokens
    return totals
