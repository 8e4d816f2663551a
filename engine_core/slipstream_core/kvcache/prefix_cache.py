"""The prefix cache: finds full blocks by the digest of their content.

- A block's digest is blake2b of the digest of the block before it and of its own tokens (u32,
  little endian), so it stands for everything up to the block's end. The first block follows a
  digest of the model's and the tenant's salts. Behind its tokens comes what `open` was given for
  blocks with parts of images, whose placeholders are the same for all. Digests are equal in every
  process and on every machine. (vLLM and SGLang chain their blocks in the same way.)
- Only full blocks have digests. A digest belongs to one block at a time: a second block with the
  same content has none, and is free for anything when it is released.
- A block is registered when the step that fills it is planned, if its tokens are on the host by
  then: steps run in order, and every layer writes its keys before it attends, so even a row of the
  same step may read it. Blocks of sampled tokens are registered when their request gives them back.
- A block that was allocated again loses its digest lazily: the pool no longer keeps its content,
  and the digest is removed when the block gets the next one. So there are never more digests than
  blocks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from hashlib import blake2b

import numpy as np

from slipstream_core.kvcache.block_pool import BlockPool
from slipstream_ipc.arrays import Int32s, UInt32s

_DIGEST_BYTES = 16
_U32 = np.dtype("<u4")
_NO_BLOCKS: Int32s = np.empty(0, np.int32)

BlockMarks = Callable[[int, int], Sequence[bytes]]
"""The bytes in which a request's blocks [start, stop) differ besides tokens, for each of them."""


def next_digest(before: bytes, block_tokens: bytes) -> bytes:
    """The digest of a block: `before` is that of the block before it, or the root."""
    return blake2b(before + block_tokens, digest_size=_DIGEST_BYTES).digest()


class PrefixCache:
    """Digests of the blocks of `pool`, and the chain of digests of each request by row."""

    def __init__(self, pool: BlockPool, block_size: int) -> None:
        self._pool = pool
        self._block_bytes = 4 * block_size
        # by row: the root, and the digests of its full blocks so far; they outlive preemptions
        self._chains: dict[int, list[bytes]] = {}
        self._marks_of: dict[int, BlockMarks] = {}  # by row, of those that have images
        self._block_of: dict[bytes, int] = {}
        self._name_of: list[bytes | None] = [None] * pool.num_blocks
        self.num_query_tokens = 0  # tokens of admitted requests
        self.num_hit_tokens = 0  # of those, tokens that were in the cache

    def open(self, row: int, root: bytes, marks_of: BlockMarks | None = None) -> None:
        """Start a request, whose blocks are named under this digest (`root_digest`). marks_of: what
        besides tokens is in its blocks [start, stop); None: nothing is.
        """
        self._chains[row] = [root]
        if marks_of is not None:
            self._marks_of[row] = marks_of

    def close(self, row: int) -> None:
        """Remove a request; its blocks keep their digests."""
        del self._chains[row]
        self._marks_of.pop(row, None)

    def num_named(self, row: int) -> int:
        """The number of the request's blocks, from its first on, with a known digest."""
        return len(self._chains[row]) - 1

    def digests(self, row: int, start: int, stop: int) -> list[bytes]:
        """The digests of the request's blocks [start, stop), which are known."""
        return self._chains[row][start + 1 : stop + 1]

    def extend(self, row: int, token_ids: UInt32s) -> None:
        """Compute the digests of further blocks of the request from their tokens, in order."""
        chain = self._chains[row]
        data = token_ids.astype(_U32, copy=False).tobytes()
        assert len(data) % self._block_bytes == 0, "only full blocks have digests"
        digest = chain[-1]
        size = self._block_bytes
        if (marks_of := self._marks_of.get(row)) is not None:
            num_named = len(chain) - 1
            marks = marks_of(num_named, num_named + len(data) // size)
            for number, mark in enumerate(marks):
                digest = next_digest(digest, data[number * size : (number + 1) * size] + mark)
                chain.append(digest)
            return
        for start in range(0, len(data), size):  # as `next_digest`, whose call takes as long
            digest = blake2b(
                digest + data[start : start + size], digest_size=_DIGEST_BYTES
            ).digest()
            chain.append(digest)

    def lookup(self, row: int, max_blocks: int, *, start: int = 0) -> Int32s:
        """The cached blocks of the request's first tokens, [n], up to the first that is missing.

        They have to be shared before anything is allocated. The first `start` of at most
        `max_blocks` are left out.
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
        """Register the request's filled `blocks`, from number `start` on. Call `extend` first."""
        self.register_all([(row, start, blocks.tolist())])

    def register_all(self, filled: Iterable[tuple[int, int, Sequence[int]]]) -> None:
        """Register as `register` does, for many requests: (row, start, blocks) of each."""
        blocks: list[int] = []
        digests: list[bytes] = []
        for row, start, some in filled:
            blocks += some
            digests += self._chains[row][start + 1 : start + 1 + len(some)]
        self._name(blocks, digests)

    def forget(self, blocks: Int32s) -> None:
        """Drop these blocks, all different: they do not hold their content."""
        for block in blocks.tolist():
            self._take_name(block)
        self._pool.forget(blocks)

    def reset(self) -> None:
        """Drop the content of every block. Running requests keep their blocks."""
        self._block_of.clear()
        self._name_of = [None] * self._pool.num_blocks
        self._pool.forget_all()

    def count(self, num_tokens: int, num_hits: int) -> None:
        """Count an admitted request of `num_tokens` tokens, of which `num_hits` were cached."""
        self.num_query_tokens += num_tokens
        self.num_hit_tokens += num_hits

    def _name(self, blocks: Sequence[int], digests: Sequence[bytes]) -> None:
        """Give each block its digest, unless another block validly has it."""
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
