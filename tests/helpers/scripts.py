"""Programs of `scripts/`, as modules."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

_SCRIPTS = Path(__file__).resolve().parents[2] / "scripts"


def script_module(name: str) -> ModuleType:
    """The module of `scripts/NAME.py`, executed anew."""
    spec = importlib.util.spec_from_file_location(name, _SCRIPTS / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
