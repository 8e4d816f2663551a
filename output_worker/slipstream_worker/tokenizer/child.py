"""Starts a tokenizer process."""

from __future__ import annotations

import importlib
import sys

import msgspec

from slipstream_ipc.child import ChildProcess, start_own_process

_MODULE = "slipstream_worker.tokenizer.process"


def import_tokenizer_process(*, with_torch: bool = True) -> None:
    """Import what the process needs, so that it may be forked. Takes a second where transformers is
    not imported. with_torch: transformers may import it, and will use it in the process.
    """
    process = importlib.import_module("slipstream_worker.tokenizer.process")
    if not with_torch:
        process.do_without_torch()
    process.import_libraries()
    if not with_torch:
        del sys.modules["torch"]  # which was barred


def start_tokenizer_process(config: dict[str, object], note_fd: int, name: str) -> ChildProcess:
    """A new process, which `top` shows as `name`. config: the fields of a TokenizerConfig but for
    note_fd. Raises: OSError.
    """
    encoded = msgspec.json.encode({**config, "note_fd": note_fd})
    return start_own_process(_MODULE, encoded, name, descriptors=(note_fd,))
