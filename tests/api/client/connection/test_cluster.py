"""A client of several replicas, each played by the test."""

from __future__ import annotations

import asyncio
import logging
import queue
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import ExitStack, suppress
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any, ClassVar

import pytest
from msgspec import Raw
from msgspec.structs import replace
from tests.helpers.fake_worker import MODEL, Entry, FakeWorker, deltas, end_of
from tests.helpers.patience import Patience

from slipstream import (
    AsyncClient,
    BadRequestError,
    Client,
    ConnectionLostError,
    EngineError,
    OverloadedError,
    StreamLostError,
)
from slipstream.client.connection import cluster, fleet_queries, members, stream_search
from slipstream.client.connection.cluster import Cluster
from slipstream.client.connection.queries import new_recall
from slipstream.client.placing.moves import MoveSettings
from slipstream.client.streams.stream_state import StreamState
from slipstream.client.streams.stream_table import CarriedStream
from slipstream.request.requests import new_resume
from slipstream_ipc.columns import pack_u32, u32
from slipstream_ipc.crash_note import suspect_digests
from slipstream_ipc.errors import BadRequest
from slipstream_ipc.messages import (
    Abort,
    Accepted,
    AdapterRef,
    Cancel,
    Cancelled,
    Deltas,
    Detokenize,
    Detokenized,
    Fault,
    Goodbye,
    KeepOptions,
    KeptAnswer,
    Load,
    Locate,
    Located,
    ModelCard,
    Recall,
    Recalled,
    Rejected,
    Resume,
    Submit,
    UnknownStreams,
    Welcome,
)
from slipstream_ipc.transport.curve import Access

CARD = replace(MODEL, fingerprint=b"weights")
OTHER = replace(MODEL, fingerprint=b"other weights")
TWO = replace(MODEL, name="two", vocab_size=50, fingerprint=b"two")  # another model


class Replica(FakeWorker):
    """A replica that accepts what it is asked for, and sends what the test tells it to."""

    def __init__(
        self, address: str, card: Any = CARD, members: tuple[str, ...] = (), script: Any = None
    ) -> None:
        super().__init__(address, script, model=card, members=members)
        self.handle = -1  # of the stream that `spread` begins here

    def tell_again(self) -> None:
        """Welcome a client whose Hello was left unanswered."""
        self.do(
            lambda: self._acceptor.welcome(
                self._acceptor.sessions[-1], self.model, members=self.members
            )
        )

    def tell(self, load: Load) -> None:
        """Send an unnumbered Load."""
        self.do(lambda: self._control(load))


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Any]:
    """Makes replicas, by name; stops them after the test."""
    tmp_path.chmod(0o700)
    with ExitStack() as opened:

        def make(name: str, card: Any = CARD, *more: Any, **options: Any) -> Replica:
            replica = Replica(f"ipc://{tmp_path}/{name}", card, *more, **options)
            opened.callback(replica.stop)
            return replica

        yield make


def address_of(*replicas: Replica) -> str:
    return ",".join([replica.address for replica in replicas])


def cluster_of(client: Client | AsyncClient) -> Any:
    """The cluster of a client's connection."""
    return client._io.cluster if isinstance(client, AsyncClient) else client._io._cluster


def is_attached(client: Any, num: int) -> bool:
    return len(cluster_of(client)._moves.open_members()) == num


def attached(client: Client, num: int) -> None:
    """Wait until so many replicas are attached."""
    patience = Patience()
    while not is_attached(client, num):
        client._io.connect().result()
        patience.wait()


def spread(client: Client, replicas: list[Replica]) -> dict[Replica, Any]:
    """A stream at each replica, of which "a" was read; `handles` has their handles."""
    attached(client, len(replicas))
    streams: dict[Replica, Any] = {}
    patience = Patience()
    for num in count():
        stream = client.stream(f"{num} prompt", seed=1)
        replica, submit = first_submit(replicas, patience)
        if replica in streams:
            replica.reject(submit, Fault("bad_request", "it has one"))
            continue
        replica.send(deltas(Entry(replica.accept(submit), "a")))
        replica.handle = submit.handle
        assert next(stream).text == "a"
        streams[replica] = stream
        if len(streams) == len(replicas):
            break
    return streams


def first_submit(replicas: list[Replica], patience: Patience) -> tuple[Replica, Submit]:
    """The next Submit that one of the replicas gets."""
    while True:
        patience.wait()
        for replica in replicas:
            with suppress(queue.Empty):
                body = replica._received.get_nowait()
                if isinstance(body, Submit):
                    return replica, body


def expect(replica: Replica, kind: Any) -> Any:
    """The next message of this kind; skips Aborts and Goodbyes."""
    while True:
        body = replica._received.get(timeout=Patience().left_s)
        if isinstance(body, kind):
            return body
        assert isinstance(body, Abort | Goodbye), body


def expect_abort(replica: Replica, submit: Submit) -> bool:
    """Whether the replica is told to end its copy of a stream; skips other Aborts."""
    while replica.expect(Abort).stream_id != submit.stream_id:
        pass
    return True


def rest_of(replica: Replica, handle: int, stream: Any) -> str:
    replica.send(deltas(Entry(handle, "bc", 1, end=end_of("abc"))))
    return "".join([delta.text for delta in stream])


def test_a_stream_of_a_lost_replica_goes_on_at_another_with_its_tokens(place) -> None:
    first, second = place("a"), place("b")
    with Client(address_of(first, second)) as client:
        streams = spread(client, [first, second])
        first.stop()
        submit = expect(second, Submit)
        assert submit.stream_id.hex() == streams[first].id
        assert (submit.was_accepted, submit.num_chars, submit.moves) == (True, 1, 1)
        assert u32(submit.output_ids).tolist() == [ord("a")]
        assert rest_of(second, second.accept(submit), streams[first]) == "bc"


