"""The adapter to llguidance: the vocabulary in its form, and grammars compiled for it.

The library is imported here alone, with the first grammar.

- Its warnings are off, as they would quote answers.
- JSON may have one space, or a newline and an indent, between its tokens, and no more: otherwise a
  model may fill its answer with whitespace. A schema's own "x-guidance" can override this, and
  `disable_any_whitespace` overrides both.
- The library is given schemas that it can enforce (`enforceable_schema`), those within a grammar,
  too.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt

from slipstream_core.grammar.embedded_schemas import with_schemas, without_patterns
from slipstream_core.grammar.enforceable_schema import enforceable
from slipstream_core.grammar.grammar_syntax import is_gbnf, lark_of
from slipstream_ipc.errors import brief
from slipstream_ipc.messages import FRAMED, StructuredOutputs
from slipstream_ipc.messages.grammar import Leaves
from slipstream_ipc.validation.structured_output import kind_of

# bounded: with any blanks a small model writes nothing else (decision 021)
_JSON_DEFAULTS: Mapping[str, Any] = {"whitespace_pattern": r" |\n[ \t]{0,40}"}
_COMPACT: Mapping[str, Any] = {
    "whitespace_pattern": None,
    "whitespace_flexible": False,
    "item_separator": ",",
    "key_separator": ":",
}
# Limits of what a grammar may cost a step, in the library's own counts: a stream that exceeds them
# ends, at the same token on every machine. Only an ambiguous grammar has rows this long, and its
# time grows with their cube: `e: e e e e e | /[a-z]/ | ""` takes 1.5 s per mask with the library's
# limits of 2,000 and 50,000, and some 5 ms with these. 650 items are 160 optional properties.
_MAX_ROW_ITEMS = 650  # decision 021
_MAX_STEP_ITEMS = 3_000
_MAX_LEXER_STATES = 50_000  # of one grammar, 1 to 2 KB each
_WORTH_THREADS = 4  # masks
_MAX_THREADS = 16
_ANY_OBJECT = '{"type": "object"}'


class GrammarError(ValueError):
    """A grammar that cannot be compiled; the message says why."""


def grammar_key(outputs: StructuredOutputs, frame: str = "") -> bytes:
    """The key of a compiled grammar in the cache."""
    return msgspec.json.encode((outputs, frame) if frame else outputs, order="deterministic")


class GrammarText(NamedTuple):
    """A grammar in the library's own form; left_out: paths of keywords of schemas that it lacks."""

    text: str
    left_out: tuple[str, ...] = ()


