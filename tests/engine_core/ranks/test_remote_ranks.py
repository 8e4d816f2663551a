"""Ranks on other machines: who is let in, the way of plans, and how a lost rank is noticed."""

from __future__ import annotations

import contextlib
import os
import queue
import secrets
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import NamedTuple

import msgspec
import numpy as np
import pytest
import zmq
from msgspec.structs import replace
from tests.helpers.patience import PATIENCE_S, Patience
from tests.helpers.ports import free_port
from tests.helpers.processes import started
from tests.helpers.sampling_plans import Row, plan_of

from slipstream.cli.keys import add_front, add_rank, make_folder
from slipstream_core.config import CoreConfig, NodesConfig
from slipstream_core.load_error import RanksMissingError
from slipstream_core.model.fingerprint import fingerprint_of_files
from slipstream_core.ranks import remote_ranks
from slipstream_core.ranks.bus import NUM_SLOTS, BusStalledError
from slipstream_core.ranks.leader_link import LeaderLink, RankRefusedError
from slipstream_core.ranks.rank_messages import PLAN_NUMBER, Assign, Join, RankFailed, encode
from slipstream_core.ranks.remote_ranks import RemoteRanks
from slipstream_core.ranks.watch import RankEnd
from slipstream_core.step.buffer import PlanBuffer, PlanBytesError, packed_bytes
from slipstream_core.step.plan import StepPlan
from slipstream_ipc.errors import BadRequest
from slipstream_ipc.process import installed_version
from slipstream_ipc.transport.curve import load_rank_keys, secure_client

MEETING = "127.0.0.1", 1
A_RANK = """
import sys
import msgspec
from slipstream_core.config import NodesConfig
from slipstream_core.ranks.leader_link import LeaderLink
from slipstream_core.ranks.rank_messages import Join

nodes, join = sys.argv[1:]
link = LeaderLink(msgspec.json.decode(nodes, type=NodesConfig))
link.join(msgspec.json.decode(join, type=Join), lambda: None)
sys.stdin.read()
"""


class Core(NamedTuple):
    """The core's end for two ranks on each of two machines."""

    ranks: RemoteRanks
    config: CoreConfig
    nodes: NodesConfig  # as the other machine has it
    ends: queue.Queue[RankEnd]

    def gather(self) -> None:
        self.ranks.gather(self.config, MEETING)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    (folder / "config.json").write_text("{}")
    return folder


