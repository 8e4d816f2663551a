"""Steps' columns in one piece of memory: nothing overlaps, nothing is overwritten too early."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st
from tests.helpers.host_device import HostCopies

from slipstream_core.step.buffer import Field, Layout
from slipstream_core.step.staging import CopyEvent, Staging, in_device

CPU = torch.device("cpu")
DTYPES = [np.int64, np.int32, np.float32]


@given(st.lists(st.tuples(st.sampled_from(DTYPES), st.integers(0, 40)), max_size=8))
def test_columns_do_not_overlap_and_are_aligned(fields: list[tuple[type, int]]) -> None:
    layout = Layout([Field(str(at), dtype, count) for at, (dtype, count) in enumerate(fields)])
    piece = torch.zeros(layout.size, dtype=torch.uint8)
    host, device = layout.in_host(piece.numpy()), in_device(layout, piece)
    for at, view in enumerate(host.values()):
        view[...] = at + 1
    for at, (name, (dtype, count)) in enumerate(zip(device, fields, strict=True)):
        assert device[name].numpy().dtype == dtype
        assert device[name].tolist() == [at + 1] * count
        assert (device[name].data_ptr() - piece.data_ptr()) % 16 == 0


class Lagging:
    """Copies of a device that is late: done only when somebody waits for them."""

    def __init__(self) -> None:
        self.waiting: list[_Late] = []
        self.arrived: list[list[int]] = []

    def host(self, size: int) -> torch.Tensor:
        return torch.empty(size, dtype=torch.uint8)

    def upload(self, source: torch.Tensor, target: torch.Tensor) -> CopyEvent:
        def copy() -> None:
            self.arrived.append(source.view(torch.int64).tolist())
            target.copy_(source)

        late = _Late(self.waiting, copy)
        self.waiting.append(late)
        return late

    fetch = upload

    def wait_for(self, event: CopyEvent) -> None:
        event.synchronize()

    def record(self) -> CopyEvent:
        return self.waiting[-1]


class _Late:
    def __init__(self, waiting: list[_Late], copy: Callable[[], None]) -> None:
        self._waiting = waiting
        self._copy = copy

    def synchronize(self) -> None:
        while self in self._waiting:  # in their order
            self._waiting.pop(0)._copy()


def test_no_buffer_is_written_while_it_is_copied() -> None:
    copies = Lagging()
    staging = Staging(copies, CPU, 16, depth=2)
    steps = [[n] * (n % 5 + 1) for n in range(12)]  # some larger than the buffer at first
    for step in steps:
        staging.send_columns([np.array(step)])
    assert len(copies.waiting) <= 2
    while copies.waiting:
        copies.waiting[-1].synchronize()
    assert [row[: len(step)] for row, step in zip(copies.arrived, steps, strict=True)] == steps


def test_the_device_buffer_stays_where_it_is_until_it_must_grow() -> None:
    staging = Staging(HostCopies(), CPU, 64)
    at = staging.device_buffer.data_ptr()
    for _ in range(7):
        (column,) = staging.send_columns([np.arange(8)])
        assert column.tolist() == list(range(8))
        assert staging.device_buffer.data_ptr() == at
    first, second = staging.send_columns([np.arange(100), np.ones(3, np.float32)])
    assert first.tolist() == list(range(100))
    assert second.tolist() == [1.0] * 3