class Vocabulary:
    """A model's tokens, shared by all grammars."""

    def __init__(self, tokenizer_json: Path, vocab_size: int, eos_ids: tuple[int, ...]) -> None:
        """`vocab_size` is the width of the model's logits; ids behind it are never sampled, so the
        library is not told of them.

        Raises GrammarError where the tokenizer does not fit it. The library holds the GIL
        meanwhile: 0.04 s for 4,096 tokens, 0.25 s for 32,000.
        """
        import llguidance

        self._lib = llguidance
        self.tokenizer_json = tokenizer_json
        self.vocab_size = vocab_size
        self.eos_ids = frozenset(eos_ids)
        text = tokenizer_json.read_text("utf-8")
        ends = list(eos_ids) or None
        try:
            try:
                self._tokenizer = llguidance.LLTokenizer(text, vocab_size, ends)
            except ValueError:
                fewer = within_rows(text, vocab_size)
                if fewer is None:
                    raise
                self._tokenizer = llguidance.LLTokenizer(fewer, vocab_size, ends)
        except ValueError as error:
            raise GrammarError(
                f"the grammar library does not support the model's tokenizer: {error}"
            ) from error
        # ids by which the library would end an answer; the request decides which of them do
        self.ends = ids_as_mask(self._tokenizer.eos_tokens, vocab_size)

    def compile(self, outputs: StructuredOutputs) -> Any:
        """A matcher at a grammar's start. Raises GrammarError with the library's reason.

        Try a request's grammar in the grammar process before (`trial_client`): a malicious one can
        end this process, or hold the GIL for long.
        """
        return self.compile_text(self.text_of(outputs).text)

    def text_of(
        self, outputs: StructuredOutputs, frame: str = "", *, leaves: Leaves = ""
    ) -> GrammarText:
        """A grammar in the library's own form. frame: as in Admit. leaves: see
        `with_schemas`. Holds the GIL.

        Raises GrammarError where it has none.
        """
        try:
            text, left_out = self._text(kind_of(outputs), outputs, leaves)
            if frame:
                frame, more = with_schemas(frame, self._why_not, leaves=leaves)
                text, left_out = _framed(text, frame), (*left_out, *more)
            return GrammarText(text, left_out)
        except (ValueError, RecursionError) as error:
            raise GrammarError(_first_of(error)) from error

    def compile_text(self, text: str) -> Any:
        """A matcher at the start of a grammar in the library's own form. Raises GrammarError."""
        limits = self._lib.LLParserLimits(
            max_items_in_row=_MAX_ROW_ITEMS,
            step_max_items=_MAX_STEP_ITEMS,
            max_lexer_states=_MAX_LEXER_STATES,
            verbose_errors=False,  # verbose errors quote the answer
        )
        matcher = self._lib.LLMatcher(self._tokenizer, text, log_level=0, limits=limits)
        _check(matcher)
        matcher.compute_bitmask()  # the first mask costs the most
        _check(matcher)
        return matcher

    def spell(self, text: bytes) -> list[int]:
        """The tokens in which the tokenizer spells a text."""
        return list(self._tokenizer.tokenize_bytes(text))

    def follow(self, matcher: Any, num_tokens: int) -> None:
        """Take up to `num_tokens` tokens that a matcher's grammar allows, those with the lowest
        ids, and compute the masks behind them. Raises GrammarError where that exceeds a limit.
        """
        for _ in range(num_tokens):
            allowed = np.frombuffer(matcher.compute_bitmask(), np.uint8)
            _check(matcher, "the grammar is too complex: ")
            ids = np.flatnonzero(np.unpackbits(allowed, bitorder="little"))
            token_id = next((each for each in ids.tolist() if each not in self.eos_ids), None)
            if token_id is None or matcher.is_stopped():
                return
            matcher.consume_token(token_id)
            _check(matcher, "the grammar is too complex: ")

    def _why_not(self, schema: Mapping[str, Any]) -> str:
        """The reason why the library does not compile a schema; empty if it does."""
        try:
            text = self._lib.LLMatcher.grammar_from_json_schema(json.dumps(schema))
            matcher = self._lib.LLMatcher(self._tokenizer, text, log_level=0)
        except ValueError as error:
            return _first_of(error)
        return _first_of(matcher.get_error()) if matcher.is_error() else ""

    def _text(self, kind: str, outputs: StructuredOutputs, leaves: Leaves) -> GrammarText:
        lib: Any = self._lib
        left_out: tuple[str, ...] = ()
        match kind:
            case "json":
                is_lacking = leaves and not outputs.strict
                found = enforceable(
                    _decoded(outputs.json),
                    without_patterns(self._why_not) if is_lacking else self._why_not,
                    is_strict=outputs.strict,
                    options=_JSON_DEFAULTS,
                    overrides=_COMPACT if outputs.disable_any_whitespace else {},
                )
                left_out = tuple(f"structured_outputs.json.{each}" for each in found.left_out)
                if found.exact is None:
                    text = lib.LLMatcher.grammar_from_json_schema(json.dumps(found.schema))
                else:
                    text = "\n".join((f"start: {found.exact.start}", *found.exact.rules, ""))
            case "json_object":
                text = lib.LLMatcher.grammar_from_json_schema(
                    _ANY_OBJECT,
                    defaults=_JSON_DEFAULTS,
                    overrides=_COMPACT if outputs.disable_any_whitespace else None,
                )
            case "regex":
                text = lib.LLMatcher.grammar_from_regex(outputs.regex or "")
            case "choice":
                # a single terminal: as separate rules each choice would be an item of a row
                texts = " | ".join(map(json.dumps, outputs.choice or ()))
                text = lib.LLMatcher.grammar_from_lark(f"start: CHOICE\nCHOICE: {texts}")
            case _:
                grammar, left_out = with_schemas(
                    outputs.grammar or "", self._why_not, leaves=leaves
                )
                if not is_gbnf(grammar):
                    return GrammarText(lib.LLMatcher.grammar_from_lark(lark_of(grammar)), left_out)
                try:
                    text = lib.grammar_from("gbnf", grammar)
                except Exception as error:  # its converter raises any exception
                    raise GrammarError(str(error)) from error
        return GrammarText(text, left_out)


