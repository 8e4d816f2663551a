"""The core's loop: receive, schedule, launch, collect, publish, wait.

- One step ahead: while a step runs, the next one is launched behind it, so that the device never
  waits for the host.
- As late as the device allows: the next step is planned when the workers have checked all tokens
  that may end a stream, or when the device is about to run dry, whichever is first. So a stop costs
  no step beyond the one in flight, and the device does not idle for a report.
- Only where a worker is several steps behind, the device waits for it between two steps, at most as
  long as a step takes: a worker that is slower than the device would otherwise fall behind as far
  as the scheduler lets it, and each stop cost as many steps.
- Tokens are published before the next step is planned while the device is busy, and after it is
  launched where the device is idle and no check is awaited. Deferrable work runs after publishing.
- The masks of a step with grammars are passed to the runner after its launch, as soon as the ids of
  the step before are in the histories; its forward pass runs meanwhile.
- A failed step ends a request only if that request was alone in it.
- Only `_wait` blocks, and no longer than until the next thing is due.
"""

from __future__ import annotations

import logging
import math
import time
from collections import deque
from collections.abc import Container
from typing import Generic

import numpy as np
import zmq

from slipstream_core.grammar.bitmasks import GrammarBitmasks
from slipstream_core.media.preparer import MediaPreparer
from slipstream_core.scheduler.engine_counters import EngineCounters
from slipstream_core.scheduler.scheduling import Scheduling
from slipstream_core.step.plan import StepFailed, TurnRunner, TurnT
from slipstream_core.workers.handler import WorkerHandler
from slipstream_core.workers.streams import StreamManager
from slipstream_ipc.history.logprob_log import LogprobLog
from slipstream_ipc.messages import Fault, Gauge
from slipstream_ipc.process import BEAT_S, next_multiple
from slipstream_ipc.telemetry.logs import of_requests
from slipstream_ipc.telemetry.trace import SpanKind, Tracer

logger = logging.getLogger(__name__)

_PLAN_AHEAD_S = 0.0015  # upper bound for planning and launching a step on a busy host
# steps, beyond which the device waits for the workers (decision 011) …
_MAX_UNCHECKED = 3
_MAX_CHECK_WAIT_S = 0.05  # … for as long as a step takes, and no longer than this
_POLL_RESOLUTION_S = 0.001
_SMOOTHING = 0.2
_GAUGE_S = 0.05  # between two looks at the load


