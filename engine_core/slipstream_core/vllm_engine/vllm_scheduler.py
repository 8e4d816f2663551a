"""The requests that vLLM computes, by row: those in its engine, and those that a turn gave tokens.

- vLLM schedules. Here requests wait until there is room for them in its engine, where a few more
  than it can run are ready, so that it never lacks one. They begin by priority, then in the order
  in which they came.
- A request whose end its worker decides is taken back when it is `_MAX_UNACKED` tokens ahead of the
  worker, as vLLM cannot leave out a single one, and begins again once the worker has half of them.
  Where all requests are that far ahead, no turn is launched instead.
- A suspect runs alone: what runs beside it is taken back.
- What is taken back begins again with all of its tokens, ahead of what never began.
- A request with log-probabilities begins when there is room for those of all its outputs, as it
  cannot be held up later.
"""

from __future__ import annotations

import heapq
from dataclasses import replace

import numpy as np
import numpy.typing as npt

from slipstream_core.kvcache.snapshots import Snapshots
from slipstream_core.scheduler.launched_steps import Sampled
from slipstream_core.scheduler.logprob_budget import LogprobBudget, outputs_bytes
from slipstream_core.scheduler.request_table import Acked, NewRequest, positions
from slipstream_core.step.limits import NO_ROW
from slipstream_core.vllm_engine.engine_requests import engine_request
from slipstream_core.vllm_engine.runner import VllmRunner
from slipstream_core.vllm_engine.turn import VllmTurn
from slipstream_ipc.arrays import Int64s
from slipstream_ipc.history.token_log import TokenLog
from slipstream_ipc.messages import Admit, Fault
from slipstream_ipc.row_set import NO_ROWS, RowSet

_MAX_UNACKED = 64  # outputs, as in `Scheduler`
_RESUME_UNACKED = _MAX_UNACKED // 2
_BEGUN = -(2**62)  # added to an arrival, orders it ahead of those that never began
_READY_SHARE, _MIN_READY = 8, 8  # requests ready in vLLM: 1 / 8 of those that it runs, or 8
_NONE: Int64s = np.empty(0, np.int64)


