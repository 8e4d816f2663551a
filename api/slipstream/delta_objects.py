"""Makes deltas and their Python objects in C (`delta_objects.c`).

`Delta.token_ids` and `Delta.logprobs` make an entry's objects from the bytes of its message in one
call. The methods of `DeltaBatch` that have their names do the same for some readers.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import suppress
from itertools import repeat
from typing import TypeAlias, TypeVar

from slipstream.compiled import ColumnGetter, DeltaMaker, EntryObjects
from slipstream_ipc.messages import Deltas, LogprobColumns

Item = TypeVar("Item")
ItemsOf: TypeAlias = Callable[[list[int], list[str], object], Iterator[tuple[int, Item]]]

_NO_LOGPROBS = LogprobColumns(0, b"", b"", b"")
_GETTERS = ("token_ids", "logprobs")


def objects_of(message: Deltas, logprob: type) -> EntryObjects:
    """The objects of a message, whose columns fit each other, with `logprob` for each candidate.

    Raises: ValueError for columns of different lengths.
    """
    columns = message.logprobs or _NO_LOGPROBS
    return EntryObjects(
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


@functools.cache
def items_of(delta: type[Item]) -> ItemsOf[Item]:
    """A function of indices, texts and a batch: pairs of `indices[i]` and
    `delta(texts[i], batch, i)`, made as they are asked for. The lists must not change meanwhile.
    """
    with suppress(TypeError):  # instances of another layout
        return DeltaMaker(delta).items

    def items(indices: list[int], texts: list[str], batch: object) -> Iterator[tuple[int, Item]]:
        return zip(indices, map(delta, texts, repeat(batch), range(len(texts))), strict=True)

    return items


@functools.cache
def read_in_c(delta: type, batch: type, logprob: type) -> None:
    """Let instances of this class (`Delta`) read their ids and log-probabilities in C. A class
    cannot be told otherwise how its properties are computed, and both ways give the same.

    batch: what they refer to (`DeltaBatch`). logprob: the class of candidates (`Logprob`).
    """
    types = batch, Deltas, LogprobColumns
    for name in _GETTERS:
        doc = getattr(delta, name).__doc__
        setattr(delta, name, ColumnGetter(delta, name, doc, types, logprob))
