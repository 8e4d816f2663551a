"""The quick way of log-probabilities says what the full one says, byte for byte."""

from __future__ import annotations

from itertools import pairwise

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.oracles.completion_logprobs import completion_logprobs

from slipstream import compiled
from slipstream.delta_batch import DeltaBatch
from slipstream.demo_model import MODEL_PATH
from slipstream.http.logprobs.logprob_bodies import TextPosition, chat_logprobs
from slipstream.http.logprobs.logprob_encoding import (
    Tails,
    chat_logprobs_json,
    chat_tails,
    completion_logprobs_json,
    completion_tails,
)
from slipstream.http.logprobs.vocabulary import TokenText, TokenTextColumns, TokenTexts
from slipstream.http.response_encoding import one_line
from slipstream.outputs import Delta
from slipstream_ipc.columns import pack_u32
from slipstream_ipc.messages import Deltas, LogprobColumns

VOCABULARY = 4096  # beside which there are ids that have no text


@pytest.fixture(scope="module")
def texts() -> TokenTexts:
    found = TokenTexts(str(MODEL_PATH))
    found._load()
    return found


@st.composite
def tokens(draw: st.DrawFn, width: int) -> tuple[list[int], list[float], int]:
    """The candidates of one token as columns have them: ids, values, and its own rank."""
    ids = draw(
        st.lists(st.integers(0, VOCABULARY + 20), min_size=width, max_size=width, unique=True)
    )
    numbers = st.floats(-1e4, 0, width=32) | st.just(float("-inf"))
    values = sorted(draw(st.lists(numbers, min_size=width, max_size=width)), reverse=True)
    own, top = draw(st.integers(0, width - 1)), width - 1
    others = list(range(top))  # the likeliest, less the last one where its own is none of them
    if own < top:
        return [ids[own], *(ids[at] for at in others)], [values[own], *values[:top]], own + 1
    # none of those: at a rank behind them, or, in a tie, at one of theirs
    rank = draw(st.integers(max(1, top), 300))
    return [ids[top], *(ids[at] for at in others)], [values[top], *values[:top]], rank


@st.composite
def deltas(draw: st.DrawFn) -> list[tuple[Delta, int]]:
    """Some of one message, each with how many of the likeliest its stream asked for."""
    counts = draw(st.lists(st.integers(0, 3), min_size=1, max_size=4))
    widths = draw(
        st.lists(st.sampled_from([0, 1, 2, 6]), min_size=len(counts), max_size=len(counts))
        | st.sampled_from([1, 6]).map(lambda width: [width] * len(counts))
    )
    ids, values, ranks = [], [], []
    for count, width in zip(counts, widths, strict=True):
        for _ in range(count if width else 0):
            own_ids, own_values, rank = draw(tokens(width))
            ids += own_ids
            values += own_values
            ranks.append(rank)
    are_equal = len(set(widths)) == 1 and widths[0] > 0
    columns = LogprobColumns(
        widths[0] if are_equal else 0,
        np.array(values, "<f4").tobytes(),
        pack_u32(ids),
        pack_u32(ranks),
        b"" if are_equal else pack_u32(widths),
    )
    num = len(counts)
    zeros = pack_u32([0] * num)
    message = Deltas(
        zeros, zeros, zeros, ["x"] * num, pack_u32([0] * sum(counts)), pack_u32(counts),
        logprobs=columns,
    )  # fmt: skip
    batch = DeltaBatch(message, {})
    skips = [draw(st.integers(0, count)) for count in counts]
    return [
        (Delta("x", batch, entry, skip), width - 1)
        for entry, (skip, width) in enumerate(zip(skips, widths, strict=True))
    ]


def encoded(content: object) -> bytes:
    return one_line(msgspec.json.encode(content))


@given(found=deltas())
def test_the_quick_way_says_what_the_full_one_says(texts, found):
    for delta, k in found:
        entries = delta.logprobs or []
        quick_position, position = TextPosition(7, b"\xe2\x82"), TextPosition(7, b"\xe2\x82")
        quick = completion_logprobs_json(delta, texts, quick_position)
        assert (quick is None) == (not entries)
        if quick is not None:
            assert quick == encoded(completion_logprobs(entries, k, texts, position))
            assert (quick_position.offset, quick_position.pending) == (
                position.offset,
                position.pending,
            )
        quick = chat_logprobs_json(delta, texts)
        if quick is not None:
            assert quick == encoded(chat_logprobs(entries, k, texts))


def test_only_a_tie_at_the_last_rank_goes_the_full_way(texts):
    def chat(rank: int) -> bytes | None:
        columns = LogprobColumns(
            2, np.array([-1, -1], "<f4").tobytes(), pack_u32([5, 6]), pack_u32([rank])
        )
        zero = pack_u32([0])
        batch = DeltaBatch(Deltas(zero, zero, zero, ["x"], zero, logprobs=columns), {})
        return chat_logprobs_json(Delta("x", batch, 0), texts)

    assert chat(1) is None  # it is as likely as the likeliest, which is another one
    assert chat(2) is not None


@given(found=deltas())
def test_tokens_of_one_name_are_told_as_the_full_way_tells_them(found):
    """As in vocabularies that have a word and its continuation."""
    same = TokenTexts(str(MODEL_PATH))
    same.of = lambda token_id: TokenText("x", f"name {token_id % 3}", b"x")  # type: ignore[method-assign]
    for delta, k in found:
        entries = delta.logprobs or []
        if entries:
            quick = completion_logprobs_json(delta, same, TextPosition())
            assert quick == encoded(completion_logprobs(entries, k, same, TextPosition()))


