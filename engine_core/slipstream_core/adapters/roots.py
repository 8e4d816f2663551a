"""The folders below which adapters may be loaded while a server runs.

Links are followed first: what counts is where a file really lies, and of an open file, where it was
when it was opened.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from slipstream_core.adapters.adapter_error import AdapterError

_DESCRIPTORS = "/proc/self/fd"


class Roots:
    """The allowed folders. With none, nothing is below them."""

    def __init__(self, folders: Sequence[str]) -> None:
        self._folders = tuple(folders)

    def folder(self, path: str) -> Path:
        """The folder that `path` names, without links. Raises AdapterError where it lies elsewhere:
        whether there is one there is not said.
        """
        try:
            found = os.path.realpath(path)
        except (OSError, ValueError) as error:  # a zero in it, or links in a circle
            raise AdapterError(f"lora_path: got {_shown(path)}: {error}") from None
        if not self._are_above(found):
            raise self._refused(f"lora_path: got {_shown(path)}")
        return Path(found)

    def check_open(self, descriptor: int, path: Path) -> None:
        """Raises AdapterError for an open file that a link led out to. path: as it was opened."""
        try:
            found = os.readlink(f"{_DESCRIPTORS}/{descriptor}")
        except OSError:
            found = os.path.realpath(path)
        if not self._are_above(found):
            raise self._refused(f"{path.name}: a link out of them")

    def _are_above(self, found: str) -> bool:
        return any(
            os.path.commonpath([found, os.path.realpath(each)]) == os.path.realpath(each)
            for each in self._folders
        )

    def _refused(self, what: str) -> AdapterError:
        folders = " or ".join(self._folders) or "none"
        return AdapterError(
            f"{what}, allowed: folders below {folders} (--lora-root); nothing is fetched from "
            "elsewhere",
            "forbidden",
        )


def _shown(path: str) -> str:
    shown = repr(path)
    return shown if len(shown) <= 200 else f"{shown[:197]}..."
