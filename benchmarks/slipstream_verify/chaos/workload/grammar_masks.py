"""The tokens that a grammar allows at each position of an answer, computed after the fact."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from slipstream_core.grammar.compiler import GrammarCompiler
from slipstream_core.grammar.llguidance_backend import Vocabulary, fill_masks, num_words
from slipstream_core.grammar.matcher import GrammarMatcher
from slipstream_core.model.tokenizer_file import find_tokenizer
from slipstream_ipc.messages import Admit, ModelCard


class GrammarMasks:
    """Masks for the vocabulary of one model."""

    def __init__(self, card: ModelCard) -> None:
        self._vocab_size = card.vocab_size
        vocabulary = Vocabulary(find_tokenizer(card.path), card.vocab_size, card.eos_token_ids)
        self._compiler = GrammarCompiler(lambda: vocabulary)

    def allowed(self, admit: Admit, token_ids: Sequence[int]) -> torch.Tensor:
        """The ids allowed in place of each of `token_ids`, bool [N, vocab]."""
        state = self._compiler.start(admit)
        assert isinstance(state, GrammarMatcher)
        masks = np.zeros((len(token_ids), num_words(self._vocab_size)), np.int32)
        for i, token_id in enumerate(token_ids):
            if state.matcher is not None:
                fill_masks([(state.matcher, i)], masks)
            state.finish(masks[i])
            state.accept_tokens([token_id])
        bits = np.unpackbits(masks.view(np.uint8), axis=1, bitorder="little")
        return torch.from_numpy(bits[:, : self._vocab_size]).bool()
