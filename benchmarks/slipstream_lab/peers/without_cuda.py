"""Lets SGLang be imported where there is no CUDA.

Packages that need CUDA, or that its CPU-only parts import and never use, get a stand-in; where one
is installed, it is imported as always. No stand-in is ever timed: `asked_for` lists the packages
that were used while importing.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import sys
import types
from typing import Any
from unittest.mock import MagicMock

_PACKAGES = frozenset(
    (
        *("av", "blobfile", "datasets", "decord", "deep_gemm", "flashinfer", "kernels"),
        *("modelscope", "outlines", "pynvml", "quack", "sgl_kernel", "soundfile", "tilelang"),
        *("timm", "torch_memory_saver", "torchaudio", "torchcodec", "torchvision", "triton"),
    )
)

asked_for: set[str] = set()
"""The packages of which something was used while importing."""


class _StandIn(types.ModuleType):
    __path__: Any = ()

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        asked_for.add(self.__name__.partition(".")[0])
        value = MagicMock(name=name)
        setattr(self, name, value)
        return value


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def find_spec(
        self, name: str, path: object = None, target: object = None
    ) -> importlib.machinery.ModuleSpec | None:
        del path, target
        if name.partition(".")[0] not in _PACKAGES:
            return None
        return importlib.machinery.ModuleSpec(name, self, is_package=True)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        return _StandIn(spec.name)

    def exec_module(self, module: types.ModuleType) -> None:
        """There is nothing to run."""


def install() -> None:
    """From now on; what is installed comes first."""
    sys.meta_path.append(_Finder())
