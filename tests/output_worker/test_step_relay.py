"""Steps that are relayed in C, beside the same steps on the usual way: the same messages, to the
byte, and the same counts.
"""

from __future__ import annotations

import time
from collections import deque
from typing import Any

import numpy as np
import pytest
import zmq
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from slipstream.client.connection.link_session import ClientSession
from slipstream_ipc.columns import pack_u32
from slipstream_ipc.messages import WANTS_LOAD, SamplingParams, Step
from slipstream_ipc.transport.dealer import LinkOptions
from slipstream_lab.common.collection_watch import CollectionWatch
from slipstream_lab.output_path import in_process_path
from slipstream_lab.output_path.in_process_path import OutputPath
from slipstream_lab.output_path.stopwatch import Stopwatch
from slipstream_lab.output_path.workload import Workload
from slipstream_worker import step_relay
from slipstream_worker.detokenizer.factory import TableDetokenizerFactory
from slipstream_worker.detokenizer.table import TokenTable

EOS = 0
PIECES = [
    b"",
    b"a",
    b"b",
    b"ab",
    b" ",
    "é".encode(),
    "é".encode()[:1],
    "é".encode()[1:],
    b"z" * 300,
]
FACTORY = TableDetokenizerFactory(TokenTable(mode="bytelevel", pieces=PIECES, special=[EOS]), {})
BEGIN_S = 100.0
IDS = st.sampled_from([1, 1, 1, 1, 2, 3, 4, 5, 6, 7, 8, EOS])


class Path(OutputPath):
    """A core, a worker and a client whose turns are chosen."""

    def __init__(
        self,
        outputs: list[list[int]],
        params: SamplingParams,
        *,
        relays: bool,
        tokens_per_row: tuple[int, int] = (1, 1),
        num_ahead: int = 0,
    ) -> None:
        """num_ahead: steps that are planned before one is completed."""
        num, steps = len(outputs), len(outputs[0])
        values = -np.arange(3.0 * num, dtype=np.float32).reshape(num, 3)
        workload = Workload(
            np.full((num, 3), 1, np.uint32),
            np.array(outputs, np.uint32),
            values,
            np.full((num, 3), 2, np.uint32),
        )
        params = replace(params, max_tokens=steps)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(time, "monotonic", lambda: BEGIN_S)
            super().__init__(
                workload,
                num,
                params,
                FACTORY,
                len(PIECES),
                Stopwatch(CollectionWatch()),
                tokens_per_row=tokens_per_row,
            )
        if not relays:
            table: Any = self._cluster._alone.links[0]._table
            table.relay = lambda *_: None
            for worker in self._workers:
                worker._relays.find = lambda: None  # type: ignore[method-assign]
            for each in self._core.handler._senders.values():
                each._send_step = lambda _session: False  # type: ignore[method-assign]
        self.worker: Any = self._workers[0]
        self.num_relayed = 0  # turns of the worker with a relay
        self.num_left = 0  # steps that none took
        usual = self.worker._from_core._step

        def leave(step: Step) -> None:
            self.num_left += 1
            usual(step)

        self.worker._from_core._step = leave
        self._now = BEGIN_S
        self._num_ahead = num_ahead
        self._planned: deque[Any] = deque()

    def turn(self, *, worker: bool, client: bool, beat: bool) -> None:
        """A step of the core, and the turns of the others that there are to be."""
        self._now = now = self._now + 0.01
        core: Any = self._core
        plan = core.scheduler.schedule(core.handler.acked)
        if plan is not None:
            self._planned.append(plan)
        if len(self._planned) > (self._num_ahead if plan is not None else 0):
            self._complete(self._planned.popleft())
        if worker:
            self.worker.run_once(now, self._arrived)
            self._awake.clear()
        if beat:
            self.worker.beat(now)
        self.num_relayed += self.worker._relay is not None
        if client:
            self._cluster.turn(now, self._arrived)
        core.handler.receive(now)

    def _complete(self, plan: Any) -> None:
        core: Any = self._core
        before = self._at.copy()
        ids, counts = self._next_ids(plan.seeds)
        requests = plan.seeds if counts is None else np.repeat(plan.seeds, counts)
        logprobs = self._made_up(requests, ids) if self._wants_logprobs else None
        sampled = core.scheduler.complete(plan, ids, counts)
        # what was in flight for a row that was given several tokens is dropped
        self._at = before + np.bincount(requests[sampled.index], minlength=len(before))
        if logprobs is not None and sampled.counts is not None:
            core.logprobs.append_several(sampled.rows, sampled.counts, logprobs, sampled.index)
        elif logprobs is not None:
            core.logprobs.append(sampled.rows, logprobs, sampled.index)
        core.manager.mark_dirty(sampled.rows)
        core.handler.publish(plan.step)

    @property
    def is_done(self) -> bool:
        return all(state.is_over for state in self.states) or super().is_done

    def finish(self) -> None:
        for _ in range(40):
            self.turn(worker=True, client=True, beat=True)

    def read(self) -> list[tuple[object, ...]]:
        """All that the streams' readers were given."""
        return [
            (*[(each.text, each.token_ids, each.logprobs) for each in state.deltas], state.end)
            for state in self.states
        ]


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_relayed_steps_send_the_same_messages(data: st.DataObject) -> None:
    num, steps = data.draw(st.integers(1, 4)), data.draw(st.integers(4, 40))
    ids = st.lists(IDS, min_size=steps, max_size=steps)
    outputs = data.draw(st.lists(ids, min_size=num, max_size=num))
    stops = data.draw(st.lists(st.text("abé ", min_size=1, max_size=3), max_size=2))
    params = SamplingParams(
        stop=tuple(stops),
        min_tokens=data.draw(st.integers(0, 4)),
        logprobs=data.draw(st.sampled_from([None, None, 2, 0])),
    )
    often = st.sampled_from([True] * 7 + [False])
    most, num_ahead = data.draw(st.sampled_from([1, 1, 2, 3, 5])), data.draw(st.integers(0, 2))
    span = data.draw(st.integers(1, most)), most
    paths = [
        Path(outputs, params, relays=relays, tokens_per_row=span, num_ahead=num_ahead)
        for relays in (True, False)
    ]
    try:
        while not all(path.is_done for path in paths):
            worker, client, beat = data.draw(st.tuples(often, often, st.booleans()))
            for path in paths:
                path.turn(worker=worker, client=client, beat=beat)
            assert paths[0].messages == paths[1].messages
        for path in paths:
            path.finish()
        assert paths[0].messages == paths[1].messages
        assert paths[0].read() == paths[1].read()
        found = [path.worker.numbers().counters for path in paths]
        assert found[0].num_delivered_tokens == found[1].num_delivered_tokens
        assert found[0].num_messages == found[1].num_messages
        assert sum(found[0].itl_s.counts) == sum(found[1].itl_s.counts)
    finally:
        for path in paths:
            path.close()


