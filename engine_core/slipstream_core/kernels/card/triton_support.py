"""Checks that Triton's kernels can be used on this machine, without importing Triton.

Triton compiles its launcher with a C compiler, against Python's headers, when a kernel is first
used on a machine. If either is missing the first step would fail, so both are looked for
beforehand, in the places where Triton looks (triton.runtime.build), and the log says what to
install.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import sysconfig
from pathlib import Path
from typing import Any

import torch

from slipstream_core.kernels.card.tiles import H100_SHARED_LIMIT


def is_wanted(device: torch.device) -> bool:
    """True if kernels serve this device: a card, or a CPU with Triton's interpreter (tests)."""
    return device.type == "cuda" or os.environ.get("TRITON_INTERPRET") == "1"


def shared_limit(device: torch.device) -> int:
    """Bytes of shared memory that a program may use; an H100's if there is no card."""
    if device.type != "cuda":
        return H100_SHARED_LIMIT
    # missing from torch's stubs
    properties: Any = torch.cuda.get_device_properties(device)
    return int(properties.shared_memory_per_block_optin)


def unready() -> str | None:
    """The missing requirement and how to install it; None if nothing is missing."""
    if importlib.util.find_spec("triton") is None:
        return "Triton is not installed (pip install triton)"
    if os.environ.get("TRITON_INTERPRET") == "1":
        return None  # the interpreter compiles nothing
    named = os.environ.get("CC")
    if named is not None and shutil.which(named) is None:
        return f"Triton needs a C compiler, but there is no {named!r}, which CC names"
    if named is None and shutil.which("gcc") is None and shutil.which("clang") is None:
        return (
            "Triton needs a C compiler, but there is neither gcc nor clang: install one "
            "(apt-get install gcc), or name another in CC"
        )
    scheme = sysconfig.get_default_scheme()
    folder = Path(
        sysconfig.get_paths("posix_prefix" if scheme == "posix_local" else scheme)["include"]
    )
    if not (folder / "Python.h").exists():
        return (
            f"Triton needs Python's headers, but there is no {folder / 'Python.h'}: install them "
            "(apt-get install python3-dev)"
        )
    return None
