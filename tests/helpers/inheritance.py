"""The state of this process that another one begins with."""

from __future__ import annotations

import os
import resource
from collections.abc import Mapping

from slipstream_ipc.telemetry.logs import LOG_FORMAT_VARIABLE, LOG_LEVEL_VARIABLE

# read by each process when it begins, not by modules; and what torch sets for itself when it first
# needs it
_FREE = (
    "PYTEST_CURRENT_TEST",
    LOG_FORMAT_VARIABLE,
    LOG_LEVEL_VARIABLE,
    "TORCHINDUCTOR_CACHE_DIR",
    "TRITON_CACHE_DIR",
)


def inheritance(environment: Mapping[str, str] = os.environ) -> dict[str, object]:
    """What a process takes over from the one that starts it, apart from descriptors."""
    taken: dict[str, object] = {n: value for n, value in environment.items() if n not in _FREE}
    taken["folder"] = os.getcwd()
    taken["open files"] = resource.getrlimit(resource.RLIMIT_NOFILE)
    taken["niceness"] = os.getpriority(os.PRIO_PROCESS, 0)
    return taken
