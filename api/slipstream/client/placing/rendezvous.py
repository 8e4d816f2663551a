"""Rendezvous hashing: which members a key belongs to, the same for all that hash it.

Thaler and Ravishankar, 1996: each member's salt and the key are hashed together, and the highest
hash wins. Without a member, the keys that were its own go to their next ones, and no other moves.
"""

from __future__ import annotations

import numpy as np

from slipstream_ipc.arrays import UInt64s


def mix64(values: UInt64s) -> UInt64s:
    """A new array of hashes: the finalizer of SplitMix64, in which each bit depends on all bits."""
    mixed = values + np.uint64(0x9E3779B97F4A7C15)
    mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return mixed ^ (mixed >> np.uint64(31))


def homes(key: int, salts: UInt64s, num: int) -> list[int]:
    """Indices of the `num` members with the highest hashes of `key`, the highest first; fewer if
    there are fewer.

    salts: uint64 [members], different ones.
    """
    hashes = mix64(salts ^ np.uint64(key))
    found: list[int] = hashes.argsort()[: -num - 1 : -1].tolist()
    return found
