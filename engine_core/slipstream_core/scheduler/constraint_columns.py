"""Token constraints (biases, allowed ids, bad words, penalties) and their columns in a plan.

- Rows without constraints cost nothing. A batch whose constrained rows stay the same costs one
  comparison: its columns are made once.
- A row gets its state slots in the runner's memory with the first step that samples it since it got
  a slot, together with its outputs so far, and loses them with the slot. So preemptions, the
  cutting of its prompt and the cores it ran on before do not matter.
- Low state slots are taken first, which keeps the runner's memory small.
- Allowed ids are a mask with a bit for each id of the vocabulary, stored once for all rows with the
  same ids: the answers of a request share it here, and a state slot in the runner.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import numpy.typing as npt

from slipstream_core.step.constraint_plan import (
    NO_TOKEN,
    ConstraintPlan,
    ConstraintRefill,
    StepConstraints,
)
from slipstream_ipc.arrays import Float32s, Int64s
from slipstream_ipc.history.token_log import TokenLog
from slipstream_ipc.messages import SamplingParams
from slipstream_ipc.validation.token_constraints import MAX_BAD_WORD_TOKENS, Words

_NONE: Int64s = np.empty(0, np.int64)
_TAIL = MAX_BAD_WORD_TOKENS - 1


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenConstraints:
    """The token constraints of one request."""

    bias_ids: Int64s = field(default_factory=lambda: _NONE)
    biases: Float32s = field(default_factory=lambda: np.empty(0, np.float32))
    allowed: bytes | None = None  # the int32 words of a mask; see `allowed_mask`
    banned_ids: Int64s = field(default_factory=lambda: _NONE)
    words: tuple[tuple[int, ...], ...] = ()  # bad words of two tokens and more
    presence: float = 0.0
    frequency: float = 0.0
    repetition: float = 1.0

    @property
    def is_penalised(self) -> bool:
        """True if the row's tokens have to be counted."""
        return bool(self.presence or self.frequency or self.repetition != 1)


def token_constraints(params: SamplingParams, words: Words) -> TokenConstraints | None:
    """The constraints of a request, `words` being its bad words in token ids; or None."""
    biases, allowed = params.logit_bias or {}, params.allowed_token_ids
    constraints = TokenConstraints(
        bias_ids=np.fromiter(biases.keys(), np.int64, len(biases)),
        biases=np.fromiter(biases.values(), np.float32, len(biases)),
        allowed=None if allowed is None else allowed_mask(allowed),
        banned_ids=np.array([word[0] for word in words if len(word) == 1], np.int64),
        words=tuple(word for word in words if len(word) > 1),
        presence=params.presence_penalty,
        frequency=params.frequency_penalty,
        repetition=params.repetition_penalty,
    )
    return constraints if biases or allowed or words or constraints.is_penalised else None


