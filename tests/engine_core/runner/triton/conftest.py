"""Patches that make Triton's interpreter faster, and closer to a GPU.

- The interpreter replaces all of Triton's operators by numpy's on each call of a device function
  (tl.max, for example), which takes longer than the function. Here they are replaced once: a
  process with TRITON_INTERPRET=1 compiles nothing.
- The interpreter converts float32 to bfloat16 by truncation; a GPU rounds to nearest.
"""

from __future__ import annotations

import importlib.util
import inspect
import os
from typing import Any

import numpy as np


class _Once:
    """In place of the interpreter's `_patch_lang`: replaces operators once per set of modules."""

    def __init__(self, replace: Any, modules: tuple[Any, ...]) -> None:
        self._replace = replace
        self._modules = modules
        self._done: set[frozenset[str]] = set()

    def __call__(self, function: Any) -> _Once:
        seen = [each for each in function.__globals__.values() if inspect.ismodule(each)]
        names = frozenset(each.__name__ for each in seen if each in self._modules)
        if names not in self._done:
            self._done.add(names)
            self._replace(function)
        return self

    def restore(self) -> None:
        """Does nothing: operators stay replaced."""


if os.environ.get("TRITON_INTERPRET") == "1" and importlib.util.find_spec("triton") is not None:
    import triton.language as tl
    from triton.runtime import interpreter

    convert = interpreter._convert_float

    def rounded(values: Any, given: Any, wanted: Any, mode: Any) -> Any:
        """`_convert_float`, but float32 to bfloat16 rounds to nearest, ties to even."""
        if given != tl.float32 or wanted != tl.bfloat16:
            return convert(values, given, wanted, mode)
        bits = np.ascontiguousarray(values).view(np.uint32)
        return ((bits + ((bits >> 16) & 1) + 0x7FFF) >> 16).astype(np.uint16)

    interpreter._convert_float = rounded
    interpreter._patch_lang = _Once(interpreter._patch_lang, (tl, tl.core))
