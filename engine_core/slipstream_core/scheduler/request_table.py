"""The scheduler's state of its requests, as numpy columns.

`RequestTable` has the facts of each request by row, from add to remove; `SlotTable` has the row and
the block table of each slot.

- A row is a stream's index in the token history. It may be reused at once, so every remove
  increments its `generation`, and a stored row is valid only with an equal generation. A failed
  step increments it too, as results in flight for its requests no longer count.
- A slot is held only while a request runs. Low slots are taken first, which keeps running requests
  together.
- Block tables are padded with the null block behind `num_blocks`.
- Arrays that leave as part of a plan are never written again.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any

import numpy as np

from slipstream_core.grammar.reasoning.reasoning_state import NEVER, ReasoningState
from slipstream_core.kvcache.block_pool import NULL_BLOCK
from slipstream_core.media.places import MediaPlaces
from slipstream_core.scheduler.constraint_columns import ConstraintColumns, TokenConstraints
from slipstream_core.scheduler.logprob_budget import step_len
from slipstream_core.step.limits import NO_ROW
from slipstream_core.step.plan import ListedLogprobs, columns_over, sampling_flags
from slipstream_ipc.arrays import Bools, Int32s, Int64s
from slipstream_ipc.history.wide_logprobs import MAX_NARROW
from slipstream_ipc.messages import RequestSpec
from slipstream_ipc.row_set import RowSet
from slipstream_ipc.row_table import RowTable, column

NO_SLOT = -1

# Positions acknowledged by each row's worker, prompt included, by row. A function where computing
# them costs something; it is called only when needed.
Acked = Int64s | Callable[[], Int64s]


def positions(acked: Acked) -> Int64s:
    """The acknowledged positions, by row."""
    return acked() if callable(acked) else acked


@dataclass(frozen=True, slots=True, kw_only=True)
class NewRequest:
    """A request as the scheduler takes it, with its tokens already in the history."""

    row: int
    prompt_len: int  # tokens
    max_tokens: int  # outputs, counted from the prompt's end
    spec: RequestSpec
    seed: int  # int64
    prefix_root: bytes = b""  # only requests with an equal one share cached blocks
    stop_token_ids: tuple[int, ...] = ()  # that end it: not sampled before min_tokens
    worker_ends: bool = True  # only the worker sees some ends, such as stop strings
    is_suspect: bool = False  # runs alone until it has sampled a token
    use_prefix_cache: bool = True  # False: computes all of its tokens itself
    num_prompt_logprobs: int = -1  # as num_logprobs, for the prompt's tokens
    constraints: TokenConstraints | None = None
    has_grammar: bool = False  # the ids allowed next depend on its history
    reasoning: ReasoningState | None = None  # None: its grammar, if any, applies from the start
    masked_ids: Collection[int] = ()  # not sampled while `reasoning.masks_ids`
    adapter: int = -1  # its place; -1: none
    prediction_ids: bytes = b""  # of what it will probably say
    media: MediaPlaces | None = None  # its images; None: it has none

    @property
    def top_k(self) -> int:
        """0 is off."""
        return max(self.spec.params.top_k, 0)

    @property
    def rope_delta(self) -> int:
        """See `MediaPlaces`."""
        return 0 if self.media is None else self.media.rope_delta

    @property
    def num_logprobs(self) -> int:
        """-1: none."""
        wanted = self.spec.params.logprobs
        return -1 if wanted is None else wanted


_OF_ROWS = columns_over("S")
# what is gathered of sampled rows for a plan: its name here by its name there
_SAMPLED = {name: each.declared.source for name, each in _OF_ROWS.items()}
# those that are not in a request's sampling parameters as they are here
_DERIVED = ("seed", "top_k", "num_logprobs")
_GIVEN = tuple(source for source in _SAMPLED.values() if source not in _DERIVED)
_SAMPLED_COLUMNS = {
    each.declared.source: column(each.dtype, each.declared.fill) for each in _OF_ROWS.values()
}


class RequestTable(RowTable, also=_SAMPLED_COLUMNS):
    """Facts by row; all columns are [rows] and grow together.

    Besides those below, there is one for each column of a plan that is over its sampled rows.
    """

    generation: Int64s = column(np.int64)
    alive: Bools = column(np.bool_)
    is_suspect: Bools = column(np.bool_)  # of those alive
    use_prefix_cache: Bools = column(np.bool_)
    slot: Int64s = column(np.int64, NO_SLOT)  # NO_SLOT while it waits
    priority: Int64s = column(np.int64)
    arrival: Int64s = column(np.int64)
    own_priority: Int64s = column(np.int64)  # among its tenant's requests
    turn: Int64s = column(np.int64)  # among tenants of equal priority; see `waiting_queue`
    prompt_len: Int64s = column(np.int64)
    adapter: Int32s = column(np.int32, -1)
    rope_delta: Int32s = column(np.int32)  # see `MediaPlaces`
    limit: Int64s = column(np.int64)  # tokens, prompt included, that it may grow to
    run_ahead: Int64s = column(np.int64)  # outputs that may be unacknowledged
    logprob_limit: Int64s = column(
        np.int64
    )  # tokens, counted as `limit`, with room for log-probabilities
    known: Int64s = column(np.int64)  # tokens in the history or in flight
    computed: Int64s = column(np.int64)  # tokens in the cache once all launched steps ran
    num_shared: Int64s = column(np.int64)  # tokens found in the cache when it last began to run
    # tokens in the draft model's cache, the last of them perhaps drafts, and blocks full of others
    draft_computed: Int64s = column(np.int64)
    draft_blocks: Int64s = column(np.int64)
    masked_until: Int64s = column(np.int64)  # `known` from which stop ids are allowed
    num_logprobs: Int32s
    has_constraints: Bools = column(np.bool_)  # token constraints; in `constraints`
    # `known` from which on tokens are sampled with masks; see `reasoning_rows`
    masked_from: Int64s = column(np.int64, NEVER)
    may_need_mask: Bools = column(np.bool_)  # a grammar, or reasoning that is followed

    def __init__(self, rows: int = 64) -> None:
        super().__init__(rows)
        self.num_ended = 0  # number of increments of any generation
        self.num_growing = 0  # rows with log-probabilities
        self.tenants: dict[int, bytes] = {}  # by row, of those alive
        self.constraints = ConstraintColumns()
        self._num_with_masks = 0  # rows that may need masks
        self._stop_ids: dict[int, Int64s] = {}  # row -> ids, of rows with min_tokens
        self._logprob_ids: dict[int, Int64s] = {}  # row -> ids, of rows with logprob_token_ids
        self._arrivals = 0
        # The latest results and their rows: the batch seldom changes between two steps.
        self._last_sampling: tuple[RowSet, dict[str, Any]] | None = None
        self._last_masks: tuple[Int64s, Int64s, tuple[Int64s, Int64s]] | None = None

    def add(self, request: NewRequest, *, known: int, limit: int, run_ahead: int) -> None:
        """Start a request on its row; it waits."""
        row, spec = request.row, request.spec
        if row >= self.num_rows:
            self.grow(row + 1)
        self.alive[row] = True
        self.is_suspect[row] = request.is_suspect
        self.use_prefix_cache[row] = request.use_prefix_cache
        self.slot[row] = NO_SLOT
        self.priority[row] = spec.priority
        self.own_priority[row] = spec.own_priority
        self.arrival[row] = self._arrivals
        self.turn[row] = 0
        self.tenants[row] = spec.tenant
        self._arrivals += 1
        self.prompt_len[row] = request.prompt_len
        self.limit[row] = limit
        self.run_ahead[row] = run_ahead
        self.logprob_limit[row] = limit
        if request.num_logprobs >= 0:
            self.logprob_limit[row] = known + step_len(request.num_logprobs)
            self.num_growing += 1
        self.adapter[row] = request.adapter
        self.rope_delta[row] = request.rope_delta
        self.known[row] = known
        self.computed[row] = 0
        self.masked_until[row] = 0
        if spec.params.min_tokens > 0 and request.stop_token_ids:
            self.masked_until[row] = request.prompt_len + spec.params.min_tokens
            self._stop_ids[row] = np.array(request.stop_token_ids, np.int64)
        for name in _DERIVED:
            getattr(self, name)[row] = getattr(request, name)
        for name in _GIVEN:
            getattr(self, name)[row] = getattr(spec.params, name)
        if spec.params.logprob_token_ids:
            self._logprob_ids[row] = np.array(spec.params.logprob_token_ids, np.int64)
        self.has_constraints[row] = request.constraints is not None
        if request.constraints is not None:
            self.constraints.add(row, request.constraints)
        self.may_need_mask[row] = request.has_grammar or request.reasoning is not None
        self._num_with_masks += bool(self.may_need_mask[row])
        self.masked_from[row] = 0 if request.has_grammar else NEVER
        self._last_sampling = None
        self._last_masks = None

    def remove(self, rows: Int64s) -> None:
        """Remove live requests, all different."""
        self.begin_generation(rows)
        if self.num_growing:
            self.num_growing -= int((self.num_logprobs[rows] >= 0).sum())
        self.alive[rows] = self.is_suspect[rows] = False
        if self._num_with_masks:
            self._num_with_masks -= int(self.may_need_mask[rows].sum())
            self.may_need_mask[rows] = False
            self.masked_from[rows] = NEVER
        for row in rows.tolist():
            self.tenants.pop(row, None)
            self._stop_ids.pop(row, None)
            self._logprob_ids.pop(row, None)
        if self.constraints:
            self.constraints.remove(rows.tolist())

    def adapters_in_use(self) -> tuple[dict[int, int], dict[int, int]]:
        """The number of live requests by adapter: with a slot, and without."""
        asking = np.flatnonzero(self.alive & (self.adapter >= 0))
        has_slot = self.slot[asking] != NO_SLOT
        counts = [
            np.unique(self.adapter[asking[which]], return_counts=True)
            for which in (has_slot, ~has_slot)
        ]
        running, waiting = (
            dict(zip(places.tolist(), nums.tolist(), strict=True)) for places, nums in counts
        )
        return running, waiting

    def begin_generation(self, rows: Int64s | int) -> None:
        """Begin a new generation of `rows`: results in flight for them no longer count."""
        self.generation[rows] += 1
        self.num_ended += 1

    def is_alive(self, row: int) -> bool:
        """True if a request holds `row`."""
        return 0 <= row < len(self.alive) and bool(self.alive[row])

    def in_order(self, rows: Int64s) -> Int64s:
        """`rows` in the order in which they run: by priority, then by turn, then by arrival."""
        return rows[np.lexsort((self.arrival[rows], self.turn[rows], self.priority[rows]))]

    def may_run(self, rows: Int64s, acked: Acked) -> Bools:
        """True for each row that may sample one more token: below its limit, with room for its
        log-probabilities, and not too far ahead of its worker; [len(rows)].
        """
        known = self.known[rows]
        unacked = known - np.maximum(positions(acked)[rows], self.prompt_len[rows])
        least = np.minimum(self.limit[rows], self.logprob_limit[rows])
        return np.logical_and(known < least, unacked < self.run_ahead[rows])

    def lacks_logprob_budget(self, rows: Int64s) -> Bools:
        """True for each row that cannot sample only for lack of room for its log-probabilities."""
        known = self.known[rows]
        return np.logical_and(known >= self.logprob_limit[rows], known < self.limit[rows])

    def sampling(self, row_set: RowSet) -> dict[str, Any]:
        """The sampling columns of these rows, [S], and what a plan says of them."""
        last, rows = self._last_sampling, row_set.array
        if last is not None and last[0].version == row_set.version:
            return last[1]
        if last is not None and np.array_equal(last[0].array, rows):
            self._last_sampling = row_set, last[1]
            return last[1]
        columns: dict[str, Any] = {
            name: getattr(self, source)[rows] for name, source in _SAMPLED.items()
        }
        columns |= sampling_flags(columns)
        if self._logprob_ids:
            columns["listed"] = self._listed(rows, columns["num_logprobs"])
        self._last_sampling = row_set, columns
        return columns

    def _listed(self, rows: Int64s, num_logprobs: Int32s) -> ListedLogprobs | None:
        listing = [at for at, row in enumerate(rows.tolist()) if row in self._logprob_ids]
        if not listing:
            return None
        lists = [self._logprob_ids[row] for row in rows[listing].tolist()]
        ids = np.zeros((len(lists), max(map(len, lists))), np.int64)
        for at, each in enumerate(lists):
            ids[at, : len(each)] = each
        others = np.delete(num_logprobs, listing)
        most = int(others[others < MAX_NARROW].max(initial=-1))
        return ListedLogprobs(rows=np.array(listing), ids=ids, max_unlisted=most)

    @property
    def has_masks(self) -> bool:
        """True if some row may have masked ids, which depend on `known`."""
        return bool(self._stop_ids)

    def masks(self, rows: Int64s, ahead: Int64s | None = None) -> tuple[Int64s, Int64s]:
        """Coordinates (index into `rows`, token id) of ids that these rows must not sample next;
        or behind `ahead` drafts of each.
        """
        if not self._stop_ids:
            return _NO_COORDINATES, _NO_COORDINATES
        known = self.known[rows] if ahead is None else self.known[rows] + ahead
        masked = np.flatnonzero(known < self.masked_until[rows])
        masked_rows = rows[masked]
        last = self._last_masks
        if last is None or not (
            np.array_equal(last[0], masked) and np.array_equal(last[1], masked_rows)
        ):
            ids = [_NO_COORDINATES, *(self._stop_ids[row] for row in masked_rows.tolist())]
            coordinates = np.repeat(masked, [len(each) for each in ids[1:]]), np.concatenate(ids)
            last = self._last_masks = masked, masked_rows, coordinates
        return last[2]

    def set_stop_ids(self, row: int, token_ids: Collection[int]) -> None:
        """Forbid these ids while `known` is below the row's `masked_until`."""
        self._stop_ids[row] = np.array(sorted(token_ids), np.int64)
        self._last_masks = None

    def needing_masks(self, rows: Int64s) -> Int64s:
        """The indices of those of `rows` that sample their next token with a mask."""
        if not self._num_with_masks:
            return _NO_COORDINATES
        return np.flatnonzero(self.known[rows] >= self.masked_from[rows])


