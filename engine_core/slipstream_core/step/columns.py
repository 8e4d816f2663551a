"""The declaration of a plan's columns: numbers, dimension, bounds and readers.

`StepPlan` declares each of its columns once, as an annotation. From there come the layout and the
bounds of the plans that ranks are sent (`buffer`), the inputs of recorded steps, what of a
request's row is gathered for a plan (`scheduler/step_builder`), the values of columns that are not
set (`plan.blank_plan`), and those of the costliest step (`runner/kv_cache_size`).
"""

from __future__ import annotations

from typing import Any, Literal, NamedTuple, get_args, get_origin, get_type_hints

import numpy as np
import numpy.typing as npt

Over = Literal["T", "R", "E", "S", "M", "G"]
"""Tokens, rows, new entries of block tables, sampled rows, masked ids, rows with a grammar."""

Size = Literal["vocab", "cache_slots", "rows", "table", "blocks", "length"]
"""Upper bounds of numbers: ids, tokens in the cache, rows, blocks of a row, blocks of the cache,
tokens of a row."""


class Column(NamedTuple):
    """The declaration of a column."""

    over: Over
    below: Size | None = None  # its numbers are below that size …
    least: int = 0  # … and at least this
    reaches: bool = False  # they may be equal to it
    source: str = ""  # the column of the request table that it is gathered from
    fill: float = 0  # where nothing else is said
    costly: float | None = None  # where a step is to take as much memory as any; None: fill
    truncates: bool = False  # cuts what is sampled from, unless it is its fill
    sent: Literal["always", "drawn", "never"] = "never"  # to other ranks; drawn: if they sample


class PlanColumn(NamedTuple):
    """A column of StepPlan."""

    name: str
    dtype: np.dtype[Any]
    declared: Column

    def blank(self, num: int) -> npt.NDArray[Any]:
        """The column where nothing is said of it, [num]."""
        return np.full(num, self.declared.fill, self.dtype)

    def costly(self, num: int) -> npt.NDArray[Any]:
        """The column of rows that take as much memory as any, [num]."""
        costly, fill = self.declared.costly, self.declared.fill
        return np.full(num, fill if costly is None else costly, self.dtype)


def columns_of(plan: type) -> dict[str, PlanColumn]:
    """The columns that a class declares, in their order."""
    found = {}
    for name, hint in get_type_hints(plan, include_extras=True).items():
        declared = [each for each in getattr(hint, "__metadata__", ()) if isinstance(each, Column)]
        if declared:
            found[name] = PlanColumn(name, _dtype(get_args(hint)[0]), declared[0])
    return found


def _dtype(array: Any) -> np.dtype[Any]:
    """The numbers of an annotation such as NDArray[np.int32]."""
    assert get_origin(array) is np.ndarray
    found: np.dtype[Any] = np.dtype(get_args(get_args(array)[1])[0])
    return found
