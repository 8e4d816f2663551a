"""A CPU in place of a card: copies complete at once, and a recorder that records nothing."""

from __future__ import annotations

import torch

from slipstream_core.runner.graph_capture import Work
from slipstream_core.step.staging import CopyEvent


class HostCopies:
    """Copies on a CPU, which are complete on return."""

    def host(self, size: int) -> torch.Tensor:
        """Plain memory."""
        return torch.empty(size, dtype=torch.uint8)

    def upload(self, source: torch.Tensor, target: torch.Tensor) -> CopyEvent:
        """See Copies."""
        target.copy_(source)
        return _DONE

    def fetch(self, source: torch.Tensor, target: torch.Tensor) -> CopyEvent:
        """See Copies."""
        target.copy_(source)
        return _DONE

    def wait_for(self, event: CopyEvent) -> None:
        """See Copies."""

    def record(self) -> CopyEvent:
        """See Copies."""
        return _DONE


class _Done:
    def synchronize(self) -> None:
        """Return at once: host copies are already complete."""


_DONE = _Done()


class HostRecorder:
    """Records nothing, for tests of the recorded steps' logic."""

    def record(self, work: Work) -> Work:
        """Run `work` once and return it."""
        work()
        return work

    def check(self) -> None:
        """Do nothing: a CPU stays usable."""
