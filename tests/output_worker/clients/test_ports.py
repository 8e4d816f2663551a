"""What a client's port sends first where not everything can leave."""

from __future__ import annotations

from typing import Any

from tests.helpers.admits import admit_of
from tests.output_worker.clients.test_readers import FACTORY, START, World

from slipstream_ipc.columns import pack_u32, u32
from slipstream_ipc.messages import Accepted, Deltas, SamplingParams, Tokenized
from slipstream_ipc.transport.link import WINDOW
from slipstream_worker.clients.ports import ClientPort
from slipstream_worker.streams.registration import open_output
from slipstream_worker.streams.stream import Stage, WorkerStream


class Flooded(World):
    """One client whose window counts; nothing is acknowledged but by `acknowledge`."""

    def __init__(self) -> None:
        super().__init__(1)
        self.port: ClientPort = self.readers.port(b"0")
        self.link: Any = self.port.session.link
        self.messages: list[Any] = []
        self.front.send = self.send
        self.acknowledge()

    def send(self, session: Any, body: Any, receipt: Any) -> bool:
        if self.link.num_unacked >= WINDOW:
            return False
        self.messages.append(body)
        self.link.num_unacked += 1
        self.link.has_credit = self.link.num_unacked < WINDOW
        return True

    def acknowledge(self) -> None:
        self.link.num_unacked, self.link.has_credit = 0, True

    def another(self, handle: int) -> WorkerStream:
        """Another stream of the client, which is read and not accepted yet."""
        stream_id = b"s%d" % handle
        admit = admit_of(stream_id, pack_u32([1]), SamplingParams(), (), 0, 100)
        stream = WorkerStream(stream_id, Stage.RUNNING, registration=admit)
        stream.output = open_output(admit, FACTORY)
        self.columns.open(stream, admit)
        self.readers.read(stream, b"0", handle, START)
        self.streams.append(stream)
        return stream

    def handles(self) -> set[int]:
        """The streams of which deltas were sent."""
        sent = [u32(body.handles) for body in self.messages if isinstance(body, Deltas)]
        return {handle for column in sent for handle in column.tolist()}


def test_a_flood_of_states_holds_up_no_deltas_of_other_streams() -> None:
    world = Flooded()
    late = world.another(9)
    for number in range(100):
        world.port.enqueue(Tokenized(number))
    world.readers.accept(late)
    for _ in range(3):
        world.step([0, 1], 1)
        assert world.handles() == {7}
        assert sum(isinstance(body, Deltas) for body in world.messages) == 1
        world.messages.clear()
        world.acknowledge()
    while world.port.num_unsent:
        world.readers.flush()
        world.acknowledge()
    world.readers.flush()
    assert world.handles() == {9}
    kinds = [type(body) for body in world.messages]
    assert kinds.index(Accepted) < kinds.index(Deltas)
    assert not world.port.has_unsent


def test_what_answers_take_is_counted_until_they_leave() -> None:
    world = Flooded()
    for number in range(100):
        world.port.enqueue(Tokenized(number), num_bytes=number)
    for _ in range(3):
        world.readers.flush()
        world.acknowledge()
        sent = [body.number for body in world.messages]
        assert world.port.num_unsent == 100 - len(sent)
        assert world.port.num_unsent_bytes == sum(range(100)) - sum(sent)
    world.readers.attach_client(world.port.session)
    assert (world.port.num_unsent, world.port.num_unsent_bytes) == (0, 0)


def test_a_new_attach_holds_nothing_back() -> None:
    world = Flooded()
    late = world.another(9)
    for number in range(100):
        world.port.enqueue(Tokenized(number))
    world.readers.accept(late)
    world.readers.flush()
    world.acknowledge()
    world.readers.attach_client(world.port.session)
    world.messages.clear()
    world.readers.read(late, b"0", 9, START)
    world.step([1], 1)
    assert world.handles() == {9}
