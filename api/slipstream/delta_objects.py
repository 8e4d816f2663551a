"""Makes deltas and their Python objects in C (`delta_objects.c`), where that can be had.

`Delta.token_ids` and `Delta.logprobs` then make an entry's objects from the bytes of its message in
one call. The methods of `DeltaBatch` that have their names are the reference, as `zip` and `map`
are of `items_of`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import suppress
from itertools import repeat
from pathlib import Path
from typing import Any, Protocol, TypeAlias, TypeVar

from slipstream_ipc.messages import Deltas, LogprobColumns
from slipstream_ipc.native.extension import IPC_HEADERS, load_extension

Item = TypeVar("Item")
ItemsOf: TypeAlias = Callable[[list[int], list[str], object], Iterator[tuple[int, Item]]]

_SOURCE = Path(__file__).with_name("delta_objects.c")
_NO_LOGPROBS = LogprobColumns(0, b"", b"", b"")
_GETTERS = ("token_ids", "logprobs")


class EntryObjects(Protocol):
    """The objects of a message's entries: new ones with each call."""

    def token_ids(self, entry: int, skip: int) -> list[int]:
        """See `DeltaBatch.token_ids`."""
        ...

    def logprobs(self, entry: int, skip: int) -> list[Any] | None:
        """See `DeltaBatch.logprobs`."""
        ...


@functools.cache
def _native() -> Any:
    return load_extension("delta_objects", _SOURCE, IPC_HEADERS)


def native_objects(message: Deltas, logprob: type) -> EntryObjects | None:
    """The objects of a message, whose columns fit each other, with `logprob` for each candidate;
    None without a C extension. Raises: ValueError for columns of different lengths.
    """
    native = _native()
    if native is None:
        return None
    columns = message.logprobs or _NO_LOGPROBS
    objects: EntryObjects = native.EntryObjects(
        len(message.texts),
        message.token_ids,
        message.counts,
        columns.width,
        columns.values,
        columns.ids,
        columns.ranks,
        columns.widths,
        logprob,
    )
    return objects


@functools.cache
def items_of(delta: type[Item]) -> ItemsOf[Item]:
    """A function of indices, texts and a batch: pairs of `indices[i]` and
    `delta(texts[i], batch, i)`, made as they are asked for. The lists must not change meanwhile.
    """
    native = _native()
    if native is not None:
        with suppress(TypeError):  # instances of another layout
            made: ItemsOf[Item] = native.DeltaMaker(delta).items
            return made

    def items(indices: list[int], texts: list[str], batch: object) -> Iterator[tuple[int, Item]]:
        return zip(indices, map(delta, texts, repeat(batch), range(len(texts))), strict=True)

    return items


@functools.cache
def read_natively(delta: type, batch: type, logprob: type) -> None:
    """Let instances of this class (`Delta`) read their ids and log-probabilities in C. A class
    cannot be told otherwise how its properties are computed, and both ways give the same.

    batch: what they refer to (`DeltaBatch`). logprob: the class of candidates (`Logprob`).
    """
    native = _native()
    if native is not None:
        types = batch, Deltas, LogprobColumns
        for name in _GETTERS:
            doc = getattr(delta, name).__doc__
            # not at import: no compiler may run there (decision 009)
            setattr(delta, name, native.ColumnGetter(delta, name, doc, types, logprob))
