"""Columns on the host to tensors on the device, without making the host wait.

Owns: how such a copy is done. On a card memory that is not pinned would be staged by the driver,
which may wait for all that was enqueued before: then nothing could run a step ahead. torch's pool
of pinned memory gives a block to the next asker only when the copies out of it are done.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch


def to_device(column: npt.NDArray[np.generic], device: torch.device) -> torch.Tensor:
    """The column as a tensor: on a CPU the same memory, on a card a copy that is on its way."""
    tensor = torch.from_numpy(column)
    if device.type == "cuda" and tensor.numel():
        tensor = tensor.pin_memory()
    return tensor.to(device, non_blocking=True)
