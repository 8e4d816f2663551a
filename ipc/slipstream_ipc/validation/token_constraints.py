"""Checks a request's token constraints: logit bias, allowed ids, bad words and penalties.

The core's `sampling.logit_biases` and `sampling.penalties` apply them to logits.

- Names and meanings are vLLM's. A bad word is sent as the token sequences that its text is
  tokenized to, none of which may be completed in the output.
- A request whose output could reach a point without any allowed token is refused, so that no step
  has to handle it.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Collection, Sequence

import numpy as np
from msgspec import structs

from slipstream_ipc.columns import u32
from slipstream_ipc.errors import BadRequest, ProtocolError, Summary
from slipstream_ipc.messages import SamplingParams

MAX_LOGIT_BIASES = 1024
MAX_LOGIT_BIAS = 100.0
MAX_ALLOWED_TOKEN_IDS = 300_000  # larger than any vocabulary
MAX_BAD_WORDS = 64
MAX_BAD_WORD_CHARS = 128
MAX_BAD_WORD_TOKENS = 32
MAX_PENALTY = 2.0
MIN_REPETITION_PENALTY = 1e-6  # both bounds keep logits far inside float32's range
MAX_REPETITION_PENALTY = 1e6

Words = Sequence[tuple[int, ...]]  # token sequences, none of them empty


def check_token_params(params: SamplingParams) -> None:
    """Raise BadRequest for the first of these fields whose value is invalid for every model."""
    for field in ("presence_penalty", "frequency_penalty"):
        value = getattr(params, field)
        if not -MAX_PENALTY <= value <= MAX_PENALTY:  # also refuses nan
            raise BadRequest(field, value, f"a number in [{-MAX_PENALTY:g}, {MAX_PENALTY:g}]")
    value = params.repetition_penalty
    if not MIN_REPETITION_PENALTY <= value <= MAX_REPETITION_PENALTY:
        allowed = f"a number in [{MIN_REPETITION_PENALTY:g}, {MAX_REPETITION_PENALTY:g}]"
        raise BadRequest("repetition_penalty", value, f"{allowed}, 1 is off")
    _check_biases(params)
    _check_allowed(params)
    _check_bad_words(params)


def check_known_ids(params: SamplingParams, vocab_size: int) -> None:
    """Raise BadRequest for a token id outside of the vocabulary."""
    for field in ("logit_bias", "allowed_token_ids", "logprob_token_ids"):
        token_ids: Collection[int] = getattr(params, field) or ()
        largest = max(token_ids, default=0)
        if largest >= vocab_size:
            raise BadRequest(field, largest, f"ids in [0, {vocab_size})")


def with_distinct_ids(params: SamplingParams) -> SamplingParams:
    """The params with each allowed id listed once, in ascending order."""
    if params.allowed_token_ids is None:
        return params
    ids = np.unique(np.array(params.allowed_token_ids, np.uint32)).tolist()
    return structs.replace(params, allowed_token_ids=tuple(ids))


def unpack_words(ids: bytes, counts: bytes) -> Words:
    """The token sequences of the columns `bad_word_ids` and `bad_word_counts` of an Admit.

    Raises: BadRequest if the columns are invalid, or exceed the limits of a request.
    """
    if not ids and not counts:
        return []  # the usual case
    try:
        lengths, token_ids = u32(counts, "bad_word_counts"), u32(ids, "bad_word_ids")
    except ProtocolError as error:
        raise BadRequest("bad_words", str(error), "u32 columns") from None
    if len(lengths) > 2 * MAX_BAD_WORDS:
        allowed = f"at most {2 * MAX_BAD_WORDS}"
        raise BadRequest("bad_words", Summary(f"{len(lengths)} token sequences"), allowed)
    if len(lengths) and not 1 <= int(lengths.min()) <= int(lengths.max()) <= MAX_BAD_WORD_TOKENS:
        allowed = f"words of 1 to {MAX_BAD_WORD_TOKENS} tokens"
        raise BadRequest("bad_words", Summary(f"one of {int(lengths.max())} tokens"), allowed)
    if int(lengths.sum()) != len(token_ids):
        allowed = f"{int(lengths.sum())}, as their counts say"
        raise BadRequest("bad_words", Summary(f"{len(token_ids)} token ids"), allowed)
    ends = np.cumsum(lengths)
    return [tuple(word.tolist()) for word in np.split(token_ids, ends)[:-1]]


def check_rules(
    params: SamplingParams,
    words: Words,
    *,
    vocab_size: int,
    stop_ids: Collection[int],
    max_tokens: int,
) -> None:
    """Check that the model has the given tokens, and that one can always be sampled.

    words: the token sequences of `params.bad_words`. stop_ids: all ids that end the stream.
    Raises: BadRequest.
    """
    check_known_ids(params, vocab_size)
    largest = max((max(word) for word in words), default=0)
    if largest >= vocab_size:
        raise BadRequest("bad_words", largest, f"words whose ids are in [0, {vocab_size})")
    field = _without_way_out(params, words, vocab_size, frozenset(stop_ids), max_tokens)
    if field is not None:
        given = Summary("no token that could be sampled")
        allowed = "settings that always leave a token, with allowed_token_ids, bad_words and "
        raise BadRequest(field, given, f"{allowed}min_tokens taken together")


def _check_biases(params: SamplingParams) -> None:
    biases = params.logit_bias or {}
    if len(biases) > MAX_LOGIT_BIASES:
        raise BadRequest(
            "logit_bias", Summary(f"{len(biases)} tokens"), f"at most {MAX_LOGIT_BIASES}"
        )
    for token_id, bias in biases.items():
        if not (0 <= token_id < 2**32 and math.isfinite(bias) and abs(bias) <= MAX_LOGIT_BIAS):
            bound = f"{MAX_LOGIT_BIAS:g}"
            allowed = f"token ids in [0, 2**32) with numbers in [-{bound}, {bound}]"
            raise BadRequest("logit_bias", {token_id: bias}, allowed)


def _check_allowed(params: SamplingParams) -> None:
    token_ids = params.allowed_token_ids
    if token_ids is None:
        return
    if not 0 < len(token_ids) <= MAX_ALLOWED_TOKEN_IDS:
        allowed = f"1 to {MAX_ALLOWED_TOKEN_IDS}, or None"
        raise BadRequest("allowed_token_ids", Summary(f"{len(token_ids)} ids"), allowed)
    for token_id in (min(token_ids), max(token_ids)):
        if not 0 <= token_id < 2**32:
            raise BadRequest("allowed_token_ids", token_id, "ids in [0, 2**32)")


def _check_bad_words(params: SamplingParams) -> None:
    words = params.bad_words or ()
    if len(words) > MAX_BAD_WORDS:
        raise BadRequest("bad_words", Summary(f"{len(words)} strings"), f"at most {MAX_BAD_WORDS}")
    for word in words:
        if not 0 < len(word) <= MAX_BAD_WORD_CHARS:
            raise BadRequest("bad_words", word, f"strings of 1 to {MAX_BAD_WORD_CHARS} characters")


def _without_way_out(
    params: SamplingParams,
    words: Words,
    vocab_size: int,
    stop_ids: frozenset[int],
    max_tokens: int,
) -> str | None:
    """The field to blame if some output could reach a point without an allowed token, else None.

    What the words forbid next depends on the longest suffix of the output that is a prefix of a
    word: the states of the automaton of Aho and Corasick (1975). The shortest output that reaches a
    state is the prefix itself, and longer ones are forbidden less, as min_tokens forbids stop ids
    only at first. So each state is visited once.
    """
    first_stops = stop_ids if params.min_tokens > 0 else frozenset()
    if not words and not first_stops:
        return None
    allowed = None if params.allowed_token_ids is None else set(params.allowed_token_ids)
    num_options = vocab_size if allowed is None else len(allowed)
    if num_options > len(words) + len(first_stops):
        return None

    options = set(range(vocab_size)) if allowed is None else allowed
    # per state: the transitions by token, and the forbidden tokens
    follow: list[dict[int, int]] = [{}]
    forbidden: list[frozenset[int]] = [frozenset()]
    for *head, last in words:
        state = 0
        for token_id in head:
            if token_id not in follow[state]:
                follow[state][token_id] = len(follow)
                follow.append({})
                forbidden.append(frozenset())
            state = follow[state][token_id]
        forbidden[state] |= {last}

    reached = deque([(0, 0, 0)])  # state, the state of its longest proper suffix, output tokens
    fallback = [0] * len(follow)
    while reached:
        state, shorter, num_tokens = reached.popleft()
        fallback[state] = shorter
        if state:
            forbidden[state] |= forbidden[shorter]
        stops = stop_ids if num_tokens < params.min_tokens else frozenset()
        if options <= forbidden[state] | stops:
            if not words:
                return "min_tokens" if allowed is None else "allowed_token_ids"
            return "bad_words"
        for token_id, target in follow[state].items():
            can_be = token_id in options and token_id not in forbidden[state] | stop_ids
            if can_be and num_tokens + 1 < max_tokens:
                end = shorter
                while end and token_id not in follow[end]:
                    end = fallback[end]
                end = follow[end].get(token_id, 0) if state else 0
                reached.append((target, end, num_tokens + 1))
    return None
