"""A scheduler and a simulated model, stepped by a test."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field, fields
from typing import Any

import numpy as np
from tests.helpers.new_requests import new_request
from tests.helpers.simulated_tokens import expected_tokens

from slipstream_core.config import CoreConfig
from slipstream_core.runner.simulated.simulated_runner import load_simulated
from slipstream_core.scheduler.scheduler import CacheConfig, NewRequest, Sampled, Scheduler
from slipstream_core.step.plan import StepPlan
from slipstream_ipc.history.token_log import TokenLog

VOCAB_SIZE = 40


MAX_ROWS = 64


@dataclass
class Stream:
    """A request, and the output it has to produce (`want`)."""

    request: NewRequest
    prompt: list[int]
    want: list[int]


@dataclass
class Limits:
    num_blocks: int = 40
    block_size: int = 4
    max_num_seqs: int = 4
    max_num_batched_tokens: int = 32
    max_model_len: int = 64
    max_unacked: int = 1000


def scheduler_of(tokens: TokenLog, **limits: Any) -> Scheduler:
    """A scheduler whose limits are given side by side, those of its cache among them."""
    names = {each.name for each in fields(CacheConfig)} & limits.keys()
    return Scheduler(
        tokens=tokens, cache=CacheConfig(**{name: limits.pop(name) for name in names}), **limits
    )


@dataclass
class Harness:
    """In place of the engine: histories, acknowledgements, and a device some steps behind."""

    limits: Limits = field(default_factory=Limits)
    mode: str = "chain"

    def __post_init__(self) -> None:
        limits = self.limits
        model = f"simulated:step_ms=0,prefill_us=0,vocab_size={VOCAB_SIZE},mode={self.mode}"
        self.runner = load_simulated(
            CoreConfig(
                model=model,
                address="unused",
                max_num_seqs=limits.max_num_seqs,
                max_model_len=limits.max_model_len,
                block_size=limits.block_size,
                num_blocks=limits.num_blocks,
            )
        )
        self.log = TokenLog(rows=2)
        self.scheduler = scheduler_of(self.log, **vars(limits))
        self.acked = np.zeros(MAX_ROWS, np.int64)
        self.streams: dict[int, Stream] = {}
        self.launched: deque[StepPlan] = deque()
        self.failing: set[int] = set()  # steps that fail when they are collected
        self.num_faults = 0
        # by slot, of what plans have brought
        max_blocks = -(-limits.max_model_len // limits.block_size)
        self.tables = np.zeros((limits.max_num_seqs, max_blocks), np.int32)

    def add(
        self,
        prompt: list[int],
        max_tokens: int = 8,
        *,
        outputs: int = 0,
        row: int | None = None,
        **params: Any,
    ) -> int:
        """Admit a request. outputs: tokens in its history already, as after a core's death."""
        row = min(set(range(MAX_ROWS)) - self.streams.keys()) if row is None else row
        fields = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0, "seed": row} | params
        request = new_request(row=row, prompt_len=len(prompt), max_tokens=max_tokens, **fields)
        want = expected_tokens(
            self.runner.text,
            prompt,
            min(max_tokens, self.limits.max_model_len - len(prompt)),
            seed=request.seed if request.spec.params.temperature else 0,
            min_tokens=request.spec.params.min_tokens,
            stop_token_ids=request.stop_token_ids,
        )
        self.log.open(row)
        self.log.extend(row, np.array(prompt + want[: min(outputs, len(want) - 1)], np.uint32))
        self.scheduler.add(request)
        self.streams[row] = Stream(request, prompt, want)
        return row

    def forget(self, row: int) -> None:
        del self.streams[row]
        self.log.drop(row)
        self.acked[row] = 0

    def abort(self, row: int) -> None:
        self.scheduler.remove(row)
        self.forget(row)

    def acknowledge(self, rows: list[int] | None = None) -> None:
        for row in self.streams if rows is None else rows:
            self.acked[row] = self.log.length(row)

    def outputs(self, row: int) -> list[int]:
        prompt_len = len(self.streams[row].prompt)
        ids: list[int] = self.log.read(row, prompt_len, self.log.length(row)).tolist()
        return ids

    def launch(self, *, fails: bool = False) -> StepPlan | None:
        """Launch a step. A failing step writes nothing, so later steps compute from garbage."""
        known = {row: self.log.length(row) for row in self.streams}
        in_flight = [self.scheduler.rows_of(plan).tolist() for plan in self.launched]
        is_taken = self.scheduler._in_flight.has_suspect
        plan = self.scheduler.schedule(self.acked)
        if plan is not None:
            assert not is_taken, "launched behind a suspect"
            rows = self.scheduler.rows_of(plan).tolist()
            if any(self.is_suspect(row) for row in rows):
                assert len(rows) == 1
                assert not in_flight
            self.check(plan, known)
            if fails:
                self.failing.add(plan.step)
                entries = plan.table_slots, plan.table_numbers
                self.runner._tables[entries] = plan.table_blocks  # as a step that raises later
            else:
                self.runner.launch(plan)
            self.launched.append(plan)
        return plan

    def is_suspect(self, row: int) -> bool:
        return bool(self.scheduler._requests.is_suspect[row])

    def collect(self) -> Sampled | None:
        """Complete the oldest step; asserts that ended requests have the expected output.

        Returns None if the step failed.
        """
        plan = self.launched.popleft()
        if plan.step in self.failing:
            self.fail(plan)
            return None
        sampled = self.scheduler.complete(plan, self.runner.collect().token_ids)
        for row, token in zip(sampled.rows.tolist(), sampled.token_ids.tolist(), strict=True):
            assert self.outputs(row)[-1] == token
        for row in sampled.ended.tolist():
            assert self.outputs(row) == self.streams[row].want
            self.forget(row)
        return sampled

    def fail(self, plan: StepPlan) -> None:
        """The oldest step failed: only a request alone in it is dropped, others keep everything."""
        rows = self.scheduler.rows_of(plan).tolist()
        had = {row: self.outputs(row) for row in self.streams}
        at_fault = self.scheduler.fail(plan).tolist()
        assert len(at_fault) <= 1
        assert not at_fault or at_fault == rows
        for row in at_fault:
            self.num_faults += 1
            self.forget(row)
        for row in self.streams:
            assert self.outputs(row) == had[row]

    def finish(self, ahead: int = 1) -> int:
        """Run until no work is left. Returns the number of steps launched."""
        steps = 0
        while self.scheduler.has_work or self.launched:
            self.acknowledge()
            plan = self.launch()
            steps += plan is not None
            assert steps < 5_000, "a request starves"
            assert plan is not None or self.launched, "work is left, but no request can run"
            while len(self.launched) > (ahead if plan is not None else 0):
                self.collect()
        assert not self.streams
        assert self.scheduler.num_free_blocks == self.limits.num_blocks - 1
        return steps

    def check(self, plan: StepPlan, host_lens: dict[int, int]) -> None:
        """Assert the invariants of a plan's columns. host_lens: history lengths by row."""
        size = self.limits.block_size
        num_requests, num_sampled = plan.num_requests, int(plan.samples.sum())
        assert 0 < plan.num_tokens == plan.query_lens.sum() <= self.limits.max_num_batched_tokens
        assert (plan.query_lens[: plan.num_decodes] == 1).all()
        assert (plan.query_lens > 0).all()
        assert len(set(plan.slots.tolist())) == num_requests
        assert len(set(plan.kv_slots.tolist())) == plan.num_tokens
        assert plan.slots.max() < self.limits.max_num_seqs
        for column in (plan.query_lens, plan.kv_lens, plan.prompt_lens):
            assert len(column) == num_requests
            assert column.dtype == np.int32
        for column in (plan.token_ids, plan.gather_slots, plan.positions, plan.kv_slots):
            assert len(column) == plan.num_tokens
            assert column.dtype == np.int64
        sampling = (
            plan.temperatures,
            plan.top_ks,
            plan.top_ps,
            plan.min_ps,
            plan.seeds,
            plan.num_logprobs,
        )
        assert all(len(column) == num_sampled for column in sampling)
        assert plan.all_greedy == (plan.temperatures == 0).all()
        assert plan.max_logprobs == plan.num_logprobs.max(initial=-1)

        entries = plan.table_slots, plan.table_numbers
        assert len(set(zip(*(column.tolist() for column in entries), strict=True))) == len(
            plan.table_blocks
        )
        self.tables[entries] = plan.table_blocks
        owners = {stream.request.seed: stream for stream in self.streams.values()}
        masked: list[tuple[int, int]] = []
        end = nth = 0
        for i in range(num_requests):
            begin, end = end, end + int(plan.query_lens[i])
            positions = plan.positions[begin:end]
            kv_len = int(plan.kv_lens[i])
            assert positions.tolist() == list(range(kv_len - len(positions), kv_len))
            assert kv_len < self.limits.max_model_len
            slot = int(plan.slots[i])
            blocks = self.tables[slot, positions // size]
            assert (blocks > 0).all()
            # the scheduler's own may be some blocks behind
            num = min(-(-kv_len // size), int(self.scheduler._slots.num_blocks[slot]))
            whole = self.scheduler._slots.tables[slot, :num]
            assert self.tables[slot, :num].tolist() == whole.tolist()
            assert (plan.kv_slots[begin:end] == blocks * size + positions % size).all()
            gathered = plan.gather_slots[begin:end]
            if (gathered >= 0).any():
                assert i < plan.num_decodes
                assert gathered.tolist() == [plan.slots[i]]
            if plan.samples[i]:
                # requests are found by seed, which tests keep unique
                stream = owners[int(plan.seeds[nth])]
                row, request = stream.request.row, stream.request
                outputs = kv_len - request.prompt_len
                assert outputs < request.max_tokens
                assert (gathered[-1] >= 0) == (kv_len > host_lens[row])
                if gathered[-1] < 0:
                    history = self.log.read(row, kv_len - len(positions), kv_len)
                    assert plan.token_ids[begin:end].tolist() == history.tolist()
                if request.worker_ends:
                    behind = kv_len - max(int(self.acked[row]), request.prompt_len)
                    assert behind < self.limits.max_unacked
                if outputs < request.spec.params.min_tokens:
                    masked += [(nth, token) for token in request.stop_token_ids]
                nth += 1
        coordinates = zip(plan.masked_rows.tolist(), plan.masked_ids.tolist(), strict=True)
        assert list(coordinates) == masked


def prompt_of(length: int, salt: int = 0) -> list[int]:
    return [(7 * i + 3 * salt + 1) % VOCAB_SIZE for i in range(length)]
