"""Checks StructuredOutputs as far as possible without a grammar library.

Whether a grammar compiles is checked by the core.

- Only the grammar decides when an answer may end, and it does so by a stop id: one of the model's
  EOS ids, or one of `stop_token_ids` if the request ignores those. So there has to be a stop id,
  and min_tokens is refused.
- Errors about a field of StructuredOutputs name `structured_outputs.FIELD`.
"""

from __future__ import annotations

import msgspec
from msgspec import structs

from slipstream_ipc.errors import BadRequest, Summary
from slipstream_ipc.messages import SamplingParams, StructuredOutputs

MAX_SCHEMA_BYTES = 2**18
MAX_REGEX_BYTES = 2**16
MAX_GRAMMAR_BYTES = 2**16
MAX_CHOICES = 4096
MAX_CHOICE_BYTES = 2**18  # all choices together

_LIMITS = {"json": MAX_SCHEMA_BYTES, "regex": MAX_REGEX_BYTES, "grammar": MAX_GRAMMAR_BYTES}
_FORMS = ("json", "regex", "choice", "grammar", "json_object")
_KINDS = "exactly one of json, regex, choice, grammar and json_object"


def check_structured(outputs: StructuredOutputs, params: SamplingParams) -> None:
    """Raise BadRequest for the first field that is not allowed, alone or with these params; the
    types are right already.
    """
    check_form(outputs)
    if params.min_tokens > 0:
        allowed = "0 with structured_outputs: the grammar decides when an answer may end"
        raise BadRequest("min_tokens", params.min_tokens, allowed)


def check_form(outputs: StructuredOutputs) -> None:
    """Raise BadRequest for the first field that is not allowed with any params."""
    kind = kind_of(outputs)
    if outputs.disable_any_whitespace and kind not in ("json", "json_object"):
        raise _bad("disable_any_whitespace", True, f"False with {kind}: it is an option of JSON")
    for name, most in _LIMITS.items():
        value = getattr(outputs, name)
        if value is not None:
            num_bytes = _num_bytes(name, value)
            if num_bytes > most:
                raise _bad(name, Summary(f"{num_bytes} bytes"), f"at most {most}")
    if outputs.choice is not None:
        num = len(outputs.choice)
        if not 1 <= num <= MAX_CHOICES:
            raise _bad("choice", Summary(f"{num} strings"), f"1 to {MAX_CHOICES}")
        if not all(outputs.choice):
            raise _bad("choice", Summary("an empty string"), "strings that are not empty")
        num_bytes = sum(_num_bytes("choice", each) for each in outputs.choice)
        if num_bytes > MAX_CHOICE_BYTES:
            raise _bad(
                "choice", Summary(f"{num_bytes} bytes"), f"at most {MAX_CHOICE_BYTES} in all"
            )


def check_made_grammar(grammar: str) -> None:
    """Raise BadRequest if a grammar is too long to have been made of a request's tools."""
    num_bytes = _num_bytes("grammar", grammar)
    if num_bytes > MAX_SCHEMA_BYTES:
        raise _bad("grammar", Summary(f"{num_bytes} bytes"), f"at most {MAX_SCHEMA_BYTES}")


def check_ending(params: SamplingParams, stop_token_ids: tuple[int, ...]) -> None:
    """Raise BadRequest if an answer in a grammar could not end.

    stop_token_ids: all ids that end the stream, the model's included.
    """
    if params.structured_outputs is not None and not stop_token_ids:
        given = "ignore_eos" if params.ignore_eos else "a model without an end-of-sequence id"
        allowed = "an id that ends the answer once its grammar is complete: give stop_token_ids"
        raise BadRequest("structured_outputs", Summary(given), allowed)


def kind_of(outputs: StructuredOutputs) -> str:
    """The name of the field that is given. Raises: BadRequest unless it is exactly one."""
    given = [name for name in _FORMS if getattr(outputs, name) is not None]
    if outputs.json_object is False:
        given.remove("json_object")
    if len(given) != 1:
        raise BadRequest("structured_outputs", Summary(" and ".join(given) or "nothing"), _KINDS)
    return given[0]


def json_as_text(outputs: StructuredOutputs) -> StructuredOutputs:
    """The outputs with a JSON schema as text, even if it was given as an object.

    The limits are checked already.
    """
    if outputs.json is None or isinstance(outputs.json, str):
        return outputs
    return structs.replace(outputs, json=msgspec.json.encode(outputs.json).decode())


def _num_bytes(name: str, value: object) -> int:
    try:
        text = value if isinstance(value, str) else msgspec.json.encode(value).decode()
        return len(text.encode())
    except (UnicodeEncodeError, TypeError, RecursionError, ValueError) as error:
        given = Summary(f"a {type(value).__name__}")  # the value may be nested too deeply for repr
        raise _bad(name, given, f"values that JSON and UTF-8 can represent ({error})") from error


def _bad(name: str, given: object, allowed: str) -> BadRequest:
    return BadRequest(f"structured_outputs.{name}", given, allowed)