def found_gone_late(monkeypatch, session: Any) -> None:
    """A lost replica is found to be gone at the fifth look; nothing else moves its streams."""
    looks = count()
    monkeypatch.setattr(members, "why_absent", lambda _: "gone" if next(looks) >= 4 else None)
    monkeypatch.setattr(cluster, "TICK_S", 600.0)
    monkeypatch.setattr(session._moves, "_settings", MoveSettings(patience_s=600.0))


def test_whether_a_lost_replica_is_gone_is_looked_at_again(place, monkeypatch) -> None:
    first, second = place("a"), place("b")
    with Client(address_of(first, second)) as client:
        streams = spread(client, [first, second])
        found_gone_late(monkeypatch, client._io._cluster)
        first.stop()
        submit = expect(second, Submit)
        assert rest_of(second, second.accept(submit), streams[first]) == "bc"


def test_whether_a_lost_replica_is_gone_is_looked_at_again_in_a_loop(place, monkeypatch) -> None:
    first, second = place("a"), place("b")

    async def lose_one() -> str:
        client = AsyncClient(address_of(first, second))
        patience = Patience()
        await client.connect()
        while not is_attached(client, 2):
            patience.check()
            await client.connect()
        stream = client.stream("prompt", seed=1)
        lost, submit = await asyncio.to_thread(first_submit, [first, second], patience)
        lost.send(deltas(Entry(lost.accept(submit), "a")))
        text = (await anext(stream)).text
        found_gone_late(monkeypatch, client._io.cluster)
        await asyncio.to_thread(lost.stop)
        other = second if lost is first else first
        handle = other.accept(await asyncio.to_thread(expect, other, Submit))
        other.send(deltas(Entry(handle, "bc", 1, end=end_of("abc"))))
        text += "".join([delta.text async for delta in stream])
        await client.close()
        return text

    assert asyncio.run(lose_one()) == "abc"


def grown(client: Client) -> None:
    """Wait until the client knows of the other members of its server's fleet."""
    patience = Patience()
    while len(client._io._cluster.members) < 2:
        patience.wait()


def test_a_client_of_one_address_learns_the_others_from_its_welcome(place) -> None:
    first, second = place("a"), place("b")
    first.members = second.members = (
        first.address,
        second.address,
        "tcp://10.0.0.1:7001",  # another kind than its own
        "ipc:///nowhere/" + "x" * 200,  # too long
    )
    with Client(first.address) as client:
        early = client.stream("early")
        grown(client)
        assert client._io.models == (CARD,)
        assert client._io._cluster.members == [first.address, second.address]
        replica, submit = first_submit([first, second], Patience())
        replica.send(deltas(Entry(replica.accept(submit), "abc", end=end_of("abc"))))
        assert "".join([delta.text for delta in early]) == "abc"
        streams = spread(client, [first, second])
        first.stop()
        submit = expect(second, Submit)
        assert submit.stream_id.hex() == streams[first].id
        assert rest_of(second, second.accept(submit), streams[first]) == "bc"


def test_what_is_asked_before_the_fleet_is_known_is_spread_over_it(place) -> None:
    first, second = place("a"), place("b")
    first.members = second.members = (first.address, second.address)
    with Client(first.address) as client:
        streams = [client.stream(f"{num} prompt") for num in range(32)]
        patience = Patience()
        asked = [first_submit([first, second], patience)[0] for _ in streams]
        assert min(asked.count(first), asked.count(second)) >= 2


def test_what_is_asked_before_the_replicas_have_answered_is_spread_over_them(place) -> None:
    asked: list[FakeWorker] = []

    def play(replica: FakeWorker, body: Any) -> None:
        if isinstance(body, Submit):
            asked.append(replica)
            replica.accept_from_script(body)
            replica.post(deltas(Entry(body.handle, "abc", end=end_of("abc"))))

    async def ask(address: str) -> list[str]:
        client = AsyncClient(address)
        outputs = await asyncio.gather(*(client.generate(f"{num} prompt") for num in range(32)))
        await client.close()
        return [output.text for output in outputs]

    first, second = place("a"), place("b")
    first.script = second.script = play
    assert asyncio.run(ask(address_of(first, second))) == ["abc"] * 32
    assert min(asked.count(first), asked.count(second)) >= 2


def test_members_that_come_later_are_learned_too(place) -> None:
    first, second = place("a"), place("b")
    third = place("c")
    first.members = second.members = (first.address, second.address)
    with Client(first.address) as client:
        grown(client)
        attached(client, 2)
        second.stop()
        place("b", members=(first.address, second.address, third.address))
        attached(client, 3)


def test_a_server_that_names_itself_alone_is_no_fleet(place) -> None:
    first = place("a")
    first.members = (first.address,)
    with Client(first.address) as client:
        client._io.connect().result()
        assert not client._io._cluster.is_fleet


def test_hostile_replica_harms_only_its_streams(place, caplog) -> None:
    hostile, honest = place("a"), place("b")
    with caplog.at_level(logging.WARNING), Client(address_of(hostile, honest)) as client:
        streams = spread(client, [hostile, honest])
        hostile.send(deltas(Entry(7, "x"), Entry(2**31, "y")))  # streams of others, or of nobody
        garbage = Deltas(pack_u32([0]), b"", b"\0", ["x"], b"")
        for num in range(3):
            hostile.send(garbage)
            if num < 2:  # the third time it is closed
                hostile.hellos.get(timeout=Patience().left_s)
        submit = expect(honest, Submit)
        assert submit.stream_id.hex() == streams[hostile].id
        assert submit.moves == 1
        moved = honest.accept(submit)
        assert rest_of(honest, moved, streams[hostile]) == "bc"
        assert rest_of(honest, honest.handle, streams[honest]) == "bc"
    assert hostile.address in caplog.text
    assert honest.address not in caplog.text


