"""Pickles that would be felt if anybody loaded them, in every form in which a peer once did."""

from __future__ import annotations

import os
import pickle
from collections.abc import Iterator
from pathlib import Path

import msgspec
import numpy as np


class Bomb:
    """Makes a folder wherever it is unpickled."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def __reduce__(self) -> tuple[object, ...]:
        return os.mkdir, (str(self._path),)


def payloads(path: Path) -> Iterator[bytes]:
    """Messages; whoever loads the pickle in one of them makes a folder at `path`."""
    for protocol in range(pickle.HIGHEST_PROTOCOL + 1):
        yield pickle.dumps(Bomb(path), protocol)
    bomb = pickle.dumps(Bomb(path))
    encode = msgspec.msgpack.encode
    yield encode(bomb)
    yield encode([1, 1, 0, bomb])  # as a frame's body
    yield encode([1, 1, 0, [10, 0, b"i" * 16, bomb]])  # as a field of one: a Submit's params
    yield encode(msgspec.msgpack.Ext(1, bomb))  # as vLLM wraps what msgpack does not know
    yield encode([1, 1, 0, msgspec.msgpack.Ext(2, bomb)])
    yield encode([1, 1, 0, {"py/reduce": ["os.mkdir", str(path)]}])
    yield np.array([Bomb(path)], object).dumps()
