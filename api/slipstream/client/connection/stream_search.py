"""Finds the member of a fleet that has a stream of another client's, and resumes it there.

Where the reader knows the stream's model, its members alone are asked.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from math import inf
from typing import Any

from slipstream.client.connection.combined_answer import AnswerOfAll
from slipstream.client.connection.fleet_queries import ask_all
from slipstream.client.connection.members import Member, Members
from slipstream.client.connection.moving import StreamRouter
from slipstream.client.placing.moves import MoveSettings
from slipstream.client.streams.stream_state import StreamState
from slipstream.client.streams.stream_table import ClientStreamTable
from slipstream_ipc.messages import Locate, Located, Superseded

_LOCATE_S = 2.0  # for replicas to say whether they have a stream
_MISSING_S = 2.0  # for replicas that are away to come, where the others do not have it
_MOST_MOVES = 2**31  # that a replica's word is taken for
# what a later reader's `moves` are ahead of an earlier one's, which moves later (decision 038)
_READER_MOVES = 2**16


@dataclass(eq=False, slots=True)
class _Search:
    """A stream that is looked for. waits_s: how long members that are away are waited for before
    the others are asked. answers: of the members, once asked.
    """

    since: float
    waits_s: float
    answers: AnswerOfAll | None = None
    answers_until: float = inf


class StreamSearch:
    """The streams that are looked for; they are held meanwhile."""

    def __init__(
        self,
        members: Members,
        router: StreamRouter,
        held: ClientStreamTable,
        settings: MoveSettings,
    ) -> None:
        self._members = members
        self._router = router
        self._held = held
        self._settings = settings
        self._searches: dict[StreamState, _Search] = {}
        self._now = 0.0

    def __contains__(self, state: StreamState) -> bool:
        return state in self._searches

    def begin(self, state: StreamState, now: float) -> None:
        """Find out which of the members has a stream, and resume it there."""
        self._router.hold(state)
        self._searches[state] = _Search(now, self._settings.patience_s)
        self.go_on(now)

    def supersede(self, state: StreamState) -> None:
        """Look for a stream no longer, as another reader has come."""
        self._held.supersede(Superseded(state.handle))

    def over(self, state: StreamState) -> None:
        """A stream is over."""
        self._searches.pop(state, None)

    def go_on(self, now: float) -> None:
        """Go on with the searches. A member that may attach within moments is waited for, and for
        longer where no other has the stream: its worker may be being replaced.
        """
        self._now = now
        if not self._searches:
            return
        pools: dict[str, tuple[list[Member], bool]] = {}
        for state, search in list(self._searches.items()):
            if state.model not in pools:
                is_whole = not self._is_any_away(state.model)
                pools[state.model] = self._members.attached_of(state.model), is_whole
            able, is_whole = pools[state.model]
            if search.answers is not None:
                if now >= search.answers_until:
                    search.answers.give_up()
            elif able and (is_whole or now >= search.since + search.waits_s):
                self._ask(state, search, able, now)
            elif not able and now >= search.since + self._settings.wait_s:
                self._held.give_up(state, self._members.gone_error(state.model))

    def _is_any_away(self, model: str) -> bool:
        """True if a member that may serve a model is not attached, but may be soon."""
        return any(
            each.is_listed and each.links and not each.is_attached and not each.is_gone
            for each in self._members.that_may_serve(model)
        )

    def _ask(self, state: StreamState, search: _Search, able: Sequence[Member], now: float) -> None:
        pool = self._members.that_may_serve(state.model)
        is_only = len([each for each in pool if each.is_listed]) < 2
        if is_only or not all(each.can_locate for each in able):
            self._resume_at(state, able[0].number, 0, now)
            return
        answers: Future[Any] = Future()
        search.answers_until = now + _LOCATE_S
        locate = Locate(0, (state.stream_id,), state.request.scope)
        search.answers = ask_all(locate, able, answers, now, _call)
        answers.add_done_callback(partial(self._found, state, [each.number for each in able]))

    def _found(self, state: StreamState, numbers: Sequence[int], answers: Future[Any]) -> None:
        search = self._searches.get(state)
        if search is None:
            return
        located: list[Located | None] = answers.result()
        found = [each.moves[0] if each is not None and each.moves else 0 for each in located]
        best = max(range(len(found)), key=found.__getitem__)
        moves = min(found[best], _MOST_MOVES)
        there = [number for number in numbers if self._members.is_there(number)]
        num_pool = len(self._members.that_may_serve(state.model))
        is_whole = None not in located and len(there) == num_pool
        if not there:
            self._searches[state] = _Search(search.since, search.waits_s)
        elif not moves and search.waits_s < _MISSING_S and self._is_any_away(state.model):
            self._searches[state] = _Search(search.since, _MISSING_S)
        elif moves and numbers[best] in there:
            self._resume_at(state, numbers[best], moves - 1, self._now)
        elif is_whole:
            self._resume_at(state, self._router.home_of(state, there), 0, self._now)
        else:  # an earlier reader may be about to move it from a replica that is lost
            ahead = moves - moves % _READER_MOVES + _READER_MOVES
            self._resume_at(state, self._router.home_of(state, there), ahead, self._now)

    def _resume_at(self, state: StreamState, number: int, moves: int, now: float) -> None:
        del self._searches[state]
        self._held.take(state)
        state.moves = moves
        self._router.place(state, number, now)


def _call(command: Callable[[], None]) -> None:
    command()
