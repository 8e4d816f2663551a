"""Whether Triton's kernels can be used here: for whom they are meant, what they need and may have.

Owns these questions, and what a failure to compile is called. Imports no Triton.

Triton compiles what launches a kernel with a C compiler, against Python's headers, when a kernel is
first used on a machine. Where either is missing it would fail in the first step; so it is looked
for beforehand, in the places where Triton looks (triton.runtime.build), and the log says what to
install.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import sysconfig
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from slipstream_core.runner.attention.tiles import H100_SHARED_LIMIT
from slipstream_core.runner.load_error import ModelLoadError, brief


def is_wanted(device: torch.device) -> bool:
    """Whether kernels are for this device: a card, or a CPU with Triton's interpreter (tests)."""
    return device.type == "cuda" or os.environ.get("TRITON_INTERPRET") == "1"


def shared_limit(device: torch.device) -> int:
    """Bytes of shared memory that a program may have there; an H100's where no card says it."""
    if device.type != "cuda":
        return H100_SHARED_LIMIT
    # torch's stubs leave it out
    properties: Any = torch.cuda.get_device_properties(device)
    return int(properties.shared_memory_per_block_optin)


def unready() -> str | None:
    """What is missing, and what to do about it; None where everything is there."""
    if importlib.util.find_spec("triton") is None:
        return "Triton is not installed (pip install triton)"
    if os.environ.get("TRITON_INTERPRET") == "1":
        return None  # it compiles nothing
    named = os.environ.get("CC")
    if named is not None and shutil.which(named) is None:
        return f"Triton needs a C compiler, and there is no {named!r}, which the variable CC names"
    if named is None and shutil.which("gcc") is None and shutil.which("clang") is None:
        return (
            "Triton needs a C compiler, and there is no gcc and no clang: install one "
            "(apt-get install gcc), or name another in the variable CC"
        )
    scheme = sysconfig.get_default_scheme()
    folder = Path(
        sysconfig.get_paths("posix_prefix" if scheme == "posix_local" else scheme)["include"]
    )
    if not (folder / "Python.h").exists():
        return (
            f"Triton needs Python's headers, and there is no {folder / 'Python.h'}: install them "
            "(apt-get install python3-dev)"
        )
    return None


@contextmanager
def compiling(model: str, what: str) -> Iterator[None]:
    """Whatever fails here is a ModelLoadError; memory that is short is told by who sizes it."""
    try:
        yield
    except torch.OutOfMemoryError:
        raise
    except Exception as error:
        raise ModelLoadError(
            model,
            f"its {what} kernels cannot be compiled for this card ({brief(error)}); set native "
            "to false to do without them, slowly",
        ) from error
