"""What may be said of single tokens: known ids, columns of bad words, and always a way out."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slipstream_ipc.columns import pack_u32
from slipstream_ipc.errors import BadRequest
from slipstream_ipc.messages import ModelCard, SamplingParams
from slipstream_ipc.messages.budgets import MAX_PARAMS_BYTES
from slipstream_ipc.transport.codec import encode_params
from slipstream_ipc.validation.sampling_params import (
    MAX_STOP_CHARS,
    MAX_STOP_TOKEN_IDS,
    MAX_STOPS,
    check_params,
    check_prompt,
    token_ids_from,
)
from slipstream_ipc.validation.token_constraints import (
    MAX_ALLOWED_TOKEN_IDS,
    MAX_BAD_WORD_CHARS,
    MAX_BAD_WORD_TOKENS,
    MAX_BAD_WORDS,
    MAX_LOGIT_BIASES,
    check_rules,
    unpack_words,
)

Word = tuple[int, ...]


def field_refused(
    words: list[Word], vocab_size: int = 4, stop_ids: tuple[int, ...] = (), max_tokens: int = 6,
    **options: object,
) -> str | None:  # fmt: skip
    params = SamplingParams(**options)  # type: ignore[arg-type]
    limits = {"vocab_size": vocab_size, "stop_ids": stop_ids, "max_tokens": max_tokens}
    try:
        check_rules(params, words, **limits)  # type: ignore[arg-type]
    except BadRequest as error:
        return error.field
    return None


@pytest.mark.parametrize(
    ("words", "options", "expected"),
    [
        ([], {}, None),
        ([(0,), (1,), (2,)], {}, None),
        ([(0,), (1,), (2,), (3,)], {}, "bad_words"),
        ([(1,)], {"allowed_token_ids": (1,)}, "bad_words"),
        ([(1, 1)], {"allowed_token_ids": (1,)}, "bad_words"),
        ([(1, 1)], {"allowed_token_ids": (1,), "max_tokens": 1}, None),
        ([(1, 1), (2, 2)], {"allowed_token_ids": (1, 2)}, None),  # they take turns
        ([(1, 1), (1, 2)], {"allowed_token_ids": (1, 2)}, "bad_words"),
        ([(2,), (1, 2, 1)], {"allowed_token_ids": (1, 2)}, None),
        ([(3, 0), (3, 1)], {"allowed_token_ids": (0, 1)}, None),  # 3 never comes
        ([(2, 1), (2, 2), (1, 2)], {"allowed_token_ids": (1, 2)}, "bad_words"),
        ([], {"allowed_token_ids": (3,), "min_tokens": 1}, "allowed_token_ids"),
        ([], {"allowed_token_ids": (3,)}, None),  # ends at once
        ([(1,)], {"allowed_token_ids": (1, 3), "min_tokens": 1}, "bad_words"),
        ([(1, 1)], {"allowed_token_ids": (1, 3), "min_tokens": 1}, None),
        ([(1, 1)], {"allowed_token_ids": (1, 3), "min_tokens": 2}, "bad_words"),
        ([], {"logit_bias": {4: 1.0}}, "logit_bias"),
        ([], {"allowed_token_ids": (0, 4)}, "allowed_token_ids"),
        ([(0, 4)], {}, "bad_words"),
    ],
)
def test_what_is_refused(words: list[Word], options: dict, expected: str | None) -> None:
    assert field_refused(words, stop_ids=(3,), **options) == expected


def test_stop_ids_that_are_the_whole_vocabulary() -> None:
    assert field_refused([], stop_ids=(0, 1, 2, 3), min_tokens=1) == "min_tokens"
    assert field_refused([], stop_ids=(0, 1, 2, 3)) is None


@given(
    words=st.lists(
        st.lists(st.integers(0, 2), min_size=1, max_size=3).map(tuple), max_size=7, unique=True
    ),
    allowed=st.none() | st.sets(st.integers(0, 2), min_size=1),
    stop_ids=st.sets(st.integers(0, 2), max_size=2),
    min_tokens=st.integers(0, 3),
    max_tokens=st.integers(1, 5),
)
def test_refused_is_who_may_come_to_an_end_without_a_way_out(
    words: list[Word],
    allowed: set[int] | None,
    stop_ids: set[int],
    min_tokens: int,
    max_tokens: int,
) -> None:
    """Against all outputs there are."""

    def nexts(output: Word) -> set[int]:
        left = set(range(3)) if allowed is None else set(allowed)
        if len(output) < min_tokens:
            left -= stop_ids
        return {t for t in left if not any((*output, t)[-len(word) :] == word for word in words)}

    outputs: list[Word] = [()]
    is_stuck = False
    for output in outputs:
        found = nexts(output)
        is_stuck |= not found
        if len(output) + 1 < max_tokens:
            outputs += [(*output, t) for t in found - stop_ids]
    refused = field_refused(
        words,
        3,
        tuple(stop_ids),
        max_tokens,
        min_tokens=min_tokens,
        allowed_token_ids=None if allowed is None else tuple(allowed),
    )
    assert (refused is not None) == is_stuck


@given(st.lists(st.lists(st.integers(0, 2**32 - 1), min_size=1, max_size=32), max_size=128))
def test_words_travel(words: list[list[int]]) -> None:
    ids = pack_u32([token_id for word in words for token_id in word])
    assert unpack_words(ids, pack_u32([len(word) for word in words])) == [*map(tuple, words)]


@pytest.mark.parametrize(
    ("ids", "counts"),
    [
        (b"123", b""),
        (b"", b"12345"),
        (pack_u32([1]), b""),
        (pack_u32([1]), pack_u32([2])),
        (b"", pack_u32([0])),
        (pack_u32([1, 2]), pack_u32([2, 0])),
        (pack_u32([1]), pack_u32([2**31, 2**31, 1])),
        (pack_u32([1] * 33), pack_u32([MAX_BAD_WORD_TOKENS + 1])),
        (pack_u32([1] * 129), pack_u32([1] * (2 * MAX_BAD_WORDS + 1))),
    ],
)
def test_columns_that_are_no_words(ids: bytes, counts: bytes) -> None:
    with pytest.raises(BadRequest) as caught:
        unpack_words(ids, counts)
    assert caught.value.field == "bad_words"


def test_ids_are_held_against_the_model_where_it_is_known() -> None:
    card = ModelCard("m", "p", vocab_size=100, max_model_len=32, eos_token_ids=(2,))
    good = SamplingParams(logit_bias={99: 1.0}, allowed_token_ids=(0, 99))
    assert check_prompt(token_ids_from([1]), good, card) == 16
    for field, bad in (("logit_bias", {100: 1.0}), ("allowed_token_ids", (0, 100, 3))):
        with pytest.raises(BadRequest, match=rf"{field}: got 100, allowed: ids in \[0, 100\)"):
            check_prompt(token_ids_from([1]), SamplingParams(**{field: bad}), card)


def test_all_limits_reached_they_still_travel() -> None:
    params = SamplingParams(
        stop=("🙂" * MAX_STOP_CHARS,) * MAX_STOPS,
        stop_token_ids=(2**32 - 1,) * MAX_STOP_TOKEN_IDS,
        logit_bias={2**32 - 1 - i: -100.0 for i in range(MAX_LOGIT_BIASES)},
        allowed_token_ids=(2**32 - 1,) * MAX_ALLOWED_TOKEN_IDS,
        bad_words=("🙂" * MAX_BAD_WORD_CHARS,) * MAX_BAD_WORDS,
    )
    check_params(params)
    assert len(memoryview(encode_params(params))) < MAX_PARAMS_BYTES
