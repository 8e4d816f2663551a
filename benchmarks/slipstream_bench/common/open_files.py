"""Raises the limit of open files: shells often allow 1024, fewer than a load has connections."""

from __future__ import annotations

import resource

_OPEN_FILES = 65536


def allow_many_files() -> None:
    """Raise this process's limit to the system's maximum, at most 65536."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _OPEN_FILES if hard == resource.RLIM_INFINITY else min(hard, _OPEN_FILES)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
