"""What one worker is sent: states of streams and the new tokens of their histories.

Owns: the worker's session, its cursors, the states that wait for credit, what it has checked.
Does not know: scheduling, admission, how steps run.

Rules:
- States (Admitted, Registered, Refused, …) leave before tokens, so that a row is known before it
  is used; both wait for credit, neither queues in a socket.
- An attach drops what waited: the engine states everything anew.
- A turn sends a bounded number of messages: a catch-up of many streams is a flow beside the steps
  that go on.
- In a common step everything new is what that step sampled, one token each: its rows are handed to
  the histories as they are, which then have nothing to look up. Where they are the rows of the step
  before, neither have the cursors.
"""

from __future__ import annotations

from collections import deque

import numpy as np
import numpy.typing as npt

from slipstream_ipc.columns import pack_u32
from slipstream_ipc.history.cursors import Cursors, Portion
from slipstream_ipc.history.logprob_log import LogprobLog
from slipstream_ipc.history.token_log import TokenLog
from slipstream_ipc.messages import CoreToWorker, Step, WorkerToCore
from slipstream_ipc.messages.budgets import LOGPROB_BYTES, MESSAGE_BUDGET_BYTES
from slipstream_ipc.row_set import NO_ROWS, RowSet
from slipstream_ipc.transport.router import Router, Session

# None: a state, which needs no receipt because every attach states it anew
Receipt = Portion | None
CoreAcceptor = Router[CoreToWorker, WorkerToCore, Receipt]

_TOKEN_BUDGET = MESSAGE_BUDGET_BYTES // 8
_LOGPROB_TOKEN_BUDGET = MESSAGE_BUDGET_BYTES // 256
_MESSAGES_A_TURN = 2