class SlotTable:
    """The row in each slot, and the blocks of its tokens."""

    def __init__(self, max_num_seqs: int, max_blocks: int) -> None:
        self.row = np.full(max_num_seqs, NO_ROW, np.int64)
        self.num_blocks = np.zeros(max_num_seqs, np.int64)
        self.tables = np.full((max_num_seqs, max_blocks), NULL_BLOCK, np.int32)
        self._num_free = max_num_seqs
        self._running: RowSet | None = None

    @property
    def num_free(self) -> int:
        """Slots that no request holds."""
        return self._num_free

    @property
    def num_running(self) -> int:
        """Slots that are held."""
        return len(self.row) - self._num_free

    def running(self) -> RowSet:
        """The rows that hold a slot, in slot order; the same set until a slot changes hands."""
        if self._running is None:
            self._running = RowSet(self.row[self.row != NO_ROW])
        return self._running

    def assign_slot(self, row: int, blocks: Int32s) -> int:
        """Give `row` a slot, with `blocks` as its first blocks; returns the slot."""
        slot = int(np.argmin(self.row))  # the first free one
        assert self.row[slot] == NO_ROW, "no slot is free"
        self._num_free -= 1
        self.row[slot] = row
        self.num_blocks[slot] = len(blocks)
        self.tables[slot, : len(blocks)] = blocks
        self._running = None
        return slot

    def append_blocks(self, slots: Int64s, blocks: Int32s) -> None:
        """Append one block for each of `slots`, all different."""
        numbers = self.num_blocks.take(slots)
        self.tables[slots, numbers] = blocks
        numbers += 1
        self.num_blocks[slots] = numbers

    def cut(self, slot: int, num: int) -> Int32s:
        """Take all blocks but the first `num` from a slot; returns them."""
        blocks = self.tables[slot, num : int(self.num_blocks[slot])].copy()
        self.tables[slot, num:] = NULL_BLOCK
        self.num_blocks[slot] = num
        return blocks

    def release(self, slots: Int64s) -> Int32s:
        """Free held `slots`, all different; returns their blocks."""
        tables = self.tables[slots]
        blocks: Int32s = tables[tables != NULL_BLOCK]
        self.tables[slots] = NULL_BLOCK
        self.num_blocks[slots] = 0
        self.row[slots] = NO_ROW
        self._num_free += len(slots)
        self._running = None
        return blocks

    def blocks_at(self, slots: Int64s, numbers: Int64s) -> Int32s:
        """One block of the table of each of `slots` [n]."""
        return self.tables.reshape(-1).take(slots * self.tables.shape[1] + numbers)


_NO_COORDINATES: Int64s = np.empty(0, np.int64)
