"""The compiled token table, and its file format in the cache.

Imports only msgspec, slipstream_ipc and the standard library: a restarting worker waits for this
module.

- A file is a header line, a checksum of the body, and the body (msgpack). The header has
  FORMAT_VERSION: increase it with every new mode or field; files of other versions are rejected.
- A file appears complete or not at all (`slipstream_ipc.atomic_file`).
- `load_table` returns exactly what `save_table` was given. Readers of the cache treat a foreign or
  damaged file as a missing one: they catch `(OSError, TableFileError)` and compile again.
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
    """The file is not a token table of this format version, or it is damaged."""


class TokenTable(msgspec.Struct, frozen=True, gc=False):
    """The piece of each token id, and the way in which a sequence of pieces becomes text
    (`mode`).

    "bytelevel": the text is the UTF-8 decoding of the joined pieces. Each incomplete character, and
    each byte that begins none, becomes one U+FFFD, or nothing if `errors` is "ignore". The other
    optional fields are not used.

    "text": the text is the joined pieces. Each is valid UTF-8, except those of `byte_ids`, which
    are one byte each: consecutive ones spell characters, with one U+FFFD for each byte that belongs
    to none.
    """

    mode: Literal["bytelevel", "text"]
    pieces: tuple[bytes | None, ...]  # [vocab_size]; None: no token has this id
    special: tuple[int, ...]  # ids that skip_special_tokens drops, ascending
    byte_ids: tuple[int, ...] = ()  # ascending
    first_pieces: tuple[bytes | None, ...] = ()  # [vocab_size], for a first token; (): the same
    last_pieces: tuple[bytes | None, ...] = ()  # [vocab_size], for a last token; (): the same
    errors: Literal["replace", "ignore"] = "replace"  # for bytes of no character
    num_stripped: int = 0  # maximum number of blanks cut from the start of a text

    @property
    def vocab_size(self) -> int:
        """One more than the largest token id."""
        return len(self.pieces)


def cache_path(cache_dir: Path, tokenizer_json: bytes) -> Path:
    """The path of the table of this tokenizer.json: one file per content and format version."""
    digest = blake2b(tokenizer_json, digest_size=_CHECKSUM_BYTES).hexdigest()
    return cache_dir / f"token-table-v{FORMAT_VERSION}-{digest}.msgpack"


def save_table(path: Path, table: TokenTable) -> None:
    """Write `table` to `path` atomically, creating the folder. Raises OSError."""
    body = msgspec.msgpack.encode(table)
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(path, _HEADER + _checksum(body) + body)


def load_table(path: Path) -> TokenTable:
    """Read the table at `path`. Raises OSError, or TableFileError for a foreign or damaged file."""
    content = path.read_bytes()
    if not content.startswith(_HEADER):
        raise TableFileError(f"{path} is not a token table of format version {FORMAT_VERSION}")
    body_at = len(_HEADER) + _CHECKSUM_BYTES
    checksum, body = content[len(_HEADER) : body_at], content[body_at:]
    if checksum != _checksum(body):
        raise TableFileError(f"{path} is damaged: its checksum does not match; delete it")
    try:
        return msgspec.msgpack.decode(body, type=TokenTable)
    except msgspec.DecodeError as error:
        raise TableFileError(f"{path} is not a valid token table: {error}") from error


def _checksum(body: bytes) -> bytes:
    return blake2b(body, digest_size=_CHECKSUM_BYTES).digest()
