"""Everything at once to a worker that takes another's place, while the core goes on."""

from __future__ import annotations

import numpy as np
import pytest
from tests.helpers.simulated_tokens import expected_tokens

from slipstream_core.workers.handler import WorkerHandler
from slipstream_ipc.columns import u32
from slipstream_ipc.messages import Registered, Step

NUM_READ = 4  # of the streams, to the end
MORE = 1500  # outputs that are computed meanwhile, or afterwards


@pytest.mark.parametrize(
    ("num_streams", "num_outputs", "least_steps"),
    [(64, 512, 4), pytest.param(1024, 8192, 500, marks=pytest.mark.long)],
)
def test_replay_1024x8k_with_logprobs_never_reattaches_nor_stalls_core(
    make_stack, monkeypatch, num_streams, num_outputs, least_steps
) -> None:
    stack = make_stack(
        max_num_seqs=num_streams,
        max_model_len=num_outputs + MORE + 16,
        block_size=256,
        max_num_batched_tokens=8192,
        client_timeout_s=3600.0,
        grace_s=3600.0,
    )
    params = {
        "max_tokens": num_outputs + MORE,
        "logprobs": 1,
        "ignore_eos": True,  # so they end by length, and the core runs on without a worker
        "detokenize": False,
    }
    reader, absent = stack.client(), stack.client()
    prompts = [[5 + n % 300, 7 + n // 300, 11] for n in range(num_streams)]
    read = [reader.submit(prompt, **params) for prompt in prompts[:NUM_READ]]
    unread = [absent.submit(prompt, **params) for prompt in prompts[NUM_READ:]]
    stack.until(lambda: all(it.accepted for it in (*read, *unread)))
    absent.is_reading = False
    stack.kill_worker()

    rows = np.arange(num_streams)
    stack.until(lambda: stack.core.tokens.lengths(rows).min() >= 3 + num_outputs, within_s=300)
    attaches, sent, turns = [], [], []
    attach, send = WorkerHandler._attach, stack.core.handler._acceptor.send
    run_once = stack.core.engine.run_once

    def counted_attach(handler, session) -> None:
        attaches.append(session)
        attach(handler, session)

    def counted_send(session, body, receipt) -> bool:
        taken = send(session, body, receipt)
        if taken:
            num_tokens = len(u32(body.token_ids)) if isinstance(body, Step) else 0
            sent.append((type(body), num_tokens))
        return taken

    def counted_turn(**options) -> None:
        begun = len(sent)
        run_once(**options)
        steps = [num_tokens for kind, num_tokens in sent[begun:] if kind is Step]
        turns.append((len(steps), sum(steps)))

    monkeypatch.setattr(WorkerHandler, "_attach", counted_attach)
    monkeypatch.setattr(stack.core.handler._acceptor, "send", counted_send)
    monkeypatch.setattr(stack.core.engine, "run_once", counted_turn)
    begun = stack.core.engine._collected_step
    stack.start_worker()
    total = num_streams * num_outputs
    stack.until(lambda: sum(num_tokens for _, num_tokens in turns) >= total, within_s=300)
    assert [kind for kind, _ in sent].count(Registered) == num_streams
    num_steps = stack.core.engine._collected_step - begun
    assert num_steps >= least_steps, "the core went on meanwhile"
    assert max(num_messages for num_messages, _ in turns) <= 4, "messages in one turn"
    assert len(attaches) == 1
    # what the worker has of those that nobody reads is what the core has: it states digests
    stack.worker._core.attach(stack.now())
    stack.until(lambda: len(attaches) == 2)
    for _ in range(30):
        stack.step()
    streams = [stack.core.handler._streams.at(row) for row in range(num_streams)]
    assert all(stream is not None and stream.end is None for stream in streams)
    stack.until(lambda: all(it.is_over for it in read), within_s=300)
    for it, prompt in zip(read, prompts, strict=False):
        expected = expected_tokens(stack.core.runner.text, prompt, num_outputs + MORE)
        assert it.end.reason == "length"
        assert it.token_ids == [int(token_id) for token_id in expected]
        assert len(it.ranks) == len(it.token_ids)
    assert len(attaches) == 2
