"""What a client has to tell its server, and that nothing of it is stale."""

from __future__ import annotations

import gc
import sys
from typing import Any

import numpy as np
import pytest
from msgspec.structs import replace
from tests.helpers.fake_worker import Entry, deltas

from slipstream.client.connection.pending_requests import PendingRequests
from slipstream.client.streams.stream_state import StreamState
from slipstream.client.streams.stream_table import ClientStreamTable
from slipstream.errors import StreamLostError
from slipstream.request.parallel_sampling import params_of_answers
from slipstream.request.requests import new_submit, new_submits
from slipstream_ipc.columns import pack_u32
from slipstream_ipc.history.token_log import history_checksum, history_digest
from slipstream_ipc.messages import (
    Abort,
    Accepted,
    ChatMessage,
    ClientToWorker,
    Fault,
    Frame,
    Rejected,
    Resume,
    SamplingParams,
    Submit,
    UnknownStreams,
)
from slipstream_ipc.transport.codec import client_codec, front_codec
from slipstream_worker.streams.registration import Submission, answers_of


class Hop:
    """Takes `credit` messages."""

    def __init__(self, credit: int = 100) -> None:
        self.credit = credit
        self.sent: list[ClientToWorker] = []
        self.receipts: list[Abort | None] = []

    def send(self, body: ClientToWorker, receipt: Abort | None) -> bool:
        if self.credit == 0:
            return False
        self.credit -= 1
        self.sent.append(body)
        self.receipts.append(receipt)
        return True


def submitted(table: ClientStreamTable, requests: PendingRequests) -> StreamState:
    state = StreamState(new_submit("x", SamplingParams()), wants_whole=False)
    table.add(state)
    requests.add(state)
    return state


def attached(table: ClientStreamTable) -> PendingRequests:
    requests = PendingRequests(table)
    requests.refill()
    return requests


def kinds(hop: Hop) -> list[type[ClientToWorker]]:
    return [type(body) for body in hop.sent]


def test_messages_wait_for_credit_in_their_order() -> None:
    table = ClientStreamTable()
    requests = attached(table)
    states = [submitted(table, requests) for _ in range(5)]
    hop = Hop(credit=2)
    requests.flush(hop.send)
    assert [state.was_sent for state in states] == [True, True, False, False, False]
    hop.credit = 100
    requests.flush(hop.send)
    requests.flush(hop.send)
    assert hop.sent == [
        Submit(state.handle, state.request.stream_id, state.request.params, text="x")
        for state in states
    ]


def test_requests_that_are_given_up_while_no_server_is_there_are_not_kept() -> None:
    """Their prompts may be large, and a server may be away for long."""
    table = ClientStreamTable()
    for requests in (PendingRequests(table), attached(table)):
        requests.clear()
        state = submitted(table, requests)
        requests.abandon(table.give_up(state, None))
        table.wake()
        assert not [each for each in gc.get_referrers(state) if each is not sys._getframe()]
        submitted(table, requests)
        requests.refill()
        hop = Hop()
        requests.flush(hop.send)
        assert kinds(hop)[-1:] == [Submit]


def test_refill_says_what_is_true_now_and_nothing_twice() -> None:
    table = ClientStreamTable()
    requests = attached(table)
    running, waiting, aborted, abandoned = (submitted(table, requests) for _ in range(4))
    requests.flush(Hop().send)
    running.prompt_ids = b""
    table.deliver(deltas(Entry(running.handle, "abc")))
    aborted.is_abort_wanted = True
    table.give_up(abandoned, None)
    unsent = submitted(table, requests)  # due already, and due again
    requests.refill()
    requests.refill()
    hop = Hop()
    requests.flush(hop.send)
    assert kinds(hop) == [Resume, Submit, Submit, Abort, Submit, Abort]
    assert hop.sent[0] == Resume(
        running.handle, running.stream_id, 3, 3, history_digest(np.array([97, 98, 99], np.uint32))
    )
    ids = [body.stream_id for body in hop.sent if not isinstance(body, Resume | Abort)]
    assert ids == [state.stream_id for state in (waiting, aborted, unsent)]
    aborts = [body for body in hop.sent if isinstance(body, Abort)]
    assert aborts == [Abort(state.stream_id, state.handle) for state in (aborted, abandoned)]
    assert hop.receipts == [None] * 5 + [aborts[-1]]  # the others are still to hear of their end


def test_what_an_end_has_made_idle_is_skipped() -> None:
    table = ClientStreamTable()
    requests = attached(table)
    state = submitted(table, requests)
    requests.abandon(table.give_up(state, None))
    hop = Hop()
    requests.flush(hop.send)
    assert hop.sent == []
    assert table.abandoned == []


