"""What a process has counted, and what a stack has, as types: gauges, counters, histograms.

Owns: these types, the bounds of histograms, and how the counts of two processes that had the same
place add up. Does not know: where anything is counted, how it is shown.

Rules:
- A gauge says how things are, a counter how often something has happened since its process began to
  serve: it never falls. All counters of a process are in one Struct, whose fields can be added.
- Fields are appended with defaults. A process' numbers fit into a line of PIPE_BUF bytes.
- Times are seconds. Every histogram has the same bounds.
- Whatever sum is told can be read again: sums stop at the bounds of their types, and what a place
  told of another kind of process is not added.
"""

from __future__ import annotations

from itertools import islice
from typing import Annotated, Any, TypeVar

from msgspec import Meta, Struct
from msgspec.structs import replace

from slipstream_ipc.telemetry.timeline import Spans

# Upper bounds of a histogram's buckets in seconds, inclusive; behind the last is one for the rest.
# Steps of about 1.5: a percentile that is read from it is that near.
# fmt: off
BOUNDS_S = (
    0.0005, 0.001, 0.0015, 0.0025, 0.004, 0.006, 0.01, 0.015, 0.025, 0.04, 0.06, 0.1, 0.15, 0.25,
    0.4, 0.6, 1.0, 1.5, 2.5, 4.0, 6.0, 10.0, 15.0, 25.0, 40.0, 60.0, 100.0,
)
# fmt: on

_MAX_PLACES = 1024
_MAX_KINDS = 1024  # of answers: paths and status codes

_MOST = 2**63 - 1
_MOST_S = 1e12  # 30,000 years

Count = Annotated[int, Meta(ge=0, le=_MOST)]
Seconds = Annotated[float, Meta(ge=0, le=_MOST_S)]
Name = Annotated[str, Meta(max_length=256)]
Tally = Annotated[dict[Name, Count], Meta(max_length=_MAX_KINDS)]

Counters = TypeVar("Counters", bound=Struct)


class Histogram(Struct, array_like=True, frozen=True):
    """How often something took how long.

    counts: by bucket of BOUNDS_S, each value in one bucket; empty where nothing was counted.
    """

    counts: Annotated[tuple[Count, ...], Meta(max_length=len(BOUNDS_S) + 1)] = ()
    sum: Seconds = 0.0

    def __post_init__(self) -> None:
        """Raises: ValueError, which decoding tells as what it raises itself."""
        if len(self.counts) not in (0, len(BOUNDS_S) + 1):
            raise ValueError(f"a histogram of {len(self.counts)} buckets")

    @property
    def num(self) -> int:
        """Values."""
        return sum(self.counts)


NOTHING = Histogram()


class CoreGauges(Struct, frozen=True, omit_defaults=True):
    """How an engine core is. Blocks: of the cache, the null block left out."""

    num_running: Count = 0  # requests that hold a slot
    num_waiting: Count = 0  # … and that do not, preempted ones and those on hold among them
    num_blocks: Count = 0
    num_used_blocks: Count = 0  # that some request holds


class CoreCounters(Struct, frozen=True, omit_defaults=True):
    """What an engine core has done.

    num_sampled_tokens: that became part of an answer as the core knows it; num_overrun_tokens:
    sampled for requests that had ended by then. num_computed_tokens: forward passes' input, what
    was computed again after a preemption among it. num_prefix_*: tokens of admitted requests.
    device_busy_s: with a step under way; device_idle_s: without one, though there were requests.
    step_s: a step, from its launch or the end of the one before; queue_s: from a request's
    admission until it was first in a step.
    """

    num_steps: Count = 0
    num_computed_tokens: Count = 0
    num_sampled_tokens: Count = 0
    num_overrun_tokens: Count = 0
    num_preemptions: Count = 0
    num_prefix_queries: Count = 0
    num_prefix_hits: Count = 0
    device_busy_s: Seconds = 0.0
    device_idle_s: Seconds = 0.0
    step_s: Histogram = NOTHING
    queue_s: Histogram = NOTHING


class WorkerGauges(Struct, frozen=True, omit_defaults=True):
    """How an output worker is."""

    num_streams: Count = 0  # that have not ended
    num_kept_streams: Count = 0  # that have, for readers that come back
    num_clients: Count = 0  # attached, fronts among them


