"""One stream's tokens to text, as they come: what every detokeniser promises, and their factory.

Owns: the interface, and which detokeniser serves a table. `byte_level`, `sentencepiece`
and `suffix` look tokens up in a compiled `TokenTable`; `window` decodes a
small window of tokens with the tokenizer itself, for decoders that no table can hold. A factory is
made once for a model and creates one detokeniser for each stream.

Does not know: requests, stop strings, where tokens come from.

Rules:
- Continuation: prompt text + streamed text = decode(prompt ids + output ids), with
  clean_up_tokenization_spaces off; so the first blank of an answer is kept where the prompt has
  text, which decode(output ids) alone may cut. In full: the streamed text is decode(prompt ids +
  output ids) less the beginning that it shares with decode(prompt ids).
- The two share all of the latter but where the prompt ends in the middle of something. Inside a
  character: decode shows U+FFFD for such a prompt. If the output completes the character, the
  stream has the character (U+FFFD itself excepted, which is there already); if not, the U+FFFD
  stays the prompt's. Behind a token that reads otherwise at the end of a text: the stream has what
  it becomes.
- decode itself is followed exactly, but in one thing. Of a run of byte tokens (SentencePiece's
  <0xNN>) that is not UTF-8 as a whole it makes U+FFFD for every byte, the good characters of the
  run included, and so cannot tell before the run's end. Here a character of a run comes when it is
  complete, and U+FFFD stands for each byte that belongs to no character. That is, exactly, decode
  of the same tokens with a token "U+FFFD" in the place of each such byte token: characters in UTF-8
  never overlap, so which bytes belong to one does not depend on where one begins to read.
  `reference` computes it.
- The text does not depend on how the tokens are cut into calls of `step` and `step_many`.
- After each token all text is out that decode shows for the tokens so far, but for what further
  tokens may change: the U+FFFD of an unfinished character, and the end of a token that reads
  otherwise at the end. `num_pending` says which of the stream's own tokens have such text.
- No half characters, and no lost tail: `flush` brings what is pending as decode shows it at the
  end of the text.
- An id without a token decodes to nothing, and so does a special one where they are skipped: it is
  as if it were not there. Ids are never negative.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
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
    """The text of one stream. Not to be used any more after `flush`."""

    @property
    def num_pending(self) -> int:
        """How many of the last tokens may have text that is yet to come, those that decode leaves
        out among them."""
        ...

    @property
    def is_settled(self) -> bool:
        """Whether the text of a whole token (see `fast_table`) is now its own, and stays so until
        another kind of token comes."""
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

    @property
    def fast_table(self) -> TextColumns | None:
        """The vocabulary as columns; None where a token's text always depends on its neighbours."""
        ...

    def create(self, prompt_ids: Sequence[int], skip_special_tokens: bool) -> Detokenizer:
        """A detokeniser that continues `prompt_ids`."""
        ...


_Create = Callable[[Sequence[int], bool], Detokenizer]


class TableDetokenizerFactory:
    """Holds the two views of a table, which all streams share: special tokens shown, or skipped."""

    def __init__(self, table: TokenTable) -> None:
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