@given(
    messages=st.lists(deltas(), min_size=1, max_size=3),
    num_names=st.sampled_from([2 * VOCABULARY, 3]),
)
def test_tails_are_what_the_quick_way_says_behind_the_offset(messages, num_names):
    """Also in vocabularies with equal names, as of a byte and of the letter that it is."""
    fresh = TokenTexts(str(MODEL_PATH))

    def of(token_id: int) -> TokenText:
        raw = None if token_id % 5 == 0 else f"{'é' * (token_id % 2)}x".encode()
        return TokenText("x", f"né{token_id % num_names}", raw)

    fresh.of = of  # type: ignore[method-assign]
    for message in messages:
        batch = message[0][0]._batch
        found, chats = completion_tails(batch, fresh), chat_tails(batch, fresh)
        lengths = np.frombuffer(found.lengths, "<i4").tolist()
        tails, of_chats = _each(found), _each(chats)
        first = 0
        for entry, count in enumerate(batch.counts):
            behind = first + count
            if count == 1 and tails[first]:
                position, delta = TextPosition(7), Delta("x", batch, entry)
                whole = completion_logprobs_json(delta, fresh, position)
                assert whole == b'{"text_offset":[7' + tails[first]
                assert lengths[first] in (-1, position.offset - 7)
                is_other = position.pending != b"" or position.offset == 7 + 2
                assert (lengths[first] < 0) == is_other
                assert of_chats[first] == (chat_logprobs_json(delta, fresh) or b"")
            has_any = batch.span(entry, 0) is not None
            assert [tail != b"" for tail in tails[first:behind]] == [has_any] * count
            first = behind
        assert first == len(tails) == len(of_chats)


def _each(found: Tails) -> list[bytes]:
    text, ends = found.text, [0, *np.frombuffer(found.ends, "<u4").tolist()]
    assert text is not None
    assert ends[-1] == len(text)
    return [text[begin:end] for begin, end in pairwise(ends)]


def test_an_id_that_is_too_large_for_columns_takes_the_other_way(texts):
    zero = pack_u32([0])
    for token_id, is_found in ((TokenTextColumns.MOST - 1, True), (TokenTextColumns.MOST, False)):
        columns = LogprobColumns(1, np.array([-1], "<f4").tobytes(), pack_u32([token_id]), zero)
        batch = DeltaBatch(Deltas(zero, zero, zero, ["x"], zero, logprobs=columns), {})
        assert (completion_tails(batch, texts).text is not None) == is_found


def test_a_token_with_many_candidates_is_left_to_the_other_way(texts):
    """Each is compared with all before it."""
    widths = [2, 65, 64, 1]
    ids = [token_id for width in widths for token_id in range(width)]
    columns = LogprobColumns(
        0,
        np.array([-1] * len(ids), "<f4").tobytes(),
        pack_u32(ids),
        pack_u32([1] * 4),
        pack_u32(widths),
    )
    zeros = pack_u32([0] * 4)
    batch = DeltaBatch(Deltas(zeros, zeros, zeros, ["x"] * 4, zeros, logprobs=columns), {})
    tails = _each(completion_tails(batch, texts))
    assert [tail != b"" for tail in tails] == [True, False, True, True]
    for entry in (0, 2, 3):
        whole = completion_logprobs_json(Delta("x", batch, entry), texts, TextPosition(7))
        assert whole == b'{"text_offset":[7' + tails[entry]


def test_columns_that_do_not_match_are_refused():
    one, key, minus = pack_u32([1]), b',"a":', b"[-1.0]"
    zero, two, known = pack_u32([0]), pack_u32([2]), (key, pack_u32([0]), pack_u32([5]), one)
    assert compiled.completion_tails(zero, minus, pack_u32([0, 1, 0]), one, *known) == (
        b'],"token_logprobs":[-1.0],"tokens":["a"],"top_logprobs":[{"a":-1.0}]}',
        pack_u32([0, 69, 69]),
        pack_u32([0, 1, 0]),
    )
    whole = b'{"content":[,"a":-1.0,"top_logprobs":[]}],"refusal":null}'  # a head is told as it is
    assert compiled.chat_tails(zero, minus, one, one, *known) == (whole, pack_u32([57]), one)
    for tails in (compiled.completion_tails, compiled.chat_tails):
        assert tails(pack_u32([0, 3]), b"[-1.0,-1.0]", one * 2, one * 2, *known) == [3]
        assert tails(b"", b"[]", b"", b"", *known) == (b"", b"", b"")
        for wrong in (
            (zero, b"[]", one, one, *known),
            (zero, b"-1.0", one, one, *known),
            (zero * 2, minus, one * 2, one * 2, *known),
            (zero, minus, two, one, *known),
            (zero, minus, zero, one, *known),
            (zero, minus, b"", one, *known),
            (zero, minus, one + b"\0", one, *known),
            (zero + b"\0", minus, one, one, *known),
            (zero, minus, one, b"", *known),
            (zero * 3, b"[-1.0,-1.0,-1.0]", two * 2, one * 2, *known),
            (zero, minus, pack_u32([2**32 - 1]), one, *known),
            (zero, minus, one, one, key, one, pack_u32([5]), one),
            (zero, minus, one, one, key, zero, one, one),
            (zero, minus, one, one, key, zero, pack_u32([5, 5]), one),
        ):
            with pytest.raises(ValueError, match="tails: "):
                tails(*wrong)
