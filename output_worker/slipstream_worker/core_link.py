"""The worker's connection to its core: the attach, queued state messages, and the next report.

After each attach the caller queues positions and registrations again.

- State messages leave in order, and leave some credit to reports; registrations that share a prompt
  leave in one message. What may wait leaves behind them.
- A report says up to which step all tokens have been checked. While it waits for credit, a later
  one replaces it and adds its rows.
- A step is answered with a single message: its report, which also acknowledges it. One whose report
  is not awaited, and in which nothing ended, is acknowledged together with later ones.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Container, Iterator
from itertools import islice

import zmq

from slipstream_ipc.columns import pack_u32
from slipstream_ipc.messages import Admit, CoreToWorker, Report, WorkerToCore
from slipstream_ipc.transport.codec import worker_codec
from slipstream_ipc.transport.dealer import Dealer, LinkOptions
from slipstream_ipc.transport.link import WINDOW, Link
from slipstream_ipc.transport.local_socket import LocalConnection
from slipstream_ipc.transport.shared_prompts import joined

MAY_OWE = 7  # steps that may stay unacknowledged until the next beat
_MOST_UNACKED_STATES = WINDOW - 2  # messages, from which on states wait: reports need credit
_MOST_UNACKED_BEHIND = WINDOW // 4  # messages, from which on what may wait is not sent


class CoreLink:
    """Sends messages to the core and receives the core's."""

    def __init__(
        self,
        context: zmq.Context[zmq.Socket[bytes]],
        address: str,
        poller: zmq.Poller,
        *,
        identity: bytes,
        incarnation: int,
        now: float,
        wants: int = 0,
    ) -> None:
        self._dealer: Dealer[WorkerToCore, CoreToWorker, None] = Dealer(
            context,
            address,
            worker_codec(),
            poller,
            identity=identity,
            incarnation=incarnation,
            now=now,
            options=LinkOptions(wants=wants),
        )
        self._messages: deque[WorkerToCore] = deque()
        self._ended_rows: list[int] = []
        self._ended_lens: list[int] = []
        self._checked_step = 0
        self._report_due = False
        self._may_owe = MAY_OWE

    @property
    def epoch(self) -> int:
        """The epoch of the current attach."""
        return self._dealer.epoch

    @property
    def idle_link(self) -> tuple[Link[None], LocalConnection] | None:
        """The link and the local connection to the core, while nothing waits to be sent there."""
        is_quiet = not (self._messages or self._report_due)
        return self._dealer.local_end if is_quiet else None

    @property
    def is_attached(self) -> bool:
        """True if the core is attached, as far as is known."""
        return self._dealer.is_attached

    def is_among(self, arrived: Container[object]) -> bool:
        """True if a poller's result includes one of this link's sockets."""
        return self._dealer.is_among(arrived)

    def receive(self, now: float) -> Iterator[CoreToWorker]:
        """The messages that have arrived, each attach's Welcome included; `report` acknowledges
        them.
        """
        return self._dealer.receive(now, acknowledges=False)

    def attach(self, now: float) -> None:
        """Start a new attach."""
        self._dealer.attach(now)

    @property
    def is_fresh(self) -> bool:
        """True if the next attach asks the core to replay everything."""
        return self._dealer.fresh

    @is_fresh.setter
    def is_fresh(self, value: bool) -> None:
        self._dealer.fresh = value

    def restart(self) -> None:
        """Drop what was queued for the previous attach."""
        self._messages.clear()
        self._ended_rows.clear()
        self._ended_lens.clear()
        self._report_due = False
        self._checked_step = 0

    def enqueue(self, body: WorkerToCore) -> None:
        """Queue a state message."""
        self._messages.append(body)

    def ended(self, core_row: int, num_tokens: int) -> None:
        """Add the end of this row, after `num_tokens`, to the next report."""
        self._ended_rows.append(core_row)
        self._ended_lens.append(num_tokens)
        self._report_due = True

    def checked(self, step: int, *, is_awaited: bool) -> None:
        """Everything up to `step` has been checked; a report is due if it is awaited."""
        self._checked_step = step
        self._report_due |= is_awaited

    def acknowledge_now(self) -> None:
        """Acknowledge everything that has arrived with the next `report`."""
        self._may_owe = 0

    def report(self) -> None:
        """Send the report that is due if credit allows it, else the acknowledgement alone."""
        if self._report_due:
            self._dealer.take_receipts()
            core_rows, lens = self._ended_rows, self._ended_lens
            report = Report(self._checked_step)
            if core_rows:
                report = Report(self._checked_step, pack_u32(core_rows), pack_u32(lens))
            if self._dealer.send(report, None):
                core_rows.clear()
                lens.clear()
                self._report_due = False
        self._dealer.acknowledge(self._may_owe)
        self._may_owe = MAY_OWE

    def flush(self) -> None:
        """Send what credit allows, the report first: the device may be waiting for it."""
        if self._report_due:
            self.report()
        if not self._messages:
            return
        self._dealer.take_receipts()
        dealer = self._dealer
        while self._messages and dealer.has_credit and dealer.num_unacked < _MOST_UNACKED_STATES:
            body, num = self._messages[0], 1
            if isinstance(body, Admit):
                body, num = joined(body, islice(self._messages, 1, None))
            if not dealer.send(body, None):
                return
            for _ in range(num):
                self._messages.popleft()

    @property
    def is_idle(self) -> bool:
        """True if no state waits and there is credit for many."""
        is_free = self._dealer.has_credit and self._dealer.num_unacked < _MOST_UNACKED_BEHIND
        return is_free and not self._messages

    def send_last(self, body: WorkerToCore) -> bool:
        """Send a message that yields to states; False if it cannot be sent now."""
        self._dealer.take_receipts()
        return self.is_idle and self._dealer.send(body, None)

    def beat(self, now: float) -> None:
        """Send pings and check for timeouts. Call it regularly."""
        self._dealer.beat(now)

    def close(self) -> None:
        """Close the connection."""
        self._dealer.close()
