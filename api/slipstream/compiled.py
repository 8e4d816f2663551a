"""The package's C, whose signatures are in `_native.pyi`."""

import slipstream_ipc  # noqa: F401 -- first: in a clone it compiles what has changed
from slipstream._native import (
    ColumnGetter,
    DeltaMaker,
    DeltaRelay,
    EntryObjects,
    SocketWriter,
    add_received_ids,
    chat_tails,
    completion_tails,
    ends_of,
    find_rows,
    known_depths,
    prepare_delta_relay,
    remember_chain,
    rows_are_at,
    write_texts,
)

__all__ = [
    "ColumnGetter",
    "DeltaMaker",
    "DeltaRelay",
    "EntryObjects",
    "SocketWriter",
    "add_received_ids",
    "chat_tails",
    "completion_tails",
    "ends_of",
    "find_rows",
    "known_depths",
    "prepare_delta_relay",
    "remember_chain",
    "rows_are_at",
    "write_texts",
]
