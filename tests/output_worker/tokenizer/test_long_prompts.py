"""Long prompts and short ones: nobody waits for somebody's 16 MiB."""

from __future__ import annotations

import select
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import zmq
from hypothesis import given
from hypothesis import strategies as st
from tests.helpers.played_prompts import PlayedPrompts

from slipstream_ipc.columns import u32
from slipstream_ipc.messages import ChatMessage, Render, Rendered, TokenizerReady
from slipstream_ipc.restart_backoff import STEADY_S
from slipstream_worker.tokenizer import long_prompts
from slipstream_worker.tokenizer.client import (
    MAX_CHARS_IN_CHILD,
    PROMPT_CHARS,
    TokenizerClient,
)
from slipstream_worker.tokenizer.fair_order import FAIRNESS, FairOrder, TenantOrder
from slipstream_worker.tokenizer.long_prompts import (
    LONG_CHARS,
    LongPromptThread,
    is_long,
    lane_of,
    tokens_if_too_long,
)

PATIENCE_MS = 60_000


def test_lanes() -> None:
    sizes = [0, LONG_CHARS, LONG_CHARS + 1, 2**16, 2**16 + 1, 2**24]
    assert [lane_of(Render(0, "x" * size)) for size in sizes] == [0, 0, 1, 1, 2, 2]


def test_what_is_long() -> None:
    most = "x" * LONG_CHARS
    assert not is_long(Render(0, most))
    assert is_long(Render(0, most + "x"))
    assert is_long(Render(0, messages=(ChatMessage("user", most),)))
    assert is_long(Render(0, token_ids=bytes(4 * LONG_CHARS + 4)))
    assert not is_long(Render(0, token_ids=bytes(4 * LONG_CHARS)))


def test_the_shorter_goes_first() -> None:
    line = FairOrder()
    for key, size in ((1, 900), (2, 100), (3, 500), (4, 100)):
        line.add(key, size)
    assert [line.next() for _ in range(5)] == [2, 4, 3, 1, None]


def test_who_is_gone_gets_no_turn() -> None:
    line = FairOrder()
    line.add(1, 10)
    line.add(2, 20)
    line.discard(1)
    line.discard(7)
    assert [line.next(), line.next()] == [2, None]


@given(st.integers(1, 1000), st.lists(st.integers(1, 1000), max_size=200))
def test_nobody_is_overtaken_for_ever(size: int, others: list[int]) -> None:
    """One of the others comes whenever one is done, so that there is always another one."""
    line = FairOrder()
    line.add(0, size)
    served = 0
    for key, other in enumerate(others, 1):
        line.add(key, other)
        turn = line.next()
        assert turn is not None
        if turn == 0:
            return
        assert served <= FAIRNESS * size
        served += others[turn - 1]


