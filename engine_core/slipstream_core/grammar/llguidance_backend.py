"""llguidance: the vocabulary as it wants it, and grammars compiled for it.

Owns: the only imports of the library, made when the first grammar comes; which of its options are
used. Does not know: requests, rows, threads.

Rules:
- It is quiet: its warnings would quote what somebody's answer holds.
- JSON may have a space, or a line's end and an indent, between its tokens, and no more: a model
  that has nothing to say would fill its answer with it. A schema's own "x-guidance" may say else.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from slipstream_ipc.errors import brief
from slipstream_ipc.messages import StructuredOutputs
from slipstream_ipc.validation.structured_output import kind_of

_JSON_DEFAULTS = {"whitespace_pattern": r" |\n[ \t]{0,40}"}
# What a grammar may cost a step, in the library's own counts: a stream that goes beyond them ends,
# at the same token on every machine. Only an ambiguous grammar has rows as long as these, and its
# time grows with their cube: `e: e e e e e | /[a-z]/ | ""` takes 1.5 s to a mask with the library's
# limits of 2,000 and 50,000, and some 5 ms with these. 650 items are 160 optional properties.
_MAX_ROW_ITEMS = 650
_MAX_STEP_ITEMS = 3_000
_MAX_LEXER_STATES = 50_000  # of one grammar, 1 to 2 KB each
_WORTH_THREADS = 4  # masks
_MAX_THREADS = 16
_ANY_OBJECT = '{"type": "object"}'


class GrammarError(ValueError):
    """A grammar that cannot be had; says why."""


def grammar_key(outputs: StructuredOutputs) -> bytes:
    """By which a grammar is known that was compiled before."""
    return msgspec.json.encode(outputs, order="deterministic")


class Vocabulary:
    """A model's tokens, for all grammars."""

    def __init__(self, tokenizer_json: Path, vocab_size: int, eos_ids: tuple[int, ...]) -> None:
        """`vocab_size` is the width of the model's logits.

        Raises GrammarError where the tokenizer does not go with that. The library holds the
        interpreter's lock meanwhile: 0.04 s for 4,096 tokens, 0.25 s for 32,000.
        """
        import llguidance

        self._lib = llguidance
        self.tokenizer_json = tokenizer_json
        self.vocab_size = vocab_size
        self.eos_ids = frozenset(eos_ids)
        text = tokenizer_json.read_text("utf-8")
        try:
            self._tokenizer = llguidance.LLTokenizer(text, vocab_size, list(eos_ids) or None)
        except ValueError as error:
            raise GrammarError(f"the model's tokenizer does not go with it: {error}") from error
        # ids by which the library would let an answer end: which those are is the request's to say
        self.ends = ids_as_mask(self._tokenizer.eos_tokens, vocab_size)

    def compile(self, outputs: StructuredOutputs) -> Any:
        """A matcher at a grammar's start. Raises GrammarError with the library's reason.

        A grammar of a request's is tried elsewhere before (`trial_client`): one that is made for it
        ends this process, or holds the interpreter's lock for long.
        """
        return self.compile_text(self.text_of(outputs))

    def text_of(self, outputs: StructuredOutputs) -> str:
        """A grammar in the library's own form, which holds the interpreter's lock.

        Raises GrammarError where it has none.
        """
        try:
            return self._text(kind_of(outputs), outputs)
        except (ValueError, RecursionError) as error:
            raise GrammarError(_first_of(error)) from error

    def compile_text(self, text: str) -> Any:
        """A matcher at the start of a grammar in the library's own form. Raises GrammarError."""
        limits = self._lib.LLParserLimits(
            max_items_in_row=_MAX_ROW_ITEMS,
            step_max_items=_MAX_STEP_ITEMS,
            max_lexer_states=_MAX_LEXER_STATES,
            verbose_errors=False,  # else they hold what the answer holds
        )
        matcher = self._lib.LLMatcher(self._tokenizer, text, log_level=0, limits=limits)
        if matcher.is_error():
            raise GrammarError(_first_of(matcher.get_error()))
        matcher.compute_bitmask()  # the first one is the dearest
        if matcher.is_error():
            raise GrammarError(_first_of(matcher.get_error()))
        return matcher

    def _text(self, kind: str, outputs: StructuredOutputs) -> str:
        lib: Any = self._lib
        text: str
        match kind:
            case "json" | "json_object":
                schema = _ANY_OBJECT if kind == "json_object" else outputs.json
                if not isinstance(schema, str):
                    schema = msgspec.json.encode(schema).decode()
                text = lib.LLMatcher.grammar_from_json_schema(schema, defaults=_JSON_DEFAULTS)
            case "regex":
                text = lib.LLMatcher.grammar_from_regex(outputs.regex or "")
            case "choice":
                # one token of the grammar's: as rules of their own each would be an item of a row
                texts = " | ".join(map(json.dumps, outputs.choice or ()))
                text = lib.LLMatcher.grammar_from_lark(f"start: CHOICE\nCHOICE: {texts}")
            case _:
                try:
                    text = lib.grammar_from("grammar", outputs.grammar or "")
                except Exception as error:  # its converter from GBNF raises what it likes
                    raise GrammarError(str(error)) from error
        return text


def fill_masks(matchers: Sequence[tuple[Any, int]], masks: npt.NDArray[np.int32]) -> None:
    """Let each matcher fill its row of `masks` [G, words], which lies in one piece.

    Several at once, on half of the cores, where there are enough of both. A matcher that fails says
    so afterwards.
    """
    executor = _executor() if len(matchers) >= _WORTH_THREADS else None
    if executor is None:
        for matcher, row in matchers:
            matcher.unsafe_compute_mask_ptr(masks[row].ctypes.data, masks[row].nbytes)
    else:
        executor.unsafe_compute_mask_ptr(
            list(matchers), masks.ctypes.data, masks.strides[0], len(masks)
        )


@cache
def _executor() -> Any | None:
    """The library's threads, made when they are first wanted: one set for the process."""
    num_threads = min(len(os.sched_getaffinity(0)) // 2, _MAX_THREADS)
    if num_threads < 2:
        return None
    import llguidance

    return llguidance.LLExecutor(num_threads)


def ids_as_mask(ids: Any, vocab_size: int) -> np.ndarray[tuple[int], np.dtype[np.int32]]:
    """A mask, [ceil(vocab / 32)], that allows these ids alone."""
    mask = np.zeros(num_words(vocab_size), np.uint32)
    for token_id in ids:
        if token_id < vocab_size:
            mask[token_id // 32] |= np.uint32(1 << token_id % 32)
    return mask.view(np.int32)


def num_words(vocab_size: int) -> int:
    """Words of 32 bits to a mask."""
    return -(-vocab_size // 32)


def _first_of(error: object) -> str:
    """What went wrong, in one line."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return brief(" ".join(lines)) or "the grammar library gives no reason"
