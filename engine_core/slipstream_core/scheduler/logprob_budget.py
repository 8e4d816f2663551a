"""A budget of memory for log-probabilities, reserved for streams as they grow.

On admission a stream reserves what its prompt's log-probabilities and one step of outputs take,
then one step at a time until it ends. From then on it holds what it really uses, until it is
forgotten. Rows are plain numbers here; the scheduler decides what happens to a row without room.

- Reservations stay inside the bound, with three exceptions: a stream that another core accepted may
  use up to twice the bound; a stream that needs more than the whole bound is taken while nothing is
  reserved; and `force` (see `Scheduler`), for one stream at a time.
- Rows that wait for room to grow come before streams that ask to be admitted.
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
    """The memory reserved for log-probabilities, in bytes by row."""

    def __init__(self, num_bytes: int = sys.maxsize) -> None:
        self._max_bytes = num_bytes
        self._reserved: dict[int, int] = {}  # bytes by row, of streams that are not forgotten
        self._ended: set[int] = set()  # those of them that no longer grow
        self.num_reserved = 0  # bytes reserved
        self.waiting: set[int] = set()  # rows that have to grow and found no room
        self.was_freed = False  # since the scheduler last looked; also set where a row ended

    @property
    def is_stuck(self) -> bool:
        """True if only exceeding the bound helps: every row that may grow waits, and no overdraft
        is about to be freed.
        """
        if len(self.waiting) < len(self._reserved) - len(self._ended):
            return False
        # one row at a time is beyond the bound, so something always goes on (decision 022)
        return not self._ended or self.num_reserved <= self._max_bytes

    def reserve(self, num_bytes: int, *, was_accepted: bool = False) -> bool:
        """Reserve room for a stream that is to be admitted; return True if there was any.

        `open` assigns the reservation to its row.
        """
        if num_bytes:
            if self.waiting and not was_accepted:
                return False
            most = 2 * self._max_bytes if was_accepted else self._max_bytes
            if self.num_reserved and self.num_reserved + num_bytes > most:
                return False
        self.num_reserved += num_bytes
        return True

    def open(self, row: int, num_bytes: int) -> None:
        """Assign what was promised to this row."""
        if num_bytes:
            self._reserved[row] = num_bytes

    def grow(self, row: int, num_bytes: int, *, force: bool = False) -> bool:
        """Reserve `num_bytes` more for a row; return True if there was room. `force` ignores the
        bound.
        """
        if not force and self.num_reserved + num_bytes > self._max_bytes:
            return False
        self._reserved[row] = self._reserved.get(row, 0) + num_bytes
        self.num_reserved += num_bytes
        return True

    def holds(self, row: int) -> bool:
        """True if anything is reserved for a row."""
        return row in self._reserved

    def shrink(self, row: int, num_bytes: int) -> None:
        """A row has ended and holds at most `num_bytes`. Idempotent."""
        reserved = self._reserved.get(row)
        if reserved is not None:
            self._ended.add(row)
            self._reserved[row] = min(reserved, num_bytes)
            self.num_reserved -= reserved - self._reserved[row]
            self.was_freed = True

    def close(self, row: int) -> None:
        """Release all that a forgotten row holds. Idempotent."""
        self.num_reserved -= self._reserved.pop(row, 0)
        self._ended.discard(row)
        self.was_freed = True


def step_len(num_logprobs: int) -> int:
    """Outputs for which a stream with `num_logprobs` per token reserves room at a time: a page of
    the log, or as many as take little memory where the log is not paged.
    """
    width = 1 + num_logprobs
    if width <= MAX_NARROW:
        return PAGE_LEN
    return max(1, _WIDE_STEP_BYTES // (LOGPROB_BYTES * width))


def outputs_bytes(num_logprobs: int, num_tokens: int) -> int:
    """Bytes of the log-probabilities of `num_tokens` outputs, in whole steps."""
    size = step_len(num_logprobs)
    token_bytes = LOGPROB_BYTES * (1 + num_logprobs) + _RANK_BYTES
    return -(-num_tokens // size) * size * token_bytes


def stream_bytes(admit: Admit, num_outputs: int) -> int:
    """Bytes of a stream with `num_outputs` outputs in its history, registered ones included.

    Only some outputs of a registration have log-probabilities here (`num_scored`).
    """
    num_given, prompt_len = len(admit.begun.output_ids) // 4, len(admit.prompt_ids) // 4
    num_bytes = logprob_bytes(admit.spec.params, prompt_len, num_scored(admit))
    if admit.spec.params.logprobs is not None:
        num_bytes += outputs_bytes(admit.spec.params.logprobs, num_outputs - num_given)
    return num_bytes


def first_bytes(admit: Admit) -> int:
    """Bytes that a stream reserves on admission: with room for one step."""
    return stream_bytes(admit, len(admit.begun.output_ids) // 4 + 1)
