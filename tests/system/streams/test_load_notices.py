"""A replica's load, as clients that asked for it hear it."""

from __future__ import annotations

import pytest
from tests.helpers.mini_stack import CHAIN

from slipstream_ipc.messages import WANTS_LOAD

SLOW = CHAIN.replace("step_ms=0.2", "step_ms=50")  # 400 tokens outlast what is to be heard
PROMPTS = [f"Chapter {n}: how names are bound, and where." for n in range(6)]


def test_a_client_hears_of_requests_that_run_and_end(make_stack) -> None:
    stack = make_stack(SLOW, max_num_seqs=4)
    router, other = stack.client(wants=WANTS_LOAD), stack.client()
    stack.until(lambda: bool(router.loads))
    assert router.loads[0].state == "serving"
    streams = [other.submit(prompt, max_tokens=400) for prompt in PROMPTS]
    stack.until(lambda: (router.loads[-1].running, router.loads[-1].waiting) == (4, 2))
    load = router.loads[-1]
    assert load.max_seqs == 4
    assert load.queued_tokens > 0
    assert 0 < load.free_blocks < load.blocks
    stack.until(lambda: router.loads[-1].step_s > 0)
    for it in streams:
        other.abort(it)
    stack.until(lambda: (router.loads[-1].running, router.loads[-1].waiting) == (0, 0))
    assert router.loads[-1].free_blocks == load.blocks
    assert not other.loads


@pytest.mark.parametrize("dies", ["core", "worker"])
def test_loads_go_on_after_a_death(make_stack, dies) -> None:
    stack = make_stack(SLOW)
    client = stack.client(wants=WANTS_LOAD)
    it = client.submit(PROMPTS[0], max_tokens=400)
    stack.until(lambda: bool(client.loads) and client.loads[-1].running == 1)
    getattr(stack, f"kill_{dies}")()
    if dies == "core":
        stack.until(lambda: client.loads[-1].state == "core_away")
    client.loads.clear()
    getattr(stack, f"start_{dies}")()
    stack.until(
        lambda: (
            bool(client.loads)
            and (client.loads[-1].state, client.loads[-1].running) == ("serving", 1)
        )
    )
    assert not it.is_over


def test_a_drain_is_told_with_its_end(make_stack) -> None:
    stack = make_stack()
    client = stack.client(wants=WANTS_LOAD)
    stack.until(lambda: bool(client.loads))
    stack.worker.begin_drain(stack.now() + 30.0)
    stack.until(lambda: client.loads[-1].state == "draining")
    assert 20.0 < client.loads[-1].within_s <= 30.0


def test_evictions_are_told(make_stack) -> None:
    stack = make_stack(num_blocks=40)
    client = stack.client(wants=WANTS_LOAD)
    stack.until(lambda: bool(client.loads))
    assert client.loads[-1].kept_since_s is None
    for number in range(6):
        it = client.submit(f"{number} of several prompts", max_tokens=150)
        stack.until(lambda it=it: it.is_over)
    stack.until(lambda: client.loads[-1].kept_since_s is not None)
    assert 0.0 <= client.loads[-1].kept_since_s < 60.0
