"""Steps of plain tokens are relayed in C (`step_relay.c`): taken from the core, counted, reported
and sent to the client in one call.

A relay takes a step that gives some of its streams plain tokens, one or several, which are due at
once and are all that the client is to be sent. It leaves any other message alone, which then goes
the usual way, with the same effect.

- What a relay relies on (rows, links, connections, readers) changes in no turn that is nothing but
  a relayed step. After any other turn `RelayMaker.find` tells whether it still holds.
- A relay is made once the same things were found after two turns, so streams that come and go cost
  nothing here.
- There are relays for one client that reads all streams, over a local connection, as the core has.
- Log-probabilities are relayed where each of the rows of the step before gets one token.
"""

from __future__ import annotations

from operator import is_
from typing import Any, NamedTuple

import numpy as np

from slipstream_ipc.columns import pack_u32
from slipstream_ipc.history.logprob_log import MAX_DEFERRED
from slipstream_ipc.messages.budgets import MESSAGE_BUDGET_BYTES
from slipstream_ipc.row_set import NO_ROWS, RowSet
from slipstream_ipc.telemetry.histogram import bounds
from slipstream_ipc.telemetry.timeline import RecentSpans
from slipstream_ipc.transport.local_socket import LocalConnection
from slipstream_worker._native import StepRelay
from slipstream_worker.clients.deltas import ENTRY_BYTES, bytes_of_token
from slipstream_worker.clients.latency import RequestCounters
from slipstream_worker.clients.readers import StreamReaders
from slipstream_worker.core_link import MAY_OWE, CoreLink
from slipstream_worker.streams.stream import WorkerStreamTable
from slipstream_worker.streams.stream_columns import StreamColumns

__all__ = ["TAKEN", "UNREPORTED", "UNSENT", "RelayMaker", "StepRelay"]

# what becomes of a message: 0 if it was not taken, else TAKEN and what is still to be done
TAKEN, UNREPORTED, UNSENT = 1, 2, 4

_UNBOUNDED = 2**62


class RelayBasis(NamedTuple):
    """The links, connections and columns that a relay works on."""

    core: Any  # the link; `from_core`: its connection
    from_core: LocalConnection
    client: Any  # the link; `to_client`: its connection
    to_client: LocalConnection
    sending: Any  # [n] rows of the worker that the client is sent
    limit: int | None  # of unacknowledged messages to the client
    loops: Any
    pages: Any
    assigned: Any  # see `WorkerStreamTable`
    rows: RowSet  # of the latest step, if each got a token with log-probabilities
    deferred: Any


class RelayMaker:
    """Keeps the relay for the rows of the latest step."""

    def __init__(
        self,
        core: CoreLink,
        streams: WorkerStreamTable,
        columns: StreamColumns,
        readers: StreamReaders,
        counters: RequestCounters,
        recent: RecentSpans,
    ) -> None:
        """recent: of the loop's turns that handled a step."""
        self._recent = recent
        self._core = core
        self._streams = streams
        self._columns = columns
        self._readers = readers
        self._counters = counters
        self._relay: StepRelay | None = None
        self._is_settled = False  # whether `_relay` is what there is to be had on this basis
        self._basis: RelayBasis | None = None  # what was found last

    def find(self) -> StepRelay | None:
        """The relay for steps like the latest one; None if there can be none now."""
        basis = self._found()
        if basis is None:
            return None
        before, self._basis = self._basis, basis
        if before is None or not all(map(is_, basis._replace(pages=before.pages), before)):
            self._relay, self._is_settled = None, False
        # found twice: streams that come and go in each step pay for none (decision 010)
        elif not self._is_settled or basis.pages is not before.pages:
            self._relay, self._is_settled = self._made(basis), True
        return self._relay

    def _found(self) -> RelayBasis | None:
        """Links, connections, columns and rows as they are now; None if no step can be relayed."""
        core_end, port, columns = self._core.idle_link, self._readers.only_port, self._columns
        if core_end is None or port is None or columns.has_detectors:
            return None
        client_end, pages = port.idle_link, columns.tokens.pages
        if client_end is None or pages is None:
            return None
        core, from_core = core_end
        client, to_client, sending, limit = client_end
        rows = self._streams.latest_rows[1] if columns.has_logprobs else NO_ROWS
        deferred = columns.logprobs.deferred_of(rows)
        return RelayBasis(
            core,
            from_core,
            client,
            to_client,
            sending,
            limit,
            columns.loops,
            pages,
            self._streams.assigned,
            NO_ROWS if deferred is None else rows,
            deferred,
        )

    def _made(self, basis: RelayBasis) -> StepRelay | None:
        """The relay on this basis; None if the client is sent no row of the core's, or if rows with
        log-probabilities are not all the client's, or have different numbers of them.
        """
        columns, counters = self._columns, self._counters
        sending, deferred = basis.sending, basis.deferred
        core_rows, rows = self._streams.core_rows_of(sending)
        width = 0
        if columns.has_logprobs:
            widths = columns.widths.take(rows)
            width = int(widths.max(initial=0))
            if (widths != width).any() or (width and deferred is None):
                return None
        if width:
            packed, rows = self._streams.latest_rows[0], basis.rows.array
            if not np.isin(rows, sending).all():
                return None
        else:
            packed = pack_u32(core_rows)
        if not len(rows):
            return None
        return StepRelay(
            basis.core,
            basis.client,
            basis.loops,
            basis.pages,
            columns.tokens.table,
            packed,
            (rows, np.argsort(rows), sending[~np.isin(sending, rows)], columns.prompt_lens),
            basis.from_core.send,
            basis.to_client.send,
            [],
            (bounds, counters.itl_s.buckets, counters.itl_s.total, counters.sent),
            self._recent.columns,
            _UNBOUNDED if basis.limit is None else basis.limit,
            MAY_OWE,
            basis.from_core,
            (width, deferred, MAX_DEFERRED),
            (ENTRY_BYTES, bytes_of_token(columns), MESSAGE_BUDGET_BYTES),
        )