def test_what_the_server_has_lost_is_asked_for_again_with_what_is_here() -> None:
    table = ClientStreamTable()
    requests = attached(table)
    state = submitted(table, requests)
    state.prompt_ids = b""
    table.deliver(deltas(Entry(state.handle, "ab", ids=[5, 6, 7])))
    for _ in range(2):  # over each attach once
        requests.refill()
        requests.flush(Hop().send)
        for lost in table.lose(UnknownStreams((state.handle,))):
            requests.add(lost)
        hop = Hop(credit=0)
        requests.flush(hop.send)
        hop.credit = 1
        requests.flush(hop.send)
        [again] = hop.sent
        assert isinstance(again, Submit)
        assert (again.stream_id, again.text, again.handle) == (state.stream_id, "x", state.handle)
        assert (again.was_accepted, again.output_ids) == (True, pack_u32([5, 6, 7]))
        assert again.num_chars == 2
    assert not state.is_over


def test_a_long_chat_is_asked_for_again_as_it_was() -> None:
    turns = [ChatMessage("user", f"turn {number}") for number in range(5000)]
    table = ClientStreamTable()
    requests = attached(table)
    state = StreamState(new_submit(turns, SamplingParams()), wants_whole=False)
    table.add(state)
    requests.add(state)
    first = Hop()
    requests.flush(first.send)
    table.accept(Accepted(state.handle, pack_u32([1, 2])))
    table.deliver(deltas(Entry(state.handle, "ab", ids=[5, 6])))
    requests.refill()
    requests.flush(Hop().send)
    for lost in table.lose(UnknownStreams((state.handle,))):
        requests.add(lost)
    again = Hop()
    requests.flush(again.send)
    for [sent], num in ((first.sent, 0), (again.sent, 2)):
        read = front_codec().decode(client_codec().encode(Frame(1, 1, 0, sent))).body
        assert isinstance(read, Submit)
        assert read.messages == tuple(turns)
        assert (read.num_chars, len(read.output_ids)) == (num, 4 * num)


def test_what_is_too_large_to_be_asked_for_again_is_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    table = ClientStreamTable()
    requests = attached(table)
    state, other = submitted(table, requests), submitted(table, requests)
    requests.flush(Hop().send)
    for each in (state, other):
        each.prompt_ids = b""
    table.deliver(deltas(Entry(state.handle, "a" * 1000)))
    monkeypatch.setattr("slipstream.request.requests.MAX_MESSAGE_BYTES", 2000)
    for lost in table.lose(UnknownStreams((state.handle, other.handle))):
        requests.add(lost)
    hop = Hop()
    requests.flush(hop.send)
    assert [body.handle for body in hop.sent if isinstance(body, Submit)] == [other.handle]
    assert isinstance(state.error, StreamLostError)


def test_a_resumed_stream_whose_submission_is_known_is_submitted_where_it_is_lost() -> None:
    """Its first ids are not here: their checksum is carried on."""
    table = ClientStreamTable()
    requests = attached(table)
    submit = new_submit("x", SamplingParams(), stream_id=b"i".hex() * 16)
    before = history_checksum(pack_u32([1, 2, 3]))
    resume = Resume(0, submit.stream_id, 7, 3, checksum=before)
    state = StreamState(resume, wants_whole=False, resubmittable=submit)
    table.add(state)
    requests.add(state)
    hop = Hop()
    requests.flush(hop.send)
    for lost in table.lose(UnknownStreams((state.handle,))):
        requests.add(lost)
    requests.flush(hop.send)
    submitted = replace(submit, num_chars=7, num_tokens=3, checksum=before)
    assert hop.sent == [resume, submitted]
    table.accept(Accepted(state.handle, pack_u32([120])))
    table.deliver(deltas(Entry(state.handle, "ab", 7, 3, ids=[4, 5])))
    requests.refill()
    requests.flush(hop.send)
    for lost in table.lose(UnknownStreams((state.handle,))):
        requests.add(lost)
    requests.flush(hop.send)
    here = history_checksum(pack_u32([1, 2, 3, 4, 5]))
    assert hop.sent[2:] == [
        Resume(0, submit.stream_id, 9, 5, checksum=here),
        replace(submit, was_accepted=True, num_chars=9, num_tokens=5, checksum=here),
    ]
    assert table.lose(UnknownStreams((state.handle,))) == []  # once over an attach
    assert isinstance(state.error, StreamLostError)


def test_what_was_computed_again_and_is_another_text_is_ended() -> None:
    """Nobody would read it to its end."""
    table = ClientStreamTable()
    requests = attached(table)
    submit = new_submit("x", SamplingParams(), stream_id="0f" * 16)
    state = StreamState(
        Resume(0, submit.stream_id, 7, 3, checksum=1), wants_whole=False, resubmittable=submit
    )
    table.add(state)
    requests.add(state)
    hop = Hop()
    requests.flush(hop.send)
    for lost in table.lose(UnknownStreams((state.handle,))):
        requests.add(lost)
    requests.flush(hop.send)
    unread = table.reject(Rejected(state.handle, Fault("diverged", "other tokens")))
    assert unread == Abort(submit.stream_id, state.handle)
    assert isinstance(state.error, StreamLostError)
    requests.abandon(unread)
    requests.refill()  # until it is acknowledged
    requests.flush(hop.send)
    assert hop.sent[-1] == Abort(submit.stream_id, state.handle)
    assert hop.receipts[-1] == unread


