"""Kept answers: contents, scopes, bounds, and what survives the death of a process."""

from __future__ import annotations

import secrets
from typing import Any

import pytest
from msgspec import structs
from tests.helpers.answer_stack import PROMPTS, kill_and_replace, of_read_answers
from tests.helpers.mini_stack import MODEL, MiniStack, RawClient, Received

from slipstream_ipc.history.event_log import joined_events
from slipstream_ipc.messages import (
    KEPT_ENTRY_BYTES,
    MAX_RECORD_BYTES,
    AnswerOptions,
    Cancel,
    ChatMessage,
    KeepOptions,
    KeptAnswer,
    Locate,
    OtherAnswer,
    SamplingParams,
    Submit,
)
from slipstream_ipc.transport.codec import encode_params
from slipstream_worker.clients import queries
from slipstream_worker.lifecycle import recall_queue

GRACE_S = 12.0
KEEP = KeepOptions(b"a record", b"a scope")
SLOW = MODEL.replace("step_ms=0.2", "step_ms=20")


def ask(
    client: RawClient,
    prompt: str = "Keep this.",
    keep: KeepOptions | None = KEEP,
    *,
    stream_id: bytes | None = None,
    answer: AnswerOptions | None = None,
    **params: Any,
) -> Received:
    params = {"max_tokens": 30, "ignore_eos": True, "temperature": 0.0, **params}
    return client.send_submit(
        Submit(
            len(client.streams),
            secrets.token_bytes(16) if stream_id is None else stream_id,
            encode_params(SamplingParams(**params)),
            text=prompt if answer is None else None,
            messages=() if answer is None else (ChatMessage("user", prompt),),
            answer=answer,
            keep=keep,
        )
    )


def silence(stack: MiniStack, client: RawClient) -> None:
    """The client's process is gone, without a word."""
    stack.clients.remove(client)
    client.hop.close()


def pass_grace(stack: MiniStack) -> None:
    """Let ended streams be forgotten, in the worker and in the core."""
    stack.let_pass(GRACE_S + 1)
    stack.until(stack.holds_nothing)


def recall(client: RawClient, it: Received, scope: bytes = KEEP.scope) -> KeptAnswer | None:
    return client.recall(it.stream_id, scope).answer


@pytest.fixture
def stack(make_stack: Any) -> Any:
    return make_stack(MODEL, grace_s=GRACE_S, client_timeout_s=2.0)


@pytest.fixture
def client(stack: Any) -> Any:
    return stack.client()


@pytest.fixture
def kept(stack: Any, client: Any) -> Any:
    """A stream that has ended and is forgotten, and its answer."""
    it = ask(client)
    stack.until(lambda: it.is_over)
    pass_grace(stack)
    answer = recall(client, it)
    assert answer is not None
    return it, answer


def core_holds(stack: Any, num: int) -> bool:
    return len(stack.core.handler._held) == num


# ---- what is kept ------------------------------------------------------------------------------


def test_an_answer_is_what_its_reader_got(kept: Any) -> None:
    it, answer = kept
    assert answer == KeptAnswer(KEEP, it.prompt_len, it.end, it.text)
    assert it.text


def test_nothing_is_kept_unless_it_was_asked_for(stack: Any, client: Any) -> None:
    it = ask(client, keep=None)
    stack.until(lambda: it.is_over)
    assert client.recall(it.stream_id).answer is None
    assert client.recall(secrets.token_bytes(16)).answer is None


@pytest.mark.parametrize("interval", [1, 7])
@pytest.mark.parametrize("stop", [(), ("b<", "a a")])
def test_events_are_those_that_the_reader_got(
    make_stack: Any, interval: int, stop: tuple[str, ...]
) -> None:
    stack = of_read_answers(make_stack)(grace_s=GRACE_S, stream_interval=interval)
    client = stack.client()
    streams = [
        ask(client, prompt, answer=AnswerOptions(), max_tokens=120, stop=stop) for prompt in PROMPTS
    ]
    stack.until(lambda: all(it.is_over for it in streams))
    for it in streams:
        answer = recall(client, it)
        assert answer is not None
        assert answer.end == it.end
        assert joined_events(answer.events) == joined_events(it.events)
        assert sum(event.num_tokens + event.num_before for event in answer.events) <= 120
        assert not answer.text


