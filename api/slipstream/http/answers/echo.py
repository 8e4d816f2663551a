"""The prompt in front of a completion with `echo`: its text and log-probabilities.

- A prompt given as text is repeated verbatim; token ids are decoded with their special tokens, even
  if the answer skips those (as in vLLM).
- With max_tokens 0 the answer is the prompt alone: one token is sampled, since every stream has at
  least one, and not shown.
- The first token of a prompt has no log-probability: null.
- A token's offset is where its text begins in the prompt as shown. Text that the tokenizer adds (a
  special token, a leading space) has length zero there.
"""

from __future__ import annotations

from codecs import getincrementaldecoder
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from slipstream.http.logprobs.logprob_pieces import MOST_IDS
from slipstream.http.logprobs.vocabulary import TokenTexts


@dataclass(frozen=True, slots=True)
class Echo:
    """The prompts that a request with `echo` wants to have shown."""

    prompts: tuple[str | None, ...]  # per choice, as given; None if given as token ids
    is_prompt_only: bool  # only the prompt is shown (max_tokens 0)

    @property
    def needs_texts(self) -> bool:
        """True if the vocabulary has to be loaded, to decode token ids."""
        return None in self.prompts

    def text(self, index: int, prompt_ids: Sequence[int], texts: TokenTexts) -> str:
        """The prompt of one choice as shown."""
        given = self.prompts[index]
        if given is not None:
            return given
        return texts.decode(prompt_ids, skip_special_tokens=False)


def token_offsets(
    prompt_ids: npt.NDArray[np.uint32], texts: TokenTexts, text: str
) -> Iterator[list[int]]:
    """The offset of each token's text in `text`, in characters; some tokens at a time."""
    offset = 0
    decoder = getincrementaldecoder("utf-8")("replace")
    for at in range(0, len(prompt_ids), MOST_IDS):
        offsets: list[int] = []
        for token_id in prompt_ids[at : at + MOST_IDS].tolist():
            offsets.append(offset)
            token = texts.of(token_id)
            chars = decoder.decode(token.raw or b"")
            if text.startswith(chars, offset):
                offset += len(chars)
            elif not offset and chars.startswith(" ") and text.startswith(chars[1:]):
                offset += len(chars) - 1
            elif not token.is_added:  # the tokenizer normalizes text: the offset is an estimate
                offset = min(offset + len(chars), len(text))
        yield offsets
