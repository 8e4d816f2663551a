"""The masks that launched steps await, on their way from the engine's thread to the device's."""

from __future__ import annotations

from queue import SimpleQueue

from slipstream_ipc.arrays import Int32s


class AwaitedMasks:
    """Masks by step, in launch order. Those of a step that ended without them are skipped."""

    def __init__(self) -> None:
        self._given: SimpleQueue[tuple[int, Int32s] | None] = SimpleQueue()

    def give(self, step: int, masks: Int32s) -> None:
        """Provide the masks of a step, [G, ceil(vocab / 32)]. Returns at once."""
        self._given.put((step, masks))

    def close(self) -> None:
        """Fail a step that waits for masks, now or later. Idempotent."""
        self._given.put(None)

    def wait(self, step: int) -> Int32s:
        """Wait for the masks of a step. Raises RuntimeError once it is closed."""
        while (given := self._given.get()) is not None:
            if given[0] == step:
                return given[1]
        raise RuntimeError("the runner was closed")
