"""Places requests on the members of a fleet, by what each would have to compute for them.

Routers do not talk to each other. What they agree on is a hash: a conversation's home is the same
member for all of them, and a member more or less moves one of n conversations. Load, and what this
router remembers of prompts, decide between the home and a few others. A router through which nearly
all requests pass goes by its memory instead: it knows what each cache has been asked for. Pure;
times are seconds of one monotonic clock.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, NamedTuple

import numpy as np

from slipstream.client.placing.member_load import MemberLoad, SentRequest
from slipstream.client.placing.prefix_memory import PrefixMemory
from slipstream.client.placing.prompt_keys import KEY_TOKENS, PromptKey
from slipstream.client.placing.rendezvous import homes
from slipstream_ipc.arrays import UInt64s

PREFIX_WEIGHT = 4.0  # of a token to compute, beside one that waits in a queue
# chosen over simulated replicas (decision 038)
NOT_HOME_TOKENS = 4096.0  # more for a conversation that begins elsewhere: its next turn goes home
COMMON_CONVERSATIONS = 2  # a key with which more than these began is not one conversation's
_MAX_COUNTED_KEYS = 2**15
_MAX_LAST_MEMBERS = 2**16  # two to a conversation
_ALONE_SHARE = 0.25  # of the running requests: a router is alone where others have fewer
_SHARE_STEPS = 8  # over which that share is smoothed, each of as many requests

Reason = Literal["home", "second", "load", "last"]
_REASONS: tuple[Reason, ...] = ("home", "second", "second")


class Candidate(NamedTuple):
    """A member that may take a request.

    member: index of the members. reason: why it is looked at. known: tokens of the prompt that its
    cache probably has. cost: in tokens.
    """

    member: int
    reason: Reason
    known: int
    cost: float


class Placement:
    """The choice of a member for each request, by one router.

    prefix_weight: how much a token to compute weighs beside one that waits; more keeps more
    conversations with the cache that has them.
    """

    def __init__(
        self, prefix_weight: float = PREFIX_WEIGHT, memory: PrefixMemory | None = None
    ) -> None:
        self._prefix_weight = prefix_weight
        self._memory = PrefixMemory() if memory is None else memory
        self._num_begun: dict[int, int] = {}  # conversations by first key, the last begun one last
        self._salts: tuple[tuple[int, ...], UInt64s] = ((), np.empty(0, np.uint64))
        self._last: _Choice | None = None
        self._last_members: dict[int, MemberLoad] = {}  # by key, in order of use: where it was last
        self._open: dict[SentRequest, PromptKey] = {}  # what was sent and has not ended
        self._others_share = 1.0  # of the running requests, those of other routers
        self._num_chosen = 0

    def choose(
        self, key: PromptKey, prompt_len: int, members: Sequence[MemberLoad], now: float
    ) -> Sequence[int]:
        """Up to four indices of `members`, the best one first; the others are for a request that
        the ones before them did not take. Empty if there are no members.

        prompt_len: tokens of the prompt, and of what a moved stream has behind it. members: those
        that can take the request.
        """
        return [candidate.member for candidate in self.candidates(key, prompt_len, members)]

    def candidates(
        self, key: PromptKey, prompt_len: int, members: Sequence[MemberLoad]
    ) -> list[Candidate]:
        """The candidates that `choose` considers, by ascending cost; at equal costs the home
        first.
        """
        if not members:
            return []
        home_key, level, num_begun = self._home_key(key)
        indices = homes(home_key, self._salts_of(members), len(_REASONS))
        reasons: list[Reason] = list(_REASONS[: len(indices)])
        work = [member.work for member in members]
        least = work.index(min(work))
        if least not in indices:
            indices.append(least)
            reasons.append("load")
        is_alone = self._is_alone(members)
        last = self._last_members.get(home_key) if is_alone and level else None
        if last in members and (at := members.index(last)) not in indices:
            indices.append(at)
            reasons.append("last")
        known = self._memory.known(key, [members[index] for index in indices])
        continued = _num_continued(key, max(known))
        if key.num_continued is not None and 0 < level <= continued and not is_alone:
            known[0] = max(known[0], key.prior_len)
        elsewhere = NOT_HOME_TOKENS if continued < level else 0.0
        weight = self._prefix_weight
        if level == 0:  # each of the conversations bears its share of computing what is common
            weight *= COMMON_CONVERSATIONS / max(num_begun, COMMON_CONVERSATIONS)
        found = []
        for index, reason, tokens in zip(indices, reasons, known, strict=True):
            to_compute = max(1, prompt_len - tokens)
            cost = work[index] + weight * to_compute
            cost += 0.0 if reason == "home" else elsewhere
            found.append(Candidate(index, reason, tokens, cost))
        found.sort(key=_cost)
        self._last = _Choice(key, {members[each.member]: each.known for each in found}, continued)
        return found

    def note_submitted(
        self,
        key: PromptKey,
        prompt_len: int,
        member: MemberLoad,
        now: float,
        *,
        is_again: bool = False,
    ) -> SentRequest:
        """The request is sent to `member`; to be called each time that it is sent.

        is_again: it was sent before, to this member or to another one.
        """
        last = self._last
        if last is None or last.key is not key or member not in last.known:
            known = self._memory.known(key, [member])[0]
            last = _Choice(key, {member: known}, _num_continued(key, known))
        if last.num_continued == 0 and not is_again:
            self._note_begun(key.first)
        self._memory.remember(key, member, now)
        for each in (key.first, key.second):
            if each is not None:
                self._last_members.pop(each, None)
                self._last_members[each] = member
        while len(self._last_members) > _MAX_LAST_MEMBERS:
            del self._last_members[next(iter(self._last_members))]
        sent = member.note_sent(max(1, prompt_len - last.known[member]), now)
        self._open[sent] = key
        return sent

    def note_ended(self, sent: SentRequest, now: float) -> None:
        """Record that a sent request has ended, was refused, or was moved to another member."""
        key = self._open.pop(sent, None)
        if key is not None:  # its cache was asked for the prompt until now
            self._memory.remember(key, sent.member, now)
        sent.member.note_ended(sent)

    def _is_alone(self, members: Sequence[MemberLoad]) -> bool:
        """True if nearly all requests at these members are this router's."""
        self._num_chosen += 1
        if self._num_chosen % _SHARE_STEPS == 0:
            running = sum([member.running for member in members])
            if running:
                others = max(0, running - sum([member.num_own for member in members])) / running
                self._others_share += (others - self._others_share) / _SHARE_STEPS
        return self._others_share < _ALONE_SHARE

    def _home_key(self, key: PromptKey) -> tuple[int, int, int]:
        """The key that has the request's home; which of its keys that is, 1 or 2, or 0 if the
        request has no home, because its beginning is common to several conversations; and how many
        conversations began with its first key.
        """
        num_begun = self._num_begun.get(key.first, 0) + (key.num_continued == 0)
        if num_begun <= COMMON_CONVERSATIONS:
            return key.first, 1, num_begun
        if key.second is None:
            return key.first, 0, num_begun
        return key.second, 2, num_begun

    def _note_begun(self, first: int) -> None:
        num_begun = self._num_begun.pop(first, 0) + 1
        self._num_begun[first] = num_begun
        if len(self._num_begun) > _MAX_COUNTED_KEYS:
            del self._num_begun[next(iter(self._num_begun))]

    def _salts_of(self, members: Sequence[MemberLoad]) -> UInt64s:
        salts = tuple([member.salt for member in members])
        if salts != self._salts[0]:
            self._salts = (salts, np.array(salts, np.uint64))
        return self._salts[1]


class _Choice(NamedTuple):
    key: PromptKey
    known: dict[MemberLoad, int]
    num_continued: int


def _num_continued(key: PromptKey, known: int) -> int:
    """`PromptKey.num_continued`; for a text, what is known of it says whether it continues one."""
    if key.num_continued is not None:
        return key.num_continued
    return min(2, known // (KEY_TOKENS + 1))


def _cost(candidate: Candidate) -> float:
    return candidate.cost
