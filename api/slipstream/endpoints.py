"""Where a server is found when nobody says where.

Owns: the default runtime directory and the names in it that clients use. Does not know: whether a
server runs there.
"""

from __future__ import annotations

import os
from pathlib import Path

ADDRESS_VARIABLE = "SLIPSTREAM_ADDRESS"


def default_runtime_dir() -> Path:
    """The folder of a stack that was given none: one for each user of the machine."""
    base = os.environ.get("XDG_RUNTIME_DIR") or "/tmp"  # noqa: S108  (no user's own: see the uid)
    return Path(base) / f"slipstream-{os.getuid()}" / "default"


def client_address(runtime_dir: Path) -> str:
    """The address that a stack in `runtime_dir` gives its clients."""
    return f"ipc://{runtime_dir}/client.sock"


def default_address() -> str:
    """The address a client takes by itself: $SLIPSTREAM_ADDRESS, else the default stack's."""
    return os.environ.get(ADDRESS_VARIABLE) or client_address(default_runtime_dir())
