"""The prompt in front of its answer, as a completion with `echo` has it. Names and shape: OpenAI's.

Owns: what is repeated of a prompt, as text and as log-probabilities. Does not know: streams, JSON.

Rules:
- A prompt given as text is repeated as it was given, one of token ids as they are decoded: its
  special tokens too, whatever is left out of the answer (vLLM's rule).
- With max_tokens 0 the prompt is all there is: a token is sampled, as there is no stream without
  any, and shown to nobody.
- A prompt's first token has no log-probability: null in its place.
- A token's offset is where its text begins in the prompt as it is shown. What the tokenizer adds
  (a special token, a blank in front) takes no place there.
"""

from __future__ import annotations

from codecs import getincrementaldecoder
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from slipstream.http.openai.logprobs import likeliest_by_name, value_of
from slipstream.http.openai.responses import CompletionLogprobs
from slipstream.http.openai.vocabulary import TokenTexts
from slipstream.http.time_slice import Parts
from slipstream.outputs import PromptTokenLogprobs


@dataclass(frozen=True, slots=True)
class Echo:
    """What is asked for."""

    prompts: tuple[str | None, ...]  # of each choice, as it was given; None: as token ids
    is_all: bool  # nothing follows

    @property
    def needs_texts(self) -> bool:
        """Whether the vocabulary has to be there."""
        return None in self.prompts

    def text(self, index: int, prompt_ids: Sequence[int], texts: TokenTexts) -> str:
        """The prompt of one choice."""
        given = self.prompts[index]
        if given is not None:
            return given
        return texts.decode(prompt_ids, skip_special_tokens=False)


def prompt_logprobs(
    prompt_ids: Sequence[int],
    entries: Iterable[PromptTokenLogprobs],
    k: int,
    texts: TokenTexts,
    text: str,
) -> Parts[CompletionLogprobs]:
    """The columns of a prompt that is shown as `text`; `k` likeliest ones beside each token."""
    values: list[float | None] = []
    tops: list[dict[str, float] | None] = []
    for some in entries:
        for entry in some:
            own = None if entry is None else next(iter(entry.values()))
            values.append(None if own is None else value_of(own))
            tops.append(None if entry is None else likeliest_by_name(entry, k, texts))
        yield
    tokens = [texts.of(token_id).name for token_id in prompt_ids]
    return CompletionLogprobs(_offsets(prompt_ids, texts, text), values, tokens, tops)


def _offsets(prompt_ids: Sequence[int], texts: TokenTexts, text: str) -> list[int]:
    """Where each token's text begins in `text`."""
    offset, offsets = 0, []
    decoder = getincrementaldecoder("utf-8")("replace")
    for token_id in prompt_ids:
        offsets.append(offset)
        token = texts.of(token_id)
        chars = decoder.decode(token.raw or b"")
        if text.startswith(chars, offset):
            offset += len(chars)
        elif not offset and chars.startswith(" ") and text.startswith(chars[1:]):
            offset += len(chars) - 1
        elif not token.is_added:  # a tokenizer that changes what it reads
            offset = min(offset + len(chars), len(text))
    return offsets
