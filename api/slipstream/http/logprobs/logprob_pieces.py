"""Log-probabilities of many tokens as JSON, in pieces that are made as they are sent.

- A piece is made of columns by the C extension `logprob_tails` where that says the same bytes, else
  by `logprob_bodies`: where a token ties with the last candidate, or has very many of them.
- Nothing is kept: an answer that shows them several times makes them as often. A token's columns
  take an eighth of its JSON.
- is_line: the JSON is part of an event, in which all line breaks are escaped.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import chain

import msgspec
import numpy as np
import numpy.typing as npt

from slipstream.delta_batch import TokenLogprobs, batch_of
from slipstream.http.logprobs.held_logprobs import HeldLogprobs
from slipstream.http.logprobs.logprob_bodies import (
    MIN_LOGPROB,
    TextPosition,
    candidates_by_id,
    chat_logprobs,
    logprobs_by_id,
    top_logprobs_by_name,
)
from slipstream.http.logprobs.logprob_encoding import CHAT_FRAME, chat_tails, completion_tails
from slipstream.http.logprobs.vocabulary import TokenTexts
from slipstream.http.response_encoding import one_line
from slipstream.prompt_logprobs import PromptPieces
from slipstream_ipc.columns import f32, u32
from slipstream_ipc.messages import LogprobColumns

_encode = msgspec.json.Encoder().encode
_ESCAPES = (rb"\u0085", rb"\u2028", rb"\u2029")  # of line breaks that JSON itself leaves
MOST_IDS = 1024  # of a prompt, in a piece
# of a completion's tail, around a token's own value, its name, and its candidates
_BEFORE_TOP = len(b'],"token_logprobs":[' + b'],"tokens":[' + b'],"top_logprobs":[')
_BEHIND_TOP = len(b"]}")


@dataclass(frozen=True, slots=True, eq=False)
class EchoedTokens:
    """The tokens of a prompt that is shown in front of an answer.

    offsets: where each token's text begins, some tokens at a time.
    """

    ids: npt.NDArray[np.uint32]
    logprobs: PromptPieces
    offsets: Callable[[], Iterator[list[int]]]


@dataclass(slots=True, eq=False)
class ShownLogprobs:
    """The log-probabilities to be shown of a stretch of an answer: `k` candidates of each token.

    position: where the first token's text begins; completions advance it past all of them.
    prompt: in front of the tokens.
    """

    k: int
    texts: TokenTexts
    tokens: HeldLogprobs = field(default_factory=HeldLogprobs)
    position: TextPosition = field(default_factory=TextPosition)
    prompt: EchoedTokens | None = None

    def parts(self) -> Iterator[LogprobColumns]:
        """The columns of the tokens behind the prompt, some tokens at a time."""
        return map(self._narrowed, self.tokens.parts())

    def prompt_parts(self) -> Iterator[LogprobColumns]:
        """The columns of the prompt's tokens, but for its first, some tokens at a time."""
        return map(self._narrowed, () if self.prompt is None else self.prompt.logprobs.parts())

    def _narrowed(self, columns: LogprobColumns) -> LogprobColumns:
        """Without the candidates behind the likeliest `k`."""
        width = self.k + 1
        if columns.width <= width:
            return columns
        num = len(columns.ranks) // 4
        values = f32(columns.values).reshape(num, columns.width)[:, :width].tobytes()
        ids = u32(columns.ids).reshape(num, columns.width)[:, :width].tobytes()
        return LogprobColumns(width, values, ids, columns.ranks)


def chat_pieces(shown: ShownLogprobs, *, is_line: bool) -> Iterator[bytes]:
    """A chat's log-probabilities."""
    yield b'{"content":['
    yield from entry_pieces(shown, is_line=is_line)
    yield b'],"refusal":null}'


def entry_pieces(shown: ShownLogprobs, *, is_line: bool) -> Iterator[bytes]:
    """An entry for each token, as `content` of a chat has them."""
    return _separated(_entries(part, shown, is_line) for part in shown.parts())


def completion_pieces(shown: ShownLogprobs, *, is_line: bool) -> Iterator[bytes]:
    """A completion's log-probabilities, one column after the other."""
    null = () if shown.prompt is None else (b"null",)  # of a prompt's first token
    yield b'{"text_offset":['
    yield from _separated(map(_inner, _offsets(shown)))
    yield b'],"token_logprobs":['
    yield from _separated(chain(null, map(_own_values, _all_parts(shown))))
    yield b'],"tokens":['
    yield from _separated(_names(ids, shown.texts, is_line) for ids in _own_ids(shown))
    yield b'],"top_logprobs":['
    yield from _separated(chain(null, (_tops(part, shown, is_line) for part in _all_parts(shown))))
    yield b"]}"


