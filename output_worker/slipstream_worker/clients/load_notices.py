"""Tells clients that route among replicas how busy this one is, and whether it serves.

A client that asked hears it when it attaches, when the state changes, when numbers have changed by
a twentieth and 0.1 s have passed, and every second. The messages take no credit: one that cannot be
sent is left out.
"""

from __future__ import annotations

from msgspec import structs

from slipstream_ipc.crash_note import suspect_digests
from slipstream_ipc.messages import WANTS_LOAD, Gauge, Load, ReplicaState
from slipstream_ipc.transport.router import Session
from slipstream_worker.clients.ports import FrontAcceptor, Receipt

_LEAST_S = 0.1  # between two messages of the same state
_MOST_S = 1.0
_CHANGE = 0.05


class LoadNotices:
    """The latest load, and the sessions that want it."""

    def __init__(self, front: FrontAcceptor) -> None:
        self._front = front
        self.sessions: list[Session[Receipt]] = []  # that asked
        self._load = Load()
        self._drains_until: float | None = None
        self._core_epoch: int | None = None
        self._has_ended = False  # the core, since the last attach
        self._died_within = False  # and of its own doing
        self._suspects: bytes | None = None  # of a core that died within; see `Load`
        self._sent = Load()
        self._sent_at = 0.0
        self._is_due = False

    def welcomed(self, session: Session[Receipt]) -> None:
        """A session begins."""
        if session.wants & WANTS_LOAD:
            self.sessions.append(session)
            self._is_due = True

    def measured(self, gauge: Gauge) -> None:
        """The core's numbers."""
        numbers = {name: getattr(gauge, name) for name in gauge.__struct_fields__}
        self._load = structs.replace(self._load, **numbers)

    def core_ended(self, *, died_within: bool, suspects: tuple[bytes, ...] | None = None) -> None:
        """The core has ended; died_within: of its own doing. Its link breaks before or after. It is
        told even where the next core has attached by the next `flush`. suspects: ids of the streams
        that it was computing; None: unknown.
        """
        self._has_ended = True
        self._died_within = died_within
        self._suspects = None if suspects is None else suspect_digests(suspects)

    def begin_drain(self, end_at: float) -> None:
        """Report a drain: nothing new is accepted, and running streams are cut off at `end_at`
        (monotonic).
        """
        self._drains_until = end_at

    def flush(self, now: float, *, core_epoch: int | None) -> None:
        """Send what is due. Call it regularly. core_epoch: of the attach to the core; None while
        the core is away.
        """
        if core_epoch != self._core_epoch:
            self._core_epoch = None
            if core_epoch is not None:
                away = self._current(now)
                if self._has_ended and _state(away) != _state(self._sent):
                    self._send(away, now)
                self._died_within = self._has_ended = False
            self._core_epoch = core_epoch
        load = self._current(now)
        since = now - self._sent_at
        is_due = self._is_due or since >= _MOST_S or _state(load) != _state(self._sent)
        if is_due or (since >= _LEAST_S and _differs(load, self._sent)):
            self._send(load, now)

    def _send(self, load: Load, now: float) -> None:
        if not self.sessions:
            return
        self.sessions = [session for session in self.sessions if session.is_open]
        for session in self.sessions:
            self._front.send_unnumbered(session, load)
        self._sent, self._sent_at, self._is_due = load, now, False

    def _current(self, now: float) -> Load:
        is_away = self._core_epoch is None
        state: ReplicaState = "core_away" if is_away else "serving"
        within, within_s = is_away and self._died_within, 0.0
        suspects = self._suspects if within else None
        if self._drains_until is not None:
            state, within_s = "draining", max(0.0, self._drains_until - now)
        return structs.replace(
            self._load, state=state, within=within, within_s=within_s, suspects=suspects
        )


def _state(load: Load) -> tuple[ReplicaState, bool]:
    return load.state, load.within


def _differs(load: Load, sent: Load) -> bool:
    """True if a number that a router goes by differs by more than a twentieth."""
    return any(
        abs(one - other) > _CHANGE * other
        for one, other in (
            (load.running, sent.running),
            (load.waiting, sent.waiting),
            (load.queued_tokens, sent.queued_tokens),
            (load.free_blocks, sent.free_blocks),
        )
    )
