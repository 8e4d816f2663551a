"""Compares libraries that compile grammars and fill masks: llguidance and xgrammar.

    python -m slipstream_bench.studies.grammar_libraries [TOKENIZER.json ...]

Run it with an interpreter that has both installed. Without arguments it takes the demo model's
tokenizer and a 32,000-token one trained on Python's own sources.

For each schema it measures the time to the first mask, the time of a mask and of a grammar step
over the tokens of a valid answer, and whether valid answers are accepted and an invalid one is
rejected. Finally it measures how much a counting thread slows down while another thread compiles,
which shows whether the library releases the GIL. It takes three minutes.
"""

from __future__ import annotations

import json
import resource
import statistics
import sys
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

_DEMO = Path(__file__).parents[3] / "api/slipstream/demo/model/tokenizer.json"

# name: schema, a valid answer, an invalid one
SCHEMAS: dict[str, tuple[dict[str, Any], Any, Any]] = {
    "object": (
        {
            "type": "object",
            "properties": {"name": {"type": "string"}, "age": {"type": "integer"}},
            "required": ["name", "age"],
            "additionalProperties": False,
        },
        {"name": "Ada Lovelace", "age": 36},
        {"name": "Ada Lovelace"},
    ),
    "ranges": (
        {
            "type": "array",
            "items": {"type": "integer", "minimum": 3, "maximum": 17},
            "minItems": 2,
            "maxItems": 4,
        },
        [3, 17, 9],
        [3, 18],
    ),
    "enum": (
        {"type": "object", "properties": {"c": {"enum": ["red", "green", 3]}}, "required": ["c"]},
        {"c": "green"},
        {"c": "blue"},
    ),
    "pattern": ({"type": "string", "pattern": "^[A-Z]{3}-[0-9]{4}$"}, "ABC-1234", "ABC-12x4"),
    "format": ({"type": "string", "format": "date"}, "2024-02-29", "2024-13-01"),
    "recursive": (
        {
            "$defs": {
                "node": {
                    "type": "object",
                    "properties": {
                        "v": {"type": "number"},
                        "next": {"anyOf": [{"$ref": "#/$defs/node"}, {"type": "null"}]},
                    },
                    "required": ["v", "next"],
                }
            },
            "$ref": "#/$defs/node",
        },
        {"v": 1.5, "next": {"v": -2, "next": None}},
        {"v": 1.5, "next": 4},
    ),
    "allOf": (
        {
            "allOf": [
                {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]},
                {"properties": {"b": {"type": "boolean"}}, "required": ["b"]},
            ]
        },
        {"a": 1, "b": True},
        {"a": 1},
    ),
    "long": (
        {
            "type": "object",
            "properties": {
                f"field_{i}": {"type": "string", "maxLength": 20 + i} for i in range(60)
            },
            "required": [f"field_{i}" for i in range(60)],
        },
        {f"field_{i}": "word " * 3 for i in range(60)},
        {f"field_{i}": "word " * 30 for i in range(60)},
    ),
}


class Library(Protocol):
    """The interface of the compared libraries."""

    def compile(self, schema: dict[str, Any]) -> Any:
        """A matcher in its initial state. Raises ValueError if the schema is not supported."""

    def mask(self, matcher: Any) -> None:
        """Fill the mask of the next token."""

    def take(self, matcher: Any, token_id: int) -> bool:
        """Advance by one token; returns whether the grammar accepts it."""

    def is_complete(self, matcher: Any) -> bool:
        """Whether the answer may end here."""


class LLGuidance:
    def __init__(self, tokenizer: Tokenizer) -> None:
        import llguidance
        import llguidance.hf
        from llguidance.numpy import allocate_token_bitmask, fill_next_token_bitmask

        self._lib = llguidance
        self._tokenizer = llguidance.LLTokenizer(tokenizer.to_str(), eos_token=0)
        self._mask = allocate_token_bitmask(1, tokenizer.get_vocab_size())
        self._fill = fill_next_token_bitmask

    def compile(self, schema: dict[str, Any]) -> Any:
        matcher = self._lib.LLMatcher(
            self._tokenizer, self._lib.LLMatcher.grammar_from_json_schema(json.dumps(schema))
        )
        if matcher.is_error():
            raise ValueError(matcher.get_error())
        return matcher

    def mask(self, matcher: Any) -> None:
        self._fill(matcher, self._mask)

    def take(self, matcher: Any, token_id: int) -> bool:
        return bool(matcher.consume_token(token_id))

    def is_complete(self, matcher: Any) -> bool:
        return bool(matcher.is_accepting())