@pytest.fixture(scope="module")
def keys(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("keys")
    make_folder(folder)
    add_rank(folder, "machine-1")
    return folder


@pytest.fixture
def core(model: Path, keys: Path) -> Iterator[Core]:
    made = core_of(model, keys)
    made.ranks.listen()
    yield made
    made.ranks.close()
    made.ranks.close()  # idempotent
    assert made.ends.empty(), "each end was waited for"


def core_of(model: Path, keys: Path | None, **options: float) -> Core:
    nodes = NodesConfig(
        num=2,
        address=f"tcp://127.0.0.1:{free_port()}",
        keys=None if keys is None else str(keys),
        insecure=keys is None,
        **options,  # type: ignore[arg-type]
    )
    config = CoreConfig(model=str(model), address="unused", tensor_parallel_size=4, nodes=nodes)
    ends: queue.Queue[RankEnd] = queue.Queue()
    return Core(RemoteRanks(config, ends.put), config, nodes, ends)


def join_of(model: Path, index: int) -> Join:
    files = fingerprint_of_files(str(model))
    return Join(installed_version(), index, 4, 2, os.getpid(), files)


class Ranks:
    """The ends of ranks 2 and 3, which join in threads."""

    def __init__(self, core: Core) -> None:
        self.links = [LeaderLink(core.nodes) for _ in range(2)]
        self.assigned: list[Assign] = []
        joins = [join_of(Path(core.config.model), 2 + at) for at in range(2)]
        self._threads = [
            threading.Thread(target=self._join, args=pair)
            for pair in zip(self.links, joins, strict=True)
        ]
        for thread in self._threads:
            thread.start()

    def _join(self, link: LeaderLink, join: Join) -> None:
        self.assigned.append(link.join(join, lambda: None))

    def joined(self) -> list[LeaderLink]:
        for thread in self._threads:
            thread.join(PATIENCE_S)
            assert not thread.is_alive()
        return self.links

    def close(self) -> None:
        for link in self.links:
            link.close()


@pytest.fixture
def links(core: Core) -> Iterator[list[LeaderLink]]:
    ranks = Ranks(core)
    core.gather()
    yield ranks.joined()
    core.ranks.close()  # or it would hear of their ends
    ranks.close()


def end_looks(ranks: RemoteRanks) -> None:
    """Leave what comes unread until the test, or the end of a connection, has it read."""
    assert ranks._look is not None
    ranks._is_closed.set()
    ranks._look.join()
    ranks._is_closed.clear()


def plan(step: int, rows: int = 1) -> StepPlan:
    return replace(plan_of([Row()] * rows), step=step)


def packed(plan: StepPlan) -> memoryview:
    buffer = memoryview(bytearray(packed_bytes(plan)))
    PlanBuffer(buffer).pack(plan)
    return buffer


def test_every_rank_takes_every_plan_in_order(core: Core, links: list[LeaderLink]) -> None:
    large = plan(0, rows=2000)
    assert packed_bytes(large) > 1 << 16, "larger than what a link has room for at first"
    for step in range(3 * NUM_SLOTS):
        written = plan(step, rows=1 + step % 5) if step % 3 else replace(large, step=step)
        core.ranks.put(packed(written), timeout_s=PATIENCE_S)
        for link in links:
            taken = link.take()
            assert (taken.step, taken.num_requests) == (step, written.num_requests)
            np.testing.assert_array_equal(taken.table_blocks, written.table_blocks)
            link.release()


def test_a_rank_that_waits_is_woken_and_sees_each_plan_once(
    core: Core, links: list[LeaderLink]
) -> None:
    assert not links[0].any_waiting
    core.ranks.put(packed(plan(0)), timeout_s=PATIENCE_S)
    poll = zmq.Poller()
    poll.register(links[0].fileno(), zmq.POLLIN)
    patience = Patience()
    while not links[0].any_waiting:
        poll.poll(patience.left_s * 1e3)
        patience.check()
    links[0].take()
    assert not links[0].any_waiting


def test_none_is_sent_more_than_it_has_room_for(core: Core, links: list[LeaderLink]) -> None:
    for step in range(NUM_SLOTS):
        core.ranks.put(packed(plan(step)), timeout_s=0)
    with pytest.raises(BusStalledError):
        core.ranks.put(packed(plan(NUM_SLOTS)), timeout_s=0.01)
    for link in links:
        link.take()
        link.release()
    core.ranks.put(packed(plan(NUM_SLOTS)), timeout_s=PATIENCE_S)
    assert [link.take().step for link in links] == [1, 1]


def test_plans_stay_as_they_are_until_they_are_released(
    core: Core, links: list[LeaderLink]
) -> None:
    for step in range(NUM_SLOTS):
        core.ranks.put(packed(plan(step, rows=1 + step)), timeout_s=0)
    taken = [links[0].take() for _ in range(NUM_SLOTS)]
    assert [(each.step, each.num_requests) for each in taken] == [
        (step, 1 + step) for step in range(NUM_SLOTS)
    ]


def test_a_plan_that_is_missing_is_noticed(core: Core, links: list[LeaderLink]) -> None:
    core.ranks._num_sent = 1
    core.ranks.put(packed(plan(1)), timeout_s=0)
    with pytest.raises(PlanBytesError, match="plan 1 came where plan 0 was due"):
        links[0].take()


def test_ranks_are_told_what_the_core_is_set_to(core: Core) -> None:
    ranks = Ranks(core)
    core.gather()
    ranks.joined()
    assert ranks.assigned == [Assign(core.config, MEETING)] * 2
    core.ranks.close()
    ranks.close()


# ---- who is let in -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"version": "0.0.1"}, r"its version is 0\.0\.1, the core's"),
        ({"size": 2}, "it is one of 2 ranks on 2 machines, the core of 4 on 2"),
        ({"index": 1}, "rank 1 is not on another machine"),
        ({"index": 4}, "rank 4 is not on another machine"),
        ({"fingerprint": bytes(16)}, "the files of its model are not those of the core's"),
    ],
)
def test_a_rank_that_does_not_fit_is_told_why(
    core: Core, model: Path, change: dict[str, object], why: str
) -> None:
    link = LeaderLink(core.nodes)
    with pytest.raises(RankRefusedError, match=why):
        link.join(replace(join_of(model, 2), **change), lambda: None)
    link.close()


