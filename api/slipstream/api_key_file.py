"""Files of API keys, one on each line."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from slipstream.errors import wrong_option
from slipstream_ipc.secret_files import read_secret

ALLOWED = "printable ASCII without spaces, not empty"


class KeyFiles:
    """The files of a server's keys, of those among them whose priority counts, and of those that
    may change adapters; None: none.
    """

    def __init__(
        self, api_keys: str | None, priority_keys: str | None, lora_keys: str | None = None
    ) -> None:
        self.api_keys = None if api_keys is None else os.path.abspath(api_keys)
        self.priority_keys = None if priority_keys is None else os.path.abspath(priority_keys)
        self.lora_keys = None if lora_keys is None else os.path.abspath(lora_keys)
        self._as_given = api_keys, priority_keys, lora_keys

    @property
    def paths(self) -> tuple[str, ...]:
        """The paths that are given."""
        paths = self.api_keys, self.priority_keys, self.lora_keys
        return tuple(path for path in paths if path is not None)

    def read(
        self, listed: Sequence[str]
    ) -> tuple[tuple[str, ...], tuple[str, ...], tuple[str, ...]]:
        """All keys, those whose priority counts, and those that may change adapters. listed: keys
        that are in no file.

        Raises: BadRequestError, without a key.
        """
        api_keys, priority_keys, lora_keys = self._as_given
        keys = tuple(listed)
        if api_keys is not None:
            keys += _keys_in("api_key_file", api_keys)
        first = _keys_among("priority_key_file", priority_keys, keys)
        return keys, first, _keys_among("lora_key_file", lora_keys, keys)


def _keys_among(option: str, path: str | None, keys: Sequence[str]) -> tuple[str, ...]:
    """The keys in a file, if one is given, which are among `keys`. Raises: BadRequestError."""
    if path is None:
        return ()
    found = _keys_in(option, path)
    if not set(found).issubset(keys):
        raise wrong_option(option, path, "keys that are API keys of this server too")
    return found


def _keys_in(option: str, path: str) -> tuple[str, ...]:
    """The keys in a file. Raises: BadRequestError, without a key."""
    try:
        content = read_secret(Path(path))
    except OSError as error:
        allowed = f"a file that can be read ({error.strerror or error})"
        raise wrong_option(option, path, allowed) from None
    lines = content.decode("ascii", "replace").splitlines()
    for number, line in enumerate(lines, start=1):
        if line.strip() and not is_key(line):
            raise wrong_option(option, path, f"a key on each line: {ALLOWED} (line {number})")
    keys = tuple(line for line in lines if line.strip())
    if not keys:
        raise wrong_option(option, path, "a file with at least one key")
    return keys


def is_key(text: str) -> bool:
    """Return True if the text can be a key."""
    return bool(text) and text.isascii() and text.isprintable() and " " not in text
