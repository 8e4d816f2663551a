"""Streams of a core whose engine is vLLM's: what its worker gets, however the engine runs."""

from __future__ import annotations

import secrets
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from tests.engine_core.vllm_engine.conftest import VllmBox
from tests.helpers import fake_vllm
from tests.helpers.admits import admit_of, with_fields
from tests.helpers.core_box import Held, StateWorker

from slipstream_core.vllm_engine.vllm_scheduler import VllmFailed, max_in_engine
from slipstream_ipc.columns import pack_u32, u32
from slipstream_ipc.crash_note import read_note
from slipstream_ipc.messages import (
    Admit,
    Admitted,
    ComputedPromptLogprobs,
    End,
    ReasoningIds,
    SamplingParams,
    Withdraw,
)
from slipstream_ipc.messages.request import StructuredOutputs

VOCAB_SIZE = 997
MakeBox = Callable[..., VllmBox]


def admit(prompt: list[int], max_tokens: int = 20, **params: Any) -> Admit:
    fields = {n: params.pop(n) for n in ("stop_token_ids", "seed") if n in params}
    return admit_of(
        secrets.token_bytes(16),
        pack_u32(prompt),
        SamplingParams(**{"temperature": 0.0, **params}),
        max_tokens=max_tokens,
        **fields,
    )


def expected(asked: Admit) -> list[int]:
    """The ids by the fake's rule."""
    spec = asked.spec.params
    params = fake_vllm.SamplingParams(
        seed=asked.derived.seed if spec.temperature else None,
        frequency_penalty=spec.frequency_penalty,
    )
    request = fake_vllm.Request("", u32(asked.prompt_ids).tolist(), params, None, 0)
    for _ in range(asked.derived.max_tokens):
        request.outputs.append(request.next_id(VOCAB_SIZE))
        if request.outputs[-1] in asked.derived.stop_token_ids:
            break
    return request.outputs


def mixed(num: int, max_tokens: int = 20) -> list[Admit]:
    """Streams of several kinds, none of which is like another."""
    kinds: list[dict[str, Any]] = [
        {},
        {"temperature": 1.0, "seed": 77},
        {"frequency_penalty": 1.0},
        {"logprobs": 5},
    ]
    return [
        admit([10 + i, 20, 30 + 2 * i], max_tokens - i % 3, **kinds[i % len(kinds)])
        for i in range(num)
    ]


def send(worker: StateWorker, asked: list[Admit]) -> list[Held]:
    return [worker.send_admit(each) for each in asked]


def check(helds: list[Held]) -> None:
    for held in helds:
        assert held.fault is None
        assert held.token_ids == expected(held.admit)
        if held.admit.spec.params.logprobs is not None:
            assert [entry[1][0] for entry in held.logprobs] == held.token_ids
            assert [entry[2] for entry in held.logprobs] == [i % 3 + 1 for i in held.token_ids]


def all_over(helds: list[Held]) -> Callable[[], bool]:
    return lambda: all(held.is_over for held in helds)


@pytest.mark.parametrize("tokens_per_step", [1, 3])
def test_every_stream_gets_the_tokens_that_vllm_samples(
    make_box: MakeBox, tokens_per_step: int
) -> None:
    box = make_box(engine_args={"speculative_config": {"num_speculative_tokens": 2}})
    box.engine.num_tokens = tokens_per_step
    helds = send(box.worker(), mixed(12))
    box.until(all_over(helds))
    check(helds)
    assert not box.engine.scheduler.requests
    assert not box.scheduler.has_work


def test_prompts_in_chunks_and_preemptions_change_no_token(make_box: MakeBox) -> None:
    box = make_box()
    box.engine.chunk_len = 2
    box.engine.plan.extend([None] * 4 + [fake_vllm.EngineCore.preempt] + [None] * 3)
    helds = send(box.worker(), mixed(3))
    box.until(all_over(helds))
    check(helds)
    assert box.scheduler.num_preemptions == 1


