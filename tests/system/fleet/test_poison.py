"""A request that kills cores, over several replicas: it ends, alone."""

from __future__ import annotations

from contextlib import ExitStack

import pytest
from tests.helpers.poisoned_core import POISON, with_poisoned_core
from tests.helpers.stacks import spareless_stack

from slipstream import Client, SlipstreamError, Stack
from slipstream.stack import stack as stack_module
from slipstream.stack.supervisor_events import ProcessRestarted

MODEL = "simulated:step_ms=10,prefill_us=0,mode=chain"
PROMPTS = [[n + 1, 5, 7] for n in range(12)]
NUM_DEATHS = 3


def num_deaths(stack: Stack) -> int:
    """How many of its cores have died so far; nothing else has."""
    count = 0
    while event := stack.next_event(0.0):
        if isinstance(event, ProcessRestarted):
            assert event.name == "core"
            count += 1
    return count


@pytest.mark.process
def test_poison_request_ends_alone_after_three_replicas(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stack_module, "plan_stack", with_poisoned_core("os.abort()"))
    with ExitStack() as opened:
        # two rows: what waits behind them is in no step when the core dies
        settings = {"max_num_seqs": 2, "max_restarts": 20}
        stacks = [opened.enter_context(spareless_stack(MODEL, **settings)) for _ in range(4)]
        client = opened.enter_context(Client(",".join([stack.address for stack in stacks])))
        asked = {"max_tokens": 300, "ignore_eos": True, "seed": 1}
        plain = [answer.token_ids for answer in client.generate_many(PROMPTS, **asked)]
        streams = [client.stream(prompt, **asked) for prompt in PROMPTS]
        poison = client.stream(POISON, max_tokens=20, priority=-1)
        with pytest.raises(SlipstreamError, match="crashed the engine"):
            list(poison)
        assert [[i for delta in stream for i in delta.token_ids] for stream in streams] == plain
        assert sum(num_deaths(stack) for stack in stacks) == NUM_DEATHS
        struck = [stream for stream in streams if stream._state.strikes]
        assert len(struck) <= NUM_DEATHS  # those that shared a step with it