def test_a_stream_that_runs_is_found_with_its_record_and_read_from_its_beginning(
    make_stack: Any,
) -> None:
    stack = make_stack(SLOW, grace_s=GRACE_S)
    client, other = stack.client(), stack.client()
    it = ask(client, max_tokens=40)
    stack.until(lambda: len(it.token_ids) > 10)
    assert recall(other, it) == KeptAnswer(KEEP, it.prompt_len)
    taken = other.take_over(it)
    stack.until(lambda: taken.is_over)
    answer = recall(other, it)
    assert answer is not None
    assert (answer.text, answer.end) == (taken.text, taken.end)


def test_a_prompt_that_is_not_tokenised_is_found(stack: Any, client: Any) -> None:
    stack.until(lambda: client.hop.is_attached)
    stack.prompts.is_held = True
    it = ask(client)
    assert recall(client, it) == KeptAnswer(KEEP)
    stack.prompts.is_held = False
    stack.until(lambda: it.is_over)
    assert recall(client, it).end == it.end


def test_an_aborted_stream_is_kept(make_stack: Any) -> None:
    stack = make_stack(SLOW)
    client = stack.client()
    it = ask(client, max_tokens=400)
    stack.until(lambda: len(it.token_ids) > 3)
    client.abort(it)
    stack.until(lambda: it.is_over)
    answer = recall(client, it)
    assert answer is not None
    assert (answer.end, answer.text) == (it.end, it.text)
    assert it.end.reason == "abort"


# ---- scopes ------------------------------------------------------------------------------------


def test_another_scope_finds_nothing_and_forgets_nothing(make_stack: Any) -> None:
    stack = make_stack(SLOW, grace_s=GRACE_S)
    client = stack.client()
    it = ask(client)
    stack.until(lambda: it.accepted)
    for scope in (b"", b"another"):
        assert client.recall(it.stream_id, scope).answer is None
        assert client.recall(it.stream_id, scope, forget=True).answer is None
    assert recall(client, it) == KeptAnswer(KEEP, it.prompt_len)
    stack.until(lambda: it.is_over)
    assert it.end.reason == "length"
    pass_grace(stack)
    for scope in (b"", b"another"):
        assert client.recall(it.stream_id, scope, forget=True).answer is None
    assert recall(client, it).end == it.end


# ---- how long ----------------------------------------------------------------------------------


def test_what_is_forgotten_is_gone(stack: Any, client: Any, kept: Any) -> None:
    it, answer = kept
    assert client.recall(it.stream_id, KEEP.scope, forget=True).answer == answer
    assert client.recall(it.stream_id, KEEP.scope, forget=True).answer is None
    stack.until(lambda: core_holds(stack, 0))