def test_vllm_has_no_more_requests_than_it_can_run_and_a_few(make_box: MakeBox) -> None:
    box = make_box()
    most = max_in_engine(fake_vllm.MAX_NUM_SEQS)
    seen: list[int] = []
    helds = send(box.worker(), mixed(3 * most, max_tokens=8))
    core = box.core
    assert core is not None
    assert core.scheduler.max_num_seqs == fake_vllm.MAX_NUM_SEQS

    def all_are_over() -> bool:
        seen.append(len(box.scheduler._id_of))
        assert core.scheduler.num_running + core.scheduler.num_waiting <= 3 * most
        return all(held.is_over for held in helds)

    box.until(all_are_over)
    check(helds)
    assert max(seen) == most


def test_an_urgent_request_begins_first(make_box: MakeBox) -> None:
    box = make_box()
    worker = box.worker()
    asked = mixed(2 * max_in_engine(fake_vllm.MAX_NUM_SEQS), max_tokens=6)
    urgent = admit([500, 501], 6)
    urgent = _with_priority(urgent, -1)
    helds = send(worker, [*asked, urgent])
    box.take_in(len(helds))
    box.until(all_over(helds))
    check(helds)
    assert [500, 501] in [request.prompt for request in box.engine.began[:1]]


def _with_priority(asked: Admit, priority: int) -> Admit:
    return with_fields(asked, priority=priority)


def test_cached_tokens_are_said_ahead_of_the_first_token(make_box: MakeBox) -> None:
    box = make_box()
    worker = box.worker()
    prompt = list(range(10, 50))
    first = worker.send_admit(admit(prompt, 3))
    box.until(lambda: first.is_over)
    second = worker.send_admit(admit(prompt, 1))
    box.until(lambda: second.is_over)
    said = [each for each in worker.heard(Admitted) if each.stream_id == second.admit.stream_id]  # type: ignore[attr-defined]
    assert [each.num_cached_tokens for each in said] == [0, 32]  # type: ignore[attr-defined]
    assert box.scheduler.prefix_cache_hits == 32


def test_another_salt_shares_no_cache(make_box: MakeBox) -> None:
    box = make_box()
    worker = box.worker()
    prompt = list(range(10, 50))
    for root in (b"one", b"two"):
        held = worker.send_admit(with_fields(admit(prompt, 3), prefix_root=root))
        box.until(all_over([held]))
    assert box.scheduler.prefix_cache_hits == 0


def test_prompt_logprobs_come_whole_and_once(make_box: MakeBox) -> None:
    box = make_box()
    worker = box.worker()
    held = worker.send_admit(admit([10, 20, 30, 40], 4, prompt_logprobs=2))
    worker._take = _taking_prompts(worker)  # type: ignore[method-assign]
    box.until(lambda: held.is_over)
    pieces = [each for each in worker.received if isinstance(each, ComputedPromptLogprobs)]
    assert len(pieces) == 1
    assert u32(pieces[0].logprobs.ids).tolist()[::3] == [20, 30, 40]
    assert held.token_ids == expected(held.admit)


def test_a_prompt_that_is_scored_is_not_scored_again(make_box: MakeBox) -> None:
    box = make_box()
    still, alive = box.worker(b"still"), box.worker(b"alive")
    still._take = _taking_prompts(still)  # type: ignore[method-assign]
    asked = admit([10, 20, 30], 150, prompt_logprobs=2, stop_token_ids=(1,))
    held = still.send_admit(asked)
    box.until(lambda: len(held.token_ids) >= 3)
    still.is_reading = False
    other = alive.send_admit(admit([11, 20], 100))
    box.until(lambda: other.is_over)
    still.is_reading = True
    box.until(lambda: held.is_over)
    check([held, other])
    own = [each.params for each in box.engine.began if each.prompt == [10, 20, 30]]
    assert [each.prompt_logprobs for each in own] == [2] + [None] * (len(own) - 1)
    assert len(own) > 1


def _taking_prompts(worker: StateWorker) -> Callable[[Any], None]:
    take = worker._take
    return lambda body: None if isinstance(body, ComputedPromptLogprobs) else take(body)


