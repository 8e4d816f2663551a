"""The core's parts of a decode step, sequentially in one thread: a core assembled by the product's
own functions over a simulated or given device, and a stand-in for the worker that reports all
tokens as checked.

- The loop is that of `Engine`, one step ahead: while a step is in flight the next one is launched,
  then the one before is completed and sent.
- The parts of a step:
  receive    the worker's report
  schedule   choosing what each row computes, and building the step's plan
  launch     the core's notes on it; handing it to the device
  complete   its tokens go into the histories
  publish    the message to the worker
  settle     work deferred until that message has left
- Reported separately and in no sum: `device`, what the simulated device computes when a step is
  launched. A real device computes asynchronously, so handing a step over is part of `launch` there.
- Times are CPU time of the thread: other work on the machine is not counted, but its effect on the
  CPU's caches is.
- Every request has a different prompt of `prompt_len` tokens and up to a block more, so that
  requests fill their blocks in different steps.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import zmq

from slipstream_core.config import CoreConfig
from slipstream_core.engine.build import assemble_core
from slipstream_core.runner.simulated.simulated_runner import load_simulated
from slipstream_core.step.plan import Runner, StepPlan
from slipstream_ipc.columns import pack_u32
from slipstream_ipc.messages import Admit, Derived, RequestSpec, SamplingParams, Step, Welcome
from slipstream_lab.common.memory_wire import MemoryNetwork
from slipstream_worker.core_link import CoreLink

PARTS = ("receive", "schedule", "launch", "complete", "publish", "settle")
DEVICE = "device"

_ADDRESS = "ipc:///memory/core"
_BLOCK_SIZE = 16
_SEED = 0
_WARM_UP_STEPS = 2 * _BLOCK_SIZE
_FEW_WARM_UP_STEPS = 2  # with a real model


def num_outputs(batch: int, prompt_len: int, steps: int, budget: int) -> int:
    """Output tokens per request that let all requests decode together for `steps`."""
    room = max(1, budget - batch)  # beside the rows that already decode
    return steps + -(-batch * (prompt_len + _BLOCK_SIZE) // room) + _WARM_UP_STEPS + 8


class CoreParts:
    """`batch` requests that decode for `steps` steps."""

    def __init__(
        self,
        batch: int,
        *,
        prompt_len: int,
        steps: int,
        enable_prefix_caching: bool,
        runner: Runner | None = None,
        budget: int | None = None,
        num_snapshots: int | None = None,
    ) -> None:
        """`runner`: a real device, which the caller closes. `budget`: tokens per step; by default
        all prompts are computed in the first. `num_snapshots`: of a simulated model with recurrent
        states; None: it carries none.
        """
        self._batch = batch
        self._is_simulated = runner is None
        longest = prompt_len + _BLOCK_SIZE
        budget = budget or batch * longest
        max_tokens = num_outputs(batch, prompt_len, steps, budget)
        self._ns: dict[str, list[int]] = {part: [] for part in (*PARTS, DEVICE)}
        self._in_flight: deque[StepPlan] = deque()
        config = CoreConfig(
            model="simulated:step_ms=0,prefill_us=0",
            address=_ADDRESS,
            max_num_seqs=batch,
            max_num_batched_tokens=budget,
            max_model_len=longest + max_tokens,
            block_size=_BLOCK_SIZE,
            enable_prefix_caching=enable_prefix_caching,
        )
        self._runner: Runner = load_simulated(config) if runner is None else runner
        if num_snapshots is not None:
            info = replace(self._runner.info, has_states=True, num_snapshots=num_snapshots)
            self._runner.info = info
        with MemoryNetwork().in_use() as context:
            self._core = assemble_core(config, self._runner, context, zmq.Poller())
            self._hop = CoreLink(
                context,
                _ADDRESS,
                zmq.Poller(),
                identity=b"bench",
                incarnation=0,
                now=time.monotonic(),
            )
        self._num_tokens = 0  # tokens received by the worker
        self._has_welcome = False
        self._until(lambda: self._has_welcome)
        self._num_prompt_tokens = 0
        random = np.random.default_rng(_SEED)
        for index in range(batch):
            length = prompt_len + int(random.integers(0, _BLOCK_SIZE))
            self._num_prompt_tokens += length
            self._hop.enqueue(
                Admit(
                    stream_id=index.to_bytes(16, "little"),
                    prompt_ids=pack_u32(random.integers(0, self._runner.info.vocab_size, length)),
                    spec=RequestSpec(SamplingParams(temperature=0.0, max_tokens=max_tokens)),
                    derived=Derived(seed=index, max_tokens=max_tokens),
                )
            )
        self._until(lambda: self._core.scheduler.num_waiting == batch)
        while not self.step():
            pass
        for _ in range(_WARM_UP_STEPS if self._is_simulated else _FEW_WARM_UP_STEPS):
            self.step()
        for times in self._ns.values():
            times.clear()

    def step(self) -> bool:
        """Launch a step behind the one in flight; returns whether all requests decode in it."""
        core, clock = self._core, time.thread_time_ns
        handler, scheduler = core.handler, core.scheduler
        now = time.monotonic()
        at = [clock()]
        handler.receive(now)
        at.append(clock())
        plan: StepPlan | None = scheduler.schedule(lambda: handler.acked)
        at.append(clock())
        assert plan is not None
        handler.launching(plan.step, scheduler.rows_of(plan))
        at.append(clock())
        self._runner.launch(plan)
        at.append(clock())
        self._note(at, "receive", "schedule", "launch", DEVICE)
        self._in_flight.append(plan)
        do_all_decode = plan.num_decodes == plan.num_requests == self._batch
        if len(self._in_flight) < 2:
            return do_all_decode
        done = self._in_flight.popleft()
        result = self._runner.collect()
        at = [clock()]
        sampled = scheduler.complete(done, result.token_ids)
        core.manager.mark_dirty(sampled.rows)
        handler.collected(done.step)
        at.append(clock())
        handler.publish(done.step)
        at.append(clock())
        core.logprobs.flush_deferred()
        at.append(clock())
        self._note(at, "complete", "publish", "settle")
        self._check(now)
        return do_all_decode

    def measured_us(self) -> dict[str, list[float]]:
        """Microseconds of each part by step, without the warm-up."""
        return {part: [ns / 1e3 for ns in times] for part, times in self._ns.items()}

    def check_whole(self) -> None:
        """Check that every sampled token has reached the worker."""
        lengths = self._core.tokens.lengths(np.arange(self._batch))
        num_sampled = int(lengths.sum()) - self._num_prompt_tokens
        assert self._num_tokens == num_sampled, f"{self._num_tokens} came of {num_sampled}"
        assert self._core.scheduler.num_running == self._batch

    def close(self) -> None:
        """Close core and worker stand-in; a given device has nothing in flight afterwards."""
        self._hop.close()
        if not self._is_simulated:
            for _ in self._in_flight:
                self._runner.collect()
        self._core.close(keeps_runner=not self._is_simulated)

    def _note(self, at: list[int], *parts: str) -> None:
        for part, begin, end in zip(parts, at[:-1], at[1:], strict=True):
            self._ns[part].append(end - begin)

    def _check(self, now: float) -> None:
        """The worker's turn, which is not timed."""
        for body in self._hop.receive(now):
            if isinstance(body, Welcome):
                self._has_welcome = True
            elif isinstance(body, Step):
                self._num_tokens += len(body.token_ids) // 4
                self._hop.checked(body.step, is_awaited=True)
        self._hop.report()  # an acknowledgement, if there was nothing to check
        self._hop.flush()

    def _until(self, condition: Callable[[], bool]) -> None:
        for _ in range(1000):
            now = time.monotonic()
            self._core.handler.receive(now)
            self._core.handler.publish(0)
            self._check(now)
            if condition():
                return
        raise AssertionError("core and worker did not come together")