@pytest.mark.parametrize(
    ("logprobs", "span", "num_ahead"),
    [
        (None, (1, 1), 0),
        (2, (1, 1), 0),
        (None, (2, 2), 0),
        (None, (1, 5), 0),
        (None, (1, 5), 1),  # what is in flight for a row with several tokens is dropped
    ],
)
def test_nearly_all_steps_of_streams_that_go_on_are_relayed(
    logprobs: int | None, span: tuple[int, int], num_ahead: int
) -> None:
    params = SamplingParams(logprobs=logprobs)
    outputs = [[1 + step % 5 for step in range(100 * sum(span))]] * 3
    path = Path(outputs, params, relays=True, tokens_per_row=span, num_ahead=num_ahead)
    while not path.is_done:
        path.turn(worker=True, client=True, beat=False)
    assert path.num_relayed > 150
    assert path.num_left < 20, "histories grow, and streams begin and end"
    path.finish()
    path.check_whole()
    path.close()


@pytest.mark.parametrize("wants", [0, WANTS_LOAD])
def test_a_client_that_reads_nothing_does_not_keep_steps_from_being_relayed(wants: int) -> None:
    path = Path([[1 + step % 5 for step in range(100)]] * 3, SamplingParams(), relays=True)
    with path._network.in_use() as context:
        idle = ClientSession(
            context,
            in_process_path._CLIENTS,
            60.0,
            zmq.Poller(),
            path._now,
            options=LinkOptions(wants),
        )
    while not idle.is_attached:
        idle.turn(path._now)
        path.turn(worker=True, client=True, beat=False)
    before = path.num_relayed
    while not path.is_done:
        path.turn(worker=True, client=True, beat=False)
        idle.turn(path._now)
    assert path.num_relayed > before + 60
    path.finish()
    path.check_whole()
    idle.close()
    path.close()