def pieces_by_id(shown: ShownLogprobs, *, is_line: bool) -> Iterator[bytes]:
    """The candidates of each token by their ids."""

    def found(part: LogprobColumns) -> bytes:
        entries = [candidates_by_id(each, shown.k, shown.texts) for each in _entries_of(part)]
        return _inner(entries, is_line)

    yield b"["
    yield from _separated(map(found, shown.parts()))
    yield b"]"


def advance(position: TextPosition, part: LogprobColumns, texts: TokenTexts) -> list[int]:
    """Advance past tokens; where the text of each of them begins."""
    offsets: list[int] = []
    for token_id in _first_ids(part):
        offsets.append(position.offset)
        position.advance(texts.token_json[token_id].raw)
    return offsets


def prompt_pieces(prompt: PromptPieces, k: int, texts: TokenTexts) -> Iterator[bytes]:
    """The candidates of each token of a prompt by their ids, null for the first."""
    yield b"["
    yield from _separated(_inner(logprobs_by_id(some, k, texts)) for some in prompt.read_in_parts())
    yield b"]"


def _all_parts(shown: ShownLogprobs) -> Iterator[LogprobColumns]:
    return chain(shown.prompt_parts(), shown.parts())


def _entries_of(part: LogprobColumns) -> list[TokenLogprobs]:
    return batch_of(part).logprobs(0, 0) or []


def _entries(part: LogprobColumns, shown: ShownLogprobs, is_line: bool) -> bytes:
    opening, closing = CHAT_FRAME
    tails = chat_tails(batch_of(part), shown.texts)
    # a token that takes the slow path has no tail
    if tails.text and np.diff(u32(tails.ends), prepend=0).all():
        # within JSON, the one never follows the other
        entries = tails.text[len(opening) : -len(closing)].replace(closing + opening, b",")
        if is_line or not _has_escapes(entries):
            return entries
    return _inner(chat_logprobs(_entries_of(part), shown.k, shown.texts).content, is_line)


def _offsets(shown: ShownLogprobs) -> Iterator[list[int]]:
    if shown.prompt is not None:
        yield from shown.prompt.offsets()
    for part in shown.parts():
        yield advance(shown.position, part, shown.texts)


def _own_values(part: LogprobColumns) -> bytes:
    values = np.maximum(f32(part.values)[:: part.width], np.float32(MIN_LOGPROB))
    return _inner(values.tolist())


def _own_ids(shown: ShownLogprobs) -> Iterator[Sequence[int]]:
    if shown.prompt is not None:
        for at in range(0, len(shown.prompt.ids), MOST_IDS):
            yield shown.prompt.ids[at : at + MOST_IDS].tolist()
    yield from map(_first_ids, shown.parts())


def _first_ids(part: LogprobColumns) -> list[int]:
    ids: list[int] = u32(part.ids)[:: part.width].tolist()
    return ids


def _names(ids: Sequence[int], texts: TokenTexts, is_line: bool) -> bytes:
    names = b",".join([texts.token_json[token_id].name for token_id in ids])
    if is_line or not _has_escapes(names):
        return names
    return _inner([texts.of(token_id).name for token_id in ids])


def _tops(part: LogprobColumns, shown: ShownLogprobs, is_line: bool) -> bytes:
    texts = shown.texts
    tails = completion_tails(batch_of(part), texts)
    if tails.text and (is_line or not _has_escapes(tails.text)):
        ends: list[int] = u32(tails.ends).tolist()
        values = _own_values(part).split(b",")
        found, begin = [], 0
        for end, token_id, value in zip(ends, _first_ids(part), values, strict=True):
            if end == begin:
                break
            first = begin + _BEFORE_TOP + len(value) + len(texts.token_json[token_id].name)
            found.append(tails.text[first : end - _BEHIND_TOP])
            begin = end
        else:
            return b",".join(found)
    return _inner(
        [top_logprobs_by_name(entry, shown.k, texts) for entry in _entries_of(part)], is_line
    )


def _has_escapes(encoded: bytes) -> bool:
    return any(escape in encoded for escape in _ESCAPES)


def _inner(content: Sequence[object], is_line: bool = False) -> bytes:
    """A list as JSON, without its brackets."""
    encoded = _encode(content)[1:-1]
    return one_line(encoded) if is_line else encoded


def _separated(pieces: Iterable[bytes]) -> Iterator[bytes]:
    """Pieces of a list with commas between them; without those that are empty."""
    comma = b""
    for piece in pieces:
        if piece:
            yield comma + piece
            comma = b","
