"""Log-probabilities that a block holds: all of them come back, in a quarter of the bytes."""

from __future__ import annotations

import json
import random
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import Raw

from slipstream.http.blocks import held_logprobs
from slipstream.http.blocks.held_logprobs import HeldLogprobs

TOKENS = st.lists(st.dictionaries(st.text(max_size=9), st.floats(-9, 0), max_size=4), max_size=9)


@given(st.lists(TOKENS, max_size=9), st.integers(1, 200))
def test_all_come_back_however_they_were_cut(pieces: list[list[object]], piece_bytes: int) -> None:
    held, expected = HeldLogprobs(), [token for piece in pieces for token in piece]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(held_logprobs, "_PIECE_BYTES", piece_bytes)
        for piece in pieces:
            held.add([Raw(json.dumps(token).encode()) for token in piece])
    assert json.loads(bytes(held.array())) == expected
    assert held.num_bytes == sum(len(json.dumps(token)) for token in expected)


def entry(numbers: random.Random) -> dict[str, object]:
    word = f" w{numbers.randrange(4000)}"
    return {"token": word, "logprob": -10 * numbers.random(), "bytes": list(word.encode())}


def test_twenty_candidates_a_token_take_a_third_of_their_json_or_less() -> None:
    numbers, held = random.Random(0), HeldLogprobs()
    for _ in range(1000):
        token = {**entry(numbers), "top_logprobs": [entry(numbers) for _ in range(20)]}
        held.add([Raw(json.dumps(token, separators=(",", ":")).encode())])
    kept = sum(map(sys.getsizeof, held._pieces)) + sum(len(bytes(each)) for each in held._last)
    assert 3 * kept < held.num_bytes
