"""What a link, a process or one request's failure leaves behind: nothing, here or in the core."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from slipstream_core.workers.handler import WorkerHandler
from slipstream_ipc.messages import SamplingParams, Submit
from slipstream_ipc.transport.codec import encode_params
from slipstream_ipc.transport.router import Session
from slipstream_worker.detokenizer.factory import Detokenizer, DetokenizerFactory

PROMPTS = [f"Section {n}: what is left when all is done?" for n in range(4)]


class Unwilling(DetokenizerFactory):
    """Makes no detokeniser for one prompt."""

    delimiter_ids = ()

    def __init__(self, factory: DetokenizerFactory, prompt_ids: list[int]) -> None:
        self._factory = factory
        self._prompt_ids = prompt_ids

    def create(self, prompt_ids: list[int], skip_special_tokens: bool) -> Detokenizer:
        if list(prompt_ids) == self._prompt_ids:
            raise RuntimeError("not this one")
        return self._factory.create(prompt_ids, skip_special_tokens)


class Tailless(DetokenizerFactory):
    """Makes detokenisers that break when they are asked for the tail."""

    delimiter_ids = ()

    def __init__(self, factory: DetokenizerFactory) -> None:
        self._factory = factory

    def create(self, prompt_ids: list[int], skip_special_tokens: bool) -> Detokenizer:
        real = self._factory.create(prompt_ids, skip_special_tokens)

        class Broken:
            num_pending = 0
            step = staticmethod(real.step)

            def flush(self) -> str:
                raise RuntimeError("no tail")

        return Broken()


def test_streams_whose_client_left_while_the_core_was_out_of_reach(make_stack) -> None:
    stack = make_stack(num_blocks=40)
    client = stack.client()
    streams = [client.submit(p, max_tokens=400) for p in PROMPTS]
    stack.until(lambda: all(s.text for s in streams))
    core, stack.core = stack.core, None
    stack.worker._core.attach(stack.now())
    client.goodbye()
    stack.until(lambda: not len(stack.worker.streams))
    stack.core = core
    stack.until(stack.holds_nothing)


def test_streams_aborted_while_their_client_attached_anew(make_stack) -> None:
    stack = make_stack(grace_s=5.0)
    client = stack.client()
    streams = [client.submit(p, max_tokens=400) for p in PROMPTS]
    stack.until(lambda: all(s.text for s in streams))
    client.hop.attach(stack.now())
    for it in streams:
        del client.streams[it.submit.handle]  # over on its side: it says no more than Abort
        client.abort(it)
    stack.until(lambda: stack.core.scheduler.num_running == 0)
    stack.pass_time(6.0)
    stack.until(stack.holds_nothing)
    assert stack.worker.readers.num_clients == 1


def test_an_end_whose_acknowledgement_was_lost(make_stack) -> None:
    stack = make_stack(grace_s=5.0)
    client = stack.client()
    it = client.submit(PROMPTS[0], max_tokens=5)
    stack.until(lambda: it.accepted > 0)
    client.is_reading = False
    stack.until(lambda: stack.core.scheduler.num_running == 0)
    for _ in range(20):
        stack.step()
    client.hop.attach(stack.now())
    del client.streams[it.submit.handle]  # it has all of it, and will not come back for more
    client.is_reading = True
    stack.until(lambda: client.hop.is_attached)
    stack.pass_time(6.0)
    stack.until(stack.holds_nothing)
    assert stack.worker.readers.num_clients == 1


def test_a_reader_that_takes_longer_than_the_grace_time_gets_all(make_stack, expected) -> None:
    [plain] = expected(PROMPTS[:1], max_tokens=200)
    stack = make_stack(grace_s=1.0, client_timeout_s=1000.0)
    client = stack.client()
    it = client.submit(PROMPTS[0], max_tokens=200)
    stack.until(lambda: bool(it.text))
    client.hop.attach(stack.now())
    stack.until(lambda: client.hop.is_attached)
    client.is_reading = False
    stack.until(lambda: stack.core.scheduler.num_running == 0)
    stack.pass_time(2.0)
    for _ in range(20):
        stack.step()
    client.is_reading = True
    stack.until(lambda: it.is_over)
    assert (it.text, it.end) == (plain.text, plain.end)
    stack.pass_time(2.0)
    stack.until(stack.holds_nothing)


def test_a_submission_that_raises_after_it_was_taken_in(make_stack) -> None:
    stack = make_stack(grace_s=0.0)
    stack.kill_worker()
    stack.detokenizers = Unwilling(stack.detokenizers, [5, 6, 7])
    stack.start_worker()
    client = stack.client()
    bad, good = client.submit([5, 6, 7], max_tokens=9), client.submit([5, 6], max_tokens=9)
    stack.until(lambda: bad.is_over and good.is_over)
    assert bad.fault.code == "engine"
    assert good.end.reason == "length"
    stack.until(stack.holds_nothing)


@pytest.mark.long
def test_a_replayed_stream_that_cannot_be_taken_up_again(make_stack, expected) -> None:
    [plain] = expected(PROMPTS[:1], max_tokens=40)
    stack = make_stack(grace_s=5.0)
    client = stack.client()
    bad, good = client.submit([5, 6, 7], max_tokens=40), client.submit(PROMPTS[0], max_tokens=40)
    stack.until(lambda: bool(bad.text and good.text))
    stack.kill_worker()
    stack.detokenizers = Unwilling(stack.detokenizers, [5, 6, 7])
    stack.start_worker()
    stack.until(lambda: bad.is_unknown and good.is_over)
    assert (good.text, good.token_ids) == (plain.text, plain.token_ids)
    stack.pass_time(6.0)
    stack.until(stack.holds_nothing)


def test_an_abort_at_which_the_detokeniser_raises(make_stack) -> None:
    stack = make_stack(grace_s=0.0)
    stack.kill_worker()
    stack.detokenizers = Tailless(stack.detokenizers)
    stack.start_worker()
    client = stack.client()
    it = client.submit(PROMPTS[0], max_tokens=400)
    stack.until(lambda: bool(it.text))
    client.abort(it)
    stack.until(lambda: it.is_over)
    assert it.end.reason in ("abort", "error")
    stack.until(stack.holds_nothing)


@pytest.mark.parametrize(
    ("field", "change"),
    [
        ("priority", {"priority": 2**63}),
        ("priority", {"priority": -(2**31) - 1}),
        ("label", {"label": "x" * 5000}),
    ],
)
def test_numbers_that_no_column_holds_are_refused(
    make_stack: Callable, field: str, change: dict[str, object]
) -> None:
    stack = make_stack(grace_s=0.0)
    client = stack.client()
    given = {"handle": 0, "text": PROMPTS[0], **change}
    params = encode_params(SamplingParams(max_tokens=5))
    it = client.send_submit(Submit(stream_id=b"i" * 16, params=params, **given))
    stack.until(lambda: it.is_over)
    assert it.fault is not None
    assert (it.fault.code, it.fault.field) == ("bad_request", field)
    stack.until(stack.holds_nothing)


def test_a_worker_whose_link_failed_is_not_told_what_it_knows(make_stack, monkeypatch) -> None:
    stack = make_stack()
    client = stack.client()
    it = client.submit(PROMPTS[0], max_tokens=200)
    stack.until(lambda: len(it.token_ids) > 5)
    said: list[bool] = []
    real = WorkerHandler._attach

    def attach(handler: WorkerHandler, session: Session) -> None:
        said.append(session.fresh)
        real(handler, session)

    monkeypatch.setattr(WorkerHandler, "_attach", attach)
    for _ in range(2):
        had = len(it.token_ids)
        stack.worker._core.attach(stack.now())
        stack.until(lambda had=had: len(it.token_ids) > had + 5)
    assert said == [False, False]


def test_worker_killed_after_the_core_was(make_stack, expected, outcome) -> None:
    """What was admitted again with outputs is replayed behind them."""
    params = {"max_tokens": 60, "stop": ("q}",)}
    plain = expected(PROMPTS, **params)
    stack = make_stack()
    client = stack.client()
    streams = [client.submit(p, **params) for p in PROMPTS]
    stack.until(lambda: all(len(s.token_ids) > 5 for s in streams))
    stack.kill_core()
    stack.start_core()
    stack.until(lambda: stack.core.handler.num_streams == len(PROMPTS))
    stack.kill_worker()
    stack.start_worker()
    stack.until(lambda: all(s.is_over for s in streams))
    assert outcome(streams) == outcome(plain)
    assert stack.worker._core.epoch & 0xFFFFFFFF == 1, "it did not take the replay at once"
