"""What a submission becomes: the registration that every party works from."""

from __future__ import annotations

from slipstream_ipc.codec import encode_params
from slipstream_ipc.columns import pack_u32
from slipstream_ipc.messages import ModelCard, SamplingParams, Submit
from slipstream_worker.registration import register

CARD = ModelCard("m", "p", vocab_size=1000, max_model_len=64, eos_token_ids=(2,))
PROMPT = pack_u32([1, 5, 7])


def submission(**params: object) -> Submit:
    encoded = encode_params(SamplingParams(**params))  # type: ignore[arg-type]
    return Submit(1, bytes(16), encoded, token_ids=PROMPT)


def test_allowed_ids_are_registered_once_each() -> None:
    """However often a client lists one, it travels to the core and is kept there once."""
    for given in ((5,) * 300_000, (5, 5)):
        admit = register(submission(allowed_token_ids=given), PROMPT, b"c", CARD)
        assert admit.params.allowed_token_ids == (5,)
    admit = register(submission(allowed_token_ids=(9, 3, 9, 7)), PROMPT, b"c", CARD)
    assert admit.params.allowed_token_ids == (3, 7, 9)
