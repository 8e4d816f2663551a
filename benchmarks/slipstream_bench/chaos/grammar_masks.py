"""What a grammar lets each token of an answer be, worked out after the fact.

Owns: nothing but the vocabulary. Does not know: logits, what was killed.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from slipstream_core.grammar.compiler import GrammarCompiler
from slipstream_core.grammar.llguidance_backend import Vocabulary, fill_masks, num_words
from slipstream_core.runner.tokenizer_file import find_tokenizer
from slipstream_ipc.messages import Admit, ModelCard


class GrammarMasks:
    """Of one model's grammars."""

    def __init__(self, card: ModelCard) -> None:
        self._vocab_size = card.vocab_size
        vocabulary = Vocabulary(find_tokenizer(card.path), card.vocab_size, card.eos_token_ids)
        self._compiler = GrammarCompiler(lambda: vocabulary)

    def allowed(self, admit: Admit, token_ids: Sequence[int]) -> torch.Tensor:
        """For each of `token_ids`, whether each id may have come in its place, bool [N, vocab]."""
        state = self._compiler.start(admit)
        masks = np.zeros((len(token_ids), num_words(self._vocab_size)), np.int32)
        for i, token_id in enumerate(token_ids):
            if state.matcher is not None:
                fill_masks([(state.matcher, i)], masks)
            state.finish(masks[i])
            state.accept_tokens([token_id])
        bits = np.unpackbits(masks.view(np.uint8), axis=1, bitorder="little")
        return torch.from_numpy(bits[:, : self._vocab_size]).bool()
