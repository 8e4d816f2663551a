"""Asks the queries of one call for embeddings, classes or scores, a few at a time, and puts the
answers together.

A call that is cancelled asks no more; what the server has of it then is little.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from functools import partial
from typing import Any

import numpy as np
from msgspec.structs import replace

from slipstream.errors import SlipstreamError, error_from
from slipstream.request.embedding_inputs import input_name
from slipstream_ipc.arrays import Float32s
from slipstream_ipc.columns import f32, u32
from slipstream_ipc.messages import Embed, Embedded, Fault

_IN_FLIGHT = 8  # queries

Part = tuple[Float32s, list[int]]  # vectors [inputs, dimensions], and tokens of each input


class EmbeddingCall:
    """A call. future: all vectors, [inputs, dimensions], and the tokens of each input."""

    def __init__(
        self,
        queries: Sequence[Embed],
        ask: Callable[[Embed], Future[Any]],
        on_part: Callable[[int, Part], None] | None = None,
        name_of: Callable[[int], str] | None = None,
    ) -> None:
        """on_part: called with each query's index and answer, in any order and any thread. name_of:
        the name of an input in errors.
        """
        self.future: Future[Part] = Future()
        self._ask = ask
        self._on_part = on_part
        self._nums = [len(each.texts) or len(each.counts) // 4 for each in queries]
        self._name_of = name_of or partial(input_name, num=sum(self._nums))
        self._parts: list[Part | None] = [None] * len(queries)
        self._num_left = len(queries)
        self._waiting: Iterator[tuple[int, Embed]] = enumerate(queries)
        self._asked: dict[int, Future[Any]] = {}
        self._lock = threading.Lock()
        self.future.add_done_callback(self._end)
        for _ in range(_IN_FLIGHT):
            self._ask_next()

    def _ask_next(self) -> None:
        with self._lock:
            index, query = next(self._waiting, (-1, None))
        if query is None or self.future.done():
            return
        asked = self._ask(query)
        self._asked[index] = asked
        asked.add_done_callback(partial(self._answered, index))

    def _answered(self, index: int, asked: Future[Any]) -> None:
        self._asked.pop(index, None)
        if asked.cancelled() or self.future.done():
            return
        try:
            part = self._part(index, asked.result())
            if self._on_part is not None:
                self._on_part(index, part)
        except Exception as error:
            self._fail(error)
            return
        with self._lock:
            self._parts[index] = part
            self._num_left -= 1
            is_last = not self._num_left
        if is_last:
            self._finish()
        else:
            self._ask_next()

    def _part(self, index: int, found: Embedded) -> Part:
        """Raises: SlipstreamError for a fault, with the input's place in the call."""
        if found.fault is not None:
            at = None if found.index is None else sum(self._nums[:index]) + found.index
            raise _error(found.fault, None if at is None else self._name_of(at))
        return f32(found.vectors).reshape(self._nums[index], -1), u32(found.num_tokens).tolist()

    def _finish(self) -> None:
        parts = [part for part in self._parts if part is not None]
        if self.future.set_running_or_notify_cancel():
            vectors = np.concatenate([vectors for vectors, _ in parts])
            self.future.set_result((vectors, [num for _, nums in parts for num in nums]))

    def _fail(self, error: Exception) -> None:
        with self._lock:
            is_first = not self.future.done() and self.future.set_running_or_notify_cancel()
        if is_first:
            self.future.set_exception(error)

    def _end(self, future: Future[Part]) -> None:
        if future.cancelled() or future.exception() is not None:
            for asked in list(self._asked.values()):
                asked.cancel()


def _error(fault: Fault, name: str | None) -> SlipstreamError:
    if name is None:
        return error_from(fault)
    message = fault.message.removeprefix("input: ")
    return error_from(replace(fault, message=f"{name}: {message}", field=name))
