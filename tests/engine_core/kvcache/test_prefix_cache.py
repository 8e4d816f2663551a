"""The prefix cache finds what a dictionary of whole prefixes would find."""

from __future__ import annotations

import hashlib

import numpy as np
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from slipstream_core.kvcache.block_pool import BlockPool
from slipstream_core.kvcache.prefix_cache import PrefixCache, next_digest

SIZE = 2
Prefix = tuple[bytes, tuple[int, ...]]  # the root, and all tokens up to a block's end


def tokens(*ids: int) -> np.ndarray:
    return np.array(ids, np.uint32)


def new(num_blocks: int = 8) -> tuple[BlockPool, PrefixCache]:
    pool = BlockPool(num_blocks)
    return pool, PrefixCache(pool, SIZE)


def test_names_are_the_same_everywhere() -> None:
    """Another machine, process or version must compute the same: the bytes are written out."""
    root = bytes(range(16))
    pool, cache = new()
    cache.open(0, root)
    cache.extend(0, tokens(1, 2**32 - 1, 3, 4))
    first = next_digest(root, b"\1\0\0\0\xff\xff\xff\xff")
    framed = root + b"\1\0\0\0\xff\xff\xff\xff"
    assert first == hashlib.blake2b(framed, digest_size=16).digest()
    assert cache._chains[0] == [root, first, next_digest(first, b"\3\0\0\0\4\0\0\0")]
    assert pool.num_free == 7


def test_what_was_computed_under_another_root_is_not_found() -> None:
    pool, cache = new()
    for row, root in enumerate([b"", b"", b"x"]):
        cache.open(row, root)
        cache.extend(row, tokens(1, 2, 3, 4))
    blocks = pool.allocate(2)
    cache.register(0, 0, blocks)
    assert cache.lookup(1, 9).tolist() == blocks.tolist()
    assert cache.lookup(1, 1).tolist() == blocks[:1].tolist()
    assert cache.lookup(2, 9).tolist() == []


def test_what_is_besides_tokens_in_a_block_tells_it_and_what_follows_apart() -> None:
    """However many blocks are named at a time; blocks in front of it are shared."""
    marks = {0: (b"", b"one", b""), 1: (b"", b"one", b""), 2: (b"", b"other", b""), 3: None}
    pool, cache = new()
    for row, own in marks.items():
        cache.open(row, b"", None if own is None else lambda start, stop, own=own: own[start:stop])
        for block in range(3) if row == 1 else ():
            cache.extend(row, tokens(block, block))
        if row != 1:
            cache.extend(row, tokens(0, 0, 1, 1, 2, 2))
    blocks = pool.allocate(3)
    cache.register(0, 0, blocks)
    found = [len(cache.lookup(row, 9)) for row in marks]
    assert found == [3, 3, 1, 1]
    second = next_digest(next_digest(b"", b"\0" * 8), b"\1\0\0\0\1\0\0\0one")
    assert cache._chains[0][2] == second


def test_who_comes_second_with_the_same_gets_no_name() -> None:
    pool, cache = new()
    for row in range(2):
        cache.open(row, b"")
        cache.extend(row, tokens(1, 2))
    first, second = pool.allocate(1), pool.allocate(1)
    cache.register(0, 0, first)
    cache.register(1, 0, second)
    assert cache.lookup(1, 1).tolist() == first.tolist()
    assert not pool.is_kept(int(second[0]))


def test_a_beginning_that_is_gone_hides_what_follows() -> None:
    pool, cache = new()
    cache.open(0, b"")
    cache.extend(0, tokens(1, 2, 3, 4, 5, 6))
    blocks = pool.allocate(3)
    cache.register(0, 0, blocks)
    cache.forget(blocks[1:2])
    assert cache.lookup(0, 3).tolist() == blocks[:1].tolist()
    cache.register(0, 1, blocks[1:2])
    assert cache.lookup(0, 3).tolist() == blocks.tolist()


class AgainstADict(RuleBasedStateMachine):
    """Requests fill blocks; a dictionary says which block holds which prefix."""

    @initialize(num_blocks=st.integers(2, 10))
    def start(self, num_blocks: int) -> None:
        self.pool, self.cache = new(num_blocks)
        self.held: dict[
            int, tuple[Prefix, list[int]]
        ] = {}  # row -> what it has computed, and where
        self.content: dict[int, Prefix] = {}  # of blocks whose content is kept, by block
        self.num_rows = 0

    def forget_handed_out(self, blocks: list[int]) -> None:
        for block in blocks:
            self.content.pop(block, None)

    @rule(
        root=st.sampled_from([b"", b"", b"x"]),
        ids=st.lists(st.integers(0, 1), max_size=8),
        one_by_one=st.booleans(),
    )
    def run(self, root: bytes, ids: list[int], one_by_one: bool) -> None:
        """A request takes what there is, and computes the rest."""
        row, self.num_rows = self.num_rows, self.num_rows + 1
        ids = ids[: len(ids) // SIZE * SIZE]
        prefixes = [(root, tuple(ids[:end])) for end in range(SIZE, len(ids) + 1, SIZE)]
        want = []
        for prefix in prefixes:
            found = [block for block, content in self.content.items() if content == prefix]
            assert len(found) < 2
            if not found:
                break
            want += found
        self.cache.open(row, root)
        self.cache.extend(row, tokens(*ids))
        shared = self.cache.lookup(row, len(ids))
        assert shared.tolist() == want
        num_idle = int((self.pool.refs(shared) == 0).sum())
        if len(prefixes) - len(want) > self.pool.num_free - num_idle:
            self.cache.close(row)
            return
        self.pool.share(shared)
        blocks = self.pool.allocate(len(prefixes) - len(want))
        self.forget_handed_out(blocks.tolist())
        if one_by_one:
            for number, block in enumerate(blocks, len(want)):
                self.cache.register(row, number, block[None])
        else:
            self.cache.register(row, len(want), blocks)
        for block, prefix in zip(blocks.tolist(), prefixes[len(want) :], strict=True):
            if prefix not in self.content.values():
                self.content[block] = prefix
        self.held[row] = (root, tuple(ids)), [*want, *blocks.tolist()]

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def end(self, data: st.DataObject) -> None:
        row = data.draw(st.sampled_from(sorted(self.held)))
        _, blocks = self.held.pop(row)
        self.pool.release(np.array(blocks[::-1], np.int32))
        self.cache.close(row)

    @precondition(lambda self: self.content)
    @rule(data=st.data())
    def forget(self, data: st.DataObject) -> None:
        some = data.draw(st.lists(st.sampled_from(sorted(self.content)), unique=True))
        self.cache.forget(np.array(some, np.int32))
        self.forget_handed_out(some)

    @rule()
    def reset(self) -> None:
        self.cache.reset()
        self.content.clear()

    @invariant()
    def keeps_what_the_dict_has(self) -> None:
        kept = {block for block in range(self.pool.num_blocks) if self.pool.is_kept(block)}
        assert kept == self.content.keys()
        assert len(self.cache._block_of) <= self.pool.num_blocks
        assert len(self.cache._chains) == len(self.held)


AgainstADict.TestCase.settings = settings(deadline=None)
TestAgainstADict = AgainstADict.TestCase
