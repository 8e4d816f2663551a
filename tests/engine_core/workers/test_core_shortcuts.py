"""Cores that collect, publish and receive in C where a step is like the one before, beside cores
that do not: the same messages, to the byte, and the same counts.
"""

from __future__ import annotations

import time
from contextlib import ExitStack
from typing import Any, cast

import numpy as np
import pytest
import zmq
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec import msgpack
from tests.helpers.admits import admit_of

from slipstream_core import _native
from slipstream_core.config import CoreConfig
from slipstream_core.engine.build import assemble_core
from slipstream_core.step.plan import Logprobs, ModelInfo, Runner
from slipstream_core.workers import report_reader, sender
from slipstream_ipc.columns import pack_u32, pack_u64
from slipstream_ipc.history import logprob_log
from slipstream_ipc.history.token_log import TokenLog, history_digest
from slipstream_ipc.messages import (
    CORE_HOP_VERSION,
    Admitted,
    CoreToWorker,
    End,
    Fault,
    Forget,
    Frame,
    Hello,
    Keep,
    KeptEntry,
    KeptIds,
    Positions,
    Report,
    SamplingParams,
    Step,
    Withdraw,
)
from slipstream_ipc.transport.codec import worker_codec
from slipstream_lab.common.memory_wire import MemoryConnection, MemoryNetwork

ADDRESS = "ipc:///memory/core"
EOS = 7
BEGIN_S = 100.0
NUM_IDS = 16


class NoDevice:
    """Replaces a runner: its info configures the core."""

    num_blocks = 4096
    info = ModelInfo(
        name="none",
        vocab_size=NUM_IDS,
        max_model_len=256,
        eos_token_ids=(EOS,),
        block_bytes=0,
        block_size=16,
    )

    def fileno(self) -> None:
        return None

    def close(self) -> None:
        """Nothing is open."""


class WorkerEnd:
    """A worker that says what it is told to; it keeps what it is sent."""

    def __init__(self, network: MemoryNetwork, identity: bytes) -> None:
        connection = network.connect(ADDRESS)
        assert connection is not None
        self.connection: MemoryConnection = connection
        self.identity = identity
        self.epoch = self.sent = self.received = self.step = 0
        self.rows: dict[bytes, int] = {}  # of its streams
        self._codec = worker_codec()
        self.messages: list[bytes] = []
        self.is_full = False
        peer: Any = connection.peer
        send = peer.send
        peer.send = lambda message: not self.is_full and send(message)

    def attach(self, *, fresh: bool) -> None:
        self.epoch += 1
        self.sent = self.received = 0
        self.read()
        self.say(Hello(CORE_HOP_VERSION, self.identity, fresh), is_numbered=False)

    def say(self, body: object, *, is_numbered: bool = True) -> None:
        self.sent += is_numbered
        frame = Frame(self.epoch, self.sent, self.received, cast(Any, body))
        self.connection.send(msgpack.encode(frame))

    def read(self) -> None:
        """Read what has come."""
        while self.connection.messages:
            data = self.connection.messages.popleft()
            self.messages.append(data)
            frame: Frame[CoreToWorker] = self._codec.decode(data)
            if frame.epoch != self.epoch:
                continue
            self.received = max(self.received, frame.seq)
            body = frame.body
            if isinstance(body, Step):
                self.step = max(self.step, body.step)
            elif isinstance(body, Admitted):
                self.rows[body.stream_id] = body.row


