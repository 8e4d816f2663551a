"""Places the streams of one client on the members of a fleet, and moves them.

A stream is at one member, or held: in a table of its own, until a member takes it. `Moves` decides
which, `Placement` among several. A stream that moves is submitted with the tokens received, so the
next replica goes on where the reader stands. The replica it has left is told to end its copy, as
soon as that can be reached.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import compress

import numpy as np

from slipstream.client.connection.link_session import ClientSession
from slipstream.client.connection.members import Member, Members
from slipstream.client.placing.member_load import SentRequest
from slipstream.client.placing.moves import Fail, Failure, Hold, Moves, ReaderProgress, Start
from slipstream.client.placing.placement import Placement
from slipstream.client.placing.prompt_keys import PromptKey, prompt_key
from slipstream.client.placing.rendezvous import homes
from slipstream.client.placing.router_counters import MovedWhy, PlacedWhy, RouterCounters
from slipstream.client.streams.stream_state import StreamState
from slipstream.client.streams.stream_table import ClientStreamTable
from slipstream.errors import BadRequestError, EngineError, SlipstreamError, StreamLostError
from slipstream.request.parallel_sampling import can_join
from slipstream.request.served_models import checked_model
from slipstream_ipc.crash_note import SUSPECT_BYTES, suspect_digest
from slipstream_ipc.messages import AdapterRef, Fault, Submit, Superseded

_HELD = -1  # the `member` of a stream that is at none


@dataclass(eq=False, slots=True)
class _Route:
    """The placing of a stream. sent: where it is counted now. left_because: it left a replica."""

    key: PromptKey
    sent: SentRequest | None = None
    left_because: MovedWhy | None = None


class StreamRouter:
    """The streams that are not over, and where each of them is."""

    def __init__(
        self, members: Members, moves: Moves[StreamState], held: ClientStreamTable
    ) -> None:
        """moves: it asks `read` and `choose`. held: the streams that are at no member."""
        self.counters = RouterCounters()
        self._members = members
        self._moves = moves
        self._held = held
        self._routes: dict[StreamState, _Route] = {}
        self._readers: dict[bytes, StreamState] = {}  # by stream id; the latest one reads
        self._last: StreamState | None = None  # the last one placed in this turn
        self._asked: dict[int, None] = {}  # members where streams were begun in this turn
        self._placement = Placement()
        self._placed_why: PlacedWhy = "waited"  # of the last stream placed in this turn
        self._now = 0.0  # when the latest turn began

    def begin_turn(self, now: float) -> None:
        """Streams that are submitted from now on are of another call than those before."""
        self._now = now
        self._last = None
        self._asked.clear()

    # ---- where streams are -------------------------------------------------------------------

    def link_of(self, state: StreamState) -> ClientSession | None:
        """The connection to the stream's worker; None: it is held."""
        return None if state.member == _HELD else self._members[state.member].link_of(state)

    def reader_of(self, stream_id: bytes, scope: bytes) -> StreamState | None:
        """The state that reads a stream of this scope, if any does."""
        state = self._readers.get(stream_id)
        return None if state is None or state.request.scope != scope else state

    def is_on_its_way(self, stream_id: bytes, scope: bytes) -> bool:
        """True if a stream that is read here is held, or its member is away."""
        state = self.reader_of(stream_id, scope)
        if state is None or state.is_over:
            return False
        return state.member == _HELD or not self._members[state.member].are_links_attached

    def moves_of(self, stream_id: bytes, scope: bytes) -> int | None:
        """The number of moves of a stream that is read here; None if it is over or not read
        here.
        """
        state = self.reader_of(stream_id, scope)
        return None if state is None or state.is_over else state.moves

    def suspects(self, member: Member, digests: bytes) -> list[StreamState]:
        """The streams at a member that are named by these digests (`suspect_digest`)."""
        named = {digests[at:][:SUSPECT_BYTES] for at in range(0, len(digests), SUSPECT_BYTES)}
        streams = [each for each in self._readers.values() if each.member == member.number]
        return [each for each in streams if suspect_digest(each.stream_id) in named]

    def read(self, state: StreamState) -> ReaderProgress:
        """The reader's position in a stream."""
        table = self.link_of(state) or self._held
        _, num_tokens = table.position(state)
        is_accepted = state.was_accepted or state.prompt_ids is not None or num_tokens > 0
        return ReaderProgress(num_tokens, is_accepted, state.resubmittable is not None)

    def choose(self, state: StreamState, numbers: Sequence[int]) -> int:
        """The best of these members for a stream."""
        numbers = self._with_adapter(state, numbers)
        loads = [self._members[number].load for number in numbers]
        route = self._routes.get(state)
        if route is None:
            return min(zip(numbers, loads, strict=True), key=lambda each: each[1].work)[0]
        length = self._prompt_len(state, route)
        begin = time.perf_counter()
        best = self._placement.candidates(route.key, length, loads)[0]
        self.counters.choose_s += time.perf_counter() - begin
        self._placed_why = best.reason
        return numbers[best.member]

    def _with_adapter(self, state: StreamState, numbers: Sequence[int]) -> Sequence[int]:
        """Return the members that serve the stream's adapter, with its files if any does, or did;
        all of them where none serves it, as one of them says so.
        """
        submit = state.resubmittable
        if submit is None or not submit.adapter:
            return numbers
        version = submit.adapter, submit.adapter_digest
        its = [self._adapter_at(number, submit.adapter) for number in numbers]
        for fits in (
            [each is not None and each.digest == submit.adapter_digest for each in its],
            [version in self._members[number].versions for number in numbers],
            [each is not None for each in its],
        ):
            if any(fits):
                return list(compress(numbers, fits))
        return numbers

    def _adapter_at(self, number: int, name: str) -> AdapterRef | None:
        card = self._members[number].card
        return None if card is None else next((it for it in card.adapters if it.name == name), None)

    def home_of(self, state: StreamState, numbers: Sequence[int]) -> int:
        """The member of these that computes a stream that none of them has: one that takes new
        streams, if there is any, and by the stream's id alone. So its readers at several fronts
        meet at one member, where the last one to come reads.
        """
        is_open = set(self._moves.open_members())
        able = [each for each in numbers if each in is_open] or list(numbers)
        salts = np.array([self._members[number].load.salt for number in able], np.uint64)
        [home] = homes(int.from_bytes(state.stream_id[:8], "little"), salts, 1)
        return able[home]

    def _prompt_len(self, state: StreamState, route: _Route) -> int:
        """Tokens that the stream's next replica has to have in its cache."""
        is_known = state.prompt_ids is not None
        num_prompt = state.prompt_len if is_known else route.key.prompt_len
        return num_prompt + (self.read(state).num_tokens if state.handle >= 0 else 0)

    # ---- streams that begin ------------------------------------------------------------------

    def submit(self, state: StreamState, submit: Submit, now: float) -> None:
        """Begin with a new stream at the best member."""
        number = self._best_for_new(state, submit, now)
        if number is not None:
            self.counters.note_placed(self._members[number].model, self._placed_why)
        self.place(state, number, now)

    def _best_for_new(self, state: StreamState, submit: Submit, now: float) -> int | None:
        """The member for a new stream; None if none is there."""
        there = self._members.attached_of(state.model)
        numbers = self._moves.open_members(state.model) or [each.number for each in there]
        last = self._last
        if last is not None and last.member in numbers and _is_together(last, state, submit):
            self._routes[state] = _Route(self._routes[last].key)
            return last.member
        self._routes[state] = _Route(prompt_key(submit, state.model, state.prompt_cache_key))
        self._last = state
        return self.choose(state, numbers) if numbers else None

    def missing_model(self, state: StreamState) -> BadRequestError | None:
        """Find out which model a stream is for, the only one where it names none. The error of one
        that has to name it; None also while no model is known.
        """
        models = self._members.models
        if not state.model and models:
            try:
                state.model = checked_model(models, None).name
            except BadRequestError as error:
                return error
        return None

    def hold(self, state: StreamState) -> None:
        """Keep a stream that is at no member."""
        self._readers[state.stream_id] = state
        self._held.add(state)
        state.member = _HELD

    def place(self, state: StreamState, number: int | None, now: float) -> None:
        """Begin with a stream at a member, or hold it until one is there."""
        self._readers[state.stream_id] = state
        if number is None:
            self.hold(state)
        else:
            self._count(state, number, now)
            state.member = number
            self._members[number].submit(state, now)
            self._asked[number] = None
        if number is not None and not state.model:
            state.model = self._members[number].model
        self._moves.place(state, number, now, moves=state.moves, model=state.model)

    def take_asked(self) -> list[Member]:
        """The members at which streams were begun in this turn, since the last call."""
        asked, self._asked = self._asked, {}
        return [self._members[number] for number in asked if number in self._moves]

    def succeed(self, before: StreamState, state: StreamState, now: float) -> None:
        """Resume a stream that has a reader here, in the place of that."""
        if state.resubmittable is None:
            state.resubmittable = before.resubmittable
        state.was_accepted = before.was_accepted or before.prompt_ids is not None
        state.moves, state.strikes, state.member = before.moves, before.strikes, before.member
        state.model = before.model
        self._moves.succeed(before, state)
        self._readers[state.stream_id] = state
        route = self._routes.pop(before, None)
        if route is not None:
            self._routes[state] = route
        link = self.link_of(before)
        if link is None:
            self._held.supersede(Superseded(before.handle))
            self._held.add(state)
        else:
            link.supersede(before)
            self._members[state.member].submit(state, now)

    def _count(self, state: StreamState, number: int, now: float) -> None:
        """Count a stream as sent to a member, and no longer where it was."""
        route = self._routes.get(state)
        if route is None:
            return
        is_again = route.sent is not None
        if route.sent is not None:
            self._placement.note_ended(route.sent, now)
        load = self._members[number].load
        length = self._prompt_len(state, route)
        route.sent = self._placement.note_submitted(route.key, length, load, now, is_again=is_again)

    def over(self, state: StreamState) -> None:
        """A stream is over."""
        if self._readers.get(state.stream_id) is state:
            del self._readers[state.stream_id]
        self._moves.ended(state)
        if self._last is state:
            self._last = None
        route = self._routes.pop(state, None)
        if route is not None and route.sent is not None:
            self._placement.note_ended(route.sent, self._now)

    # ---- streams that move -------------------------------------------------------------------

    def decide(self, now: float) -> None:
        """Do what is due; what that has to say is sent at once."""
        touched: dict[int, None] = {}
        for decision in self._moves.due(now):
            match decision:
                case Hold():
                    self.take(decision)
                    touched[decision.member] = None
                case Start():
                    if not self._start(decision, now):
                        continue
                    touched[decision.member] = None
                    if decision.source is not None:
                        touched[decision.source] = None
                case Fail():
                    self._fail(decision)
        for number in touched:
            self._members[number].turn(now)

    def turned_away(self, state: StreamState, now: float) -> None:
        """The stream's member leaves, and has not accepted it."""
        hold = self._moves.turned_away(state, now)
        if hold is not None:
            self.take(hold, "leaving")

    def overloaded(self, state: StreamState, now: float) -> bool:
        """Handle a member that has no room for its stream; return True if another one is asked."""
        hold = self._moves.overloaded(state, now)
        if hold is not None:
            state.was_sent = False  # it is not known there
            self.take(hold, "overloaded")
        return hold is not None

    def take(self, decision: Hold[StreamState], why: MovedWhy | None = None) -> None:
        """Take a stream from its member, and hold it."""
        state = decision.stream
        route = self._routes.get(state)
        if route is not None:
            route.left_because = why or self._why_left(decision.member)
        link = self.link_of(state)
        assert link is not None
        carried = link.leave(state)
        state.member = _HELD
        self._held.add(state, carried)

    def _start(self, decision: Start[StreamState], now: float) -> bool:
        """Start a stream at a member; False where it has ended, as it has to name its model."""
        state = decision.stream
        error = self.missing_model(state)
        if error is not None:
            self._held.give_up(state, error)
            return False
        source, target = self.link_of(state), self._members[decision.member]
        route, model = self._routes.get(state), target.model
        if decision.source is not None:
            self.counters.note_moved(model, self._why_left(decision.source))
        elif route is not None and route.left_because is not None:
            self.counters.note_moved(model, route.left_because)
        else:
            self.counters.note_placed(model, "waited")
        self._count(state, decision.member, now)
        carried = self._held.take(state) if source is None else source.leave(state)
        state.moves, state.strikes = decision.moves, decision.strikes
        state.member = decision.member
        target.carry_on(carried)
        return True

    def _why_left(self, number: int) -> MovedWhy:
        """The state of a member because of which a stream leaves it."""
        member = self._members[number]
        if member.shut_because is not None:
            return "refused"
        if not member.is_attached:
            return "lost"
        state = "serving" if member.said is None else member.said.state
        return "other" if state == "serving" else state

    def _fail(self, decision: Fail[StreamState]) -> None:
        state = decision.stream
        link = self.link_of(state)
        if link is not None:
            self._held.add(state, link.leave(state))
            state.member = _HELD
        self._held.give_up(state, self._error_of(decision))

    def _error_of(self, decision: Fail[StreamState]) -> SlipstreamError:
        shut = decision.why is Failure.SHUT and decision.member is not None
        because = self._members[decision.member].shut_because if shut else None  # type: ignore[index]
        if because is not None:
            return because()
        fault = Fault("engine", f"the stream has ended: {decision.why.value}")
        if decision.why is not Failure.NO_MEMBER:
            return EngineError(fault)
        is_accepted = decision.stream.prompt_ids is not None
        model = decision.stream.model
        if is_accepted and self._members.attached_of(model):
            return StreamLostError(fault)
        return self._members.gone_error(model)


def _is_together(last: StreamState, state: StreamState, submit: Submit) -> bool:
    """True if both are answers of one model to one prompt."""
    is_same_model = last.model == state.model
    return is_same_model and isinstance(last.request, Submit) and can_join(last.request, submit)
