"""One stream's tokens to text, as they come.

Owns: the two detokenisers. `TableDetokenizer` looks tokens up in a compiled `TokenTable`;
`WindowDetokenizer` decodes a small window of tokens with the tokenizer itself, for decoders that
no table can hold. A factory is made once for a model and creates one detokeniser for each stream.

Does not know: requests, stop strings, where tokens come from. `tokenizers` is imported only when a
window is needed.

Rules:
- Continuation: prompt text + streamed text = decode(prompt ids + output ids), with
  clean_up_tokenization_spaces off. In full: the streamed text is decode(prompt ids + output ids)
  less the beginning that it shares with decode(prompt ids). The two differ only where the prompt
  ends inside a character: decode shows U+FFFD for such a prompt. If the output completes the
  character, the stream has the character; if not, the U+FFFD stays the prompt's.
- The text does not depend on how the tokens are cut into calls of `step` and `step_many`.
- No half characters, and no lost tail: what waits for its other half comes with `flush`, as the
  U+FFFD that decode makes of it.
- An id without a token decodes to nothing. Ids are never negative.
"""

from __future__ import annotations

from codecs import utf_8_decode
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple, Protocol

from slipstream_worker.token_table import TokenTable

if TYPE_CHECKING:
    from tokenizers import Tokenizer

__all__ = [
    "Detokenizer",
    "DetokenizerFactory",
    "TableDetokenizer",
    "TableDetokenizerFactory",
    "WindowDetokenizer",
    "WindowDetokenizerFactory",
]

_REPLACEMENT = "\ufffd"
_FIRST_SURROGATE, _LAST_SURROGATE = b"\xed\xa0", b"\xed\xbf"  # the first two of their three bytes
_MAX_DANGLING = 3  # bytes of an unfinished UTF-8 character, and so the tokens that can hold them
_MAX_PENDING = 8  # tokens that a window waits for the end of a character
_MAX_CONTEXT = 16  # tokens that a window keeps from what was already streamed


class Detokenizer(Protocol):
    """The text of one stream. Not to be used any more after `flush`."""

    @property
    def is_pending(self) -> bool:
        """Whether the last tokens may have text that is yet to come."""
        ...

    def step(self, token_id: int) -> str:
        """The text that this token completes; "" if it only prolongs an unfinished character."""
        ...

    def step_many(self, token_ids: Sequence[int]) -> str:
        """The text that these tokens complete: the same as that of one step after another."""
        ...

    def flush(self) -> str:
        """The tail of a stream that has ended."""
        ...


class DetokenizerFactory(Protocol):
    """Makes the detokenisers of one model."""

    def create(self, prompt_ids: Sequence[int], skip_special_tokens: bool) -> Detokenizer:
        """A detokeniser that continues `prompt_ids`."""
        ...


class _View(NamedTuple):
    """A table as a stream sees it: with the special tokens, or with nothing in their place."""

    pieces: list[bytes]
    texts: list[str | None]  # None: the piece is not UTF-8 by itself


class TableDetokenizerFactory:
    """Holds the two views of a table, which all streams share."""

    def __init__(self, table: TokenTable) -> None:
        shown = _View(list(table.pieces), [_own_text(piece) for piece in table.pieces])
        skipped = _View(shown.pieces.copy(), shown.texts.copy())
        for token_id in table.special:
            skipped.pieces[token_id] = b""
            skipped.texts[token_id] = ""
        self._views = (shown, skipped)

    def create(self, prompt_ids: Sequence[int], skip_special_tokens: bool) -> TableDetokenizer:
        view = self._views[skip_special_tokens]
        return TableDetokenizer(view, _dangling_bytes(view.pieces, prompt_ids))


class TableDetokenizer:
    """Looks tokens up; its state is the bytes of an unfinished character.

    A special token between two halves of a character breaks it where special tokens are shown and
    leaves it whole where they are skipped, as in decode: the bytes are joined after skipping.
    """

    __slots__ = ("_inherited", "_pending", "_pieces", "_texts")

    def __init__(self, view: _View, dangling: bytes) -> None:
        self._pieces, self._texts = view
        self._pending = dangling
        self._inherited = bool(dangling)  # the prompt began the pending character and showed U+FFFD

    @property
    def is_pending(self) -> bool:
        return bool(self._pending)

    def step(self, token_id: int) -> str:
        if not self._pending:
            try:
                text = self._texts[token_id]
            except IndexError:
                return ""
            if text is not None:
                return text
        return self._decode(_piece(self._pieces, token_id))

    def step_many(self, token_ids: Sequence[int]) -> str:
        if not self._pending:
            texts = self._texts
            try:  # nearly always; a check of each text would cost more than all the rest
                return "".join([texts[i] for i in token_ids])  # type: ignore[misc]
            except (IndexError, TypeError):
                pass  # an id beyond the vocabulary, or a text that is None
        return self._decode(b"".join([_piece(self._pieces, token_id) for token_id in token_ids]))

    def flush(self) -> str:
        tail = "" if self._inherited or not self._pending else _REPLACEMENT
        self._pending = b""
        return tail

    def _decode(self, more: bytes) -> str:
        text, self._pending = _decode_utf8(self._pending + more)
        if self._inherited and text:
            self._inherited = False
            return text.removeprefix(_REPLACEMENT)
        return text


def _own_text(piece: bytes) -> str | None:
    try:
        return piece.decode()
    except UnicodeDecodeError:
        return None


def _piece(pieces: list[bytes], token_id: int) -> bytes:
    return pieces[token_id] if token_id < len(pieces) else b""


