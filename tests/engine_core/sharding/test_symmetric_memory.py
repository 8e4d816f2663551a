"""Sums in memory that cards share: which are made there, under operators as strict as torch's."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tests.helpers.patience import PATIENCE_S
from torch.distributed import _symmetric_memory

from slipstream_core.ranks import group
from slipstream_core.sharding import collectives, symmetric_memory
from slipstream_core.sharding.collectives import exchange_by, sum_over_ranks
from slipstream_core.sharding.rank import Rank
from slipstream_core.sharding.symmetric_memory import (
    BUFFER_BYTES,
    SymmetricSums,
    join_symmetric,
)

CPU = torch.device("cpu")


def _alignment(x: torch.Tensor) -> int:
    """As torch's kernels find it: of the offset and of the size."""
    numbers = (x.storage_offset() * x.itemsize, x.nbytes)
    return min(next(each for each in (16, 8, 4, 2, 1) if n % each == 0) for n in numbers)


class StrictOperators:
    """Those of `torch.ops.symm_mem` that are used, over ranks that all hold the same tensor.

    They check what those do (CUDASymmetricMemoryOps.cu), and count their calls.
    """

    def __init__(self, size: int, buffer: torch.Tensor) -> None:
        self._size = size
        self._buffer = buffer
        self.calls: list[str] = []

    def _check(self, shared: torch.Tensor, other: torch.Tensor) -> None:
        assert shared.untyped_storage().data_ptr() == self._buffer.untyped_storage().data_ptr()
        assert shared.is_contiguous()
        assert other.is_contiguous()
        assert shared.dtype in (torch.float32, torch.bfloat16)
        assert other.shape == shared.shape
        assert _alignment(shared) == _alignment(other) >= max(4, shared.itemsize)

    def one_shot_all_reduce_copy(
        self, shared: torch.Tensor, x: torch.Tensor, operation: str, group: str
    ) -> torch.Tensor:
        assert (operation, group) == ("sum", "all")
        self._check(shared, x)
        self.calls.append("one")
        shared.copy_(x)
        return shared * self._size

    def two_shot_all_reduce_out(
        self, shared: torch.Tensor, operation: str, group: str, total: torch.Tensor
    ) -> None:
        assert (operation, group) == ("sum", "all")
        assert self._size in (2, 4, 8)
        self._check(shared, total)
        self.calls.append("two")
        total.copy_(shared * self._size)


@pytest.fixture(params=[2, 4, 8])
def operators(request: Any, monkeypatch: pytest.MonkeyPatch) -> Iterator[StrictOperators]:
    """Of some ranks, whose sums the forward's operator makes."""
    buffer = torch.empty(BUFFER_BYTES, dtype=torch.uint8)
    strict = StrictOperators(request.param, buffer)
    monkeypatch.setattr(symmetric_memory, "_operators", strict)
    by_group: Any = lambda _collective, total: total.mul_(request.param)  # noqa: E731
    monkeypatch.setattr(collectives, "_exchange", by_group)
    exchange_by(symmetric=SymmetricSums(buffer, "all", request.param))
    yield strict
    exchange_by()


@pytest.mark.parametrize(
    ("shape", "dtype", "is_shared"),
    [
        ((1, 4096), torch.bfloat16, True),
        ((64, 4096), torch.bfloat16, True),
        ((65, 4096), torch.bfloat16, False),  # more than the buffer holds
        ((32, 4096), torch.float32, True),
        ((3, 5), torch.bfloat16, False),  # in no pieces of 16 bytes
        ((4, 16), torch.float16, False),  # no kernel adds these up
        ((0, 4096), torch.bfloat16, False),
    ],
)
def test_small_sums_are_made_there(
    operators: StrictOperators, shape: tuple[int, ...], dtype: torch.dtype, is_shared: bool
) -> None:
    x = torch.randn(shape).to(dtype)
    total = sum_over_ranks(x)
    assert torch.equal(total, x * operators._size)
    assert operators.calls == ([] if not is_shared else ["one" if operators._size == 2 else "two"])


