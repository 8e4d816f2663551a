"""Ways to place requests, the product's own among them. Each front has an object of its own."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence

import numpy as np

from slipstream.fleet.member_load import RUNNING_TOKENS, MemberLoad, SentRequest
from slipstream.fleet.placement import PREFIX_WEIGHT, Placement, PlacementPolicy
from slipstream.fleet.prefix_memory import PrefixMemory
from slipstream.fleet.prompt_keys import PromptKey
from slipstream.fleet.rendezvous import homes
from slipstream_bench.fleet.chat_workload import SimulatedKey
from slipstream_bench.fleet.replica import SimulatedReplica

_MEMORY_CAPACITY = 2**17  # entries of a front, for minutes of a simulation
_MOST_OVER_MEAN = 1.25  # load of a replica that a prefix's hash may name
_LEAST_TO_BOUND = 2.0
_ABSOLUTE, _RELATIVE = 32, 1.1  # by how much loads differ before a remembered prefix is left
_LEAST_MATCH = 0.5
_NUM_TRIES = 4

Replicas = Mapping[bytes, SimulatedReplica]


class _Counting:
    """What all policies do beside choosing."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)  # noqa: S311 - a simulation's

    def note_submitted(
        self,
        key: PromptKey,
        prompt_len: int,
        member: MemberLoad,
        now: float,
        *,
        is_again: bool = False,
    ) -> SentRequest:
        """See `PlacementPolicy`."""
        return member.note_sent(prompt_len, now)

    def note_ended(self, sent: SentRequest, now: float) -> None:
        """See `PlacementPolicy`."""
        sent.member.note_ended(sent)

    def _least(self, costs: Sequence[float]) -> list[int]:
        """Indices of the least costs, those of equal ones in any order."""
        order = sorted(range(len(costs)), key=lambda at: (costs[at], self._random.random()))
        return order[:_NUM_TRIES]


class RandomChoice(_Counting):
    """Any member."""

    def choose(
        self, key: PromptKey, prompt_len: int, members: Sequence[MemberLoad], now: float
    ) -> Sequence[int]:
        """See `PlacementPolicy`."""
        return [self._random.randrange(len(members))]


class RoundRobin(_Counting):
    """One after the other."""

    def __init__(self, seed: int) -> None:
        super().__init__(seed)
        self._last = self._random.randrange(1024)

    def choose(
        self, key: PromptKey, prompt_len: int, members: Sequence[MemberLoad], now: float
    ) -> Sequence[int]:
        """See `PlacementPolicy`."""
        self._last += 1
        return [self._last % len(members)]


class LeastLoaded(_Counting):
    """The member with the least work."""

    def choose(
        self, key: PromptKey, prompt_len: int, members: Sequence[MemberLoad], now: float
    ) -> Sequence[int]:
        """See `PlacementPolicy`."""
        return self._least([member.work for member in members])


class BoundedPrefixHash(_Counting):
    """Hash of the first 256 tokens, to the next member where one has 1.25 times the mean load."""

    def choose(
        self, key: PromptKey, prompt_len: int, members: Sequence[MemberLoad], now: float
    ) -> Sequence[int]:
        """See `PlacementPolicy`."""
        prefix = int(key.chain[min(1, len(key.chain) - 1)]) & (2**64 - 1)
        order = homes(prefix, _salts(members), len(members))
        mean = (sum([member.running for member in members]) + 1) / len(members)
        most = max(_LEAST_TO_BOUND, _MOST_OVER_MEAN * mean)
        fitting = [at for at in order if members[at].running + 1 <= most]
        return [*fitting, *order][:_NUM_TRIES]


class SessionHash(_Counting):
    """Hash of the conversation's id, which no request has; without regard to load."""

    def choose(
        self, key: PromptKey, prompt_len: int, members: Sequence[MemberLoad], now: float
    ) -> Sequence[int]:
        """See `PlacementPolicy`."""
        assert isinstance(key, SimulatedKey)
        return homes(key.session, _salts(members), _NUM_TRIES)


class RememberedPrefixes(_Counting):
    """The member that was sent the longest beginning of the prompt, or the least loaded one where
    that is less than half of the prompt, or where loads differ too much.
    """

    def __init__(self, seed: int) -> None:
        super().__init__(seed)
        self._memory = PrefixMemory(_MEMORY_CAPACITY)

    def choose(
        self, key: PromptKey, prompt_len: int, members: Sequence[MemberLoad], now: float
    ) -> Sequence[int]:
        """See `PlacementPolicy`."""
        running = [member.running for member in members]
        known = self._memory.known(key, members)
        low, high = min(running), max(running)
        differ = high - low > _ABSOLUTE and high > _RELATIVE * low
        if differ or max(known) < _LEAST_MATCH * prompt_len:
            return self._least(running)
        return self._least([-tokens for tokens in known])

    def note_submitted(
        self,
        key: PromptKey,
        prompt_len: int,
        member: MemberLoad,
        now: float,
        *,
        is_again: bool = False,
    ) -> SentRequest:
        """See `PlacementPolicy`."""
        self._memory.remember(key, member, now)
        return super().note_submitted(key, prompt_len, member, now)


class Oracle(_Counting):
    """The product's costs, with the true state of all members."""

    def __init__(self, seed: int, replicas: Replicas) -> None:
        super().__init__(seed)
        self._replicas = replicas

    def choose(
        self, key: PromptKey, prompt_len: int, members: Sequence[MemberLoad], now: float
    ) -> Sequence[int]:
        """See `PlacementPolicy`."""
        assert isinstance(key, SimulatedKey)
        costs = []
        for member in members:
            replica = self._replicas[member.name]
            to_compute = max(1, prompt_len - replica.cached_tokens(key.chunks))
            busy = replica.queued_tokens + RUNNING_TOKENS * replica.num_running
            costs.append(busy + PREFIX_WEIGHT * to_compute)
        return self._least(costs)


def _salts(members: Sequence[MemberLoad]) -> np.ndarray[tuple[int], np.dtype[np.uint64]]:
    return np.array([member.salt for member in members], np.uint64)


POLICIES: Mapping[str, Callable[[int, Replicas], PlacementPolicy]] = {
    "random": lambda seed, _: RandomChoice(seed),
    "round_robin": lambda seed, _: RoundRobin(seed),
    "least_loaded": lambda seed, _: LeastLoaded(seed),
    "prefix_hash_bounded": lambda seed, _: BoundedPrefixHash(seed),
    "remembered_prefixes": lambda seed, _: RememberedPrefixes(seed),
    "session_hash": lambda seed, _: SessionHash(seed),
    "slipstream": lambda _seed, _replicas: Placement(memory=PrefixMemory(_MEMORY_CAPACITY)),
    "oracle": Oracle,
}
"""By name, a policy for one front. Arguments: its seed, and the replicas of its cell."""