class XGrammar:
    def __init__(self, tokenizer: Tokenizer) -> None:
        import xgrammar

        vocab = [tokenizer.id_to_token(i) or "" for i in range(tokenizer.get_vocab_size())]
        info = xgrammar.TokenizerInfo(
            vocab, vocab_type=xgrammar.VocabType.BYTE_LEVEL, stop_token_ids=[0]
        )
        self._lib = xgrammar
        self._compiler = xgrammar.GrammarCompiler(info, max_threads=1, cache_enabled=False)
        self._mask = xgrammar.allocate_token_bitmask(1, len(vocab))

    def compile(self, schema: dict[str, Any]) -> Any:
        try:
            compiled = self._compiler.compile_json_schema(json.dumps(schema))
        except RuntimeError as error:
            raise ValueError(str(error)) from error
        return self._lib.GrammarMatcher(compiled)

    def mask(self, matcher: Any) -> None:
        matcher.fill_next_token_bitmask(self._mask)

    def take(self, matcher: Any, token_id: int) -> bool:
        return bool(matcher.accept_token(token_id))

    def is_complete(self, matcher: Any) -> bool:
        return bool(matcher.accept_token(0))  # `is_terminated` requires the end token first


def main(paths: list[str]) -> None:
    tokenizers = [Tokenizer.from_file(path) for path in paths] or [
        Tokenizer.from_file(str(_DEMO)),
        _trained(32_000),
    ]
    for tokenizer in tokenizers:
        _say(f"\nvocabulary of {tokenizer.get_vocab_size()}")
        for kind in (LLGuidance, XGrammar):
            before, begin = _memory_mib(), time.perf_counter()
            library = kind(tokenizer)
            took = time.perf_counter() - begin
            _say(f"  {kind.__name__}: tokenizer {took:.2f} s, {_memory_mib() - before:.0f} MiB")
            for name, (schema, valid, invalid) in SCHEMAS.items():
                _say(f"    {name:10}", _measured(library, tokenizer, schema, valid, invalid))
            _say(f"    memory after all of them: {_memory_mib() - before:.0f} MiB more")
            long_schema = SCHEMAS["long"][0]
            slowed = _slowed_by(partial(library.compile, long_schema))
            _say(f"    a thread beside compiling counts at {slowed:.0%} of its speed")


def _measured(
    library: Library, tokenizer: Tokenizer, schema: dict[str, Any], valid: Any, invalid: Any
) -> str:
    begin = time.perf_counter()
    try:
        matcher = library.compile(schema)
    except ValueError as error:
        return f"refused: {str(error).splitlines()[0][:90]}"
    compiled = time.perf_counter()
    library.mask(matcher)
    first = time.perf_counter()
    masks: list[float] = []
    takes: list[float] = []
    accepted = False
    for token_id in tokenizer.encode(json.dumps(valid), add_special_tokens=False).ids:
        t0 = time.perf_counter()
        library.mask(matcher)
        t1 = time.perf_counter()
        if not library.take(matcher, token_id):
            break
        masks.append(t1 - t0)
        takes.append(time.perf_counter() - t1)
    else:
        accepted = library.is_complete(matcher)
    wrong = library.compile(schema)
    ids = tokenizer.encode(json.dumps(invalid), add_special_tokens=False).ids
    refused = not (all(library.take(wrong, i) for i in ids) and library.is_complete(wrong))
    return (
        f"compile {1e3 * (compiled - begin):7.1f} ms, first {1e3 * (first - compiled):.2f} ms, "
        f"mask {1e6 * statistics.median(masks or [0]):4.0f} µs (to {1e6 * max(masks or [0]):.0f}), "
        f"take {1e6 * statistics.median(takes or [0]):2.0f} µs, valid "
        f"{'accepted' if accepted else 'REFUSED'}, invalid {'refused' if refused else 'ACCEPTED'}"
    )


def _slowed_by(work: Callable[[], object]) -> float:
    """The relative speed of a counting thread while `work` runs in another one."""

    def count(seconds: float) -> float:
        num, end = 0, time.perf_counter() + seconds
        while time.perf_counter() < end:
            num += 1
        return num / seconds

    alone = count(0.3)
    is_over = threading.Event()

    def repeat() -> None:
        while not is_over.is_set():
            work()

    thread = threading.Thread(target=repeat)
    thread.start()
    beside = count(0.5)
    is_over.set()
    thread.join()
    return beside / alone


def _say(*words: str) -> None:
    sys.stdout.write(" ".join(words) + "\n")


def _memory_mib() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def _trained(vocab_size: int) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    files = sorted(Path(json.__file__).parents[1].glob("*.py"))
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=["<|endoftext|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    texts = [file.read_text("utf-8", "replace") for file in files]
    texts += [file.read_text("utf-8", "replace") for file in Path(np.__file__).parent.rglob("*.py")]
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


if __name__ == "__main__":
    main(sys.argv[1:])