def test_a_stop_id_frees_the_row_at_once(make_box: MakeBox) -> None:
    box = make_box()
    asked = admit([10, 20], 50)
    stop = expected(asked)[7]
    held = box.worker().send_admit(admit([10, 20], 50, stop_token_ids=(stop,)))
    box.until(lambda: len(held.token_ids) == 8)
    box.until(lambda: not box.scheduler.has_work)
    assert held.token_ids == expected(asked)[:8]


def test_a_stream_that_its_worker_ends_is_aborted_and_its_row_used_again(
    make_box: MakeBox,
) -> None:
    box = make_box()
    worker = box.worker()
    first, other = send(worker, [admit([10, 20], 200), admit([11, 21], 60)])
    box.until(lambda: len(first.token_ids) > 4)
    worker.send(Withdraw(first.admit.stream_id, End("abort", len(first.token_ids))))
    box.until(lambda: box.scheduler.num_running == 1)
    worker.forget(first)
    row = first.row
    third = worker.send_admit(admit([12, 22], 30))
    box.until(all_over([other, third]))
    assert third.row == row
    check([other, third])
    assert len(box.engine.began) == 3
    assert len({request.id for request in box.engine.began}) == 3


@pytest.mark.parametrize("num_tokens", [1, 7])
def test_a_core_that_dies_is_followed_by_one_that_goes_on_with_the_same_tokens(
    make_box: MakeBox, num_tokens: int
) -> None:
    box = make_box()
    worker = box.worker()
    helds = send(worker, mixed(8))
    box.until(lambda: all(len(held.token_ids) >= num_tokens for held in helds[:4]))
    box.kill()
    box.start()
    box.until(all_over(helds))
    check(helds)
    begun = [request for request in box.engine.began if request.params.extra_args]
    assert begun  # whose outputs are outputs
    assert all(len(request.prompt) == 3 for request in begun)


def test_a_worker_that_is_replaced_gets_every_history(make_box: MakeBox) -> None:
    box = make_box()
    first = box.worker()
    helds = send(first, mixed(8))
    box.until(lambda: all(len(held.token_ids) >= 3 for held in helds[:4]))
    box.kill_worker(first)
    second = box.worker()
    box.until(lambda: len(second.streams) == 8 and all_over(list(second.streams.values()))())
    check(list(second.streams.values()))


def test_no_turn_begins_while_a_worker_is_too_far_behind(make_box: MakeBox) -> None:
    box = make_box()
    worker = box.worker()
    bounded = worker.send_admit(admit([10, 20], 200, stop_token_ids=(1,)))
    other = worker.send_admit(admit([11, 21], 200))
    box.until(lambda: len(bounded.token_ids) >= 3)
    worker.is_reading = False
    core = box.core
    assert core is not None
    row = bounded.row
    assert row is not None

    def ahead() -> int:
        return core.tokens.length(row) - 2 - len(bounded.token_ids)

    box.until(lambda: ahead() >= 60 and not core.engine._in_flight)
    for _ in range(200):
        box.step()
    assert not core.engine._in_flight
    assert ahead() <= 64 + 8  # the worker had some of them, and has not said so
    worker.is_reading = True
    box.until(all_over([bounded, other]))
    check([bounded, other])


@pytest.mark.parametrize("tokens_per_step", [1, 3])
def test_a_worker_that_stands_still_holds_up_its_own_streams_alone(
    make_box: MakeBox, tokens_per_step: int
) -> None:
    box = make_box(engine_args={"speculative_config": {"num_speculative_tokens": 2}})
    box.engine.num_tokens = tokens_per_step
    still, alive = box.worker(b"still"), box.worker(b"alive")
    kinds: list[dict[str, Any]] = [{"seed": 7, "temperature": 1.0}, {"logprobs": 5}]
    kinds += [{"frequency_penalty": 1.0}]
    bounded = [
        still.send_admit(admit([10 + i, 20], 200, stop_token_ids=(1,), **kind))
        for i, kind in enumerate(kinds)
    ]
    unbounded = still.send_admit(admit([13, 20], 200))
    box.until(lambda: all(len(held.token_ids) >= 3 for held in (*bounded, unbounded)))
    still.is_reading = False
    others = send(alive, mixed(12, max_tokens=190))
    box.until(all_over(others))
    check(others)
    core = box.core
    assert core is not None
    for held in bounded:
        assert held.row is not None
        assert 60 <= core.tokens.length(held.row) - 2 - len(held.token_ids) <= 64 + 8
    still.is_reading = True
    box.until(all_over([*bounded, unbounded]))
    check([*bounded, unbounded])
    assert not box.engine.scheduler.requests
    assert not box.scheduler.has_work


