"""Keeps transformers from reading all of its models whenever it is imported.

While it is imported, transformers reads 3,300 files to list the names that they export: 0.8 s of
CPU, half of what a tokenizer process takes to start. Here the list is in the user's cache.

- A list belongs to one installation: the file's name depends on the package's RECORD, which pip
  rewrites, and on the folder of models. Without a RECORD, as in a source checkout, nothing is kept.
- Where the cache cannot be used, transformers makes its list as always.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Callable, Sequence
from functools import lru_cache
from hashlib import blake2b
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from pathlib import Path
from types import ModuleType
from typing import Any

import msgspec

from slipstream_ipc.atomic_file import write_atomically
from slipstream_ipc.cache_folder import user_cache

__all__ = ["use_cached_index"]

_MODULE = "transformers.utils.import_utils"  # which makes the list

# for each set of backends: the names that a module exports where they are installed
_Index = dict[frozenset[str], dict[str, set[str]]]
_DECODER = msgspec.json.Decoder(list[tuple[frozenset[str], dict[str, set[str]]]])


def use_cached_index() -> None:
    """Let the import of transformers use the cache. Without effect where that has begun."""
    if _MODULE not in sys.modules and not any(
        isinstance(each, _IndexFinder) for each in sys.meta_path
    ):
        # making the list reads 3,300 files at each import of transformers (decision 013)
        sys.meta_path.insert(0, _IndexFinder())


class _IndexFinder(MetaPathFinder):
    """Finds `_MODULE` as the import system does, once, with another loader."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname != _MODULE:
            return None
        sys.meta_path.remove(self)
        spec = PathFinder.find_spec(fullname, path)
        if spec is not None and type(spec.loader) is SourceFileLoader:
            spec.loader = _IndexLoader(fullname, spec.loader.path)
        return spec


class _IndexLoader(SourceFileLoader):
    def exec_module(self, module: ModuleType) -> None:
        super().exec_module(module)
        made = getattr(module, "define_import_structure", None)
        if made is not None:
            models = Path(self.path).parents[1] / "models"
            vars(module)["define_import_structure"] = _with_cache(made, models)


def _with_cache(made: Callable[..., Any], models: Path) -> Callable[..., Any]:
    """transformers' function, whose result for the folder `models` comes from the cache."""

    @lru_cache
    def define_import_structure(module_path: str | Path, prefix: str | None = None) -> Any:
        if Path(module_path) not in (models, models / "__init__.py"):
            return made(module_path, prefix)
        index = define_models()
        if prefix is None:
            return index
        return {
            backends: {f"{prefix}.{name}": exported for name, exported in modules.items()}
            for backends, modules in index.items()
        }

    @lru_cache
    def define_models() -> _Index:
        path = _index_path(models)
        index = _kept_index(path)
        if index is None:
            index = made(models)
            if path == _index_path(models):  # else it was installed anew meanwhile
                _keep_index(path, index)
        return index

    return define_import_structure


def _index_path(models: Path) -> Path | None:
    """The file of this installation's list; None where no list can be kept."""
    package = models.parent
    records = list(package.parent.glob(f"{package.name}-*.dist-info/RECORD"))
    if len(records) != 1:
        return None
    installed = [str(records[0])]
    for each in (records[0], models):
        status = each.stat()
        installed += [str(status.st_mtime_ns), str(status.st_size)]
    digest = blake2b("\0".join(installed).encode(), digest_size=16).hexdigest()
    with contextlib.suppress(RuntimeError):
        return user_cache() / f"transformers-index-{digest}.json"
    return None


def _kept_index(path: Path | None) -> _Index | None:
    """The list that is in the cache, if there is one, and if it is this user's."""
    with contextlib.suppress(OSError, msgspec.DecodeError):
        if path is not None and path.stat().st_uid == os.getuid():
            return dict(_DECODER.decode(path.read_bytes()))
    return None


def _keep_index(path: Path | None, index: _Index) -> None:
    with contextlib.suppress(OSError):
        if path is not None:
            path.parent.mkdir(parents=True, exist_ok=True)
            write_atomically(path, msgspec.json.encode(list(index.items())))
