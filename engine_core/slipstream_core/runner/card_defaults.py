"""The size of a step by default on a card with much memory, as in vLLM.

More rows and longer chunks use such a card better; their logits and buffers take some gigabytes of
its memory, which a smaller one has to keep for the cache.
"""

from __future__ import annotations

import logging
from typing import Any

from msgspec.structs import replace

from slipstream_core.config import CoreConfig

logger = logging.getLogger(__name__)

LARGE_BYTES = 70 << 30  # of an A100, H100 or H200 with 80 GB and more
_LARGE: dict[str, int] = {"max_num_seqs": 1024, "max_num_batched_tokens": 8192}


def with_card_defaults(config: CoreConfig, total_bytes: int) -> CoreConfig:
    """The settings for a device with this much memory; 0 is a CPU."""
    if not config.card_defaults or total_bytes < LARGE_BYTES:
        return config
    larger: dict[str, Any] = {name: _LARGE[name] for name in config.card_defaults}
    told = ", ".join(f"{name} {number}" for name, number in larger.items())
    logger.info("the card has %.0f GiB, so by default: %s", total_bytes / 2**30, told)
    return replace(config, **larger)
