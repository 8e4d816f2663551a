"""Real processes under load: every stream to its end with the right text."""

from __future__ import annotations

import numpy as np
import pytest
from tests.helpers.simulated_tokens import expected_tokens
from tests.helpers.stacks import spareless_stack

import slipstream
from slipstream.demo_model import MODEL_PATH
from slipstream_core.runner.simulated.simulated_text import SimulatedText
from slipstream_ipc.validation.simulated_model import parse_simulated

PROMPTS = [
    f"{n}. The {word} statement"
    for n in range(8)
    for word in ("assert", "for", "with", "return", "import", "global", "try", "while")
]


@pytest.mark.process
def test_64_streams_on_the_demo_model_have_the_text_of_each_alone() -> None:
    params = slipstream.SamplingParams(temperature=0, max_tokens=40)
    with (
        spareless_stack(max_num_batched_tokens=128) as stack,
        stack.client() as client,
    ):
        together = client.generate_many(PROMPTS, params)
        alone = [client.generate(prompt, params) for prompt in PROMPTS[::9]]
    assert [c.text for c in together[::9]] == [c.text for c in alone]
    assert all(c.finish_reason in ("stop", "length") for c in together)
    assert all(c.text for c in together)


@pytest.mark.process
@pytest.mark.parametrize("mode", ["playback", "chain"])
def test_1024_streams_on_the_simulated_model_have_the_right_text(mode: str) -> None:
    from tokenizers import Tokenizer

    model = f"simulated:step_ms=10,mode={mode}"
    rng = np.random.default_rng(5)
    prompts = [rng.integers(5, 4000, int(n)).tolist() for n in rng.integers(1, 60, 1024)]
    params = slipstream.SamplingParams(temperature=0, max_tokens=64)
    with (
        spareless_stack(model, max_num_seqs=1024) as stack,
        stack.client() as client,
    ):
        completions = client.generate_many(prompts, params)
    oracle = SimulatedText(parse_simulated(f"{model},tokenizer={MODEL_PATH}"))
    tokenizer = Tokenizer.from_file(str(MODEL_PATH / "tokenizer.json"))
    for prompt, completion in zip(prompts, completions, strict=True):
        expected = expected_tokens(oracle, prompt, 64)
        assert list(completion.token_ids) == [int(i) for i in expected]
        whole = tokenizer.decode(prompt + completion.token_ids)
        before = tokenizer.decode(prompt)
        assert whole.endswith(completion.text)
        assert len(whole) - len(completion.text) in (len(before), len(before) - 1)
