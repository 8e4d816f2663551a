"""Patches that make Triton's interpreter faster, and closer to a GPU.

- The interpreter replaces all of Triton's operators by numpy's on each call of a device function
  (tl.max, for example), which takes longer than the function. Here they are replaced once: a
  process with TRITON_INTERPRET=1 compiles nothing.
- Names of types, shapes of tensors and numpy's dtypes are made when they are asked for, and once:
  the interpreter makes them for each value, which takes a third of its time.
- The interpreter converts float32 to bfloat16 by truncation; a GPU rounds to nearest.
"""

from __future__ import annotations

import importlib.util
import inspect
import math
import os
from functools import cached_property
from typing import Any

import numpy as np


class _Once:
    """In place of the interpreter's `_patch_lang`: replaces operators once per set of modules."""

    def __init__(self, replace: Any, modules: tuple[Any, ...]) -> None:
        self._replace = replace
        self._modules = modules
        self._done: set[frozenset[str]] = set()
        self._seen: dict[int, Any] = {}  # by its id, the globals of functions

    def __call__(self, function: Any) -> _Once:
        if id(function.__globals__) in self._seen:
            return self
        self._seen[id(function.__globals__)] = function.__globals__
        seen = [each for each in function.__globals__.values() if inspect.ismodule(each)]
        names = frozenset(each.__name__ for each in seen if each in self._modules)
        if names not in self._done:
            self._done.add(names)
            self._replace(function)
        return self

    def restore(self) -> None:
        """Does nothing: operators stay replaced."""


if os.environ.get("TRITON_INTERPRET") == "1" and importlib.util.find_spec("triton") is not None:
    import torch
    import triton.language as tl
    from triton.language.semantic import TritonSemantic
    from triton.runtime import interpreter

    torch.set_num_threads(1)  # threads that wait for one another crawl on a busy machine

    convert = interpreter._convert_float

    def rounded(values: Any, given: Any, wanted: Any, mode: Any) -> Any:
        """`_convert_float`, but float32 to bfloat16 rounds to nearest, ties to even."""
        if given != tl.float32 or wanted != tl.bfloat16:
            return convert(values, given, wanted, mode)
        bits = np.ascontiguousarray(values).view(np.uint32)
        return ((bits + ((bits >> 16) & 1) + 0x7FFF) >> 16).astype(np.uint16)

    def property_of(owner: type, name: str, value: Any) -> None:
        """A property in place of an attribute; the value is kept. It may still be assigned to."""
        found = cached_property(value)
        found.__set_name__(owner, name)
        setattr(owner, name, found)

    def new_block_type(self: Any, element_ty: Any, shape: Any) -> None:
        assert isinstance(shape, list | tl.tuple)
        self.element_ty = element_ty
        self.shape = tl.tuple(tl.core._unwrap_shape(shape))
        if not self.shape:
            raise TypeError("0d block_type is forbidden")
        self.numel = tl.core.validate_block_shape(self.shape)

    def new_tuple_type(self: Any, types: Any, fields: Any = None) -> None:
        self.types = types
        if fields:
            self.fields = fields

    def new_tensor(self: Any, handle: Any, kind: Any) -> None:
        self.handle = handle
        self.type = kind
        self.dtype = kind.scalar

    def new_tuple(self: Any, args: Any, type: Any = None) -> None:  # noqa: A002
        self.values = list(args)
        if type is not None:
            self.type = type if isinstance(type, tl.tuple_type) else tl.tuple_type(type)

    def tuple_name(of: Any) -> str:
        each = zip(of.fields, of.types, strict=False)
        return "[" + ",".join(f"{field}:{kind}" for field, kind in each) + "]"

    def shape_of(of: Any) -> Any:
        shape = of.type.shape if of.type.is_block() else ()
        return tl.tuple([tl.constexpr(each) for each in shape])

    tl.block_type.__init__ = new_block_type
    property_of(tl.block_type, "name", lambda it: f"<{it.shape}, {it.element_ty}>")
    tl.tuple_type.__init__ = new_tuple_type
    property_of(tl.tuple_type, "fields", lambda it: [""] * len(it.types))
    property_of(tl.tuple_type, "name", tuple_name)
    tl.tensor.__init__ = new_tensor
    property_of(tl.tensor, "shape", shape_of)
    property_of(
        tl.tensor, "numel", lambda it: tl.constexpr(math.prod(each.value for each in it.shape))
    )
    tl.tuple.__init__ = new_tuple
    property_of(tl.tuple, "type", lambda it: tl.core._type_for_tuple_values(it.values))

    unwrapped = tl.core._unwrap_if_constexpr
    plain = {int, float, bool, str, type(None), tl.tensor, tl.dtype, tl.block_type}

    def unwrapped_soon(it: Any) -> Any:
        kind = type(it)
        if kind is tl.constexpr:
            return it.value
        return it if kind in plain else unwrapped(it)

    tl.core._unwrap_if_constexpr = unwrapped_soon

    checking = tl.core.load.__code__  # of the wrapper that asks for `_semantic`

    def patch(owner: Any, name: str, member: Any, builder: Any, scope: Any) -> None:
        given = TritonSemantic(builder)
        wrapped = member.__wrapped__ if member.__code__ is checking else member

        def called(*args: Any, _semantic: Any = None, **options: Any) -> Any:
            return wrapped(*args, **options, _semantic=given)

        scope.set_attr(owner, name, called)

    interpreter._patch_attr = patch

    np_dtype = interpreter._get_np_dtype
    np_dtypes: dict[str, Any] = {}

    def np_dtype_once(of: Any) -> Any:
        if isinstance(of, tl.pointer_type):
            return np.dtype(np.uint64)
        if isinstance(of, tl.block_type):
            return np_dtype_once(of.element_ty)
        found = np_dtypes.get(of.name)
        if found is None:
            found = np_dtypes[of.name] = np_dtype(of)
        return found

    interpreter._get_np_dtype = np_dtype_once
    interpreter._convert_float = rounded
    interpreter._patch_lang = _Once(interpreter._patch_lang, (tl, tl.core))
