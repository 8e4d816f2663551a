"""What many requests of one client cost the others: a turn, whoever dies in between."""

from __future__ import annotations

from pathlib import Path

import pytest
from msgspec import structs
from tests.helpers.ports import free_port

from slipstream.cli.keys import add_client, add_front, make_folder
from slipstream_core.scheduler.waiting_queue import WaitingQueue
from slipstream_ipc.messages import Cancel, Locate, Submit, Tokenize
from slipstream_ipc.transport.curve import Access, load_client_keys
from slipstream_ipc.validation.request_spec import MAX_PRIORITY


@pytest.mark.parametrize("dies", ["nobody", "worker", "core", "both"])
def test_one_tenants_queue_is_not_everybodys(make_stack, dies) -> None:
    stack = make_stack(max_num_seqs=4, grace_s=60)
    many, one = stack.client(), stack.client()
    flood = [many.submit(f"number {n}", max_tokens=8) for n in range(200)]
    stack.until(lambda: all(it.accepted for it in flood))
    if dies in ("worker", "both"):
        stack.kill_worker()
    if dies in ("core", "both"):
        stack.kill_core()
        stack.start_core()
    if dies in ("worker", "both"):
        stack.start_worker()
    stack.until(lambda: many.hop.is_attached and one.hop.is_attached)
    stack.until(lambda: stack.core.scheduler.num_running == 4)
    num_before = sum(it.is_over for it in flood)
    it = one.submit("just this", max_tokens=8)
    stack.until(lambda: it.is_over)
    # those that ran already, one that goes first, and what ends while messages are under way
    assert sum(it.is_over for it in flood) - num_before < 60
    stack.until(lambda: all(it.is_over for it in flood))
    assert {it.end.reason for it in flood} == {"length"}


def test_whom_a_stream_is_for_outlives_everybody(make_stack) -> None:
    stack = make_stack()
    client, other = stack.client(), stack.client()
    mine = [client.submit(f"number {n}", max_tokens=300) for n in range(2)]
    its = other.submit("other", max_tokens=300)
    stack.until(lambda: its.accepted and all(it.accepted for it in mine))

    def tenants() -> list[bytes]:
        return sorted(stack.core.scheduler._requests.tenants.values())

    expected = tenants()
    assert len(set(expected)) == 2
    stack.kill_core()
    stack.start_core()
    stack.until(lambda: tenants() == expected)
    stack.kill_worker()
    stack.start_worker()
    stack.until(lambda: len(stack.worker.streams) == 3)
    found = sorted(it.registration.spec.tenant for it in stack.worker.streams.all())
    assert found == expected


def test_over_tcp_a_tenant_is_a_key_however_many_clients_have_it(
    make_stack, tmp_path: Path
) -> None:
    make_folder(tmp_path / "keys")
    _, secret = add_client(tmp_path / "keys", "other")
    mine, others = load_client_keys(tmp_path / "keys"), load_client_keys(secret)
    address = f"tcp://127.0.0.1:{free_port()}"
    stack = make_stack(listen=address, keys=str(tmp_path / "keys"))
    local = stack.client()
    clients = [stack.client(address, Access(keys)) for keys in (mine, mine, others)]

    def named(submit: Submit) -> Submit:
        return structs.replace(submit, tenant=b"named by itself")

    expected = [mine.pair.public, mine.pair.public, others.pair.public, b"named by itself"]
    streams = []
    for number, client in enumerate([*clients, local]):
        streams.append(client.submit(f"number {number}", max_tokens=400))
        client._waiting[-1] = named(client._waiting[-1])
    streams.append(clients[0].submit("names none", max_tokens=400))
    expected.append(mine.pair.public)
    stack.until(lambda: all(it.accepted for it in streams))
    found = {it.stream_id: it.registration.spec.tenant for it in stack.worker.streams.all()}
    assert [found[it.stream_id] for it in streams] == expected
    stack.prompts.is_held = True
    for client in clients:
        client.send(Tokenize(0, "x"))
    asked = stack.worker._from_clients._queries._in_process
    stack.until(lambda: len(asked) == 3)
    keys = [mine.pair.public] * 2 + [others.pair.public]
    assert sorted(query.tenant for query in asked.values()) == sorted(keys)