def test_what_was_taken_back_goes_ahead_of_what_never_began(make_box: MakeBox) -> None:
    box = make_box()
    still, alive = box.worker(b"still"), box.worker(b"alive")
    held = still.send_admit(admit([10, 20], 150, stop_token_ids=(1,)))
    box.until(lambda: len(held.token_ids) >= 3)
    still.is_reading = False
    first = send(alive, mixed(max_in_engine(fake_vllm.MAX_NUM_SEQS), max_tokens=100))
    box.until(lambda: bool(box.scheduler._held))
    later = send(alive, [admit([500 + i, 7], 150) for i in range(30)])
    box.take_in(1 + len(first) + len(later))
    still.is_reading = True
    box.until(lambda: held.is_over)
    assert sum(each.is_over for each in later) < len(later) / 2
    box.until(all_over([*first, *later]))
    check([held, *first, *later])


def test_the_cores_numbers_name_the_engine(make_box: MakeBox) -> None:
    box = make_box()
    assert box.core is not None
    assert box.core.numbers().gauges.engine == "vllm 0.32.0"


def _fails(_core: fake_vllm.EngineCore) -> None:
    raise RuntimeError("no such luck")


def test_a_turn_that_raises_ends_the_core_and_names_who_was_in_it(make_box: MakeBox) -> None:
    box = make_box()
    worker = box.worker()
    helds = send(worker, mixed(3))
    box.until(lambda: all(len(held.token_ids) >= 2 for held in helds))
    box.engine.plan.append(_fails)
    with pytest.raises(VllmFailed, match=r"vllm 0\.32\.0"):
        box.until(all_over(helds))
    assert set(read_note(box.directory) or ()) == {held.admit.stream_id for held in helds}
    box.kill()
    box.start(died_within=True)
    box.until(all_over(helds))
    check(helds)


def test_a_suspect_runs_alone_and_the_others_go_on_behind_it(make_box: MakeBox) -> None:
    box = make_box()
    worker = box.worker()
    others = send(worker, mixed(4))
    box.until(lambda: all(len(held.token_ids) >= 3 for held in others))
    num_before = len(box.engine.batches)
    suspect = worker.send_admit(with_fields(admit([70, 71], 10), strikes=2, was_accepted=True))
    box.until(all_over([*others, suspect]))
    check([*others, suspect])
    alone = next(r.id for r in box.engine.began if r.prompt == [70, 71])
    batches = box.engine.batches[num_before:]
    first = next(i for i, batch in enumerate(batches) if alone in batch)
    assert batches[first] == [alone]


@pytest.mark.parametrize("reason", ["ERROR", "ABORT", "LENGTH"])
def test_a_stream_that_vllm_gives_up_ends_with_a_fault_and_no_other_does(
    make_box: MakeBox, reason: str
) -> None:
    box = make_box()
    box.engine.ends_with[10] = fake_vllm.FinishReason[reason]
    given_up, *others = send(box.worker(), mixed(3))
    box.until(all_over([given_up, *others]))
    check(others)
    assert given_up.fault is not None
    assert given_up.fault.code == "engine"
    assert given_up.fault.message == f"vllm 0.32.0 has ended the request: {reason.lower()}"
    assert given_up.token_ids == expected(given_up.admit)[:3]