class Engine(Generic[TurnT]):
    """Drives one runner for all streams of a core."""

    def __init__(
        self,
        runner: TurnRunner[TurnT],
        scheduler: Scheduling[TurnT],
        logprobs: LogprobLog,
        handler: WorkerHandler,
        manager: StreamManager,
        poller: zmq.Poller,
        tracer: Tracer | None = None,
        *,
        grammars: GrammarBitmasks,
        counters: EngineCounters,
        images: MediaPreparer | None = None,
    ) -> None:
        """`poller` already has the sockets and the stop signal registered."""
        self._images = images
        self._runner = runner
        self._scheduler = scheduler
        self._logprobs = logprobs
        self._handler = handler
        self._manager = manager
        self._poller = poller
        self._tracer = tracer
        self._grammars = grammars
        self._counters = counters
        self._in_flight: deque[TurnT] = deque()
        self._collected_step = 0
        self._published_step = 0
        # monotonic: when the oldest step in flight began, or the last one ended if there is none
        self._step_started_at = 0.0
        self._step_s = 0.0  # duration of a step, exponentially smoothed
        self._beat_at = 0.0
        self._gauge_at = 0.0
        self._gauge: Gauge | None = None  # the one sent last
        self._gauge_epochs: list[int] = []  # of the sessions that it was sent to
        self._arrived: Container[object] | None = None  # what the last wait has reported
        runner_fd = runner.fileno()
        if runner_fd is not None:
            poller.register(runner_fd, zmq.POLLIN)

    def run_once(self, *, wait: bool = True) -> None:
        """One turn of the loop."""
        now = time.monotonic()
        self._handler.receive(now, self._arrived)
        self._arrived = None
        while self._in_flight and self._is_done():
            self._collect()
        if self._in_flight or self._handler.num_unchecked:
            # the device is busy, or may wait: the next step is planned after the workers' check
            self._publish()
        while self._may_launch() and self._launch():
            pass
        is_more = self._publish()
        self._logprobs.flush_deferred()
        if now >= self._beat_at:
            self._handler.beat(now)
            self._beat_at = next_multiple(now, BEAT_S)
        if now >= self._gauge_at:
            self._gauge_at = now + _GAUGE_S
            self._send_gauge(now)
        if wait and not is_more:
            self._wait()

    def _send_gauge(self, now: float) -> None:
        """Send the load to the workers that want it, if it has changed."""
        sessions = self._handler.gauge_readers
        if not sessions:
            return
        scheduler, handler = self._scheduler, self._handler
        queued_tokens = scheduler.num_waiting_tokens + scheduler.num_prompt_tokens_left
        gauge = Gauge(
            running=scheduler.num_running,
            waiting=scheduler.num_waiting + handler.num_pending,
            queued_tokens=queued_tokens + handler.num_pending_tokens,
            free_blocks=scheduler.num_free_blocks,
            blocks=scheduler.num_blocks - 1,
            kept_since_s=scheduler.eviction_age(now),
            step_s=self._step_s,
            max_seqs=scheduler.max_num_seqs,
        )
        epochs = [session.link.epoch for session in sessions]
        if epochs == self._gauge_epochs and _is_alike(gauge, self._gauge):
            return
        self._gauge, self._gauge_epochs = gauge, epochs
        for session in sessions:
            handler.send_gauge(session, gauge)

    def running_s(self, now: float) -> float:
        """Seconds that the oldest step in flight has been running; 0 where there is none."""
        return now - self._step_started_at if self._in_flight else 0.0

    def _may_launch(self) -> bool:
        if self._images is not None:
            has_suspects = self._scheduler.has_suspects
            if not self._images.may_launch(len(self._in_flight), has_suspects=has_suspects):
                return False
        if len(self._in_flight) > 1 or not self._scheduler.has_work:
            return False
        num_unchecked = self._handler.num_unchecked
        return not num_unchecked or time.monotonic() >= self._launch_at(num_unchecked)

    def _launch_at(self, num_unchecked: int) -> float:
        """The time at which the next step is launched even if no more of those steps is checked
        (monotonic).
        """
        if num_unchecked > _MAX_UNCHECKED:
            return self._device_idle_at() + min(self._step_s, _MAX_CHECK_WAIT_S)
        return self._device_idle_at() - _PLAN_AHEAD_S

    def _launch(self) -> bool:
        begin_ns = time.monotonic_ns()
        plan = self._scheduler.schedule(lambda: self._handler.acked)
        if plan is None and not self._in_flight and self._handler.take_acknowledgements():
            # requests that were too far ahead of their workers may run again
            plan = self._scheduler.schedule(lambda: self._handler.acked)
        if plan is None:
            return False
        launch_ns = time.monotonic_ns()
        if not self._in_flight:
            self._step_started_at = time.monotonic()
            self._counters.device_busy(self._step_started_at)
        self._note_started(begin_ns / 1e9)
        self._handler.launching(plan.step, self._scheduler.rows_of(plan))
        self._runner.launch(plan)
        self._in_flight.append(plan)
        if plan.awaits_masks and len(self._in_flight) == 1:
            self._give_masks(plan)
        if self._tracer is not None:
            self._tracer.add(SpanKind.SCHEDULE, begin_ns, launch_ns, plan.step)
            self._tracer.add(SpanKind.LAUNCH, launch_ns, time.monotonic_ns(), plan.step)
        return True

    def _note_started(self, now: float) -> None:
        for row in self._scheduler.take_admitted():
            self._manager.request_started(row, now)

    def _is_done(self) -> bool:
        """True if the oldest step is done, or will be before the poller could wake the loop."""
        done_at = self._runner.done_at()
        if done_at is not None:
            return done_at - time.monotonic() < _POLL_RESOLUTION_S
        return self._runner.done()

    def _collect(self) -> None:
        """Collect the oldest step and append its tokens to the histories."""
        plan = self._in_flight.popleft()
        now = time.monotonic()
        took = now - self._step_started_at
        if plan.is_proposal:
            self._collect_proposal(plan, now, took)
            return
        self._step_s += (took - self._step_s) * (_SMOOTHING if self._step_s else 1.0)
        self._step_started_at = now
        self._collected_step = plan.step
        self._counters.recent.add(now - took, now, plan.num_requests)
        try:
            result = self._runner.collect()
        except StepFailed as error:
            self._counters.step(took, plan.num_tokens, 0, 0)
            self._handle_failure(plan, error)
            self._give_next_masks()
            return
        begin_ns = time.monotonic_ns()  # the wait inside `collect` is the device's time
        if plan.prompt is not None:  # before `complete` can end these rows
            rows = self._scheduler.prompt_rows_of(plan).tolist()
            self._manager.add_prompt_logprobs(rows, plan.prompt.starts.tolist(), result.prompt)
        sampled = self._scheduler.complete(plan, result.token_ids, result.counts, result.undefined)
        self._note_started(now)
        if result.logprobs is not None and sampled.counts is not None:
            self._logprobs.append_several(
                sampled.rows, sampled.counts, result.logprobs, sampled.index
            )
        elif result.logprobs is not None:
            self._logprobs.append(sampled.rows, result.logprobs, sampled.index)
        if result.wide:
            rows = sampled.rows.array
            if sampled.counts is not None:
                rows = np.repeat(rows, sampled.counts)
            row_at = dict(zip(sampled.index.tolist(), rows.tolist(), strict=True))
            for at, piece in result.wide:
                if at in row_at:
                    self._logprobs.append_wide(row_at[at], piece)
        self._counters.step(took, plan.num_tokens, len(result.token_ids), len(sampled.token_ids))
        if result.draft_lens is not None and result.counts is not None:
            self._counters.drafts(result.draft_lens, result.counts - 1)
        if not self._in_flight and self._scheduler.has_work:
            self._counters.device_idle(time.monotonic())
        self._manager.mark_dirty(sampled.rows)
        for row, fault in sampled.faults:
            self._manager.end_by_fault([row], fault)
        self._handler.collected(plan.step)
        if self._tracer is not None:
            self._tracer.add(SpanKind.COLLECT, begin_ns, time.monotonic_ns(), plan.step)
        self._give_next_masks()

    def _collect_proposal(self, plan: TurnT, now: float, took: float) -> None:
        """Collect a step of the draft model, for the step behind it; nothing else is in flight."""
        self._step_started_at = now
        self._counters.proposal(took)
        try:
            self._scheduler.complete(plan, self._runner.collect().token_ids)
        except StepFailed as error:
            rows = self._scheduler.rows_of(plan).tolist()
            self._scheduler.fail(plan)
            logger.error(
                "the draft model failed, and drafts no more for %d requests, whose texts are what "
                "they would be",
                len(rows),
                exc_info=error,
                extra=of_requests(*self._manager.labels(rows)),
            )
        if self._scheduler.has_work:
            self._counters.device_idle(time.monotonic())
        self._handler.collected(plan.step)

    def _give_next_masks(self) -> None:
        """Pass on the masks of the oldest step, if it awaits them.

        Its forward pass already runs, so tokens are published first.
        """
        if self._in_flight and self._in_flight[0].awaits_masks:
            self._publish()
            self._give_masks(self._in_flight[0])

    def _give_masks(self, plan: TurnT) -> None:
        """Pass the runner the masks of `plan`; all steps before it are collected."""
        rows = self._scheduler.grammar_rows_of(plan)
        masks, broken = self._grammars.masks(rows)
        self._runner.sample(plan, masks)
        for row, fault in broken:
            self._manager.end_by_fault([row], fault)

    def _handle_failure(self, plan: TurnT, error: StepFailed) -> None:
        """Handle a failed step: a request alone in it ends; several are retried, each alone."""
        at_fault = self._scheduler.fail(plan)
        logger.error(
            "a step of %d requests failed: %s",
            plan.num_requests,
            "the request ends" if plan.num_requests == 1 else "each is retried alone",
            exc_info=error,
            extra=of_requests(*self._manager.labels(at_fault.tolist())),
        )
        why = f"{error}; the request was alone in this step"
        self._manager.end_by_fault(at_fault.tolist(), Fault("engine", why))
        self._handler.collected(plan.step)

    def _publish(self) -> bool:
        if self._tracer is None:
            return self._handler.publish(self._collected_step)
        begin_ns = time.monotonic_ns()
        is_more = self._handler.publish(self._collected_step)
        if self._collected_step != self._published_step:
            self._published_step = self._collected_step
            self._tracer.add(SpanKind.PUBLISH, begin_ns, time.monotonic_ns(), self._collected_step)
        return is_more

    def _device_idle_at(self) -> float:
        """The time at which the device runs out of launched work, or did (monotonic), estimated
        where unknown.
        """
        if not self._in_flight:
            return self._step_started_at
        known = self._runner.done_at()
        return self._step_started_at + self._step_s if known is None else known

    def _wait(self) -> None:
        """Sleep until a message, the end of a step, or the next deadline.

        The poller counts in milliseconds. For a known end of a step it wakes early, and `collect`
        sleeps the rest; for planning ahead it may wake late, which `_PLAN_AHEAD_S` allows for.
        """
        now = time.monotonic()
        wait_ms = max(0, math.ceil((self._beat_at - now) * 1e3))
        num_unchecked = self._handler.num_unchecked
        if num_unchecked and len(self._in_flight) < 2 and self._scheduler.has_work:
            launch_ms = math.ceil((self._launch_at(num_unchecked) - now) * 1e3)
            if launch_ms > 0:
                wait_ms = min(wait_ms, launch_ms)
        done_at = self._runner.done_at()
        if done_at is not None:
            wait_ms = min(wait_ms, max(0, int((done_at - now) * 1e3)))
        self._arrived = dict(self._poller.poll(wait_ms))


def _is_alike(gauge: Gauge, before: Gauge | None) -> bool:
    """True if two gauges have the same numbers of requests, tokens and blocks."""
    return before is not None and (
        gauge.running == before.running
        and gauge.waiting == before.waiting
        and gauge.queued_tokens == before.queued_tokens
        and gauge.free_blocks == before.free_blocks
    )