def test_over_tcp_a_stream_is_its_keys_whatever_scope_is_named(make_stack, tmp_path: Path) -> None:
    """Ana has a key, and so have Bob and a front; what no key has asked for is anybody's by id."""
    make_folder(tmp_path / "keys")
    _, bobs = add_client(tmp_path / "keys", "bob")
    _, fronts = add_front(tmp_path / "keys", "route")
    mine, bobs, fronts = (load_client_keys(path) for path in (tmp_path / "keys", bobs, fronts))
    address = f"tcp://127.0.0.1:{free_port()}"
    stack = make_stack(listen=address, keys=str(tmp_path / "keys"), grace_s=60)
    ana, anas_other, bob = (stack.client(address, Access(keys)) for keys in (mine, mine, bobs))
    front, local = stack.client(address, Access(fronts)), stack.client()
    others = (bob, front, local)
    for client in (ana, *others):
        client.resubmits = False
    it = ana.submit("the password is swordfish", max_tokens=400)
    stack.until(lambda: len(it.token_ids) > 3)
    asked = [client.take_over(it, scope=mine.pair.public[:1]) for client in others]
    asked += [client.take_over(it) for client in others]
    again = [
        client.send_submit(structs.replace(it.submit, handle=9, was_accepted=accepted))
        for client, accepted in zip(others, (False, True, False), strict=True)
    ]
    for client in others:
        client.send(Cancel(1, (it.stream_id,)))
        client.send(Locate(2, (it.stream_id,)))
    stack.until(lambda: all(1 in client.cancelled and 2 in client.located for client in others))
    assert {client.cancelled[1].found for client in others} == {("unknown",)}
    assert {client.located[2].moves for client in others} == {(0,)}
    stack.until(lambda: all(each.fault is not None for each in again))
    assert {each.fault.code for each in again} == {"conflict"}
    stack.until(lambda: all(each.is_unknown for each in asked))
    assert not any(each.accepted or each.text for each in asked)
    assert not it.is_superseded
    its = anas_other.take_over(it)  # which names no scope, and has the key
    stack.until(lambda: its.is_over and it.is_superseded)
    assert (its.end.reason, its.accepted) == ("length", 1)
    for client in (front, local):
        open_to_all = client.submit("nobody's in particular", max_tokens=4)
        stack.until(lambda it=open_to_all: it.is_over)
        read = bob.take_over(open_to_all)
        stack.until(lambda read=read: read.is_over)
        assert read.text == open_to_all.text


@pytest.mark.parametrize("shares", [False, True])
def test_a_tenant_shares_no_cache_with_another_unless_all_do(make_stack, shares: bool) -> None:
    """`usage.cached_tokens` told any key what another's prompts begin with, block by block."""
    stack = make_stack(share_prefix_cache=shares)
    client, prompt = stack.client(), "the code of the project is 7391, never tell anybody" * 4

    def ended(tenant: bytes, salt: str = "") -> tuple[int, bytes]:
        it = client.submit(prompt, max_tokens=2)
        named = structs.replace(client._waiting[-1], tenant=tenant, cache_salt=salt)
        client._waiting[-1] = named
        stack.until(lambda: it.is_over)
        admit = stack.worker.streams.get(it.stream_id).registration
        return it.end.num_cached_tokens, admit.derived.prefix_root

    assert ended(b"one")[0] == 0
    again, root = ended(b"one")
    assert again > 0
    other, others = ended(b"two")
    assert (other > 0, root == others) == (shares, shares)
    assert ended(b"two", "own")[0] == 0
    assert ended(b"one", "own")[0] == (again if shares else 0)
    assert ended(b"")[0] == (again if shares else 0)  # a local client, that names none
    assert (ended(b"")[1] == root) == shares


def test_over_tcp_a_keys_priority_counts_among_its_own_requests(make_stack, tmp_path: Path) -> None:
    make_folder(tmp_path / "keys")
    address = f"tcp://127.0.0.1:{free_port()}"
    stack = make_stack(listen=address, keys=str(tmp_path / "keys"))
    keyed = stack.client(address, Access(load_client_keys(tmp_path / "keys")))
    found = []
    for client in (keyed, stack.client()):
        it = client.submit("x", max_tokens=2)
        client._waiting[-1] = structs.replace(client._waiting[-1], priority=-5)
        stack.until(lambda: it.is_over)  # noqa: B023  (it is over before the next one)
        spec = stack.worker.streams.get(it.stream_id).spec
        found.append((spec.priority, spec.own_priority))
    assert found == [(0, -5), (-5, 0)]


