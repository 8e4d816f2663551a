"""The load of a member against the list of what it said and of what was sent to it."""

from __future__ import annotations

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from slipstream.client.placing.member_load import (
    LOAD_LAG_S,
    RUNNING_TOKENS,
    MemberLoad,
    SentRequest,
)


class LoadMachine(RuleBasedStateMachine):
    """Sends, ends and loads in any order, beside plain lists of them."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0
        self.load = MemberLoad(b"one")
        self.said = (0, 0)
        self.counted: list[SentRequest] = []
        self.all: list[SentRequest] = []
        self.ended: set[SentRequest] = set()
        self.kept_since = float("-inf")

    @rule(seconds=st.sampled_from([0.0, 0.1, LOAD_LAG_S, 1.0]))
    def wait(self, seconds: float) -> None:
        self.now += seconds

    @rule(num_tokens=st.integers(1, 9000))
    def send(self, num_tokens: int) -> None:
        sent = self.load.note_sent(num_tokens, self.now)
        self.counted.append(sent)
        self.all.append(sent)

    @precondition(lambda self: self.all)
    @rule(data=st.data())
    def end(self, data: st.DataObject) -> None:
        sent = data.draw(st.sampled_from(self.all))
        self.load.note_ended(sent)  # a second time, or after a load that knows of it, is harmless
        self.ended.add(sent)
        if sent in self.counted:
            self.counted.remove(sent)

    @rule(said=st.tuples(st.integers(0, 300), st.integers(0, 90_000)), kept=st.floats(0, 9))
    def hear(self, said: tuple[int, int], kept: float) -> None:
        self.load.note_load(self.now, running=said[0], queued_tokens=said[1], kept_since_s=kept)
        self.said = said
        self.counted = [sent for sent in self.counted if sent.sent_at > self.now - LOAD_LAG_S]
        self.kept_since = max(self.kept_since, self.now - kept)

    @rule()
    def restart(self) -> None:
        self.load.note_restarted(self.now)
        self.said, self.counted, self.kept_since = (0, 0), [], self.now

    @invariant()
    def counts_are_those_of_the_lists(self) -> None:
        tokens = self.said[1] + sum(sent.num_tokens for sent in self.counted)
        running = self.said[0] + len(self.counted)
        assert (self.load.running, self.load.queued_tokens) == (running, tokens)
        assert self.load.work == tokens + RUNNING_TOKENS * running
        assert self.load.kept_since == self.kept_since
        assert self.load.num_own == len(self.all) - len(self.ended)


test_loads = LoadMachine.TestCase