class WorkerSender:
    """Everything that goes to one worker."""

    def __init__(
        self,
        acceptor: CoreAcceptor,
        tokens: TokenLog,
        logprobs: LogprobLog,
        cursors: Cursors,
    ) -> None:
        """`cursors` is shared by all ports: a row has one owner."""
        self._acceptor = acceptor
        self._tokens = tokens
        self._logprobs = logprobs
        self._session: Session[Receipt] | None = None
        self._states: deque[CoreToWorker] = deque()
        self._dirty = np.zeros(64, np.bool_)  # rows that may have something new, …
        self._is_dirty = False  # whether there are any
        self._sampled: RowSet | None = None  # … and those of the last step, while they are all
        self._packed = NO_ROWS, b""  # the rows sent last, as a column
        self._wants_logprobs = False
        self._cursors = cursors
        # ids that the worker has named since it attached, until it has stated all positions
        self.stated: set[bytes] | None = None
        self.completed_step = 0  # every token up to this step is in the histories
        self.sent_step = 0  # the last message said that all up to this step is sent
        self.checked_step = 0  # … and has been checked by the worker

    @property
    def is_attached(self) -> bool:
        """Whether the worker has a session."""
        return self._session is not None and self._session.is_open

    @property
    def awaits_check(self) -> bool:
        """Whether a report of the worker is due that could end some row."""
        return self.is_attached and self.checked_step < self.sent_step

    def attach(self, session: Session[Receipt], rows: list[int]) -> None:
        """A new life: none of the worker's `rows` is sent until `open` says from where."""
        self._session = session
        self._states.clear()
        self.stated = None if session.fresh else set()
        for row in rows:
            self.close(row)
        self._dirty[:] = self._is_dirty = False
        self._sampled = None
        self.sent_step = self.checked_step = self.completed_step

    def enqueue(self, body: CoreToWorker) -> None:
        """Queue a state; where no worker is attached it is dropped, the attach will state it."""
        if self.is_attached:
            self._states.append(body)

    def open(self, row: int, position: int, *, logprobs: bool) -> None:
        """Send `row` from `position` of its history on."""
        self._cursors.open(row, position)
        if row >= len(self._dirty):
            self._dirty = np.pad(self._dirty, (0, max(row + 1 - len(self._dirty), row)))
        self._dirty[row] = self._is_dirty = True
        self._wants_logprobs |= logprobs

    def close(self, row: int) -> None:
        """Send nothing more of `row`."""
        if self._cursors.is_open(row):
            self._cursors.close(row)

    def mark_dirty(self, rows: RowSet) -> None:
        """These rows have new tokens; all of them have been opened."""
        if self._sampled is None:
            self._sampled = rows
        else:
            self._mark_dirty(self._sampled.array)
            self._mark_dirty(rows.array)
            self._sampled = None

    def publish(self) -> bool:
        """Send some of what there is, as credit allows; whether there is more that could be sent.

        Acknowledgements are taken in, too.
        """
        session = self._session
        if session is None or not session.is_open:
            return False
        receipts = session.link.take_receipts()
        is_more = self._publish_some(session)
        for portion in receipts:  # only now: what leaves was waited for
            if portion is not None:
                self._cursors.acknowledge(portion)
        return is_more

    def _publish_some(self, session: Session[Receipt]) -> bool:
        while self._states and self._acceptor.send(session, self._states[0], None):
            self._states.popleft()
        for _ in range(_MESSAGES_A_TURN):
            if self._states or not session.link.has_credit:
                return False
            if not self._publish_tokens(session):
                return False
        return session.link.has_credit

    def _publish_tokens(self, session: Session[Receipt]) -> bool:
        """Send one message of tokens; whether more is left that could be sent now."""
        budget = _LOGPROB_TOKEN_BUDGET if self._wants_logprobs else _TOKEN_BUDGET
        if not self._is_dirty:
            rows = self._sampled
            if rows is None:
                return False
            portion = None
            if not self._logprobs.has_wide:
                portion = self._cursors.take_next(rows, budget)
            if portion is not None:
                self._sampled = None
                self._send(session, portion, rows, is_all=portion.is_all)
                return False
        rows = self._news()
        if not len(rows):
            return False
        has_others = False
        if self._wants_logprobs:
            rows, budget, has_others = self._of_one_kind(rows)
        lengths = self._tokens.lengths(rows)
        portion = self._cursors.next_portion(rows, lengths, budget)
        is_all = portion.is_all and not has_others
        if len(portion.rows) and not self._send(session, portion, rows, is_all=is_all):
            return False
        if not portion.is_all:
            self._mark_dirty(rows.array[self._cursors.lags(rows.array, lengths)])
        return not is_all

    def _of_one_kind(self, rows: RowSet) -> tuple[RowSet, int, bool]:
        """Those of the rows whose news one message holds, and how many tokens it may; whether there
        are others, which stay marked. Rows with very many log-probabilities to a token go alone,
        in messages of a few tokens, lest everybody's hold as few.
        """
        if not self._logprobs.has_wide:
            return rows, _LOGPROB_TOKEN_BUDGET, False
        is_wide = self._logprobs.is_wide(rows.array)
        narrow, wide = rows.array[~is_wide], rows.array[is_wide]
        if len(narrow):
            self._mark_dirty(wide)
            return RowSet(narrow), _LOGPROB_TOKEN_BUDGET, len(wide) > 0
        widest = self._logprobs.widest(wide)
        return RowSet(wide), max(1, MESSAGE_BUDGET_BYTES // (LOGPROB_BYTES * widest)), False

    def _send(
        self, session: Session[Receipt], portion: Portion, rows: RowSet, *, is_all: bool
    ) -> bool:
        """Send a portion of what is new of `rows`; whether it left. Else all of it is new still.

        is_all: nothing else is new.
        """
        step = self.completed_step if is_all else self.sent_step
        if self._acceptor.send(session, self._message(step, portion), portion):
            self.sent_step = step
            return True
        self._cursors.untake(portion)
        self._mark_dirty(rows.array)
        return False

    def _mark_dirty(self, rows: npt.NDArray[np.int64]) -> None:
        self._dirty[rows] = self._is_dirty = True

    def _news(self) -> RowSet:
        """The rows that may have something new, which are none from here on."""
        rows, self._sampled = self._sampled, None
        if self._is_dirty:
            if rows is not None:
                self._dirty[rows.array] = True
            rows = RowSet(np.flatnonzero(self._dirty))
            self._dirty[:] = self._is_dirty = False
        return NO_ROWS if rows is None else rows

    def _message(self, step: int, portion: Portion) -> Step:
        rows, starts = portion.rows, portion.starts
        counts = None if portion.each_one else portion.counts
        if counts is None and portion.is_all:
            token_ids = self._tokens.last(rows)
        else:
            token_ids = self._tokens.gather(rows, starts, counts)
        logprobs = None
        if self._wants_logprobs:
            logprobs = self._logprobs.columns(rows, starts, counts)
        if self._packed[0].version != rows.version:
            self._packed = rows, pack_u32(rows.array)
        return Step(
            step,
            self._packed[1],
            pack_u32(token_ids),
            b"" if counts is None else pack_u32(counts),
            b"" if counts is None else pack_u32(starts),
            logprobs,
        )
