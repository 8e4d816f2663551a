"""The load of a fleet's member: its own reports, and what was sent to it since.

Pure; times are seconds of one monotonic clock, which the caller passes in.
"""

from __future__ import annotations

from dataclasses import dataclass
from hashlib import blake2b

RUNNING_TOKENS = 16.0  # what a request of a member weighs, in tokens of a prompt
LOAD_LAG_S = 0.25  # a load says nothing of what was sent so shortly before it arrived
_NEVER = float("-inf")


@dataclass(frozen=True, slots=True, eq=False)
class SentRequest:
    """A request that was sent to a member.

    num_tokens: of its prompt, those that the member has to compute.
    """

    member: MemberLoad
    num_tokens: int
    sent_at: float


class MemberLoad:
    """The load of one member.

    - What was sent is counted until a load arrives that can know of it, or until it ends, whichever
      is first. An older load never takes it away.
    - queued_tokens: prompt tokens that wait to be computed. running: requests, waiting ones
      included. work: both, in tokens. kept_since: what the member's cache was last asked for after
      this time is still in it.
    """

    __slots__ = ("_own", "_sent", "kept_since", "name", "queued_tokens", "running", "salt", "work")

    def __init__(self, name: bytes) -> None:
        """name: the one that the member keeps when it is started again."""
        self.name = name
        self.salt = int.from_bytes(blake2b(name, digest_size=8).digest(), "little")
        self.kept_since = _NEVER
        self._sent: dict[SentRequest, None] = {}  # counted ones, in order of time
        self._own: set[SentRequest] = set()  # all that have not ended
        self._said(0, 0)

    @property
    def num_own(self) -> int:
        """Requests that were sent to it from here and have not ended."""
        return len(self._own)

    def note_load(
        self, now: float, *, running: int, queued_tokens: int, kept_since_s: float | None
    ) -> None:
        """Record a report of the member's load.

        running: requests, waiting ones included. kept_since_s: how long before this the block was
        last used that was evicted last; None if none was.
        """
        for sent in list(self._sent):
            if sent.sent_at > now - LOAD_LAG_S:
                break
            del self._sent[sent]
        if kept_since_s is not None:
            self.kept_since = max(self.kept_since, now - kept_since_s)
        self._said(running, queued_tokens)

    def note_restarted(self, now: float) -> None:
        """The member has lost its cache and its requests."""
        self._sent.clear()
        self.kept_since = now
        self._said(0, 0)

    def note_sent(self, num_tokens: int, now: float) -> SentRequest:
        """A request whose prompt has `num_tokens` to compute was sent to the member."""
        sent = SentRequest(self, num_tokens, now)
        self._sent[sent] = None
        self._own.add(sent)
        self._add(1, num_tokens)
        return sent

    def note_ended(self, sent: SentRequest) -> None:
        """A request that was sent to the member has ended, or was not accepted."""
        self._own.discard(sent)
        if sent in self._sent:
            del self._sent[sent]
            self._add(-1, -sent.num_tokens)

    def _said(self, running: int, queued_tokens: int) -> None:
        self.running = running + len(self._sent)
        self.queued_tokens = queued_tokens + sum([sent.num_tokens for sent in self._sent])
        self.work = self.queued_tokens + RUNNING_TOKENS * self.running

    def _add(self, running: int, num_tokens: int) -> None:
        self.running += running
        self.queued_tokens += num_tokens
        self.work = self.queued_tokens + RUNNING_TOKENS * self.running
