"""Placement: its costs against a plain oracle, homes, common beginnings, and what load does."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from slipstream.client.placing.member_load import MemberLoad
from slipstream.client.placing.placement import PREFIX_WEIGHT, Placement
from slipstream.client.placing.prefix_memory import PrefixMemory
from slipstream.client.placing.prompt_keys import PromptKey, chat_key, text_key
from slipstream.client.placing.rendezvous import homes
from slipstream_ipc.messages import ChatMessage

SYSTEM = ChatMessage("system", "You are kind. " * 200)


def members_of(num: int) -> list[MemberLoad]:
    return [MemberLoad(b"replica-%d" % at) for at in range(num)]


def new_placement() -> Placement:
    return Placement(memory=PrefixMemory(2**12))


def conversation(name: str, num_answers: int) -> PromptKey:
    turns = [SYSTEM]
    for turn in range(num_answers):
        turns += [ChatMessage("user", f"{name} asks {turn}. " * 40)]
        turns += [ChatMessage("assistant", f"{name} is told {turn}. " * 40)]
    return chat_key([*turns, ChatMessage("user", f"{name} asks {num_answers}. " * 40)], b"m")


def home_of(key: int, members: Sequence[MemberLoad]) -> int:
    return homes(key, np.array([member.salt for member in members], np.uint64), 1)[0]


def oracle(
    key: PromptKey, members: Sequence[MemberLoad], remembered: dict[tuple[int, bytes], float]
) -> list[tuple[int, float]]:
    """Members by cost, as the design states it, of a conversation that is not common."""
    order = homes(key.first, np.array([member.salt for member in members], np.uint64), 3)
    loads = [16 * member.running + member.queued_tokens for member in members]
    least = loads.index(min(loads))
    costs: dict[int, float] = {}
    for at in dict.fromkeys([*order, least]):
        member, known = members[at], 0
        for value, length in zip(key.chain.tolist(), key.lengths.tolist(), strict=True):
            if remembered.get((value, member.name), float("-inf")) > member.kept_since:
                known = length
        if at == order[0] and key.num_continued:
            known = max(known, key.prior_len)
        costs[at] = loads[at] + 4 * (key.prompt_len - known)
        if at != order[0] and not key.num_continued:
            costs[at] += 4096
    return sorted(costs.items(), key=lambda item: item[1])


@settings(deadline=None)
@given(st.integers(1, 9), st.data())
def test_costs_are_those_of_the_design(num_members: int, data: st.DataObject) -> None:
    members, placement = members_of(num_members), new_placement()
    remembered: dict[tuple[int, bytes], float] = {}
    steps = st.tuples(
        *(st.sampled_from("abc"), st.integers(0, 3), st.integers(0, num_members - 1)),
        *(st.integers(0, 60), st.integers(0, 20_000), st.integers(1, 9)),
    )
    has_begun: dict[str, int] = {}
    for now, step in enumerate(data.draw(st.lists(steps, max_size=12)), 1):
        name, num_answers, loaded, running, queued, kept = step
        has_begun[name] = has_begun.get(name, 0) + (num_answers == 0)
        if has_begun[name] > 2:
            continue
        members[loaded].note_load(
            float(now), running=running, queued_tokens=queued, kept_since_s=float(kept)
        )
        key = conversation(name, num_answers)
        found = placement.candidates(key, key.prompt_len, members)
        expected = oracle(key, members, remembered)
        assert [round(each.cost, 6) for each in found] == [cost for _, cost in expected]
        assert {each.member for each in found} == {at for at, _ in expected}
        chosen = found[0].member
        sent = placement.note_submitted(key, key.prompt_len, members[chosen], float(now))
        assert sent.num_tokens == max(1, key.prompt_len - found[0].known)
        for value in key.chain.tolist():
            remembered[value, members[chosen].name] = float(now)


def test_a_conversation_stays_at_its_home_for_all_routers() -> None:
    members = members_of(16)
    for name in map(str, range(30)):
        first, *later = [conversation(name, turn) for turn in range(4)]
        home = home_of(first.first, members)
        for key in (first, *later):  # each turn at a router that has seen nothing of it
            chosen = new_placement().choose(key, key.prompt_len, members, 0.0)
            assert chosen[0] == home
            assert 3 <= len(set(chosen)) == len(chosen) <= 4


def test_a_busy_home_is_left_where_computing_again_costs_less() -> None:
    members, placement = members_of(8), new_placement()
    key = conversation("a", 2)
    home = home_of(key.first, members)
    gain = int(PREFIX_WEIGHT * key.prior_len)
    members[home].note_load(1.0, running=0, queued_tokens=gain - 1, kept_since_s=None)
    assert placement.choose(key, key.prompt_len, members, 1.0)[0] == home
    members[home].note_load(2.0, running=0, queued_tokens=gain + 1, kept_since_s=None)
    assert placement.choose(key, key.prompt_len, members, 2.0)[0] != home


def test_conversations_with_a_common_beginning_have_homes_of_their_own() -> None:
    """After two conversations the key of the first turn is a common one: its first turns are dealt
    by load and memory alone, and from the second turn on each conversation has another home.
    """
    members, placement = members_of(16), new_placement()

    def key_of(name: str, num_answers: int) -> PromptKey:
        turns = [ChatMessage("user", "Hello. " * 300)]
        for turn in range(num_answers):
            turns += [ChatMessage("assistant", f"{name} is told {turn}")]
            turns += [ChatMessage("user", f"{name} asks {turn}")]
        return chat_key(turns, b"m")

    for name in "abc":
        key = key_of(name, 0)
        candidates = placement.candidates(key, key.prompt_len, members)
        has_home = max(each.cost for each in candidates) >= 4096
        assert has_home == (name != "c")
        placement.note_submitted(key, key.prompt_len, members[candidates[0].member], 0.0)
    names = [str(number) for number in range(40)]
    chosen = [placement.choose(key_of(name, 1), 500, members, 0.0)[0] for name in names]
    expected = []
    for name in names:
        second = key_of(name, 1).second
        assert second is not None
        expected.append(home_of(second, members))
    assert chosen == expected
    assert len(set(chosen)) > 8
    later = placement.candidates(key_of("0", 2), 500, members)[0]
    assert (later.member, later.known) == (chosen[0], key_of("0", 2).prior_len)


def test_a_popular_beginning_spreads_over_all_members() -> None:
    """The more conversations begin alike, the less load it takes to compute that once more."""
    members, placement = members_of(32), new_placement()
    turns = [ChatMessage("user", "Hello. " * 1000)]
    num_sent = [0] * len(members)
    for _ in range(1600):
        key = chat_key(turns, b"m")
        chosen = placement.choose(key, key.prompt_len, members, 0.0)[0]
        placement.note_submitted(key, key.prompt_len, members[chosen], 0.0)
        num_sent[chosen] += 1
        members[chosen].note_load(  # all of them run, and nothing of them waits
            1.0, running=num_sent[chosen], queued_tokens=0, kept_since_s=None
        )
    assert max(num_sent) <= 1.1 * 1600 / len(members)


def test_a_text_that_goes_on_does_not_make_its_key_common() -> None:
    members, placement = members_of(8), new_placement()
    text = b"".join([b"%6d, " % number for number in range(1000)])
    for length in range(2000, 8000, 500):  # a chat that its client renders
        key = text_key(text[:length], b"m")
        chosen = placement.choose(key, key.prompt_len, members, 0.0)[0]
        assert chosen == home_of(key.first, members)
        placement.note_submitted(key, key.prompt_len, members[chosen], 0.0)
    for number in range(4):  # and texts that begin alike
        key = text_key(text[:2048] + b"%d" % number * 3000, b"m")
        chosen = placement.choose(key, key.prompt_len, members, 0.0)[0]
        placement.note_submitted(key, key.prompt_len, members[chosen], 0.0)
    key = text_key(text[:2048] + b"end" * 3000, b"m")
    assert key.second is not None
    assert placement.choose(key, key.prompt_len, members, 0.0)[0] == home_of(key.second, members)


def test_a_request_that_is_sent_again_is_one_conversation() -> None:
    members, placement = members_of(4), new_placement()
    key = conversation("a", 0)
    for is_again in (False, True, True, True):
        sent = placement.note_submitted(key, key.prompt_len, members[0], 0.0, is_again=is_again)
        placement.note_ended(sent, 0.0)
    chosen = placement.candidates(key, key.prompt_len, members[1:])
    assert max(each.cost for each in chosen) >= 4096
    assert members[0].work == 0


def tell_loads(members: Sequence[MemberLoad], now: float, num_others: int) -> None:
    """Each member runs this router's requests, and as many of other routers."""
    for member in members:
        running = member.num_own + num_others
        member.note_load(now, running=running, queued_tokens=0, kept_since_s=None)


