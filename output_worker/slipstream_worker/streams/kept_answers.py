"""The answers that a worker keeps for clients that ask for them later, bounded in bytes. Pure.

- An answer belongs to a scope, and only that finds it. Its id is the scope's while it is kept: what
  another scope puts under it is not kept, and takes nothing away.
- Where there is no room, the scope that holds the most loses the answer that was used longest ago:
  no scope pushes out what one that holds less has kept.
- An answer that is added counts as unsent until it has been handed on to the core. All answers are
  encoded, and never change.
"""

from __future__ import annotations

import heapq
from collections import Counter

from slipstream_ipc.messages import KEPT_ENTRY_BYTES, MAX_CALLS, MAX_KEPT_BYTES, KeptEntry

_MIN_HEAP = 64
_CALL_BYTES = 256  # what the events of a call take beside their text, with a long id
MAX_ANSWERS = 2**20  # as many ids as a message may state


class KeptAnswers:
    """Kept answers by scope, and those that the core has yet to be sent."""

    def __init__(self, max_bytes: int) -> None:
        """`max_bytes`: of all answers together; 0 keeps none."""
        self._max_bytes = max_bytes
        self.max_answer_bytes = min(max_bytes // 4, MAX_KEPT_BYTES)  # see `ModelCard`
        most_bytes = 2 * self.max_answer_bytes + MAX_CALLS * _CALL_BYTES
        self._max_encoded_bytes = min(most_bytes, max_bytes)  # of one of that size
        self._scopes: dict[bytes, bytes] = {}  # by stream id
        self._answers: dict[bytes, dict[bytes, bytes]] = {}  # by scope and id, used last at the end
        self._sizes: Counter[bytes] = Counter()  # by scope, in bytes
        self._num_bytes = 0
        # scopes by descending size; an entry with another than the scope's size is outdated
        self._largest: list[tuple[int, bytes]] = []
        self._unsent: dict[bytes, None] = {}

    def __len__(self) -> int:
        return len(self._scopes)

    def __contains__(self, stream_id: bytes) -> bool:
        return stream_id in self._scopes

    @property
    def num_bytes(self) -> int:
        """The size of the kept answers."""
        return self._num_bytes

    @property
    def stream_ids(self) -> tuple[bytes, ...]:
        """The ids of all answers."""
        return tuple(self._scopes)

    def put(self, stream_id: bytes, scope: bytes, answer: bytes) -> list[bytes]:
        """Keep an answer, unless its id is another scope's. Returns the ids that are kept no
        longer; its own, if it is too large.
        """
        if self.is_of_another(stream_id, scope):
            return []
        num_bytes = len(answer) + KEPT_ENTRY_BYTES
        self.remove(stream_id)
        if num_bytes > self._max_encoded_bytes:
            return [stream_id]
        dropped = []
        while self._num_bytes + num_bytes > self._max_bytes or len(self) >= MAX_ANSWERS:
            dropped.append(self._drop_one())
        self._scopes[stream_id] = scope
        self._answers.setdefault(scope, {})[stream_id] = answer
        self._unsent[stream_id] = None
        self._resize(scope, num_bytes)
        return dropped

    def get(self, stream_id: bytes, scope: bytes) -> bytes | None:
        """The answer, if it is of this scope; it counts as used."""
        if self._scopes.get(stream_id) != scope:
            return None
        answers = self._answers[scope]
        answer = answers[stream_id] = answers.pop(stream_id)
        return answer

    def is_of_another(self, stream_id: bytes, scope: bytes) -> bool:
        """True if the answer with this id is another scope's."""
        return self._scopes.get(stream_id, scope) != scope

    def remove(self, stream_id: bytes) -> bool:
        """Remove this answer; return True if it was kept."""
        scope = self._scopes.pop(stream_id, None)
        if scope is None:
            return False
        answers = self._answers[scope]
        answer = answers.pop(stream_id)
        if not answers:
            del self._answers[scope]
        self._unsent.pop(stream_id, None)
        self._resize(scope, -len(answer) - KEPT_ENTRY_BYTES)
        return True

    def clear(self) -> None:
        """Forget all answers: the core sends them again."""
        self._scopes.clear()
        self._answers.clear()
        self._sizes.clear()
        self._largest.clear()
        self._unsent.clear()
        self._num_bytes = 0

    # ---- what the core is sent ---------------------------------------------------------------

    @property
    def has_unsent(self) -> bool:
        """True if there are answers to send to the core."""
        return bool(self._unsent)

    def mark_unsent(self, stream_ids: tuple[bytes, ...]) -> None:
        """The core does not hold these answers."""
        for stream_id in stream_ids:
            if stream_id in self._scopes:
                self._unsent[stream_id] = None

    def mark_all_sent(self) -> None:
        """Send none before the core asks for it."""
        self._unsent.clear()

    def unsent(self, max_bytes: int) -> tuple[KeptEntry, ...]:
        """The next answers to be sent, of about `max_bytes`."""
        entries = []
        for stream_id in self._unsent:
            scope = self._scopes[stream_id]
            entry = KeptEntry(stream_id, scope, self._answers[scope][stream_id])
            entries.append(entry)
            max_bytes -= len(entry.answer) + KEPT_ENTRY_BYTES
            if max_bytes <= 0:
                break
        return tuple(entries)

    def mark_sent(self, entries: tuple[KeptEntry, ...]) -> None:
        """Record that these entries are on their way to the core."""
        for entry in entries:
            self._unsent.pop(entry.stream_id, None)

    # ---- inside --------------------------------------------------------------------------------

    def _drop_one(self) -> bytes:
        """Drop the answer used longest ago of the scope that holds the most; returns its id."""
        while self._sizes.get(self._largest[0][1]) != -self._largest[0][0]:
            heapq.heappop(self._largest)
        stream_id = next(iter(self._answers[self._largest[0][1]]))
        self.remove(stream_id)
        return stream_id

    def _resize(self, scope: bytes, num_bytes: int) -> None:
        self._num_bytes += num_bytes
        self._sizes[scope] += num_bytes
        if not self._sizes[scope]:
            del self._sizes[scope]
        elif len(self._largest) > 2 * len(self._sizes) + _MIN_HEAP:
            self._largest = [(-size, each) for each, size in self._sizes.items()]
            heapq.heapify(self._largest)
        else:
            heapq.heappush(self._largest, (-self._sizes[scope], scope))