class World:
    """A core without a device, and its workers."""

    def __init__(self, num_workers: int, *, in_c: bool) -> None:
        network = MemoryNetwork()
        config = CoreConfig(
            model="none",
            address=ADDRESS,
            max_num_seqs=8,
            max_num_batched_tokens=64,
            block_size=16,
        )
        with network.in_use() as context:
            runner = cast(Runner, NoDevice())
            self.core: Any = assemble_core(config, runner, context, zmq.Poller())
        self.in_c = in_c
        self.workers = [WorkerEnd(network, b"w%d" % at) for at in range(num_workers)]
        self.owners: list[int] = []  # of the streams, by number
        self.num_steps = self.num_in_c = 0

    def admit(
        self,
        worker: int,
        params: SamplingParams,
        stop_ids: tuple[int, ...] = (EOS,),
        prompt_len: int = 3,
    ) -> None:
        self.owners.append(worker)
        num = len(self.owners)
        assert params.max_tokens is not None
        self.workers[worker].say(
            admit_of(
                stream_id=num.to_bytes(16, "big"),
                prompt_ids=pack_u32([1, 2, num % NUM_IDS] + [1] * (prompt_len - 3)),
                params=params,
                stop_token_ids=stop_ids,
                seed=num,
                max_tokens=params.max_tokens,
            )
        )

    def positions(self, worker: int) -> None:
        """State all the tokens of a worker's streams as known."""
        end, core = self.workers[worker], self.core
        ids, lengths, digests = [], [], []
        for stream_id in end.rows:
            stream = core.manager._streams.get(stream_id)
            if stream is not None:
                num = core.manager.num_outputs(stream)
                ids.append(stream_id)
                lengths.append(num)
                digests.append(history_digest(core.manager.outputs(stream, num)))
        end.say(Positions(tuple(ids), pack_u32(lengths), pack_u64(digests), last=True))

    def turn(
        self,
        ids: list[int],
        *,
        receives_early: bool = False,
        fails: int | None = None,
        publishes: bool = True,
        spans: int = 0,
    ) -> None:
        """A step, if any stream can run. fails: a number of a stream that fails behind it. spans:
        several tokens to a row, other numbers for each number.
        """
        core, now = self.core, BEGIN_S + 0.01 * self.num_steps
        core.handler.receive(now)
        plan = core.scheduler.schedule(core.handler.acked)
        if plan is not None:
            self.num_steps += 1
            core.handler.launching(plan.step, core.scheduler.rows_of(plan))
            if receives_early:
                core.handler.receive(now)
            num = int(plan.samples.sum())
            counts = 1 + (np.arange(num) * spans + spans) % 3 if spans else None
            num = num if counts is None else int(counts.sum())
            sampled = core.scheduler.complete(plan, np.resize(np.array(ids), num), counts)
            if plan.max_logprobs >= 0:
                self._append_logprobs(num, plan.max_logprobs + 1, sampled)
            core.manager.mark_dirty(sampled.rows)
            core.handler.collected(plan.step)
        if fails is not None:
            act(self, "fault", fails, fails)
        if publishes:
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(sender.WorkerSender, "_send_step", self._send_step)
                core.handler.publish(self.num_steps)
            core.logprobs.flush_deferred()

    @property
    def _send_step(self) -> Any:
        """The method of senders, counted."""
        usual = sender.WorkerSender._send_step

        def counted(own: sender.WorkerSender, session: Any) -> bool:
            is_sent = usual(own, session)
            self.num_in_c += is_sent
            return is_sent

        return counted

    def _append_logprobs(self, num: int, width: int, sampled: Any) -> None:
        values = np.arange(num * width, dtype=np.float32).reshape(num, width) - self.num_steps
        logprobs = Logprobs(values, values.astype(np.uint32) % 100, np.ones(num, np.uint32))
        if sampled.counts is None:
            self.core.logprobs.append(sampled.rows, logprobs, sampled.index)
        else:
            self.core.logprobs.append_several(sampled.rows, sampled.counts, logprobs, sampled.index)

    @property
    def counts(self) -> list[object]:
        handler = self.core.handler
        rows = range(len(handler._cursors._open))
        return [
            handler.acked.tolist(),
            [handler._cursors.sent(row) for row in rows],
            handler.num_unchecked,
            [
                (each.sent_step, each._session.link.num_unacked, each._session.link.num_owed_acks)
                for each in handler._senders.values()
            ],
            [self.core.tokens.length(row) for row in range(len(self.owners))],
        ]


