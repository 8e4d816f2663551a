"""Room for the connections of a load: shells often allow 1024 open files, fewer than it has."""

from __future__ import annotations

import resource

_OPEN_FILES = 65536


def allow_many_files() -> None:
    """This process may have as many open as the system allows, at most 65536."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _OPEN_FILES if hard == resource.RLIM_INFINITY else min(hard, _OPEN_FILES)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
