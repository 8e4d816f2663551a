"""What a worker reports as its recent work: its turns that handled a step of the core's."""

from __future__ import annotations

import tempfile
from pathlib import Path

from tests.helpers.mini_stack import MODEL, MiniStack

from slipstream_worker.detokenizer.factory import DetokenizerFactory


def test_every_turn_of_work_has_handled_a_step(
    tokenizer: object, detokenizers: DetokenizerFactory
) -> None:
    with tempfile.TemporaryDirectory(prefix="mini-") as folder:
        stack = MiniStack(Path(folder), MODEL, tokenizer, detokenizers)
        try:
            received = stack.client().submit([5, 6, 7], max_tokens=60, ignore_eos=True)
            stack.until(lambda: received.is_over)
            for _ in range(50):  # turns without a step
                stack.step()
            assert stack.core is not None
            assert stack.worker is not None
            num_steps = stack.core.counters.recent._num_added[0]
            num_turns = stack.worker._recent._num_added[0]
        finally:
            stack.close()
    assert num_steps >= 60
    assert 0 < num_turns <= num_steps