def test_gaps_at_one_replica_do_not_count_at_the_next(place) -> None:
    first, second = place("a"), place("b")
    with Client(address_of(first, second)) as client:
        streams = spread(client, [first, second])
        for _ in range(2):
            first.send(deltas(Entry(first.handle, "x", 5)))
            assert expect(first, Resume).num_chars == 1
        first.stop()
        handle = second.accept(expect(second, Submit))
        second.send(deltas(Entry(handle, "x", 5)))
        while expect(second, Resume).handle != handle:
            pass
        assert rest_of(second, handle, streams[first]) == "bc"


def test_a_replica_with_another_card_does_not_change_what_is_asked_of_the_others(place) -> None:
    narrow = replace(OTHER, max_model_len=1)
    first = place("a")
    second_address = first.address.removesuffix("a") + "b"
    with Client(f"{first.address},{second_address}") as client:
        attached(client, 1)
        place("b", narrow)
        attached(client, 2)
        assert client._io.models == (CARD,)
        first.stop()
        patience = Patience()
        while client._io.models != (narrow,):
            patience.wait()


def test_no_move_to_another_fingerprint(place) -> None:
    first, second = place("a"), place("b", OTHER)
    with Client(address_of(first, second), timeout_s=0.3) as client:
        streams = spread(client, [first, second])
        first.stop()
        with pytest.raises((ConnectionLostError, StreamLostError)):
            next(streams[first])
        assert not [each for each in list(second._received.queue) if isinstance(each, Submit)]


def test_a_stream_is_for_replicas_that_have_its_adapter(place) -> None:
    """A rolling restart gives them adapters, or other files for a name, one after the other."""

    def with_loras(**digests: bytes) -> Any:
        loras = [AdapterRef(name, f"/{name}", digest) for name, digest in digests.items()]
        return replace(CARD, adapters=tuple(loras))

    without, first = place("a"), place("b", with_loras(sql=b"one", b=b"b"))
    with Client(address_of(without, first)) as client:
        attached(client, 2)
        names = {each.name for each in client.models[0].adapters}
        assert names == {"sql", "b"}  # whichever card it goes by
    others = place("c", with_loras(sql=b"two")), place("d", with_loras(sql=b"one"))
    replicas = [without, first, *others]
    with Client(address_of(*replicas)) as client:
        attached(client, 4)
        for num in range(12):
            stream = client.stream(f"{num} prompt", model="b", seed=1)
            replica, submit = first_submit(replicas, Patience())
            assert (replica, submit.adapter) == (first, "b")
            replica.reject(submit, Fault("bad_request", "enough"))
            stream.close()
        stream = client.stream("prompt", model="sql", seed=1)
        replica, submit = first_submit(replicas, Patience())
        # it had other files than the client knew
        replica.send(Accepted(submit.handle, pack_u32([1]), adapter_digest=b"one"))
        replica.send(deltas(Entry(submit.handle, "a")))
        assert next(stream).text == "a"
        replica.stop()
        again, submit = first_submit([each for each in replicas if each is not replica], Patience())
        assert (submit.adapter_digest, u32(submit.output_ids).tolist()) == (b"one", [ord("a")])
        assert b"one" in [each.digest for each in again.model.adapters]


def test_adapters_are_not_changed_beside_a_replica_of_an_older_release(place) -> None:
    """It would make the first of the stages at once."""
    replicas = [place("a"), place("b")]
    with Client(address_of(*replicas)) as client:
        attached(client, 2)
        for change in (
            lambda: client.load_lora_adapter("x", "/x"),
            lambda: client.unload_lora_adapter("x"),
        ):
            with pytest.raises(
                BadRequestError, match="none while a replica is of an older release"
            ):
                change()


def test_other_weights_at_the_same_address_are_not_told_of_a_stream(place) -> None:
    first, second = place("a"), place("b")
    with Client(address_of(first, second)) as client:
        streams = spread(client, [first, second])
        first.stop()
        second.stop()
        again, other = place("a", OTHER), place("b")
        ids = {expect(other, Submit | Resume).stream_id.hex() for _ in streams}
        assert ids == {stream.id for stream in streams.values()}
        attached(client, 2)
        assert not [each for each in list(again._received.queue) if not isinstance(each, Abort)]


def test_core_away_moves_after_patience(place) -> None:
    first, second = place("a"), place("b")
    with Client(address_of(first, second)) as client:
        streams = spread(client, [first, second])
        first.tell(Load("core_away", within=True))
        submit = expect(second, Submit)
        assert (submit.moves, submit.strikes) == (1, 1)
        assert expect_abort(first, submit)
        assert rest_of(second, second.accept(submit), streams[first]) == "bc"


def test_a_dead_core_counts_against_the_streams_that_it_was_computing(place) -> None:
    first, second = place("a"), place("b")
    with Client(address_of(first, second)) as client:
        poison, streams = None, spread(client, [first, second])
        patience = Patience()
        while poison is None:
            stream = client.stream("poison")
            replica, submit = first_submit([first, second], patience)
            if replica is first:
                poison = stream  # the core dies of it before it is accepted
            else:
                replica.reject(submit, Fault("bad_request", "it is elsewhere"))
        named = suspect_digests([b"of another client", bytes.fromhex(poison.id)])
        first.tell(Load("core_away", within=True, suspects=named))
        moved = [expect(second, Submit) for _ in range(2)]
        strikes = {submit.stream_id.hex(): submit.strikes for submit in moved}
        assert strikes == {streams[first].id: 0, poison.id: 1}
        for submit in moved:
            second.accept(submit)


