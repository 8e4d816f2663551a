"""The location of a user's caches."""

from __future__ import annotations

import os
from pathlib import Path

__all__ = ["user_cache"]


def user_cache() -> Path:
    """Slipstream's folder in the user's cache, which need not exist. Raises: RuntimeError for a
    user without a home. A relative $XDG_CACHE_HOME does not count, as its specification says.
    """
    base = os.environ.get("XDG_CACHE_HOME", "")
    return (Path(base) if Path(base).is_absolute() else Path.home() / ".cache") / "slipstream"
