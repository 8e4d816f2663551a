"""Memory for log-probabilities, promised to streams as they grow.

A stream is promised what its prompt's log-probabilities take and one step of outputs when it is
taken, then a step at a time, until it ends; from then on it holds what is really there, until it is
forgotten. Pure: rows are numbers, and what is done with a row that gets no room is the scheduler's
business.

Rules:
- What is promised stays inside the bound, with three exceptions: a stream that was accepted by
  another core is taken inside twice the bound; one that needs more than all of it is taken while
  nothing is promised; and `force` (see `Scheduler`), for one stream at a time.
- Rows that wait for room to grow come before streams that ask to be taken.
"""

from __future__ import annotations

import sys

from slipstream_ipc.columns import num_scored
from slipstream_ipc.history.pages import PAGE_LEN
from slipstream_ipc.history.wide_logprobs import MAX_NARROW
from slipstream_ipc.messages import Admit
from slipstream_ipc.messages.budgets import LOGPROB_BYTES
from slipstream_ipc.validation.sampling_params import logprob_bytes

_RANK_BYTES = 4
_WIDE_STEP_BYTES = 2**18


class LogprobBudget:
    """How much of the memory is promised, and to which rows."""

    def __init__(self, num_bytes: int = sys.maxsize) -> None:
        self._most = num_bytes
        self._held: dict[int, int] = {}  # bytes by row, of streams that are not forgotten
        self._ended: set[int] = set()  # those of them that grow no more
        self.num_promised = 0  # bytes
        self.waiting: set[int] = set()  # rows that are to grow and have found no room
        self.was_freed = False  # some, or a row ended, since the scheduler looked last

    @property
    def is_stuck(self) -> bool:
        """Whether nothing but going on beyond the bound helps: every row that may grow waits, and
        what is beyond it already is not about to be freed.
        """
        if len(self.waiting) < len(self._held) - len(self._ended):
            return False
        return not self._ended or self.num_promised <= self._most

    def promise(self, num_bytes: int, *, was_accepted: bool = False) -> bool:
        """Promise room to a stream that is to be taken; whether that was done.

        `open` says its row next.
        """
        if num_bytes:
            if self.waiting and not was_accepted:
                return False
            most = 2 * self._most if was_accepted else self._most
            if self.num_promised and self.num_promised + num_bytes > most:
                return False
        self.num_promised += num_bytes
        return True

    def open(self, row: int, num_bytes: int) -> None:
        """What was promised is this row's."""
        if num_bytes:
            self._held[row] = num_bytes

    def grow(self, row: int, num_bytes: int, *, force: bool = False) -> bool:
        """Promise a row so much more, where there is room; whether that was done."""
        if not force and self.num_promised + num_bytes > self._most:
            return False
        self._held[row] = self._held.get(row, 0) + num_bytes
        self.num_promised += num_bytes
        return True

    def shrink(self, row: int, num_bytes: int) -> None:
        """A row has ended, and holds that much at most. Idempotent."""
        held = self._held.get(row)
        if held is not None:
            self._ended.add(row)
            self._held[row] = min(held, num_bytes)
            self.num_promised -= held - self._held[row]
            self.was_freed = True

    def close(self, row: int) -> None:
        """A row is forgotten. Idempotent."""
        self.num_promised -= self._held.pop(row, 0)
        self._ended.discard(row)
        self.was_freed = True


def step_len(num_logprobs: int) -> int:
    """Outputs that a stream with that many log-probabilities to each is promised room for at a
    time: a page of the log, or as many as take little memory where they are not paged.
    """
    width = 1 + num_logprobs
    if width <= MAX_NARROW:
        return PAGE_LEN
    return max(1, _WIDE_STEP_BYTES // (LOGPROB_BYTES * width))


def outputs_bytes(num_logprobs: int, num_tokens: int) -> int:
    """Bytes that the log-probabilities of so many outputs take, in whole steps."""
    size = step_len(num_logprobs)
    token_bytes = LOGPROB_BYTES * (1 + num_logprobs) + _RANK_BYTES
    return -(-num_tokens // size) * size * token_bytes


def stream_bytes(admit: Admit, num_outputs: int) -> int:
    """Bytes of a stream whose history has so many outputs, those of its registration included.

    Of these only some have log-probabilities here (`num_scored`).
    """
    num_given, prompt_len = len(admit.output_ids) // 4, len(admit.prompt_ids) // 4
    num_bytes = logprob_bytes(admit.params, prompt_len, num_scored(admit))
    if admit.params.logprobs is not None:
        num_bytes += outputs_bytes(admit.params.logprobs, num_outputs - num_given)
    return num_bytes


def first_bytes(admit: Admit) -> int:
    """Bytes that a stream is promised when it is taken: room for one step."""
    return stream_bytes(admit, len(admit.output_ids) // 4 + 1)