def test_a_client_that_lives_and_acknowledges_nothing_is_dismissed(make_stack) -> None:
    stack = make_stack(client_timeout_s=5.0, grace_s=20.0)
    bad, good = stack.client(), stack.client()
    stack.until(lambda: bad.hop.is_attached)
    link = bad.hop.link
    codec = bad.hop._codec
    encode = codec.encode
    codec.encode = lambda frame: encode(structs.replace(frame, ack=0))
    streams = [bad.submit(f"number {n}", max_tokens=400) for n in range(4)]
    own = good.submit("just this", max_tokens=400)
    stack.until(lambda: own.is_over)
    (session,) = [
        each for each in stack.worker._front.sessions if each.identity == bad.hop._identity
    ]
    assert session.link.num_unacked
    assert len(stack.worker.streams) == 5
    stalls_at = session.link._progress_at + 30.0
    stack.let_pass(stalls_at - 5.0 - stack.now())  # it answers each ping
    assert session.is_open
    assert bad.hop.epoch == link.epoch
    stack.pass_time(10.0)
    with pytest.raises(AssertionError, match="nothing was acknowledged for 30 s"):
        stack.until(lambda: False)  # who speaks by hand is not prepared for an AttachRefused
    bad.is_reading = False
    assert not session.is_open
    assert session.link.num_unacked == 0  # nothing is kept of what was under way
    assert not stack.worker.lifecycle.num_running
    later = good.submit("and this", max_tokens=20)
    stack.until(lambda: later.is_over)
    assert later.end.reason == "length"
    stack.until(lambda: not any(stack.worker.streams.get(it.stream_id) for it in streams))


NUM_TURNS = 12  # requests of either key
PRIORITIES = {
    "none": [0] * NUM_TURNS,
    "first of all": [-MAX_PRIORITY] * NUM_TURNS,
    "each before the last": [-number for number in range(NUM_TURNS)],
    "both ends": [(-MAX_PRIORITY, MAX_PRIORITY)[number % 2] for number in range(NUM_TURNS)],
}


@pytest.mark.parametrize("priorities", PRIORITIES.values(), ids=PRIORITIES)
def test_whatever_a_keys_priorities_another_waits_for_twice_its_own_turns(
    make_stack, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, priorities: list[int]
) -> None:
    """With priorities that counted among all, every one of k2's ran before k1's first."""
    make_folder(tmp_path / "keys")
    _, secret = add_client(tmp_path / "keys", "other")
    k1, k2 = load_client_keys(tmp_path / "keys"), load_client_keys(secret)
    address = f"tcp://127.0.0.1:{free_port()}"
    stack = make_stack(listen=address, keys=str(tmp_path / "keys"), max_num_seqs=1)
    ahead = stack.client().submit("it has the only place", max_tokens=400)
    stack.until(lambda: stack.core.scheduler.num_running == 1)
    first, second = (stack.client(address, Access(key)) for key in (k1, k2))
    mine = [first.submit("the same length", max_tokens=2) for _ in range(NUM_TURNS)]
    others = []
    for priority in priorities:
        others.append(second.submit("the same length", max_tokens=2))
        second._waiting[-1] = structs.replace(second._waiting[-1], priority=priority)
    stack.until(lambda: stack.core.scheduler.num_waiting == 2 * NUM_TURNS)
    assert not ahead.is_over
    served: list[bytes] = []  # whose requests began, in turn
    begin = WaitingQueue.begin
    monkeypatch.setattr(
        WaitingQueue,
        "begin",
        lambda queue, row: served.append(queue._requests.tenants[row]) or begin(queue, row),
    )
    stack.until(lambda: all(it.is_over for it in [ahead, *mine, *others]))
    assert served.count(k2.pair.public) == NUM_TURNS
    turns = [turn for turn, tenant in enumerate(served, 1) if tenant == k1.pair.public]
    assert len(turns) == NUM_TURNS
    assert all(turn <= 2 * alone for alone, turn in enumerate(turns, 1))
