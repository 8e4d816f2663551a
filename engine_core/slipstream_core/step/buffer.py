"""A plan's columns in one piece of memory: for other ranks as bytes, for a card as one copy.

A `Layout` gives each column its place. A `Page` is memory laid out so, and remembers the arrays
that its columns were written from: what it holds already is neither checked nor written again.
Consecutive decode steps share all arrays but those of positions, cache slots and lengths.

`PlanBuffer` is a page with a header of int64, which has the plan's counts and flags; dtypes and
shapes of the columns follow from them, so the bytes hold no type, no name and no offset. They are
in native byte order. What only rank 0 reads stays there: a prompt's rows and targets, and what is
sampled by, but for the temperatures and seeds of a plan that is `sliced`. In a plan that is read
these columns are empty, and flags and limits those of a greedy step.

All ranks have the same sizes, so the first one checks a plan's `PlanBounds` for all, before any
other has heard of the plan, and that its columns agree. Without it a token in the wrong place of
the cache, an id beyond the vocabulary, or rows without the plan's tokens would end the ranks'
processes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from hashlib import blake2b
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt

from slipstream_core.step.columns import Over, PlanColumn, Size
from slipstream_core.step.plan import COLUMNS, PromptPlan, StepPlan, columns_over

Bytes = npt.NDArray[np.uint8]
AnyArray = npt.NDArray[Any]

Limits = dict[str, tuple[int, int]]
"""By column: what is added to its numbers, and the bound that they are below then, not negative."""

_ALIGNMENT = 16  # bytes; the pointer alignment that kernels may rely on
_MOST_LAID = 64  # layouts whose places a page remembers
_UNSIGNED: Final = {4: np.uint32, 8: np.uint64}


class PlanBytesError(ValueError):
    """Bytes that are no plan, or a plan that has no place in its buffer."""


class PlanBoundsError(ValueError):
    """A plan names a place that the ranks do not have."""


class Field(NamedTuple):
    """One column of `num` elements."""

    name: str
    dtype: Any  # what numpy takes for one
    num: int


class Layout:
    """Byte offsets of columns in a buffer; equal fields always give equal offsets."""

    def __init__(self, fields: Sequence[Field]) -> None:
        self.places: dict[str, tuple[np.dtype[Any], int, int]] = {}  # dtype, begin, end
        at = 0
        for name, given, num in fields:
            dtype: np.dtype[Any] = np.dtype(given)
            stop = at + num * dtype.itemsize
            self.places[name] = dtype, at, stop
            at = -(-stop // _ALIGNMENT) * _ALIGNMENT
        self.size = at  # bytes

    def in_host(self, buffer: Bytes) -> dict[str, AnyArray]:
        """The columns as views of a host buffer."""
        return {
            name: buffer[start:stop].view(dtype)
            for name, (dtype, start, stop) in self.places.items()
        }


class _Place(NamedTuple):
    """A column in memory; its numbers, as unsigned ones, if they are checked; and how."""

    column: AnyArray
    numbers: AnyArray | None
    shift: int  # added before a number is compared, so that -1 may be allowed
    end: int  # numbers are below it, and not negative


class Page:
    """Columns in host memory that is written for one step after another."""

    def __init__(self, memory: Bytes, limits: Limits | None = None) -> None:
        self._memory = memory
        self._limits = {} if limits is None else limits
        self._laid: dict[Layout, dict[str, _Place]] = {}
        self._layout: Layout | None = None
        self._places: dict[str, _Place] = {}
        self._held: dict[str, AnyArray] = {}  # by name: the array that a column was written from

    def lay_out(self, layout: Layout) -> None:
        """Give the columns these places, unless they have them."""
        if layout is self._layout:
            return
        if layout not in self._laid:
            if len(self._laid) == _MOST_LAID:
                self._laid.clear()
            columns = layout.in_host(self._memory)
            self._laid[layout] = {name: self._place(name, each) for name, each in columns.items()}
        self._layout, self._places, self._held = layout, self._laid[layout], {}

    def __getitem__(self, name: str) -> AnyArray:
        """A column, for the caller to write."""
        self._held.pop(name, None)
        return self._places[name].column

    def columns(self) -> dict[str, AnyArray]:
        """The columns as new arrays: as they are written again, none is another plan's."""
        return {name: place.column.view() for name, place in self._places.items()}

    def write(
        self,
        name: str,
        column: AnyArray,
        *,
        pad: float | None = None,
        make: Callable[[Any], AnyArray] | None = None,
    ) -> None:
        """Write a column, or what is made of it, unless it was written from this very array; `pad`
        is put behind it.

        Raises PlanBytesError where it has another dtype than its place, or another length and there
        is nothing to pad with; PlanBoundsError where a number is beyond the limits.
        """
        held = self._held
        if held.get(name) is column:
            return
        held.pop(name, None)
        written = column if make is None else make(column)
        place, numbers, shift, end = self._places[name]
        if pad is not None and len(written) < len(place):
            place[len(written) :] = pad
            place = place[: len(written)]
        if written.shape != place.shape or written.dtype != place.dtype:
            raise PlanBytesError(f"{name} is {written.dtype} {written.shape}")
        place[...] = written
        if numbers is not None:
            if shift:
                numbers = numbers + shift
            if np.count_nonzero(numbers >= end):  # negative ones are large
                raise PlanBoundsError(f"{name} reaches beyond {end - 1 - shift}")
        held[name] = column

    def _place(self, name: str, column: AnyArray) -> _Place:
        if name not in self._limits:
            return _Place(column, None, 0, 0)
        return _Place(column, column.view(_UNSIGNED[column.itemsize]), *self._limits[name])


