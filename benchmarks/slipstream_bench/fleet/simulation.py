"""A simulated fleet in cells: fronts that place requests, loads that arrive late, replicas that are
lost, drained or come back.

A cell is a set of replicas and fronts that know each other. A conversation belongs to the cell
that rendezvous hashing gives it, as by `prompt_cache_key`; in it each turn goes to any front.
"""

from __future__ import annotations

import heapq
import time
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from slipstream.fleet.member_load import MemberLoad
from slipstream.fleet.placement import PlacementPolicy
from slipstream.fleet.rendezvous import homes
from slipstream_bench.common.measures import Row
from slipstream_bench.fleet.chat_workload import ChatWorkload, Conversation
from slipstream_bench.fleet.policies import POLICIES
from slipstream_bench.fleet.replica import SLICE_S, SimulatedReplica, SimulatedRequest

WARM_SHARE = 0.4  # of the time, before anything is counted
DRAIN_S = 8.0  # from when nothing new goes to a replica until what it runs is moved
_CELL = 5  # see the hashes of `workload`
AWAY_S = 12.0  # until a lost or drained replica is back


@dataclass(frozen=True, slots=True)
class Scenario:
    """What is simulated.

    num_fronts: of each cell. conversations_per_s: new ones, for each replica. load_interval_s:
    between two loads of a replica. slow_speed: of one replica. lose_every_s, drain_every_s: one
    replica each, 0 for none. cell_lost_at: of the time, the share after which a cell ends; 0: none
    does.
    """

    name: str
    num_replicas: int
    num_cells: int = 1
    num_fronts: int = 4
    seconds: float = 200.0
    conversations_per_s: float = 0.95
    load_interval_s: float = 0.5
    is_popular: bool = False
    slow_speed: float = 1.0
    lose_every_s: float = 0.0
    drain_every_s: float = 0.0
    cell_lost_at: float = 0.0


@dataclass(slots=True, eq=False)
class _Front:
    policy: PlacementPolicy
    members: list[MemberLoad]
    open: list[MemberLoad] = field(default_factory=list)  # those that take requests


@dataclass(slots=True, eq=False)
class _Cell:
    replicas: list[SimulatedReplica]
    fronts: list[_Front]
    by_name: dict[bytes, SimulatedReplica]
    is_lost: bool = False

    def note_changed(self) -> None:
        """A replica takes requests that did not, or the reverse."""
        for front in self.fronts:
            pairs = zip(front.members, self.replicas, strict=True)
            front.open = [member for member, replica in pairs if replica.is_up]


