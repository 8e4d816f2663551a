"""Requests as agents' libraries send them, recorded by `scripts/foreign-clients --record`."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

BODIES = Path(__file__).parents[1] / "system/foreign_clients/bodies"
_MAX_TEXT_LEN = 400  # what is longer is a library's own prompt
_GENERATED_ID = re.compile(r"\b(call|fc|msg|resp|rs|toolu)_[0-9a-f]{24,}\b")


def as_lines(bodies: Iterable[Any]) -> str:
    """JSON lines of bodies: generated ids numbered as they come, long texts cut."""
    text = "".join(
        json.dumps(_short(body), ensure_ascii=False, sort_keys=True) + "\n" for body in bodies
    )
    numbers: dict[str, int] = {}
    return _GENERATED_ID.sub(lambda it: f"{it[1]}_{numbers.setdefault(it[0], len(numbers))}", text)


def recorded_bodies(program: str) -> list[Any]:
    """What a program has sent, in turn."""
    return [json.loads(line) for line in (BODIES / f"{program}.jsonl").read_text().splitlines()]


def shape_of(value: Any) -> Any:
    """The fields of a body and the types of their values; a list is what occurs in it."""
    if isinstance(value, list):
        return sorted({json.dumps(shape_of(item), sort_keys=True) for item in value})
    if isinstance(value, dict):
        return {name: shape_of(item) for name, item in value.items()}
    return type(value).__name__


def _short(value: Any) -> Any:
    if isinstance(value, str):
        return value if len(value) <= _MAX_TEXT_LEN else value[:_MAX_TEXT_LEN] + "…"
    if isinstance(value, list):
        return [_short(item) for item in value]
    if isinstance(value, dict):
        return {name: _short(item) for name, item in value.items()}
    return value
