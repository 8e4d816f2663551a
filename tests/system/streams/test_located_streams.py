"""What a replica tells clients that route among several: who it is, and which streams it has."""

from __future__ import annotations

from msgspec import structs
from tests.helpers.mini_stack import MiniStack, RawClient

from slipstream_ipc.messages import Abort, Locate
from slipstream_ipc.messages.fields import MAX_LOCATED

PROMPT = "Chapter 3: how names are bound, and where."


def located(
    stack: MiniStack, client: RawClient, *stream_ids: bytes, scope: bytes = b""
) -> tuple[int, ...]:
    number = len(client.located)
    client.send(Locate(number, stream_ids, scope))
    stack.until(lambda: number in client.located)
    return client.located[number].moves


def test_a_stream_is_located_while_it_is_kept(make_stack) -> None:
    stack = make_stack(grace_s=2.0)
    client = stack.client()
    it = client.submit(PROMPT, max_tokens=10)
    assert located(stack, client, it.stream_id) == (1,)
    stack.until(lambda: it.is_over)
    assert located(stack, client, b"n" * 16, it.stream_id) == (0, 1)
    again = client.send_submit(structs.replace(it.submit, handle=1, was_accepted=True, moves=4))
    stack.until(lambda: again.is_over)
    assert located(stack, client, it.stream_id) == (5,)
    stack.kill_worker()
    stack.start_worker()
    assert located(stack, client, it.stream_id) == (5,)
    stack.let_pass(3.0)
    assert located(stack, client, it.stream_id) == (0,)


def test_a_stream_of_another_scope_is_unknown(make_stack) -> None:
    stack = make_stack()
    client, other = stack.client(), stack.client()
    mine = client.submit(PROMPT, max_tokens=10, scope=b"mine")
    stack.until(lambda: mine.is_over)
    for one in (client, other):
        assert located(stack, one, mine.stream_id) == (0,)
        assert located(stack, one, mine.stream_id, scope=b"theirs") == (0,)
        assert located(stack, one, mine.stream_id, scope=b"mine") == (1,)


def test_a_stream_that_went_on_elsewhere_leaves_nothing_behind(make_stack) -> None:
    stack = make_stack()
    client, other = stack.client(), stack.client()
    it = client.submit(PROMPT, max_tokens=60)
    stack.until(lambda: it.text)
    client.send(Abort(it.stream_id, it.submit.handle, has_moved=True))
    stack.until(lambda: located(stack, other, it.stream_id) == (0,))
    stack.kill_worker()
    stack.start_worker()
    assert located(stack, other, it.stream_id) == (0,)
    whole = other.submit(PROMPT, max_tokens=60)
    again = other.send_submit(structs.replace(it.submit, handle=7))  # is no duplicate
    stack.until(lambda: again.is_over and whole.is_over)
    assert again.text == whole.text
    assert again.text.startswith(it.text)


def test_one_that_is_not_its_reader_does_not_move_a_stream(make_stack) -> None:
    stack = make_stack()
    client, other = stack.client(), stack.client()
    it = client.submit(PROMPT, max_tokens=20)
    stack.until(lambda: it.text)
    other.send(Abort(it.stream_id, it.submit.handle, has_moved=True))
    stack.until(lambda: it.is_over)
    assert located(stack, other, it.stream_id) == (1,)


def test_as_many_streams_are_located_as_a_message_may_name(make_stack) -> None:
    stack = make_stack()
    ids = [number.to_bytes(16, "little") for number in range(MAX_LOCATED)]
    assert located(stack, stack.client(), *ids) == (0,) * MAX_LOCATED


def test_a_client_that_leaves_answers_unread_is_told_nothing(make_stack) -> None:
    stack = make_stack()
    [client, other] = stack.client(), stack.client()
    stack.until(lambda: client.hop.is_attached)
    ids = tuple([bytes([number]) * 16 for number in range(100)])
    for number in range(3000):
        client.send(Locate(number, ids))
    client.hop.receive = lambda _now: iter(())  # type: ignore[method-assign,assignment]
    for _ in range(60):
        stack.step()
    del client.hop.receive
    stack.until(lambda: len(client.located) == 3000)
    assert {len(answer.moves) for answer in client.located.values()} <= {0, 100}
    assert located(stack, other, *ids) == (0,) * 100


def test_equal_models_have_equal_fingerprints(make_stack) -> None:
    stacks = [make_stack(), make_stack(), make_stack(max_model_len=256)]
    clients = [stack.client() for stack in stacks]
    for stack, client in zip(stacks, clients, strict=True):
        stack.until(lambda client=client: client.welcome is not None)
    one, same, other = [client.welcome.model.fingerprint for client in clients]
    assert len(one) == 16
    assert one == same != other