def test_a_draining_replica_gets_nothing_new_and_its_streams_run_on(place) -> None:
    first, second = place("a"), place("b")
    with Client(address_of(first, second)) as client:
        streams = spread(client, [first, second])
        first.tell(Load("draining", within_s=1000.0))
        patience = Patience()
        while not is_attached(client, 1):
            patience.wait()
        others = [client.stream(f"{num} prompt") for num in range(8)]
        for _ in others:
            second.accept(expect(second, Submit))
        assert rest_of(first, first.handle, streams[first]) == "bc"
        first.tell(Load("draining", within_s=0.0))


def test_a_draining_replica_loses_its_streams_before_its_end(place) -> None:
    first, second = place("a"), place("b")
    with Client(address_of(first, second)) as client:
        streams = spread(client, [first, second])
        first.tell(Load("draining", within_s=1.0))
        submit = expect(second, Submit)
        assert (submit.moves, submit.strikes) == (1, 0)
        assert expect_abort(first, submit)
        assert rest_of(second, second.accept(submit), streams[first]) == "bc"


def test_a_replica_that_leaves_turns_streams_away_to_another(place) -> None:
    first, second = place("a"), place("b")
    with Client(address_of(first, second)) as client:
        attached(client, 2)
        stream = client.stream("x")
        patience = Patience()
        while first._received.empty() and second._received.empty():
            patience.wait()
        leaving, other = (first, second) if not first._received.empty() else (second, first)
        submit = leaving.expect(Submit)
        leaving.send(Rejected(submit.handle, Fault("overloaded", "it is stopping"), True))
        again = expect(other, Submit)
        handle = other.accept(again)
        other.send(deltas(Entry(handle, "abc", end=end_of("abc"))))
        assert [delta.text for delta in stream] == ["abc"]


def test_a_stream_that_a_replica_has_no_room_for_is_asked_of_two_more(place) -> None:
    replicas = [place(name) for name in "abcd"]
    with Client(address_of(*replicas)) as client:
        attached(client, 4)
        stream, patience = client.stream("x"), Patience()
        asked = []
        for _ in range(3):
            replica, submit = first_submit(replicas, patience)
            asked.append(replica)
            replica.reject(submit, Fault("overloaded", "it is full"))
        assert len(set(asked)) == 3
        with pytest.raises(OverloadedError):
            next(stream)


@pytest.mark.parametrize("named", [True, False])
def test_requests_of_one_prompt_cache_key_prefer_one_replica(place, named: bool) -> None:
    replicas = [place(name) for name in "abcd"]
    with Client(address_of(*replicas)) as client:
        attached(client, 4)
        patience = Patience()

        def asked(prompt: str, key: str) -> Replica:
            stream = client.stream(prompt, prompt_cache_key=key if named else None)
            replica, submit = first_submit(replicas, patience)
            replica.reject(submit, Fault("bad_request", "seen"))
            with pytest.raises(BadRequestError):
                next(stream)
            return replica

        pairs = [[asked(f"{n} {key}", key) for n in range(2)] for key in "stuvwxyz"]
        assert all(one is other for one, other in pairs) is named


def test_another_clients_stream_is_resumed_where_it_is(place) -> None:
    first, second = place("a"), place("b")
    with Client(address_of(first, second)) as client:
        attached(client, 2)
        stream_id = "ab" * 16
        stream = client.resume(stream_id, num_chars=1, num_tokens=1)
        for replica, moves in ((first, 0), (second, 3)):
            located = replica.expect(Locate)
            assert located.stream_ids == (bytes.fromhex(stream_id),)
            replica.send(Located(located.number, (moves,)))
        resume = second.expect(Resume)
        assert (resume.num_chars, resume.moves) == (1, 2)
        second.accept(Submit(resume.handle, resume.stream_id, b"{}"))  # type: ignore[arg-type]
        assert rest_of(second, resume.handle, stream) == "bc"


def test_a_resumed_stream_is_looked_for_at_replicas_that_attach_a_moment_later(place) -> None:
    first, second = place("a"), place("b")
    second.is_silent = True
    with Client(address_of(first, second)) as client:
        attached(client, 1)
        stream = client.resume("ab" * 16, num_chars=1, num_tokens=1)
        second.do(lambda: setattr(second, "is_silent", False))
        second.tell_again()
        for replica, moves in ((first, 0), (second, 1)):
            located = replica.expect(Locate)
            replica.send(Located(located.number, (moves,)))
        assert second.expect(Resume).stream_id == bytes.fromhex(stream.id)


def test_a_stream_resumed_while_no_replica_is_there_goes_on_when_one_is(place) -> None:
    first, second = place("a"), place("b")
    with Client(address_of(first, second)) as client:
        attached(client, 2)
        first.stop()
        second.stop()
        patience = Patience()
        while client._io._cluster.is_attached:
            patience.wait()
        stream = client.resume("ab" * 16, num_chars=1, num_tokens=1)
        again = place("b")
        again.send(Located(again.expect(Locate).number, (0,)))
        resume = again.expect(Resume)
        assert resume.moves == 2**16  # ahead of an earlier reader's copy at the first replica
        again.accept(Submit(resume.handle, resume.stream_id, b"{}"))  # type: ignore[arg-type]
        assert rest_of(again, resume.handle, stream) == "bc"


