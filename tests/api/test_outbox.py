"""What a client has to tell its server, and that nothing of it is stale."""

from __future__ import annotations

from slipstream.outbox import Outbox
from slipstream.requests import new_submit
from slipstream.stream_table import StreamState, StreamTable
from slipstream_ipc.messages import Abort, ClientToWorker, Resume, SamplingParams, Submit


class Hop:
    """Takes `credit` messages."""

    def __init__(self, credit: int = 100) -> None:
        self.credit = credit
        self.sent: list[ClientToWorker] = []
        self.receipts: list[StreamState | None] = []

    def send(self, body: ClientToWorker, receipt: StreamState | None) -> bool:
        if self.credit == 0:
            return False
        self.credit -= 1
        self.sent.append(body)
        self.receipts.append(receipt)
        return True


def submitted(table: StreamTable, outbox: Outbox) -> StreamState:
    state = StreamState(new_submit("x", SamplingParams()), wants_whole=False)
    table.add(state)
    outbox.submit(state)
    return state


def kinds(hop: Hop) -> list[type[ClientToWorker]]:
    return [type(body) for body in hop.sent]


def test_messages_wait_for_credit_in_their_order() -> None:
    table = StreamTable()
    outbox = Outbox(table)
    states = [submitted(table, outbox) for _ in range(5)]
    hop = Hop(credit=2)
    outbox.flush(hop.send)
    assert [state.was_sent for state in states] == [True, True, False, False, False]
    hop.credit = 100
    outbox.flush(hop.send)
    outbox.flush(hop.send)
    assert hop.sent == [
        Submit(state.handle, state.submit.stream_id, state.submit.params, text="x")
        for state in states
    ]


def test_refill_says_what_is_true_now_and_nothing_twice() -> None:
    table = StreamTable()
    outbox = Outbox(table)
    running, waiting, aborted, abandoned = (submitted(table, outbox) for _ in range(4))
    outbox.flush(Hop().send)
    running.prompt_ids = b""
    running.num_chars, running.num_tokens = 7, 3
    aborted.is_abort_wanted = True
    table.give_up(abandoned, None)
    unsent = submitted(table, outbox)  # due already, and due again
    outbox.refill()
    outbox.refill()
    hop = Hop()
    outbox.flush(hop.send)
    assert kinds(hop) == [Resume, Submit, Submit, Abort, Submit, Abort]
    assert hop.sent[0] == Resume(running.handle, running.submit.stream_id, 7, 3)
    ids = [body.stream_id for body in hop.sent if not isinstance(body, Resume | Abort)]
    assert ids == [state.submit.stream_id for state in (waiting, aborted, unsent)]
    assert hop.receipts == [None] * 5 + [abandoned]  # the others are still to hear of their end


def test_what_an_end_has_made_idle_is_skipped() -> None:
    table = StreamTable()
    outbox = Outbox(table)
    state = submitted(table, outbox)
    table.give_up(state, None)
    outbox.abort(state)
    hop = Hop()
    outbox.flush(hop.send)
    assert hop.sent == []
    assert table.abandoned == []
