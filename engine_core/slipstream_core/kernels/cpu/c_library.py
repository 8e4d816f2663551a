"""The C kernels' library, compiled for this machine."""

from __future__ import annotations

import functools
from pathlib import Path

from slipstream_ipc.native.compiler import CLibrary, compiled

_HEADERS = tuple(
    map(
        Path(__file__).with_name,
        ("activations.h", "coded.h", "kernels.h", "team.h", "vectors.h"),
    )
)
_SOURCES = tuple(
    map(
        Path(__file__).with_name,
        (
            "adapters.c",
            "coded.c",
            "experts.c",
            "kernels.c",
            "mixing.c",
            "products.c",
            "program.c",
            "team.c",
        ),
    )
)
_FLAGS = ("-fno-math-errno", "-ffp-contract=fast", "-pthread")


@functools.cache
def library() -> Path | None:
    """The compiled library, or None if it cannot be made; tried once per process."""
    return compiled(CLibrary("kernels", _SOURCES, _HEADERS, _FLAGS, instead="torch"))