def test_a_recall_waits_until_earlier_answers_are_read(
    stack: Any, client: Any, kept: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    it, answer = kept
    with monkeypatch.context() as patched:
        patched.setattr(queries, "MAX_UNREAD", -1)
        number = client.send_recall(it.stream_id, KEEP.scope, forget=True)
        stack.until(lambda: stack.worker._from_clients.has_waiting)
        stack.let_pass(2.0)
        assert number not in client.recalled
        assert stack.worker.lifecycle.keeper.has(it.stream_id)
    stack.until(lambda: number in client.recalled)
    assert client.recalled[number].answer == answer


def test_a_recall_that_finds_too_many_waiting_forgets_nothing(
    client: Any, kept: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    it, answer = kept
    with monkeypatch.context() as patched:
        patched.setattr(recall_queue, "MAX_WAITING", 0)
        refused = client.recall(it.stream_id, KEEP.scope, forget=True)
    assert (refused.answer, refused.fault.code) == (None, "overloaded")
    assert recall(client, it) == answer


@pytest.mark.parametrize("is_forgotten", [True, False])
def test_what_is_forgotten_in_the_grace_time_stays_gone(
    stack: Any, client: Any, is_forgotten: bool
) -> None:
    it = ask(client)
    stack.until(lambda: it.is_over)
    client.recall(it.stream_id, KEEP.scope, forget=is_forgotten)
    stack.until(lambda: core_holds(stack, not is_forgotten))
    stack.until(lambda: stack.holds_nothing() == is_forgotten)
    stack.kill_worker()
    stack.start_worker()
    assert (recall(client, it) is None) == is_forgotten


@pytest.mark.parametrize("state", ["read", "unread", "running", "unaccepted"])
@pytest.mark.parametrize("dies", ["nobody", "worker"])
def test_what_is_forgotten_is_no_stream_either(make_stack: Any, state: str, dies: str) -> None:
    """Its own reader has its end; none that comes later gets a word, and it does not run again."""
    stack = make_stack(SLOW, grace_s=GRACE_S)
    client, other = stack.client(), stack.client()
    other.resubmits = False
    keep = structs.replace(KEEP, is_background=True)
    it = ask(client, keep=keep, max_tokens=400 if state == "running" else 10)
    if state == "unaccepted":
        client.resubmits = False
        stack.prompts.is_held = True
        stack.until(lambda: stack.worker.streams.get(it.stream_id) is not None)
    elif state == "running":
        stack.until(lambda: len(it.token_ids) > 3)
    elif state == "read":
        stack.until(lambda: it.is_over)
    else:
        stack.until(lambda: it.accepted)
        silence(stack, client)
        stack.until(lambda: other.recall(it.stream_id, KEEP.scope).answer.end is not None)
    assert other.recall(it.stream_id, KEEP.scope, forget=True).answer is not None
    assert other.recall(it.stream_id, KEEP.scope).answer is None
    early = other.take_over(it)
    stack.until(lambda: early.is_unknown)
    other.send(Locate(1, (it.stream_id,)))
    other.send(Cancel(2, (it.stream_id,)))
    if state != "unread":
        stack.until(lambda: it.is_over)
    stack.until(lambda: 1 in other.located and 2 in other.cancelled)
    assert other.located[1].moves == (0,)
    assert other.cancelled[2].found != ("running",)
    stack.until(stack.holds_nothing)  # long before the grace time is over
    early.is_superseded = True  # it is not asked for again
    if dies == "worker":
        before = other.welcome
        stack.kill_worker()
        stack.start_worker()
        stack.until(lambda: other.welcome is not before)
    stack.prompts.is_held = False
    late = other.take_over(it)
    stack.until(lambda: late.is_unknown)
    if (state, dies) != ("unaccepted", "worker"):  # of which the core has not heard
        again = other.send_submit(structs.replace(it.submit, handle=90, was_accepted=True))
        stack.until(lambda: again.fault is not None)
        assert again.fault.code in ("unknown_stream", "bad_request")
    assert not any(each.text or each.accepted for each in (early, late))
    assert other.recall(it.stream_id, KEEP.scope).answer is None


@pytest.mark.parametrize("is_back", [False, True])
def test_the_reader_of_what_is_forgotten_gets_what_is_under_way(
    make_stack: Any, is_back: bool
) -> None:
    stack = make_stack(grace_s=GRACE_S)
    client, other = stack.client(), stack.client()
    it = ask(client)
    stack.until(lambda: it.accepted)
    client.is_reading = False
    stack.until(lambda: recall(other, it).end is not None)
    assert not it.is_over
    assert other.recall(it.stream_id, KEEP.scope, forget=True).answer is not None
    other.resubmits = False
    early = other.take_over(it)
    stack.until(lambda: early.is_unknown)
    client.is_reading = True
    if is_back:
        client.hop.attach(stack.now())
    stack.until(lambda: it.is_over)
    assert (it.end.reason, len(it.token_ids)) == ("length", 30)
    stack.until(stack.holds_nothing)


def test_what_is_forgotten_does_not_come_from_another_replica(make_stack: Any) -> None:
    """One that has nothing of a stream is told, too; other scopes and streams do not notice."""
    stack = make_stack()
    client = stack.client()
    client.resubmits = False
    stream_id = secrets.token_bytes(16)
    for named in (stream_id, b"n" * 16):
        assert client.recall(named, b"mine", forget=True).answer is None
    its, mine = (
        client.send_submit(
            structs.replace(
                ask(client, stream_id=id_).submit, scope=scope, handle=handle, keep=None, moves=2
            )
        )
        for id_, scope, handle in ((b"n" * 16, b"theirs", 50), (stream_id, b"mine", 51))
    )
    del client._waiting[0], client._waiting[1]
    stack.until(lambda: its.is_over and mine.is_over)
    assert its.end is not None
    assert mine.fault.code == "unknown_stream"


def test_a_stream_that_another_worker_left_is_forgotten_with_its_answer(make_stack: Any) -> None:
    """Where there was no room for the answer, the stream is all there is of it."""
    stack = make_stack(grace_s=GRACE_S)
    client = stack.client()
    client.resubmits = False
    its = client.submit("Another's.", max_tokens=10, scope=b"theirs")
    mine = client.submit("My own.", max_tokens=10, scope=b"mine")
    stack.until(lambda: its.is_over and mine.is_over)
    for it in (its, mine):
        assert client.recall(it.stream_id, b"mine", forget=True).answer is None
    found = [client.take_over(it, scope=it.submit.scope) for it in (its, mine)]
    stack.until(lambda: found[0].is_over and found[1].is_unknown)
    assert found[0].text == its.text


def test_a_running_stream_that_is_forgotten_ends_and_is_not_kept(make_stack: Any) -> None:
    stack = make_stack(SLOW, grace_s=GRACE_S)
    client = stack.client()
    it = ask(client, max_tokens=400)
    stack.until(lambda: len(it.token_ids) > 3)
    found = client.recall(it.stream_id, KEEP.scope, forget=True).answer
    assert found == KeptAnswer(KEEP, it.prompt_len)
    stack.until(lambda: it.is_over)
    assert it.end.reason == "abort"
    assert recall(client, it) is None
    stack.kill_worker()
    stack.start_worker()
    assert recall(client, it) is None
    pass_grace(stack)


def test_a_prompt_being_tokenised_is_forgotten(stack: Any, client: Any) -> None:
    stack.until(lambda: client.hop.is_attached)
    stack.prompts.is_held = True
    it = ask(client)
    assert client.recall(it.stream_id, KEEP.scope, forget=True).answer == KeptAnswer(KEEP)
    stack.until(lambda: it.is_over)
    assert it.fault is not None
    assert recall(client, it) is None


def test_without_a_store_nothing_is_kept(make_stack: Any) -> None:
    stack = make_stack(SLOW, grace_s=GRACE_S, response_store_mib=0)
    client = stack.client()
    it = ask(client)
    stack.until(lambda: it.accepted)
    assert client.welcome is not None
    assert client.welcome.model.max_kept_bytes == 0
    assert recall(client, it) == KeptAnswer(KEEP, it.prompt_len)
    stack.until(lambda: it.is_over)
    assert recall(client, it) is None
    pass_grace(stack)


def test_the_answer_used_longest_ago_makes_room(make_stack: Any) -> None:
    stack = make_stack(MODEL, grace_s=GRACE_S, response_store_mib=0.0625)
    client = stack.client()
    keep = KeepOptions(bytes(12_600), b"big")
    first, second, third, fourth = [ask(client, keep=keep) for _ in range(4)]
    small = ask(client)
    stack.until(lambda: all(it.is_over for it in client.streams.values()))
    assert recall(client, first, b"big") is not None
    fifth = ask(client, keep=keep)
    stack.until(lambda: fifth.is_over)
    held = [recall(client, it, b"big") for it in (first, second, third, fourth, fifth)]
    assert [answer is not None for answer in held] == [True, False, True, True, True]
    assert recall(client, small) is not None
    too_large = ask(client, keep=KeepOptions(bytes(17_000), b"large"))
    stack.until(lambda: too_large.is_over)
    assert recall(client, too_large, b"large") is None
    stack.until(lambda: core_holds(stack, 5))
    pass_grace(stack)


def test_the_largest_answer_that_is_kept_is_on_the_models_card(make_stack: Any) -> None:
    stack = make_stack(MODEL, grace_s=GRACE_S, response_store_mib=0.0625)
    client = stack.client()
    room = 2**14 - KEPT_ENTRY_BYTES
    most = ask(client, keep=KeepOptions(bytes(room - 1000), b"one"), max_tokens=10)
    more = ask(client, keep=KeepOptions(bytes(room), b"two"), max_tokens=10)
    stack.until(lambda: most.is_over and more.is_over)
    assert client.welcome.model.max_kept_bytes == 2**14
    assert most.text
    assert more.text
    assert recall(client, most, b"one") is not None
    assert recall(client, more, b"two") is None


# ---- over deaths -------------------------------------------------------------------------------


def test_a_workers_successor_has_it(stack: Any, client: Any, kept: Any) -> None:
    it, answer = kept
    for _ in range(2):
        stack.kill_worker()
        stack.start_worker()
        assert recall(client, it) == answer


def test_a_core_and_then_the_worker_may_die(stack: Any, client: Any, kept: Any) -> None:
    it, answer = kept
    for _ in range(2):
        stack.kill_core()
        stack.start_core()
        stack.until(lambda: core_holds(stack, 1))
        stack.kill_worker()
        stack.start_worker()
        assert recall(client, it) == answer


def test_what_both_have_lost_is_unknown(stack: Any, client: Any, kept: Any) -> None:
    it, _ = kept
    kill_and_replace(stack, "both")
    assert recall(client, it) is None


def test_what_both_have_lost_is_found_once_its_client_has_brought_it_back(
    make_stack: Any,
) -> None:
    """Another client asks first: there may be several fronts."""
    stack = make_stack(SLOW, grace_s=GRACE_S)
    client, other = stack.client(), stack.client()
    it = ask(client, max_tokens=400)
    stack.until(lambda: len(it.token_ids) > 2)
    kill_and_replace(stack, "both")
    client.is_reading = False
    number = other.send_recall(it.stream_id, KEEP.scope)
    stack.until(lambda: stack.worker._from_clients.has_waiting)
    assert number not in other.recalled
    client.is_reading = True
    stack.until(lambda: number in other.recalled)
    assert other.recalled[number].answer.keep == KEEP


def test_many_recalls_that_have_waited_are_answered_without_a_fault(stack: Any, kept: Any) -> None:
    kill_and_replace(stack, "both")
    other = stack.client()
    num = queries.MAX_UNREAD + 200
    numbers = [other.send_recall(number.to_bytes(16)) for number in range(num)]
    recalls = stack.worker._from_clients._recalls
    stack.until(lambda: len(recalls) == num)
    assert not other.recalled
    stack.let_pass(6.0)
    stack.until(lambda: len(other.recalled) == num)
    assert not any(other.recalled[number].fault for number in numbers)


@pytest.mark.parametrize("is_late", [True, False])
def test_the_death_of_a_worker_alone_makes_no_recall_wait(make_stack: Any, is_late: bool) -> None:
    """It had told the core of its streams before, unless it died as soon as that was there."""
    stack = make_stack(SLOW, grace_s=GRACE_S)
    client, other = stack.client(), stack.client()
    it = ask(client, max_tokens=400)
    stack.until(lambda: len(it.token_ids) > 2)
    kill_and_replace(stack, "core")
    stack.until(lambda: stack.core.handler.num_streams == 1)
    stack.kill_worker()
    stack.worker_ended_s += 60.0 * is_late
    stack.start_worker()
    client.is_reading = False
    number = other.send_recall(bytes(16), KEEP.scope)
    stack.until(lambda: stack.worker._from_core.is_synced)
    stack.until(lambda: number in other.recalled or stack.worker._from_clients.has_waiting)
    assert recall(other, it).keep == KEEP
    assert (number in other.recalled) == is_late


@pytest.mark.parametrize("keep", [KEEP, None])
def test_what_is_cancelled_while_it_comes_back_has_ended(
    make_stack: Any, keep: KeepOptions | None
) -> None:
    """What is not kept is not waited for."""
    stack = make_stack(SLOW, grace_s=GRACE_S)
    client = stack.client()
    it = ask(client, keep=keep, max_tokens=400)
    stack.until(lambda: len(it.token_ids) > 2)
    kill_and_replace(stack, "both")
    stack.prompts.is_held = True
    stack.until(lambda: stack.worker.streams.get(it.stream_id) is not None)
    client.send(Cancel(0, (it.stream_id,)))
    stack.until(lambda: stack.worker.streams.get(it.stream_id).is_given_up)
    if keep is None:
        assert recall(client, it) is None
        return
    number = client.send_recall(it.stream_id, KEEP.scope)
    stack.until(lambda: stack.worker._from_clients.has_waiting)
    assert number not in client.recalled
    stack.prompts.is_held = False
    stack.until(lambda: number in client.recalled)
    assert client.recalled[number].answer.end == it.end
    assert it.end.reason == "abort"


def answers_after_a_death(make: Any, what: str, num_steps: int) -> list[KeptAnswer | None]:
    """What a later worker has kept, where this dies after so many steps."""
    stack = make(grace_s=GRACE_S)
    client = stack.client()
    streams = [
        ask(client, prompt, stream_id=bytes([at + 1]) * 16, answer=AnswerOptions())
        for at, prompt in enumerate(PROMPTS)
    ]
    stack.until(lambda: all(it.accepted for it in streams))
    for _ in range(num_steps):
        stack.step()
    if what == "link":
        stack.worker._core.attach(stack.now())
    elif what:
        kill_and_replace(stack, what)
    stack.until(lambda: all(it.is_over for it in streams))
    stack.until(lambda: core_holds(stack, len(streams)))
    pass_grace(stack)
    stack.kill_worker()
    stack.start_worker()
    return [recall(client, it) for it in streams]


@pytest.mark.quick
@pytest.mark.parametrize("what", ["worker", "core", "link"])
def test_a_death_at_any_time_loses_and_changes_nothing(make_stack: Any, what: str) -> None:
    make = of_read_answers(make_stack)
    expected = answers_after_a_death(make, "", 0)
    assert None not in expected
    for num_steps in range(0, 60, 4):
        assert answers_after_a_death(make, what, num_steps) == expected


def test_recalls_wait_for_what_is_restored_and_streams_do_not(make_stack: Any) -> None:
    stack = make_stack(MODEL, grace_s=GRACE_S, response_store_mib=64)
    client = stack.client()
    keep = KeepOptions(bytes(MAX_RECORD_BYTES), b"big")
    streams = [ask(client, keep=keep, max_tokens=2) for _ in range(40)]
    stack.until(lambda: all(it.is_over for it in streams))
    stack.until(lambda: core_holds(stack, len(streams)))
    stack.kill_worker()
    stack.start_worker()
    begun = ask(client, max_tokens=3)
    stack.until(lambda: begun.is_over)
    assert not stack.worker.lifecycle.keeper.is_complete
    assert all(recall(client, it, b"big") is not None for it in streams)
    assert stack.worker.lifecycle.keeper.is_complete


def test_a_link_that_fails_while_answers_are_restored_loses_none(make_stack: Any) -> None:
    stack = make_stack(MODEL, grace_s=GRACE_S)
    client = stack.client()
    keep = KeepOptions(bytes(2**19), b"big")
    streams = [ask(client, keep=keep, max_tokens=2) for _ in range(20)]
    stack.until(lambda: core_holds(stack, len(streams)))
    stack.kill_worker()
    stack.start_worker()
    keeper = stack.worker.lifecycle.keeper
    stack.until(lambda: keeper.num_answers > 0)
    assert not keeper.is_complete
    stack.worker._core.attach(stack.now())
    assert all(recall(client, it, b"big") is not None for it in streams)
    assert core_holds(stack, len(streams))


# ---- in the background -------------------------------------------------------------------------

BACKGROUND = structs.replace(KEEP, is_background=True)


@pytest.mark.parametrize("leaves", ["silently", "with a goodbye"])
@pytest.mark.parametrize("dies", ["nothing", "worker", "core"])
def test_a_background_stream_runs_to_its_end_without_a_reader(
    make_stack: Any, leaves: str, dies: str
) -> None:
    stack = make_stack(SLOW, grace_s=0.0, client_timeout_s=1.0)
    other, client = stack.client(), stack.client()
    it, read = ask(client, keep=BACKGROUND, max_tokens=60), ask(client, max_tokens=400)
    stack.until(lambda: len(it.token_ids) > 2 and len(read.token_ids) > 2)
    if leaves == "silently":
        silence(stack, client)
    else:
        client.goodbye()
    if dies != "nothing":
        kill_and_replace(stack, dies)
        stack.until(lambda: bool(stack.worker.streams.all()))
    stack.let_pass(12.0)
    stack.until(lambda: recall(other, read).end is not None)
    assert recall(other, read).end.reason == "abort"
    stack.until(lambda: recall(other, it).end is not None)
    answer = recall(other, it)
    assert (answer.end.reason, answer.end.num_tokens) == ("length", 60)
    assert answer.text.startswith(it.text)
    stack.let_pass(2.0)
    stack.until(stack.holds_nothing)
    assert recall(other, it) == answer


def test_a_background_prompt_is_tokenised_without_a_reader(stack: Any, client: Any) -> None:
    other = stack.client()
    stack.until(lambda: client.hop.is_attached)
    stack.prompts.is_held = True
    it = ask(client, keep=BACKGROUND)
    stack.until(lambda: recall(other, it) is not None)
    client.goodbye()
    stack.until(lambda: stack.worker.streams.get(it.stream_id).reader is None)
    stack.prompts.is_held = False
    stack.until(lambda: recall(other, it).end is not None)
    assert recall(other, it).end.num_tokens == 30


def test_a_background_stream_can_be_aborted_and_read(make_stack: Any) -> None:
    stack = make_stack(SLOW, grace_s=GRACE_S)
    client, other = stack.client(), stack.client()
    it = ask(client, keep=BACKGROUND, max_tokens=400)
    stack.until(lambda: it.accepted)
    client.goodbye()
    taken = other.take_over(it)
    stack.until(lambda: len(taken.token_ids) > 5)
    other.abort(taken)
    stack.until(lambda: taken.is_over)
    assert recall(other, it).end == taken.end
    assert taken.end.reason == "abort"


# ---- what a hostile client may ask for ---------------------------------------------------------


def test_a_record_that_is_too_large_is_refused(stack: Any, client: Any) -> None:
    most = ask(client, keep=KeepOptions(bytes(MAX_RECORD_BYTES)))
    more = ask(client, keep=KeepOptions(bytes(MAX_RECORD_BYTES + 1)))
    stack.until(lambda: most.is_over and more.is_over)
    assert most.end is not None
    assert (more.fault.code, more.fault.field) == ("bad_request", "keep")
    assert not stack.worker.lifecycle.keeper._record_bytes


def test_several_answers_are_not_kept(stack: Any, client: Any) -> None:
    it = ask(client, keep=None)
    client._waiting.pop()
    other = client.send_submit(structs.replace(it.submit, handle=1, stream_id=bytes(16)))
    client._waiting.pop()
    client.send(structs.replace(it.submit, others=(OtherAnswer(1, bytes(16)),), keep=KEEP))
    stack.until(lambda: it.is_over and other.is_over)
    assert [each.fault.field for each in (it, other)] == ["keep", "keep"]


def test_records_of_running_streams_are_bounded_and_other_scopes_find_room(
    make_stack: Any,
) -> None:
    stack = make_stack(SLOW, response_store_mib=1)
    client = stack.client()
    keep = KeepOptions(bytes(2**18), b"greedy")
    greedy = [ask(client, keep=keep, max_tokens=400) for _ in range(12)]
    modest = ask(client, keep=structs.replace(keep, scope=b"modest"), max_tokens=400)
    stack.until(lambda: modest.accepted and all(it.accepted or it.fault for it in greedy))
    assert [it.fault is None for it in greedy] == [True] * 4 + [False] * 8
    assert {it.fault.code for it in greedy[4:]} == {"overloaded"}
    for it in client.streams.values():
        client.abort(it)
    stack.until(lambda: all(it.is_over for it in client.streams.values()))
    assert not stack.worker.lifecycle.keeper._record_bytes
