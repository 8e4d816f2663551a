"""A step's plan as bytes in a buffer that ranks share, and as views of that buffer again.

The bytes are a header of int64 and then the plan's columns, each at a multiple of 8 bytes, in
native byte order. The header has the plan's counts and flags; dtypes and shapes of the columns
follow from them, so the bytes hold no type, no name and no offset.

Plans are checked and written in C (`plan_pack.c`) where that can be had. `PlanBounds.check` and
`_write` are its reference, and tell what is wrong with a plan.

What only rank 0 reads stays there: a prompt's rows and targets, and what is sampled by, but for the
temperatures and seeds of a plan that is `sliced`. In a plan that is read these columns are empty,
and flags and limits those of a greedy step.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, lru_cache
from pathlib import Path
from typing import Any, Final, NamedTuple, cast

import numpy as np
import numpy.typing as npt

from slipstream_core.ranks.plan_check import PlanBounds
from slipstream_core.step.plan import PromptPlan, StepPlan
from slipstream_ipc.native.extension import load_extension

Column = npt.NDArray[Any]


class PlanBytesError(ValueError):
    """Bytes that are no plan, or a plan that has no place in its buffer."""


class _PlanField(NamedTuple):
    name: str
    dtype: np.dtype[Any]
    shape: tuple[str, ...]  # names of counts


def _fields(shape: tuple[str, ...], **dtypes: type[np.generic]) -> tuple[_PlanField, ...]:
    return tuple(_PlanField(name, np.dtype(dtype), shape) for name, dtype in dtypes.items())


_MAGIC: Final = 0x33_4E_41_4C_50_50_49_4C  # changes with the layout
_COUNTS: Final = ("T", "R", "W", "N", "S")

# magic, size in bytes, step, num_decodes, whether there is a prompt, which slices are sampled (0:
# none, _GREEDY, _DRAWN, _TRUNCATED); then the counts
_NUM_SCALARS: Final = 6
_GREEDY, _DRAWN, _TRUNCATED = range(1, 4)
_WORDS: Final = _NUM_SCALARS + len(_COUNTS)
_HEADER_BYTES: Final = 8 * _WORDS
_ANY: Final = 0, 2**64 - 1  # no bounds

_PLAN_FIELDS: Final = (
    *_fields(
        ("T",), token_ids=np.int64, gather_slots=np.int64, positions=np.int64, kv_slots=np.int64
    ),
    *_fields(("R",), slots=np.int64, query_lens=np.int32, kv_lens=np.int32),
    *_fields(("R", "W"), block_tables=np.int32),
    *_fields(("R",), samples=np.bool_),
)
_DRAWN_FIELDS: Final = _fields(("S",), seeds=np.int64, temperatures=np.float32)
_PROMPT_FIELDS: Final = _fields(("N",), tokens=np.int64)

_NO_LONGS: Final = np.empty(0, np.int64)
_NO_INTS: Final = np.empty(0, np.int32)
_NO_FLOATS: Final = np.empty(0, np.float32)
_UNSAMPLED: Final[dict[str, Any]] = {
    "prompt_lens": _NO_INTS,
    "temperatures": _NO_FLOATS,
    "top_ks": _NO_INTS,
    "top_ps": _NO_FLOATS,
    "min_ps": _NO_FLOATS,
    "seeds": _NO_LONGS,
    "num_logprobs": _NO_INTS,
    "masked_rows": _NO_LONGS,
    "masked_ids": _NO_LONGS,
    "grammar_rows": _NO_LONGS,
    "all_greedy": True,
    "any_truncation": False,
    "max_logprobs": -1,
}


@cache
def native_packer() -> Callable[..., Any] | None:
    """`Packer` of `plan_pack.c`; None where that cannot be had."""
    native: Any = load_extension("plan_pack", Path(__file__).with_name("plan_pack.c"))
    return None if native is None else cast("Callable[..., Any]", native.Packer)


def packed_bytes(plan: StepPlan) -> int:
    """How many bytes `PlanBuffer.pack` writes for this plan."""
    return _size(_counts(plan))


class PlanBuffer:
    """A buffer that holds one plan after another.

    It keeps the columns of the last plan's layout: from one decode step to the next the counts are
    mostly the same, and finding the columns costs more than copying them.
    """

    def __init__(self, buffer: memoryview, *, is_native: bool = True) -> None:
        """buffer: begins at a multiple of 8 bytes. is_native: C may be used."""
        self._buffer = buffer
        self._native = native_packer() if is_native else None
        self._packer: Any = None  # of plans with these counts, within these bounds
        self._packs: tuple[tuple[int, ...], int, PlanBounds | None] | None = None
        self._layout: tuple[int, ...] = ()  # the counts, and whether there is a prompt
        self._columns: dict[str, Any] = {}
        self._scored: dict[str, Any] = {}
        self._header: Column = np.frombuffer(buffer, np.int64, min(_WORDS, buffer.nbytes // 8))

    def pack(self, plan: StepPlan, bounds: PlanBounds | None = None) -> int:
        """Write a plan that is within its bounds; the number of bytes written.

        Raises PlanBoundsError, or PlanBytesError if the plan does not fit, or if a column has
        another dtype or shape than its plan's counts say; what the buffer holds then is no plan.
        """
        counts = _counts(plan)
        size = _size(counts)
        if size > self._buffer.nbytes:
            raise PlanBytesError(f"a plan of {size} bytes in a buffer of {self._buffer.nbytes}")
        if self._native is not None and self._pack_natively(plan, counts, size, bounds):
            return size
        header, prompt = self._header, plan.prompt
        header[0] = 0
        if bounds is not None:
            bounds.check(plan)
        self._lay_out(counts, has_prompt=prompt is not None)
        _write(plan, self._columns)
        if prompt is not None:
            _write(prompt, self._scored)
        slices = _slices(plan)
        header[1:] = (size, plan.step, plan.num_decodes, prompt is not None, slices, *counts)
        header[0] = _MAGIC
        return size

    def written(self, size: int) -> memoryview:
        """The bytes of the plan that was written."""
        return self._buffer[:size]

    def _pack_natively(
        self, plan: StepPlan, counts: tuple[int, ...], size: int, bounds: PlanBounds | None
    ) -> bool:
        """Write a plan in C; whether that was done."""
        packs = counts, _slices(plan), bounds
        if self._packs != packs:
            self._packer = self._new_packer(size, *packs)
            self._packs = packs
        is_written: bool = self._packer.pack(plan)
        return is_written

    def _new_packer(
        self, size: int, counts: tuple[int, ...], slices: int, bounds: PlanBounds | None
    ) -> Any:
        named = dict(zip(_COUNTS, counts, strict=True))
        checks = {} if bounds is None else bounds.checks(named["W"])
        fields = []
        at = _HEADER_BYTES
        for field in _plan_fields(named):
            rows, *columns = (named[name] for name in field.shape)
            shape, item = (rows, columns[0] if columns else -1), field.dtype.itemsize
            checked = checks.get(field.name, _ANY)
            fields.append((field.name, field.dtype.kind, at, item, *shape, *checked))
            at += _padded(_num_items(field, named) * item)
        words = (_MAGIC, size, 0, 0, 0, slices, *counts)
        names = [field.name for field in _PLAN_FIELDS]
        pair = (-1, -1) if bounds is None else (names.index("query_lens"), names.index("kv_lens"))
        assert self._native is not None
        return self._native(self._buffer, words, tuple(fields), *pair)

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
        num_scored, num_drawn = counts[3:]
        if not 0 <= has_prompt <= 1 or (not has_prompt and num_scored):
            raise PlanBytesError("positions of no prompt")
        if not 0 <= slices <= _TRUNCATED or (slices < _DRAWN and num_drawn):
            raise PlanBytesError("draws from no slices")
        if size != _size(counts) or size > space:
            raise PlanBytesError("the columns do not have the size of the plan")
        self._lay_out(counts, has_prompt=bool(has_prompt))
        num_tokens = counts[0]
        _check_rows(self._columns, num_tokens, num_decodes)
        if slices >= _DRAWN and num_drawn != np.count_nonzero(self._columns["samples"]):
            raise PlanBytesError("the rows that are drawn are not those that are sampled")
        prompt = None
        if has_prompt:
            tokens = self._scored["tokens"]
            _check_indices(tokens, num_tokens)
            prompt = PromptPlan(
                rows=_NO_LONGS,
                starts=_NO_LONGS,
                counts=_NO_LONGS,
                num_logprobs=_NO_LONGS,
                tokens=tokens,
                targets=_NO_LONGS,
            )
        fields = {**_UNSAMPLED, **self._columns}
        if slices:
            fields |= {
                "sliced": True,
                "all_greedy": slices == _GREEDY,
                "any_truncation": slices == _TRUNCATED,
            }
        return StepPlan(step=step, num_decodes=num_decodes, prompt=prompt, **fields)

    def _lay_out(self, counts: tuple[int, ...], *, has_prompt: bool) -> None:
        """Find the columns of a plan with these counts, which fits."""
        layout = (*counts, has_prompt)
        if layout == self._layout:
            return
        named = dict(zip(_COUNTS, counts, strict=True))
        fields = _plan_fields(named)
        self._columns, at = _columns_at(fields, named, self._buffer, _HEADER_BYTES)
        self._scored = {}
        if has_prompt:
            self._scored, _ = _columns_at(_PROMPT_FIELDS, named, self._buffer, at)
        self._layout = layout


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
    return num_tokens, num_rows, plan.block_tables.shape[1], num_scored, num_drawn


def _slices(plan: StepPlan) -> int:
    """Which slices are sampled, as the header says it."""
    if not plan.sliced:
        return 0
    if plan.all_greedy:
        return _GREEDY
    return _TRUNCATED if plan.any_truncation else _DRAWN


def _plan_fields(counts: dict[str, int]) -> tuple[_PlanField, ...]:
    return (*_PLAN_FIELDS, *_DRAWN_FIELDS) if counts["S"] else _PLAN_FIELDS


@lru_cache(maxsize=64)
def _size(counts: tuple[int, ...]) -> int:
    """Bytes of header and columns."""
    named = dict(zip(_COUNTS, counts, strict=True))
    size = _HEADER_BYTES
    for field in (*_plan_fields(named), *_PROMPT_FIELDS):
        size += _padded(_num_items(field, named) * field.dtype.itemsize)
    return size


def _num_items(field: _PlanField, counts: dict[str, int]) -> int:
    items = 1
    for name in field.shape:
        items *= counts[name]
    return items


def _padded(size: int) -> int:
    return size + -size % 8


def _write(source: StepPlan | PromptPlan, places: dict[str, Column]) -> None:
    for name, place in places.items():
        column: Column = getattr(source, name)
        if column.shape != place.shape or column.dtype != place.dtype:
            raise PlanBytesError(f"{name} is {column.dtype} {column.shape}")
        place[...] = column


def _columns_at(
    fields: tuple[_PlanField, ...], counts: dict[str, int], buffer: memoryview, at: int
) -> tuple[dict[str, Any], int]:
    """Views of the columns from `at` on, by name, and where the last one ends."""
    columns: dict[str, Any] = {}
    for field in fields:
        items = _num_items(field, counts)
        if items:
            column: Column = np.frombuffer(buffer, field.dtype, items, at)
            at += _padded(items * field.dtype.itemsize)
        else:  # frombuffer refuses to begin at the buffer's end
            column = np.empty(0, field.dtype)
        columns[field.name] = (
            column
            if len(field.shape) == 1
            else column.reshape(tuple(counts[name] for name in field.shape))
        )
    return columns, at
