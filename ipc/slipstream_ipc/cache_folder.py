"""The location of a user's caches."""

from __future__ import annotations

import os
from pathlib import Path

__all__ = ["user_cache"]


def user_cache() -> Path:
    """Slipstream's folder in the user's cache, which need not exist. Raises: RuntimeError for a
    user without a home.
    """
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "slipstream"