def made_alone(placement: Placement, members: Sequence[MemberLoad], num_others: int) -> None:
    """Two hundred conversations begin through this router, and go on running."""
    for number in range(200):
        key = conversation(f"early {number}", 0)
        chosen = placement.choose(key, key.prompt_len, members, float(number))[0]
        placement.note_submitted(key, key.prompt_len, members[chosen], float(number))
        tell_loads(members, number + 0.9, num_others)


def moved(placement: Placement, members: Sequence[MemberLoad]) -> tuple[PromptKey, int, int]:
    """The third turn of a conversation whose second one was computed elsewhere, its home, and that
    other member, which is none of those that the hash names.
    """
    second, third = conversation("a", 1), conversation("a", 2)
    salts = np.array([member.salt for member in members], np.uint64)
    home, *_, elsewhere = homes(third.first, salts, len(members))
    sent = placement.note_submitted(second, second.prompt_len, members[elsewhere], 300.0)
    placement.note_ended(sent, 301.0)
    return third, home, elsewhere


def test_a_router_alone_goes_where_the_conversation_was_last() -> None:
    members, placement = members_of(8), new_placement()
    made_alone(placement, members, num_others=0)
    key, _, elsewhere = moved(placement, members)
    best = placement.candidates(key, key.prompt_len, members)[0]
    assert (best.member, best.reason) == (elsewhere, "last")
    assert key.prior_len - 300 < best.known < key.prior_len


