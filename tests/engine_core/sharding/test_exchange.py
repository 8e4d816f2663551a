"""Exchanges through shared memory, of ranks that are threads here, against torch's operators."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Sequence

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.helpers.patience import PATIENCE_S

from slipstream_core.sharding.collectives import share_of, slice_of
from slipstream_core.sharding.exchange import ExchangeTimeoutError, SharedExchange
from slipstream_core.sharding.rank import Rank

SLOT_BYTES = 256  # 64 numbers, so that what is exchanged takes several turns


def on_ranks(
    size: int, work: Callable[[SharedExchange, int], list[torch.Tensor]]
) -> Sequence[list[torch.Tensor]]:
    """What `work` returns on each rank."""
    fd = os.memfd_create("exchange")
    found: list[list[torch.Tensor]] = [[] for _ in range(size)]

    def run(index: int) -> None:
        exchange = SharedExchange(fd, Rank(index, size), PATIENCE_S, SLOT_BYTES)
        found[index] = work(exchange, index)

    threads = [threading.Thread(target=run, args=(index,)) for index in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE_S)
        assert not thread.is_alive()
    os.close(fd)
    return found


@settings(max_examples=40)
@given(
    st.integers(1, 4),
    st.lists(
        st.tuples(
            st.sampled_from(["sum", "gather", "take"]), st.integers(1, 5), st.integers(1, 90)
        ),
        min_size=1,
        max_size=12,
    ),
)
def test_exchanges_are_those_of_torch(size: int, asked: list[tuple[str, int, int]]) -> None:
    torch.manual_seed(1)
    given_tensors, expected = [], []
    for kind, rows, width in asked:
        if kind == "sum":
            parts = [torch.randn(rows, width) for _ in range(size)]
            total = parts[0].clone()
            for part in parts[1:]:
                total += part
            expected.append(total)
        elif kind == "gather":
            width = min(width, 64 * size)
            whole = torch.randn(1, rows, width)
            slices = [slice_of(width, index, size) for index in range(size)]
            parts = [whole[..., begin:end] for begin, end in slices]
            expected.append(whole)
        else:
            parts = [torch.randint(0, 99, (min(width, 32),)) for _ in range(size)]
            expected.append(parts[0].clone())
        given_tensors.append((kind, parts))

    def work(exchange: SharedExchange, index: int) -> list[torch.Tensor]:
        got = []
        for (kind, parts), whole in zip(given_tensors, expected, strict=True):
            own = parts[index]
            if kind == "sum":
                got.append(exchange.sum(own))
            elif kind == "gather":
                width = whole.shape[-1]
                got.append(exchange.gather(own, share_of(width, size), width))
            else:
                own = own.clone()
                exchange.take(own)
                got.append(own)
        return got

    for got in on_ranks(size, work):
        assert len(got) == len(expected)
        assert all(map(torch.equal, got, expected))


def test_a_rank_that_does_not_come_is_an_error() -> None:
    fd = os.memfd_create("exchange")
    with pytest.raises(ExchangeTimeoutError):
        SharedExchange(fd, Rank(0, 2), 0, SLOT_BYTES).sum(torch.ones(3))
    os.close(fd)


def test_what_has_no_room_is_known_before() -> None:
    fd = os.memfd_create("exchange")
    exchange = SharedExchange(fd, Rank(0, 1), 1, SLOT_BYTES)
    assert exchange.may_gather(64)
    assert not exchange.may_gather(65)
    assert exchange.may_take(torch.zeros(32, dtype=torch.int64))
    assert not exchange.may_take(torch.zeros(33, dtype=torch.int64))
    os.close(fd)