def test_a_stream_resumed_before_the_fleet_is_known_is_looked_for_in_all_of_it(place) -> None:
    first, second = place("a"), place("b")
    first.members = second.members = (first.address, second.address)
    first.is_silent = True

    def answer() -> None:
        patience = Patience()
        while not first.do(lambda: first.has_session):
            patience.wait()
        first.do(lambda: setattr(first, "is_silent", False))
        first.tell_again()
        for replica, moves in ((first, 0), (second, 1)):
            located = expect(replica, Locate)
            assert located.stream_ids == (bytes.fromhex("ab" * 16),)
            replica.send(Located(located.number, (moves,)))
        resume = second.expect(Resume)
        second.accept(Submit(resume.handle, resume.stream_id, b"{}"))  # type: ignore[arg-type]
        second.send(deltas(Entry(resume.handle, "bc", 1, end=end_of("abc"))))

    async def read() -> str:
        client = AsyncClient(first.address)
        stream = client.resume("ab" * 16, num_chars=1, num_tokens=1)
        client.resume("cd" * 16, num_chars=1, num_tokens=1).abort()
        answering = asyncio.create_task(asyncio.to_thread(answer))
        text = "".join([delta.text async for delta in stream])
        await answering
        await client.close()
        return text

    assert asyncio.run(read()) == "bc"


def test_a_later_reader_of_a_stream_that_waits_is_as_accepted_as_the_first(place) -> None:
    first = place("a")
    with Client(f"{first.address},{first.address[:-1]}b") as client:
        stream = client.stream("prompt", seed=1)
        first.send(deltas(Entry(first.accept(first.expect(Submit)), "a")))
        assert next(stream).text == "a"
        first.stop()
        patience = Patience()
        while client._io._cluster.is_attached:
            patience.wait()
        later = client.resume(stream.id, num_chars=1, num_tokens=1)
        second = place("b")
        resume = second.expect(Resume)
        second.send(UnknownStreams((resume.handle,)))
        submit = expect(second, Submit)
        assert (submit.was_accepted, submit.num_tokens) == (True, 1)
        assert rest_of(second, second.accept(submit), later) == "bc"


def test_a_replica_with_too_much_unread_does_not_know_a_stream(place, caplog) -> None:
    first, second = place("a"), place("b")
    with caplog.at_level(logging.WARNING), Client(address_of(first, second)) as client:
        attached(client, 2)
        stream = client.resume("ab" * 16, num_chars=1, num_tokens=1)
        for replica, moves in ((first, ()), (second, (1,))):
            located = replica.expect(Locate)
            replica.send(Located(located.number, moves))
        assert second.expect(Resume).stream_id == bytes.fromhex(stream.id)
        assert first.hellos.empty()


def test_a_replica_that_does_not_answer_holds_up_no_resume(place, monkeypatch) -> None:
    monkeypatch.setattr(stream_search, "_LOCATE_S", 0.1)
    first, second = place("a"), place("b")
    with Client(address_of(first, second)) as client:
        attached(client, 2)
        stream = client.resume("ab" * 16, num_chars=1, num_tokens=1)
        first.expect(Locate)
        located = second.expect(Locate)
        second.send(Located(located.number, (1,)))
        assert second.expect(Resume).stream_id == bytes.fromhex(stream.id)


def test_a_query_is_asked_of_another_replica_where_the_first_is_lost(place) -> None:
    first, second = place("a"), place("b")
    with Client(address_of(first, second)) as client:
        attached(client, 2)
        answer = client._io.ask(Detokenize(0, pack_u32([1])))
        asked = first.expect(Detokenize)
        first.stop()
        again = second.expect(Detokenize)
        assert again.token_ids == asked.token_ids
        second.send(Detokenized(again.number, "one"))
        assert answer.result().text == "one"


def test_cancel_asks_all_replicas(place) -> None:
    first, second = place("a"), place("b")
    with Client(address_of(first, second)) as client:
        attached(client, 2)
        answer = client._io.ask(Cancel(0, (b"1" * 16, b"2" * 16)))
        first.send(Cancelled(first.expect(Cancel).number, ("unknown", "running")))
        second.send(Cancelled(second.expect(Cancel).number, ("unknown", "unknown")))
        assert answer.result().found == ("unknown", "running")


def go_away(replica: Replica) -> None:
    """Cut the connection, and leave the Hello that follows unanswered."""
    replica.is_silent = True
    replica.tell_to_attach()
    replica.hellos.get(timeout=Patience().left_s)


def test_an_answer_is_recalled_from_a_replica_that_is_away_for_a_moment(place) -> None:
    first, second = place("a"), place("b")
    with Client(address_of(first, second)) as client:
        attached(client, 2)
        go_away(first)
        answer = client._io.ask(new_recall("31" * 16))
        second.send(Recalled(second.expect(Recall).number))
        assert client._io.ask(Detokenize(0, pack_u32([1])))  # its turn is behind that answer's
        second.expect(Detokenize)
        assert not answer.done()
        first.is_silent = False
        first.tell_again()
        kept = KeptAnswer(KeepOptions(), 3, end_of("abc"))
        first.send(Recalled(first.expect(Recall).number, kept))
        assert answer.result().answer.end == kept.end


def test_an_answer_that_no_other_knows_is_no_unknown_one_while_a_replica_is_away(
    place, monkeypatch
) -> None:
    monkeypatch.setattr(fleet_queries, "_MISSING_S", 0.0)
    first, second = place("a"), place("b")
    with Client(address_of(first, second)) as client:
        attached(client, 2)
        go_away(first)
        answer = client._io.ask(new_recall("31" * 16))
        second.send(Recalled(second.expect(Recall).number))
        with pytest.raises(ConnectionLostError):
            answer.result(Patience().left_s)