def max_in_engine(max_num_seqs: int) -> int:
    """The requests that vLLM has at a time: those that it runs, and those that are ready."""
    return max_num_seqs + max(_MIN_READY, max_num_seqs // _READY_SHARE)


class VllmFailed(RuntimeError):  # noqa: N818  (an outcome, not a mistake of the caller)
    """A turn raised: vLLM's state is unknown, and the core ends."""


class VllmScheduler:
    """Implements Scheduling over vLLM's engine core."""

    def __init__(
        self,
        tokens: TokenLog,
        runner: VllmRunner,
        max_num_seqs: int,
        logprob_budget: LogprobBudget,
    ) -> None:
        """`tokens` holds prompt and outputs of every row; its owner opens and drops the rows."""
        self._tokens, self._runner = tokens, runner
        self.max_num_seqs = max_num_seqs
        self.block_size = runner.info.block_size
        self.num_blocks = runner.num_blocks
        self.snapshots = Snapshots(0)
        self.prefix_cache_queries = self.prefix_cache_hits = 0
        self.num_prompt_tokens_left = 0  # vLLM's own
        self._budget = logprob_budget
        self._requests: dict[int, NewRequest] = {}  # by row
        self._queue: list[tuple[int, int, int]] = []  # heap of priority, arrival, row
        self._arrivals: dict[int, int] = {}  # by row, of the requests that are not in vLLM
        self._num_arrivals = 0
        self._row_of: dict[str, int] = {}  # by id, of the requests in vLLM
        self._id_of: dict[int, str] = {}
        self._life = 0  # of the request that began last: ids are used once
        self._untouched: dict[int, int] = {}  # by row, without a token: tokens to compute
        self._masked: dict[int, str] = {}  # ids by row, in vLLM
        self._suspects: dict[int, None] = {}  # rows, in order
        self._held: dict[int, None] = {}  # rows taken back, too far ahead of their workers
        self._with_room: set[int] = set()  # rows with room for all of their log-probabilities
        self._num_shared: dict[int, int] = {}  # by row
        self._started: list[int] = []
        self._step = 0
        self._num_in_flight = 0  # turns
        self._version = 0  # it ascends when what is in vLLM changes
        self._columns: tuple[int, Int64s, Int64s, Int64s] = -1, _NONE, _NONE, _NONE
        # the ids of the last turn, the version that they were looked up in, and their rows
        self._last: tuple[list[str], int, RowSet, Int64s] = ([], -1, NO_ROWS, _NONE)

    @property
    def max_in_step(self) -> int:
        """The requests that vLLM has at a time."""
        return max_in_engine(self.max_num_seqs)

    def objection(self, admit: Admit) -> Fault | None:
        """The reason why vLLM cannot compute a registration; None where it can."""
        return self._runner.objections(admit)

    @property
    def has_work(self) -> bool:
        """True if there is any request."""
        return bool(self._requests)

    @property
    def has_suspects(self) -> bool:
        """True if a request has to run alone."""
        return bool(self._suspects)

    @property
    def num_running(self) -> int:
        """Requests that have got a token since they began."""
        return len(self._requests) - self.num_waiting

    @property
    def num_waiting(self) -> int:
        """Requests without a token since they began."""
        return len(self._untouched)

    @property
    def num_waiting_tokens(self) -> int:
        """Tokens that those have to compute."""
        return sum(self._untouched.values())

    @property
    def num_free_blocks(self) -> int:
        """Blocks that no request holds."""
        return self._runner.num_free_blocks

    @property
    def num_preemptions(self) -> int:
        """Times that vLLM has preempted a request."""
        return self._runner.num_preemptions

    def adapters_in_use(self) -> tuple[dict[int, int], dict[int, int]]:
        """Numbers of requests by the place of their adapter: those that vLLM has, and others."""
        found: tuple[dict[int, int], dict[int, int]] = {}, {}
        for row, request in self._requests.items():
            if request.adapter >= 0:
                nums = found[row not in self._id_of]
                nums[request.adapter] = nums.get(request.adapter, 0) + 1
        return found

    def eviction_age(self, now: float) -> None:
        """Unknown of vLLM's cache."""
        return

    def waiting_of(self, tenant: bytes) -> tuple[int, int]:
        """The number of a tenant's requests without a token, and their tokens."""
        requests = self._requests
        own = [n for row, n in self._untouched.items() if requests[row].spec.tenant == tenant]
        return len(own), sum(own)

    def num_shared(self, row: int) -> int:
        """The number of a request's tokens that were in vLLM's prefix cache when it began."""
        return self._num_shared.get(row, 0)

    def take_admitted(self) -> list[int]:
        """The rows that got their first token since the last call: vLLM says no earlier that a
        request runs.
        """
        started, self._started = self._started, []
        return started

    def acks_moved_back(self) -> None:
        """Acknowledged positions are looked at before every turn."""

    def has_prompt_logprobs(self, row: int) -> None:
        """A prompt is scored once, also where its request is taken back."""
        if row in self._requests:
            self._requests[row] = replace(self._requests[row], num_prompt_logprobs=-1)

    def add(self, request: NewRequest) -> None:
        """Queue a request whose tokens, its prompt and outputs so far, are in the history."""
        row, known = request.row, self._tokens.length(request.row)
        if not 1 <= request.prompt_len <= known:
            raise ValueError(f"prompt_len is {request.prompt_len}; row {row} holds {known} tokens")
        if known >= request.prompt_len + request.max_tokens:
            raise ValueError(f"row {row} holds {known} tokens: nothing to compute")
        assert row not in self._requests, f"row {row} is in use"
        self._requests[row] = request
        self._num_shared[row] = 0  # it is asked for also when the request is gone
        if request.is_suspect:
            self._suspects[row] = None
        self._wait(row)

    def remove(self, row: int) -> None:
        """Remove a request, waiting or in vLLM. Does nothing if it is not here."""
        if row in self._requests:
            if row in self._id_of:
                self._take_back(row)
            self._drop(row)

    def schedule(self, acked: Acked) -> VllmTurn | None:
        """A turn of vLLM, or None while there is nothing to compute, or it may not run ahead."""
        if not self._requests or not self._may_launch(acked):
            return None
        if self._suspects:
            begins = self._suspect_alone()
        else:
            begins = [self._begin(row) for row in self._next_rows()]
        if not self._id_of:
            return None
        self._step += 1
        self._num_in_flight += 1
        rows = self._rows()[0]
        return VllmTurn(self._step, rows, begins, list(self._masked.values()))

    def rows_of(self, plan: VllmTurn) -> Int64s:
        """The rows of the requests that were in vLLM at the launch."""
        return plan.rows

    def grammar_rows_of(self, plan: VllmTurn) -> Int64s:
        """The rows of the requests that sample with a mask, [G]; NO_ROW where one is gone."""
        return np.array([self._row_of.get(each, NO_ROW) for each in plan.masked_ids], np.int64)

    def prompt_rows_of(self, plan: VllmTurn) -> Int64s:
        """The rows whose prompts are scored, [P]; NO_ROW where one is gone."""
        assert plan.prompt is not None
        ids = plan.prompt.request_ids
        return np.array([self._row_of.get(each, NO_ROW) for each in ids], np.int64)

    def complete(
        self,
        plan: VllmTurn,
        token_ids: npt.NDArray[np.integer],
        counts: Int64s | None = None,
        undefined: Int64s | None = None,
    ) -> Sampled:
        """Append a turn's tokens to the histories of the requests that are still here.

        undefined: None, as vLLM names no rows whose logits are not numbers.
        """
        assert undefined is None
        self._num_in_flight -= 1
        for request_id, num_cached in plan.cached:
            self._start(request_id, num_cached)
        rows, index = self._live(plan.request_ids)
        if counts is None:
            own, tokens = None, token_ids[index].astype(np.uint32)
            self._tokens.append(rows, tokens)
        else:
            own = counts[index]
            firsts = (np.cumsum(counts) - counts)[index]
            index = np.repeat(firsts - (np.cumsum(own) - own), own) + np.arange(own.sum())
            tokens = token_ids[index].astype(np.uint32)
            self._tokens.append_spans(rows, own, tokens)
        self._take_reasoning(rows, tokens, own)
        ended, faults = self._take_ended(plan)
        return Sampled(rows, tokens, index, ended, own, faults)

    def fail(self, plan: VllmTurn) -> Int64s:
        """Raises VllmFailed: the core ends, and another goes on with its streams."""
        raise VllmFailed(f"turn {plan.step} failed in {self._runner.info.engine}; the core ends")

    def _wait(self, row: int, *, has_begun: bool = False) -> None:
        request = self._requests[row]
        self._num_arrivals += 1
        self._arrivals[row] = self._num_arrivals + (_BEGUN if has_begun else 0)
        heapq.heappush(self._queue, (request.spec.priority, self._arrivals[row], row))
        self._untouched[row] = self._tokens.length(row)

    def _next_rows(self) -> list[int]:
        """Take the rows that may begin now from the queue."""
        rows: list[int] = []
        lacking: list[tuple[int, int, int]] = []
        num_free = self.max_in_step - len(self._id_of)
        while self._queue and len(rows) < num_free:
            entry = heapq.heappop(self._queue)
            if self._arrivals.get(entry[2]) != entry[1]:
                continue  # of a request that is gone
            # where nothing runs, one goes beyond the bound
            if self._reserve(entry[2], force=not self._id_of and not rows):
                rows.append(entry[2])
            else:
                lacking.append(entry)
        for entry in lacking:
            heapq.heappush(self._queue, entry)
        return rows

    def _reserve(self, row: int, *, force: bool = False) -> bool:
        """Reserve room for the log-probabilities of all outputs; True if there is any."""
        request = self._requests[row]
        if request.num_logprobs < 0 or row in self._with_room:
            return True
        num_left = request.prompt_len + request.max_tokens - self._tokens.length(row)
        # room for the first ones was reserved on admission
        num_bytes = outputs_bytes(request.num_logprobs, num_left)
        num_bytes -= outputs_bytes(request.num_logprobs, 1)
        if not self._budget.grow(row, num_bytes, force=force):
            self._budget.waiting.add(row)
            return False
        self._budget.waiting.discard(row)
        self._with_room.add(row)
        return True

    def _begin(self, row: int) -> object:
        """The vLLM request of a waiting row, which is in vLLM from now on."""
        request = self._requests[row]
        del self._arrivals[row]
        ids: list[int] = self._tokens.read(row, 0, self._tokens.length(row)).tolist()
        self._life += 1
        request_id = f"{row}.{self._life}"
        self._row_of[request_id], self._id_of[row] = row, request_id
        if request.has_grammar or request.reasoning is not None:
            self._masked[row] = request_id
        self._version += 1
        return engine_request(
            request,
            request_id,
            ids[: request.prompt_len],
            ids[request.prompt_len :],
            self._runner.adapters.request_at(request.adapter),
        )

    def _suspect_alone(self) -> list[object]:
        """Begin the first suspect, or go on with it, with nothing else in vLLM."""
        alone = next(iter(self._suspects))
        for row in [row for row in self._id_of if row != alone]:
            self._take_back(row)
            self._wait(row, has_begun=True)
        if self._num_in_flight or alone in self._id_of:
            return []  # its turns are alone, too, in what is known of those in flight
        self._reserve(alone, force=True)
        return [self._begin(alone)]

    def _take_back(self, row: int) -> None:
        """Abort a row's request in vLLM."""
        self._runner.abort(self._id_of[row])
        self._leave(row)

    def _leave(self, row: int) -> None:
        """A row's request is in vLLM no longer."""
        del self._row_of[self._id_of.pop(row)]
        self._masked.pop(row, None)
        self._version += 1

    def _drop(self, row: int) -> None:
        """A row's request is gone."""
        del self._requests[row]
        self._arrivals.pop(row, None)
        self._untouched.pop(row, None)
        self._suspects.pop(row, None)
        self._held.pop(row, None)
        self._with_room.discard(row)
        self._budget.waiting.discard(row)

    def _rows(self) -> tuple[Int64s, Int64s, Int64s]:
        """The rows in vLLM; and those whose end the worker decides, with their prompts' lengths."""
        if self._columns[0] != self._version:
            rows = np.fromiter(self._id_of, np.int64, len(self._id_of))
            bounded = [row for row in self._id_of if self._requests[row].worker_ends]
            lens = [self._requests[row].prompt_len for row in bounded]
            self._columns = (
                self._version,
                rows,
                np.array(bounded, np.int64),
                np.array(lens, np.int64),
            )
        return self._columns[1:]

    def _may_launch(self, acked: Acked) -> bool:
        """Take back the requests that are as far ahead of their workers as they may be; False if
        the next turn has to wait for what workers acknowledge.
        """
        if self._held:
            self._resume_held(acked)
        far = self._far_ahead(acked)
        if not far:
            return True
        if self._num_in_flight:
            return False  # its tokens are not lost, and acknowledgements may come first
        is_all = len(far) == len(self._id_of) and not self._arrivals
        if is_all or self._suspects:
            return False
        for row in far:
            self._take_back(row)
            self._held[row] = None
        return True

    def _far_ahead(self, acked: Acked) -> list[int]:
        _, rows, prompt_lens = self._rows()
        if not len(rows):
            return []
        in_flight = self._num_in_flight * self._runner.max_tokens_per_turn
        unacked = self._tokens.lengths(rows) - np.maximum(positions(acked)[rows], prompt_lens)
        far: list[int] = rows[unacked + in_flight >= _MAX_UNACKED].tolist()
        return far

    def _resume_held(self, acked: Acked) -> None:
        """Queue the requests that were taken back, once their workers are near enough."""
        at = positions(acked)
        for row in list(self._held):
            known = max(int(at[row]), self._requests[row].prompt_len)
            if self._tokens.length(row) - known <= _RESUME_UNACKED:
                del self._held[row]
                self._wait(row, has_begun=True)

    def _start(self, request_id: str, num_cached: int) -> None:
        """A request got its first token since it began."""
        row = self._row_of.get(request_id)
        if row is None or self._untouched.pop(row, None) is None:
            return
        self._num_shared[row] = num_cached
        self._started.append(row)
        self._suspects.pop(row, None)
        self.prefix_cache_queries += self._tokens.length(row)
        self.prefix_cache_hits += num_cached

    def _live(self, ids: list[str]) -> tuple[RowSet, Int64s]:
        """The rows of the requests that are still here, and their indices."""
        last_ids, version, rows, index = self._last
        if version != self._version or ids != last_ids:
            found = np.array([self._row_of.get(each, NO_ROW) for each in ids], np.int64)
            index = np.flatnonzero(found != NO_ROW)
            rows = RowSet(found[index])
            self._last = ids, self._version, rows, index
        return rows, index

    def _take_reasoning(
        self, rows: RowSet, tokens: npt.NDArray[np.uint32], own: Int64s | None
    ) -> None:
        """Advance the reasoning of the rows that have some: it decides their masks."""
        if not self._masked:
            return
        assert own is None, "rows with masks get one token each"
        for row, token_id in zip(rows.array.tolist(), tokens.tolist(), strict=True):
            request = self._requests[row]
            if request.reasoning is not None and not request.reasoning.is_final:
                index = self._tokens.length(row) - 1 - request.prompt_len
                request.reasoning.take(token_id, index)

    def _take_ended(self, plan: VllmTurn) -> tuple[Int64s, tuple[tuple[int, Fault], ...]]:
        """The rows whose requests vLLM has let go, and the faults of those it should not have."""
        ended: list[int] = []
        faults: list[tuple[int, Fault]] = []
        for request_id, reason in plan.ended:
            row = self._row_of.get(request_id)
            if row is None:
                continue
            self._leave(row)
            if not self._is_whole(row):
                engine = self._runner.info.engine
                faults.append((row, Fault("engine", f"{engine} has ended the request: {reason}")))
            self._drop(row)
            ended.append(row)
        return np.array(ended, np.int64), tuple(faults)

    def _is_whole(self, row: int) -> bool:
        """True if a request has all of its tokens, or one that may end it."""
        request = self._requests[row]
        if self._tokens.length(row) >= request.prompt_len + request.max_tokens:
            return True
        last = self._tokens.last(np.array([row]))
        return int(last[0]) in request.stop_token_ids
