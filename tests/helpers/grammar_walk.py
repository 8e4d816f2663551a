"""Random walks through grammars of calls, in a vocabulary of bytes and a format's delimiters."""

from __future__ import annotations

import random
from collections.abc import Sequence
from functools import cache, lru_cache
from typing import Any

import llguidance
import numpy as np
from tests.helpers.answers import delimiter_tokens
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from slipstream_ipc.formats.answer_format import AnswerFormat, delimiters
from slipstream_ipc.formats.table import CALLS, REASONING, compose
from slipstream_worker.formats.compiled_format import CompiledFormat, compile_format
from slipstream_worker.formats.reasoning_ids import Spellings, find_spellings

_END = "</s>"
_MAX_TOKENS = 2_000
_NUM_WALKS = 4
"""A walk begins another parameter, or another list, about as often as it ends one: the lengths of
walks fall off geometrically, and of some thousands one is too long. A grammar that cannot end makes
all of them so."""
_NUM_FREE = 8  # tokens of a text before an end of it is looked for
# what ends a text that a random walk would go on with for ever
_CLOSERS = (
    "\n</parameter>",
    "</parameter>",
    "</\uff5cDSML\uff5cparameter>",
    "</arg_value>",
    "<|close|>argument<|sep|>",
    "<escape>",
    ">",
    '<|"|>',
    '"',
    "'",
    "]",
    "}",
)


class SmallModel:
    """A vocabulary of bytes and of a format's delimiters, for llguidance."""

    def __init__(self, literals: tuple[str, ...]) -> None:
        letters = sorted(pre_tokenizers.ByteLevel.alphabet())
        tokenizer = Tokenizer(models.BPE(vocab={c: i for i, c in enumerate(letters)}, merges=[]))
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        tokenizer.decoder = decoders.ByteLevel()
        tokenizer.add_special_tokens([AddedToken(_END, special=True)])
        # as models have them: where `[ARGS]` is not special, llguidance takes it for text
        tokenizer.add_tokens([AddedToken(each, special=each[0] == "[") for each in literals])
        self._tokenizer = tokenizer
        self.ids: dict[str, int] = {each: self._id_of(each) for each in literals}
        self.end_id = self._id_of(_END)
        self._first_matcher = lru_cache(8)(self._compile)
        self.library = llguidance.LLTokenizer(
            tokenizer.to_str(), tokenizer.get_vocab_size(), [self.end_id]
        )

    def _id_of(self, literal: str) -> int:
        token_id = self._tokenizer.token_to_id(literal)
        assert token_id is not None
        return token_id

    @property
    def as_json(self) -> str:
        """The tokenizer's file."""
        text: str = self._tokenizer.to_str()
        return text

    @property
    def vocab_size(self) -> int:
        size: int = self._tokenizer.get_vocab_size()
        return size

    def spellings(self, found: AnswerFormat) -> Spellings:
        literals = dict.fromkeys(each.literal for each in delimiters(found))
        return find_spellings(literals, self.ids, self.encoded, self._tokenizer.token_to_id)

    def matcher(self, grammar: str) -> Any:
        """One that is at the grammar's beginning. The latest ones are compiled once."""
        return self._first_matcher(grammar).deep_copy()

    def _compile(self, grammar: str) -> Any:
        text = llguidance.LLMatcher.grammar_from_lark(grammar)
        matcher = llguidance.LLMatcher(self.library, text, log_level=0)
        assert not matcher.is_error(), matcher.get_error()
        return matcher

    def encoded(self, text: str) -> list[int]:
        return list(self._tokenizer.encode(text).ids)

    def items(self, token_ids: list[int]) -> list[str | int]:
        """Delimiters as tokens, the rest as text."""
        found: list[str | int] = []
        run: list[int] = []
        for token_id in [*token_ids, None]:
            if token_id is not None and token_id not in self.ids.values():
                run.append(token_id)
                continue
            if run:
                found.append(self._tokenizer.decode(run, skip_special_tokens=False))
                run = []
            if token_id is not None:
                found.append(token_id)
        return found


@cache
def model_of(name: str, reasoning: str, has_tokens: bool) -> tuple[AnswerFormat, SmallModel]:
    found = compose(REASONING.get(reasoning), CALLS[name])
    literals = tuple(delimiter_tokens(found)) if has_tokens else ()
    return found, SmallModel(literals)


@lru_cache(16)
def compiled_for(found: AnswerFormat, model: SmallModel) -> CompiledFormat:
    """The format, for the model's vocabulary. The latest ones are compiled once."""
    return compile_format(found, model.ids)


def walk(
    model: SmallModel,
    grammar: str,
    seed: int,
    *,
    is_short: bool = False,
    closers: Sequence[str] = (),
) -> list[int]:
    """A random walk through the grammar, whose texts end after a while. It ends where it may, three
    times in four, or, if `is_short`, always. closers: what else ends a text.

    Raises AssertionError if several walks in a row do not end.
    """
    draw = random.Random(seed)
    endings = [*([each] for each in model.ids.values())]
    endings += map(model.encoded, (*_CLOSERS, *closers))
    for _ in range(_NUM_WALKS):
        taken = _walked(model, model.matcher(grammar), draw, endings, is_short)
        if taken is not None:
            return taken
    raise AssertionError(f"{_NUM_WALKS} walks of {_MAX_TOKENS} tokens did not end")


def _walked(
    model: SmallModel, matcher: Any, draw: random.Random, endings: list[list[int]], is_short: bool
) -> list[int] | None:
    """A walk; None if it is too long."""
    taken: list[int] = []
    num_left = draw.randrange(_NUM_FREE)
    while not (matcher.is_accepting() and (is_short or draw.random() < 0.75)):
        fitting = []
        if num_left < 0:
            fitting = [ids for ids in endings if matcher.validate_tokens(ids) == len(ids)]
        if fitting and draw.random() < 0.8:
            num_left = draw.randrange(_NUM_FREE // 2)
            chosen = draw.choice(fitting)
        else:
            bits = np.frombuffer(matcher.compute_bitmask(), np.uint8)
            ids = np.flatnonzero(np.unpackbits(bits, bitorder="little")).tolist()
            allowed = [i for i in ids if i != model.end_id]
            if not allowed:
                break
            chosen = [draw.choice(allowed)]
        for token_id in chosen:
            assert matcher.consume_token(token_id)
        taken += chosen
        num_left -= 1
        if len(taken) >= _MAX_TOKENS:
            return None
    assert matcher.is_accepting()
    return taken
