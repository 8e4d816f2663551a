"""Where a server is found, and how its addresses are written.

Owns: the default runtime directory, the names in it that clients use, the form of HTTP addresses.
Does not know: whether a server runs there.
"""

from __future__ import annotations

import os
from pathlib import Path

ADDRESS_VARIABLE = "SLIPSTREAM_ADDRESS"
_SERVING = "serving on "


def default_runtime_dir() -> Path:
    """The folder of a stack that was given none: one for each user of the machine."""
    base = os.environ.get("XDG_RUNTIME_DIR") or "/tmp"  # noqa: S108  (no user's own: see the uid)
    return Path(base) / f"slipstream-{os.getuid()}" / "default"


def client_address(runtime_dir: Path) -> str:
    """The address that a stack in `runtime_dir` gives its clients."""
    return f"ipc://{runtime_dir}/client.sock"


def http_address(host: str, port: int) -> str:
    """Where an HTTP front on `host` and `port` is found, as the start of a URL."""
    shown = f"[{host}]" if ":" in host else host
    return f"http://{shown}:{port}"


def http_detail(host: str, port: int) -> str:
    """What the front reports when it is ready."""
    return f"{_SERVING}{http_address(host, port)}"


def http_address_in(detail: str) -> str:
    """The address in what the front reports."""
    return detail.removeprefix(_SERVING)


def default_address() -> str:
    """The address a client takes by itself: $SLIPSTREAM_ADDRESS, else the default stack's."""
    return os.environ.get(ADDRESS_VARIABLE) or client_address(default_runtime_dir())