def test_what_is_computed_again_is_asked_of_a_replica_that_takes_it(place) -> None:
    """It was of a replica that is lost, and the first of those that are there drains."""
    first, second = place("a"), place("b")
    with Client(address_of(first, second)) as client:
        attached(client, 2)
        first.tell(Load("draining", within_s=1000.0))
        patience = Patience()
        while not is_attached(client, 1):
            patience.wait()
        submit = Submit(0, b"1" * 16, Raw(b"\x80"), "x")
        asked = StreamState(new_resume("31" * 16, 0, 0, 0), wants_whole=False, resubmittable=submit)
        client._io.submit(asked)
        for each in (first, second):
            each.send(Located(each.expect(Locate).number, (0,)))
        assert second.expect(Resume).stream_id == b"1" * 16


def test_no_replica_answers(tmp_path: Path) -> None:
    tmp_path.chmod(0o700)
    with pytest.raises(ConnectionLostError, match="no replica"):
        Client(f"ipc://{tmp_path}/a,ipc://{tmp_path}/b", timeout_s=0.2)


@pytest.mark.parametrize(
    "address", ["ipc:///a,http://b", "tcp://a:1,tcp://b:2", "file:/nowhere/at/all", "dns://name"]
)
def test_addresses_that_are_refused(address: str) -> None:
    with pytest.raises(BadRequestError):
        Client(address)


async def _ask(address: str) -> str:
    async with AsyncClient(address) as client:
        return "".join([delta.text async for delta in client.stream("x")])


def test_the_asyncio_client_is_alike(place) -> None:
    def play(replica: FakeWorker, body: Any) -> None:
        if isinstance(body, Submit):
            replica.accept_from_script(body)
            replica.post(deltas(Entry(body.handle, "abc", end=end_of("abc"))))

    replicas = [place("a"), place("b")]
    for replica in replicas:
        replica.script = play
    assert asyncio.run(_ask(address_of(*replicas))) == "abc"


def answered(replica: Replica, stream: Any) -> str:
    """The text of a stream of which the replica gets the Submit next, and sends all."""
    handle = replica.accept(expect(replica, Submit))
    replica.send(deltas(Entry(handle, "abc", end=end_of("abc"))))
    return "".join([delta.text for delta in stream])


def said(replica: Replica, kind: Any) -> list[Any]:
    """The messages of this kind that a replica has got and a test has not read."""
    bodies = []
    with suppress(queue.Empty):
        while True:
            bodies.append(replica._received.get_nowait())
    return [body for body in bodies if isinstance(body, kind)]


def test_each_request_goes_to_the_replicas_of_its_model(place) -> None:
    one, two = place("a"), place("b", TWO)
    with Client(address_of(one, two)) as client:
        attached(client, 2)
        assert client.models == (CARD, TWO)
        for replica, model in [(one, "fake"), (two, "two")] * 3:
            stream = client.stream("prompt", model=model)
            assert answered(replica, stream) == "abc"
        answer = client.stream([49], model="two", max_tokens=1)
        assert u32(expect(two, Submit).token_ids).tolist() == [49]
        with pytest.raises(BadRequestError, match=r"at most 49|vocab|\[0, 50\)"):
            client.stream([50], model="two", max_tokens=1)
        answer.close()
        assert said(one, Submit) == []


def test_a_request_that_names_no_model_or_none_of_these_is_told_which_there_are(place) -> None:
    one, two = place("a"), place("b", TWO)
    with Client(address_of(one, two)) as client:
        attached(client, 2)
        allowed = "allowed: one of 'fake', 'two'"
        for call in (
            lambda: client.stream("x"),
            lambda: client.stream("x", model="three"),
            lambda: client.generate_many(["x"], model="three"),
            lambda: client.tokenize("x"),
            lambda: client.detokenize([1], model="three"),
            lambda: client.model,
        ):
            with pytest.raises(BadRequestError, match=allowed) as caught:
                call()
            assert caught.value.field == "model"
        assert said(one, Submit) + said(two, Submit) == []


def test_tokens_are_those_of_the_models_own_replica(place) -> None:
    one, two = place("a"), place("b", TWO)

    def answer(worker: FakeWorker, body: Any) -> None:
        if isinstance(body, Detokenize):
            worker.post(Detokenized(body.number, worker.model.name))

    one.script = two.script = answer
    with Client(address_of(one, two)) as client:
        attached(client, 2)
        assert [client.detokenize([1], model=name) for name in ("two", "fake")] == ["two", "fake"]


def test_a_lost_replicas_streams_and_questions_wait_for_their_own_model(place) -> None:
    one, two = place("a"), place("b", TWO)
    with Client(address_of(one, two)) as client:
        attached(client, 2)
        stream = client.stream("prompt", model="two")
        two.send(deltas(Entry(two.expect_and_accept(), "a")))
        assert next(stream).text == "a"
        early = client.stream("early", model="two")
        expect(two, Submit)
        address = two.address
        two.stop()
        late = client.stream("late", model="two")
        tokens = client._io.ask(Detokenize(0, pack_u32([1])), "two")
        other = client.stream("prompt", model="fake")
        assert answered(one, other) == "abc"
        begins = {}

        def play(worker: FakeWorker, body: Any) -> None:
            if isinstance(body, Resume):
                worker.post(UnknownStreams((body.handle,)))
            elif isinstance(body, Detokenize):
                worker.post(Detokenized(body.number, "two's"))
            elif isinstance(body, Submit):
                begin = begins[body.text] = body.num_chars
                worker.accept_from_script(body)
                worker.post(deltas(Entry(body.handle, "abc"[begin:], begin, end=end_of("abc"))))

        place(address.rpartition("/")[2], TWO, script=play)
        texts = ["".join([delta.text for delta in each]) for each in (stream, early, late)]
        assert texts == ["bc", "abc", "abc"]
        assert begins == {"prompt": 1, "early": 0, "late": 0}
        assert tokens.result().text == "two's"
        assert said(one, Submit | Detokenize) == []