def test_room_for_log_probabilities_bounds_who_runs(make_box: MakeBox) -> None:
    box = make_box(logprobs_gib=20_000 / 2**30)
    seen: list[int] = []
    helds = send(box.worker(), [admit([10 + i, 20], 200, logprobs=5) for i in range(4)])

    def all_are_over() -> bool:
        seen.append(len(box.scheduler._id_of))
        done = [held for held in helds if held.is_over]
        for held in done:
            box.workers[0].forget(held)
        return len(done) == len(helds)

    box.until(all_are_over)
    check(helds)
    assert max(seen) == 1


def test_a_grammar_is_obeyed_by_masks_of_ours(make_box: MakeBox, demo_model: str) -> None:
    box = make_box(model=demo_model, engine_args={"vocab_size": 2048}, max_model_len=None)
    worker = box.worker()
    regex = StructuredOutputs(regex="(yes|no|perhaps)( (yes|no|perhaps)){3}")
    masked = worker.send_admit(admit([10, 20], 60, structured_outputs=regex, stop_token_ids=(2,)))
    plain = worker.send_admit(admit([11, 21], 30))
    box.until(lambda: plain.is_over and masked.token_ids[-1:] == [2])
    assert masked.fault is None
    assert masked.token_ids[-1] == 2  # the grammar's end
    assert len(set(masked.token_ids)) > 1


def test_a_grammar_goes_on_behind_a_death(make_box: MakeBox, demo_model: str) -> None:
    settings = {"model": demo_model, "engine_args": {"vocab_size": 2048}, "max_model_len": None}
    regex = StructuredOutputs(regex="[a-z]{8}( [a-z]{8}){3}")
    answers = []
    for dies in (False, True):
        box = make_box(**settings)
        worker = box.worker()
        asked = admit([10, 20], 60, structured_outputs=regex, stop_token_ids=(2,))
        held = worker.send_admit(asked)
        if dies:
            box.until(lambda held=held: len(held.token_ids) >= 5)
            box.kill()
            box.start()
        box.until(lambda held=held: held.token_ids[-1:] == [2])
        answers.append(held.token_ids)
    assert answers[0] == answers[1]


@pytest.fixture
def demo_model() -> str:
    from slipstream.demo_model import MODEL_PATH

    return str(MODEL_PATH)


def test_the_model_card_says_what_is_allowed(make_box: MakeBox) -> None:
    box = make_box(max_logprobs=-1)
    held = box.worker().send_admit(admit([10, 20], 5, logprobs=64))
    box.until(lambda: held.is_over)
    assert held.fault is not None
    assert held.fault.field == "logprobs"
    assert "63" in held.fault.message


def test_seeds_of_all_that_samples_are_vllms_and_never_none(make_box: MakeBox) -> None:
    box = make_box()
    seeds = [0, -1, 2**63 - 1, -(2**63)]
    helds = send(
        box.worker(), [admit([10 + i, 20], 3, temperature=1.0, seed=s) for i, s in enumerate(seeds)]
    )
    box.until(all_over(helds))
    given = [request.params.seed for request in box.engine.began]
    assert None not in given
    assert -1 not in given  # vLLM takes it for none
    assert len(set(given)) == len(seeds)
    assert np.iinfo(np.int64).min <= min(given)


@pytest.mark.parametrize("dies", [False, True])
def test_reasoning_ends_where_its_budget_does(make_box: MakeBox, *, dies: bool) -> None:
    box = make_box()
    worker = box.worker()
    ids = ReasoningIds("reasoning", begins=(4,), ends=(3,))
    asked = with_fields(admit([10, 20], 30, thinking_token_budget=6), reasoning=ids)
    held = worker.send_admit(asked)
    other = worker.send_admit(admit([11, 21], 30))
    if dies:
        box.until(lambda: len(held.token_ids) >= 3)
        box.kill()
        box.start()
    box.until(all_over([held, other]))
    assert held.fault is None
    assert held.token_ids.index(3) == 6
    assert held.token_ids[:6] == expected(admit([10, 20], 30))[:6]
    check([other])
