"""Runs a module of ours with the Python of another environment, whose packages come first.

Of this installation that Python finds our packages, their metadata and `_OURS`, and nothing else:
what both environments have is the other's. It must be of the same version, as our packages have
extensions. The file is run by its path, and imports nothing of ours before they can be found.
"""

from __future__ import annotations

import importlib.util
import json
import os
import runpy
import sys
from collections.abc import Iterable
from importlib.machinery import ModuleSpec, PathFinder
from importlib.metadata import Distribution, DistributionFinder, MetadataPathFinder
from pathlib import Path
from types import ModuleType

STARTED_BY = "SLIPSTREAM_STARTED_BY"
"""The variable with the beginning of the command that a process was started by, as JSON: it starts
its own children so.
"""

# beside our packages: releases that others pin lack what grammars need (decision 025)
_OURS = ("llguidance",)
_PACKAGES = ("slipstream_core", "slipstream_ipc")
_DISTRIBUTIONS = ("slipstream", *_OURS)


def command(python: str, module: str) -> list[str]:
    """The command that runs a module of ours with another Python."""
    return [*_beginning(python), module]


def _beginning(python: str) -> list[str]:
    places: dict[str, str] = {}
    for name in (*_PACKAGES, *_OURS):
        spec = importlib.util.find_spec(name)
        assert spec is not None, f"{name} is installed with us"
        assert spec.origin is not None
        places[name] = str(Path(spec.origin).parent.parent)
    return [python, "-P", str(Path(__file__).absolute()), json.dumps(places)]


class _Finder(DistributionFinder):
    """Finds packages in the folders that are named for them."""

    def __init__(self, places: dict[str, str], metadata: list[str]) -> None:
        self._places = places
        self._metadata = metadata

    def find_spec(
        self, name: str, path: object = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """The module's spec, of one of these packages; what is in them is found by their paths."""
        place = self._places.get(name)
        return None if place is None else PathFinder.find_spec(name, [place])

    def find_distributions(
        self,
        context: DistributionFinder.Context = DistributionFinder.Context(),  # noqa: B008 (its base)
    ) -> Iterable[Distribution]:
        """The metadata of what is ours."""
        if context.name not in _DISTRIBUTIONS:
            return ()
        own = DistributionFinder.Context(name=context.name, path=self._metadata)
        return MetadataPathFinder.find_distributions(own)


def _main() -> None:
    beginning = [sys.executable, *sys.orig_argv[1:4]]
    places, module = json.loads(sys.argv[1]), sys.argv[2]
    # our metadata is beside the packages, or, in a clone, beside those that we depend on
    sys.meta_path.insert(0, _Finder(places, sorted(set(places.values()))))
    os.environ[STARTED_BY] = json.dumps(beginning)
    sys.argv = [module, *sys.argv[3:]]
    runpy.run_module(module, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    _main()
