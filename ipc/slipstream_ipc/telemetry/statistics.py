"""The types of a process' and a stack's statistics (gauges, counters, histograms), and their sums.

The counters of a process are added to those of its predecessors in the same place of the stack.

- A gauge is a current value; a counter counts since its process began to serve and never falls. All
  counters of a process are in one Struct, whose fields can be added.
- Fields are appended with defaults. A process' numbers fit into a line of PIPE_BUF bytes, for which
  the counts of histograms are packed (`packed_histograms`) where they are long.
- Times are in seconds. Every histogram has the same bounds; a brief one has few buckets or one, as
  the line has no room for more.
- Every sum can be decoded again: sums saturate at the bounds of their types, and numbers of
  different kinds of processes are not added.
"""

from __future__ import annotations

from itertools import islice, zip_longest
from typing import Annotated, Any, TypeVar

import msgspec
from msgspec import Meta, Struct
from msgspec.structs import force_setattr, replace

from slipstream_ipc.telemetry.spans import Spans

# Upper bounds of a histogram's buckets in seconds, inclusive; one more bucket takes the rest.
# They grow by a factor of about 1.5, which is the precision of a percentile read from it.
# fmt: off
BOUNDS_S = (
    0.0005, 0.001, 0.0015, 0.0025, 0.004, 0.006, 0.01, 0.015, 0.025, 0.04, 0.06, 0.1, 0.15, 0.25,
    0.4, 0.6, 1.0, 1.5, 2.5, 4.0, 6.0, 10.0, 15.0, 25.0, 40.0, 60.0, 100.0,
)
# fmt: on
BOUNDS_TOKENS = (10, 100, 1_000, 10_000, 100_000)
"""Upper bounds of a brief histogram of tokens; one of durations has one bucket for all."""
BOUNDS_ANSWERS = (1, 2, 5, 10, 20)
"""The bounds of a brief histogram of a request's answers, as vLLM has them."""

_MAX_PLACES = 1024
_MAX_KINDS = 1024  # keys of a tally, such as paths with status codes

_MAX_COUNT = 2**63 - 1
_MAX_S = 1e12  # 30,000 years

Count = Annotated[int, Meta(ge=0, le=_MAX_COUNT)]
Seconds = Annotated[float, Meta(ge=0, le=_MAX_S)]
StatisticName = Annotated[str, Meta(max_length=256)]
CountByName = Annotated[dict[StatisticName, Count], Meta(max_length=_MAX_KINDS)]

Counters = TypeVar("Counters", bound=Struct)


class Histogram(Struct, array_like=True, frozen=True):
    """A histogram of durations in seconds.

    counts: by bucket of BOUNDS_S, not cumulative; empty if there are no values. packed: the counts
    as little-endian numbers of equal width, instead; only on its way, empty in every object.
    """

    counts: Annotated[tuple[Count, ...], Meta(max_length=len(BOUNDS_S) + 1)] = ()
    sum: Seconds = 0.0
    packed: Annotated[bytes, Meta(max_length=8 * (len(BOUNDS_S) + 1))] = b""

    def __post_init__(self) -> None:
        """Raises: ValueError, which msgspec's decoders turn into a ValidationError."""
        if self.packed and not self.counts:
            force_setattr(self, "counts", _unpacked(self.packed))
            force_setattr(self, "packed", b"")
        if self.packed or len(self.counts) not in (0, len(BOUNDS_S) + 1):
            raise ValueError(f"a histogram of {len(self.counts)} buckets")

    @property
    def num(self) -> int:
        """The number of values."""
        return sum(self.counts)


class _PackedHistogram(Struct, array_like=True):
    """A `Histogram` on its way."""

    counts: tuple[()]
    sum: float
    packed: bytes


def packed_histograms(counters: Counters) -> Counters:
    """Return counters to be encoded alone: large counts take little more than half of their bytes.

    A histogram that would be longer so, such as one large count among zeros, stays as it is.
    """
    found: dict[str, Any] = {}
    for name in counters.__struct_fields__:
        histogram = getattr(counters, name)
        if isinstance(histogram, Histogram) and histogram.counts:
            packed = _PackedHistogram((), histogram.sum, _packed(histogram.counts))
            if len(msgspec.json.encode(packed)) < len(msgspec.json.encode(histogram)):
                found[name] = packed
    return replace(counters, **found)


