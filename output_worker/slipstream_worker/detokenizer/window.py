"""The slow detokeniser, for decoders that no table can represent: it calls the tokenizer.

Keeps the tokens whose text is yet to come and a few before them, and follows the contract in
`factory` as far as `WindowDetokenizer` states. `tokenizers` is imported only if a window is needed.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING

from slipstream_worker.detokenizer.panics import PanicError, is_panic
from slipstream_worker.detokenizer.utf8 import MAX_DANGLING, REPLACEMENT

if TYPE_CHECKING:
    from tokenizers import Tokenizer

__all__ = ["WindowDetokenizer", "WindowDetokenizerFactory"]

_MAX_PENDING = 8  # maximum number of tokens that wait for the end of a character
_MAX_CONTEXT = 16  # maximum number of already streamed tokens that are kept


class WindowDetokenizerFactory:
    """Loads the tokenizer once for all streams. Decoding takes a few microseconds per token."""

    fast_table = None

    def __init__(
        self, tokenizer_json: bytes, delimiter_ids: Mapping[str, int] | None = None
    ) -> None:
        from tokenizers import Tokenizer

        self.delimiter_ids = tuple(sorted((delimiter_ids or {}).items()))
        self._tokenizer: Tokenizer = Tokenizer.from_buffer(tokenizer_json)
        added = self._tokenizer.get_added_tokens_decoder()
        self._special_ids = frozenset(each for each, token in added.items() if token.special)

    def create(self, prompt_ids: Sequence[int], skip_special_tokens: bool) -> WindowDetokenizer:
        skipped = self._special_ids if skip_special_tokens else frozenset()
        return WindowDetokenizer(self._tokenizer, prompt_ids, skipped)


class WindowDetokenizer:
    """Decodes the new tokens after a few old ones, for any decoder.

    The old tokens are the context: the text they decode to is cut off again, so that rules for a
    first token (such as a stripped blank) apply to the context and not to the new text.

    Guarantees the continuation rule wherever the bytes of the output form whole characters.
    Elsewhere decode itself takes back text it has shown (one stray byte turns a whole run of byte
    tokens into U+FFFD), which a stream cannot; there the number of U+FFFD may differ, but no
    character outside the broken run is lost or doubled. A U+FFFD at the end is held back while it
    may be an incomplete character, for at most _MAX_PENDING tokens, so a model that really writes
    U+FFFD neither stalls nor is decoded from further and further back. (If byte tokens spell
    several U+FFFD in a row, their number may differ as well.) Text before it is emitted.

    Two kinds of decoders read a token depending on tokens before any context: CTC, which drops a
    token equal to the previous one, after a rule for the first token; and ByteLevel after a step
    that has joined the tokens, which converts all characters to bytes or none. They are not
    followed exactly; no stream could, as they take back whole characters. Nor is a BPEDecoder's
    suffix in the middle of a token, a blank that comes once another token follows.
    """

    __slots__ = (
        "_context",
        "_context_text",
        "_num_shown",
        "_pending",
        "_skipped_behind",
        "_skipped_ids",
        "_tokenizer",
        "num_pending",
    )

    def __init__(
        self, tokenizer: Tokenizer, prompt_ids: Sequence[int], skipped_ids: Collection[int]
    ) -> None:
        """skipped_ids: tokens without text: special ones, where these are to be skipped."""
        self._tokenizer = tokenizer
        self._skipped_ids = skipped_ids
        self._pending: list[int] = []
        self._skipped_behind: list[int] = []  # for each of them, tokens before the next
        self._num_shown = 0  # characters of the pending tokens already emitted
        self.num_pending = 0
        self._context: list[int] = []
        self._context_text = ""
        self._keep_context(prompt_ids, len(prompt_ids))

    @property
    def is_settled(self) -> bool:
        return False

    def step(self, token_id: int) -> str:
        if token_id in self._skipped_ids:
            if self._pending:  # it waits with these, and does not fill the window
                self._skipped_behind[-1] += 1
                self.num_pending += 1
            return ""
        self._pending.append(token_id)
        self._skipped_behind.append(0)
        text = self._decode(self._context + self._pending)
        new = self._new_text(text, self._pending)
        if new and not text.endswith(REPLACEMENT):  # the usual case; the rest is for broken bytes
            self._commit(len(self._pending))
            return self._show(new)
        if len(self._pending) < _MAX_PENDING:
            more = self._show(new.rstrip(REPLACEMENT), is_pending=True)
            # if the last token has brought other text, it alone ends in U+FFFD
            self.num_pending = 1 if more else self.num_pending + 1
            return more
        if not new:
            self._clear()
            self._num_shown = 0
            return ""
        return self._show(self._commit_settled(text))

    def step_many(self, token_ids: Sequence[int]) -> str:
        return "".join([self.step(token_id) for token_id in token_ids])

    def flush(self) -> str:
        tail = self._new_text(self._decode(self._context + self._pending), self._pending)
        self._clear()
        return self._show(tail)

    def _clear(self) -> None:
        self._pending.clear()
        self._skipped_behind.clear()
        self.num_pending = 0

    def _show(self, text: str, *, is_pending: bool = False) -> str:
        """The part of the next tokens' text that has not been emitted yet; counts it as emitted."""
        more = text[self._num_shown :]
        self._num_shown = max(self._num_shown, len(text)) - (0 if is_pending else len(text))
        return more

    def _decode(self, token_ids: list[int]) -> str:
        try:
            return self._tokenizer.decode(token_ids, skip_special_tokens=bool(self._skipped_ids))
        except BaseException as error:
            if is_panic(error):
                raise PanicError(f"the tokenizer cannot decode this: {error}") from error
            raise

    def _new_text(self, text: str, new_ids: list[int]) -> str:
        """The part of `text`, the decoding of the context and `new_ids`, that follows the context's
        text.
        """
        if text.startswith(self._context_text):
            return text[len(self._context_text) :]
        whole = self._context_text.rstrip(REPLACEMENT)
        if text.startswith(whole):
            # The context's incomplete character has been completed.
            return text[len(whole) :].lstrip(REPLACEMENT)
        # A broken byte has turned the run that it shares with the context into U+FFFD. The
        # context's part is streamed already, so the new tokens are decoded alone.
        return self._decode(new_ids)

    def _commit_settled(self, text: str) -> str:
        """Commit all but the last tokens, which the last character might still be in.

        The cut must not split a character: the text before it has to be a prefix of `text`, where
        the character is whole.
        """
        num_settled = len(self._pending) - MAX_DANGLING
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
        del self._skipped_behind[:num_tokens]
        self.num_pending = len(self._pending) + sum(self._skipped_behind)

    def _keep_context(self, token_ids: Sequence[int], max_len: int) -> None:
        """Keep the fewest of the last tokens whose text begins with a whole character.

        Tokens that decode to nothing do not suffice, since the rules for a first token would then
        apply to the new text. Every length is tried, because in a run of byte tokens only some
        start at a character; for a prompt that ends in a long run of either, the strides grow.
        """
        length = 1
        while True:
            length = min(length, max_len)
            self._context = [int(token_id) for token_id in token_ids[-length:]]
            self._context_text = self._decode(self._context)
            clean = self._context_text and self._context_text[0] != REPLACEMENT
            if clean or length >= min(max_len, len(token_ids)):
                return
            length += 1 if length < _MAX_CONTEXT else length
