"""When clients hear of a replica's load."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import pytest

from slipstream_ipc.crash_note import suspect_digests
from slipstream_ipc.messages import WANTS_LOAD, WANTS_MEMBERS, Gauge, Load
from slipstream_worker.clients.load_notices import LoadNotices


@dataclass(eq=False)
class Peer:
    wants: int = WANTS_LOAD
    is_open: bool = True
    heard: list[Load] = field(default_factory=list)


class Front:
    def send_unnumbered(self, session: Peer, load: Load) -> bool:
        session.heard.append(load)
        return True


def gauge(running: int) -> Gauge:
    return Gauge(running, 1, 200, 50, 100, 3.5, 0.01, 64)


@pytest.fixture
def notices() -> Any:
    front: Any = Front()
    return LoadNotices(front)


@pytest.fixture
def peer(notices: Any) -> Peer:
    peer = Peer()
    notices.measured(gauge(100))
    notices.welcomed(peer)
    notices.flush(1.0, core_epoch=1)
    return peer


def test_a_client_hears_the_numbers_when_it_attaches(peer: Peer) -> None:
    [load] = peer.heard
    assert load == Load("serving", False, 0.0, 100, 1, 200, 50, 100, 3.5, 0.01, 64)


def test_a_client_that_did_not_ask_hears_nothing(notices: Any) -> None:
    peers = [Peer(0), Peer(WANTS_MEMBERS)]
    for peer in peers:
        notices.welcomed(peer)
    notices.flush(1.0, core_epoch=None)
    assert [peer.heard for peer in peers] == [[], []]


@pytest.mark.parametrize(
    ("running", "after_s", "num"),
    [
        (106, 0.11, 2),
        (106, 0.09, 1),
        (104, 0.11, 1),
        (104, 1.0, 2),
        (100, 1.0, 2),
    ],
)
def test_numbers_are_told_when_they_differ(notices, peer, running, after_s, num) -> None:
    notices.measured(gauge(running))
    notices.flush(1.0 + after_s, core_epoch=1)
    assert len(peer.heard) == num
    assert peer.heard[-1].running == (running if num == 2 else 100)


def test_a_state_is_told_at_once(notices: Any, peer: Peer) -> None:
    notices.flush(1.001, core_epoch=None)
    notices.flush(1.002, core_epoch=1)
    notices.begin_drain(31.0)
    notices.flush(1.003, core_epoch=None)
    assert [load.state for load in peer.heard] == ["serving", "core_away", "serving", "draining"]
    assert peer.heard[-1].within_s == pytest.approx(29.997)


@pytest.mark.parametrize("is_told_first", [False, True])
def test_how_the_core_ended_is_told_while_it_is_away(notices, peer, is_told_first) -> None:
    if not is_told_first:
        notices.flush(1.01, core_epoch=None)
    notices.core_ended(died_within=True)
    notices.flush(1.02, core_epoch=1 if is_told_first else None)
    notices.flush(1.03, core_epoch=None)
    assert (peer.heard[-1].state, peer.heard[-1].within) == ("core_away", True)
    notices.flush(1.04, core_epoch=1)
    notices.flush(1.05, core_epoch=None)  # its link breaks, and it lives
    assert [load.within for load in peer.heard[-2:]] == [False, False]
    assert peer.heard[-1].state == "core_away"


@pytest.mark.parametrize("is_within", [False, True])
@pytest.mark.parametrize("is_seen_away", [False, True])
def test_an_end_is_told_where_the_next_core_is_there_at_once(
    notices: Any, peer: Peer, is_within: bool, is_seen_away: bool
) -> None:
    """As it is for a worker that has lacked a CPU meanwhile."""
    if is_seen_away:  # its link breaks, and nobody knows why yet
        notices.flush(1.01, core_epoch=None)
    notices.core_ended(died_within=is_within)
    notices.flush(1.02, core_epoch=2)
    notices.flush(1.03, core_epoch=2)
    *before, away, serving = peer.heard
    assert (away.state, away.within) == ("core_away", is_within)
    assert (serving.state, serving.within) == ("serving", False)
    assert len(before) == 1 + (is_seen_away and is_within)


def test_streams_that_the_core_was_computing_are_named_by_digests(notices, peer) -> None:
    stream_ids = (b"1" * 16, b"2" * 16)
    notices.core_ended(died_within=True, suspects=stream_ids)
    notices.flush(1.02, core_epoch=None)
    assert peer.heard[-1].suspects == suspect_digests(stream_ids)
    assert len(peer.heard[-1].suspects) == 16
    assert stream_ids[0] not in peer.heard[-1].suspects
    notices.flush(1.03, core_epoch=1)
    notices.flush(1.04, core_epoch=None)
    assert [load.suspects for load in peer.heard[-2:]] == [None, None]


def test_a_session_that_has_ended_is_left_out(notices: Any, peer: Peer) -> None:
    peer.is_open = False
    notices.flush(9.0, core_epoch=1)
    assert len(peer.heard) == 1
