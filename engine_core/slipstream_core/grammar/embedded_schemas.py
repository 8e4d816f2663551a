"""Schemas within a grammar that was made of a request's tools, each behind `%json`.

A schema that the worker wrote carries SCHEMA_MARK: where it comes from, and whether it is strict.
Others, of a request's own grammar, stay as they are. One that is `bare` is a terminal: of a string
without quotes and escapes. What the worker left out of rules that are no JSON stands in comments
behind LEFT_OUT_MARK.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

from slipstream_core.grammar.enforceable_schema import WhyNot, enforceable
from slipstream_ipc.messages import LEFT_OUT_MARK, SCHEMA_MARK
from slipstream_ipc.messages.grammar import Leaves

# what may hold the directive's letters otherwise: strings, regular expressions, comments
_PARTS = re.compile(r'"(?:\\.|[^"\\\n])*"|//[^\n]*|/(?:\\.|[^/\\\n])+/|%json[ \t]*(?=\{)')
_DECODER = json.JSONDecoder()


def with_schemas(
    grammar: str, why_not: WhyNot, *, leaves: Leaves = ""
) -> tuple[str, tuple[str, ...]]:
    """The grammar with schemas that the library can enforce, and what they lack: every pattern if
    it leaves patterns, and all if it leaves schemas, except of those that are strict.

    Raises ValueError for a strict schema that it cannot, and for one that no JSON fits.
    """
    if SCHEMA_MARK not in grammar and LEFT_OUT_MARK not in grammar:
        return grammar, ()
    parts: list[str] = []
    rules: list[str] = []
    left_out: list[str] = []
    at = 0
    while (found := _PARTS.search(grammar, at)) is not None:
        parts.append(grammar[at : found.end()])
        at = found.end()
        if found[0].startswith(LEFT_OUT_MARK):
            left_out.append(str(json.loads(found[0].removeprefix(LEFT_OUT_MARK))))
        if not found[0].startswith("%json"):
            continue
        schema, end = _DECODER.raw_decode(grammar, at)
        mark = schema.pop(SCHEMA_MARK, None)
        if not isinstance(mark, dict):
            continue
        where, is_strict = mark.get("path", ""), mark.get("strict") is True
        if leaves == "schemas" and not is_strict:
            schema = {word: schema[word] for word in ("type",) if word in schema}
            left_out.append(where)
        is_lacking = leaves == "patterns" and not is_strict
        try:
            one = enforceable(
                schema,
                without_patterns(why_not) if is_lacking else why_not,
                is_strict=is_strict,
                prefix=f"exact_{len(rules)}_{len(parts)}",
            )
        except ValueError as error:
            raise ValueError(f"{where}: {error}") from error
        left_out += [f"{where}.{each}" for each in one.left_out]
        if mark.get("bare") is True:
            assert isinstance(one.schema, dict)
            parts[-1] = parts[-1].removesuffix(found[0])
            parts.append(_bare(one.schema))
        elif one.exact is None:
            parts.append(json.dumps(one.schema))
        else:
            parts[-1] = parts[-1].removesuffix(found[0])
            parts.append(f"({one.exact.start})")
            rules += one.exact.rules
        at = end
    parts.append(grammar[at:])
    text = "\n".join(["".join(parts), *rules, ""] if rules else ["".join(parts)])
    return text, tuple(dict.fromkeys(left_out))


def without_patterns(why_not: WhyNot) -> WhyNot:
    """The same, but it takes no pattern."""

    def why(schema: dict[str, Any]) -> str:
        return "too complex where it stands" if "pattern" in schema else why_not(schema)

    return why


def _bare(schema: Mapping[str, Any]) -> str:
    """The strings that a schema allows, as a terminal."""
    least, most = schema.get("minLength", 0), schema.get("maxLength", "")
    length = f"/(.|\\n){{{least},{most}}}/"
    pattern = schema.get("pattern")
    if pattern is None:
        return length
    of_pattern = f"/{_IN_SLASHES.sub(_escaped, pattern)}/"
    return of_pattern if (least, most) == (0, "") else f"({of_pattern} & {length})"


_IN_SLASHES = re.compile(r"\\.|/", re.DOTALL)


def _escaped(found: re.Match[str]) -> str:
    return "\\/" if found[0] == "/" else found[0]
