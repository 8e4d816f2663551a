"""The files of a trace: where FILE may be, and the parts that processes write beside it."""

from __future__ import annotations

import os
from pathlib import Path

from slipstream.errors import wrong_option
from slipstream_ipc.telemetry.spans import PART_SUFFIX


def checked_trace(trace: str | None) -> str | None:
    """The file's absolute path. Raises: BadRequestError where it could not be written."""
    if trace is None:
        return None
    file = Path(trace).expanduser().absolute()
    if not trace or file.is_dir() or not os.access(file.parent, os.W_OK | os.X_OK):
        allowed = "a file in a folder that exists and can be written to"
        raise wrong_option("trace", trace, allowed)
    return str(file)


def discard_parts(trace: str) -> None:
    """Delete the parts of a killed stack, which would be taken for those of the next one."""
    file = Path(trace)
    for path in [*part_paths(file), *part_paths(file.with_name(f".{file.name}"))]:
        path.unlink(missing_ok=True)


def part_paths(file: Path) -> list[Path]:
    """The parts beside `file`. Parts whose name begins with a dot are unfinished."""
    return sorted(
        path
        for path in file.parent.iterdir()
        if path.name.startswith(f"{file.name}.") and path.name.endswith(PART_SUFFIX)
    )
