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
# For AMD's processors GCC rounds products before it adds them where a loop has a single chain of
# sums, and not where the same loop has several: a row alone would have other bits than in a batch.
_FLAGS = ("-fno-math-errno", "-ffp-contract=fast", "--param=avoid-fma-max-bits=0", "-pthread")


@functools.cache
def library() -> Path | None:
    """The compiled library, or None if it cannot be made; tried once per process."""
    return compiled(CLibrary("kernels", _SOURCES, _HEADERS, _FLAGS, instead="torch"))
