"""Sends one worker the states of its streams and the new tokens of their histories.

- States (Admitted, Registered, AdmissionRefused, …) are sent before tokens, so that a row is known
  before it is used. Both wait for credit; neither queues in a socket. The one exception is the last
  state of a row (`close_with`), which is sent behind its tokens.
- A flood of admissions does not hold up the streams that run: it leaves some credit to tokens,
  which pass queued Admitted of other rows. They pass no other state.
- An attach drops queued states: every state is sent anew.
- Kept answers for a worker that lacks them yield to both, and leave one message a turn.
- A turn sends a bounded number of messages, so that catching up on many streams does not hold up
  running steps.
- In the common case all that is new is what the last step gave its rows. That is sent by a
  `StepSender`, where nothing else is to be sent.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from slipstream_core.workers.report_reader import (
    ReportReader,
    report_reader,
)
from slipstream_core.workers.step_sender import (
    AWAITED,
    RECEIPTS,
    SentRows,
    StepSender,
)
from slipstream_core.workers.stream_store import CoreStreamStore
from slipstream_ipc.columns import pack_u32, u32
from slipstream_ipc.history.cursors import Portion
from slipstream_ipc.messages import (
    KEPT_ENTRY_BYTES,
    AdmissionRefused,
    Admitted,
    CoreToWorker,
    Kept,
    KeptEntry,
    LogprobColumns,
    Step,
    WorkerToCore,
)
from slipstream_ipc.messages.budgets import LOGPROB_BYTES, MESSAGE_BUDGET_BYTES
from slipstream_ipc.row_set import NO_ROWS, RowSet
from slipstream_ipc.transport.link import WINDOW
from slipstream_ipc.transport.local_socket import LocalConnection
from slipstream_ipc.transport.router import Router, Session

# None for a state, which needs no receipt because every attach sends it anew
Receipt = Portion | SentRows | None
CoreAcceptor = Router[CoreToWorker, WorkerToCore, Receipt]

_U32 = np.dtype("<u4")  # of columns
_TOKEN_BUDGET = MESSAGE_BUDGET_BYTES // 8
_LOGPROB_TOKEN_BUDGET = MESSAGE_BUDGET_BYTES // 256
_MESSAGES_PER_TURN = 2
# messages, from which on states wait: tokens need credit (decision 011)
_MOST_UNACKED_STATES = WINDOW - 4
_MOST_UNACKED_KEPT = WINDOW // 4  # messages, from which on kept answers wait: tokens need credit


class WorkerSender:
    """Everything that is sent to one worker."""

    def __init__(
        self,
        acceptor: CoreAcceptor,
        store: CoreStreamStore,
    ) -> None:
        """`store` is shared by all senders: a row has one owner."""
        self._acceptor = acceptor
        self._tokens, self._logprobs = store.tokens, store.logprobs
        self._session: Session[Receipt] | None = None
        # sends steps, while the columns that it works on last
        self._step_sender: StepSender | None = None
        self._messages: deque[CoreToWorker] = deque()
        self._num_firm = 0  # of these, states that no token may pass
        self._num_queued = np.zeros(64, np.int64)  # of these, Admitted of each row
        self._kept: deque[Kept] = deque()
        self._last_states: dict[int, CoreToWorker] = {}  # by row: sent behind the row's tokens
        self._dirty = np.zeros(64, np.bool_)  # [rows] that may have new tokens
        self._is_dirty = False  # whether any row is set
        self._sampled: RowSet | None = None  # rows of the last step, if not yet in `_dirty`
        # rows of the last step, and their list of log-probabilities, see `StepSender`
        self._deferred: tuple[RowSet, list[LogprobColumns] | None] = NO_ROWS, None
        self._wants_logprobs = False
        self._cursors, self._possible_ends = store.cursors, store.possible_ends
        # ids that the worker has stated or admitted since it attached; None once its positions are
        # complete
        self.stated_ids: set[bytes] | None = None
        self.completed_step = 0  # all tokens up to this step are in the histories
        self.sent_step = 0  # the step up to which everything is sent, as of the last message
        # the step up to which the worker has reported its check, or none was due; None before it
        # attaches
        self._reports: ReportReader | None = None
        self._awaited_step = 0  # the step up to which a report is due even if nothing ended
        self._is_rest_awaited = False  # a message before that of the step's rest is awaited

    @property
    def is_attached(self) -> bool:
        """True if the worker has an open session."""
        return self._session is not None and self._session.is_open

    @property
    def num_unchecked(self) -> int:
        """Steps from the first one to the last on which a report is due and not yet here."""
        if self._reports is None:
            return 0
        num = self._awaited_step - self._reports.step
        return num if num > 0 and self.is_attached else 0

    def attach(self, session: Session[Receipt], rows: list[int]) -> None:
        """Begin a new session; none of `rows` is sent until `open` gives its position."""
        self._session = session
        self._step_sender = None
        self._messages.clear()
        self._num_firm = self._num_queued[:] = 0
        self._kept.clear()
        self.stated_ids = None if session.fresh else set()
        for row in rows:
            self.close(row)
        self._dirty[:] = self._is_dirty = False
        self._sampled = None
        self.sent_step = self._awaited_step = self.completed_step
        is_local = isinstance(session.route, LocalConnection)
        self._reports = report_reader(session.link, self.completed_step, is_local=is_local)
        session.take = self._reports.take
        self._is_rest_awaited = False

    def enqueue(self, body: CoreToWorker) -> None:
        """Queue a state; dropped where no worker is attached, as the next attach sends it anew."""
        if self.is_attached:
            self._messages.append(body)
            self._count_queued(body, 1)

    def replay_kept(self, entries: Sequence[KeptEntry]) -> None:
        """Send these answers, the last ones the worker lacks."""
        part: list[KeptEntry] = []
        num_bytes = 0
        for entry in entries:
            if num_bytes > MESSAGE_BUDGET_BYTES:
                self._kept.append(Kept(tuple(part), last=False))
                part, num_bytes = [], 0
            part.append(entry)
            num_bytes += len(entry.answer) + KEPT_ENTRY_BYTES
        self._kept.append(Kept(tuple(part), last=True))

    def open(self, row: int, position: int, *, logprobs: bool) -> None:
        """Send `row` from `position` of its history on."""
        self._step_sender, self._deferred = None, (NO_ROWS, None)
        self._cursors.open(row, position)
        if row >= len(self._dirty):
            self._dirty = np.pad(self._dirty, (0, max(row + 1 - len(self._dirty), row)))
        self._dirty[row] = self._is_dirty = True
        self._wants_logprobs |= logprobs

    def close(self, row: int) -> None:
        """Send nothing more of `row`."""
        self._deferred = NO_ROWS, None
        self._last_states.pop(row, None)
        if self._cursors.is_open(row):
            self._cursors.close(row)

    def close_with(self, row: int, state: CoreToWorker) -> None:
        """Send what is left of `row`'s history, then `state`, then nothing more of `row`; the
        history gets nothing more. An attach drops `state`.
        """
        self._last_states[row] = state
        self._close_sent_rows()

    def mark_dirty(self, rows: RowSet) -> None:
        """Record that these rows have new tokens; all of them are open."""
        if self._sampled is None:
            self._sampled = rows
        else:
            self._mark_dirty(self._sampled.array)
            self._mark_dirty(rows.array)
            self._sampled = None

    def checked(self, step: int) -> None:
        """The worker has reported its check of all tokens up to `step`: 0 for an end that it
        reports before the first step of its attach.
        """
        if self._reports is not None:
            self._reports.step = max(self._reports.step, step)

    def publish(self) -> bool:
        """Send new states and tokens as credit allows, and take in acknowledgements.

        Returns whether more could be sent now.
        """
        session = self._session
        if session is None or not session.is_open:
            return False
        if self._send_step(session):
            return False
        link = session.link
        receipts = link.take_receipts() if link.has_receipts else ()
        is_more = self._has_news() and self._publish_some(session)
        if receipts:
            self._acknowledge(receipts)  # after sending, which is urgent
        return is_more

    def _send_step(self, session: Session[Receipt]) -> bool:
        """Send what the last step gave its rows in C, if that is all there is to be sent; return
        True if that was done.
        """
        rows = self._sampled
        if rows is None or self._is_dirty or self._messages or self._kept or self._last_states:
            return False
        if self._step_sender is None:
            self._step_sender = self._new_step_sender(session)
        if self._step_sender is None or self._is_rest_awaited:
            return False
        deferred = None
        if self._wants_logprobs:
            # None for a set's first step, behind another set's
            if rows is not self._deferred[0] or self._deferred[1] is None:
                self._deferred = rows, self._logprobs.deferred_of(rows)
            deferred = self._deferred[1]
            if deferred is None and self._logprobs.shared_width(rows) != 0:
                return False
        found = self._step_sender.send(rows, self.completed_step, deferred)
        if not found:
            # made anew behind the next step: the columns may have grown
            self._step_sender = None
            return False
        self._sampled = None
        self._note_all_sent(self.completed_step, is_awaited=bool(found & AWAITED))
        if found & RECEIPTS:
            self._acknowledge(session.link.take_receipts())
        return True

    def _new_step_sender(self, session: Session[Receipt]) -> StepSender | None:
        """A sender of steps over the session's link; None if that is no local one."""
        route = session.route
        if not isinstance(route, LocalConnection):
            return None
        return StepSender(
            session.link,
            self._cursors,
            self._cursors.columns,
            self._tokens,
            route.send,
            self._possible_ends.columns,
            _LOGPROB_TOKEN_BUDGET if self._wants_logprobs else _TOKEN_BUDGET,
        )

    def take_acknowledgements(self) -> bool:
        """Take in acknowledgements; return True if there are any."""
        receipts = [] if self._session is None else self._session.link.take_receipts()
        self._acknowledge(receipts)
        return bool(receipts)

    def _acknowledge(self, receipts: Sequence[Receipt]) -> None:
        for receipt in receipts:
            if isinstance(receipt, Portion):
                self._cursors.acknowledge(receipt)
            elif receipt is not None:
                rows, ends = (u32(each).astype(np.int64) for each in (receipt.rows, receipt.ends))
                self._cursors.acknowledge_ends(rows, ends, receipt.life)

    def _has_news(self) -> bool:
        has_tokens = self._sampled is not None or self._is_dirty
        return has_tokens or bool(self._messages) or bool(self._kept)

    def _publish_some(self, session: Session[Receipt]) -> bool:
        if self._messages:
            self._publish_states(session)
        for _ in range(_MESSAGES_PER_TURN):
            if self._num_firm or not session.link.has_credit:
                return False
            is_more = self._publish_tokens(session)
            if self._last_states:
                self._close_sent_rows()
                self._publish_states(session)
            if not is_more:
                return bool(self._kept) and self._publish_kept(session)
        return session.link.has_credit

    def _count_queued(self, state: CoreToWorker, change: int) -> None:
        """Count a state that is queued (1), or is not any more (-1)."""
        if isinstance(state, Admitted):
            row = state.row
            if row >= len(self._num_queued):
                self._num_queued = np.pad(
                    self._num_queued, (0, max(row + 1 - len(self._num_queued), row))
                )
            self._num_queued[row] += change
        elif not isinstance(state, AdmissionRefused):  # its stream has no tokens left
            self._num_firm += change

    def _publish_states(self, session: Session[Receipt]) -> None:
        while self._messages and session.link.num_unacked < _MOST_UNACKED_STATES:
            if not self._acceptor.send(session, self._messages[0], None):
                return
            self._count_queued(self._messages.popleft(), -1)

    def _close_sent_rows(self) -> None:
        """Queue the last states of rows whose tokens are sent, and close these rows."""
        rows = np.fromiter(self._last_states, np.int64)
        lags = self._cursors.lags(rows, self._tokens.lengths(RowSet(rows)))
        for row in rows[~lags].tolist():
            self.enqueue(self._last_states[row])
            self.close(row)

    def _publish_kept(self, session: Session[Receipt]) -> bool:
        """Send one of the messages of kept answers; return True if there are more."""
        if self._messages or session.link.num_unacked >= _MOST_UNACKED_KEPT:
            return False
        if not self._acceptor.send(session, self._kept[0], None):
            return False
        self._kept.popleft()
        return bool(self._kept) and session.link.has_credit

    def _publish_tokens(self, session: Session[Receipt]) -> bool:
        """Send one message of tokens; return True if there are more that could be sent now."""
        budget = _LOGPROB_TOKEN_BUDGET if self._wants_logprobs else _TOKEN_BUDGET
        rows = self._take_dirty()
        if not len(rows):
            return False
        has_queued = has_others = False
        if self._messages:
            rows, has_queued = self._known(rows)
            if not len(rows):
                return False
        if self._wants_logprobs:
            rows, budget, has_others = self._of_one_kind(rows)
        has_others |= has_queued
        lengths = self._tokens.lengths(rows)
        portion = self._cursors.next_portion(rows, lengths, budget)
        is_all = portion.is_all and not has_others
        if len(portion.rows) and not self._send(session, portion, rows, is_all=is_all):
            return False
        if not portion.is_all:
            self._mark_dirty(rows.array[self._cursors.lags(rows.array, lengths)])
        return not is_all

    def _known(self, rows: RowSet) -> tuple[RowSet, bool]:
        """The rows that the worker knows, and whether other rows stay marked: their Admitted are
        still queued.
        """
        longest = len(self._num_queued)
        is_queued = self._num_queued.take(rows.array, mode="clip") > 0
        is_queued &= rows.array < longest
        if not is_queued.any():
            return rows, False
        self._mark_dirty(rows.array[is_queued])
        return RowSet(rows.array[~is_queued]), True

    def _of_one_kind(self, rows: RowSet) -> tuple[RowSet, int, bool]:
        """The rows for the next message, its budget in tokens, and whether other rows stay marked.

        Rows with very many log-probabilities per token are sent apart, in messages of a few tokens;
        otherwise every message would hold only a few.
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
        """Send a portion of the news of `rows`; return True if it was sent. If not, all of it stays
        new.

        is_all: nothing else is new.
        """
        step = self.completed_step if is_all else self.sent_step
        message = self._message(step, portion)
        if not self._acceptor.send(session, message, portion):
            self._put_back(portion, rows)
            return False
        if is_all:
            self._note_all_sent(step, is_awaited=message.is_awaited)
        else:
            self._is_rest_awaited = message.is_awaited
        return True

    def _note_all_sent(self, step: int, *, is_awaited: bool) -> None:
        """Everything up to `step` has been sent."""
        self.sent_step = step
        if is_awaited:
            assert self._reports is not None, "sent to a worker that has not attached"
            if self._awaited_step <= self._reports.step:
                self._reports.step = step - 1  # no report is due on the steps before it
            self._awaited_step, self._is_rest_awaited = step, False

    def _put_back(self, portion: Portion, rows: RowSet) -> None:
        """A portion of the news of `rows` was not sent."""
        self._cursors.rewind(portion)
        self._mark_dirty(rows.array)

    def _mark_dirty(self, rows: npt.NDArray[np.int64]) -> None:
        self._dirty[rows] = self._is_dirty = True

    def _take_dirty(self) -> RowSet:
        """Take the rows that may have new tokens; they are clean from here on."""
        rows, self._sampled = self._sampled, None
        if self._is_dirty:
            if rows is not None:
                self._dirty[rows.array] = True
            rows = RowSet(np.flatnonzero(self._dirty))
            self._dirty[:] = self._is_dirty = False
        return NO_ROWS if rows is None else rows

    def _message(self, step: int, portion: Portion) -> Step:
        rows = portion.rows
        counts = None if portion.is_one_each else portion.counts
        if counts is None and portion.is_all:
            token_ids = self._tokens.last(rows)
        else:
            token_ids = self._tokens.gather(rows, portion.starts, counts)
        logprobs = None
        if self._wants_logprobs:
            logprobs = self._logprobs.columns(rows, portion.starts, counts)
        is_awaited = self._is_rest_awaited or self._possible_ends.are_among(rows, counts, token_ids)
        return Step(
            step,
            pack_u32(rows.array),
            token_ids.astype(_U32, copy=False).tobytes(),
            b"" if counts is None else pack_u32(counts),
            b"" if counts is None else pack_u32(portion.starts),
            logprobs,
            is_awaited,
        )
