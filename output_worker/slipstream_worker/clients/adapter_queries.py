"""Clients' changes of adapters, on their way to the core and back.

- A change is asked of each core that the worker attaches to until it is answered: the core does one
  of the same operation once. A client that attaches anew asks again, as for every query.
- A client with a key of its own may use what is served and not change it: its key names it among
  the requests, not among those who run the server.
"""

from __future__ import annotations

from slipstream_ipc.messages import (
    WANTS_ADAPTERS,
    AdapterChange,
    AdapterChanged,
    AdapterList,
    AdapterOutcome,
    AdapterRecords,
    AdapterRef,
    AreAdaptersKnown,
    ChangeAdapter,
    Fault,
)
from slipstream_worker.clients.readers import StreamReaders
from slipstream_worker.core_link import CoreLink

_MAX_WAITING = 64  # changes that are not answered; further ones are refused


class AdapterQueries:
    """The changes that are not answered yet."""

    def __init__(self, core: CoreLink, readers: StreamReaders) -> None:
        self._core = core
        self._readers = readers
        self._waiting: dict[int, tuple[bytes, ChangeAdapter]] = {}  # with their clients
        self._num_asked = 0
        self._number = 0  # of the last change
        self._records: AdapterRecords = ()
        # clients that have not said that they know of it; None: the core is told, or does not ask
        self._unaware: set[bytes] | None = None

    def ask(self, client: bytes, change: ChangeAdapter, *, has_own_key: bool) -> None:
        """A client asks for a change."""
        if has_own_key:
            why = "adapters are not changed by clients with keys of their own, only by fronts"
            refusal = AdapterChanged(change.number, Fault("bad_request", why), "forbidden")
            self._readers.port(client).enqueue(refusal)
            return
        if len(self._waiting) >= _MAX_WAITING:
            fault = Fault("overloaded", f"{_MAX_WAITING} changes of adapters are waiting already")
            self._readers.port(client).enqueue(AdapterChanged(change.number, fault))
            return
        self._num_asked += 1
        self._waiting[self._num_asked] = client, change
        self._send(self._num_asked, change)

    def attached(self) -> None:
        """Another attach to the core begins: ask again."""
        self._unaware, self._records = None, ()
        for number, (_, change) in self._waiting.items():
            self._send(number, change)

    def answered(self, outcome: AdapterOutcome) -> None:
        """The core has made a change, or refused it."""
        client, change = self._waiting.pop(outcome.number, (b"", None))
        if change is not None and self._readers.is_here(client):
            self._readers.port(client).enqueue(
                AdapterChanged(
                    change.number,
                    outcome.fault,
                    outcome.why,
                    outcome.num_streams,
                    outcome.warning,
                    outcome.digest,
                )
            )

    def welcomed(self, client: bytes, served: tuple[AdapterRef, ...]) -> None:
        """A client that has been welcomed may want to know what was changed."""
        port = self._readers.port(client)
        if self._records and port.session.wants & WANTS_ADAPTERS:
            port.enqueue(AdapterList(served, self._number, self._records))

    def withdraw(self, client: bytes) -> None:
        """Answer a client no more: it asks again, or has left. Its Welcome tells it of changes."""
        if self._unaware is not None:
            self._unaware.discard(client)
        for number in [number for number, (its, _) in self._waiting.items() if its == client]:
            del self._waiting[number]

    def tell(
        self,
        served: tuple[AdapterRef, ...],
        number: int | None = None,
        records: AdapterRecords = (),
    ) -> None:
        """Tell the clients that want to know what is served from now on. number: of the change, of
        which the core is told when they know; None: it is not waiting.
        """
        told, self._records = set(), records
        self._number = self._number if number is None else number
        for port in self._readers.ports:
            if port.session.is_open and port.session.wants & WANTS_ADAPTERS:
                port.enqueue(AdapterList(served, self._number, records))
                told.add(port.session.identity)
        self._unaware = None if number is None else told

    def known(self, client: bytes, number: int) -> None:
        """A client knows of the change of this number."""
        if self._unaware is not None and number == self._number:
            self._unaware.discard(client)

    def flush(self) -> None:
        """Tell the core that all know of the last change, once. Call it in each turn."""
        if self._unaware is not None and not any(map(self._readers.is_here, self._unaware)):
            self._unaware = None
            self._core.enqueue(AreAdaptersKnown(self._number))

    @property
    def has_to_tell(self) -> bool:
        """True if `flush` may have something to do."""
        return self._unaware is not None

    def _send(self, number: int, asked: ChangeAdapter) -> None:
        change = AdapterChange(
            number,
            asked.operation,
            asked.name,
            asked.path,
            asked.load_inplace,
            asked.stage,
            asked.version,
            asked.digest,
        )
        self._core.enqueue(change)
