"""The names of the adapters that a core serves, in the stack's folder for its successor.

The core writes them before a change is answered, so what was answered outlives core and worker. The
file is of this stack alone: the core of another one, in the same folder later, does not read it.
"""

from __future__ import annotations

import logging
from contextlib import suppress
from pathlib import Path

import msgspec
from msgspec import Struct

from slipstream_ipc.atomic_file import write_atomically
from slipstream_ipc.messages import AdapterRecord, AdapterRef

_NAME = "adapters"

logger = logging.getLogger(__name__)


class AdapterNames(Struct, frozen=True):
    """served: by name. retired: forgotten or replaced, while streams have them. done: operations
    that were carried out, the latest last. records: the last change of each name.
    """

    served: tuple[AdapterRef, ...] = ()
    retired: tuple[AdapterRef, ...] = ()
    done: tuple[bytes, ...] = ()
    records: tuple[AdapterRecord, ...] = ()


def read_names(directory: str | None, *, has_predecessor: bool) -> AdapterNames | None:
    """The names that the last core left; None: there were no changes, or there was no core.

    directory: the stack's; None: it has none.
    """
    if directory is None:
        return None
    path = Path(directory) / _NAME
    if not has_predecessor:
        with suppress(OSError):
            path.unlink()
        return None
    try:
        return msgspec.json.decode(path.read_bytes(), type=AdapterNames)
    except FileNotFoundError:
        return None
    except (OSError, msgspec.MsgspecError) as error:
        logger.error("cannot read which adapters were loaded: %s", error)
        return None


def write_names(directory: str | None, names: AdapterNames) -> None:
    """Leave the names for the next core. Raises OSError."""
    if directory is not None:
        # not for another start of the machine: the stack does not outlive it
        write_atomically(Path(directory) / _NAME, msgspec.json.encode(names), is_synced=False)
