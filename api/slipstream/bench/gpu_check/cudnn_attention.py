"""cuDNN's attention: whether torch may choose it, and how to keep it from that.

On newer cards torch's scaled_dot_product_attention prefers it. It plans anew for every shape that
it has not seen, for tens of milliseconds, and every decode step brings new shapes. Like torch's
own setting, this one holds for the process.
"""

from __future__ import annotations

from typing import Any

import torch

# torch's own annotations leave its functions out
_backends: Any = torch.backends.cuda


def may_be_chosen(device: str) -> bool | None:
    """On a card; None elsewhere."""
    return bool(_backends.cudnn_sdp_enabled()) if device == "cuda" else None


def rule_out() -> None:
    """From now on."""
    _backends.enable_cudnn_sdp(False)
