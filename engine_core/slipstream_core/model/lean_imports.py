"""Keeps transformers from importing parts of torch that serving never uses.

Decorators and checks of transformers and torch import torch._dynamo, with it torch._inductor, and
torch.distributed.tensor: half of a core's CPU time before it loads its model, and a quarter of its
memory. Operators on the meta device import sympy, for shapes that are symbols: 0.35 s and 38 MB.
Stand-ins take their place: decorators of compilation return the function itself, what is asked of
a shape is answered for numbers, submodules are the real ones, and anything else that is asked of a
stand-in imports the real module instead.

Code from a model's folder may use all of torch, so nothing is left out where that is trusted.
"""

from __future__ import annotations

import importlib
import operator
import sys
from collections.abc import Callable
from functools import partial, reduce
from importlib.machinery import PathFinder
from types import ModuleType
from typing import Any

import torch

_SHAPES = "torch.fx.experimental.symbolic_shapes"


class _Absent(ModuleType):
    """Stands in for a module of torch that has not been imported."""

    def __init__(self, name: str, **attributes: object) -> None:
        super().__init__(name)
        parent, _, last = name.rpartition(".")
        spec = PathFinder.find_spec(name, sys.modules[parent].__path__ if parent else None)
        self.__path__ = list((spec and spec.submodule_search_locations) or ())
        self.__dict__.update(attributes)
        sys.modules[name] = self
        if parent:
            setattr(sys.modules[parent], last, self)

    def __getattr__(self, name: str) -> Any:
        """A submodule, or an attribute of the real module."""
        if name.startswith("__"):
            raise AttributeError(name)
        full_name = f"{self.__name__}.{name}"
        if PathFinder.find_spec(full_name, self.__path__) is not None:
            return importlib.import_module(full_name)
        return getattr(_real(self.__name__), name)


def leave_out_unused() -> None:
    """Put the stand-ins in place; without effect on what is imported already."""
    if "torch._dynamo" not in sys.modules:
        _Absent(
            "torch._dynamo",
            disable=_undecorated,
            allow_in_graph=_same,
            assume_constant_result=_same,
            mark_static_address=_ignored,
            is_compiling=bool,
        )
    if "sympy" not in sys.modules and _SHAPES not in sys.modules:
        importlib.import_module("torch.fx.experimental")
        _Absent("sympy", Basic=_NoSymbol)
        _Absent(_SHAPES, **{name: partial(_of_numbers, name) for name in OF_NUMBERS})
    # as in a torch that is built without it: one process computes a model here
    torch.distributed.is_available = bool  # always False


class _NoSymbol:
    """The class of all expressions, of which there are none before sympy is imported."""


def _equal(left: Any, right: Any) -> bool:
    if isinstance(left, int) and isinstance(right, int):
        return left == right
    return list(left) == list(right)


# functions of `_SHAPES`, for arguments of which none is a symbol
OF_NUMBERS: dict[str, Callable[..., Any]] = {
    "expect_true": bool,
    "guard_or_false": bool,
    "guard_or_true": bool,
    "guard_size_oblivious": bool,
    "statically_known_true": bool,
    "guarding_hint_or_throw": lambda number: number,
    "has_guarding_hint": lambda _number: True,
    "is_nested_int": lambda _number: False,
    "sym_eq": _equal,
    "sym_and": lambda *each: reduce(operator.and_, each),
    "sym_or": lambda *each: reduce(operator.or_, each),
}


def _of_numbers(name: str, *arguments: Any) -> Any:
    """A function's result for numbers; for anything else that of the real one."""
    if all(map(_is_number, arguments)):
        return OF_NUMBERS[name](*arguments)
    return getattr(_real(_SHAPES), name)(*arguments)


def _is_number(given: Any) -> bool:
    """True if `given` is a number or a shape of numbers."""
    kind = type(given)
    if kind is tuple or kind is list or kind is torch.Size:
        return all(type(each) is int for each in given)
    return kind is bool or kind is int


def _real(name: str) -> ModuleType:
    """The module that stands behind its stand-in, from now on in its place."""
    if isinstance(sys.modules.get(name), _Absent):
        del sys.modules[name]
    return importlib.import_module(name)


def _undecorated(function: Callable[..., Any] | None = None, *_: object, **__: object) -> Any:
    """The decorator torch._dynamo.disable, with and without arguments."""
    return _same if function is None else function


def _same(function: Callable[..., Any]) -> Callable[..., Any]:
    return function


def _ignored(*_: object, **__: object) -> None:
    pass