def test_a_resumed_stream_is_resumed_again_and_never_submitted() -> None:
    table = ClientStreamTable()
    requests = attached(table)
    state = StreamState(Resume(0, b"i" * 16, 7, 3), wants_whole=False)
    table.add(state)
    requests.add(state)
    hop = Hop()
    requests.flush(hop.send)
    assert state.was_sent
    table.deliver(deltas(Entry(state.handle, "ab", 7, 3)))
    requests.refill()
    requests.flush(hop.send)
    assert hop.sent == [Resume(state.handle, b"i" * 16, 7, 3), Resume(0, b"i" * 16, 9, 5)]
    requests.abandon(table.give_up(state, None))
    requests.flush(hop.send)
    assert hop.sent[-1] == Abort(b"i" * 16, state.handle)


def answers(table: ClientStreamTable, num: int, **params: Any) -> list[StreamState]:
    submits = new_submits(
        "x" * 10_000, params_of_answers(SamplingParams(n=num, **params)), stream_ids=[None] * num
    )
    states = [StreamState(submit, wants_whole=False) for submit in submits]
    for state in states:
        table.add(state)
    return states


def test_a_prompt_travels_once_for_all_of_its_answers() -> None:
    table = ClientStreamTable()
    requests = attached(table)
    single = submitted(table, requests)
    states = [*answers(table, 128, seed=7), *answers(table, 3)]
    for state in states:
        requests.add(state)
    hop = Hop()
    requests.flush(hop.send)
    assert [len(body.others) for body in hop.sent if isinstance(body, Submit)] == [0, 127, 2]
    assert sum(len(client_codec().encode(Frame(1, 1, 1, body))) for body in hop.sent) < 40_000
    asked = [each for body in hop.sent if isinstance(body, Submit) for each in answers_of(body)]
    assert [each.stream_id for each in asked] == [s.stream_id for s in (single, *states)]
    assert [each.handle for each in asked] == [s.handle for s in (single, *states)]
    assert [Submission(each).spec_of(each).params.seed for each in asked] == [
        *(None, *range(7, 135), None, None, None)
    ]
    assert all(state.was_sent for state in states)


def test_answers_are_asked_for_again_alone_where_they_were_accepted() -> None:
    """The others of them still travel together."""
    table = ClientStreamTable()
    requests = attached(table)
    states = answers(table, 5)
    for state in states:
        requests.add(state)
    hop = Hop(credit=0)
    requests.flush(hop.send)
    assert not any(state.was_sent for state in states)
    hop.credit = 100
    requests.flush(hop.send)
    assert kinds(hop) == [Submit]
    table.accept(Accepted(states[2].handle, pack_u32([1])))
    requests.refill()
    requests.flush(hop.send)
    assert kinds(hop)[1:] == [Submit, Resume, Submit]
    assert [len(body.others) for body in hop.sent if isinstance(body, Submit)] == [4, 1, 1]
    for state in table.lose(UnknownStreams((states[2].handle,))):
        requests.add(state)
    requests.flush(hop.send)
    again = hop.sent[-1]
    assert isinstance(again, Submit)
    assert (again.was_accepted, again.others) == (True, ())
    assert again.text == "x" * 10_000


def test_answers_that_differ_in_more_than_their_seeds_travel_apart() -> None:
    """The first alone has its prompt's log-probabilities."""
    table = ClientStreamTable()
    requests = attached(table)
    for state in answers(table, 4, prompt_logprobs=1):
        requests.add(state)
    for state in (*answers(table, 2), *answers(table, 2)):
        requests.add(state)
    hop = Hop()
    requests.flush(hop.send)
    assert [len(body.others) for body in hop.sent if isinstance(body, Submit)] == [0, 2, 1, 1]


@pytest.mark.parametrize("gone", [0, 1, 2])
def test_an_answer_that_has_left_takes_no_other_with_it(gone: int) -> None:
    """Another session goes on with it; the others of its prompt are still to be sent here."""
    table = ClientStreamTable()
    requests = attached(table)
    states = answers(table, 3)
    for state in states:
        requests.add(state)
    table.take(states[gone])
    hop = Hop()
    requests.flush(hop.send)
    assert [state.was_sent for state in states] == [at != gone for at in range(3)]
    submitted_ids = [
        each.stream_id for body in hop.sent if isinstance(body, Submit) for each in answers_of(body)
    ]
    left = [state.stream_id for state in states if state is not states[gone]]
    assert submitted_ids == left
