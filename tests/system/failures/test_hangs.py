"""Cores that hang, for real: of a request, which ends, or of what was done to them; and grammars
that were made to hang or end them, and do not.
"""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest
from tests.helpers.patience import PATIENCE_S, Patience
from tests.helpers.poisoned_core import POISON, with_poisoned_core
from tests.helpers.stacks import spareless_stack

from slipstream import SlipstreamError, Stack, StructuredOutputs
from slipstream.demo_model import MODEL_PATH
from slipstream.stack import stack as stack_module
from slipstream.stack.supervisor_events import ProcessRestarted
from slipstream_ipc.crash_note import read_note


def wait_for_restart(stack: Stack) -> ProcessRestarted:
    while event := stack.next_event(PATIENCE_S):
        if isinstance(event, ProcessRestarted):
            return event
    raise AssertionError("it is not replaced")


def wait_until_it_computes(runtime_dir: Path) -> None:
    """Until a step has been launched by the core that serves now."""
    patience = Patience()
    while not read_note(runtime_dir):
        patience.wait()


@pytest.mark.process
def test_a_request_that_hangs_every_core_ends_after_it_hung_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(stack_module, "plan_stack", with_poisoned_core("pass"))
    settings = {"hang_timeout_s": 2.0, "max_restarts": 20, "spare_worker": False}
    with Stack("simulated:step_ms=2,mode=chain", **settings) as stack, stack.client() as client:
        prompts = [[n + 1, 5, 7] for n in range(5)]
        streams = [client.stream(p, max_tokens=20, ignore_eos=True) for p in prompts]
        poison = client.stream(POISON, max_tokens=20)
        with pytest.raises(
            SlipstreamError, match="this request crashed the engine 3 times in a row"
        ):
            list(poison)
        for stream in streams:
            assert sum(len(delta.token_ids) for delta in stream) == 20
        assert stack.is_running


@pytest.mark.process
def test_a_core_that_is_stopped_three_times_in_a_row_charges_no_stream(tmp_path: Path) -> None:
    settings = {"hang_timeout_s": 1.5, "max_restarts": 20, "spare_worker": False}
    # the step outlasts the test: no token comes between the stops, which would clear the stream
    stack = Stack("simulated:step_ms=600000", runtime_dir=tmp_path / "run", **settings)
    with stack, stack.client() as client:
        stream = client.stream([1, 2, 3], max_tokens=20)
        for _ in range(4):
            wait_until_it_computes(tmp_path / "run")
            os.kill(stack.pids["core"], signal.SIGSTOP)
            assert wait_for_restart(stack).name == "core"
        stream.abort()
        assert [delta.finish_reason for delta in stream] == ["abort"]


HARMFUL = {
    "seconds to a mask": (
        'start: e\ne: e e e e e | e e e e | e e e | e e | /[a-z]/ | ""',
        "too complex",
    ),
    "deeper than the stack": (
        "start: a0\n" + "".join(f"a{i}: a{i + 1}\n" for i in range(4000)) + 'a4000: "x"',
        "crashes the grammar library",
    ),
    "the lock for 20 s": ("\n" * 65536, "CPU time"),
}


@pytest.mark.process
def test_no_grammar_ends_a_process() -> None:
    model = f"simulated:step_ms=2,mode=chain,tokenizer={MODEL_PATH}"
    # less than the lock is held for, and more than other work keeps a sound loop from its beats
    with spareless_stack(model, hang_timeout_s=15.0) as stack, stack.client() as client:
        pids = stack.pids
        bystander = client.stream([1, 2, 3], max_tokens=3000, ignore_eos=True)
        for grammar, why in HARMFUL.values():
            outputs = StructuredOutputs(grammar=grammar)
            texts = []
            for _ in range(2):
                # with a seed: one stream in 1,000 samples its stop token before it is too complex
                held = [
                    client.stream(
                        [4, 5, n],
                        structured_outputs=outputs,
                        max_tokens=200,
                        stop_token_ids=[1],
                        seed=n,
                    )
                    for n in range(8)
                ]
                for stream in held:
                    with pytest.raises(SlipstreamError, match=why) as caught:
                        list(stream)
                    texts.append(caught.value.text)
            assert texts[:8] == texts[8:]  # the library's counts end them, and no clock
        assert sum(len(delta.token_ids) for delta in bystander) == 3000
        assert stack.pids == pids
