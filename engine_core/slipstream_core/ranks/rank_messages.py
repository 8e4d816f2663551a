"""The messages between a core and its ranks on other machines, beside plans.

The messages are msgpack. Both ends are of one version: a `Join` of another one is refused, so it
alone, and `Refuse`, keep their form from version to version. A plan is a message of two parts, its
number in 8 bytes and the bytes of `step/buffer`; all others have one part.
"""

from __future__ import annotations

import struct

import msgspec
from msgspec import Struct

from slipstream_core.config import CoreConfig

PLAN_NUMBER = struct.Struct("<q")


class Join(Struct, frozen=True, tag=True):
    """A rank has come. fingerprint: of its model's files, which have to be the core's."""

    version: str
    index: int  # among all ranks
    size: int  # the number of ranks that it knows of
    num_nodes: int
    pid: int
    fingerprint: bytes = b""


class Joined(Struct, frozen=True, tag=True):
    """The rank has its `Assign`."""


class Released(Struct, frozen=True, tag=True):
    """The rank has computed this many plans."""

    num: int


class RankFailed(Struct, frozen=True, tag=True):
    """The rank ends, by itself. error: why no other one would do better; words: its last ones."""

    words: str = ""
    error: str = ""
    is_misconfigured: bool = False


class Assign(Struct, frozen=True, tag=True):
    """All ranks have come: load, and compute. core: the core's settings. meeting: host and port of
    the store at which the ranks' group meets.
    """

    core: CoreConfig
    meeting: tuple[str, int]


class Refuse(Struct, frozen=True, tag=True):
    """The rank is not let in. is_final: nor will it be later."""

    why: str
    is_final: bool = True


FromRank = Join | Joined | Released | RankFailed
ToRank = Assign | Refuse

encode = msgspec.msgpack.encode
decode_from_rank = msgspec.msgpack.Decoder[FromRank](FromRank).decode
decode_to_rank = msgspec.msgpack.Decoder[ToRank](ToRank).decode
