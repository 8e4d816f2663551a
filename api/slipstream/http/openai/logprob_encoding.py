"""The fast path of `logprobs`: a delta's log-probabilities as JSON, made from columns without an
object per candidate. The bytes are identical to those of the slow path.

- A token's text is encoded once (`TokenTexts.token_json`) and the values of a message in one call;
  an event only joins bytes.
- Of a completion's tokens that came alone, the C extension `logprob_tails` makes all but the
  text's offset (`completion_tails`).
- Where the result could differ from the slow path (chats: a tie at the last rank), None is returned
  and the caller takes the slow path.
"""

from __future__ import annotations

from functools import lru_cache
from itertools import pairwise
from pathlib import Path
from types import ModuleType
from typing import NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt

from slipstream.delta_batch import DeltaBatch
from slipstream.http.openai.logprob_bodies import MIN_LOGPROB, TextPosition
from slipstream.http.openai.vocabulary import TokenTexts
from slipstream.outputs import Delta, candidates_of, single_of
from slipstream_ipc.columns import f32, u32
from slipstream_ipc.native.extension import load_extension

_SOURCE = Path(__file__).with_name("logprob_tails.c")

_COMPLETION = b'{"text_offset":[%b],"token_logprobs":[%b],"tokens":[%b],"top_logprobs":[{%b}]}'
_COMPLETION_OF_ONE = _COMPLETION.replace(b"%b", b"%d", 1)
_CHAT = b'{"content":[%b],"refusal":null}'
_encode = msgspec.json.Encoder().encode


class _EncodedTokens(NamedTuple):
    """All tokens of a message that have candidates, one entry per token."""

    ids: list[int]
    values: list[bytes]  # as JSON numbers
    tops: list[bytes]  # `"name":value` of the candidates, separated by commas


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
    single = single_of(delta)
    if single is not None:  # the usual case
        batch, at = single
        ids, values, tops = _completion_tokens(batch, texts)
        token, offset = texts.token_json[ids[at]], position.offset
        raw = token.raw
        if position.pending or not raw.isascii():
            position.advance(raw)
        else:
            position.offset += len(raw)  # `advance` inlined
        return _COMPLETION_OF_ONE % (offset, values[at], token.name, tops[at])
    found = candidates_of(delta)
    if found is None:
        return None
    batch, (begin, end, width, at) = found
    ids, values, tops = _completion_tokens(batch, texts)
    behind = at + (end - begin) // width
    offsets: list[bytes] = []
    names: list[bytes] = []
    for token_id in ids[at:behind]:
        token = texts.token_json[token_id]
        offsets.append(b"%d" % position.offset)
        position.advance(token.raw)
        names.append(token.name)
    own, shown = b",".join(values[at:behind]), b"},{".join(tops[at:behind])
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


class CompletionTails(NamedTuple):
    """Of each token of a message, the JSON of its log-probabilities behind the `text_offset`: of
    token i, `tails[ends[i - 1] : ends[i]]`.

    ends: u32. lengths: i32, of the tokens' texts in characters; -1 where that depends on other
    tokens.
    """

    tails: bytes
    ends: bytes
    lengths: bytes


def load_native() -> ModuleType | None:
    """The C extension, compiled if it has not been on this machine: that takes a moment."""
    return load_extension("logprob_tails", _SOURCE)


def completion_tails(batch: DeltaBatch, texts: TokenTexts) -> CompletionTails | None:
    """The tails of a message whose tokens have equally many candidates; None without the C
    extension, where two tokens have the same name, or for an id that is too large.
    """
    native = load_native()
    columns = batch.message.logprobs
    if native is None or columns is None or not batch.has_one_width:
        return None
    numbers = _encode(_clamped(f32(columns.values)).tolist())
    keys = texts.token_json.keys_in_columns

    def found() -> tuple[bytes, bytes, bytes] | list[int]:
        of_tokens = keys.text, keys.starts, keys.sizes, keys.lengths
        made: tuple[bytes, bytes, bytes] | list[int]
        made = native.tails(columns.ids, numbers, columns.width, *of_tokens)
        return made

    tails = found()
    if isinstance(tails, list):  # tokens that no message had before
        if max(tails) >= keys.MOST:
            return None
        keys.add(tails)
        tails = found()
    if texts.token_json.has_equal_names or isinstance(tails, list):
        return None
    return CompletionTails(*tails)


@lru_cache(maxsize=1)  # the streams of a message are written one after another
def _completion_tokens(batch: DeltaBatch, texts: TokenTexts) -> _EncodedTokens:
    """The tokens of a message, joined as one string with a line per token and then split."""
    columns = batch.message.logprobs
    assert columns is not None
    ids, values = u32(columns.ids), _clamped(f32(columns.values))
    widths = batch.token_widths
    own = np.cumsum(widths) - widths  # index of each token's own candidate
    is_kept = ids != np.repeat(ids[own], widths)  # drops the sampled token among the top ones
    is_kept[own] = True
    kept_ids: list[int] = ids[is_kept].tolist()
    numbers = _encode(values[is_kept].tolist())[1:-1].split(b",")
    pieces = [b""] * (2 * len(kept_ids))
    tokens, key = texts.token_json, texts.token_json.key
    pieces[::2] = [key[token_id] for token_id in kept_ids]
    pieces[1::2] = numbers
    starts: list[int] = (np.cumsum(is_kept) - 1)[own].tolist()
    if tokens.has_equal_names:
        _name_each_once(pieces, starts)
    own_ids: list[int] = ids[own].tolist()
    for start, token_id in zip(starts, own_ids, strict=True):
        pieces[2 * start] = tokens[token_id].first_key
    tops = b"".join(pieces)[1:].split(b"\n")
    return _EncodedTokens(own_ids, [numbers[start] for start in starts], tops)


def _name_each_once(pieces: list[bytes], starts: list[int]) -> None:
    """Of a token's candidates with equal names, keep the first."""
    for start, behind in pairwise((*starts, len(pieces) // 2)):
        names: set[bytes] = set()
        for at in range(2 * start, 2 * behind, 2):
            if pieces[at] in names:
                pieces[at : at + 2] = (b"", b"")
            else:
                names.add(pieces[at])


@lru_cache(maxsize=1)
def _chat_candidates(batch: DeltaBatch, texts: TokenTexts) -> _EncodedColumns:
    """The candidates of a message. A token's own is followed by the opening of `top_logprobs`."""
    columns = batch.message.logprobs
    assert columns is not None
    ids: list[int] = u32(columns.ids).tolist()
    values = _encode(_clamped(f32(columns.values)).tolist())[1:-1].split(b",")
    widths = batch.token_widths
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