def test_a_replica_that_comes_back_with_another_model_is_asked_for_that_alone(place) -> None:
    one, two = place("a"), place("b", TWO)
    with Client(address_of(one, two), timeout_s=1.0) as client:
        attached(client, 2)
        stream = client.stream("unaccepted", model="two")
        expect(two, Submit)
        address = two.address
        two.stop()
        again = place(address.rpartition("/")[2], OTHER)
        patience = Patience()
        while [card.name for card in client.models] != ["fake"]:
            patience.wait()
        with pytest.raises(ConnectionLostError):
            list(stream)
        assert said(again, Submit) + said(one, Submit) == []


def test_another_clients_stream_is_found_at_whatever_model_it_is(place) -> None:
    one, two = place("a"), place("b", TWO)
    with Client(address_of(one, two)) as client:
        attached(client, 2)
        stream = client.resume("ab" * 16, num_chars=1, num_tokens=1)
        for replica, moves in ((one, 0), (two, 1)):
            replica.send(Located(replica.expect(Locate).number, (moves,)))
        resume = two.expect(Resume)
        two.accept(Submit(resume.handle, resume.stream_id, b"{}"))  # type: ignore[arg-type]
        assert rest_of(two, resume.handle, stream) == "bc"
        assert stream._state.model == "two"


async def _of_two_models(address: str) -> tuple[str, list[str]]:
    client = AsyncClient(address)
    with pytest.raises(ConnectionLostError, match="not connected yet"):
        client.stream("x", model="two")
    early = client.stream("x")  # it is not known yet that there are two
    whole = (await client.generate("x", model="two")).text
    with pytest.raises(BadRequestError, match="allowed: one of 'fake', 'two'"):
        async for _ in early:
            pass
    models = [card.name for card in client.models]
    await client.close()
    return whole, models


def test_the_asyncio_client_has_models_too(place) -> None:
    def play(replica: FakeWorker, body: Any) -> None:
        if isinstance(body, Submit):
            text = replica.model.name
            replica.accept_from_script(body)
            replica.post(deltas(Entry(body.handle, text, end=end_of(text))))

    replicas = [place("a"), place("b", TWO)]
    for replica in replicas:
        replica.script = play
    assert asyncio.run(_of_two_models(address_of(*replicas))) == ("two", ["fake", "two"])


def test_two_replicas_of_one_name_and_two_models_are_told_apart(place) -> None:
    one, two = place("a"), place("b", TWO)
    for replica in (one, two):
        welcome = replica._acceptor.welcome
        replica._acceptor.welcome = partial(welcome, replica=b"replica-0")  # type: ignore[method-assign]
    with Client(address_of(one, two)) as client:
        attached(client, 2)
        statuses = client._io._cluster.statuses()
        assert [(each.shown_name, each.model) for each in statuses] == [
            (one.address, "fake"),
            (two.address, "two"),
        ]


class StubSession:
    """A link to a replica, which does in its next turn what the test says."""

    by_address: ClassVar[dict[str, StubSession]] = {}

    def __init__(self, context: Any, address: str, *args: Any, observer: Any, **kwargs: Any):
        self.observer, self.is_attached, self.is_starting, self.trouble = observer, True, False, ""
        self.streams: list[StreamState] = []
        self.script: list[Any] = [lambda: observer.welcomed(Welcome(2, CARD))]
        self.by_address[address] = self

    def turn(self, now: float, arrived: Any = None) -> bool:
        if self.script:
            self.script.pop(0)()
        return False

    def submit(self, state: StreamState, now: float) -> None:
        state.prompt_ids = b""
        self.streams.append(state)

    def position(self, state: StreamState) -> tuple[int, int]:
        return (1, 1) if state in self.streams else (0, 0)

    def leave(self, state: StreamState) -> CarriedStream:
        self.streams.remove(state)
        return CarriedStream(state, 1, 1, b"\0\0\0\0")

    take = leave

    def carry_on(self, carried: CarriedStream) -> None:
        self.streams.append(carried.state)

    def say_goodbye(self, now: float) -> bool:
        return True

    def take_queries(self, *, but_of_streams: bool = False) -> list[Any]:
        return []

    def close(self) -> None:
        assert not self.streams, "streams are left behind"


def test_a_stream_that_waits_for_its_fleet_may_be_read_by_another(monkeypatch) -> None:
    monkeypatch.setattr(cluster, "ClientSession", StubSession)
    monkeypatch.setattr(StubSession, "by_address", {})
    waiting = StreamState(Submit(0, b"1" * 16, b"{}", text="x"), wants_whole=False)  # type: ignore[arg-type]
    addresses = tuple([f"ipc:///nowhere/{name}/client.sock" for name in "de"])
    fleet = Cluster(None, addresses[0], 10.0, None, 0.0)  # type: ignore[arg-type]
    fleet.submit(waiting, 0.0)
    [link] = StubSession.by_address.values()
    link.script = [lambda: link.observer.welcomed(Welcome(2, CARD, members=addresses))]
    fleet.turn(0.0)
    assert fleet.is_fleet
    later = StreamState(Resume(0, b"1" * 16, 0, 0), wants_whole=False)
    fleet.submit(later, 0.0)
    assert waiting.is_over
    assert not later.is_over
    assert later.resubmittable == waiting.request


