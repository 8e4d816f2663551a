"""A step's plan as bytes in a buffer that ranks share, and as views of that buffer again.

The bytes are a header of int64 and then the plan's columns, each at a multiple of 8 bytes, in
native byte order. The header has the plan's counts and flags; dtypes and shapes of the columns
follow from them, so the bytes hold no type, no name and no offset.

Plans are checked and written in C (`plan_pack.c`). What it does not take is a plan with scored
positions, which `_write` writes, or a wrong one: `PlanBounds.check` says what is wrong with it.

What only rank 0 reads stays there: a prompt's rows and targets, and what is sampled by, but for the
temperatures and seeds of a plan that is `sliced`. In a plan that is read these columns are empty,
and flags and limits those of a greedy step.
"""

from __future__ import annotations

from functools import lru_cache
from hashlib import blake2b
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from slipstream_core._native import PlanPacker
from slipstream_core.step.columns import PlanColumn
from slipstream_core.step.plan import COLUMNS, PromptPlan, StepPlan
from slipstream_core.step.plan_check import PlanBounds

Column = npt.NDArray[Any]


class PlanBytesError(ValueError):
    """Bytes that are no plan, or a plan that has no place in its buffer."""


def _sent(over: str) -> tuple[PlanColumn, ...]:
    """The columns over T, R, E or S that are sent."""
    columns = (each for each in COLUMNS.values() if each.declared.sent != "never")
    return tuple(each for each in columns if each.declared.over == over)


def _digest(*columns: PlanColumn) -> int:
    said = repr([(each.name, each.dtype.str) for each in columns]).encode()
    return int.from_bytes(blake2b(said, digest_size=7).digest(), "little")


# tokens, rows, rows that are drawn from slices, entries of tables, scored positions
_COUNTS: Final = ("T", "R", "S", "E", "N")
_NUM_FIXED: Final = 3  # of these; the others change from one decode step to the next

# magic, size in bytes, step, num_decodes, whether there is a prompt, which slices are sampled (0:
# none, _GREEDY, _DRAWN, _TRUNCATED); then the counts
_NUM_SCALARS: Final = 6
_GREEDY, _DRAWN, _TRUNCATED = range(1, 4)
_WORDS: Final = _NUM_SCALARS + len(_COUNTS)
_HEADER_BYTES: Final = 8 * _WORDS
_ANY: Final = 0, 2**64 - 1  # no bounds

_PLAN_FIELDS: Final = (*_sent("T"), *_sent("R"))
_DRAWN_FIELDS: Final = _sent("S")
_TABLE_FIELDS: Final = _sent("E")
# changes with the layout
_MAGIC: Final = _digest(*_PLAN_FIELDS, *_DRAWN_FIELDS, *_TABLE_FIELDS)

_NO_LONGS: Final = np.empty(0, np.int64)
_UNSAMPLED: Final[dict[str, Any]] = {
    "all_greedy": True,
    "any_truncation": False,
    "max_logprobs": -1,
    **{name: each.blank(0) for name, each in COLUMNS.items() if each.declared.sent != "always"},
}


def packed_bytes(plan: StepPlan) -> int:
    """The number of bytes that `PlanBuffer.pack` writes for this plan."""
    return _size(_counts(plan))


