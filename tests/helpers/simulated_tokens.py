"""What a simulated model answers, computed token by token."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from slipstream_core.runner.simulated.simulated_text import SimulatedText


def expected_tokens(
    text: SimulatedText,
    prompt_ids: Sequence[int],
    n: int,
    *,
    seed: int = 0,
    min_tokens: int = 0,
    stop_token_ids: tuple[int, ...] = (),
) -> list[int]:
    """The `n` ids that follow a prompt; `seed` is 0 for a request with temperature 0."""
    ids = np.array(prompt_ids, np.int64)
    prompt_len = len(ids)
    hashes = np.zeros(prompt_len + n, np.uint64)
    hashes[:prompt_len] = np.cumsum(text.mix(ids, np.arange(prompt_len)))
    masked_ids = np.array(stop_token_ids, np.int64)
    out: list[int] = []
    for length in range(prompt_len, prompt_len + n):
        here, lengths = hashes[length - 1 : length], np.array([length])
        start, _ = text.start(
            seeds=np.array([seed]),
            outputs=lengths - prompt_len,
            here=here,
            prompt=hashes[prompt_len - 1 : prompt_len],
            probe=hashes[text.probe_position(here, lengths)],
        )
        masked = masked_ids if len(out) < min_tokens else np.empty(0, np.int64)
        token = text.pick(start, np.zeros(len(masked), np.int64), masked)
        hashes[length : length + 1] = here + text.mix(token, lengths)
        out += token.tolist()
    return out