@settings(max_examples=100, deadline=None)
@given(st.data())
def test_a_message_that_is_not_the_next_plain_step_has_no_effect(data: st.DataObject) -> None:
    path = Path([[1] * 12] * 2, SamplingParams(), relays=True)
    while path.worker._relay is None:
        path.turn(worker=True, client=True, beat=False)
    relay, columns = path.worker._relay, path.worker.columns
    path.turn(worker=False, client=False, beat=False)
    (message,) = relay.connection.messages
    at = data.draw(st.integers(0, len(message) - 1))
    other = data.draw(
        st.one_of(
            st.integers(1, 255).map(
                lambda change: message[:at] + bytes([message[at] ^ change]) + message[at + 1 :]
            ),
            st.just(message[:at]),
            st.binary(min_size=1, max_size=4).map(lambda more: message + more),
            st.binary(max_size=60),
        )
    )
    before = columns.lengths.copy(), columns.sent_tokens.copy(), len(path.messages)
    rows = path.worker.streams.latest_rows[1].array
    if relay.take(other, 1.0):  # a step, with another number, other tokens or acknowledgements
        assert len(other) == len(message)
        assert (columns.lengths[rows] == before[0][rows] + 1).all()
        assert set(columns.last_ids[rows].tolist()) <= set(range(1, len(PIECES)))
    else:
        assert np.array_equal(columns.lengths, before[0])
        assert np.array_equal(columns.sent_tokens, before[1])
        assert len(path.messages) == before[2]
        assert relay.take(message, 1.0) == step_relay.TAKEN
    path.close()


def test_what_a_relay_cannot_be_made_of() -> None:
    path = Path([[1] * 12] * 2, SamplingParams(), relays=True)
    while path.worker._relay is None:
        path.turn(worker=True, client=True, beat=False)
    maker = path.worker._relays
    core, connection, client, _, sending, _, loops, pages, _, _, _ = maker._basis
    core_rows, rows = path.worker.streams.core_rows_of(sending)
    prompt_lens = path.worker.columns.prompt_lens
    numbers = np.zeros(1), np.zeros(2, np.int64), np.zeros(1), np.zeros(3, np.int64)
    order, no_rows = np.argsort(rows), np.zeros(0, np.int64)

    def made(**other: Any) -> object:
        given: dict[str, Any] = {
            "core": core,
            "client": client,
            "loops": loops,
            "pages": pages,
            "table": path.worker.columns.tokens.table,
            "core_rows": pack_u32(core_rows),
            "rows": (rows, order, no_rows, prompt_lens),
            "report": connection.send,
            "deliver": connection.send,
            "receipt": [],
            "numbers": numbers,
            "spans": (np.zeros(1, np.int64), np.zeros(4), np.zeros(4)),
            "max_unacked": 5,
            "may_owe": 7,
            "connection": connection,
            "logprobs": (0, None, 16),
            "budget": (32, 12, 2**20),
            **other,
        }
        return step_relay.StepRelay(*given.values())

    assert made()
    for wrong in (
        {"core": 1},
        {"loops": pages},
        {"receipt": ()},
        {"core_rows": pack_u32([1])},
        {"core_rows": pack_u32([core_rows[0]] * 2)},
        {"core_rows": pack_u32([core_rows[0], 2**32 - 1])},
        {"rows": (rows, np.zeros(2, np.int64), no_rows, prompt_lens)},
        {"rows": (np.repeat(rows[:1], 2), order, no_rows, prompt_lens)},
        {"rows": (rows + 10**6, order, no_rows, prompt_lens)},
        {"rows": (rows, order, np.array([10**6]), prompt_lens)},
        {"rows": (rows, order - 1, no_rows, prompt_lens)},
        {"rows": (rows, order, no_rows, prompt_lens[1:])},
        {"numbers": (*numbers[:3], np.zeros(2, np.int64))},
        {"logprobs": (2, None, 16)},
        {"logprobs": (-1, [], 16)},
        {"spans": (np.zeros(1, np.int64), np.zeros(4), np.zeros(3))},
        {"spans": (np.zeros(1, np.int64), np.zeros(0), np.zeros(0))},
        {"numbers": (numbers[0], np.zeros(1, np.int64), *numbers[2:])},
    ):
        with pytest.raises((TypeError, ValueError, IndexError)):
            made(**wrong)
    path.close()
