"""What a part is told: the device, how thorough to be, how long it has.

Owns: `Setting`, and when a part runs out of time. Does not know: the parts.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from slipstream.bench.gpu_check.report import Report

PARTS = ("environment", "exactness", "sampling", "throughput", "overlap")


@dataclass(frozen=True, slots=True)
class Setting:
    """One run of one part."""

    device: Literal["cuda", "cpu"]
    is_quick: bool
    folder: Path  # shared by the parts: models that one leaves for the next
    deadline_s: float  # time.monotonic(); a part begins nothing after it

    def has_time(self, report: Report, case: str) -> bool:
        """Whether `case` may still be begun; a row says so where it may not."""
        if time.monotonic() < self.deadline_s:
            return True
        report.add(case, skipped="out of time")
        return False
