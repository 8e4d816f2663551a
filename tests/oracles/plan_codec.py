"""A buffer into which plans are written by numpy."""

from __future__ import annotations

from typing import Any

from slipstream_core.step.plan_codec import PlanBuffer


class NumpyPlanBuffer(PlanBuffer):
    """The same bytes and errors."""

    def _packs_in_c(self, *_: Any) -> bool:
        return False
