"""The log-probabilities of a text completion, token by token."""

from collections.abc import Sequence

from slipstream.delta_batch import TokenLogprobs
from slipstream.http.logprobs.logprob_bodies import (
    TextPosition,
    shown_logprob,
    top_logprobs_by_name,
)
from slipstream.http.logprobs.vocabulary import TokenTexts
from slipstream.http.openai.response_bodies import CompletionLogprobs


def completion_logprobs(
    entries: Sequence[TokenLogprobs], k: int, texts: TokenTexts, position: TextPosition
) -> CompletionLogprobs:
    """The columns of tokens that begin at `position`, which is advanced past them."""
    offsets: list[int] = []
    values: list[float | None] = []
    tokens: list[str] = []
    tops: list[dict[str, float] | None] = []
    for entry in entries:
        sampled = next(iter(entry.values()))
        token = texts.of(sampled.token_id)
        offsets.append(position.offset)
        position.advance(token.raw or b"")
        values.append(shown_logprob(sampled))
        tokens.append(token.name)
        tops.append(top_logprobs_by_name(entry, k, texts))
    return CompletionLogprobs(offsets, values, tokens, tops)