class Simulation:
    """One run of a scenario with one policy."""

    def __init__(self, scenario: Scenario, policy: str, seed: int) -> None:
        self._scenario = scenario
        self._policy = policy
        self._workload = ChatWorkload(seed, is_popular=scenario.is_popular)
        self._cells = [self._cell(at, seed) for at in range(scenario.num_cells)]
        salts = np.random.default_rng(seed).integers(0, 2**64, scenario.num_cells, np.uint64)
        self._cell_salts = salts
        self._events: list[tuple[float, int, Callable[[float], None]]] = []
        self._num_events = 0
        self._done: list[SimulatedRequest] = []
        self._answer_s: list[float] = []
        self._num_moved = 0
        self._choose_ns: list[int] = []
        self._next_victim = 0

    def run(self) -> Row:
        """The row of the run."""
        scenario = self._scenario
        self._at(0.0, self._begin)
        self._at(0.0, self._tell)
        warm = WARM_SHARE * scenario.seconds
        self._at(warm, self._begin_to_count)
        if scenario.lose_every_s:
            self._at(warm, lambda now: self._every(now, scenario.lose_every_s, self._lose))
        if scenario.drain_every_s:
            self._at(warm, lambda now: self._every(now, scenario.drain_every_s, self._drain))
        if scenario.cell_lost_at:
            self._at(scenario.cell_lost_at * scenario.seconds, self._lose_cell)
        for step in range(round(scenario.seconds / SLICE_S)):
            now = step * SLICE_S
            while self._events[0][0] <= now:
                when, _, event = heapq.heappop(self._events)
                event(when)
            for cell in self._cells:
                for replica in cell.replicas:
                    replica.run(now, self._ended)
        return self._row()

    def _cell(self, at: int, seed: int) -> _Cell:
        scenario = self._scenario
        begin, end = (scenario.num_replicas * edge // scenario.num_cells for edge in (at, at + 1))
        replicas = [
            SimulatedReplica(b"replica-%d" % number, 1.0 if number else scenario.slow_speed)
            for number in range(begin, end)
        ]
        by_name = {replica.name: replica for replica in replicas}
        fronts = [
            _Front(
                POLICIES[self._policy](seed + front, by_name),
                [MemberLoad(replica.name) for replica in replicas],
            )
            for front in range(scenario.num_fronts)
        ]
        cell = _Cell(replicas, fronts, by_name)
        cell.note_changed()
        return cell

    def _at(self, when: float, event: Callable[[float], None]) -> None:
        self._num_events += 1
        heapq.heappush(self._events, (when, self._num_events, event))

    def _begin_to_count(self, now: float) -> None:
        for cell in self._cells:
            for replica in cell.replicas:
                replica.num_requests = 0

    def _begin(self, now: float) -> None:
        """A conversation begins."""
        self._submit(self._workload.conversation(), now)
        rate = self._scenario.conversations_per_s * self._scenario.num_replicas
        self._at(now + self._workload.time_to_next_s(rate), self._begin)

    def _submit(self, conversation: Conversation, now: float) -> None:
        key, answer_len = self._workload.turn(conversation)
        cell = self._home_cell(conversation)
        front = self._cells[cell].fronts[at := self._workload.pick(self._scenario.num_fronts)]
        begin = time.thread_time_ns()
        chosen = front.policy.choose(key, key.prompt_len, front.open, now)[0]
        member = front.open[chosen]
        sent = front.policy.note_submitted(key, key.prompt_len, member, now)
        self._choose_ns.append(time.thread_time_ns() - begin)
        request = SimulatedRequest(conversation, key, answer_len, cell, at, now, sent)
        self._cells[cell].by_name[member.name].submit(request)

    def _home_cell(self, conversation: Conversation) -> int:
        if len(self._cells) == 1:
            return 0
        order = homes(hash((_CELL, conversation.session)) % 2**64, self._cell_salts, 2)
        return next(at for at in order if self._cells[at].fronts[0].open)

    def _move(self, request: SimulatedRequest, now: float) -> None:
        """Its replica does not compute it any more: place it again, with what has been computed."""
        old = self._cells[request.cell].fronts[request.front]
        old.policy.note_ended(request.sent, now)
        if not old.open:
            request.cell = self._home_cell(request.conversation)
        front = self._cells[request.cell].fronts[request.front]
        length = request.key.prompt_len + request.produced
        member = front.open[front.policy.choose(request.key, length, front.open, now)[0]]
        request.sent = front.policy.note_submitted(request.key, length, member, now, is_again=True)
        self._num_moved += 1
        self._cells[request.cell].by_name[member.name].submit(request)

    def _ended(self, request: SimulatedRequest, now: float) -> None:
        self._cells[request.cell].fronts[request.front].policy.note_ended(request.sent, now)
        if request.submitted_at > WARM_SHARE * self._scenario.seconds:
            self._done.append(request)
            assert request.started_at is not None
            self._answer_s.append((now - request.started_at) / request.answer_len)
        pause_s = self._workload.pause_s(request.conversation)
        if pause_s is not None:
            self._at(now + pause_s, lambda when: self._submit(request.conversation, when))

    def _tell(self, now: float) -> None:
        """All replicas tell all fronts of their cell their load."""
        for cell in self._cells:
            for at, replica in enumerate(cell.replicas):
                if replica.is_up:
                    for front in cell.fronts:
                        replica.tell(front.members[at], now)
        self._at(now + self._scenario.load_interval_s, self._tell)

    def _every(
        self, now: float, interval_s: float, event: Callable[[float, _Cell, int], None]
    ) -> None:
        """Let something happen to the next replica, and again after `interval_s`."""
        self._next_victim += 7
        cell = self._cells[self._next_victim % len(self._cells)]
        at = self._next_victim % len(cell.replicas)
        if cell.replicas[at].is_up and len(cell.fronts[0].open) > 1:
            event(now, cell, at)
        self._at(now + interval_s, lambda when: self._every(when, interval_s, event))

    def _drain(self, now: float, cell: _Cell, at: int) -> None:
        cell.replicas[at].is_up = False
        cell.note_changed()
        self._at(now + DRAIN_S, lambda when: self._lose(when, cell, at))

    def _lose(self, now: float, cell: _Cell, at: int) -> None:
        replica = cell.replicas[at]
        replica.is_up = False
        cell.note_changed()
        for request in replica.lose_all():
            self._move(request, now)
        self._at(now + AWAY_S, lambda when: self._come_back(when, cell, at))

    def _come_back(self, now: float, cell: _Cell, at: int) -> None:
        if cell.is_lost:
            return
        cell.replicas[at].is_up = True
        for front in cell.fronts:
            front.members[at].note_restarted(now)
        cell.note_changed()

    def _lose_cell(self, now: float) -> None:
        """A cell ends, and does not come back."""
        cell = self._cells[0]
        cell.is_lost = True
        for replica in cell.replicas:
            replica.is_up = False
        cell.note_changed()
        for replica in cell.replicas:
            for request in replica.lose_all():
                self._move(request, now)

    def _row(self) -> Row:
        done = self._done
        replicas = [replica for cell in self._cells for replica in cell.replicas]
        first_s = [(one.started_at or 0.0) - one.submitted_at for one in done]
        per = np.array([replica.num_requests for replica in replicas if replica.is_up])
        p50, p95, p99 = np.percentile(first_s, (50, 95, 99))
        return {
            "benchmark": "fleet_simulation",
            "scenario": self._scenario.name,
            "policy": self._policy,
            "num_replicas": len(replicas),
            "num_cells": len(self._cells),
            "num_fronts": len(self._cells) * self._scenario.num_fronts,
            "requests": len(done),
            "hit_percent": round(
                100 * sum(one.cached for one in done) / sum(one.key.prompt_len for one in done), 2
            ),
            "ttft_p50_ms": round(1e3 * float(p50), 1),
            "ttft_p95_ms": round(1e3 * float(p95), 1),
            "ttft_p99_ms": round(1e3 * float(p99), 1),
            "tpot_ms": round(1e3 * float(np.mean(self._answer_s)), 2),
            "most_over_mean": round(float(per.max() / per.mean()), 3),
            "waiting_at_end": sum(replica.num_waiting for replica in replicas),
            "moved": self._num_moved,
            "choose_cpu_us": round(float(np.median(self._choose_ns)) / 1e3, 1),
        }
