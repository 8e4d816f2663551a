"""Copies between host and device that do not block the host.

`Staging` is a ring of host pages in front of one device buffer of the same layout. `Copies` makes
the copies and waits for them. `to_device` copies a single column through torch's pinned-memory
pool.

- A host page is rewritten only after the copy out of it has finished.
- The device buffer stays in place while it is large enough: graphs read from it.
- A copy to the device is ordered with the current stream's kernels. A copy to the host runs beside
  later kernels, which must not overwrite its source: see `wait_for`.
- Waiting is always for one copy, never for the whole device.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch

from slipstream_core.step.buffer import AnyArray, Field, Layout, Page

_cuda: Any = torch.cuda  # torch's own annotations leave constructors out

_DEPTH = 3  # two steps in flight and one being written

_TORCH_TYPES: dict[np.dtype[np.generic], torch.dtype] = {
    np.dtype(np.int64): torch.int64,
    np.dtype(np.int32): torch.int32,
    np.dtype(np.float32): torch.float32,
}


def in_device(layout: Layout, buffer: torch.Tensor) -> dict[str, torch.Tensor]:
    """The columns of a layout as views of a uint8 tensor."""
    return {
        name: buffer[start:stop].view(_TORCH_TYPES[dtype])
        for name, (dtype, start, stop) in layout.places.items()
    }


class CopyEvent(Protocol):
    """A point in the device's work."""

    def synchronize(self) -> None:
        """Wait until the device has reached this point; releases the GIL."""


class Copies(Protocol):
    """Copies bytes between host and device. Called on the enqueuing thread."""

    def host(self, size: int) -> torch.Tensor:
        """Host memory usable as source and target of copies, uint8 [size]."""

    def upload(self, source: torch.Tensor, target: torch.Tensor) -> CopyEvent:
        """Copy to the device, in order with the current stream's kernels; returns its end."""

    def fetch(self, source: torch.Tensor, target: torch.Tensor) -> CopyEvent:
        """Copy to the host, after the work enqueued so far; returns its end.

        Later work may run concurrently. The caller keeps both tensors alive until the end.
        """

    def wait_for(self, event: CopyEvent) -> None:
        """Make work enqueued from now on wait for `mark`."""

    def record(self) -> CopyEvent:
        """The end of the work enqueued so far."""


class CardCopies:
    """Copies on a card: pinned memory, a separate stream to the host, an event for each copy.

    - Events are blocking: a waiting thread sleeps instead of spinning on a core that the host's
      other threads need.
    - The stream of steps is looked up once: torch walks through Python to find it.
    """

    def __init__(self, device: torch.device) -> None:
        """Steps are enqueued on the stream that is current now, the same one for all threads."""
        self._steps = torch.cuda.current_stream(device)
        self._back = _cuda.Stream(device)

    def host(self, size: int) -> torch.Tensor:
        """Allocate from torch's pool of pinned memory."""
        return torch.empty(size, dtype=torch.uint8, pin_memory=True)

    def upload(self, source: torch.Tensor, target: torch.Tensor) -> CopyEvent:
        """See Copies."""
        target.copy_(source, non_blocking=True)
        copied = _event()
        copied.record(self._steps)
        return copied

    def fetch(self, source: torch.Tensor, target: torch.Tensor) -> CopyEvent:
        """See Copies."""
        computed = _cuda.Event()
        computed.record(self._steps)
        self._back.wait_event(computed)
        with torch.cuda.stream(self._back):
            target.copy_(source, non_blocking=True)
        copied = _event()
        copied.record(self._back)
        return copied

    def wait_for(self, event: CopyEvent) -> None:
        """See Copies."""
        assert isinstance(event, torch.cuda.Event)
        self._steps.wait_event(event)

    def record(self) -> CopyEvent:
        """See Copies."""
        event = _event()
        event.record(self._steps)
        return event


def _event() -> torch.cuda.Event:
    """An event whose waiters sleep instead of spinning."""
    event: torch.cuda.Event = _cuda.Event(blocking=True)
    return event


class Staging:
    """A ring of host pages in front of one device buffer."""

    def __init__(
        self, copies: Copies, device: torch.device, size: int, *, depth: int = _DEPTH
    ) -> None:
        """`size` is in bytes; a larger step grows the buffers, which moves the device's."""
        self.device_buffer = torch.empty(size, dtype=torch.uint8, device=device)
        self._copies = copies
        self._ring = [copies.host(size) for _ in range(depth)]
        self._pages = [Page(each.numpy()) for each in self._ring]
        self._events: list[CopyEvent | None] = [None] * depth
        self._at = 0

    def open(self, layout: Layout) -> Page:
        """The next host page, to be written and then sent."""
        at = self._at
        if (event := self._events[at]) is not None:
            event.synchronize()
        if len(self._ring[at]) < layout.size:
            self._ring[at] = self._copies.host(2 * layout.size)
            self._pages[at] = Page(self._ring[at].numpy())
        self._pages[at].lay_out(layout)
        return self._pages[at]

    def send(self, layout: Layout) -> torch.Tensor:
        """Copy the page that was opened last, of this layout; returns the device buffer."""
        size = layout.size
        if len(self.device_buffer) < size:
            self.device_buffer = self.device_buffer.new_empty(2 * size)
        source = self._ring[self._at][:size]
        self._events[self._at] = self._copies.upload(source, self.device_buffer[:size])
        self._at = (self._at + 1) % len(self._ring)
        return self.device_buffer

    def send_columns(self, columns: Sequence[AnyArray]) -> list[torch.Tensor]:
        """Columns [n] of any lengths as device tensors, moved by one copy.

        The next send overwrites them, in order with the current stream's kernels.
        """
        layout = Layout(
            [Field(str(at), column.dtype, column.size) for at, column in enumerate(columns)]
        )
        page = self.open(layout)
        for at, column in enumerate(columns):
            page.write(str(at), column)
        return list(in_device(layout, self.send(layout)).values())


def to_device(column: npt.NDArray[np.generic], device: torch.device) -> torch.Tensor:
    """The column as a tensor: on a CPU the same memory, on a card an asynchronous copy."""
    tensor = torch.from_numpy(column)
    if device.type == "cuda" and tensor.numel():
        tensor = tensor.pin_memory()
    return tensor.to(device, non_blocking=True)
