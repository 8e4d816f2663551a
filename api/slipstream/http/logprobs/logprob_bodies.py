"""Log-probabilities in OpenAI's two shapes, and in vLLM's by token id. Pure functions.

- Minus infinity is shown as -9999, as JSON has no infinities.
- The first entry of a `TokenLogprobs` is the sampled token; the top `k` are the candidates whose
  rank is at most `k`.
"""

from __future__ import annotations

from codecs import getincrementaldecoder
from collections.abc import Sequence

from slipstream.delta_batch import Logprob, TokenLogprobs
from slipstream.http.logprobs.vocabulary import TokenTexts
from slipstream.http.openai.response_bodies import (
    ChatLogprobs,
    LogprobById,
    LogprobsById,
    TokenLogprob,
    TopLogprob,
)

MIN_LOGPROB = -9999.0


class TextPosition:
    """The text position of the next token in a sequence of tokens. offset: in characters."""

    __slots__ = ("_decoder", "offset", "pending")

    def __init__(self, offset: int = 0, pending: bytes = b"") -> None:
        """pending: bytes of an incomplete UTF-8 character at the end of the tokens so far."""
        self.offset = offset
        self.pending = b""
        self._decoder = getincrementaldecoder("utf-8")("replace")
        if pending:
            self._decoder.decode(pending)
            self.pending = self._decoder.getstate()[0]

    def copy(self) -> TextPosition:
        """Another one at the same place."""
        return TextPosition(self.offset, self.pending)

    def advance(self, raw: bytes) -> None:
        """Advance past a token, given as its bytes."""
        if not self.pending and raw.isascii():
            self.offset += len(raw)
            return
        self.offset += len(self._decoder.decode(raw))
        self.pending = self._decoder.getstate()[0]


def chat_logprobs(entries: Sequence[TokenLogprobs], k: int, texts: TokenTexts) -> ChatLogprobs:
    """One entry per token, with the top `k` candidates."""
    content = []
    for entry in entries:
        sampled = next(iter(entry.values()))
        shown = texts.of(sampled.token_id)
        content.append(
            TokenLogprob(
                shown.text,
                None if shown.raw is None else list(shown.raw),
                shown_logprob(sampled),
                [_top(each, texts) for each in _top_candidates(entry, k)],
            )
        )
    return ChatLogprobs(content)


def top_logprobs_by_name(entry: TokenLogprobs, k: int, texts: TokenTexts) -> dict[str, float]:
    """The log-probability of a token and of the top `k` candidates, by name."""
    own = next(iter(entry.values()))
    top = {texts.of(own.token_id).name: shown_logprob(own)}
    for each in _top_candidates(entry, k):
        top.setdefault(texts.of(each.token_id).name, shown_logprob(each))
    return top


def candidates_by_id(entry: TokenLogprobs, k: int, texts: TokenTexts) -> LogprobsById:
    """The log-probability of a token and of the top `k` candidates, by token id."""
    own = next(iter(entry.values()))
    return {
        each.token_id: LogprobById(shown_logprob(each), each.rank, texts.of(each.token_id).text)
        for each in (own, *_top_candidates(entry, k))
    }


def logprobs_by_id(
    entries: Sequence[TokenLogprobs | None], k: int, texts: TokenTexts
) -> list[LogprobsById | None]:
    """`candidates_by_id` of each token; None stays None."""
    return [None if entry is None else candidates_by_id(entry, k, texts) for entry in entries]


def _top_candidates(entry: TokenLogprobs, k: int) -> list[Logprob]:
    found = [each for each in entry.values() if each.rank <= k]
    return sorted(found, key=lambda each: each.rank)


def _top(candidate: Logprob, texts: TokenTexts) -> TopLogprob:
    shown = texts.of(candidate.token_id)
    raw = None if shown.raw is None else list(shown.raw)
    return TopLogprob(shown.text, raw, shown_logprob(candidate))


def shown_logprob(candidate: Logprob) -> float:
    """A candidate's log-probability, at least `MIN_LOGPROB`."""
    return max(candidate.logprob, MIN_LOGPROB)
