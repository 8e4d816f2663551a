"""Combines the answers of several workers, or of several replicas, to one query."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from typing import Any

from slipstream.client.connection.queries import Query
from slipstream.errors import SlipstreamError
from slipstream_ipc.messages import (
    Cancel,
    Cancelled,
    CancelledState,
    Inspect,
    Locate,
    Located,
    Recalled,
)


class AnswerOfAll:
    """Fulfils a future when all who were asked have answered, or cannot any more.

    - Cancel: a stream runs if it does at any replica; those that it has left have ended it.
    - Recall: the complete answer, else that of a stream that still runs, else the longest copy that
      a replica has of one that was ended.
    - Locate, Inspect: a list of the answers; None for a replica that did not answer. A Locate whose
      streams were divided has one answer.
    - A replica that fails, or does not come back, may have known a stream that the others do not
      know: that is an error, then.
    """

    def __init__(
        self,
        query: Query,
        future: Future[Any],
        num_parts: int,
        gone: Callable[[], SlipstreamError] | None = None,
        again: Callable[[], bool] | None = None,
        places: Sequence[Sequence[int]] | None = None,
    ) -> None:
        """gone: the error of a replica whose part was cancelled. again: called where a stream is
        unknown; whether the query is asked again. places: of each part's streams in the query,
        where these were divided.
        """
        self._gone = gone
        self._again = again
        self._query = query
        self._future = future
        self._places = places
        self._found: list[Any] = [None] * num_parts
        self._num_left = num_parts
        self._error: BaseException | None = None

    def add(self, index: int, part: Future[Any]) -> None:
        """The answer of one replica; the last one fulfils the future."""
        if part.cancelled():
            self._error = self._error or (None if self._gone is None else self._gone())
        elif (error := part.exception()) is None:
            self._found[index] = part.result()
        else:
            self._error = error
        self._num_left -= 1
        if not self._num_left:
            self._fulfil()

    def give_up(self) -> None:
        """Do without the answers that have not come. For a Locate or an Inspect."""
        if self._num_left > 0:
            self._num_left = 0
            self._fulfil()

    def _fulfil(self) -> None:
        query, is_known = self._query, False
        found: list[Any] | Cancelled | Located | Recalled
        if isinstance(query, Cancel):
            found = _cancelled(self._parts(query), len(query.stream_ids))
            is_known = "unknown" not in found.found
        elif isinstance(query, Locate) and self._places is not None:
            found = _located(self._parts(query), len(query.stream_ids))
        elif isinstance(query, Locate | Inspect):
            found, is_known = self._found, True
        else:
            answers = [each for each in self._found if each is not None]
            found = max(answers, key=_worth, default=Recalled(0))
            is_known = found.answer is not None
        if not is_known and self._again is not None and self._again():
            return
        if not self._future.set_running_or_notify_cancel():
            return
        if is_known or self._error is None:
            self._future.set_result(found)
        else:
            self._future.set_exception(self._error)

    def _parts(self, query: Cancel | Locate) -> Iterable[tuple[Sequence[int], Any]]:
        """The answers, each with the places of its streams in the query."""
        places = self._places or [range(len(query.stream_ids))] * len(self._found)
        parts = zip(places, self._found, strict=True)
        return [(at, found) for at, found in parts if found is not None]


def _cancelled(parts: Iterable[tuple[Sequence[int], Cancelled]], num: int) -> Cancelled:
    found: list[CancelledState] = ["unknown"] * num
    for places, answer in parts:
        for at, state in zip(places, answer.found, strict=True):
            if found[at] != "running" and state != "unknown":
                found[at] = state
    return Cancelled(0, tuple(found))


def _located(parts: Iterable[tuple[Sequence[int], Located]], num: int) -> Located:
    moves = [0] * num
    for places, answer in parts:
        for at, found in zip(places, answer.moves, strict=False):  # none: nothing was looked up
            moves[at] = found
    return Located(0, tuple(moves))


def _worth(recalled: Recalled) -> tuple[int, int]:
    answer = recalled.answer
    if answer is None:
        return 0, 0
    if answer.end is None:
        return 2, 0
    return 1 if answer.end.reason in ("abort", "error") else 3, answer.end.num_tokens
