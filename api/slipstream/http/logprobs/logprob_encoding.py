"""The fast path of `logprobs`: a delta's log-probabilities as JSON, made from columns without an
object per candidate. The bytes are identical to those of the slow path.

- A token's text is encoded once (`TokenTexts.token_json`), and the values of a delta (of a chat's
  whole message) in one call; an event only joins bytes.
- Of tokens that came alone, the C extension `logprob_tails` makes the JSON, of a completion's all
  but the text's offset, for a whole message at once (`completion_tails`, `chat_tails`).
- Where the result could differ from the slow path (chats: a tie at the last rank), None is returned
  and the caller takes the slow path.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache
from itertools import chain
from typing import NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt

from slipstream.compiled import chat_tails as tails_of_chat
from slipstream.compiled import completion_tails as tails_of_completion
from slipstream.delta_batch import CandidateSpan, DeltaBatch
from slipstream.http.logprobs.logprob_bodies import MIN_LOGPROB, TextPosition
from slipstream.http.logprobs.vocabulary import TokenJson, TokenTextColumns, TokenTexts
from slipstream.outputs import Delta, candidates_of
from slipstream_ipc.columns import f32, pack_u32, u32

_COMPLETION = b'{"text_offset":[%b],"token_logprobs":[%b],"tokens":[%b],"top_logprobs":[{%b}]}'
CHAT_FRAME = b'{"content":[', b'],"refusal":null}'  # around the entries
_CHAT = CHAT_FRAME[0] + b"%b" + CHAT_FRAME[1]
_encode = msgspec.json.Encoder().encode


class _EncodedToken(NamedTuple):
    token: TokenJson
    value: bytes  # a JSON number
    top: bytes  # `"name":value` of the candidates, separated by commas


class _EncodedColumns(NamedTuple):
    """All candidates of a message, each token's own before its top candidates."""

    shown: list[bytes]  # per candidate, as an entry of top_logprobs
    has_tie: list[bool]  # per token: it takes the slow path


def completion_logprobs_json(
    delta: Delta, texts: TokenTexts, position: TextPosition
) -> bytes | None:
    """A completion's log-probabilities of a delta whose text begins at `position`; advances it.

    None if the delta has none.
    """
    found = candidates_of(delta)
    if found is None:
        return None
    offsets: list[bytes] = []
    values: list[bytes] = []
    names: list[bytes] = []
    tops: list[bytes] = []
    for token, value, top in _completion_tokens(*found, texts):
        offsets.append(b"%d" % position.offset)
        position.advance(token.raw)
        values.append(value)
        names.append(token.name)
        tops.append(top)
    own, shown = b",".join(values), b"},{".join(tops)
    return _COMPLETION % (b",".join(offsets), own, b",".join(names), shown)


def chat_logprobs_json(delta: Delta, texts: TokenTexts) -> bytes | None:
    """A chat's log-probabilities of a delta; None if it has none, or needs the slow path."""
    found = candidates_of(delta)
    if found is None:
        return None
    batch, (begin, end, width, rank_begin) = found
    shown, has_tie = _chat_candidates(batch, texts)
    if any(has_tie[rank_begin : rank_begin + (end - begin) // width]):
        return None
    tokens = [
        shown[at] + b",".join(shown[at + 1 : at + width]) + b"]}" for at in range(begin, end, width)
    ]
    return _CHAT % b",".join(tokens)


class Tails(NamedTuple):
    """The ends of the JSON of log-probabilities, of each token of a message: of token i,
    `text[ends[i - 1] : ends[i]]`; empty for a token without candidates, or one that takes the slow
    path.

    ends: u32. lengths: i32, of the tokens' texts in characters; -1 where that depends on other
    tokens.
    """

    text: bytes | None = None
    ends: bytes = b""
    lengths: bytes = b""


def completion_tails(batch: DeltaBatch, texts: TokenTexts) -> Tails:
    """The JSON that follows the `text_offset` of a completion's tokens; none for an id that is too
    large.
    """
    return _tails(batch, texts.token_json.name_keys, is_chat=False)


def chat_tails(batch: DeltaBatch, texts: TokenTexts) -> Tails:
    """The same of a chat's tokens, whole."""
    return _tails(batch, texts.token_json.chat_heads, is_chat=True)


def _tails(batch: DeltaBatch, tokens: TokenTextColumns, *, is_chat: bool) -> Tails:
    columns = batch.message.logprobs
    if columns is None:
        return Tails()
    make = tails_of_chat if is_chat else tails_of_completion
    own = columns.ids, _numbers(batch), pack_u32(batch.token_widths), columns.ranks

    def found() -> tuple[bytes, bytes, bytes] | list[int]:
        of_tokens = tokens.text, tokens.starts, tokens.sizes, tokens.lengths
        return make(*own, *of_tokens)

    tails = found()
    if isinstance(tails, list):  # tokens that no message had before
        if max(tails) >= tokens.MOST:
            return Tails()
        tokens.add(tails)
        tails = found()
    assert not isinstance(tails, list)
    return Tails(*tails)


@lru_cache(maxsize=1)  # where streams of a message show them both ways
def _numbers(batch: DeltaBatch) -> bytes:
    """A message's values as a JSON list."""
    assert batch.message.logprobs is not None
    return _encode(_clamped(f32(batch.message.logprobs.values)).tolist())


def _completion_tokens(
    batch: DeltaBatch, span: CandidateSpan, texts: TokenTexts
) -> Iterator[_EncodedToken]:
    """The tokens of some candidates of a message. Of candidates with equal names the first counts:
    the sampled token is there again where it is among the likeliest.
    """
    columns = batch.message.logprobs
    assert columns is not None
    some, width = slice(4 * span.begin, 4 * span.end), span.width
    ids: list[int] = u32(columns.ids[some]).tolist()
    values = _encode(_clamped(f32(columns.values[some])).tolist())[1:-1].split(b",")
    tokens, key = texts.token_json, texts.token_json.key
    for at in range(0, len(ids), width):
        top: dict[bytes, bytes] = {}
        for token_id, value in zip(ids[at : at + width], values[at : at + width], strict=True):
            top.setdefault(key[token_id], value)
        shown = b"".join(chain.from_iterable(top.items()))[1:]
        yield _EncodedToken(tokens[ids[at]], values[at], shown)


@lru_cache(maxsize=1)
def _chat_candidates(batch: DeltaBatch, texts: TokenTexts) -> _EncodedColumns:
    """The candidates of a message. A token's own is followed by the opening of `top_logprobs`."""
    columns = batch.message.logprobs
    assert columns is not None
    ids: list[int] = u32(columns.ids).tolist()
    values = _numbers(batch)[1:-1].split(b",")
    widths = batch.token_widths
    widths = widths[widths > 0]
    behind = np.cumsum(widths)
    own = (behind - widths).tolist()
    tokens = texts.token_json
    shown = [
        tokens[token_id].chat_head + value + b"}"
        for token_id, value in zip(ids, values, strict=True)
    ]
    has_tie: list[bool] = []
    for at, end, rank in zip(own, behind.tolist(), u32(columns.ranks).tolist(), strict=True):
        shown[at] = shown[at][:-1] + b',"top_logprobs":['
        has_tie.append(rank < end - at and ids[at] not in ids[at + 1 : end])  # a tie
    return _EncodedColumns(shown, has_tie)


def _clamped(values: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
    """Values, at least `MIN_LOGPROB`."""
    return np.maximum(values, np.float32(MIN_LOGPROB))