def _packed(counts: tuple[int, ...]) -> bytes:
    width = max(1, (max(counts).bit_length() + 7) // 8)
    return b"".join([count.to_bytes(width, "little") for count in counts])


def _unpacked(packed: bytes) -> tuple[int, ...]:
    """Raises: ValueError."""
    width, rest = divmod(len(packed), len(BOUNDS_S) + 1)
    if rest:
        raise ValueError(f"a histogram of {len(packed)} packed bytes")
    places = range(0, len(packed), width)
    counts = tuple([int.from_bytes(packed[at : at + width], "little") for at in places])
    if max(counts) > _MAX_COUNT:
        raise ValueError(f"a histogram with a count of {max(counts)}")
    return counts


class BriefHistogram(Struct, array_like=True, frozen=True):
    """The number of values and their sum; of numbers of tokens, by bucket of BOUNDS_TOKENS too, and
    of answers, by bucket of BOUNDS_ANSWERS.

    counts: one, or by bucket, not cumulative; empty if there are no values.
    """

    counts: Annotated[tuple[Count, ...], Meta(max_length=len(BOUNDS_TOKENS) + 1)] = ()
    sum: Seconds = 0.0

    def __post_init__(self) -> None:
        """Raises: ValueError, which msgspec's decoders turn into a ValidationError."""
        if len(self.counts) not in (0, 1, len(BOUNDS_TOKENS) + 1):
            raise ValueError(f"a brief histogram of {len(self.counts)} buckets")


NOTHING = Histogram()
NOTHING_BRIEF = BriefHistogram()


class CoreGauges(Struct, frozen=True, omit_defaults=True):
    """The state of an engine core. Blocks are those of the KV cache without the null block."""

    num_running: Count = 0  # requests that hold a slot
    num_waiting: Count = 0  # requests that hold none, including preempted and pending ones
    num_blocks: Count = 0
    num_used_blocks: Count = 0  # blocks that a request holds
    block_size: Count = 0  # tokens
    num_state_snapshots: Count = 0  # of recurrent states, for the prefix cache
    num_used_state_snapshots: Count = 0
    engine: StatisticName = ""  # name and version of the engine inside; empty: ours
    max_loras: Count = 0  # adapters that there is room for
    running_loras: CountByName = {}  # requests by adapter, of those with the most
    waiting_loras: CountByName = {}


class CoreCounters(Struct, frozen=True, omit_defaults=True):
    """Counters of an engine core.

    num_sampled_tokens: tokens that became part of an answer, as far as the core knows;
    num_overrun_tokens: tokens sampled for requests that had already ended.
    num_computed_tokens: input tokens of forward passes, recomputation after preemptions included.
    num_prefix_*: tokens of admitted requests.
    num_state_snapshots_loaded: prefills that began with one; num_state_snapshots_evicted: replaced
    by newer ones.
    num_drafts: rows of steps that had drafts, num_draft_tokens in all; num_accepted_tokens_per_pos:
    right ones by their place among a row's, the first one first. draft_s: of device_busy_s, the
    draft model's.
    device_busy_s: time with a step in flight; device_idle_s: time without one while there were
    requests.
    step_s: time of a step, from its launch or the end of the previous one; queue_s: from a
    request's admission to its first step; prefill_s: from there to its first token; inference_s:
    from its first step to its end.
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
    prefill_s: BriefHistogram = NOTHING_BRIEF
    inference_s: BriefHistogram = NOTHING_BRIEF
    num_state_snapshots_loaded: Count = 0
    num_state_snapshots_evicted: Count = 0
    num_drafts: Count = 0
    num_draft_tokens: Count = 0
    num_accepted_tokens_per_pos: Annotated[tuple[Count, ...], Meta(max_length=16)] = ()
    draft_s: Seconds = 0.0


class WorkerGauges(Struct, frozen=True, omit_defaults=True):
    """The state of an output worker."""

    num_streams: Count = 0  # streams that have not ended
    num_kept_streams: Count = 0  # ended streams, kept for readers that come back
    num_kept_answers: Count = 0  # answers that can be recalled after their streams
    kept_answer_bytes: Count = 0
    num_clients: Count = 0  # attached clients, HTTP fronts included
    num_pending_spans: Count = 0  # made and not exported yet; lost if the worker dies


class WorkerCounters(Struct, frozen=True, omit_defaults=True):
    """Counters of an output worker.

    num_prompt_tokens: of accepted requests, including tokens that the prefix cache held.
    finished: streams by finish reason; rejected: requests by error code.
    num_deltas: deltas sent to readers, with num_delivered_tokens in all, in num_messages.
    num_overrun_tokens: tokens that came for streams that had ended.
    ttft_s: from a request's arrival until its first tokens are sent; itl_s: between two deltas of a
    stream; tpot_s: of a stream, from its first delta to its end, per token after the first delta;
    e2e_s: from a request's arrival until its end is sent.
    decode_s: from a stream's first delta to its end. prompt_tokens, generation_tokens, max_tokens:
    of an ended stream. num_answers: that an accepted request asks for.
    num_exported_spans: spans of traced requests that a collector has taken; num_lost_spans: those
    that none will get.
    """

    num_accepted: Count = 0
    num_prompt_tokens: Count = 0
    num_messages: Count = 0
    num_deltas: Count = 0
    num_delivered_tokens: Count = 0
    num_overrun_tokens: Count = 0
    finished: CountByName = {}
    rejected: CountByName = {}
    ttft_s: Histogram = NOTHING
    itl_s: Histogram = NOTHING
    tpot_s: Histogram = NOTHING
    e2e_s: Histogram = NOTHING
    num_exported_spans: Count = 0
    num_lost_spans: Count = 0
    decode_s: BriefHistogram = NOTHING_BRIEF
    prompt_tokens: BriefHistogram = NOTHING_BRIEF
    generation_tokens: BriefHistogram = NOTHING_BRIEF
    max_tokens: BriefHistogram = NOTHING_BRIEF
    num_answers: BriefHistogram = NOTHING_BRIEF


class FrontGauges(Struct, frozen=True, omit_defaults=True):
    """The state of an HTTP front."""

    num_connections: Count = 0
    num_open_streams: Count = 0  # answers that are being streamed


class FrontCounters(Struct, frozen=True, omit_defaults=True):
    """Counters of an HTTP front. answers: by "STATUS PATH". num_chunks: of streamed answers.

    Over several replicas: placed: streams by why their replica was chosen, as "WHY MODEL", or "WHY"
    where the pair is not counted apart; moved: likewise by why they left one; choose_s: time spent
    on choosing.
    """

    answers: CountByName = {}
    num_chunks: Count = 0
    placed: CountByName = {}
    moved: CountByName = {}
    choose_s: Seconds = 0.0


class CoreNumbers(Struct, frozen=True, omit_defaults=True, tag="core"):
    """Statistics of an engine core. recent: its steps, each from its launch or the end of the
    previous one, with its number of requests.
    """

    gauges: CoreGauges = CoreGauges()
    counters: CoreCounters = CoreCounters()
    recent: Spans = Spans()


class WorkerNumbers(Struct, frozen=True, omit_defaults=True, tag="worker"):
    """Statistics of an output worker. recent: its turns that handled a step, until the deltas were
    sent.
    """

    gauges: WorkerGauges = WorkerGauges()
    counters: WorkerCounters = WorkerCounters()
    recent: Spans = Spans()


class FrontNumbers(Struct, frozen=True, omit_defaults=True, tag="front"):
    """Statistics of an HTTP front."""

    gauges: FrontGauges = FrontGauges()
    counters: FrontCounters = FrontCounters()


Numbers = CoreNumbers | WorkerNumbers | FrontNumbers


class ProcessStatistics(Struct, frozen=True, omit_defaults=True):
    """One place of a stack, and the process in it.

    state: as in `Condition`. pid: 0 if there is no process. num_restarts: previous processes in
    this place. cpu_s: CPU time of all of them and their children. rss_bytes: resident memory of the
    current one. numbers: its statistics, with the counters of the previous ones added; None if
    there never were any.
    """

    state: StatisticName = ""
    pid: Count = 0
    num_restarts: Count = 0
    cpu_s: Seconds = 0.0
    rss_bytes: Count = 0
    numbers: Numbers | None = None


class Statistics(Struct, frozen=True, omit_defaults=True, tag=True):
    """A whole stack by the names of its places, supervisor included. at_s: CLOCK_MONOTONIC."""

    at_s: Seconds = 0.0
    processes: Annotated[dict[StatisticName, ProcessStatistics], Meta(max_length=_MAX_PLACES)] = {}


def without_gauges(numbers: Numbers) -> Numbers:
    """Only the counters of `numbers`, which outlive the process. Spans that were pending are lost
    with it.
    """
    if isinstance(numbers, WorkerNumbers) and numbers.gauges.num_pending_spans:
        lost = _sum(numbers.counters.num_lost_spans, numbers.gauges.num_pending_spans)
        return WorkerNumbers(counters=replace(numbers.counters, num_lost_spans=lost))
    return type(numbers)(counters=numbers.counters)  # type: ignore[arg-type]


def added(before: Numbers | None, numbers: Numbers) -> Numbers:
    """`numbers` with the counters of `before` added, unless that is of another kind of process."""
    if type(before) is not type(numbers):
        return numbers
    assert before is not None
    counters = added_counters(before.counters, numbers.counters)
    return replace(numbers, counters=counters)


def added_counters(one: Counters, other: Counters) -> Counters:
    """The sum of two counter Structs, field by field."""
    return type(one)(
        **{name: _sum(getattr(one, name), getattr(other, name)) for name in one.__struct_fields__}
    )


def _sum(one: Any, other: Any) -> Any:
    if isinstance(one, Histogram | BriefHistogram):
        if not one.counts or len(one.counts) != len(other.counts):  # empty, or another version's
            return one if len(one.counts) > len(other.counts) else other
        pairs = zip(one.counts, other.counts, strict=True)
        return type(one)(tuple([_sum(a, b) for a, b in pairs]), _sum(one.sum, other.sum))
    if isinstance(one, dict):
        keys = islice({**one, **other}, _MAX_KINDS)
        return {key: _sum(one.get(key, 0), other.get(key, 0)) for key in keys}
    if isinstance(one, tuple):  # by position, of as many as there were
        return tuple([_sum(a, b) for a, b in zip_longest(one, other, fillvalue=0)])
    return min(one + other, _MAX_S if isinstance(one, float) else _MAX_COUNT)
