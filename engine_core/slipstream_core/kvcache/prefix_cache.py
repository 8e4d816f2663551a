"""Blocks found again by what they hold: the prefix cache.

Owns: the names of full blocks, which block holds what has a name, the chain of names of each
request, and how much was looked for and found. The blocks themselves are the pool's.

Does not know: when steps run, who is scheduled; which tokens are computed it is told.

Rules:
- A block's name is blake2b of the name of the block before it and its own tokens (u32, little
  endian), so it stands for everything up to its end; before the first block stands a digest of the
  model's and the tenant's salt. The same in every process and on every machine. (vLLM's and
  SGLang's caches chain in the same way.)
- Only full blocks have names. A name belongs to one block at a time: a second block with the same
  content has none, and is free for anything when it is released.
- A block is registered when the step that fills it is planned, if its tokens are on the host by
  then: steps run in order, and every layer writes its keys before it attends, so even a row of the
  same step may read it. Blocks of sampled tokens are registered when their request gives them back.
- A block that was handed out to somebody else loses its name lazily: the pool says that its content
  is not kept, and the name is taken off when the block gets the next one. So there are never more
  names than blocks.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from hashlib import blake2b

import numpy as np
import numpy.typing as npt

from slipstream_core.kvcache.block_pool import BlockPool

Int32s = npt.NDArray[np.int32]
UInt32s = npt.NDArray[np.uint32]

_DIGEST_BYTES = 16
_NO_BLOCKS: Int32s = np.empty(0, np.int32)


def root_digest(model_salt: str, cache_salt: str) -> bytes:
    """What stands before the first block of every request of this model and tenant."""
    parts = [part.encode("utf-8", "surrogatepass") for part in (model_salt, cache_salt)]
    framed = b"".join(len(part).to_bytes(8, "little") + part for part in parts)
    return blake2b(framed, digest_size=_DIGEST_BYTES).digest()


def next_digest(before: bytes, block_tokens: bytes) -> bytes:
    """The name of a block: `before` is that of the block before it, or the root."""
    return blake2b(before + block_tokens, digest_size=_DIGEST_BYTES).digest()


class PrefixCache:
    """Names of the blocks of `pool`; requests by their rows."""

    def __init__(self, pool: BlockPool, block_size: int, model_salt: str = "") -> None:
        self._pool = pool
        self._block_bytes = 4 * block_size
        self._model_salt = model_salt
        # by row: the root, and the names of its full blocks so far; they outlive preemptions
        self._chains: dict[int, list[bytes]] = {}
        self._block_of: dict[bytes, int] = {}
        self._name_of: list[bytes | None] = [None] * pool.num_blocks
        self.num_query_tokens = 0  # of requests that were admitted
        self.num_hit_tokens = 0  # and of those what was in the cache

    def open(self, row: int, cache_salt: str) -> None:
        """A request begins."""
        self._chains[row] = [root_digest(self._model_salt, cache_salt)]

    def close(self, row: int) -> None:
        """A request is gone; its blocks keep their names."""
        del self._chains[row]

    def num_named(self, row: int) -> int:
        """How many of the request's blocks, from its first on, have been given a digest."""
        return len(self._chains[row]) - 1

    def extend(self, row: int, token_ids: UInt32s) -> None:
        """The tokens behind the blocks that have a digest: whole blocks of them, in order."""
        chain = self._chains[row]
        data = token_ids.astype("<u4", copy=False).tobytes()
        assert len(data) % self._block_bytes == 0, "only full blocks have names"
        digest = chain[-1]
        for start in range(0, len(data), self._block_bytes):
            digest = next_digest(digest, data[start : start + self._block_bytes])
            chain.append(digest)

    def lookup(self, row: int, max_blocks: int, *, start: int = 0) -> Int32s:
        """The blocks that hold the request's first tokens, as many as there are, [n].

        They are to be shared before anything is allocated. At most `max_blocks`, less the first
        `start`, which are left out.
        """
        blocks: list[int] = []
        block_of, name_of, pool = self._block_of, self._name_of, self._pool
        for digest in self._chains[row][1 + start : 1 + max_blocks]:
            block = block_of.get(digest)
            if block is None or name_of[block] != digest or not pool.is_kept(block):
                break
            blocks.append(block)
        return np.array(blocks, np.int32) if blocks else _NO_BLOCKS

    def register(self, row: int, start: int, blocks: Int32s) -> None:
        """`blocks` are the request's from number `start` on, and filled; digests are there."""
        self.register_all([(row, start, blocks.tolist())])

    def register_all(self, filled: Iterable[tuple[int, int, Sequence[int]]]) -> None:
        """The same for many requests: (row, start, blocks) of each."""
        blocks: list[int] = []
        digests: list[bytes] = []
        for row, start, some in filled:
            blocks += some
            digests += self._chains[row][start + 1 : start + 1 + len(some)]
        self._name(blocks, digests)

    def forget(self, blocks: Int32s) -> None:
        """These blocks, all different, do not hold what their names say."""
        for block in blocks.tolist():
            self._take_name(block)
        self._pool.forget(blocks)

    def reset(self) -> None:
        """Forget what every block holds. Who runs goes on with what he has."""
        self._block_of.clear()
        self._name_of = [None] * self._pool.num_blocks
        self._pool.forget_all()

    def count(self, num_tokens: int, num_hits: int) -> None:
        """A request of so many tokens was admitted; so many of them were found."""
        self.num_query_tokens += num_tokens
        self.num_hit_tokens += num_hits

    def _name(self, blocks: Sequence[int], digests: Sequence[bytes]) -> None:
        """Give each block its name, unless another one has it by right."""
        block_of, name_of = self._block_of, self._name_of
        named: dict[int, None] = {}
        for block, digest in zip(blocks, digests, strict=True):
            if digest in block_of:
                other = block_of[digest]
                if name_of[other] == digest and (other in named or self._pool.is_kept(other)):
                    continue
            if name_of[block] is not None:
                self._take_name(block)
            block_of[digest] = block
            name_of[block] = digest
            named[block] = None
        if named:
            self._pool.keep(np.array(list(named), np.int32))

    def _take_name(self, block: int) -> None:
        name = self._name_of[block]
        if name is not None:
            self._name_of[block] = None
            if self._block_of.get(name) == block:
                del self._block_of[name]