def _decoded(schema: object) -> Any:
    """A tree in which no object occurs twice. Raises ValueError."""
    text = schema if isinstance(schema, str) else msgspec.json.encode(schema).decode()
    found = json.loads(text, parse_constant=_no_constant)
    json.dumps(found, ensure_ascii=False).encode()  # no half of a surrogate pair
    return found


def _no_constant(text: str) -> None:
    raise ValueError(f"{text} is no JSON")


def within_rows(tokenizer_json: str, vocab_size: int) -> str | None:
    """The tokenizer without the ids that have no row among `vocab_size`; None if all have one."""
    tokenizer = json.loads(tokenizer_json)
    added, model = tokenizer.get("added_tokens") or [], tokenizer["model"]
    vocab = model.get("vocab")
    largest = max((each["id"] for each in added), default=-1)
    if isinstance(vocab, dict):
        largest = max(largest, *vocab.values())
    elif isinstance(vocab, list):
        largest = max(largest, len(vocab) - 1)
    if largest < vocab_size:
        return None
    tokenizer["added_tokens"] = [each for each in added if each["id"] < vocab_size]
    if isinstance(vocab, list):  # an id is its place
        model["vocab"] = vocab[:vocab_size]
    elif isinstance(vocab, dict):
        kept = {token: token_id for token, token_id in vocab.items() if token_id < vocab_size}
        model["vocab"] = kept
        if "merges" in model:
            pairs = [each.split(" ") if isinstance(each, str) else each for each in model["merges"]]
            model["merges"] = [
                [left, right]
                for left, right in pairs
                if left in kept and right in kept and left + right in kept
            ]
    return json.dumps(tokenizer)


class _Grammars(msgspec.Struct):
    """Several grammars in the library's own form; the first is the whole."""

    grammars: tuple[dict[str, Any], ...]


def _framed(text: str, frame: str) -> str:
    """The grammar `frame`, in which FRAMED is the grammar `text`. Raises ValueError."""
    inner: tuple[dict[str, Any], ...] = ({"lark_grammar": text},)
    if text.lstrip().startswith("{"):
        inner = msgspec.json.decode(text, type=_Grammars).grammars
    first, *others = inner
    whole = {"lark_grammar": frame}
    return msgspec.json.encode(
        _Grammars((whole, {**first, "name": FRAMED.removeprefix("@")}, *others))
    ).decode()


def fill_masks(matchers: Sequence[tuple[Any, int]], masks: npt.NDArray[np.int32]) -> None:
    """Let each matcher fill its row of `masks`, int32 [G, words], which is contiguous.

    From _WORTH_THREADS matchers on they run in parallel, on half of the cores. A matcher that fails
    reports it afterwards (`is_error`).
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
    """The library's thread pool, created on first use; None with fewer than four cores."""
    num_threads = min(len(os.sched_getaffinity(0)) // 2, _MAX_THREADS)
    if num_threads < 2:
        return None
    import llguidance

    return llguidance.LLExecutor(num_threads)


def _check(matcher: Any, what: str = "") -> None:
    if matcher.is_error():
        raise GrammarError(what + _first_of(matcher.get_error()))


def ids_as_mask(ids: Any, vocab_size: int) -> np.ndarray[tuple[int], np.dtype[np.int32]]:
    """A mask, int32 [ceil(vocab / 32)], that allows only these ids."""
    mask = np.zeros(num_words(vocab_size), np.uint32)
    for token_id in ids:
        if token_id < vocab_size:
            mask[token_id // 32] |= np.uint32(1 << token_id % 32)
    return mask.view(np.int32)


def num_words(vocab_size: int) -> int:
    """32-bit words per mask."""
    return -(-vocab_size // 32)


def _first_of(error: object) -> str:
    """The error in one line."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return brief(" ".join(lines)) or "the grammar library gives no reason"
