"""Tables of numpy columns, indexed by row, that grow together."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, NamedTuple

import numpy as np
import numpy.typing as npt


class _Column(NamedTuple):
    dtype: np.dtype[Any]
    fill: object


def column(dtype: npt.DTypeLike, fill: object = 0) -> Any:
    """Declares a column of a `RowTable`: an array [num_rows], initially filled with `fill`."""
    return _Column(np.dtype(dtype), fill)


class RowTable:
    """Columns by row. A subclass declares each of them in its body: `slot: Int64s = column(...)`.

    Growing replaces the arrays, so a view of one is valid until the next `grow`. Other attributes
    are not affected.
    """

    _columns: ClassVar[dict[str, _Column]]

    def __init_subclass__(cls, also: Mapping[str, Any] | None = None) -> None:
        """Collect the columns; the class keeps their declarations, an instance has their arrays.

        also: further columns, by name.
        """
        own = {name: each for name, each in vars(cls).items() if isinstance(each, _Column)}
        for name in own:
            delattr(cls, name)
        cls._columns = own | dict(also or {})

    def __init__(self, num_rows: int) -> None:
        self.num_rows = num_rows
        for name, (dtype, fill) in self._columns.items():
            setattr(self, name, np.full(num_rows, fill, dtype))

    def grow(self, num_rows: int) -> None:
        """Grow to `num_rows` or twice the size, the larger; new rows hold the fill values."""
        self.num_rows = max(num_rows, 2 * self.num_rows)
        for name, (dtype, fill) in self._columns.items():
            before = getattr(self, name)
            grown = np.full(self.num_rows, fill, dtype)
            grown[: len(before)] = before
            setattr(self, name, grown)
