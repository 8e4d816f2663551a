"""The interface of every detokeniser, its contract, and the factories.

A factory is made once per model and creates one detokeniser per stream. `byte_level`,
`sentencepiece` and `suffix` look tokens up in a compiled `TokenTable`; `window` decodes a small
window of tokens with the tokenizer itself, for decoders that no table can represent.

The contract:

- Continuation: prompt text + streamed text = decode(prompt ids + output ids), with
  clean_up_tokenization_spaces off. The first blank of an answer is therefore kept if the prompt has
  text, where decode(output ids) alone might cut it. Precisely, the streamed text is decode(prompt
  ids + output ids) without the prefix that it shares with decode(prompt ids).
- That prefix is all of decode(prompt ids), unless the prompt ends in the middle of something. If it
  ends inside a character, decode shows U+FFFD for it. If the output completes the character, the
  stream has the character (except U+FFFD itself, which is there already); if not, the U+FFFD
  belongs to the prompt. If the prompt ends with a token that reads differently at the end of a
  text, the stream has what it becomes.
- decode is followed exactly, with one exception. For a run of byte tokens (SentencePiece's <0xNN>)
  that is not valid UTF-8 as a whole, decode yields U+FFFD for every byte, valid characters
  included, and so cannot decide before the run ends. Here each character of a run is emitted once
  complete, and each byte that belongs to no character becomes U+FFFD. This equals decode of the
  same tokens with each such byte token replaced by a token "U+FFFD": UTF-8 characters never
  overlap, so which bytes belong to one does not depend on where reading starts. `reference`
  computes it.
- The text does not depend on how the tokens are split into calls of `step` and `step_many`.
- After each token, all text that decode shows for the tokens so far has been emitted, except what
  further tokens may change: the U+FFFD of an incomplete character, and the end of a token that
  reads differently at the end. `num_pending` is the number of the stream's tokens that have such
  text.
- No partial characters and no lost tail: `flush` returns what is pending as decode shows it at the
  end of the text.
- An id without a token decodes to nothing, and so does a special token if they are skipped: both
  are ignored entirely. Ids are never negative.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

from slipstream_worker.detokenizer.byte_level import ByteDetokenizer, ByteView
from slipstream_worker.detokenizer.sentencepiece import TextDetokenizer, TextView
from slipstream_worker.detokenizer.suffix import SuffixDetokenizer, SuffixView
from slipstream_worker.detokenizer.table import TokenTable
from slipstream_worker.detokenizer.text_columns import TextColumns
from slipstream_worker.detokenizer.window import WindowDetokenizerFactory

__all__ = [
    "Detokenizer",
    "DetokenizerFactory",
    "TableDetokenizerFactory",
    "WindowDetokenizerFactory",
]


class Detokenizer(Protocol):
    """The text of one stream."""

    @property
    def num_pending(self) -> int:
        """Number of last tokens that may have text yet to come, counting those that decode leaves
        out.
        """
        ...

    @property
    def is_settled(self) -> bool:
        """True if a whole token (see `fast_table`) now has its own text, until a token of another
        kind.
        """
        ...

    def step(self, token_id: int) -> str:
        """The text that this token completes; "" if it only extends an incomplete character."""
        ...

    def step_many(self, token_ids: Sequence[int]) -> str:
        """The text that these tokens complete: that of the single steps, joined."""
        ...

    def flush(self) -> str:
        """The tail of a stream that has ended, or of what lies before a delimiter: the next token's
        text is then its own.
        """
        ...


class DetokenizerFactory(Protocol):
    """Creates the detokenisers of one model."""

    @property
    def fast_table(self) -> TextColumns | None:
        """The vocabulary as columns; None if a token's text always depends on its neighbours."""
        ...

    @property
    def delimiter_ids(self) -> tuple[tuple[str, int], ...]:
        """The literals of answer formats that are one token of the vocabulary, with their ids."""
        ...

    def create(self, prompt_ids: Sequence[int], skip_special_tokens: bool) -> Detokenizer:
        """A detokeniser that continues `prompt_ids`."""
        ...


_Create = Callable[[Sequence[int], bool], Detokenizer]


class TableDetokenizerFactory:
    """Detokenisers over a table. Streams share its two views: special tokens shown, or skipped."""

    def __init__(self, table: TokenTable, delimiter_ids: Mapping[str, int] | None = None) -> None:
        self.delimiter_ids = tuple(sorted((delimiter_ids or {}).items()))
        self.fast_table: TextColumns | None = None
        if table.mode == "bytelevel":
            byte_views = [ByteView.of(table, skip) for skip in (False, True)]
            self._create: _Create = lambda ids, skip: ByteDetokenizer(byte_views[skip], ids)
            self.fast_table = TextColumns(*(view.texts for view in byte_views))
        elif table.last_pieces:
            suffix_views = [SuffixView.of(table, skip) for skip in (False, True)]
            self._create = lambda ids, skip: SuffixDetokenizer(suffix_views[skip], ids)
        else:
            text_views = [TextView.of(table, skip) for skip in (False, True)]
            self._create = lambda ids, skip: TextDetokenizer(text_views[skip], ids)
            self.fast_table = TextColumns(*(view.texts for view in text_views))

    def create(self, prompt_ids: Sequence[int], skip_special_tokens: bool) -> Detokenizer:
        return self._create(prompt_ids, skip_special_tokens)