def act(world: World, action: str, at: int, number: int) -> None:
    """Something happens at a worker."""
    worker = world.workers[at % len(world.workers)]
    if not worker.epoch:
        worker.attach(fresh=True)
    if action in ("plain", "stops", "stop ids", "logprobs", "short"):
        params = SamplingParams(
            max_tokens=3 + number % 4 if action == "short" else 60 + number,
            stop=("a",) if action == "stops" else (),
            logprobs=2 if action == "logprobs" else None,
        )
        stop_ids = (EOS, number % NUM_IDS) if action == "stop ids" else (EOS,)
        world.admit(at % len(world.workers), params, stop_ids)
    elif action == "acknowledge":
        worker.read()
        worker.say(None, is_numbered=False)
    elif action == "report":
        worker.read()
        worker.say(Report(worker.step))
    elif action == "end" and worker.rows:
        row = sorted(worker.rows.values())[number % len(worker.rows)]
        worker.say(Report(worker.step, pack_u32([row]), pack_u32([1])))
    elif action == "wrong report":
        worker.say(Report(worker.step, b"", pack_u32([1])))
    elif action in ("withdraw", "forget") and worker.rows:
        stream_id = sorted(worker.rows)[number % len(worker.rows)]
        if action == "withdraw":
            worker.say(Withdraw(stream_id, End("abort", 0)))
        else:
            del worker.rows[stream_id]
            worker.say(Forget((stream_id,)))
    elif action == "fault" and worker.rows:
        row = sorted(worker.rows.values())[number % len(worker.rows)]
        world.core.manager.end_by_fault([row], Fault("engine", "it failed"))
    elif action == "conflict" and world.owners:
        world.owners.pop()
        world.admit(at % len(world.workers), SamplingParams(max_tokens=250), ())
    elif action == "kept":
        worker.say(Keep((KeptEntry(bytes([number]), b"", b"an answer"),)))
        worker.say(KeptIds((), tuple(worker.rows), is_complete=False))
    elif action == "full":
        worker.is_full = not worker.is_full
    elif action in ("attach", "resume"):
        worker.is_full = False
        worker.attach(fresh=action == "attach")
        if action == "resume":
            world.core.handler.receive(BEGIN_S + 0.01 * world.num_steps)
            world.positions(at % len(world.workers))


ADMISSIONS = ("plain", "stops", "stop ids", "logprobs", "short")
ENDS = ("end", "withdraw", "forget", "fault")
RARE = (*ENDS, "full", "attach", "resume", "kept", "conflict", "wrong report")
OFTEN = ("report", "report", "acknowledge")
EVENTS = st.lists(
    st.tuples(
        st.sampled_from((*ADMISSIONS, *RARE, *OFTEN, *OFTEN)), st.integers(0, 1), st.integers(0, 9)
    ),
    max_size=2,
)
ID = st.sampled_from([1, 2, 3, 4, 5, 6, 8, 9]) | st.integers(0, NUM_IDS - 1)
IDS = st.lists(ID, min_size=1, max_size=4)


def do(world: World, events: list[Any], ids: list[int], kinds: dict[str, Any]) -> None:
    """What happens at workers, and a turn; what is to be without C is made without it."""
    with pytest.MonkeyPatch.context() as patch:
        if not world.in_c:
            patch.setattr(sender.WorkerSender, "_send_step", lambda *_: False)
            patch.setattr(_native, "ReportReader", report_reader.AckReader)
            patch.setattr(TokenLog, "appender", lambda _self, _rows: None)
            patch.setattr(logprob_log, "write_logprobs", lambda *_: -1)
        for event in events:
            act(world, *event)
        world.turn(ids, **kinds)


