"""Decides which requests compute which tokens in the next step.

There is no prefill phase and no decode phase: every request catches `computed` up with its known
tokens, inside a budget of tokens per step, running requests first. Token ids pass through unread,
from the runner into the history.

- `known` counts the tokens in the history and those in flight, so a step can be planned before the
  one ahead of it is collected, and a length limit is never overrun.
- Requests run by priority; those of equal priority by turns of their tenants, then by arrival
  (`waiting_queue`). Decoding requests come first, then prefills (`prefill`). If a decoding request
  finds no free block, the last in order is preempted (`running_set`); a step with a preemption
  admits no request.
- A sampled token reaches the request that it was sampled for, or is dropped: launched steps record
  generations.
- A step may give a row several tokens. What is in flight for that row then has the wrong positions
  and is dropped, and the next step computes all of its new tokens in a chunk. So it is where a
  token shows that the next one needs a mask (`reasoning_rows`). Keys are written again, but a
  recurrent state has run ahead: such a row goes on from its second place (`state_twins`), or is
  preempted, and begins behind the last state of its tokens that the prefix cache has. Behind
  drafts it goes on from the state that is right (`draft_states`).
- Where a drafter foresees tokens, a step computes drafts of the rows that decode as well. What is
  sampled behind them decides how far rows came, so it is planned once all steps before are
  answered, and nothing is planned behind it. Blocks in which all drafts were wrong are freed.
  Where a draft model foresees them, a step of its own comes first (`proposals`).
- Room for log-probabilities is given as rows grow, in order (`logprob_budget`). A row without room
  gives up its slot until there is some. If all rows that hold room wait for more, the first goes on
  beyond the bound, to its end.
- A suspect runs alone (`suspects`). A failed step makes its requests suspects, and the results of
  steps launched behind it do not count for them.
- Requests that shared a block which a failed step was to fill compute everything anew, too (see
  `request_blocks`).
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import numpy.typing as npt
from msgspec.structs import replace

from slipstream_core.drafting.drafter import Drafter, Drafts
from slipstream_core.drafting.model_drafter import ModelDrafter
from slipstream_core.kvcache.snapshots import Snapshots
from slipstream_core.media.places import MediaPlaces, media_plan
from slipstream_core.scheduler.decode_batch import DecodeBatch, SteadyDecode
from slipstream_core.scheduler.launched_steps import Launched, LaunchedSteps, Sampled
from slipstream_core.scheduler.logprob_budget import LogprobBudget, outputs_bytes, step_len
from slipstream_core.scheduler.prefill import Chunk, Prefill
from slipstream_core.scheduler.prompt_logprobs import PromptLogprobRows
from slipstream_core.scheduler.proposals import Proposals
from slipstream_core.scheduler.reasoning_rows import ReasoningRows
from slipstream_core.scheduler.request_blocks import CacheConfig, RequestBlocks
from slipstream_core.scheduler.request_table import (
    NO_SLOT,
    Acked,
    NewRequest,
    RequestTable,
    SlotTable,
    positions,
)
from slipstream_core.scheduler.running_set import RunningSet
from slipstream_core.scheduler.span_completer import SpanCompleter
from slipstream_core.scheduler.step_builder import PlanBuilder, TokenColumns, token_columns
from slipstream_core.scheduler.suspects import SuspectQueue
from slipstream_core.step.limits import NO_ROW
from slipstream_core.step.plan import FrontSaves, SnapshotPlan, StepPlan
from slipstream_ipc.arrays import Int64s
from slipstream_ipc.columns import u32
from slipstream_ipc.history.pages import PAGE_LEN, spans
from slipstream_ipc.history.token_log import TokenLog
from slipstream_ipc.messages import Admit, Fault
from slipstream_ipc.row_set import NO_ROWS, RowSet

__all__ = ["CacheConfig", "NewRequest", "Sampled", "Scheduler"]


_UINT32 = np.dtype(np.uint32)  # a dtype saves numpy looking one up for the type
_UNBOUNDED = np.iinfo(np.int64).max
_NO_ROWS: Int64s = np.empty(0, np.int64)
_NOTHING = Sampled(NO_ROWS, np.empty(0, _UINT32), _NO_ROWS, _NO_ROWS)
_UNDEFINED = (
    "the model's logits behind {} tokens of the answer are not numbers (NaN or infinite): its "
    "weights, or a data type too narrow for them, are at fault, not the request"
)


class Scheduler:
    """Plans steps over its requests and takes in what was sampled."""

    def __init__(
        self,
        *,
        tokens: TokenLog,
        cache: CacheConfig,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        max_model_len: int,
        max_unacked: int = 64,
        logprob_budget: LogprobBudget | None = None,
        drafter: Drafter | None = None,
        by_model: ModelDrafter | None = None,
    ) -> None:
        """`tokens` holds prompt and outputs of every row; its owner opens and drops the rows.

        The blocks of `cache` must hold one request of `max_model_len` tokens.
        `max_unacked` is how many outputs a request with `worker_ends` may be ahead of its worker.
        `logprob_budget` holds the reservations of rows that want log-probabilities, and its owner
        opens and closes them there; None: no bound. `drafter`: for a runner that takes drafts.
        `by_model`: the part of it that a draft model drafts for, if the runner has one.

        Raises ValueError where there are too few blocks.
        """
        num_blocks, block_size = cache.num_blocks, cache.block_size
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
        self._requests = RequestTable()
        self._slots = SlotTable(max_num_seqs, max_blocks)
        self._in_flight = LaunchedSteps()
        self._blocks = RequestBlocks(self._requests, self._slots, tokens, cache, self._in_flight)
        self._logprob_budget = LogprobBudget() if logprob_budget is None else logprob_budget
        self._unbounded: int | None = None  # the row that may exceed the budget
        self._running_set = RunningSet(
            self._requests,
            self._slots,
            self._blocks,
            block_size=block_size,
            logprob_budget=self._logprob_budget,
        )
        self._prompts = PromptLogprobRows(tokens)
        self._media: dict[int, MediaPlaces] = {}  # by row, of those alive
        self._prefill = Prefill(
            self._requests, self._slots, self._blocks, self._running_set, self._prompts, tokens
        )
        self._reasoning = ReasoningRows(self._requests)
        self._suspects = SuspectQueue(self._requests)
        self._builder = PlanBuilder(self._requests, tokens)
        self._batch: DecodeBatch | None = None  # while the same requests decode, one token each
        self._steady = SteadyDecode()  # of the rows sampled last
        self._completer = SpanCompleter(self._requests, tokens)
        self._has_states = cache.has_states
        self._drafter = drafter
        self._proposals: Proposals | None = None
        if by_model is not None:
            self._proposals = Proposals(
                by_model, self._requests, self._slots, self._blocks, tokens, block_size
            )
        self._preemptions_before = 0  # the step of the model that is being planned
        self._step = 0

    @property
    def num_running(self) -> int:
        """Requests that hold a slot."""
        return self._slots.num_running

    @property
    def max_num_seqs(self) -> int:
        """Requests that may hold a slot."""
        return len(self._slots.row)

    @property
    def max_in_step(self) -> int:
        """Requests that a step may compute: those that hold a slot."""
        return self.max_num_seqs

    def objection(self, _admit: Admit) -> Fault | None:
        """None: what is checked for every engine is all there is."""
        return None

    @property
    def num_waiting(self) -> int:
        """Requests that do not run yet, or were preempted."""
        return len(self._running_set.waiting) + len(self._logprob_budget.waiting)

    @property
    def num_waiting_tokens(self) -> int:
        """Tokens that the waiting requests have to compute before their next output."""
        lacking = list(self._logprob_budget.waiting)
        return self._running_set.waiting.num_tokens + self._num_known(lacking)

    def waiting_of(self, tenant: bytes) -> tuple[int, int]:
        """The number of a tenant's requests that wait, and of the tokens that they have to
        compute.
        """
        num, num_tokens = self._running_set.waiting.of_tenant(tenant)
        tenants = self._requests.tenants
        lacking = [row for row in self._logprob_budget.waiting if tenants[row] == tenant]
        return num + len(lacking), num_tokens + self._num_known(lacking)

    @property
    def block_size(self) -> int:
        """Tokens in a block of the cache."""
        return self._block_size

    @property
    def num_blocks(self) -> int:
        """Blocks of the cache, the null block included."""
        return self._blocks.num_blocks

    @property
    def num_free_blocks(self) -> int:
        """Blocks that no request holds."""
        return self._blocks.num_free

    @property
    def snapshots(self) -> Snapshots:
        """The prefix cache's copies of recurrent states; to be read only."""
        return self._blocks.snapshots

    @property
    def num_prompt_tokens_left(self) -> int:
        """Tokens of running requests' prompts that no launched step computes."""
        rows, requests = self._slots.running().array, self._requests
        left = requests.prompt_len[rows] - requests.computed[rows]
        return int(np.maximum(left, 0).sum())

    def eviction_age(self, now: float) -> float | None:
        """Seconds since the cached block that was evicted last was last used; None if none was."""
        return self._blocks.eviction_age(now)

    @property
    def num_preemptions(self) -> int:
        """Times that a request gave up its blocks."""
        return self._running_set.num_preemptions

    @property
    def prefix_cache_queries(self) -> int:
        """Tokens of admitted requests that were looked up in the prefix cache."""
        return self._blocks.num_query_tokens

    @property
    def prefix_cache_hits(self) -> int:
        """Tokens of admitted requests that were found in the prefix cache, and not computed."""
        return self._blocks.num_hit_tokens

    def adapters_in_use(self) -> tuple[Mapping[int, int], Mapping[int, int]]:
        """Numbers of requests by the place of their adapter: those that run, and that wait."""
        return self._requests.adapters_in_use()

    @property
    def has_work(self) -> bool:
        """True if there is any request, running or waiting."""
        return self._slots.num_running > 0 or self.num_waiting > 0

    @property
    def has_suspects(self) -> bool:
        """True if a request has to run alone."""
        return len(self._suspects) > 0

    def take_admitted(self) -> list[int]:
        """The rows that began to run since the last call; preempted ones begin again."""
        return self._running_set.take_started()

    def num_shared(self, row: int) -> int:
        """The number of a request's tokens that were in the prefix cache when it last began to
        run.
        """
        return int(self._requests.num_shared[row])

    def add(self, request: NewRequest) -> None:
        """Queue a request whose tokens, its prompt and outputs so far, are in the history.

        Raises ValueError where prompt_len or the length limit does not fit the history.
        """
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
        if request.reasoning is not None:
            self._reasoning.add(row, request.reasoning, request.masked_ids)
        self._blocks.open(row, request.prefix_root, request.media)
        if request.media is not None:
            self._media[row] = request.media
        if request.num_prompt_logprobs >= 0:
            self._prompts.add(row, request.prompt_len, request.num_prompt_logprobs)
        self._suspects.added(row)
        self._running_set.waiting.join(row)
        if self._drafter is not None:
            prediction = u32(request.prediction_ids)
            self._drafter.open(row, request.prefix_root, request.prompt_len, prediction)
        if self._proposals is not None and request.media is not None:
            self._proposals.leave_out(np.array([row]))  # the draft model sees no images

    def remove(self, row: int) -> None:
        """Remove a request, running or waiting. Does nothing if it is not here."""
        if self._requests.is_alive(row):
            self._remove(np.array([row]))

    def schedule(self, acked: Acked) -> StepPlan | None:
        """The next step, or None if no request can run.

        Every plan has to be launched, and answered by complete() or fail() in the same order.
        `acked`: see `request_table.Acked`.
        """
        requests = self._requests
        if self._in_flight.has_suspect or self._in_flight.has_drafts:
            return None
        awaits_tokens = self._drafter is not None and self._drafter.awaits_tokens
        if awaits_tokens and self._in_flight:
            return None
        if self._batch is not None:
            plan = None if self._suspects or awaits_tokens else self._plan_again(self._batch, acked)
            if plan is not None:
                return plan
            self._end_batch()
        if requests.num_growing:
            self._reserve_logprobs()
        if self._suspects:
            row = self._suspects.first(acked)
            if row is not None:
                return None if self._in_flight else self._plan_alone(row)
        decoding = self._slots.running()
        rows, prefilling = decoding.array, _NO_ROWS
        runnable = requests.may_run(rows, acked)
        one_behind = requests.known[rows] - requests.computed[rows] == 1
        if not (runnable.all() and one_behind.all()):
            decoding = RowSet(rows[runnable & one_behind])
            prefilling = rows[runnable & ~one_behind]

        if len(decoding) > self._max_num_batched_tokens:
            first = requests.in_order(decoding.array)[: self._max_num_batched_tokens]
            decoding = RowSet(first)
        if self._proposals is not None and not len(decoding):
            self._proposals.used(_NO_ROWS, None)  # its rows have ended, or wait for their workers
        if self._proposals is None or not self._proposals.are_answered:
            self._preemptions_before = self._running_set.num_preemptions
        if len(prefilling) and self._running_set.extend_to_known(prefilling):
            decoding = RowSet(decoding.array[requests.slot[decoding.array] != NO_SLOT])
        decoding = self._running_set.extend_tables(decoding)
        may_draft = self._drafter is not None and not (self._in_flight or self._suspects)
        if self._proposals is not None and may_draft and len(decoding):
            plan = self._plan_proposal(self._proposals, decoding, prefilling, acked)
            if plan is not None:
                return plan
        budget = self._max_num_batched_tokens - len(decoding)
        chunks = self._prefill.continue_chunks(prefilling, budget)
        num_preemptions = self._running_set.num_preemptions
        if self._running_set.waiting and num_preemptions == self._preemptions_before:
            chunks += self._prefill.admit(acked, budget - sum(count for _, count in chunks))
        if not len(decoding) and not chunks:
            return None
        drafts = None
        is_drafted = may_draft
        if is_drafted and self._media and self._computes_images(decoding, chunks):
            is_drafted = False  # the places of images among tokens are those without drafts
        if self._drafter is not None and is_drafted and len(decoding):
            num_beside = sum(count for _, count in chunks)
            drafts = self._drafts(self._drafter, decoding, num_beside, acked)
        if self._proposals is not None:
            self._proposals.used(decoding.array, None if drafts is None else drafts.lens)
        return self._plan(decoding, chunks, drafts)

    def complete(
        self,
        plan: StepPlan,
        token_ids: npt.NDArray[np.integer],
        counts: Int64s | None = None,
        undefined: Int64s | None = None,
    ) -> Sampled:
        """Append what the oldest plan sampled to the histories of live requests.

        `token_ids`, `counts` and `undefined` are as in StepResult; requests whose logits were
        undefined are removed, with a fault. Of a row's tokens, those beyond its limit or
        its room for log-probabilities are dropped, and those that lack the mask which they need.
        """
        record = self._in_flight.popleft()
        assert record.step == plan.step, f"step {plan.step} answered before {record.step}"
        if plan.is_proposal:
            assert self._proposals is not None
            self._proposals.answered(plan, record, token_ids.astype(np.int64, copy=False))
            return _NOTHING
        faults = () if undefined is None else self._give_up(record, undefined)
        sampled = self._take_in(plan, record, token_ids, counts)
        if faults:
            sampled = replace(sampled, faults=faults)
        if plan.draft_lens is not None:
            rows = sampled.rows.array
            slots = self._requests.slot[rows]
            slots = slots[slots != NO_SLOT]
            self._blocks.cut(slots)
            self._blocks.settle_drafts(slots)
        if self._proposals is not None:
            self._proposals.took_in(sampled.rows, sampled.token_ids, sampled.counts)
        if self._drafter is not None:
            self._drafter.observe(sampled.rows, sampled.token_ids, sampled.counts, self._tokens)
        return sampled

    def _give_up(self, record: Launched, undefined: Int64s) -> tuple[tuple[int, Fault], ...]:
        """Remove the requests among a step's sampled rows whose logits were not numbers, and what
        they have left in the prefix cache; returns their faults.
        """
        rows = self._live(record.sampled.array[undefined], record.sampled_generations[undefined])
        rows = rows[rows != NO_ROW]
        if not len(rows):
            return ()
        self._end_batch()
        nums = self._tokens.lengths(rows) - self._requests.prompt_len[rows]
        self._blocks.distrust(rows[self._requests.slot[rows] != NO_SLOT])
        self._remove(rows)
        return tuple(
            (row, Fault("engine", _UNDEFINED.format(num)))
            for row, num in zip(rows.tolist(), nums.tolist(), strict=True)
        )

    def _take_in(
        self,
        plan: StepPlan,
        record: Launched,
        token_ids: npt.NDArray[np.integer],
        counts: Int64s | None,
    ) -> Sampled:
        """Append what a step sampled, as `complete` does."""
        rows = record.sampled
        reasoning = self._reasoning
        if counts is None and reasoning.by_row and reasoning.watches(rows.array, token_ids):
            counts = np.ones(len(token_ids), np.int64)
        if counts is not None:
            return self._complete_several(plan, record, token_ids, counts)
        steady = self._steady
        if (
            rows is steady.rows
            and steady.num_left > 1
            and steady.num_ended == self._requests.num_ended
        ):
            steady.num_left -= 1
            ids = token_ids.astype(_UINT32)
            if steady.appender is None or not steady.appender.append(ids):
                self._tokens.append(rows, ids)
                steady.appender = self._tokens.appender(rows)
            return Sampled(rows, ids, steady.index, _NO_ROWS)
        steady.end()
        index = np.arange(len(token_ids))
        alive = self._requests.generation.take(rows.array) == record.sampled_generations
        if not alive.all():
            index, rows = index[alive], RowSet(rows.array[alive])
            token_ids = token_ids[alive]
        ids = token_ids.astype(np.uint32)
        self._tokens.append(rows, ids)
        if record.is_suspect:
            self._suspects.end(rows.array)
        num_left = self._requests.limit.take(rows.array) - self._tokens.lengths(rows)
        least_left, ended = int(num_left.min(initial=_UNBOUNDED)), _NO_ROWS
        if least_left <= 0:
            ended = rows.array[num_left <= 0]
            self._remove(ended)
        elif not record.is_suspect:
            steady.begin(rows, index, self._requests.num_ended, least_left)
        return Sampled(rows, ids, index, ended)

    def _complete_several(
        self,
        plan: StepPlan,
        record: Launched,
        token_ids: npt.NDArray[np.integer],
        counts: Int64s,
    ) -> Sampled:
        """Complete a step as `complete` does, with one token or more for each row, or with some
        that are watched.
        """
        requests = self._requests
        self._end_batch()
        self._steady.end()
        row_set, generations, kv_lens = record.sampled, record.sampled_generations, plan.kv_lens
        if len(kv_lens) != len(row_set):
            kv_lens = kv_lens[plan.samples]
        if plan.draft_lens is not None:  # of the drafts those that are right are in the cache
            lens = plan.draft_lens[plan.samples]
            kv_lens = (kv_lens - lens + counts - 1).astype(np.int32)
        index = np.arange(len(token_ids))
        firsts = np.cumsum(counts) - counts
        alive = requests.generation.take(row_set.array) == generations
        if not alive.all():
            firsts, counts = firsts[alive], counts[alive]
            row_set, generations = RowSet(row_set.array[alive]), generations[alive]
            kv_lens = kv_lens[alive]
            index = spans(firsts, counts)
        if not (record.is_suspect or self._reasoning or self._has_states):
            ids, has_later = token_ids[index].astype(_UINT32), len(self._in_flight) > 0
            if self._completer.complete(
                row_set, generations, kv_lens, counts, ids, has_later=has_later
            ):
                return Sampled(row_set, ids, index, _NO_ROWS, counts)
        rows, several = row_set.array, counts > 1
        most = np.minimum(requests.limit.take(rows), requests.logprob_limit.take(rows))
        lengths = self._tokens.lengths(rows)
        counts = np.minimum(counts, most - lengths)
        masked_from = requests.masked_from.take(rows)
        for at in np.flatnonzero(requests.may_need_mask.take(rows)).tolist():
            state = self._reasoning.by_row.get(int(rows[at]))
            if plan.draft_lens is not None and state is None:
                continue  # a grammar from the start: all places had masks
            ids = token_ids[firsts[at] : firsts[at] + counts[at]].tolist()
            if plan.draft_lens is not None and state is not None and state.follows_grammar:
                self._reasoning.take_masked(int(rows[at]), ids, int(lengths[at]))
                continue
            counts[at] = self._reasoning.take(int(rows[at]), ids, int(lengths[at]))
            if counts[at] < len(ids) and requests.constraints:  # counted by the runner, too
                requests.constraints.deactivate([int(rows[at])])
        index = spans(firsts, counts)
        ids = token_ids[index].astype(np.uint32)
        self._tokens.append_spans(row_set, counts, ids)
        if record.is_suspect:
            self._suspects.end(rows)
        lengths = self._tokens.lengths(rows)
        # in flight without a mask, and now with the need of one: dropped (decision 020)
        unmasked = (requests.known.take(rows) > lengths) & (masked_from > lengths)
        unmasked &= requests.masked_from.take(rows) <= lengths
        if unmasked.any() and requests.constraints:  # the runner has counted what is dropped
            requests.constraints.deactivate(rows[unmasked].tolist())
        several |= unmasked
        if plan.draft_lens is not None:
            kv_lens = np.minimum(kv_lens, lengths - 1)
        if several.any():
            requests.begin_generation(rows[several])
            requests.known[rows[several]] = lengths[several]
            runs = several & (requests.slot[rows] != NO_SLOT)
            computed = kv_lens[runs]
            ahead = rows[runs][requests.computed[rows[runs]] > computed]
            requests.computed[rows[runs]] = computed
            for row in ahead.tolist() if self._has_states else ():
                self._take_back(row)
        ended = rows[lengths >= requests.limit.take(rows)]
        if len(ended):
            self._remove(ended)
        return Sampled(row_set, ids, index, ended, counts)

    def fail(self, plan: StepPlan) -> Int64s:
        """Answer the oldest plan, whose step failed; returns the rows at fault, removed already.

        A request that was alone in the step is at fault. Otherwise the culprit is unknown, and each
        request computes its tokens anew, alone.
        """
        self._end_batch()
        record = self._in_flight.popleft()
        assert record.step == plan.step, f"step {plan.step} answered before {record.step}"
        if plan.is_proposal:
            assert self._proposals is not None
            self._proposals.failed(record)
            return _NO_ROWS
        invalid, snapshots, readers = self._in_flight.invalidated_by(record)
        # snapshots apart: the digests of these blocks may be those of others (decision 029)
        self._blocks.forget(invalid, snapshots)
        self._blocks.marks.forget_since(record.step)
        for row, generation in readers.items():
            if self._requests.generation[row] == generation:
                self._restart(row)
        every = record.rows.array
        rows: Int64s = every[self._requests.generation[every] == record.generations]
        if len(record.rows) == 1:
            self._remove(rows)
            return rows
        for row in rows.tolist():
            self._suspects.begin(row)
            self._restart(row)
        return rows[:0]

    def acks_moved_back(self) -> None:
        """The acknowledged positions of some row may be lower than at the last schedule()."""
        if self._batch is not None:
            self._batch.recheck_acks()

    def reset_prefix_cache(self) -> None:
        """Drop everything that can be found in the prefix cache."""
        self._end_batch()
        self._blocks.reset_prefix_cache()

    def rows_of(self, plan: StepPlan) -> Int64s:
        """The rows of a plan in flight, [R]."""
        return self._in_flight.rows_of(plan)

    def grammar_rows_of(self, plan: StepPlan) -> Int64s:
        """The rows that a plan in flight samples with masks, [G], one that has drafts once more for
        each of them; NO_ROW where the request is gone, or its sampled token will be dropped.
        """
        record, at = self._in_flight.record_of(plan), plan.grammar_rows
        rows = self._live(record.sampled.array[at], record.sampled_generations[at])
        if plan.draft_lens is None:
            return rows
        return np.repeat(rows, 1 + plan.draft_lens[plan.samples][at])

    def prompt_rows_of(self, plan: StepPlan) -> Int64s:
        """The rows whose prompts a plan in flight scores, [P]; NO_ROW as in grammar_rows_of."""
        assert plan.prompt is not None
        record, at = self._in_flight.record_of(plan), plan.prompt.rows
        return self._live(record.rows.array[at], record.generations[at])

    def has_prompt_logprobs(self, row: int) -> None:
        """All log-probabilities of a row's prompt are computed."""
        self._prompts.remove(row)
        self._requests.use_prefix_cache[row] = True

    def _num_known(self, rows: list[int]) -> int:
        return int(self._requests.known[rows].sum()) if rows else 0

    def _live(self, rows: Int64s, generations: Int64s) -> Int64s:
        return np.where(self._requests.generation[rows] == generations, rows, NO_ROW)

    def _restart(self, row: int) -> None:
        """Let a request compute everything anew; tokens of it in flight will be dropped."""
        self._requests.begin_generation(row)
        self._requests.known[row] = self._tokens.length(row)
        if self._running_set.runs(row):
            self._running_set.preempt(row)
        elif (
            row in self._logprob_budget.waiting
            and not self._requests.lacks_logprob_budget(np.array([row]))[0]
        ):
            self._running_set.requeue(row)

    def _take_back(self, row: int) -> None:
        """A running row's state has run ahead, by a step in flight that is dropped."""
        ahead = [each.step for each in self._in_flight if row in each.rows.array]
        slot = int(self._requests.slot[row])
        if len(ahead) != 1 or not self._blocks.twins.take_back(slot, ahead[0]):
            self._running_set.preempt(row)

    def _reserve_logprobs(self) -> None:
        """Reserve room for rows that ran out of it for their log-probabilities, in order. Running
        rows that find none are preempted.
        """
        requests, waiting = self._requests, self._logprob_budget.waiting
        rows = self._slots.running().array
        asking = rows[requests.lacks_logprob_budget(rows)]
        if waiting:
            asking = np.concatenate([asking, np.array([*waiting], np.int64)])
        if not len(asking):
            return
        self._logprob_budget.was_freed = False
        left = requests.in_order(asking).tolist()
        if self._unbounded in left:  # it alone may grow beyond the bound: nothing comes before it
            left.sort(key=lambda row: row != self._unbounded)
        while left and self._reserve_step(left[0]):
            row = left.pop(0)
            if row in waiting:
                self._running_set.requeue(row)
        for row in left:
            if row not in waiting:
                self._running_set.preempt(row)
        if not left:  # also rows that will ask soon, at once: each request for room ends the batch
            soon = requests.logprob_limit[rows] - requests.known[rows] < PAGE_LEN
            soon &= (requests.num_logprobs[rows] >= 0) & (
                requests.logprob_limit[rows] < requests.limit[rows]
            )
            for row in requests.in_order(rows[soon]).tolist():
                if not self._reserve_step(row):
                    break
        elif self._unbounded is None and self._logprob_budget.is_stuck:
            self._unbounded = left[0]
            self._reserve_step(left[0])
            self._running_set.requeue(left[0])

    def _reserve_step(self, row: int) -> bool:
        """Reserve room for one more step of a row; return True if there was any."""
        num_logprobs = int(self._requests.num_logprobs[row])
        num_tokens = step_len(num_logprobs)
        num_bytes = outputs_bytes(num_logprobs, num_tokens)
        if not self._logprob_budget.grow(row, num_bytes, force=row == self._unbounded):
            return False
        self._requests.logprob_limit[row] += num_tokens
        return True

    def _plan_alone(self, row: int) -> StepPlan:
        """The next step of a suspect."""
        if not self._running_set.runs(row):
            self._running_set.start_preempting(row)
        chunk = self._prefill.chunk(row, self._max_num_batched_tokens)
        assert chunk is not None
        return self._plan(NO_ROWS, [chunk])

    def _plan(
        self, decoding: RowSet, chunks: list[Chunk], drafts: Drafts | None = None
    ) -> StepPlan:
        """The step of these rows; from here on its tokens, but for drafts of decoding rows, count
        as computed.
        """
        requests, num_decodes = self._requests, len(decoding)
        rows, counts = decoding, np.ones(len(decoding), np.int64)
        if drafts is not None:
            counts = 1 + drafts.lens
            num_decodes = int(np.argmax(drafts.lens > 0))
        if chunks:
            more = np.array(chunks, np.int64)
            rows = RowSet(np.concatenate([decoding.array, more[:, 0]]))
            counts = np.concatenate([counts, more[:, 1]])
            if drafts is not None:
                lens = np.concatenate([drafts.lens, np.zeros(len(chunks), np.int64)])
                drafts = Drafts(lens, drafts.token_ids)
        columns = token_columns(
            requests,
            self._slots,
            self._tokens,
            rows=rows,
            counts=counts,
            num_decodes=num_decodes,
            block_size=self._block_size,
            drafts=drafts,
        )
        generations = requests.generation.take(rows.array)
        fronts = self._front_saves(decoding.array) if len(decoding) else None
        plan = self._launch(columns, rows, generations, fronts)
        if self._prompts and chunks:
            plan = self._prompts.extend(plan, rows.array)
        if self._media:
            plan = self._with_media(plan, rows.array)
        computed = plan.kv_lens if drafts is None else plan.kv_lens - drafts.lens
        requests.computed[rows.array] = computed
        requests.known[rows.array] += plan.samples
        if not chunks and drafts is None and rows.version == self._slots.running().version:
            self._batch = DecodeBatch(
                requests,
                self._slots,
                self._blocks,
                self._tokens,
                rows,
                columns,
                step=self._step,
                generations=generations,
                block_size=self._block_size,
            )
        return plan

    def _computes_images(self, decoding: RowSet, chunks: list[Chunk]) -> bool:
        """True if some row's next tokens are in front of the end of its last image."""
        computed, media = self._requests.computed, self._media
        rows = [*decoding.tolist(), *(row for row, _ in chunks)]
        return any(row in media and computed[row] < media[row].end for row in rows)

    def _with_media(self, plan: StepPlan, rows: Int64s) -> StepPlan:
        """The plan with the images that its rows [R] compute tokens of, if any does."""
        places = [self._media.get(row) for row in rows.tolist()]
        counts = plan.query_lens.astype(np.int64)
        media = media_plan(
            places, plan.kv_lens - counts, counts, plan.positions, plan.rope_deltas.astype(np.int64)
        )
        return plan if media is None else replace(plan, media=media)

    def _plan_proposal(
        self, proposals: Proposals, decoding: RowSet, prefilling: Int64s, acked: Acked
    ) -> StepPlan | None:
        """The step of the draft model for the rows that decode; None where it has nothing to
        foresee.
        """
        most = self._most_drafts(decoding.array, acked)
        if self._running_set.waiting and self._slots.num_free:  # free blocks are theirs first
            slots = self._requests.slot[decoding.array]
            most = np.minimum(most, self._blocks.room_for_drafts(slots))
        budget = self._max_num_batched_tokens
        requests = self._requests
        num_beside = int((requests.known[prefilling] - requests.computed[prefilling]).sum())
        if self._prefill.can_admit(acked, 0):
            num_beside += self._running_set.waiting.num_tokens
        num_beside = min(num_beside, budget - len(decoding))
        found = proposals.plan(self._step, decoding.array, most, budget, num_beside)
        if found is None:
            return None
        plan, rows, sampled = found
        generations = self._requests.generation
        self._in_flight.append(
            Launched(
                plan.step,
                rows,
                generations[rows.array],
                sampled,
                generations[sampled.array],
                is_suspect=False,
                has_drafts=True,
            )
        )
        return plan

    def _most_drafts(self, rows: Int64s, acked: Acked) -> Int64s:
        """The most drafts that each of these decoding rows may have, [n]."""
        requests = self._requests
        known = requests.known[rows]
        ahead = np.maximum(positions(acked)[rows], requests.prompt_len[rows])
        most = np.minimum(requests.limit[rows], requests.logprob_limit[rows]) - known - 1
        run_ahead = requests.run_ahead[rows]
        bounded = np.flatnonzero(run_ahead != _UNBOUNDED)
        left = (run_ahead + ahead - known)[bounded] - 1
        most[bounded] = np.minimum(most[bounded], left)
        if self._reasoning:  # what it leaves free is drafted, and what a grammar alone decides
            states = [self._reasoning.by_row.get(row) for row in rows.tolist()]
            is_cut = [state is not None and not state.follows_grammar for state in states]
            followed = np.flatnonzero(is_cut)
            free = requests.masked_from[rows[followed]] - known[followed] - 1
            most[followed] = np.minimum(most[followed], free)
        if self._has_states:
            most = np.minimum(most, self._blocks.draft_states.num_free)
        return np.maximum(most, 0)

    def _drafts(
        self, drafter: Drafter, decoding: RowSet, num_beside: int, acked: Acked
    ) -> Drafts | None:
        """The drafts of the next step, which computes `num_beside` tokens of prompts besides, as
        far as limits and blocks allow; None without any.
        """
        requests, rows = self._requests, decoding.array
        drafts = drafter.propose(decoding, self._most_drafts(rows, acked), num_beside)
        if drafts is None:
            return None
        left_over = self._max_num_batched_tokens - len(rows) - num_beside
        if self._has_states:
            left_over = min(left_over, self._blocks.draft_states.num_free)
        lens = np.minimum(np.cumsum(drafts.lens), left_over)
        lens = np.diff(lens, prepend=0)
        lens = self._blocks.grow_for_drafts(requests.slot[rows], lens)
        if not lens.any():
            return None
        if lens.sum() == len(drafts.token_ids):
            return drafts
        firsts = np.cumsum(drafts.lens) - drafts.lens
        return Drafts(lens, drafts.token_ids[spans(firsts, lens)])

    def _plan_again(self, batch: DecodeBatch, acked: Acked) -> StepPlan | None:
        """The next step of the decode batch; None where the rows have to be scheduled anew."""
        has_changed = batch.rows.version != self._slots.running().version
        if has_changed or not batch.may_run(acked):
            return None
        if self._logprob_budget.waiting and self._logprob_budget.was_freed:
            return None
        num_beginning = batch.num_beginning()
        if num_beginning > self._blocks.num_free or self._prefill.can_admit(acked, num_beginning):
            return None
        if self._requests.has_masks or self._reasoning:
            batch.flush_deferred()
        columns = batch.next_columns(is_last=self._in_flight.last_step == batch.step)
        plan = self._launch(columns, batch.rows, batch.generations, batch.front_saves())
        batch.count(plan.step)
        return plan

    def _front_saves(self, decoding: Int64s) -> FrontSaves | None:
        """The states of these rows that are saved in front of the step being planned."""
        if not self._blocks.has_snapshots:
            return None
        requests = self._requests
        slots, num_blocks = self._blocks.find_front_marks(
            requests.slot.take(decoding), requests.computed.take(decoding)
        )
        found = self._blocks.find_answer_marks(slots, num_blocks)
        if not len(found):
            return None
        return self._blocks.mark_answers(self._step + 1, slots.take(found), num_blocks.take(found))

    def _snapshots(
        self, columns: TokenColumns, rows: RowSet, fronts: FrontSaves | None
    ) -> SnapshotPlan | None:
        """The states that the step being planned loads and saves."""
        watched = None
        if self._reasoning or len(self._blocks.twins):
            requests = self._requests
            watched = requests.may_need_mask.take(rows.array)
            watched &= requests.masked_from.take(rows.array) > columns.kv_lens
        return self._blocks.take_snapshots(
            self._step, rows.array, watched, fronts, columns.draft_lens
        )

    def _end_batch(self) -> None:
        """End the decode batch; a request comes or goes, or needs attention."""
        if self._batch is not None:
            self._batch.flush_deferred()
            self._batch = None

    def _launch(
        self,
        columns: TokenColumns,
        rows: RowSet,
        generations: Int64s,
        fronts: FrontSaves | None = None,
    ) -> StepPlan:
        self._step += 1
        snapshots = None
        if self._has_states and (
            fronts is not None
            or self._reasoning
            or columns.draft_lens is not None
            or self._blocks.moves_states
        ):
            snapshots = self._snapshots(columns, rows, fronts)
        plan = self._builder.build(columns, step=self._step, snapshots=snapshots)
        is_suspect = self._suspects.has(int(rows.array[0]))
        uses = self._blocks.take_uses()
        self._in_flight.launch(
            plan, rows, generations, columns.sampled, is_suspect=is_suspect, uses=uses
        )
        return plan

    def _remove(self, rows: Int64s) -> None:
        """Remove live requests, all different, running or waiting."""
        if self._batch is not None:
            self._end_batch()
        self._suspects.end(rows)
        if self._drafter is not None:
            self._drafter.close(rows)
        if self._unbounded is not None and self._unbounded in rows:
            self._unbounded = None
        self._running_set.remove(rows)
        if self._reasoning:
            self._reasoning.remove(rows)
        for row in rows.tolist() if self._prompts or self._media else ():
            self._prompts.remove(row)
            self._media.pop(row, None)
