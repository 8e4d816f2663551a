"""Which runner serves a model.

Owns: the choice. Does not know: either kind. torch is imported only for a real model.
"""

from __future__ import annotations

from slipstream_core.config import CoreConfig
from slipstream_core.runner.plan import Runner


def load_runner(config: CoreConfig) -> Runner:
    """The runner of `config.model`. Raises ValueError where it cannot be had."""
    if config.model.startswith("simulated:"):
        from slipstream_core.runner.simulated import load_simulated

        return load_simulated(config)
    from slipstream_core.runner import torch_runner

    return torch_runner.load_runner(config)
