"""Allocates, shares and frees the blocks of requests, and registers them in the prefix cache.

- A request shares only full blocks in front of the first token that it computes, and computes at
  least one: a shared block is never written.
- Prompts and known outputs are registered when the step that fills their blocks is planned;
  `take_uses` returns them for the record of that step. Sampled tokens are not on the host by then:
  they are registered when the request gives its blocks back, as far as completed steps have
  computed them. So the cache costs a decode step nothing.
- The content that a failed step was to write is dropped: `forget`.
- Where a model carries recurrent states, a request shares the blocks in front of the last of them
  that has a snapshot of the state behind it, which its first step loads.
- An answer's states are saved in front of the token behind a mark, and named when the request
  gives its blocks back (`answer_marks`). At most half of the snapshots are of answers that go on,
  or second places of rows whose steps may be dropped (`state_twins`).
- A request that found no room is looked up again only when it might find some (`_Shortage`):
  looking up a long prompt takes milliseconds, and the next request is tried before every step.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import partial

import numpy as np

from slipstream_core.kvcache.block_pool import BlockPool
from slipstream_core.kvcache.eviction_age import EvictionAge
from slipstream_core.kvcache.prefix_cache import PrefixCache
from slipstream_core.kvcache.snapshots import Snapshots
from slipstream_core.media.places import MediaPlaces
from slipstream_core.scheduler.answer_marks import AnswerMarks
from slipstream_core.scheduler.draft_states import DraftStates
from slipstream_core.scheduler.launched_steps import BlockUse, LaunchedSteps
from slipstream_core.scheduler.request_table import NO_SLOT, RequestTable, SlotTable
from slipstream_core.scheduler.state_marks import answer_marks, last_answer_mark, state_marks
from slipstream_core.scheduler.state_twins import StateTwins
from slipstream_core.step.plan import Alternation, FrontSaves, SnapshotPlan
from slipstream_ipc.arrays import Bools, Int32s, Int64s
from slipstream_ipc.history.pages import spans
from slipstream_ipc.history.token_log import TokenLog

_NO_BLOCKS: Int32s = np.empty(0, np.int32)
_NO_SNAPSHOTS: Int64s = np.empty(0, np.int64)


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheConfig:
    """The memory that requests share."""

    num_blocks: int  # the null block included
    block_size: int  # tokens
    enable_prefix_caching: bool = False
    has_states: bool = False  # the model carries recurrent states
    num_snapshots: int = 0  # copies of those that can be kept; without any nothing is cached
    num_draft_states: int = 0  # and behind these, copies for the tokens in front of drafts
    caches_answers: bool = True  # False: the model computes them otherwise than prompts
    has_draft_model: bool = False  # which keeps its own keys in the same blocks


@dataclass(frozen=True, slots=True)
class _Shortage:
    """A waiting request that found no room, and what it would have needed.

    It needs fewer free blocks now only if more of its own are cached (with a state behind them, if
    the model carries states), or if blocks that were free when they were found are held by others
    since: at most as many as kept blocks were taken. It is forgotten where a state is saved that
    is the request's own: looked up at each state, a long prompt would cost most steps milliseconds.
    """

    request: tuple[int, int, int, bool]  # row, generation, known, whether the cache is used
    num_cached: int  # of its first blocks, though perhaps without a state behind them
    max_shared: int
    num_wanted: int  # free blocks, including the shared ones that were free
    num_kept_taken: int  # of the pool, at that time


class RequestBlocks:
    """Blocks of all requests; their block tables are in `slots`."""

    def __init__(
        self,
        requests: RequestTable,
        slots: SlotTable,
        tokens: TokenLog,
        cache: CacheConfig,
        in_flight: LaunchedSteps,
    ) -> None:
        self._requests = requests
        self._in_flight = in_flight
        self._slots = slots
        self._tokens = tokens
        self._block_size = cache.block_size
        self._caches_answers = cache.caches_answers
        self._pool = BlockPool(cache.num_blocks, has_draft_model=cache.has_draft_model)
        self._eviction_age = EvictionAge(self._pool)
        self._cache: PrefixCache | None = None
        num_snapshots = cache.num_snapshots if cache.has_states else 0
        if cache.enable_prefix_caching and (num_snapshots > 0 or not cache.has_states):
            self._cache = PrefixCache(self._pool, cache.block_size)
        self.snapshots = Snapshots(num_snapshots)
        self._has_snapshots = self._cache is not None and num_snapshots > 0
        # of the step that is being planned: (row, snapshot), and (row, tokens, snapshot)
        self._loads: list[tuple[int, int]] = []
        self._saves: list[tuple[int, int, int]] = []
        self._saved_ends: list[tuple[int, bytes]] = []  # of these saves: blocks, the last's digest
        self.marks = AnswerMarks(self.snapshots, len(slots.row))
        self.twins = StateTwins(self.snapshots, len(slots.row))
        self.draft_states = DraftStates(
            len(slots.row) + num_snapshots, cache.num_draft_states, len(slots.row)
        )
        # by row: how many of its blocks were cached, where fewer had a snapshot behind them
        self._branches: dict[int, int] = {}
        self._shortage: _Shortage | None = None  # of the request that found no room last
        self._uses: list[BlockUse] = []  # of the step that is being planned
        # by slot: blocks that were shared, or registered when they were planned
        self._num_registered = np.zeros(len(slots.row), np.int64)

    @property
    def num_blocks(self) -> int:
        """Blocks of the cache, the null block included."""
        return self._pool.num_blocks

    @property
    def num_free(self) -> int:
        """Blocks that no request holds."""
        return self._pool.num_free

    def eviction_age(self, now: float) -> float | None:
        """See `EvictionAge.age`."""
        return self._eviction_age.age(now)

    @property
    def num_query_tokens(self) -> int:
        """Tokens of admitted requests that were looked up in the prefix cache."""
        return 0 if self._cache is None else self._cache.num_query_tokens

    @property
    def num_hit_tokens(self) -> int:
        """Tokens of admitted requests that were found in the prefix cache."""
        return 0 if self._cache is None else self._cache.num_hit_tokens

    def open(self, row: int, prefix_root: bytes, media: MediaPlaces | None = None) -> None:
        """Start a request."""
        if self._cache is not None:
            marks_of = None if media is None else partial(media.block_marks, self._block_size)
            self._cache.open(row, prefix_root, marks_of)

    def close(self, rows: Int64s) -> None:
        """Remove requests, which hold no blocks any more."""
        if self._cache is not None:
            for row in rows.tolist():
                self._cache.close(row)
                self._branches.pop(row, None)
                if self._shortage is not None and self._shortage.request[0] == row:
                    self._shortage = None

    def find_room(self, row: int, *, reserved: int = 0) -> Int32s | None:
        """The blocks that a waiting request would share, or None if it does not fit.

        It fits if there is room for one token more than it has, so that its first output does not
        preempt it. All of its tokens are on the host. `reserved`: free blocks that others will
        take.
        """
        known = int(self._requests.known[row])
        is_sought = self._cache is not None and bool(self._requests.use_prefix_cache[row])
        request = (row, int(self._requests.generation[row]), known, is_sought)
        num_free, last = self._pool.num_free - reserved, self._shortage
        if last is not None and last.request == request and not self._might_fit(last, num_free):
            return None
        max_shared = 0
        if is_sought:
            max_shared = min((known - 1) // self._block_size, self._most_cached(row))
        shared = cached = self._find(row, max_shared)
        if self._has_snapshots and len(cached):
            shared = self._in_front_of_snapshot(row, cached)
        wanted = -(-(known + 1) // self._block_size) - len(shared) + self._num_idle(shared)
        if wanted <= num_free:
            return shared
        taken = self._pool.num_kept_taken
        self._shortage = _Shortage(request, len(cached), max_shared, wanted, taken)
        return None

    def admit(self, row: int, shared: Int32s) -> None:
        """Give a waiting request a slot and blocks, the first of them `shared` (see find_room)."""
        requests = self._requests
        known = int(requests.known[row])
        blocks = shared
        if len(shared):
            self._pool.share(shared)
            generation = int(requests.generation[row])
            loaded = self._load(row, len(shared)) if self._has_snapshots else ()
            self._uses.append(BlockUse(row, generation, shared, _NO_BLOCKS, loaded=loaded))
        new = self._pool.allocate(-(-known // self._block_size) - len(shared))
        blocks = np.concatenate([shared, new]) if len(shared) else new
        requests.slot[row] = self._slots.assign_slot(row, blocks)
        requests.computed[row] = requests.num_shared[row] = len(shared) * self._block_size
        requests.draft_blocks[row] = num_drafted = self._pool.num_drafted(shared)
        requests.draft_computed[row] = num_drafted * self._block_size
        self._num_registered[requests.slot[row]] = len(shared)
        if self._cache is not None and requests.use_prefix_cache[row]:
            self._cache.count(known, len(shared) * self._block_size)

    def fill(self, row: int, count: int) -> None:
        """The step that is being planned computes `count` more of the row's known tokens."""
        if self._cache is None:
            return
        computed = int(self._requests.computed[row])
        start, stop = computed // self._block_size, (computed + count) // self._block_size
        stop = min(stop, self._most_cached(row))
        if start >= stop:
            return
        blocks = self._register(row, start, stop)
        self._num_registered[self._requests.slot[row]] = stop
        generation = int(self._requests.generation[row])
        saved = self._save(row, start, stop) if self._has_snapshots else ()
        self._uses.append(BlockUse(row, generation, _NO_BLOCKS, blocks, saved=saved))

    def _most_cached(self, row: int) -> int:
        """The most blocks of a request that others may find."""
        if self._caches_answers:
            return self._slots.tables.shape[1]
        return int(self._requests.prompt_len[row]) // self._block_size

    @property
    def has_snapshots(self) -> bool:
        """True if states are saved."""
        return self._has_snapshots

    @property
    def _most_answers(self) -> int:
        """The most answers that have a snapshot: with second places, half of all snapshots."""
        return (self.snapshots.num - 1) // 2 - len(self.twins)

    def find_front_marks(self, slots: Int64s, computed: Int64s) -> tuple[Int64s, Int64s]:
        """The slots [m], of these [n], whose rows have computed so many tokens, of which a step may
        save states in front of it, and the numbers of whole blocks in front of these states: what
        a row has computed, or the mark that one with drafts has passed.
        """
        size = self._block_size
        num_blocks, is_there = computed // size, computed % size == 0
        if self.draft_states.is_used:
            passed = last_answer_mark(num_blocks, size)
            has_passed = ~is_there & self.draft_states.hold(slots, passed * size)
            num_blocks = np.where(has_passed, passed, num_blocks)
            is_there |= has_passed
        return slots[is_there], num_blocks[is_there]

    def find_answer_marks(self, slots: Int64s, num_blocks: Int64s) -> Int64s:
        """Indices [m] of those of these slots [n], whose rows have computed so many whole blocks,
        whose states are to be saved there (`mark_answers`).
        """
        if not self._caches_answers:
            return _NO_SNAPSHOTS
        if len(self.marks) >= self._most_answers:  # those that have marks move them
            found = np.flatnonzero(self.marks.places(slots) >= 0)
            return found[answer_marks(num_blocks.take(found), self._block_size)]
        found = np.flatnonzero(answer_marks(num_blocks, self._block_size))
        rows, requests = self._slots.row.take(slots.take(found)), self._requests
        is_wanted = num_blocks.take(found) * self._block_size > requests.prompt_len.take(rows)
        is_wanted &= requests.use_prefix_cache.take(rows)
        return found[is_wanted]

    def mark_answers(self, step: int, slots: Int64s, num_blocks: Int64s) -> FrontSaves | None:
        """`step`, which is being planned, saves the states of these slots [n], where
        `find_answer_marks` found some, in front of it, behind so many blocks; as far as there is
        room.
        """
        places = self.marks.give_places(slots, self._most_answers)
        if (has_none := places < 0).any():
            slots, places, num_blocks = (each[~has_none] for each in (slots, places, num_blocks))
        self.marks.save(slots, num_blocks, step)
        return (slots, places) if len(slots) else None

    def grow(self, slots: Int64s) -> None:
        """Append one block to each of these slots, [n]; the caller has checked num_free."""
        self._slots.append_blocks(slots, self._pool.allocate(len(slots)))

    def grow_for_drafts(self, slots: Int64s, lens: Int64s) -> Int64s:
        """Append the blocks that these slots [n] lack for `lens` drafts behind the token for which
        they have room; where they are too few, nothing. Returns the drafts that have room.
        """
        starts = self._requests.computed[self._slots.row[slots]] + 1
        lacking = -(-(starts + lens) // self._block_size) - self._slots.num_blocks[slots]
        if np.maximum(lacking, 0).sum() > self._pool.num_free:
            return np.minimum(lens, self.room_for_drafts(slots))
        for num in range(int(lacking.max(initial=0))):
            self.grow(slots[lacking > num])
        return lens

    def room_for_drafts(self, slots: Int64s) -> Int64s:
        """The drafts, [n], behind their next token for which these slots [n] have blocks."""
        starts = self._requests.computed[self._slots.row[slots]] + 1
        return np.asarray(self._slots.num_blocks[slots] * self._block_size - starts)

    def drafted(self, rows: Int64s) -> None:
        """All that the draft model has computed of these running rows, [n], are known tokens."""
        requests = self._requests
        before, num = requests.draft_blocks[rows], requests.draft_computed[rows] // self._block_size
        filled = np.flatnonzero(num > before)
        if not len(filled):
            return
        counts = (num - before)[filled]
        slots = np.repeat(requests.slot[rows[filled]], counts)
        self._pool.set_drafted(self._slots.blocks_at(slots, spans(before[filled], counts)))
        requests.draft_blocks[rows[filled]] = num[filled]

    def cut(self, slots: Int64s, more: Int64s | int = 0) -> None:
        """Free the blocks of these slots, [n], that have no computed token, and none of the `more`
        behind: drafts were wrong in them.
        """
        computed = self._requests.computed[self._slots.row[slots]] + more
        wanted = -(-computed // self._block_size)
        surplus = np.flatnonzero(self._slots.num_blocks[slots] > wanted)
        for slot, num in zip(slots[surplus].tolist(), wanted[surplus].tolist(), strict=True):
            self._pool.release(self._slots.cut(slot, num)[::-1])

    def upcoming(self, num: int) -> Int32s:
        """The blocks that `grow` would give to `num` slots, in order; fewer if fewer are free."""
        return self._pool.upcoming(num)

    def count_upcoming(self, num: int) -> None:
        """Count `num` of the upcoming blocks as in use. `grow` has to allocate them before any
        other block is taken or freed.
        """
        self._pool.reserve(num)

    def take_uses(self) -> list[BlockUse]:
        """The blocks that the planned step shares and fills, in the order of its rows."""
        uses, self._uses = self._uses, []
        return uses

    @property
    def moves_states(self) -> bool:
        """True if the step that is being planned loads or saves states, or may have to."""
        return bool(self._loads or self._saves or len(self.twins) or self.draft_states.is_used)

    def take_snapshots(
        self,
        step: int,
        rows: Int64s,
        watched: Bools | None = None,
        fronts: FrontSaves | None = None,
        draft_lens: Int64s | None = None,
    ) -> SnapshotPlan | None:
        """The snapshots that the planned step of these rows [R] loads and saves; None if there are
        none. watched: those whose steps may be dropped. fronts: saved in front of it. draft_lens:
        the drafts of each row, if any has some.
        """
        loads, saves = self._loads, self._saves
        requests, alternation = self._requests, None
        front_places, front_saves = (_NO_SNAPSHOTS, _NO_SNAPSHOTS) if fronts is None else fronts
        if len(self.twins) or self.draft_states.is_used:
            front_places = self._front_places(front_places)
        if self._has_snapshots and watched is not None and (len(self.twins) or watched.any()):
            most = len(self.twins) + max(0, self._most_answers - len(self.marks))
            alternation = self.twins.alternate(step, requests.slot[rows], watched, most=most)
        drafted: tuple[Int64s, Int64s, Int64s] = _NO_SNAPSHOTS, _NO_SNAPSHOTS, _NO_SNAPSHOTS
        if draft_lens is not None or self.draft_states.is_used:
            alternation, drafted = self._for_drafts(rows, draft_lens, alternation)
        save_rows, save_lens, save_places = drafted
        if not loads and not saves:
            if fronts is None and alternation is None and not len(save_rows):
                return None
            return SnapshotPlan(
                save_rows=save_rows,
                save_lens=save_lens,
                saves=save_places,
                front_places=front_places,
                front_saves=front_saves,
                alternation=alternation,
            )
        self._loads, self._saves = [], []
        self.snapshots.publish()
        ends, self._saved_ends = self._saved_ends, []
        self._reconsider(ends)
        at = {row: i for i, row in enumerate(rows.tolist())} if saves else {}
        slots = requests.slot
        return SnapshotPlan(
            load_slots=slots[[row for row, _ in loads]].astype(np.int64),
            loads=np.array([snapshot for _, snapshot in loads], np.int64),
            # prompts come behind the rows that have drafts
            save_rows=np.append(save_rows, [at[row] for row, _, _ in saves]).astype(np.int64),
            save_lens=np.append(save_lens, [length for _, length, _ in saves]).astype(np.int64),
            saves=np.append(save_places, [snapshot for _, _, snapshot in saves]).astype(np.int64),
            front_places=front_places,
            front_saves=front_saves,
            alternation=alternation,
        )

    def _front_places(self, slots: Int64s) -> Int64s:
        """The places of the states behind the marks of these slots [n]."""
        twins = np.array([self.twins.place(slot) for slot in slots.tolist()], np.int64)
        if not self.draft_states.is_used:
            return twins
        found = self.draft_states.places(slots, self.marks.num_blocks(slots) * self._block_size)
        return np.where(found < 0, twins, found)

    def _for_drafts(
        self, rows: Int64s, draft_lens: Int64s | None, alternation: Alternation | None
    ) -> tuple[Alternation | None, tuple[Int64s, Int64s, Int64s]]:
        """The places that the planned step of these rows [R] reads and writes, and rows, lengths
        and snapshots of the states that it saves in front of drafts. alternation: without drafts.
        """
        slots, states = self._requests.slot[rows], self.draft_states
        drafted = _NO_SNAPSHOTS, _NO_SNAPSHOTS, _NO_SNAPSHOTS
        if draft_lens is None:
            states.forget_last()
        else:
            places = states.give(slots, self._requests.computed[rows], draft_lens)
            lens = spans(np.ones(len(rows), np.int64), draft_lens)
            drafted = (
                np.repeat(np.arange(len(rows)), draft_lens),
                lens,
                places - len(self._slots.row),
            )
        held = states.take(slots)
        is_held = held >= 0
        if not is_held.any():
            return alternation, drafted
        reads, writes, alternates = np.where(is_held, held, slots), slots.copy(), is_held.copy()
        if alternation is not None:
            at = alternation.rows
            alternates[at] = True
            reads[at] = np.where(is_held[at], held[at], alternation.reads)
            writes[at] = alternation.writes
        at = np.flatnonzero(alternates)
        return Alternation(at, reads[at], writes[at]), drafted

    def settle_drafts(self, slots: Int64s) -> None:
        """The step that had drafts is answered; slots: of its rows that go on, [n]."""
        if self.draft_states.is_used:
            self.draft_states.settle(slots, self._requests.computed[self._slots.row[slots]])

    def release(self, rows: Int64s) -> None:
        """Take slots and blocks from running requests, all different."""
        self.draft_states.release(self._requests.slot[rows])
        if self._cache is not None:
            self._register_sampled(rows)
            if len(self.marks):
                self._name_marks(rows)
            for slot in self._requests.slot[rows].tolist() if len(self.twins) else ():
                self.twins.release(slot)
        blocks = self._slots.release(self._requests.slot[rows])
        self._pool.release(blocks[::-1])  # the first blocks are reused last: they are shared most
        self._requests.slot[rows] = NO_SLOT

    def forget(self, blocks: Int32s, snapshots: Iterable[int] = ()) -> None:
        """Drop blocks, all different, and snapshots that do not hold their intended content."""
        if self._cache is not None:
            self._cache.forget(blocks)
            self.snapshots.forget(snapshots)

    def distrust(self, rows: Int64s) -> None:
        """Drop the content of blocks and states that these running rows [n] have computed, all
        different: others must not find it.
        """
        if self._cache is None:
            return
        for row, slot in zip(rows.tolist(), self._requests.slot[rows].tolist(), strict=True):
            start = int(self._requests.num_shared[row]) // self._block_size
            stop = max(start, int(self._num_registered[slot]))
            self._cache.forget(self._slots.tables[slot, start:stop].copy())
            self.snapshots.forget_digests(self._cache.digests(row, start, stop))
            self._num_registered[slot] = self._slots.tables.shape[1]
            if (mark := self.marks.take(slot)) is not None:
                self.snapshots.give_back(mark.snapshot)

    def reset_prefix_cache(self) -> None:
        """Forget the content of every block. Running requests keep their blocks."""
        if self._cache is not None:
            self._cache.reset()
            self.snapshots.reset()
            self.marks.forget_since(0)

    def _in_front_of_snapshot(self, row: int, cached: Int32s) -> Int32s:
        """Return those of a request's cached blocks that it can share; where there are more, note
        that others branch off behind them.
        """
        assert self._cache is not None
        num = self.snapshots.find(self._cache.digests(row, 0, len(cached)))
        if num < len(cached):
            self._branches[row] = len(cached)
        return cached[:num]

    def _load(self, row: int, num_blocks: int) -> tuple[int]:
        """Have the row's first step load the state behind so many blocks; returns the snapshot."""
        assert self._cache is not None
        [digest] = self._cache.digests(row, num_blocks - 1, num_blocks)
        snapshot = self.snapshots.load(digest)
        self._loads.append((row, snapshot))
        return (snapshot,)

    def _save(self, row: int, start: int, stop: int) -> tuple[int, ...]:
        """Have the planned step save the row's states at marks among its blocks [start, stop)."""
        assert self._cache is not None
        size, computed = self._block_size, int(self._requests.computed[row])
        of = self._requests.known if self._caches_answers else self._requests.prompt_len
        marks = state_marks(
            start,
            stop,
            num_tokens=int(of[row]),
            block_size=size,
            branch=self._branches.get(row, 0),
        )
        saved = []
        for mark in marks:
            [digest] = self._cache.digests(row, mark - 1, mark)
            snapshot = self.snapshots.save(digest)
            if snapshot is not None:
                saved.append((row, mark * size - computed, snapshot))
                self._saved_ends.append((mark, digest))
        self._saves += sorted(saved)
        return tuple(snapshot for _, _, snapshot in saved)

    def _register_sampled(self, rows: Int64s) -> None:
        """Register the outputs of running rows, as far as completed steps have computed them."""
        slots = self._requests.slot[rows]
        computed = np.minimum(self._tokens.lengths(rows) - 1, self._requests.computed[rows])
        starts, stops = self._num_registered[slots], computed // self._block_size
        if not self._caches_answers:
            stops = np.minimum(stops, self._requests.prompt_len[rows] // self._block_size)
        news = np.flatnonzero(starts < stops)
        if len(news):
            self._digest_all(rows[news], stops[news])
            tables = self._slots.tables
            assert self._cache is not None
            self._cache.register_all(
                (row, start, tables[slot, start:stop].tolist())
                for row, slot, start, stop in zip(
                    rows[news].tolist(),
                    slots[news].tolist(),
                    starts[news].tolist(),
                    stops[news].tolist(),
                    strict=True,
                )
            )

    def _name_marks(self, rows: Int64s) -> None:
        """Name the marks of running rows, which give their blocks back, as far as completed steps
        have computed what is in front of them. Their blocks are registered.
        """
        assert self._cache is not None
        computed = np.minimum(self._tokens.lengths(rows) - 1, self._requests.computed[rows])
        most = computed // self._block_size
        for row, num_computed in zip(rows.tolist(), most.tolist(), strict=True):
            mark = self.marks.take(int(self._requests.slot[row]))
            if mark is None:
                continue
            num = mark.num_blocks
            if not 0 < num <= num_computed:
                self.snapshots.give_back(mark.snapshot)
                continue
            [digest] = self._cache.digests(row, num - 1, num)
            if self.snapshots.name(mark.snapshot, digest):
                self._in_flight.add_saved(mark.step, row, mark.snapshot)
                self._reconsider([(num, digest)])

    def _register(self, row: int, start: int, stop: int) -> Int32s:
        """Register the row's blocks [start, stop), whose tokens are on the host; returns them."""
        assert self._cache is not None
        blocks = self._slots.tables[self._requests.slot[row], start:stop].copy()
        self._digest(row, stop)
        self._cache.register(row, start, blocks)
        return blocks

    def _reconsider(self, saved: Iterable[tuple[int, bytes]]) -> None:
        """Look up who found no room again if a saved state is behind blocks of its beginning."""
        if self._shortage is None:
            return
        assert self._cache is not None
        row = self._shortage.request[0]
        if any(self._cache.digests(row, num - 1, num) == [digest] for num, digest in saved):
            self._shortage = None

    def _might_fit(self, shortage: _Shortage, num_free: int) -> bool:
        """True if the request of `shortage` might find room now, with `num_free` blocks free."""
        if shortage.num_wanted <= num_free + self._pool.num_kept_taken - shortage.num_kept_taken:
            return True
        num, row = shortage.num_cached, shortage.request[0]
        if num == shortage.max_shared:
            return False
        assert self._cache is not None
        if not self._has_snapshots:
            return len(self._cache.lookup(row, num + 1, start=num)) > 0
        stop = num + len(self._cache.lookup(row, shortage.max_shared, start=num))
        return self.snapshots.find(self._cache.digests(row, num, stop)) > 0

    def _find(self, row: int, max_shared: int) -> Int32s:
        if not max_shared:
            return _NO_BLOCKS
        assert self._cache is not None
        self._digest(row, max_shared)
        return self._cache.lookup(row, max_shared)

    def _digest(self, row: int, num_blocks: int) -> None:
        """Compute missing digests of the row's first `num_blocks`, whose tokens are on the host."""
        assert self._cache is not None
        start = self._cache.num_named(row)
        if start < num_blocks:
            size = self._block_size
            ids = self._tokens.read(row, start * size, num_blocks * size)
            self._cache.extend(row, ids)

    def _digest_all(self, rows: Int64s, num_blocks: Int64s) -> None:
        """Digest as `_digest` does, for many rows: a gather costs as much for one as for a
        thousand.
        """
        assert self._cache is not None
        size = self._block_size
        begins = np.array([self._cache.num_named(row) for row in rows.tolist()], np.int64)
        lacking = np.flatnonzero(begins < num_blocks)
        if not len(lacking):
            return
        rows, begins = rows[lacking], begins[lacking]
        counts = (num_blocks[lacking] - begins) * size
        ids = self._tokens.gather(rows, begins * size, counts)
        ends = np.cumsum(counts)
        for row, begin, end in zip(
            rows.tolist(), (ends - counts).tolist(), ends.tolist(), strict=True
        ):
            self._cache.extend(row, ids[begin:end])

    def _num_idle(self, blocks: Int32s) -> int:
        """The number of these blocks that no request holds."""
        return int((self._pool.refs(blocks) == 0).sum()) if len(blocks) else 0
