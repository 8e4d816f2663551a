"""Log-probabilities in pieces: together they say what the full way says, byte for byte."""

from __future__ import annotations

import random
import sys
from collections.abc import Iterator
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.oracles.completion_logprobs import completion_logprobs

from slipstream import delta_batch
from slipstream.delta_batch import EntryColumns, batch_of
from slipstream.http.logprobs import held_logprobs
from slipstream.http.logprobs.held_logprobs import HeldLogprobs
from slipstream.http.logprobs.logprob_bodies import (
    TextPosition,
    candidates_by_id,
    chat_logprobs,
    logprobs_by_id,
    top_logprobs_by_name,
)
from slipstream.http.logprobs.logprob_pieces import (
    EchoedTokens,
    ShownLogprobs,
    chat_pieces,
    completion_pieces,
    pieces_by_id,
    prompt_pieces,
)
from slipstream.http.logprobs.vocabulary import TokenText, TokenTexts
from slipstream.http.response_encoding import one_line
from slipstream.prompt_logprobs import PromptPieces
from slipstream_ipc.columns import pack_f32, pack_u32
from slipstream_ipc.messages import LogprobColumns

NUM_IDS = 40
TEXTS = ("a", " b", "é", "\u2028", "x\u0085", '"', "\\u2028", "日", "\n", "</s>")


class Texts(TokenTexts):
    """Tokens with line breaks, with equal names, with half a character, and without a text."""

    def __init__(self) -> None:
        super().__init__("nowhere")

    def of(self, token_id: int) -> TokenText:
        if token_id % 19 == 0:
            return TokenText(f"token_id:{token_id}", f"token_id:{token_id}", None)
        raw = TEXTS[token_id % len(TEXTS)].encode() if token_id % 17 else b"\xe2\x82"
        text = raw.decode(errors="replace")
        return TokenText(text, text if token_id % 17 else "bytes:\\xe2\\x82", raw)


def columns(numbers: random.Random, num: int, width: int) -> LogprobColumns:
    """Of so many tokens, some of which tie with the last candidate or are among the candidates."""
    ids, values, ranks = list[int](), list[float](), list[int]()
    for _ in range(num):
        some = numbers.sample(range(NUM_IDS), width)
        ranks.append(numbers.randint(1, width + 2))
        found = sorted((-9 * numbers.random() for _ in some), reverse=True)
        if numbers.random() < 0.1:
            found[-1] = float("-inf")
        found[0] = numbers.choice(found)
        if ranks[-1] < width and numbers.random() < 0.7:
            some[0], found[0] = some[ranks[-1]], found[ranks[-1]]
        ids += some
        values += found
    return LogprobColumns(width, pack_f32(values), pack_u32(ids), pack_u32(ranks))


def entries_of(found: LogprobColumns) -> list[Any]:
    return batch_of(found).logprobs(0, 0) or []


def held(found: LogprobColumns) -> HeldLogprobs:
    tokens = HeldLogprobs()
    tokens.add(found)
    return tokens


def said(content: Any, *, is_line: bool) -> bytes:
    encoded = msgspec.json.encode(content)
    return one_line(encoded) if is_line else encoded