class WorkerCounters(Struct, frozen=True, omit_defaults=True):
    """What an output worker has done.

    num_prompt_tokens: of requests that were accepted, what the cache held among them. finished:
    streams by finish reason; rejected: requests by error code. num_deltas: what streams' readers
    got at a time, of num_delivered_tokens in all, in num_messages. num_overrun_tokens: came for
    streams that had ended. ttft_s: from a request's arrival to the leaving of its first tokens;
    itl_s: between two deltas of a stream; tpot_s: of a stream, from first to last tokens, by token
    behind the first ones; e2e_s: from its arrival to the leaving of its end.
    """

    num_accepted: Count = 0
    num_prompt_tokens: Count = 0
    num_messages: Count = 0
    num_deltas: Count = 0
    num_delivered_tokens: Count = 0
    num_overrun_tokens: Count = 0
    finished: Tally = {}
    rejected: Tally = {}
    ttft_s: Histogram = NOTHING
    itl_s: Histogram = NOTHING
    tpot_s: Histogram = NOTHING
    e2e_s: Histogram = NOTHING


class FrontGauges(Struct, frozen=True, omit_defaults=True):
    """How an HTTP front is."""

    num_connections: Count = 0
    num_open_streams: Count = 0  # answers that are being streamed


class FrontCounters(Struct, frozen=True, omit_defaults=True):
    """What an HTTP front has done. answers: by "STATUS PATH". num_chunks: of streamed answers."""

    answers: Tally = {}
    num_chunks: Count = 0


class CoreNumbers(Struct, frozen=True, omit_defaults=True, tag="core"):
    """An engine core's. recent: its steps, from launch or the end of the one before, with how many
    requests each was for.
    """

    gauges: CoreGauges = CoreGauges()
    counters: CoreCounters = CoreCounters()
    recent: Spans = Spans()


class WorkerNumbers(Struct, frozen=True, omit_defaults=True, tag="worker"):
    """An output worker's. recent: its turns that took in a step, until the deltas had left."""

    gauges: WorkerGauges = WorkerGauges()
    counters: WorkerCounters = WorkerCounters()
    recent: Spans = Spans()


class FrontNumbers(Struct, frozen=True, omit_defaults=True, tag="front"):
    """An HTTP front's."""

    gauges: FrontGauges = FrontGauges()
    counters: FrontCounters = FrontCounters()


Numbers = CoreNumbers | WorkerNumbers | FrontNumbers


class ProcessStatistics(Struct, frozen=True, omit_defaults=True):
    """One place of a stack, and the process that has it.

    state: as in `Condition`. pid: 0 where nobody has the place. num_restarts: processes that had
    the place before. cpu_s: theirs, this one's and that of what they started. rss_bytes: resident
    memory of this one. numbers: counters include those of the ones before; None: never told any.
    """

    state: Name = ""
    pid: Count = 0
    num_restarts: Count = 0
    cpu_s: Seconds = 0.0
    rss_bytes: Count = 0
    numbers: Numbers | None = None


class Statistics(Struct, frozen=True, omit_defaults=True, tag=True):
    """A whole stack, by the names of its places; the supervisor is one. at_s: CLOCK_MONOTONIC."""

    at_s: Seconds = 0.0
    processes: Annotated[dict[Name, ProcessStatistics], Meta(max_length=_MAX_PLACES)] = {}


def without_gauges(numbers: Numbers) -> Numbers:
    """What outlives a process of what it counted."""
    return type(numbers)(counters=numbers.counters)  # type: ignore[arg-type]


def added(before: Numbers | None, numbers: Numbers) -> Numbers:
    """`numbers`, with the counters of `before`, which had the same place."""
    if type(before) is not type(numbers):
        return numbers
    assert before is not None
    counters = added_counters(before.counters, numbers.counters)
    return replace(numbers, counters=counters)


def added_counters(one: Counters, other: Counters) -> Counters:
    """Field by field."""
    return type(one)(
        **{name: _sum(getattr(one, name), getattr(other, name)) for name in one.__struct_fields__}
    )


def _sum(one: Any, other: Any) -> Any:
    if isinstance(one, Histogram):
        if not one.counts or not other.counts:
            return one if one.counts else other
        pairs = zip(one.counts, other.counts, strict=True)
        return Histogram(tuple([_sum(a, b) for a, b in pairs]), _sum(one.sum, other.sum))
    if isinstance(one, dict):
        keys = islice({**one, **other}, _MAX_KINDS)
        return {key: _sum(one.get(key, 0), other.get(key, 0)) for key in keys}
    return min(one + other, _MOST_S if isinstance(one, float) else _MOST)
