"""Takes typed values out of a file's metadata, and names the keys that were not taken.

A key that says how a model computes, and that this code does not know, means that the model would
compute something else here: such keys are refused by name.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import numpy as np

from slipstream_core.model.gguf.reader import GGUFError, GGUFModel, Value

# What a file says of its origin and of its making; nothing of it changes what is computed.
_INFORMATIVE = ("general.", "quantize.imatrix.", "mradermacher.")
_NOT_INFORMATIVE = ("general.sampling.", "general.alignment", "general.architecture")
_KINDS = {int: "a whole number", float: "a number", bool: "true or false", str: "a text"}


class Metadata:
    """The metadata of a model, and which of its keys have been taken."""

    def __init__(self, model: GGUFModel) -> None:
        self.file: Path = model.files[0]
        self._values = model.metadata
        self._taken = {"general.alignment"}

    def integer(self, key: str, default: int | None = None, *, least: int = 0) -> int:
        """A whole number from `least` to 2^31 - 1. Without a default it must be there."""
        found = self._value(key, int, default)
        assert isinstance(found, int)
        if not least <= found < 2**31:
            raise self.error(f"has {found} in {key!r}; allowed: {least} to 2147483647")
        return found

    def number(self, key: str, default: float | None = None) -> float:
        """A finite number."""
        found = self._value(key, float, default)
        assert isinstance(found, float | int)
        return float(found)

    def flag(self, key: str, default: bool | None = None) -> bool:
        """True or false."""
        found = self._value(key, bool, default)
        assert isinstance(found, bool)
        return found

    def text(self, key: str, default: str | None = None) -> str:
        """A text."""
        found = self._value(key, str, default)
        assert isinstance(found, str)
        return found

    def texts(self, key: str) -> list[str] | None:
        """A list of texts; None where there is none."""
        found = self._values.get(key)
        self._taken.add(key)
        if found is None or (isinstance(found, np.ndarray) and not found.size):
            return None
        if not isinstance(found, list):
            raise self.error(f"has no list of texts in {key!r}")
        return found

    def numbers(self, key: str) -> list[float] | None:
        """A list of numbers; None where there is none."""
        found = self._values.get(key)
        self._taken.add(key)
        if found is None:
            return None
        if not isinstance(found, np.ndarray) or found.dtype.kind not in "iuf":
            raise self.error(f"has no list of numbers in {key!r}")
        listed: list[float] = found.tolist()
        return listed

    def whole_numbers(self, key: str, count: int, default: int | None = None) -> list[int]:
        """So many whole numbers from 0 on: the first of a list, or one in place of all."""
        found = self._values.get(key)
        if not isinstance(found, np.ndarray):
            return [self.integer(key, default)] * count
        self._taken.add(key)
        listed: list[int] = found.tolist() if found.dtype.kind in "iu" else []
        if len(listed) < count or min(listed) < 0:
            raise self.error(f"has no list of {count} whole numbers in {key!r}")
        return listed[:count]

    def flags(self, key: str) -> list[bool] | None:
        """A list of truths; None where there is none."""
        found = self._values.get(key)
        self._taken.add(key)
        if found is None:
            return None
        if not isinstance(found, np.ndarray) or found.dtype.kind != "b":
            raise self.error(f"has no list of truths in {key!r}")
        listed: list[bool] = found.tolist()
        return listed

    def has(self, key: str) -> bool:
        """True if there is such a key; it does not count as taken."""
        return key in self._values

    def ignore(self, keys: Iterable[str]) -> None:
        """Count keys as understood that change nothing here."""
        self._taken.update(keys)

    def ignore_prefix(self, prefix: str) -> None:
        """Count all keys that begin so as understood."""
        self._taken.update(key for key in self._values if key.startswith(prefix))

    def require(self, key: str, allowed: Value) -> None:
        """Take a key that may have this value alone, if it is there."""
        found = self._values.get(key, allowed)
        self._taken.add(key)
        if isinstance(found, np.ndarray | list) or found != allowed:
            said = "a list" if isinstance(found, np.ndarray | list) else repr(found)
            raise self.error(f"has {said} in {key!r}; served is {allowed!r} alone")

    def refuse_others(self, prefix: str = "") -> None:
        """Raise GGUFError for a key that begins so and has not been taken."""
        for key in self._values:
            is_informative = key.startswith(_INFORMATIVE) and not key.startswith(_NOT_INFORMATIVE)
            if key.startswith(prefix) and key not in self._taken and not is_informative:
                raise self.error(
                    f"has {key!r} in its metadata, which is not understood here, so the model "
                    "might compute something else"
                )

    def error(self, problem: str) -> GGUFError:
        """An error that names the file."""
        return GGUFError(self.file, problem)

    def _value(self, key: str, kind: type, default: Value | None) -> Value:
        self._taken.add(key)
        found = self._values.get(key, default)
        if found is None:
            raise self.error(f"lacks {key!r} in its metadata")
        fits = type(found) is kind or (kind is float and type(found) is int)
        if not fits:
            raise self.error(f"has {_said(found)} in {key!r}; allowed: {_KINDS[kind]}")
        return found


def _said(found: Value) -> str:
    if isinstance(found, list | np.ndarray):
        return f"a list of {len(found)}"
    said = repr(found)
    return said if len(said) <= 80 else f"{said[:80]}…"