def test_a_router_among_others_goes_home_as_they_do() -> None:
    members, placement = members_of(8), new_placement()
    made_alone(placement, members, num_others=100)
    key, home, _ = moved(placement, members)
    best = placement.candidates(key, key.prompt_len, members)[0]
    assert (best.member, best.reason, best.known) == (home, "home", key.prior_len)


def test_a_router_that_others_join_is_alone_no_longer() -> None:
    members, placement = members_of(8), new_placement()
    made_alone(placement, members, num_others=0)
    key, home, _ = moved(placement, members)
    tell_loads(members, 310.0, num_others=100)
    for _ in range(200):
        best = placement.candidates(key, key.prompt_len, members)[0]
    assert best.member == home


def test_what_a_running_request_asked_for_is_kept_until_it_ends() -> None:
    """Its answer was last computed long after it was sent."""
    members, placement = members_of(1), new_placement()
    key = conversation("a", 0)
    sent = placement.note_submitted(key, key.prompt_len, members[0], 1.0)
    members[0].note_load(9.0, running=1, queued_tokens=0, kept_since_s=5.0)  # from 4 on
    assert placement.candidates(key, key.prompt_len, members)[0].known == 0
    placement.note_ended(sent, 9.0)
    assert placement.candidates(key, key.prompt_len, members)[0].known > 0


def test_few_members_and_none() -> None:
    placement, key = new_placement(), conversation("a", 1)
    assert list(placement.choose(key, key.prompt_len, [], 0.0)) == []
    assert list(placement.choose(key, 0, members_of(1), 0.0)) == [0]
    assert sorted(placement.choose(key, key.prompt_len, members_of(2), 0.0)) == [0, 1]
