"""Loads C sources as Python extension modules, which are the fast way beside a reference in Python.

An extension is optional: without a compiler or Python's headers, and where the environment variable
SLIPSTREAM_PURE_PYTHON is set, there is none, and the reference runs.
"""

from __future__ import annotations

import functools
import importlib.machinery
import importlib.util
import logging
import os
import sysconfig
from pathlib import Path
from types import ModuleType

from slipstream_ipc.native.compiler import CLibrary, compiled

logger = logging.getLogger(__name__)

PURE_PYTHON = "SLIPSTREAM_PURE_PYTHON"
IPC_HEADERS = tuple(sorted(Path(__file__).parents[1].rglob("*.h")))


@functools.cache
def load_extension(name: str, source: Path, headers: tuple[Path, ...] = ()) -> ModuleType | None:
    """The module `name` that `source` defines (`PyInit_name`), or None if there is none; tried once
    per process. headers: files that it includes by name.
    """
    if os.environ.get(PURE_PYTHON):
        return None
    python = Path(sysconfig.get_path("include"))
    if not (python / "Python.h").exists():
        logger.info("the C extension %s is left out: Python's headers are not installed", name)
        return None
    abi = str(sysconfig.get_config_var("SOABI"))
    path = compiled(CLibrary(name, (source,), headers, ("-Wall", "-Wextra"), python, abi))
    if path is None:
        return None
    loader = importlib.machinery.ExtensionFileLoader(name, str(path))
    spec = importlib.util.spec_from_file_location(name, path, loader=loader)
    assert spec is not None
    try:
        module = importlib.util.module_from_spec(spec)
        loader.exec_module(module)
    except ImportError as error:
        logger.warning("the C extension %s cannot be loaded: %s", name, error)
        return None
    return module