def test_a_stream_without_a_model_may_be_read_by_another_before_it_is_refused(monkeypatch) -> None:
    monkeypatch.setattr(cluster, "ClientSession", StubSession)
    monkeypatch.setattr(StubSession, "by_address", {})
    monkeypatch.setattr(members.Member, "is_gone", False)
    addresses = [f"ipc:///nowhere/{name}/client.sock" for name in "abc"]
    fleet = Cluster(None, ",".join(addresses), 10.0, None, 0.0)  # type: ignore[arg-type]
    waiting = StreamState(Submit(0, b"1" * 16, b"{}", text="x"), wants_whole=False)  # type: ignore[arg-type]
    fleet.submit(waiting, 0.0)
    _, two, late = StubSession.by_address.values()
    two.script = [lambda: two.observer.welcomed(Welcome(2, TWO))]
    late.script, late.is_attached = [], False
    fleet.turn(0.1)
    assert fleet.models == (CARD, TWO)
    assert not waiting.is_over, "the third one may come"
    later = StreamState(Resume(0, b"1" * 16, 0, 0), wants_whole=False)
    fleet.submit(later, 0.2)
    assert isinstance(waiting.error, BadRequestError)
    assert not later.is_over


def test_callers_wait_longer_for_a_replica_whose_model_is_not_known(monkeypatch) -> None:
    monkeypatch.setattr(cluster, "ClientSession", StubSession)
    monkeypatch.setattr(StubSession, "by_address", {})
    monkeypatch.setattr(members.Member, "is_gone", False)
    addresses = [f"ipc:///nowhere/{name}/client.sock" for name in "ab"]
    fleet = Cluster(None, ",".join(addresses), 10.0, None, 0.0)  # type: ignore[arg-type]
    late = StubSession.by_address[addresses[1]]
    late.script, late.is_attached = [], False

    def connect(now: float) -> Future[ModelCard]:
        connected: Future[ModelCard] = Future()
        fleet.connect(connected, now)
        fleet.turn(now)
        return connected

    first = connect(0.0)
    fleet.turn(0.9)
    second = connect(0.92)  # one that comes when a member has answered
    assert not first.done()
    assert not second.done()
    late.script = [lambda: late.observer.welcomed(Welcome(2, TWO))]
    late.is_attached = True
    fleet.turn(0.95)
    assert first.result(0.0) == second.result(0.0) == CARD
    assert fleet.models == (CARD, TWO)
    late.is_attached = False
    assert connect(2.0).done(), "its model is known"


def test_a_status_says_why_a_replica_is_away_now_and_the_log_says_each_reason_once(
    monkeypatch, caplog
) -> None:
    address = "tcp://127.0.0.1:1"
    errors = [BadRequest("keys", "none", "a folder")] * 2
    stubs: list[StubSession] = []

    def connect(*args: Any, **options: Any) -> StubSession:
        if errors:
            raise errors.pop()
        stubs.append(StubSession(*args, **options))
        stubs[-1].script, stubs[-1].is_attached = [], False
        return stubs[-1]

    monkeypatch.setattr(cluster, "ClientSession", connect)
    monkeypatch.setattr(StubSession, "by_address", {})
    fleet = Cluster(None, address, 10.0, None, 0.0, is_fleet=True, access=Access(insecure=True))  # type: ignore[arg-type]

    def status_at(now: float) -> tuple[str, str]:
        fleet.turn(now)
        [status] = fleet.statuses()
        return status.condition, status.why

    cannot = ("away", "keys: got 'none', allowed: a folder")
    assert [status_at(now) for now in (1.0, 21.0)] == [cannot] * 2
    assert status_at(41.0) == ("away", ""), "it is tried, and nothing is known yet"
    for trouble in ("no such key", "no such key", "no descriptors", "no such key", ""):
        stubs[0].trouble = trouble
        assert status_at(42.0) == ("away", trouble)
    refused = partial(EngineError, Fault("engine", "x"))
    stubs[0].script = [lambda: stubs[0].observer.refused(refused)]
    assert [status_at(now) for now in (43.0, 44.0)] == [("refused", "x")] * 2
    assert status_at(64.0) == ("away", "")
    stubs[1].script = [lambda: stubs[1].observer.welcomed(Welcome(2, CARD))]
    stubs[1].is_attached = True
    assert status_at(65.0) == ("serving", "")
    stubs[1].is_attached = False
    assert status_at(66.0) == ("away", "")
    stubs[1].trouble = "no such key"
    assert status_at(67.0) == ("away", "no such key")
    about = f"the replica at {address}"
    assert caplog.messages == [
        f"{about} cannot be used: {cannot[1]}",
        f"{about} does not answer: no such key",
        f"{about} does not answer: no descriptors",
        f"{about} is left alone: x",
        f"{about} does not answer: no such key",
    ]


def test_a_replica_that_is_refused_as_a_stream_arrives_is_closed_once_that_has_left(
    monkeypatch,
) -> None:
    monkeypatch.setattr(cluster, "ClientSession", StubSession)
    addresses = [f"ipc:///nowhere/{name}/client.sock" for name in "abc"]
    fleet = Cluster(None, ",".join(addresses), 10.0, None, 0.0)  # type: ignore[arg-type]
    fleet.turn(0.0)
    state = StreamState(Submit(0, b"1" * 16, b"{}", text="x"), wants_whole=False)  # type: ignore[arg-type]
    fleet.submit(state, 0.0)
    sessions = StubSession.by_address.values()
    source = next(each for each in sessions if each.streams)
    taker, third = [each for each in sessions if each is not source]
    source.is_attached = third.is_attached = False
    error = partial(EngineError, Fault("engine", "it does not keep to the protocol"))
    now = 1.0
    while source.streams:
        # the second turn of these is the one in which the stream arrives
        taker.script = [lambda: None, partial(taker.observer.refused, error)]
        fleet.turn(now)
        now += 0.25
        assert now < 10.0
    third.is_attached = True
    third.script = [lambda: third.observer.welcomed(Welcome(2, CARD))]
    fleet.turn(now)
    assert third.streams == [state]
    assert not state.is_over