def test_a_core_without_the_models_files_lets_nothing_in(core: Core, tmp_path: Path) -> None:
    config = replace(core.config, model=str(tmp_path / "not-there-yet"))
    ranks = RemoteRanks(config, print)
    missing = r"its files are not on this machine; .*hf download"
    with pytest.raises(RanksMissingError, match=missing):
        ranks.listen()
    ranks.close()


def test_the_second_process_of_a_rank_has_the_place_once_the_first_is_gone(
    core: Core, model: Path
) -> None:
    first, turns = LeaderLink(core.nodes), threading.Event()
    second, third = LeaderLink(core.nodes), LeaderLink(core.nodes)
    told: list[Assign] = []

    def join(link: LeaderLink, index: int, at_turn: threading.Event) -> None:
        told.append(link.join(join_of(model, index), at_turn.set))

    first._socket.send(encode(join_of(model, 2)))
    patience = Patience()
    while core.ranks._ranks[0].fd < 0:
        patience.check()
        core.ranks._wait_for_input()
    joining = [
        threading.Thread(target=join, args=(second, 2, turns)),
        threading.Thread(target=join, args=(third, 3, threading.Event())),
    ]
    for thread in joining:
        thread.start()
    while core.ranks._refused == "":
        patience.check()
        core.ranks._wait_for_input()
    assert f"process {os.getpid()} is rank 2" in core.ranks._refused
    its_connection = core.ranks._ranks[0].fd
    first.close()
    # its end is to be known before ranks are assigned: one that is lost after that ends the core
    while core.ranks._ranks[0].fd == its_connection:
        patience.check()
        core.ranks._wait_for_input()
    core.gather()
    for thread in joining:
        thread.join(PATIENCE_S)
    assert len(told) == 2
    core.ranks.close()
    second.close()
    third.close()


