"""The options of a simulated model, `simulated:NAME=VALUE,…`."""

from __future__ import annotations

import typing
from typing import Annotated, Literal

import msgspec
from msgspec import Meta, Struct

SIMULATED = "simulated:"
MAX_ACCEPTANCE = 17  # tokens of a row and step: sixteen drafts, and the one behind them


class SimulatedOptions(Struct, frozen=True, kw_only=True):
    """The options after `simulated:`."""

    step_ms: Annotated[float, Meta(ge=0, le=1e6)] = 10.0
    prefill_us: Annotated[float, Meta(ge=0, le=1e6)] = 20.0
    synthetic_acceptance_length: Annotated[float, Meta(ge=1, le=MAX_ACCEPTANCE)] = 1.0
    vocab_size: Annotated[int, Meta(ge=2, le=2**31)] | None = None
    tokenizer: str | None = None
    max_model_len: Annotated[int, Meta(ge=2)] | None = None
    mode: Literal["playback", "chain"] = "playback"
    answers: str | None = None


ALLOWED = {
    "step_ms": "milliseconds that a step takes, 0 to 1000000",
    "prefill_us": "microseconds that a prefill token adds, 0 to 1000000",
    "synthetic_acceptance_length": f"tokens that a step gives to a row, 1 to {MAX_ACCEPTANCE}",
    "vocab_size": "a whole number of at least 2",
    "tokenizer": "a tokenizer.json or a folder with one",
    "max_model_len": "a whole number of tokens, at least 2",
    "mode": "playback or chain",
    "answers": "a file of JSON lines, each with text or token_ids, with a tokenizer and no mode",
}
"""The values that each option allows, for errors."""


def parse_simulated(model: str) -> SimulatedOptions:
    """Parse `simulated:name=value,…`. Raises ValueError naming the option and its range."""
    if not model.startswith(SIMULATED):
        raise ValueError(f"model is {model!r}; a simulated model begins with {SIMULATED!r}")
    types = typing.get_type_hints(SimulatedOptions, include_extras=True)
    given: dict[str, object] = {}
    for part in model.removeprefix(SIMULATED).split(","):
        if not part:
            continue
        name, _, value = part.partition("=")
        if name not in ALLOWED:
            raise ValueError(f"{model}: unknown option {name!r}; known: {', '.join(ALLOWED)}")
        if name in given:
            raise ValueError(f"{model}: option {name!r} is given twice")
        try:
            given[name] = msgspec.convert(value, types[name], strict=False)
        except msgspec.ValidationError as error:
            raise ValueError(
                f"{model}: option {name!r} is {value!r}; allowed: {ALLOWED[name]}"
            ) from error
        if value == "" or given[name] is None:
            raise ValueError(f"{model}: option {name!r} is {value!r}; allowed: {ALLOWED[name]}")
    options = SimulatedOptions(**given)  # type: ignore[arg-type]  # converted one by one above
    if options.answers is not None and (options.tokenizer is None or "mode" in given):
        other = "no tokenizer" if options.tokenizer is None else "a mode"
        raise ValueError(f"{model}: option 'answers' with {other}; allowed: {ALLOWED['answers']}")
    return options
