"""The compiled token table as data, and its file in the cache.

Owns: `TokenTable` (token id -> bytes, and which ids are special), and how it is written to disk
and read back.

Does not know: tokenizers (`compiler` makes the tables), text, streams. It imports msgspec,
the ground floor and the standard library alone: a worker that is born again waits for this module.

Rules:
- A file is its header line, a checksum of the body, the body (msgpack). The header carries
  FORMAT_VERSION: whoever adds a mode or a field raises it, and older files count as foreign.
- A file appears whole or not at all (`whole_file`).
- What `load_table` returns is what `save_table` got. For a reader of the cache a foreign or broken
  file is a missing one: catch `(FileNotFoundError, TableFileError)` and compile anew.
"""

from __future__ import annotations

from hashlib import blake2b
from pathlib import Path
from typing import Literal

import msgspec

from slipstream_ipc.atomic_file import write_atomically

__all__ = [
    "FORMAT_VERSION",
    "TableFileError",
    "TokenTable",
    "cache_path",
    "load_table",
    "save_table",
]

FORMAT_VERSION = 3

_HEADER = b"slipstream token table %d\n" % FORMAT_VERSION
_CHECKSUM_BYTES = 16


class TableFileError(ValueError):
    """The file is no token table of this format version, or it is damaged."""


class TokenTable(msgspec.Struct, frozen=True, gc=False):
    """What each token id stands for, and how the pieces of a sequence become its text (`mode`).

    "bytelevel": the text is the UTF-8 decoding of the pieces joined, with one U+FFFD for each byte
    or run of bytes that is the beginning of no character, or nothing where `errors` says so. The
    other fields with a default are not used.

    "text": the text is the pieces joined. Each is UTF-8 by itself, but for those of `byte_ids`,
    which are one byte each: where such tokens follow each other they spell characters, with one
    U+FFFD for each byte that belongs to none.
    """

    mode: Literal["bytelevel", "text"]
    pieces: tuple[bytes | None, ...]  # [vocab_size]; None: no token has this id
    special: tuple[int, ...]  # ids that skip_special_tokens drops, ascending
    byte_ids: tuple[int, ...] = ()  # ascending
    first_pieces: tuple[bytes | None, ...] = ()  # [vocab_size], of a sequence's first; () the same
    last_pieces: tuple[bytes | None, ...] = ()  # [vocab_size], of a sequence's last; () the same
    errors: Literal["replace", "ignore"] = "replace"  # what becomes of bytes of no character
    num_stripped: int = 0  # blanks at the beginning of a text that are cut, at most

    @property
    def vocab_size(self) -> int:
        """One more than the largest token id."""
        return len(self.pieces)


def cache_path(cache_dir: Path, tokenizer_json: bytes) -> Path:
    """Where the table of this tokenizer.json lies: one file for each content and format version."""
    digest = blake2b(tokenizer_json, digest_size=_CHECKSUM_BYTES).hexdigest()
    return cache_dir / f"token-table-v{FORMAT_VERSION}-{digest}.msgpack"


def save_table(path: Path, table: TokenTable) -> None:
    """Write `table` to `path`, in one move; makes the folder. Raises OSError."""
    body = msgspec.msgpack.encode(table)
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(path, _HEADER + _checksum(body) + body)


def load_table(path: Path) -> TokenTable:
    """Read the table at `path`. Raises OSError, or TableFileError for a foreign or damaged file."""
    content = path.read_bytes()
    if not content.startswith(_HEADER):
        raise TableFileError(f"{path} is no token table of format version {FORMAT_VERSION}")
    body_at = len(_HEADER) + _CHECKSUM_BYTES
    checksum, body = content[len(_HEADER) : body_at], content[body_at:]
    if checksum != _checksum(body):
        raise TableFileError(f"{path} is damaged: its checksum does not match; delete it")
    try:
        return msgspec.msgpack.decode(body, type=TokenTable)
    except msgspec.DecodeError as error:
        raise TableFileError(f"{path} holds no token table: {error}") from error


def _checksum(body: bytes) -> bytes:
    return blake2b(body, digest_size=_CHECKSUM_BYTES).digest()