@pytest.fixture(params=[1, 1 << 30])
def part(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(delta_batch, "_PART", request.param)


@pytest.fixture
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(held_logprobs, "_PIECE_BYTES", 24)


CASES = st.tuples(st.integers(0, 9), st.integers(1, 6), st.integers(0, 6), st.booleans())


@pytest.mark.usefixtures("part")
@given(case=CASES, seed=st.integers(0, 2**32))
def test_of_an_answer(case: tuple[int, int, int, bool], seed: int) -> None:
    """Also where fewer candidates are shown than there are."""
    num, width, k, is_line = case
    k = min(k, width - 1)
    found, texts = columns(random.Random(seed), num, width), Texts()
    entries, shown = entries_of(found), ShownLogprobs(k, texts, held(found))
    chat = b"".join(chat_pieces(shown, is_line=is_line))
    assert chat == said(chat_logprobs(entries, k, texts), is_line=is_line)
    by_id = b"".join(pieces_by_id(shown, is_line=is_line))
    expected: Any = [candidates_by_id(entry, k, texts) for entry in entries]
    assert by_id == said(expected, is_line=is_line)
    shown.position, position = TextPosition(7, b"\xe2\x82"), TextPosition(7, b"\xe2\x82")
    completion = b"".join(completion_pieces(shown, is_line=is_line))
    expected = completion_logprobs(entries, k, texts, position)
    assert completion == said(expected, is_line=is_line)
    assert (shown.position.offset, shown.position.pending) == (position.offset, position.pending)


@pytest.mark.usefixtures("part")
@given(case=CASES, num_prompt=st.integers(1, 9), seed=st.integers(0, 2**32))
def test_of_a_prompt(case: tuple[int, int, int, bool], num_prompt: int, seed: int) -> None:
    num, width, k, is_line = case
    k, numbers, texts = min(k, width - 1), random.Random(seed), Texts()
    prompt, found = columns(numbers, num_prompt - 1, width), columns(numbers, num, k + 1)
    pieces = PromptPieces()
    assert pieces.add_piece(0, prompt, num_prompt - 1)
    of_prompt = [None, *entries_of(prompt)]
    by_id = b"".join(prompt_pieces(pieces, k, texts))
    assert by_id == msgspec.json.encode(logprobs_by_id(of_prompt, k, texts))
    ids = [numbers.randrange(NUM_IDS) for _ in range(num_prompt)]

    def offsets() -> Iterator[list[int]]:
        yield [at + 3 for at in range(num_prompt)]

    echoed = EchoedTokens(np.array(ids, np.uint32), pieces, offsets)
    shown = ShownLogprobs(k, texts, held(found), TextPosition(90), echoed)
    answer = completion_logprobs(entries_of(found), k, texts, TextPosition(90))
    tops = [entry and top_logprobs_by_name(entry, k, texts) for entry in of_prompt]
    own = [entry and max(next(iter(entry.values())).logprob, -9999.0) for entry in of_prompt]
    expected = {
        "text_offset": [*(each for some in offsets() for each in some), *answer.text_offset],
        "token_logprobs": [*own, *answer.token_logprobs],
        "tokens": [*(texts.of(token_id).name for token_id in ids), *answer.tokens],
        "top_logprobs": [*tops, *answer.top_logprobs],
    }
    completion = b"".join(completion_pieces(shown, is_line=is_line))
    assert completion == said(expected, is_line=is_line)


@pytest.mark.usefixtures("small_pieces")
@given(
    nums=st.lists(st.integers(0, 5), max_size=5),
    takes=st.lists(st.integers(0, 9), max_size=5),
    width=st.integers(1, 4),
)
def test_what_is_held_comes_back_in_order(nums: list[int], takes: list[int], width: int) -> None:
    numbers, tokens, expected = random.Random(width), HeldLogprobs(), list[Any]()
    for num in nums:
        found = columns(numbers, num, width)
        tokens.add(found)
        expected += entries_of(found)
    tokens.add(EntryColumns(b"abcd"))  # a token without log-probabilities
    assert tokens.num_tokens == len(expected)
    taken = HeldLogprobs()
    for num in takes:
        taken.extend(tokens.take(num))
    taken.extend(tokens)
    assert [entry for each in taken.parts() for entry in entries_of(each)] == expected


def test_a_candidate_is_held_in_eight_bytes() -> None:
    found = columns(random.Random(1), 1000, 21)
    num_bytes = len(b"".join(chat_pieces(ShownLogprobs(20, Texts(), held(found)), is_line=True)))
    tokens = held(found)
    pieces = (*tokens._pieces, *tokens._unsealed)
    kept = [each for piece in pieces for each in (piece.values, piece.ids, piece.ranks)]
    assert sum(map(sys.getsizeof, kept)) < (8 * 21 + 4) * 1000 * 1.05
    assert 6 * sum(map(sys.getsizeof, kept)) < num_bytes
