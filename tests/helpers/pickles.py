"""Pickles that leave a trace when they are loaded, in the encodings that have been loaded in
practice: bare, within msgpack, as vLLM's extension types, by jsonpickle, in numpy's arrays.
"""

from __future__ import annotations

import os
import pickle
from collections.abc import Iterator
from pathlib import Path

import msgspec
import numpy as np


class Bomb:
    """Creates a folder when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def __reduce__(self) -> tuple[object, ...]:
        return os.mkdir, (str(self._path),)


def payloads(path: Path) -> Iterator[bytes]:
    """Messages with a pickle that creates a folder at `path` when it is loaded."""
    for protocol in range(pickle.HIGHEST_PROTOCOL + 1):
        yield pickle.dumps(Bomb(path), protocol)
    bomb = pickle.dumps(Bomb(path))
    encode = msgspec.msgpack.encode
    yield encode(bomb)
    yield encode([1, 1, 0, bomb])  # as a frame's body
    yield encode([1, 1, 0, [10, 0, b"i" * 16, bomb]])  # as a field of a body: a Submit's params
    yield encode(msgspec.msgpack.Ext(1, bomb))  # as vLLM wraps types unknown to msgpack
    yield encode([1, 1, 0, msgspec.msgpack.Ext(2, bomb)])
    yield encode([1, 1, 0, {"py/reduce": ["os.mkdir", str(path)]}])
    yield np.array([Bomb(path)], object).dumps()