def test_the_end_of_a_connection_whose_descriptor_a_rank_has_got_takes_no_place(
    core: Core, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is told late: by then a rank may have connected, under the same number."""
    monkeypatch.setattr(remote_ranks, "_CLOSING_S", 0.01)
    link, patience = LeaderLink(core.nodes), Patience()
    link._socket.send(encode(join_of(model, 2)))
    rank = core.ranks._ranks[0]
    while rank.fd < 0:
        patience.check()
        core.ranks._wait_for_input()
    fd = rank.fd
    core.ranks._on_closed(fd)
    assert rank.fd == fd
    monkeypatch.undo()
    link.close()
    while rank.fd == fd:  # its own
        patience.check()
        core.ranks._wait_for_input()
    core.ranks.close()


def test_ranks_that_do_not_come_are_named(model: Path, keys: Path) -> None:
    core = core_of(model, keys, join_timeout_s=0.2)
    core.ranks.listen()
    link = LeaderLink(core.nodes)
    with pytest.raises(RankRefusedError):
        link.join(replace(join_of(model, 3), version="0.0.1"), lambda: None)
    with pytest.raises(RanksMissingError, match=r"ranks 2, 3 did not come .* its version is 0"):
        core.gather()
    link.close()
    core.ranks.close()


def test_a_rank_waits_for_a_core_and_for_the_next_one(model: Path, keys: Path) -> None:
    core = core_of(model, keys)
    ranks = Ranks(core)  # nothing listens yet
    core.ranks.listen()
    patience = Patience()
    while any(rank.fd < 0 for rank in core.ranks._ranks):
        patience.check()
        core.ranks._wait_for_input()
    core.ranks.close()  # before they were told anything
    following = RemoteRanks(core.config, core.ends.put)
    following.listen()
    following.gather(core.config, MEETING)
    ranks.joined()
    following.close()
    ranks.close()


def test_an_address_that_is_taken_is_named(core: Core) -> None:
    other = RemoteRanks(core.config, core.ends.put)
    with pytest.raises(RanksMissingError, match=f"cannot listen at {core.nodes.address}"):
        other.listen()
    other.close()


def test_beyond_loopback_nothing_listens_without_keys(model: Path) -> None:
    core = core_of(model, None)
    nodes = replace(core.nodes, address="tcp://10.0.0.5:7001")
    ranks = RemoteRanks(replace(core.config, nodes=nodes), core.ends.put)
    with pytest.raises(RanksMissingError, match="a loopback address; others need keys"):
        ranks.listen()
    ranks.close()
    core.ranks.close()
    with pytest.raises(ValueError, match="a loopback address; others need keys"):
        LeaderLink(nodes)


def test_a_key_that_is_not_in_the_folder_is_refused(
    core: Core, model: Path, keys: Path, tmp_path: Path
) -> None:
    strange = tmp_path / "strange"
    make_folder(strange)
    add_rank(strange, "strange")
    (strange / "server.key").write_text((keys / "server.key").read_text())
    link = LeaderLink(replace(core.nodes, keys=str(strange)))
    with pytest.raises(RankRefusedError, match="does not accept this client's key"):
        link.join(join_of(model, 2), lambda: None)
    link.close()


def test_a_clients_key_is_no_ranks(core: Core, keys: Path, tmp_path: Path) -> None:
    """It may read its own streams, not the plans for all tenants'."""
    with pytest.raises(BadRequest, match=r"keys: .*a rank's secret file"):
        LeaderLink(replace(core.nodes, keys=str(keys / "client.key_secret")))
    add_front(keys, "route")
    for name in ("client", "route.front", "server"):
        mine = tmp_path / name
        mine.mkdir(mode=0o700)
        (mine / "server.key").write_text((keys / "server.key").read_text())
        secret = mine / "x.rank.key_secret"
        secret.touch(0o600)
        secret.write_text((keys / f"{name}.key_secret").read_text())
        link = LeaderLink(replace(core.nodes, keys=str(mine)))
        with pytest.raises(RankRefusedError, match="does not accept this client's key"):
            link.join(join_of(Path(core.config.model), 2), lambda: None)
        link.close()
    assert core.ranks._missing() == "ranks 2, 3"


@pytest.mark.parametrize("files", [b"", b"another's"])
def test_a_rank_without_the_models_files_is_refused(core: Core, model: Path, files: bytes) -> None:
    link = LeaderLink(core.nodes)
    with pytest.raises(RankRefusedError, match="the files of its model"):
        link.join(replace(join_of(model, 2), fingerprint=files), lambda: None)
    link.close()


def test_without_a_ranks_key_nothing_listens(core: Core, tmp_path: Path) -> None:
    make_folder(tmp_path)
    ranks = RemoteRanks(replace(core.config, nodes=replace(core.nodes, keys=str(tmp_path))), print)
    with pytest.raises(RanksMissingError, match="--rank NAME"):
        ranks.listen()
    ranks.close()


def test_garbage_harms_nothing(core: Core, model: Path, keys: Path) -> None:
    host, port = core.nodes.address.removeprefix("tcp://").split(":")
    greeting = b"\xff" + bytes(8) + b"\x7f\x03\x01NULL" + bytes(48)
    with ExitStack() as opened:
        for data in (b"", b"\0", b"GET / HTTP/1.1\r\n\r\n", greeting, secrets.token_bytes(1 << 16)):
            raw = opened.enter_context(socket.create_connection((host, int(port))))
            raw.sendall(data)
        context = opened.enter_context(zmq.Context())
        for is_known in (False, True):
            peer = opened.enter_context(context.socket(zmq.DEALER))
            peer.setsockopt(zmq.LINGER, 0)
            if is_known:  # a rank with a key
                secure_client(peer, load_rank_keys(keys))
            peer.connect(core.nodes.address)
            for parts in (
                [secrets.token_bytes(100)],
                [b"\xc1"],
                [b"", encode(join_of(model, 2))],
                [encode(RankFailed(error="not mine"))],
                [bytes(1 << 21)],  # larger than what ranks may say
            ):
                with contextlib.suppress(zmq.Again):  # it was turned away before
                    peer.send_multipart(parts, zmq.NOBLOCK)
        ranks = Ranks(core)
        core.gather()
        for at, link in enumerate(ranks.joined()):
            if at == 0:
                core.ranks.put(packed(plan(7)), timeout_s=PATIENCE_S)
            assert link.take().step == 7
        core.ranks.close()
        ranks.close()


def test_a_flood_is_read_in_parts_and_logged_once(
    core: Core,
    links: list[LeaderLink],
    keys: Path,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its sender has a key, and takes neither the lock nor the disk."""
    ranks, has_come = core.ranks, threading.Event()
    end_looks(ranks)
    monkeypatch.setattr(remote_ranks, "MAX_READ_AT_ONCE", 8)
    monkeypatch.setattr(ranks._connections, "_on_closed", lambda _: has_come.set())
    with zmq.Context() as context, context.socket(zmq.DEALER) as peer:
        secure_client(peer, load_rank_keys(keys))
        peer.connect(core.nodes.address)
        peer.send(b"\x82\xa4type\xa6Joined\xa1x" + b"\x91" * 60_000)  # beyond Python's recursion
        for _ in range(30):  # fewer than are received ahead
            peer.send(b"\xc1")
    assert has_come.wait(PATIENCE_S), "the end of a connection comes after all that it has sent"
    for _ in range(2):
        with ranks._lock:
            ranks._read()
        assert not ranks._is_read
    ranks.put(packed(plan(7)), timeout_s=PATIENCE_S)
    assert [link.take().step for link in links] == [7] * len(links)
    [record] = [each for each in caplog.records if "none of a rank" in each.getMessage()]
    assert record.levelname == "WARNING"


def test_what_is_no_plan_is_refused(core: Core, links: list[LeaderLink]) -> None:
    route = core.ranks._ranks[0].route
    assert core.ranks._socket is not None
    for parts in ([b"one part"], [b"four", b""], [PLAN_NUMBER.pack(0), b"no plan"]):
        core.ranks._socket.send_multipart([route, *parts])
        with pytest.raises(PlanBytesError):
            links[0].take()


# ---- ends --------------------------------------------------------------------------------------


def test_a_lost_rank_ends_the_core_as_one_that_was_killed(core: Core) -> None:
    ranks = Ranks(core)
    core.gather()
    lost, other = ranks.joined()
    lost.close()
    end = core.ends.get(timeout=PATIENCE_S)
    assert (end.rank, end.pid, end.code) == (2, os.getpid(), -signal.SIGKILL)
    assert end.status.last_words == "the connection to rank 2 is lost"
    core.ranks.close()
    other.close()


def test_a_rank_that_fails_says_why(core: Core) -> None:
    ranks = Ranks(core)
    core.gather()
    failing, other = ranks.joined()
    failing.fail(RankFailed(words="RuntimeError: as it was told"))
    end = core.ends.get(timeout=PATIENCE_S)
    assert (end.rank, end.code) == (2, 1)
    assert end.status.last_words == "RuntimeError: as it was told"
    core.ranks.close()
    other.close()


def test_the_last_words_of_a_rank_behind_a_flood_are_read(
    core: Core, monkeypatch: pytest.MonkeyPatch
) -> None:
    ranks = Ranks(core)
    core.gather()
    failing, other = ranks.joined()
    end_looks(core.ranks)
    monkeypatch.setattr(remote_ranks, "MAX_READ_AT_ONCE", 1)
    for _ in range(30):
        failing._socket.send(b"\xc1")
    failing.fail(RankFailed(words="RuntimeError: as it was told"))
    end = core.ends.get(timeout=PATIENCE_S)
    assert (end.rank, end.code) == (2, 1)
    core.ranks.close()
    other.close()


def test_a_rank_that_is_stopped_is_lost(model: Path, keys: Path) -> None:
    core = core_of(model, keys, silent_s=1.0)
    core.ranks.listen()
    command = [sys.executable, "-c", A_RANK, msgspec.json.encode(core.nodes).decode()]
    with ExitStack() as opened:
        processes = [
            opened.enter_context(
                started(
                    [*command, msgspec.json.encode(join_of(model, index)).decode()],
                    stdin=subprocess.PIPE,
                )
            )
            for index in (2, 3)
        ]
        core.gather()
        processes[1].send_signal(signal.SIGSTOP)
        end = core.ends.get(timeout=PATIENCE_S)
        assert (end.rank, end.code) == (3, -signal.SIGKILL)
        core.ranks.close()