def _dangling_bytes(pieces: list[bytes], prompt_ids: Sequence[int]) -> bytes:
    """The unfinished character at the prompt's end; its last three bytes tell."""
    tail = b""
    for token_id in reversed(prompt_ids):
        tail = _piece(pieces, token_id) + tail
        if len(tail) >= _MAX_DANGLING:
            break
    return _decode_utf8(tail)[1]


def _decode_utf8(data: bytes) -> tuple[str, bytes]:
    """The text of `data`, and the bytes at its end that may yet become a character (at most 3).

    Python also waits for the third byte of a surrogate, which UTF-8 does not have.
    """
    text, num_used = utf_8_decode(data, "replace", False)
    rest = data[num_used:]
    if _FIRST_SURROGATE <= rest <= _LAST_SURROGATE:
        return text + rest.decode("utf-8", "replace"), b""
    return text, rest


class WindowDetokenizerFactory:
    """Loads the tokenizer once for all streams. The slow way: a few microseconds a token."""

    def __init__(self, tokenizer_json: bytes) -> None:
        from tokenizers import Tokenizer

        self._tokenizer: Tokenizer = Tokenizer.from_buffer(tokenizer_json)

    def create(self, prompt_ids: Sequence[int], skip_special_tokens: bool) -> WindowDetokenizer:
        return WindowDetokenizer(self._tokenizer, prompt_ids, skip_special_tokens)


class WindowDetokenizer:
    """Decodes the new tokens behind a few old ones, for any decoder.

    The old ones are the context: what they decode to is cut off again, so that the rules for a
    first token (a blank stripped or not put before it) fall on the context and not on the new text.

    What it guarantees: the continuation rule, wherever the bytes of the output make whole
    characters. Elsewhere decode itself takes back what it showed (one stray byte turns a whole run
    of byte tokens into U+FFFD), and a stream cannot; there the number of U+FFFD may differ, but no
    character outside the broken run is lost or doubled. A U+FFFD at the end is held back while it
    might be an unfinished character, at most _MAX_PENDING tokens long: so a model that really
    writes U+FFFD is neither stalled nor decoded from further and further back. (Where byte tokens
    spell several of them in a row, their number may differ, too.)
    """

    __slots__ = ("_context", "_context_text", "_pending", "_skip", "_tokenizer")

    def __init__(
        self, tokenizer: Tokenizer, prompt_ids: Sequence[int], skip_special_tokens: bool
    ) -> None:
        self._tokenizer = tokenizer
        self._skip = skip_special_tokens
        self._pending: list[int] = []
        self._context: list[int] = []
        self._context_text = ""
        self._keep_context(prompt_ids, len(prompt_ids))

    @property
    def is_pending(self) -> bool:
        return bool(self._pending)

    def step(self, token_id: int) -> str:
        self._pending.append(token_id)
        text = self._decode(self._context + self._pending)
        new = self._new_text(text, self._pending)
        if new and not text.endswith(_REPLACEMENT):  # the rule; the rest is for broken bytes
            self._commit(len(self._pending))
            return new
        if len(self._pending) < _MAX_PENDING:
            return ""
        if not new:
            self._pending.clear()
            return ""
        return self._commit_settled(text)

    def step_many(self, token_ids: Sequence[int]) -> str:
        return "".join([self.step(token_id) for token_id in token_ids])

    def flush(self) -> str:
        tail = self._new_text(self._decode(self._context + self._pending), self._pending)
        self._pending.clear()
        return tail

    def _decode(self, token_ids: list[int]) -> str:
        return self._tokenizer.decode(token_ids, skip_special_tokens=self._skip)

    def _new_text(self, text: str, new_ids: list[int]) -> str:
        """What `text`, the decoding of the context and `new_ids`, adds to the context's."""
        if text.startswith(self._context_text):
            return text[len(self._context_text) :]
        whole = self._context_text.rstrip(_REPLACEMENT)
        if text.startswith(whole):
            # The context's unfinished character has been completed.
            return text[len(whole) :].lstrip(_REPLACEMENT)
        # A broken byte turned the run that it shares with the context into U+FFFD. The context's
        # share is streamed already, so the new tokens stand alone.
        return self._decode(new_ids)

    def _commit_settled(self, text: str) -> str:
        """Commit all but the tokens that the last character could still be in.

        The cut must not go through a character: what stands before it has to read as it does in
        `text`, where the character is whole.
        """
        num_settled = len(self._pending) - _MAX_DANGLING
        for cut in range(num_settled, 0, -1):
            settled = self._decode(self._context + self._pending[:cut])
            if text.startswith(settled):
                break
        else:
            cut = num_settled
            settled = self._decode(self._context + self._pending[:cut])
        new = self._new_text(settled, self._pending[:cut])
        self._commit(cut)
        return new

    def _commit(self, num_tokens: int) -> None:
        self._keep_context(self._context + self._pending[:num_tokens], _MAX_CONTEXT)
        del self._pending[:num_tokens]

    def _keep_context(self, token_ids: Sequence[int], max_len: int) -> None:
        """Keep the fewest of the last tokens whose text begins with a whole character.

        Tokens that decode to nothing would not do: the rules for a first token would then fall on
        the new text. Every length is tried, since in a run of byte tokens only some begin where a
        character does; a prompt that ends in a long run of either is worth larger strides.
        """
        length = 1
        while True:
            length = min(length, max_len)
            self._context = [int(token_id) for token_id in token_ids[-length:]]
            self._context_text = self._decode(self._context)
            clean = self._context_text and self._context_text[0] != _REPLACEMENT
            if clean or length >= min(max_len, len(token_ids)):
                return
            length += 1 if length < _MAX_CONTEXT else length
