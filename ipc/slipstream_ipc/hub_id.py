"""Hub ids with a revision, as processes of a stack name them to each other: `NAME@REVISION`."""

from __future__ import annotations

_AT = "@"  # in no hub id


def with_revision(name: str, revision: str | None) -> str:
    """A hub id as it is handed on."""
    return name if revision is None else f"{name}{_AT}{revision}"


def split_revision(name: str) -> tuple[str, str | None]:
    """A hub id and its revision; a folder, and a hub id without one, as they are."""
    if name.startswith(("/", ".", "~")) or ":" in name.partition(_AT)[0]:
        return name, None
    name, _, revision = name.partition(_AT)
    return name, revision or None
