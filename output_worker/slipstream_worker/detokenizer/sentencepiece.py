"""The detokeniser for tokens that are texts: SentencePiece's variants, WordPiece, no decoder.

Looks tokens up in a table of mode "text". The state of a stream is whether the sequence has begun,
the blanks still to be cut from its start, and the bytes of an incomplete character.

- Opening: the first token of prompt and output together has its own text, and blanks at the start
  of their joined text are cut. Nearly every prompt completes both, so only the slow path handles
  them: until then the stream sees an empty table, in which no token is found.
- Runs: consecutive byte tokens spell characters. Tokens that decode leaves out (skipped or without
  a token) do not end a run; a token with empty text does.
- A stream that inherits bytes from its prompt emits no U+FFFD for those.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from slipstream_worker.detokenizer.table import TokenTable
from slipstream_worker.detokenizer.utf8 import MAX_DANGLING, REPLACEMENT, decode_run_byte

__all__ = ["TextDetokenizer", "TextView"]


class TextView(NamedTuple):
    """A table as a stream reads it: with the special tokens, or without them."""

    texts: list[str | None]  # None: a byte that waits for others
    first_texts: list[str | None]  # of a sequence's first token; `texts` itself if the same
    bytes_of: dict[int, bytes]  # byte tokens, by id
    left_out: frozenset[int]  # ids that decode leaves out; their text is ""
    num_stripped: int  # maximum number of blanks cut from the start

    @classmethod
    def of(cls, table: TokenTable, skip_special_tokens: bool) -> TextView:
        """The view, shared by all streams with the same `skip_special_tokens`."""
        left_out = {token_id for token_id, piece in enumerate(table.pieces) if piece is None}
        if skip_special_tokens:
            left_out.update(table.special)
        bytes_of = {i: table.pieces[i] or b"" for i in table.byte_ids if i not in left_out}

        def text_of(token_id: int, piece: bytes | None) -> str | None:
            if piece is None or token_id in left_out:
                return ""
            if token_id in bytes_of:
                text, waiting = decode_run_byte(b"", piece)
                return None if waiting else text
            return piece.decode()

        texts = [text_of(token_id, piece) for token_id, piece in enumerate(table.pieces)]
        first_texts = texts
        if table.first_pieces:
            first_texts = [text_of(*numbered) for numbered in enumerate(table.first_pieces)]
        return cls(texts, first_texts, bytes_of, frozenset(left_out), table.num_stripped)


class TextDetokenizer:
    """One stream's text, by table lookup."""

    __slots__ = (
        "_is_first",
        "_num_inherited",
        "_num_to_strip",
        "_texts",
        "_view",
        "_waiting",
        "num_pending",
    )

    def __init__(self, view: TextView, prompt_ids: Sequence[int]) -> None:
        self._view = view
        self._is_first = view.first_texts is not view.texts
        self._num_to_strip = view.num_stripped
        self._waiting = b""
        self._num_inherited = self.num_pending = 0
        # Empty until the opening is over.
        self._texts: Sequence[str | None] = ()
        if not self._is_first and not self._num_to_strip:
            self._texts = view.texts
        for token_id in prompt_ids:
            if self._texts is view.texts:
                break
            self._take(token_id)
        self._waiting = _dangling_bytes(view, prompt_ids)
        self._num_inherited = len(self._waiting)
        self.num_pending = 0
        if self._waiting:  # the prompt shows U+FFFD for them
            self._texts = view.texts

    @property
    def is_settled(self) -> bool:
        return not self._waiting and self._texts is self._view.texts

    def step(self, token_id: int) -> str:
        if not self._waiting:
            try:
                text = self._texts[token_id]
            except IndexError:  # the opening, or an id beyond the vocabulary
                return self._take(token_id)
            if text is not None:
                return text
        return self._take(token_id)

    def step_many(self, token_ids: Sequence[int]) -> str:
        if not self._waiting:
            texts = self._texts
            try:  # nearly always
                return "".join([texts[i] for i in token_ids])  # type: ignore[misc]
            except (IndexError, TypeError):
                pass  # the opening, an id beyond the vocabulary, or a byte token
        return "".join([self.step(token_id) for token_id in token_ids])

    def flush(self) -> str:
        return self._end_run()

    def _take(self, token_id: int) -> str:
        view = self._view
        byte = view.bytes_of.get(token_id)
        if byte is not None:
            text, self._waiting = decode_run_byte(self._waiting, byte)
            if text:  # it has all waiting bytes; those that wait now are this token's
                self.num_pending = 1 if self._waiting else 0
            elif len(self._waiting) > self._num_inherited:
                self.num_pending += 1
            if self._num_inherited:
                text = self._without_inherited(text)
        elif token_id >= len(view.texts) or token_id in view.left_out:
            self.num_pending += self.num_pending > 0
            return ""
        else:
            text = (view.first_texts if self._is_first else view.texts)[token_id] or ""
            if self._waiting:
                text = self._end_run() + text
        if self._texts is not view.texts:
            text = self._open(text)
        return text

    def _open(self, text: str) -> str:
        """Apply the opening rules to the text of a token that decode does not leave out.

        An incomplete character is not a blank; whatever it becomes ends the cutting.
        """
        self._is_first = False
        num_blanks = len(text) - len(text.lstrip(" "))
        num_cut = min(num_blanks, self._num_to_strip)
        self._num_to_strip = self._num_to_strip - num_cut if num_cut == len(text) else 0
        if not self._num_to_strip:
            self._texts = self._view.texts
        return text[num_cut:]

    def _end_run(self) -> str:
        text = self._without_inherited(REPLACEMENT * len(self._waiting))
        self._waiting = b""
        self.num_pending = 0
        return text

    def _without_inherited(self, text: str) -> str:
        """`text` without what the prompt shows already: a U+FFFD for each inherited byte."""
        if text:
            if text[0] == REPLACEMENT:
                text = text[self._num_inherited :]
            self._num_inherited = 0
        return text


def _dangling_bytes(view: TextView, prompt_ids: Sequence[int]) -> bytes:
    """The incomplete character at the prompt's end, found from the last three bytes of its run."""
    run: list[bytes] = []
    for token_id in reversed(prompt_ids):
        byte = view.bytes_of.get(token_id)
        if byte is not None:
            run.append(byte)
            if len(run) == MAX_DANGLING:
                break
        elif token_id < len(view.texts) and token_id not in view.left_out:
            break
    waiting = b""
    for byte in reversed(run):
        waiting = decode_run_byte(waiting, byte)[1]
    return waiting