def allowed_mask(token_ids: Sequence[int]) -> bytes:
    """The int32 words of a mask that allows these ids, the lowest id in the lowest bit.

    Equal sets of ids give equal masks, whatever their order and repetitions.
    """
    ids = np.array(token_ids, np.int64)
    bits = np.zeros(32 * (int(ids.max()) // 32 + 1), np.uint8)
    bits[ids] = 1
    return np.packbits(bits, bitorder="little").tobytes()


def permitted_mask(
    constraints: TokenConstraints | None, vocab_size: int
) -> npt.NDArray[np.int32] | None:
    """The bitmask of the ids that allowed and banned ones leave of a vocabulary,
    int32 [ceil(vocab / 32)]; None if they leave all.
    """
    if constraints is None or (constraints.allowed is None and not len(constraints.banned_ids)):
        return None
    bits = np.ones(32 * -(-vocab_size // 32), np.uint8)
    if constraints.allowed is not None:
        allowed = np.unpackbits(np.frombuffer(constraints.allowed, np.uint8), bitorder="little")
        bits[: len(allowed)] = allowed[: len(bits)]
        bits[len(allowed) :] = 0
    bits[constraints.banned_ids[constraints.banned_ids < len(bits)]] = 0
    return np.packbits(bits, bitorder="little").view(np.int32)


class ConstraintColumns:
    """The token constraints of all requests that have some."""

    def __init__(self) -> None:
        self._by_row: dict[int, TokenConstraints] = {}  # by row
        self._active: set[int] = set()  # rows that hold their state slots, if they need any
        self._tail_state_slots = _StateSlots()
        self._count_state_slots = _StateSlots()
        self._allowed = _SharedMasks()
        self._last: tuple[Int64s, StepConstraints] | None = None  # of these rows, in this order

    def __len__(self) -> int:
        return len(self._by_row)

    def add(self, row: int, constraints: TokenConstraints) -> None:
        """A request with constraints starts on `row`."""
        if constraints.allowed is not None:
            constraints = replace(constraints, allowed=self._allowed.add(constraints.allowed))
        self._by_row[row] = constraints

    def remove(self, rows: Iterable[int]) -> None:
        """The requests of these rows are gone; they hold no slots any more."""
        for row in rows:
            constraints = self._by_row.pop(row, None)
            if constraints is not None and constraints.allowed is not None:
                self._allowed.release(constraints.allowed)

    def deactivate(self, rows: Iterable[int]) -> None:
        """Release the slots of these rows, and their state slots."""
        for row in rows:
            if row in self._active:
                self._active.remove(row)
                self._tail_state_slots.release(row)
                self._count_state_slots.release(row)
                allowed = self._by_row[row].allowed
                if allowed is not None:
                    self._allowed.deactivate(allowed)
                self._last = None

    def plan(
        self, rows: Int64s, indices: Int64s, tokens: TokenLog, prompt_lens: Int64s
    ) -> ConstraintPlan:
        """The constraints of a step that samples `rows` [C], `indices` among its sampled rows.

        `prompt_lens` is by row. A row that is new here must have all of its tokens in `tokens`.
        """
        refill = None
        if self._last is None or not np.array_equal(self._last[0], rows):
            asking = rows.tolist()
            fresh = [row for row in asking if row not in self._active]
            if fresh:
                refill = self._activate(fresh, tokens, prompt_lens)
            self._last = rows, self._columns(asking)
        return ConstraintPlan(indices, self._last[1], refill)

    def _activate(
        self, rows: Sequence[int], tokens: TokenLog, prompt_lens: Int64s
    ) -> ConstraintRefill | None:
        """Give state slots to rows that need some; returns their initial content."""
        self._active.update(rows)
        with_tails = [row for row in rows if self._by_row[row].words]
        counted = [row for row in rows if self._by_row[row].is_penalised]
        allowed = [mask for row in rows if (mask := self._by_row[row].allowed) is not None]
        if not with_tails and not counted and not allowed:
            return None
        for mask in allowed:
            self._allowed.activate(mask)
        masks = list(dict.fromkeys(allowed))
        bits = np.zeros((len(masks), max((len(mask) // 4 for mask in masks), default=0)), np.int32)
        for line, mask in zip(bits, masks, strict=True):
            line[: len(mask) // 4] = np.frombuffer(mask, "<i4")
        tails = np.full((len(with_tails), _TAIL), NO_TOKEN, np.int64)
        for tail, row in zip(tails, with_tails, strict=True):
            end = tokens.length(row)
            last = tokens.read(row, max(int(prompt_lens[row]), end - _TAIL), end)
            tail[_TAIL - len(last) :] = last
        outputs, seen = [], []
        for row in counted:
            ids = tokens.read(row, 0, tokens.length(row)).astype(np.int64)
            outputs.append(ids[prompt_lens[row] :])
            seen.append(np.unique(outputs[-1] if self._by_row[row].repetition == 1 else ids))
        count_state_slots = self._count_state_slots.assign(counted)
        return ConstraintRefill(
            tail_state_slots=self._tail_state_slots.assign(with_tails),
            tails=tails,
            allowed_state_slots=self._allowed.state_slots(masks),
            allowed_bits=bits,
            count_state_slots=count_state_slots,
            seen=_side_by_side(seen),
            num_seen=np.array([len(ids) for ids in seen], np.int64),
            output_state_slots=np.repeat(count_state_slots, [len(ids) for ids in outputs]),
            output_ids=_concatenated(outputs),
        )

    def _columns(self, rows: Sequence[int]) -> StepConstraints:
        """The constraints of these rows, in this order."""
        asked = [self._by_row[row] for row in rows]
        limited = [i for i, constraints in enumerate(asked) if constraints.allowed is not None]
        allowed = [mask for constraints in asked if (mask := constraints.allowed) is not None]
        words = [(i, word) for i, constraints in enumerate(asked) for word in constraints.words]
        tailed = [i for i, constraints in enumerate(asked) if constraints.words]
        counted = [i for i, constraints in enumerate(asked) if constraints.is_penalised]
        heads = np.full((len(words), max((len(w) - 1 for _, w in words), default=0)), NO_TOKEN)
        for head, (_, word) in zip(heads, words, strict=True):
            head[len(head) - len(word) + 1 :] = word[:-1]
        repetitions = [asked[i].repetition for i in counted]
        return StepConstraints(
            bias_rows=_owners([constraints.bias_ids for constraints in asked]),
            bias_ids=_concatenated([constraints.bias_ids for constraints in asked]),
            biases=np.concatenate([constraints.biases for constraints in asked]),
            allowed_rows=np.array(limited, np.int64),
            allowed_state_slots=self._allowed.state_slots(allowed),
            banned_rows=_owners([constraints.banned_ids for constraints in asked]),
            banned_ids=_concatenated([constraints.banned_ids for constraints in asked]),
            word_rows=np.array([i for i, _ in words], np.int64),
            word_state_slots=self._tail_state_slots.of([rows[i] for i, _ in words]),
            word_heads=heads,
            word_lasts=np.array([word[-1] for _, word in words], np.int64),
            tail_rows=np.array(tailed, np.int64),
            tail_state_slots=self._tail_state_slots.of([rows[i] for i in tailed]),
            penalty_rows=np.array(counted, np.int64),
            count_state_slots=self._count_state_slots.of([rows[i] for i in counted]),
            repetitions=np.array(repetitions, np.float32),
            frequencies=np.array([asked[i].frequency for i in counted], np.float32),
            presences=np.array([asked[i].presence for i in counted], np.float32),
            any_repetition=any(repetition != 1 for repetition in repetitions),
        )


class _StateSlots:
    """The state slot that each row, or each mask, holds."""

    def __init__(self) -> None:
        self._of: dict[Hashable, int] = {}
        self._free: list[int] = []  # heap
        self._num = 0

    def assign(self, rows: Sequence[Hashable]) -> Int64s:
        """Give each of `rows`, which hold none, a state slot."""
        for row in rows:
            if not self._free:
                self._free.append(self._num)
                self._num += 1
            self._of[row] = heapq.heappop(self._free)
        return self.of(rows)

    def of(self, rows: Sequence[Hashable]) -> Int64s:
        """The state slots of `rows`."""
        return np.array([self._of[row] for row in rows], np.int64)

    def release(self, row: Hashable) -> None:
        """Free the state slot of `row`, if it holds one."""
        state_slot = self._of.pop(row, None)
        if state_slot is not None:
            heapq.heappush(self._free, state_slot)


class _SharedMasks:
    """Masks that rows share: each is stored once, and has one state slot while it is in use."""

    def __init__(self) -> None:
        self._masks: dict[bytes, bytes] = {}
        self._rows: Counter[bytes] = Counter()  # rows that have it
        self._active: Counter[bytes] = Counter()  # of those, the rows that run
        self._state_slots = _StateSlots()

    def add(self, mask: bytes) -> bytes:
        """Add a row with this mask; returns the stored copy."""
        mask = self._masks.setdefault(mask, mask)
        self._rows[mask] += 1
        return mask

    def release(self, mask: bytes) -> None:
        """Remove a row with this mask, which runs no longer."""
        self._rows[mask] -= 1
        if not self._rows[mask]:
            del self._rows[mask], self._masks[mask]

    def activate(self, mask: bytes) -> None:
        """A row with this mask begins to run."""
        if not self._active[mask]:
            self._state_slots.assign([mask])
        self._active[mask] += 1

    def deactivate(self, mask: bytes) -> None:
        """A row with this mask runs no longer."""
        self._active[mask] -= 1
        if not self._active[mask]:
            del self._active[mask]
            self._state_slots.release(mask)

    def state_slots(self, masks: Sequence[bytes]) -> Int64s:
        """The state slots of masks that are in use."""
        return self._state_slots.of(masks)


def _owners(columns: Sequence[Int64s]) -> Int64s:
    """The index of its column for each value of all columns."""
    return np.repeat(np.arange(len(columns)), [len(column) for column in columns])


def _concatenated(columns: Sequence[Int64s]) -> Int64s:
    return np.concatenate([_NONE, *columns])


def _side_by_side(columns: Sequence[Int64s]) -> Int64s:
    """The columns as rows of a table, padded with their first value, or 0 where empty."""
    table = np.zeros((len(columns), max([1, *map(len, columns)])), np.int64)
    for line, column in zip(table, columns, strict=True):
        line[:] = column[:1] if len(column) else 0
        line[: len(column)] = column
    return table
