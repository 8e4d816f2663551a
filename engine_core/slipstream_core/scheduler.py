"""Who computes which tokens in the next step.

Owns: the waiting queue, the slots, the block tables, and the count of what is in flight. There
is no prefill phase and no decode phase: every request catches `computed` up with the tokens
known of it, inside a budget of tokens per step, those that run already first.

Does not know: sockets, clocks, devices, text, why a request ends. Token ids pass through it
unread, from the runner into the history.

Rules:
- `known` counts the tokens in the history and those still in flight, so a step can be planned
  before the one ahead of it is collected, and a length limit is never overrun.
- Requests run by priority, then by arrival. Where a decoding request finds no free block, the
  one that is last in that order gives up all of its blocks and waits again (it computes its
  tokens anew later). In such a step nobody is admitted.
- Admission takes the blocks of all known tokens at once: a prefill under way never has to
  preempt, and only decoding requests, one block at a time, ask for more.
- A request that was preempted is admitted again only when none of its tokens is in flight.
- Removing frees slot and blocks at once. A step in flight may still use them: the device runs
  steps in order, so whoever gets them writes later.
- Tokens reach the row that they were sampled for, or nobody: a plan remembers generations.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import deque
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from slipstream_core.block_pool import BlockPool
from slipstream_core.columns import NO_SLOT, NewRequest, RequestColumns, SlotColumns
from slipstream_core.plan_builder import build_plan
from slipstream_core.runner.plan import StepPlan
from slipstream_ipc.log import PagedLog

__all__ = ["NewRequest", "Sampled", "Scheduler"]

Int64s = npt.NDArray[np.int64]
UInt32s = npt.NDArray[np.uint32]
Bools = npt.NDArray[np.bool_]

_UNBOUNDED = np.iinfo(np.int64).max


@dataclass(frozen=True, slots=True)
class Sampled:
    """What a step gave to the requests that still live, n of them."""

    rows: Int64s  # [n]
    token_ids: UInt32s  # [n]
    index: Int64s  # [n] their places among the step's S sampled rows
    ended: Int64s  # rows that reached their length limit; they compute no more


@dataclass(frozen=True, slots=True)
class _InFlight:
    """Whom a launched plan was for."""

    step: int
    rows: Int64s  # [R]
    generations: Int64s  # [R]
    samples: Bools  # [R]


class Scheduler:
    """Plans steps over the requests it was given and takes in what they sampled."""

    def __init__(
        self,
        *,
        tokens: PagedLog,
        num_blocks: int,
        block_size: int,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        max_model_len: int,
        max_unacked: int = 64,
    ) -> None:
        """`tokens` holds prompt and outputs of every row; its owner opens and drops the rows.

        `num_blocks` includes the null block and must hold one request of `max_model_len` tokens;
        `max_unacked` is how many outputs a request with `worker_ends` may be ahead of its worker.
        """
        max_blocks = -(-max_model_len // block_size)
        if num_blocks <= max_blocks:
            raise ValueError(
                f"num_blocks is {num_blocks}; one request of max_model_len {max_model_len} needs "
                f"{max_blocks} blocks of {block_size} tokens, and one block is the null block: "
                f"give at least {max_blocks + 1}, or a smaller max_model_len"
            )
        self._tokens = tokens
        self._block_size = block_size
        self._max_num_batched_tokens = max_num_batched_tokens
        self._max_model_len = max_model_len
        self._max_unacked = max_unacked
        self._pool = BlockPool(num_blocks)
        self._requests = RequestColumns()
        self._slots = SlotColumns(max_num_seqs, max_blocks)
        self._waiting: list[tuple[int, int, int]] = []  # (-priority, -arrival, row): next is last
        self._in_flight: deque[_InFlight] = deque()
        self._step = 0
        self._num_preemptions = 0

    @property
    def num_running(self) -> int:
        """Requests that hold a slot."""
        return self._slots.num_running

    @property
    def num_waiting(self) -> int:
        """Requests that do not run yet, or were preempted."""
        return len(self._waiting)

    @property
    def num_waiting_tokens(self) -> int:
        """Tokens that the waiting requests have to compute before their next output."""
        rows = [row for _, _, row in self._waiting]
        return int(self._requests.known[rows].sum()) if rows else 0

    @property
    def num_blocks(self) -> int:
        """Blocks of the cache, the null block included."""
        return self._pool.num_blocks

    @property
    def num_free_blocks(self) -> int:
        """Blocks that nobody holds."""
        return self._pool.num_free

    @property
    def num_preemptions(self) -> int:
        """Times that a request gave up its blocks."""
        return self._num_preemptions

    @property
    def has_work(self) -> bool:
        """Whether any request is here, running or waiting."""
        return bool(self._waiting) or self.num_running > 0

    def add(self, request: NewRequest) -> None:
        """Queue a request whose tokens are in the history: its prompt, and outputs so far."""
        row = request.row
        known = self._tokens.length(row)
        limit = min(request.prompt_len + request.max_tokens, self._max_model_len)
        if not 1 <= request.prompt_len <= known:
            raise ValueError(
                f"prompt_len is {request.prompt_len}; row {row} holds {known} tokens, "
                f"so it must be 1 to {known}"
            )
        if known >= limit:
            raise ValueError(
                f"row {row} holds {known} tokens and may grow to {limit}: nothing to compute"
            )
        assert not self._requests.is_alive(row), f"row {row} is in use"
        run_ahead = self._max_unacked if request.worker_ends else _UNBOUNDED
        self._requests.add(request, known=known, limit=limit, run_ahead=run_ahead)
        self._wait(row)

    def remove(self, row: int) -> None:
        """Forget a request, wherever it is. Removing one that is not here does nothing."""
        if self._requests.is_alive(row):
            self._remove(np.array([row]))

    def schedule(self, acked: Int64s) -> StepPlan | None:
        """The next step, or None where nobody can run.

        `acked[row]` is how many positions of the row's history the worker has acknowledged, the
        prompt's included. Every plan is to be launched, and answered by complete() or fail() in
        the same order.
        """
        requests = self._requests
        rows = self._slots.running()
        runnable = self._may_run(rows, acked)
        one_behind = requests.known[rows] - requests.computed[rows] == 1
        decoding = rows[runnable & one_behind]
        prefilling = rows[runnable & ~one_behind]

        if len(decoding) > self._max_num_batched_tokens:
            decoding = requests.in_order(decoding)[: self._max_num_batched_tokens]
        preemptions_before = self._num_preemptions
        decoding = self._extend_tables(decoding)
        budget = self._max_num_batched_tokens - len(decoding)
        chunks = self._continue(prefilling, budget)
        if self._waiting and self._num_preemptions == preemptions_before:
            chunks += self._admit(acked, budget - sum(count for _, count in chunks))
        if not len(decoding) and not chunks:
            return None
        return self._plan(decoding, chunks)

    def complete(self, plan: StepPlan, token_ids: npt.NDArray[np.integer]) -> Sampled:
        """Append what the oldest plan sampled, [S], to the history of those that still live."""
        record = self._pop(plan)
        index = np.arange(len(token_ids))
        rows = record.rows[record.samples]
        alive = self._requests.generation[rows] == record.generations[record.samples]
        if not alive.all():
            index, rows = index[alive], rows[alive]
            token_ids = token_ids[alive]
        ids = token_ids.astype(np.uint32)
        self._tokens.append(rows, ids)
        ended = rows[self._tokens.lengths(rows) >= self._requests.limit[rows]]
        if len(ended):
            self._remove(ended)
        return Sampled(rows, ids, index, ended)

    def fail(self, plan: StepPlan) -> Int64s:
        """Remove the requests of the oldest plan, whose step failed; returns those that lived."""
        record = self._pop(plan)
        alive = self._requests.generation[record.rows] == record.generations
        rows: Int64s = record.rows[alive]
        self._remove(rows)
        return rows

    def _may_run(self, rows: Int64s, acked: Int64s) -> Bools:
        """Whether each row may sample one more: below its limit, not too far ahead."""
        requests = self._requests
        known = requests.known[rows]
        unacked = known - np.maximum(acked[rows], requests.prompt_len[rows])
        return np.logical_and(known < requests.limit[rows], unacked < requests.run_ahead[rows])

    def _extend_tables(self, decoding: Int64s) -> Int64s:
        """Make room for one more token of each row; returns the rows that were not preempted."""
        requests, slots = self._requests, self._slots
        at = requests.slot[decoding]
        full = slots.num_blocks[at] * self._block_size == requests.computed[decoding]
        asking = at[full]
        if len(asking) > self._pool.num_free:
            # The last in order goes until the rest fits: nobody gives way to one behind him.
            candidates = requests.in_order(slots.running()).tolist()
            while len(asking) > self._pool.num_free:
                self._preempt(candidates.pop())
                asking = at[full & (requests.slot[decoding] == at)]
            decoding = decoding[requests.slot[decoding] == at]
        if len(asking):
            slots.append_blocks(asking, self._pool.allocate(len(asking)))
        return decoding

    def _continue(self, prefilling: Int64s, budget: int) -> list[tuple[int, int]]:
        """The next chunk of each request under way that still runs, while the budget lasts."""
        if not len(prefilling):
            return []
        requests = self._requests
        chunks: list[tuple[int, int]] = []
        for row in requests.in_order(prefilling[requests.slot[prefilling] != NO_SLOT]).tolist():
            count = min(budget, int(requests.known[row] - requests.computed[row]))
            if count > 0:
                chunks.append((row, count))
                budget -= count
        return chunks

    def _admit(self, acked: Int64s, budget: int) -> list[tuple[int, int]]:
        """Let waiting requests run while budget, slots and blocks last; their first chunks.

        A chunk is (row, tokens).
        """
        requests = self._requests
        chunks: list[tuple[int, int]] = []
        index = len(self._waiting) - 1
        while index >= 0 and budget > 0 and self._slots.num_free:
            row = self._waiting[index][2]
            known = int(requests.known[row])
            if known > self._tokens.length(row):
                break  # preempted, its last token still in flight
            if not self._may_run(np.array([row]), acked)[0]:
                index -= 1  # its worker may be stuck: that is not for the others to wait for
                continue
            # one token more than it has, lest it be preempted at its first output
            if -(-(known + 1) // self._block_size) > self._pool.num_free:
                break
            del self._waiting[index]
            index -= 1
            blocks = self._pool.allocate(-(-known // self._block_size))
            requests.slot[row] = self._slots.take(row, blocks)
            chunks.append((row, min(budget, known)))
            budget -= chunks[-1][1]
        return chunks

    def _plan(self, decoding: Int64s, chunks: list[tuple[int, int]]) -> StepPlan:
        """The step of these rows; from here on it counts as computed, its tokens as known."""
        requests = self._requests
        rows, counts = decoding, np.ones(len(decoding), np.int64)
        if chunks:
            more = np.array(chunks, np.int64)
            rows = np.concatenate([rows, more[:, 0]])
            counts = np.concatenate([counts, more[:, 1]])
        self._step += 1
        plan = build_plan(
            requests,
            self._slots,
            self._tokens,
            step=self._step,
            rows=rows,
            counts=counts,
            num_decodes=len(decoding),
            block_size=self._block_size,
        )
        requests.computed[rows] = plan.kv_lens
        requests.known[rows] += plan.samples
        record = _InFlight(self._step, rows, requests.generation[rows], plan.samples)
        self._in_flight.append(record)
        return plan

    def _pop(self, plan: StepPlan) -> _InFlight:
        record = self._in_flight.popleft()
        assert record.step == plan.step, f"step {plan.step} answered before {record.step}"
        return record

    def _wait(self, row: int) -> None:
        insort(self._waiting, self._key(row))

    def _key(self, row: int) -> tuple[int, int, int]:
        return -int(self._requests.priority[row]), -int(self._requests.arrival[row]), row

    def _preempt(self, row: int) -> None:
        """Take slot and blocks from a running request and let it wait in its old place."""
        self._release(np.array([row]))
        self._requests.computed[row] = 0
        self._wait(row)
        self._num_preemptions += 1

    def _remove(self, rows: Int64s) -> None:
        """Forget live requests, all different, running or waiting."""
        requests = self._requests
        runs = requests.slot[rows] != NO_SLOT
        self._release(rows[runs])
        for row in rows[~runs].tolist():
            del self._waiting[bisect_left(self._waiting, self._key(row))]
        requests.remove(rows)

    def _release(self, rows: Int64s) -> None:
        """Free slots and blocks of running requests."""
        if len(rows):
            self._pool.release(self._slots.give_back(self._requests.slot[rows]))
            self._requests.slot[rows] = NO_SLOT