class PlanBuffer:
    """A buffer that holds one plan after another.

    It keeps the columns of the last plan's layout: from one decode step to the next the counts are
    mostly the same, and finding the columns costs more than copying them.
    """

    def __init__(self, buffer: memoryview) -> None:
        """buffer: begins at a multiple of 8 bytes."""
        self._buffer = buffer
        self._packer: PlanPacker | None = (
            None  # of plans with these fixed counts, within these bounds
        )
        self._packs: tuple[tuple[int, ...], int, PlanBounds | None] | None = None
        self._layout: tuple[int, ...] = ()  # the fixed counts
        self._columns: dict[str, Any] = {}  # by token and by row
        self._unsampled: dict[str, Any] = {}  # with what only sampling reads
        self._tables_at = _HEADER_BYTES
        self._longs: Column = np.frombuffer(buffer, np.int64, buffer.nbytes // 8)
        self._ints: Column = self._longs.view(np.int32)
        self._header: Column = self._longs[:_WORDS]

    def pack(self, plan: StepPlan, bounds: PlanBounds | None = None) -> int:
        """Write a plan that is within its bounds; the number of bytes written.

        Raises PlanBoundsError, or PlanBytesError if the plan does not fit, or if a column has
        another dtype or shape than its plan's counts say; what the buffer holds then is no plan.
        """
        counts = _counts(plan)
        size = _size(counts)
        if size > self._buffer.nbytes:
            raise PlanBytesError(f"a plan of {size} bytes in a buffer of {self._buffer.nbytes}")
        if self._packs_in_c(plan, counts, bounds):
            return size
        header, prompt = self._header, plan.prompt
        header[0] = 0
        if bounds is not None:
            bounds.check(plan)
        self._lay_out(counts)
        tables, scored = self._varying(counts)
        _write(plan, self._columns | tables)
        if prompt is not None:
            _write(prompt, {"tokens": scored})
        slices = _slices(plan)
        header[1:] = (size, plan.step, plan.num_decodes, prompt is not None, slices, *counts)
        header[0] = _MAGIC
        return size

    def written(self, size: int) -> memoryview:
        """The bytes of the plan that was written."""
        return self._buffer[:size]

    def _packs_in_c(
        self, plan: StepPlan, counts: tuple[int, ...], bounds: PlanBounds | None
    ) -> bool:
        """Write a plan in C; return True if that was done."""
        packs = counts[:_NUM_FIXED], _slices(plan), bounds
        if self._packer is None or self._packs != packs:
            self._packer = self._new_packer(*packs)
            self._packs = packs
        return self._packer.pack(plan)

    def _new_packer(
        self, fixed: tuple[int, ...], slices: int, bounds: PlanBounds | None
    ) -> PlanPacker:
        named = dict(zip(_COUNTS, fixed, strict=False)) | {"E": -1}  # -1: as many as the plan has
        checks = {} if bounds is None else bounds.checks()
        fields = []
        at = _HEADER_BYTES
        for field in (*_fixed_fields(named["S"]), *_TABLE_FIELDS):
            num, item = named[field.declared.over], field.dtype.itemsize
            checked = checks.get(field.name, _ANY)
            fields.append((field.name, field.dtype.kind, at, item, num, *checked))
            at += _padded(max(num, 0) * item)
        words = (_MAGIC, at, 0, 0, 0, slices, *fixed, 0, 0)
        names = [field.name for field in _PLAN_FIELDS]
        pair = (-1, -1) if bounds is None else (names.index("query_lens"), names.index("kv_lens"))
        return PlanPacker(self._buffer, words, tuple(fields), *pair)

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
        if size != _size(counts) or size > space:
            raise PlanBytesError("the columns do not have the size of the plan")
        self._lay_out(counts)
        tables, scored = self._varying(counts)
        _check_rows(self._columns, num_tokens, num_decodes)
        if slices >= _DRAWN and num_drawn != np.count_nonzero(self._columns["samples"]):
            raise PlanBytesError("the rows that are drawn are not those that are sampled")
        prompt = None
        if has_prompt:
            _check_indices(scored, num_tokens)
            prompt = PromptPlan(
                rows=_NO_LONGS,
                starts=_NO_LONGS,
                counts=_NO_LONGS,
                num_logprobs=_NO_LONGS,
                tokens=scored,
                targets=_NO_LONGS,
            )
        fields = self._unsampled
        if slices:
            fields = fields | {
                "sliced": True,
                "all_greedy": slices == _GREEDY,
                "any_truncation": slices == _TRUNCATED,
            }
        return StepPlan(step=step, num_decodes=num_decodes, prompt=prompt, **tables, **fields)

    def _lay_out(self, counts: tuple[int, ...]) -> None:
        """Find the columns by token and by row of a plan with these counts, which fits."""
        if counts[:_NUM_FIXED] == self._layout:
            return
        named = dict(zip(_COUNTS, counts, strict=True))
        self._columns, at = {}, _HEADER_BYTES
        for field in _fixed_fields(named["S"]):
            num = named[field.declared.over]
            column = np.empty(0, field.dtype)
            if num:  # frombuffer refuses to begin at the buffer's end
                column = np.frombuffer(self._buffer, field.dtype, num, at)
            self._columns[field.name] = column
            at += _padded(num * field.dtype.itemsize)
        self._tables_at = at
        self._unsampled = _UNSAMPLED | self._columns
        self._layout = counts[:_NUM_FIXED]

    def _varying(self, counts: tuple[int, ...]) -> tuple[dict[str, Any], Column]:
        """The entries of tables, and the scored positions, of a plan that is laid out."""
        *_, num, num_scored = counts
        at = self._tables_at // 8
        blocks = at + 2 * num
        end = blocks + (num + 1) // 2
        longs = self._longs
        tables = {
            "table_slots": longs[at : at + num],
            "table_numbers": longs[at + num : blocks],
            "table_blocks": self._ints[2 * blocks : 2 * blocks + num],
        }
        return tables, longs[end : end + num_scored]


def _check_rows(columns: dict[str, Column], num_tokens: int, num_decodes: int) -> None:
    lens = columns["query_lens"]
    if not 0 <= num_decodes <= len(lens):
        raise PlanBytesError("more decode rows than rows")
    if np.count_nonzero(lens[:num_decodes] == 1) != num_decodes:
        raise PlanBytesError("a decode row does not have one token")
    chunks = lens[num_decodes:]
    if len(chunks) and int(chunks.min()) < 1:
        raise PlanBytesError("a row without tokens")
    if num_decodes + int(chunks.sum(dtype=np.int64)) != num_tokens:
        raise PlanBytesError("the rows do not have the tokens of the plan")
    samples = columns["samples"].view(np.uint8)
    if len(samples) and int(samples.max()) > 1:
        raise PlanBytesError("a row is neither sampled nor not")


def _check_indices(indices: Column, end: int) -> None:
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


def _fixed_fields(num_drawn: int) -> tuple[PlanColumn, ...]:
    return (*_PLAN_FIELDS, *_DRAWN_FIELDS) if num_drawn else _PLAN_FIELDS


def _size(counts: tuple[int, ...]) -> int:
    """Bytes of header and columns."""
    *_, num_entries, num_scored = counts
    varying = 2 * 8 * num_entries + _padded(4 * num_entries) + 8 * num_scored
    return _fixed_size(counts[:_NUM_FIXED]) + varying


@lru_cache(maxsize=64)
def _fixed_size(fixed: tuple[int, ...]) -> int:
    named = dict(zip(_COUNTS, fixed, strict=False))
    fields = _fixed_fields(named["S"])
    sizes = (_padded(named[each.declared.over] * each.dtype.itemsize) for each in fields)
    return _HEADER_BYTES + sum(sizes)


def _padded(size: int) -> int:
    return size + -size % 8


def _write(source: StepPlan | PromptPlan, places: dict[str, Column]) -> None:
    for name, place in places.items():
        column: Column = getattr(source, name)
        if column.shape != place.shape or column.dtype != place.dtype:
            raise PlanBytesError(f"{name} is {column.dtype} {column.shape}")
        place[...] = column