@given(st.integers(0, 9), st.integers(1, 5), st.booleans())
def test_parts_of_other_tensors_are_summed(offset: int, rows: int, is_turned: bool) -> None:
    """A kernel wants its tensors dense and aligned alike."""
    buffer = torch.empty(BUFFER_BYTES, dtype=torch.uint8)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(symmetric_memory, "_operators", StrictOperators(2, buffer))
        x = torch.randn(1000)[offset : offset + 8 * rows].view(rows, 8)
        x = x.T if is_turned else x
        sums = SymmetricSums(buffer, "all", 2)
        assert sums.may_sum(x)
        assert torch.equal(sums.sum(x), 2 * x)


@pytest.mark.parametrize("name", ["one_shot_all_reduce_copy", "two_shot_all_reduce_out"])
def test_torch_has_these_operators(name: str) -> None:
    schema = getattr(torch.ops.symm_mem, name).default._schema
    ours = StrictOperators.__dict__[name].__annotations__
    kinds = {"Tensor": "torch.Tensor", "str": "str"}
    wanted = [kinds[str(each.type)] for each in schema.arguments]
    assert [kind for key, kind in ours.items() if key != "return"] == wanted


class Group:
    group_name = "all"

    def __init__(self, size: int) -> None:
        self._size = size

    def size(self) -> int:
        return self._size


class Ranks:
    """Threads that agree, as ranks do."""

    def __init__(self, size: int) -> None:
        self._said: list[bool] = []
        self._barrier = threading.Barrier(size)

    def all_say(self, said: bool) -> bool:
        self._said.append(said)
        self._barrier.wait(PATIENCE_S)
        answer = all(self._said)
        if self._barrier.wait(PATIENCE_S) == 0:
            self._said.clear()
        self._barrier.wait(PATIENCE_S)
        return answer


@pytest.mark.parametrize("fails", [None, "empty", "rendezvous"])
def test_all_ranks_have_it_or_none(monkeypatch: pytest.MonkeyPatch, fails: str | None) -> None:
    ranks, met, found = Ranks(2), [], {}

    def one_fails(name: str) -> None:
        if name == fails and threading.current_thread().name == "1":
            raise RuntimeError("this card reaches no other one")

    def empty(num: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        one_fails("empty")
        return torch.empty(num, dtype=dtype, device=device)

    def rendezvous(buffer: torch.Tensor, group: Any) -> None:
        met.append(threading.current_thread().name)
        one_fails("rendezvous")
        assert buffer.nbytes == BUFFER_BYTES
        assert isinstance(group, Group)

    monkeypatch.setattr(_symmetric_memory, "empty", empty)
    monkeypatch.setattr(_symmetric_memory, "rendezvous", rendezvous)

    def run() -> None:
        try:
            found[threading.current_thread().name] = join_symmetric(CPU, Group(2), ranks.all_say)
        except RuntimeError as error:
            found[threading.current_thread().name] = str(error)

    threads = [threading.Thread(target=run, name=name, daemon=True) for name in ("0", "1")]
    for each in threads:
        each.start()
    for each in threads:
        each.join(PATIENCE_S)
    if fails is None:
        assert all(isinstance(each, SymmetricSums) for each in found.values())
    else:
        assert found == {"0": "another rank has none", "1": "this card reaches no other one"}
    # no rank waits for one that cannot come
    assert sorted(met) == ([] if fails == "empty" else ["0", "1"])


def test_there_are_kernels_for_some_numbers_of_ranks() -> None:
    with pytest.raises(RuntimeError, match=r"3 ranks, and kernels for 2, 4, 8"):
        join_symmetric(CPU, Group(3), lambda said: said)


def test_ranks_on_several_machines_say_why_they_have_none(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        group._share_cards_memory(Rank(1, 4, num_nodes=2))
        assert not caplog.records  # one of them says it
        group._share_cards_memory(Rank(0, 4, num_nodes=2))
    assert "no symmetric memory: ranks are on several machines" in caplog.text