@settings(max_examples=120, deadline=None)
@given(st.data())
def test_the_same_messages_and_counts(data: st.DataObject) -> None:
    with pytest.MonkeyPatch.context() as patch, ExitStack() as closing:
        patch.setattr(time, "monotonic", lambda: BEGIN_S)
        num_workers = data.draw(st.sampled_from([1, 1, 2]))
        worlds = [World(num_workers, in_c=in_c) for in_c in (True, False)]
        for world in worlds:  # examples that fail, too: each holds descriptors
            closing.callback(world.core.close)
        firsts = data.draw(st.lists(st.sampled_from(ADMISSIONS), min_size=1, max_size=4))
        is_busy = data.draw(st.booleans())  # reports after each step
        events = [(each, at, 1) for at, each in enumerate(firsts)]
        for _ in range(data.draw(st.integers(1, 10))):
            ids = data.draw(IDS)
            early, publishes = data.draw(st.booleans()), data.draw(st.booleans())
            spans = data.draw(st.sampled_from([0, 0, 1, 2]))
            fails = data.draw(st.sampled_from([None] * 5 + [0, 1]))
            for turn in range(data.draw(st.integers(1, 7))):  # quiet ones, but for the first
                said = [("report", at, 0) for at in range(num_workers * is_busy)]
                kinds = {"receives_early": early, "spans": spans}
                if not turn:
                    said = [*events, *said]
                    kinds |= {"publishes": publishes, "fails": fails}
                for world in worlds:
                    do(world, said, ids[turn % len(ids) :] + ids, kinds)
                compare(worlds)
            events = data.draw(EVENTS)
        for world in worlds:
            for worker in world.workers:
                worker.is_full = False
            for _ in range(8):
                do(world, [("report", at, 0) for at in range(num_workers)], [1], {})
        compare(worlds)


def compare(worlds: list[World]) -> None:
    for one, other in zip(worlds[0].workers, worlds[1].workers, strict=True):
        assert one.messages == other.messages
        assert list(one.connection.messages) == list(other.connection.messages)
    assert worlds[0].counts == worlds[1].counts


@pytest.mark.parametrize("kind", ["plain", "stops", "stop ids", "logprobs"])
@pytest.mark.parametrize("event", [*ADMISSIONS, *RARE, "report", "acknowledge", "late fault", "id"])
def test_what_comes_between_steady_steps(event: str, kind: str) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(time, "monotonic", lambda: BEGIN_S)
        worlds = [World(1, in_c=in_c) for in_c in (True, False)]
        for world in worlds:
            do(world, [(kind, 0, 1), (kind, 0, 2)], [1, 2], {})
            for _ in range(5):
                do(world, [("report", 0, 0)], [1, 2], {})
            is_left = kind == "stop ids"  # each id is one of them
            assert world.num_in_c > 0 or is_left or not world.in_c
            if event == "late fault":
                do(world, [], [1, 2], {"fails": 1})
            elif event == "id":
                do(world, [], [1, EOS], {})
            else:
                do(world, [(event, 0, 1)], [1, 2], {})
            for _ in range(3):
                do(world, [("acknowledge", 0, 0)], [1, 2], {})
            for _ in range(20):  # until credit runs out
                do(world, [], [1, 2], {})
        compare(worlds)
        for world in worlds:
            world.core.close()


@pytest.mark.parametrize("spans", [0, 1])
def test_many_steady_steps_are_sent_in_c(spans: int) -> None:
    """So that the comparison is of two ways."""
    world = World(1, in_c=True)
    act(world, "stops", 0, 0)
    for _ in range(20):
        world.turn([1], spans=spans)
        act(world, "report", 0, 0)
    assert world.num_in_c > 14
    assert spans or world.core.scheduler._steady.appender is not None
    assert isinstance(world.core.handler._senders[b"w0"]._reports, _native.ReportReader)
    world.core.close()


def test_log_probabilities_behind_a_long_prompt_are_sent_in_c() -> None:
    """The rows of the step that ends a prompt are another set than those of the steps behind it."""
    world = World(1, in_c=True)
    world.workers[0].attach(fresh=True)
    world.admit(0, SamplingParams(max_tokens=60, logprobs=2), prompt_len=100)
    for _ in range(20):
        world.turn([1])
        act(world, "report", 0, 0)
    assert world.num_in_c > 14
    world.core.close()