class PlanBounds(NamedTuple):
    """The sizes that plans refer to."""

    num_blocks: int
    block_size: int
    max_num_seqs: int
    max_blocks: int  # of a row
    vocab_size: int

    def limits(self) -> Limits:
        """The limits of the columns that have some."""
        sizes: dict[Size, int] = {
            "vocab": self.vocab_size,
            "cache_slots": self.num_blocks * self.block_size,
            "rows": self.max_num_seqs,
            "table": self.max_blocks,
            "blocks": self.num_blocks,
            # every position of a row, so every key attended to, has a place in its table
            "length": self.max_blocks * self.block_size,
        }
        return {
            name: (-it.least, sizes[it.below] - it.least + it.reaches)
            for name, it in ((name, each.declared) for name, each in COLUMNS.items())
            if it.below is not None
        }


def _sent(over: Over) -> tuple[PlanColumn, ...]:
    """The columns over T, R, E or S that are sent."""
    return tuple(each for each in columns_over(over).values() if each.declared.sent != "never")


def _digest(*columns: PlanColumn) -> int:
    said = repr([(each.name, each.dtype.str) for each in columns]).encode()
    return int.from_bytes(blake2b(said, digest_size=7).digest(), "little")


# tokens, rows, rows that are drawn from slices, entries of tables, scored positions
_COUNTS: Final = ("T", "R", "S", "E", "N")
# magic, size in bytes, step, num_decodes, whether there is a prompt, which slices are sampled (0:
# none, _GREEDY, _DRAWN, _TRUNCATED); then the counts
_GREEDY, _DRAWN, _TRUNCATED = range(1, 4)
_WORDS: Final = 6 + len(_COUNTS)
_HEADER_BYTES: Final = -(-8 * _WORDS // _ALIGNMENT) * _ALIGNMENT
_MAGIC: Final = _digest(*_sent("T"), *_sent("R"), *_sent("S"), *_sent("E"))  # changes with a layout

_TABLE_COLUMNS: Final = _sent("E")
_SCORED: Final = "tokens"  # of a PromptPlan
_NO_LONGS: Final = np.empty(0, np.int64)
_UNSAMPLED: Final[dict[str, Any]] = {
    "all_greedy": True,
    "any_truncation": False,
    "max_logprobs": -1,
    **{name: each.blank(0) for name, each in COLUMNS.items() if each.declared.sent != "always"},
}


def packed_bytes(plan: StepPlan) -> int:
    """The number of bytes that `PlanBuffer.pack` writes for this plan."""
    fixed, varying = _layouts(_counts(plan))
    return _HEADER_BYTES + fixed.size + varying.size


class _Rows(NamedTuple):
    """The tokens that the rows of a plan compute, and which of them sample."""

    query_lens: AnyArray
    samples: AnyArray
    num_decodes: int
    slices: int

    def check(self, counts: tuple[int, ...]) -> None:
        """Raises PlanBytesError where they contradict each other, or the plan's counts."""
        lens, num_decodes = self.query_lens, self.num_decodes
        if not 0 <= num_decodes <= len(lens):
            raise PlanBytesError("more decode rows than rows")
        if np.count_nonzero(lens[:num_decodes] == 1) != num_decodes:
            raise PlanBytesError("a decode row does not have one token")
        chunks = lens[num_decodes:]
        if len(chunks) and int(chunks.min()) < 1:
            raise PlanBytesError("a row without tokens")
        num_tokens, _, num_drawn, *_ = counts
        if num_decodes + int(chunks.sum(dtype=np.int64)) != num_tokens:
            raise PlanBytesError("the rows do not have the tokens of the plan")
        samples = self.samples.view(np.uint8)
        if len(samples) and int(samples.max()) > 1:
            raise PlanBytesError("a row is neither sampled nor not")
        if self.slices >= _DRAWN and num_drawn != np.count_nonzero(samples):
            raise PlanBytesError("the rows that are drawn are not those that are sampled")


class PlanBuffer:
    """A buffer that holds one plan after another."""

    def __init__(self, buffer: memoryview, bounds: PlanBounds | None = None) -> None:
        """buffer: begins at a multiple of 8 bytes. bounds: of the plans that are written."""
        memory: Bytes = np.frombuffer(buffer, np.uint8, buffer.nbytes)
        self._buffer = buffer
        self._memory = memory[_HEADER_BYTES:]
        self._header: npt.NDArray[np.int64] = memory[: len(memory) // 8 * 8].view(np.int64)[:_WORDS]
        self._limits = None if bounds is None else bounds.limits()
        self._page = Page(self._memory, self._limits)
        self._fixed: Layout | None = None
        self._tables = self._page  # behind the columns of `_fixed`
        self._agreed: tuple[_Rows | None, tuple[int, ...]] = None, ()  # of the latest plan

    def pack(self, plan: StepPlan) -> int:
        """Write a plan that is within its bounds; the number of bytes written.

        Raises PlanBoundsError, or PlanBytesError if the plan does not fit, if a column has another
        dtype or shape than its plan's counts say, or, with bounds, if columns contradict each
        other; what the buffer holds then is no plan.
        """
        counts = _counts(plan)
        fixed, varying = _layouts(counts)
        size = _HEADER_BYTES + fixed.size + varying.size
        if size > self._buffer.nbytes:
            raise PlanBytesError(f"a plan of {size} bytes in a buffer of {self._buffer.nbytes}")
        header, prompt = self._header, plan.prompt
        header[0] = 0
        self._lay_out(fixed, varying)
        for name in fixed.places:
            self._page.write(name, getattr(plan, name))
        if self._limits is not None and np.count_nonzero(plan.query_lens > plan.kv_lens):
            raise PlanBoundsError("a row computes more tokens than it has")
        slices = _slices(plan)
        if self._limits is not None:
            self._check(_Rows(plan.query_lens, plan.samples, plan.num_decodes, slices), counts)
            if prompt is not None:
                _check_indices(prompt.tokens, counts[0])
        if varying.size:
            for each in _TABLE_COLUMNS:
                self._tables.write(each.name, getattr(plan, each.name))
            if prompt is not None:
                self._tables.write(_SCORED, prompt.tokens)
        header[1:] = (size, plan.step, plan.num_decodes, prompt is not None, slices, *counts)
        header[0] = _MAGIC
        return size

    def written(self, size: int) -> memoryview:
        """The bytes of the plan that was written."""
        return self._buffer[:size]

    def _check(self, rows: _Rows, counts: tuple[int, ...]) -> None:
        """Do as `_Rows.check`, unless the plan before had these very columns and counts."""
        last, last_counts = self._agreed
        if (
            last is None
            or counts != last_counts
            or rows[2:] != last[2:]
            or rows.query_lens is not last.query_lens
            or rows.samples is not last.samples
        ):
            rows.check(counts)
            self._agreed = rows, counts

    def _lay_out(self, fixed: Layout, varying: Layout) -> None:
        self._page.lay_out(fixed)
        if fixed is not self._fixed:
            self._fixed = fixed
            self._tables = Page(self._memory[fixed.size :], self._limits)
        self._tables.lay_out(varying)

    def view(self) -> StepPlan:
        """The plan that was written; its columns are views, good until another one is written.

        Raises PlanBytesError for bytes that `pack` does not write: sizes that do not add up or lie
        beyond the buffer, token counts that are not those of the rows. Ids and places in the cache
        are not checked.
        """
        space = self._buffer.nbytes
        if space < _HEADER_BYTES:
            raise PlanBytesError(f"{space} bytes are less than a header")
        magic, size, step, num_decodes, has_prompt, slices, *numbers = self._header.tolist()
        if magic != _MAGIC:
            raise PlanBytesError("not a plan")
        # no count is larger than the buffer, so numpy is asked for no shape that overflows
        if min(numbers) < 0 or max(numbers) > space:
            raise PlanBytesError("a count lies beyond the buffer")
        counts = tuple(numbers)
        num_tokens, _, num_drawn, _, num_scored = counts
        if not 0 <= has_prompt <= 1 or (not has_prompt and num_scored):
            raise PlanBytesError("positions of no prompt")
        if not 0 <= slices <= _TRUNCATED or (slices < _DRAWN and num_drawn):
            raise PlanBytesError("draws from no slices")
        fixed, varying = _layouts(counts)
        if size != _HEADER_BYTES + fixed.size + varying.size or size > space:
            raise PlanBytesError("the columns do not have the size of the plan")
        self._lay_out(fixed, varying)
        columns = self._page.columns() | self._tables.columns()
        scored = columns.pop(_SCORED)
        _Rows(columns["query_lens"], columns["samples"], num_decodes, slices).check(counts)
        prompt = None
        if has_prompt:
            _check_indices(scored, num_tokens)
            unsaid = dict.fromkeys(
                ("rows", "starts", "counts", "num_logprobs", "targets"), _NO_LONGS
            )
            prompt = PromptPlan(**unsaid, tokens=scored)
        fields = _UNSAMPLED | columns
        if slices:
            fields |= {
                "sliced": True,
                "all_greedy": slices == _GREEDY,
                "any_truncation": slices == _TRUNCATED,
            }
        return StepPlan(step=step, num_decodes=num_decodes, prompt=prompt, **fields)


def _check_indices(indices: AnyArray, end: int) -> None:
    if len(indices) and (int(indices.min()) < 0 or int(indices.max()) >= end):
        raise PlanBytesError("an index lies beyond its column")


def _counts(plan: StepPlan) -> tuple[int, ...]:
    """The counts of `_COUNTS`, in their order."""
    num_scored = 0 if plan.prompt is None else len(plan.prompt.tokens)
    num_drawn = len(plan.temperatures) if _slices(plan) >= _DRAWN else 0
    num_tokens, num_rows = len(plan.token_ids), len(plan.slots)
    return num_tokens, num_rows, num_drawn, len(plan.table_slots), num_scored


def _slices(plan: StepPlan) -> int:
    """The slices that are sampled, as the header encodes them."""
    if not plan.sliced:
        return 0
    if plan.all_greedy:
        return _GREEDY
    return _TRUNCATED if plan.any_truncation else _DRAWN


@lru_cache(maxsize=256)
def _layouts(counts: tuple[int, ...]) -> tuple[Layout, Layout]:
    """The places of columns by token and by row, and, behind them, of entries and positions."""
    return _fixed(*counts[:3]), _varying(*counts[3:])


@lru_cache(maxsize=64)
def _fixed(num_tokens: int, num_rows: int, num_drawn: int) -> Layout:
    nums = {"T": num_tokens, "R": num_rows, "S": num_drawn}
    columns = (*_sent("T"), *_sent("R"), *(_sent("S") if num_drawn else ()))
    return Layout([Field(each.name, each.dtype, nums[each.declared.over]) for each in columns])


def _varying(num_entries: int, num_scored: int) -> Layout:
    entries = [Field(each.name, each.dtype, num_entries) for each in _sent("E")]
    return Layout([*entries, Field(_SCORED, np.int64, num_scored)])