def test_what_is_too_long_is_known_from_a_part(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(long_prompts, "SLICE_CHARS", 100)
    counted: list[str] = []

    def count(part: str) -> int:
        counted.append(part)
        return len(part) // 4

    assert tokens_if_too_long("x" * 100_000, 50, count) == 125
    assert "".join(counted) == "x" * 500
    assert not tokens_if_too_long("x" * 400, 50, count)
    assert not tokens_if_too_long("x" * 100_000, 0, count)
    counted.clear()
    assert not tokens_if_too_long("x" * 100, 50, count)
    assert not counted


def test_a_thread_answers_all_in_their_order() -> None:
    lane = LongPromptThread(
        lambda request: Rendered(request.key, text=(request.text or "").upper())
    )
    for key in range(20):
        lane.put(Render(key, f"text {key}"))
    answers: list[Rendered] = []
    while len(answers) < 20:
        assert select.select([lane], [], [], PATIENCE_MS / 1e3)[0]
        answers += lane.take_rendered()
    assert [answer.key for answer in answers] == list(range(20))
    assert answers[7].text == "TEXT 7"
    for _ in range(2):  # the last ring may follow the answer it is for
        if not select.select([lane], [], [], 0)[0]:
            break
        assert not lane.take_rendered()
    else:
        pytest.fail("the bell rings on with nothing to take")


# ---- with a child that tests play --------------------------------------------------------------


class Played(PlayedPrompts):
    """One that says what its child was asked."""

    def answer(self, *answers: Rendered | TokenizerReady) -> None:
        for answer in answers:
            self.socket.send(msgspec.msgpack.encode(answer))
            assert self.prompts.socket.poll(PATIENCE_MS)
            assert list(self.prompts.receive()) == [answer]

    def asked(self, num: int) -> list[int]:
        """What the child was asked: so many, and no more."""
        keys = []
        for _ in range(num):
            assert self.socket.poll(PATIENCE_MS)
            keys.append(msgspec.msgpack.decode(self.socket.recv(), type=Render).key)
        assert not self.socket.poll(50)
        return keys

    def die(self, *rendering: int) -> list[int]:
        """It dies while it renders these; the keys that are refused for it."""
        for key in rendering:
            self.prompts._note.begin(key, lane=lane_of(self.prompts._waiting[key]))
        self.now += STEADY_S
        list(self.prompts.beat(self.now))
        self.now += STEADY_S  # so that the next one is started at once
        self.children[-1].kill()
        refused = [answer.key for answer in self.prompts.beat(self.now)]
        self.answer(TokenizerReady("", "", pid=self.children[-1].pid))
        return refused


@pytest.fixture
def played(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Played]:
    with zmq.Context() as context:
        found = Played(context, monkeypatch, tmp_path)
        found.answer(TokenizerReady("", "", pid=found.children[-1].pid))
        yield found
        found.close()


def long(times: int) -> Render:
    return Render(0, "x" * (times * LONG_CHARS + 1))


def test_the_child_has_one_long_one_and_every_short_one(played: Played) -> None:
    ask = played.prompts.ask
    first, second, third = ask(long(3)), ask(long(2)), ask(long(1))
    short = [ask(Render(0, "short")) for _ in range(3)]
    assert played.asked(4) == [first, *short]
    played.answer(Rendered(short[1]))
    assert played.asked(0) == []
    played.answer(Rendered(first))
    assert played.asked(1) == [third]
    played.answer(Rendered(third))
    assert played.asked(1) == [second]
    played.answer(Rendered(second), Rendered(short[0]), Rendered(short[2]))
    assert played.asked(0) == []


def test_nobody_waits_for_one_that_is_many_times_as_large(played: Played) -> None:
    ask = played.prompts.ask
    huge = [ask(Render(0, "x" * 720_000 + str(at)), b"many") for at in range(3)]
    mine = [ask(long(1), b"one"), ask(long(3), b"one")]
    assert played.asked(2) == [huge[0], mine[0]]
    played.answer(Rendered(mine[0]))
    assert played.asked(1) == [mine[1]]
    played.answer(Rendered(huge[0]), Rendered(mine[1]))
    assert played.asked(1) == [huge[1]]
    assert played.prompts.withdraw(huge[2])
    assert not played.prompts.withdraw(huge[1])
    played.answer(Rendered(huge[1]))
    assert played.asked(0) == []


def many_of(played: Played, num: int) -> list[int]:
    """Prompts of a tenant that are short, and of which the child has four at a time."""
    size = MAX_CHARS_IN_CHILD // 4 - PROMPT_CHARS
    assert size <= LONG_CHARS
    return [played.prompts.ask(Render(0, f"{at:<{size}}"), b"many") for at in range(num)]


def test_a_short_prompt_waits_for_few_of_another_tenants(played: Played) -> None:
    """The child had all 100 of 16,000 characters, and another's short prompt came after them."""
    many = many_of(played, 100)
    assert played.asked(4) == many[:4]
    mine = played.prompts.ask(Render(0, "short"), b"one")
    assert played.asked(0) == []
    played.answer(Rendered(many[0]))
    assert played.asked(0) == [], "it has more than half of them"
    played.answer(Rendered(many[1]))
    assert played.asked(3) == [mine, *many[4:6]]
    assert played.prompts.withdraw(many[-1])
    assert not played.prompts.withdraw(many[5])


def test_a_short_prompt_is_sent_at_once_where_the_child_has_few(played: Played) -> None:
    many = many_of(played, 3)
    mine = [played.prompts.ask(Render(0, f"short {at}"), b"one") for at in range(2)]
    assert played.asked(5) == many + mine


def test_the_next_child_is_asked_again_what_had_its_turn(played: Played) -> None:
    many = many_of(played, 9)
    mine = [played.prompts.ask(Render(0, f"short {at}"), b"one") for at in range(2)]
    assert played.asked(4) == many[:4]
    assert played.die(many[0]) == []
    assert played.asked(4) == many[:4]
    assert played.die(many[0]) == [many[0]]
    assert played.asked(6) == [*many[1:4], *mine, many[4]]


def test_a_huge_one_is_refused_only_after_those_of_shorter_lanes(played: Played) -> None:
    ask = played.prompts.ask
    huge, killer = ask(Render(0, "x" * 720_000)), ask(long(1))
    assert played.asked(2) == [huge, killer]
    assert played.die(huge, killer) == []
    assert sorted(played.asked(2)) == [huge, killer]
    assert played.die(huge, killer) == [killer]
    assert played.asked(1) == [huge]
    played.answer(Rendered(huge))


def test_a_long_one_that_kills_twice_is_refused_and_the_next_has_its_turn(played: Played) -> None:
    ask = played.prompts.ask
    killer, other = ask(long(1)), ask(long(2))
    assert played.asked(1) == [killer]
    assert played.die(killer) == []
    assert played.asked(1) == [killer]
    assert played.die(killer) == [killer]
    assert played.asked(1) == [other]
    short = ask(Render(0, "short"))
    assert played.asked(1) == [short]
    played.answer(Rendered(other), Rendered(short))


def test_where_a_short_one_and_a_long_one_are_suspects_the_short_one_goes_first(
    played: Played,
) -> None:
    ask = played.prompts.ask
    innocent, killer, next_one = ask(long(1)), ask(Render(0, "kills")), ask(Render(0, "short"))
    assert played.asked(3) == [innocent, killer, next_one]
    assert played.die(innocent, killer) == []
    assert sorted(played.asked(3)) == [innocent, killer, next_one]
    assert played.die(innocent, killer) == [killer]
    assert sorted(played.asked(2)) == [innocent, next_one]
    played.answer(Rendered(next_one), Rendered(innocent))
    assert played.die() == []


def test_what_is_withdrawn_before_it_was_begun_is_never_asked(played: Played) -> None:
    ask, withdraw = played.prompts.ask, played.prompts.withdraw
    first, second, third = ask(long(1)), ask(long(2)), ask(long(3))
    short = ask(Render(0, "short"))
    assert played.asked(2) == [first, short]
    assert withdraw(second)
    assert withdraw(second), "as before"
    assert not withdraw(first)
    assert not withdraw(short)
    played.answer(Rendered(first), Rendered(short))
    assert played.asked(1) == [third]
    assert withdraw(first), "it is answered"
    played.answer(Rendered(third))


def test_what_is_withdrawn_while_there_is_no_child_is_not_asked_again(played: Played) -> None:
    ask, withdraw = played.prompts.ask, played.prompts.withdraw
    keys = ask(long(1)), ask(long(2)), ask(Render(0, "short"))
    assert sorted(played.asked(2)) == [keys[0], keys[2]]
    played.children[-1].kill()
    assert list(played.prompts.beat(played.now)) == []
    assert withdraw(keys[0])
    assert withdraw(keys[2])
    played.answer(TokenizerReady("", "", pid=played.children[-1].pid))
    assert played.asked(1) == [keys[1]]
    played.answer(Rendered(keys[1]))


def test_what_waits_for_a_child_is_not_to_blame_for_its_death(played: Played) -> None:
    key = played.prompts.ask(Render(0, "innocent"))
    assert played.asked(1) == [key]
    for _ in range(5):
        assert played.die() == []
        assert played.asked(1) == [key]
    played.answer(Rendered(key))


# ---- with the process --------------------------------------------------------------------------


def test_a_short_prompt_overtakes_a_long_one(tmp_path: Path) -> None:
    from slipstream.demo_model import MODEL_PATH

    options: dict[str, Any] = {"tokenizer": str(MODEL_PATH), "cache_dir": str(tmp_path)}
    with zmq.Context() as context:
        prompts = TokenizerClient(context, f"ipc://{tmp_path}/prompts", options)
        text = "Once upon a time, naïve 日本 said what is said. " * 10_000
        whole = prompts.ask(Render(0, text))
        too_long = prompts.ask(Render(0, text * 10, max_tokens=1000))
        short = prompts.ask(Render(0, "a short one"))
        answers: list[Rendered] = []
        while len(answers) < 3:
            assert prompts.socket.poll(PATIENCE_MS)
            answers += [one for one in prompts.receive() if isinstance(one, Rendered)]
        prompts.close()
    assert [answer.key for answer in answers] == [short, whole, too_long]
    assert len(u32(answers[1].token_ids)) > 10_000
    assert answers[2].fault is not None
    assert answers[2].fault.field == "prompt"
    assert "allowed: at most 999 tokens" in answers[2].fault.message


def served_in(line: TenantOrder) -> list[int]:
    order = []
    while (key := line.next()) is not None:
        assert line.next() is None
        assert [*line.turns] == [key]
        order.append(key)
        line.discard(key)
    return order


def test_a_tenant_waits_for_one_long_prompt_of_another_however_many_that_has() -> None:
    """Beside three loops of one key's, another's waited 3.2 s in place of 0.2."""
    line = TenantOrder()
    for key in range(50):
        line.add(key, 100_000, b"many")
    assert line.next() == 0
    line.add(50, 200_000, b"one")
    line.add(51, 900_000, b"one")
    line.discard(0)
    assert line.next() == 50
    line.discard(50)
    assert served_in(line)[:3] == [1, 2, 51]


def test_a_tenant_gains_nothing_by_its_absence_and_pays_for_what_it_had() -> None:
    line = TenantOrder()
    line.add(0, 1000, b"a")
    assert line.next() == 0
    line.add(1, 10, b"b")
    line.discard(0)
    line.add(2, 10, b"a")
    assert served_in(line) == [1, 2]
    for key in range(10, 20):
        line.add(key, 100, b"b")
    line.add(3, 10, b"new")
    assert served_in(line)[:2] in ([10, 3], [3, 10])


@given(
    st.lists(
        st.tuples(st.integers(0, 2), st.sampled_from([b"a", b"b", b"c"]), st.integers(1, 99)),
        max_size=60,
    ),
    st.integers(1, 300),
    st.booleans(),
)
def test_all_that_is_added_has_its_turn_unless_it_is_discarded(
    steps: list[tuple[int, bytes, int]], max_size: int, by_arrival: bool
) -> None:
    line, sizes = TenantOrder(max_size, by_arrival=by_arrival), dict[int, int]()
    for key, (kind, tenant, size) in enumerate(steps):
        if kind == 0 and line.turns:
            done = next(iter(line.turns))
            del sizes[done]
            line.discard(done)
        elif kind == 1 and sizes:
            gone = min(sizes)
            del sizes[gone]
            line.discard(gone)
        else:
            line.add(key, size, tenant)
            sizes[key] = size
        while line.next() is not None:
            pass
        *before, _last = [0, *line.turns.values()]
        assert sum(before) < max_size, "the last one had room"
        assert sum(line.turns.values()) >= max_size or len(line.turns) == len(sizes)
        assert all(sizes[each] == size for each, size in line.turns.items())
    while line.turns:
        done = next(iter(line.turns))
        del sizes[done]
        line.discard(done)
        line.next()
    assert not sizes
    assert not line._lines
    assert not line._waiting
    assert not line._size


def test_tenants_take_turns_of_equal_size_where_several_have_theirs() -> None:
    line = TenantOrder(400, by_arrival=True)
    for key in range(10):
        line.add(key, 100, b"many")
    assert [line.next() for _ in range(5)] == [0, 1, 2, 3, None]
    for key in range(20, 25):
        line.add(key, 50, b"one")
    order = []
    for done in range(4):
        line.discard(done)
        while (key := line.next()) is not None:
            order.append(key)
    assert order == [20, 21, 4, 22, 23, 5]


@given(st.lists(st.integers(0, 99), max_size=30))
def test_by_arrival_a_tenants_items_keep_their_order(sizes: list[int]) -> None:
    line = TenantOrder(by_arrival=True)
    for key, size in enumerate(sizes):
        line.add(key, 1 + size)
    assert served_in(line) == [*range(len(sizes))]


def test_tenants_that_have_gone_are_forgotten() -> None:
    line = TenantOrder()
    for key in range(1000):
        line.add(key, 10, b"%d" % key)
        assert served_in(line) == [key]
    assert len(line._served) < 100
