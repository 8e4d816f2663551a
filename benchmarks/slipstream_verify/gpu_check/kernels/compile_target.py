"""Compiling without a card: Triton's compiler needs none, but asks a driver which one it is for.

Triton is imported by the functions that need it.
"""

from __future__ import annotations

import re
import subprocess
from pathlib import Path
from typing import Any


class TargetDriver:
    """As much of a driver as compiling asks for. capability: of the card, 90 for 9.0."""

    def __init__(self, capability: int) -> None:
        self._capability = capability

    def get_current_device(self) -> int:
        """The only device."""
        return 0

    def get_current_stream(self, _device: int) -> int:
        """The only stream."""
        return 0

    def get_current_target(self) -> Any:
        """What to compile for."""
        from triton.backends.compiler import GPUTarget

        return GPUTarget("cuda", self._capability, 32)


def compile_for(capability: int) -> None:
    """Make this process compile for such cards, until it ends; it cannot run anything then."""
    import triton

    triton.runtime.driver.set_active(TargetDriver(capability))


def resources(kernel: Any, folder: Path) -> dict[str, int]:
    """What a compiled kernel takes: a thread's registers and spilled bytes, a program's shared
    memory. `folder` holds its code meanwhile.
    """
    import triton

    cubin = folder / "kernel.cubin"
    cubin.write_bytes(kernel.asm["cubin"])
    tool = triton.knobs.nvidia.cuobjdump.path
    said = subprocess.run(
        [tool, "-res-usage", str(cubin)], check=True, capture_output=True, text=True
    ).stdout
    found = {name.lower(): int(number) for name, number in re.findall(r"(\w+):(\d+)", said)}
    return {
        "registers": found["reg"],
        "spills": found["stack"] + found["local"],
        "shared": kernel.metadata.shared,
    }
