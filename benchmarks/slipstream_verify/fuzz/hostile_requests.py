"""Whole requests that ask for as much as a request may, or slightly more. Pure.

Each combines several features: grammars, schemas, lists of ids and biases, prompts, several
answers, logprobs. The maxima are taken from the validation code, so a changed limit is tested at
its new value.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from random import Random
from typing import Any

from msgspec import Struct

from slipstream_ipc.messages import RepetitionDetection, SamplingParams, StructuredOutputs
from slipstream_ipc.validation import sampling_params as limits
from slipstream_ipc.validation import structured_output, token_constraints

MOST_ANSWERS = 8  # answers per prompt; more would test nothing new


# Masks of hostile grammars take most of a run's CPU. Every such request tests compiling and the
# first states; only one in eight runs as long, and with as many answers, as other requests.
_LONG_GRAMMARS = 1 / 8
_SHORT_TOKENS = (1, 2, 4)


class HostileRequest(Struct, frozen=True):
    """One request. kinds: the features it uses; answers: its number of streams; reads: tokens after
    which the reader ends each stream, None to read all.
    """

    index: int
    kinds: tuple[str, ...]
    prompt: str | list[int]
    params: SamplingParams
    answers: int
    reads: int | None


class Bounds(Struct, frozen=True):
    """The limits of the server."""

    vocab_size: int
    max_model_len: int


def hostile_request(seed: int, index: int, bounds: Bounds) -> HostileRequest:
    """The `index`-th request of a seed; deterministic in its arguments."""
    random = Random(f"{seed}:{index}")  # noqa: S311  (attacks are to be repeated)
    prompt = _prompt(random, bounds)
    room = bounds.max_model_len - len(prompt)
    options: dict[str, Any] = {
        "max_tokens": random.choice((1, min(8, room), min(40, room), room, None)),
        "temperature": random.choice((0.0, 0.7)),
        "seed": index,
    }
    kinds = random.sample(sorted(_KINDS), random.choice((1, 1, 2, 3, len(_KINDS))))
    for kind in kinds:
        options |= _KINDS[kind](random, bounds)
    answers = random.choice((1, 1, 1, 2, MOST_ANSWERS))
    if options.get("structured_outputs") is not None:
        options.pop("min_tokens", None)
        if random.random() >= _LONG_GRAMMARS:
            answers = min(answers, 2)
            wanted = options["max_tokens"]
            most = random.choice(_SHORT_TOKENS)
            options["max_tokens"] = most if wanted is None else min(wanted, most)
    reads = random.choice((None, None, None, 0, 1, 5))
    return HostileRequest(
        index, tuple(sorted(kinds)), prompt, SamplingParams(**options), answers, reads
    )


def _at(random: Random, most: int, least: int = 1) -> int:
    """Mostly the bound itself, sometimes less, rarely one more."""
    roll = random.random()
    return most if roll < 0.5 else least if roll < 0.95 else most + 1


def _prompt(random: Random, bounds: Bounds) -> str | list[int]:
    """Ids or text of any allowed length; sometimes longer."""
    longest = bounds.max_model_len
    length = random.choice(
        (1, 5, longest // 2, longest - 41, longest - 9, _at(random, longest - 1))
    )
    if random.random() < 0.8:
        return [random.randrange(100, bounds.vocab_size) for _ in range(length)]
    return random.choice(("word ", "\N{PILE OF POO}", "a", "\n")) * length


def _logprobs(random: Random, bounds: Bounds) -> dict[str, Any]:
    widths = (0, 5, 20, 63, 64, bounds.vocab_size, -1)
    found = {"logprobs": random.choice(widths)}
    if random.random() < 0.5:
        found["prompt_logprobs"] = random.choice(widths)
    return found


def _stops(random: Random, bounds: Bounds) -> dict[str, Any]:
    num = _at(random, limits.MAX_STOPS)
    size = _at(random, limits.MAX_STOP_CHARS - 1)
    stops = tuple(random.choice(" ea\n") * size + chr(200 + n) for n in range(num))
    return {"stop": stops, "include_stop_str_in_output": random.random() < 0.5}


def _stop_ids(random: Random, bounds: Bounds) -> dict[str, Any]:
    num = _at(random, limits.MAX_STOP_TOKEN_IDS)
    ids = tuple(random.sample(range(bounds.vocab_size), min(num, bounds.vocab_size)))
    return {"stop_token_ids": ids, "min_tokens": random.choice((0, 1))}


def _biases(random: Random, bounds: Bounds) -> dict[str, Any]:
    num = _at(random, token_constraints.MAX_LOGIT_BIASES)
    ids = random.sample(range(bounds.vocab_size), min(num, bounds.vocab_size))
    return {"logit_bias": dict.fromkeys(ids, random.choice((-100.0, 5.0, 100.0)))}


def _allowed(random: Random, bounds: Bounds) -> dict[str, Any]:
    num = random.choice(
        (10, 300, bounds.vocab_size, _at(random, token_constraints.MAX_ALLOWED_TOKEN_IDS, 2))
    )
    beyond = max(0, num - bounds.vocab_size)  # the last id repeats
    ids = tuple(range(num - beyond)) + (bounds.vocab_size - 1,) * beyond
    return {"allowed_token_ids": ids}


def _bad_words(random: Random, bounds: Bounds) -> dict[str, Any]:
    num = _at(random, token_constraints.MAX_BAD_WORDS)
    size = random.choice((1, 20, token_constraints.MAX_BAD_WORD_CHARS - 3))
    return {"bad_words": tuple(f"{'a' * size}{n}" for n in range(num))}


def _penalties(random: Random, bounds: Bounds) -> dict[str, Any]:
    return {
        "repetition_penalty": random.choice((1e-6, 1.1, 1e6)),
        "presence_penalty": random.choice((-2.0, 2.0)),
        "frequency_penalty": random.choice((-2.0, 2.0)),
        "top_k": random.choice((0, 1, 300)),
        "top_p": random.choice((1.0, 1e-6)),
        "min_p": random.choice((0.0, 1.0)),
    }


def _repetitions(random: Random, bounds: Bounds) -> dict[str, Any]:
    size = _at(random, limits.MAX_PATTERN_SIZE)
    wanted = RepetitionDetection(
        max_pattern_size=size,
        min_pattern_size=random.choice((0, 1, size)),
        min_count=random.choice((2, 3, limits.MAX_PATTERN_COUNT)),
    )
    return {"repetition_detection": wanted}


def _regex(random: Random, bounds: Bounds) -> dict[str, Any]:
    most = structured_output.MAX_REGEX_BYTES
    regex = random.choice(
        (
            "[a-z]+",
            "(a|b|ab)*c" * 40,
            f"(.{{0,{random.choice((30, 300, 3000))}}}x){{1,{random.choice((2, 20, 200))}}}",
            "a" * most,
            "(" * 200 + "a" + ")" * 200,
            "[" * 100,
            "(a?){500}a{500}",
        )
    )
    return {"structured_outputs": StructuredOutputs(regex=regex)}


def _schema(random: Random, bounds: Bounds) -> dict[str, Any]:
    num = random.choice((1, 30, 300, 3000))
    wide = {
        "type": "object",
        "properties": {f"p{n}": {"type": "string", "maxLength": num} for n in range(num)},
        "required": [f"p{n}" for n in range(num)],
    }
    deep: dict[str, Any] = {"type": "integer"}
    for _ in range(min(num, 300)):
        deep = {"type": "array", "items": deep, "maxItems": num}
    itself = {"$ref": "#/$defs/a", "$defs": {"a": {"anyOf": [{"$ref": "#/$defs/a"}] * num}}}
    enum = {"enum": [f"{'x' * 20}{n}" for n in range(num)]}
    schema = random.choice((wide, deep, itself, enum))
    return {"structured_outputs": StructuredOutputs(json=json.dumps(schema))}


def _choice(random: Random, bounds: Bounds) -> dict[str, Any]:
    num = _at(random, structured_output.MAX_CHOICES, 300)
    size = structured_output.MAX_CHOICE_BYTES // num - 5
    prefixes = ("aaa", "a" * max(1, size))
    choice = tuple(random.choice(prefixes) + str(n) for n in range(num))
    return {"structured_outputs": StructuredOutputs(choice=choice)}


def _grammar(random: Random, bounds: Bounds) -> dict[str, Any]:
    num = random.choice((2, 50, 1000))
    grammar = random.choice(
        (
            'start: "a" start | "b"',
            "start: " + " | ".join(f"r{n}" for n in range(num))
            + "".join(f'\nr{n}: "{n}" r{(n + 1) % num}' for n in range(num)),
            'start: start start | start start start | "a"',
            "start: " + '"' + "a" * (structured_output.MAX_GRAMMAR_BYTES - 10) + '"',
            "no grammar",
        )
    )  # fmt: skip
    return {"structured_outputs": StructuredOutputs(grammar=grammar)}


_KINDS: dict[str, Callable[[Random, Bounds], dict[str, Any]]] = {
    "logprobs": _logprobs,
    "stops": _stops,
    "stop_ids": _stop_ids,
    "biases": _biases,
    "allowed": _allowed,
    "bad_words": _bad_words,
    "penalties": _penalties,
    "repetitions": _repetitions,
    "regex": _regex,
    "schema": _schema,
    "choice": _choice,
    "grammar": _grammar,
}
KINDS = tuple(_KINDS)
