"""The worker's end of the hop to its core.

Owns: the attach to the core, the states that wait for credit, the report that is due. Does not
know: what streams are; the worker states them anew after each attach.

Rules:
- States leave in the order they were made; registrations that share a prompt leave together.
- A report says how far everything has been checked; while it waits for credit, a later one takes
  its place and adds its rows.
- One message answers a step: its report, which acknowledges it too.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Container, Iterator
from itertools import islice

import zmq

from slipstream_ipc.columns import pack_u32
from slipstream_ipc.messages import Admit, CoreToWorker, Report, WorkerToCore
from slipstream_ipc.transport.codec import worker_codec
from slipstream_ipc.transport.dealer import Dealer
from slipstream_ipc.transport.shared_prompts import joined


class CoreLink:
    """What goes to the core and comes from it."""

    def __init__(
        self,
        context: zmq.Context[zmq.Socket[bytes]],
        address: str,
        poller: zmq.Poller,
        *,
        identity: bytes,
        incarnation: int,
        now: float,
    ) -> None:
        self._attacher: Dealer[WorkerToCore, CoreToWorker, None] = Dealer(
            context,
            address,
            worker_codec(),
            poller,
            identity=identity,
            incarnation=incarnation,
            now=now,
        )
        self._states: deque[WorkerToCore] = deque()
        self._ended_rows: list[int] = []
        self._ended_lens: list[int] = []
        self._checked_step = 0
        self._report_due = False

    @property
    def epoch(self) -> int:
        """The current attach."""
        return self._attacher.epoch

    def is_among(self, arrived: Container[object]) -> bool:
        """Whether a poller that has said this has something for `receive`."""
        return self._attacher.is_among(arrived)

    def receive(self, now: float) -> Iterator[CoreToWorker]:
        """What has arrived, the Welcome of each attach included; `report` acknowledges it."""
        return self._attacher.receive(now, acknowledges=False)

    def attach(self, now: float) -> None:
        """Begin another attach."""
        self._attacher.attach(now)

    @property
    def is_fresh(self) -> bool:
        """Whether the next attach asks for everything to be replayed."""
        return self._attacher.fresh

    @is_fresh.setter
    def is_fresh(self, value: bool) -> None:
        self._attacher.fresh = value

    def restart(self) -> None:
        """After an attach: nothing that waited means anything."""
        self._states.clear()
        self._ended_rows.clear()
        self._ended_lens.clear()
        self._report_due = False
        self._checked_step = 0

    def enqueue(self, body: WorkerToCore) -> None:
        """Queue a state."""
        self._states.append(body)

    def ended(self, core_row: int, num_tokens: int) -> None:
        """The next report says that this row ends."""
        self._ended_rows.append(core_row)
        self._ended_lens.append(num_tokens)
        self._report_due = True

    def checked(self, step: int) -> None:
        """Everything up to `step` has been checked."""
        self._checked_step = step
        self._report_due = True

    def report(self) -> None:
        """Send the report that is due, if credit allows it, and the acknowledgement: in one."""
        if self._report_due:
            self._attacher.take_receipts()
            core_rows, lens = self._ended_rows, self._ended_lens
            report = Report(self._checked_step)
            if core_rows:
                report = Report(self._checked_step, pack_u32(core_rows), pack_u32(lens))
            if self._attacher.send(report, None):
                core_rows.clear()
                lens.clear()
                self._report_due = False
        self._attacher.acknowledge()

    def flush(self) -> None:
        """Send what credit allows, the report first: the device may be waiting for it."""
        if self._report_due:
            self.report()
        if not self._states:
            return
        self._attacher.take_receipts()
        while self._states and self._attacher.has_credit:
            body, num = self._states[0], 1
            if isinstance(body, Admit):
                body, num = joined(body, islice(self._states, 1, None))
            if not self._attacher.send(body, None):
                return
            for _ in range(num):
                self._states.popleft()

    def beat(self, now: float) -> None:
        """Look for signs of life."""
        self._attacher.beat(now)

    def close(self) -> None:
        """Leave."""
        self._attacher.close()
