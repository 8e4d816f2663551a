"""Which runner serves a model.

Owns: the choice. Does not know: either kind. torch is imported only for a real model.
"""

from __future__ import annotations

import importlib
import os

from slipstream_core.config import CoreConfig
from slipstream_core.step.plan import Runner

_SIMULATED = "simulated:"
_SPIN_COUNT = "10000"  # some 0.2 ms


def import_runner(config: CoreConfig) -> None:
    """What `load_runner` will import, which takes seconds and knows nothing of the model."""
    kind = "simulated.simulated_runner" if config.model.startswith(_SIMULATED) else "torch_factory"
    if config.native and "OMP_WAIT_POLICY" not in os.environ:
        # libgomp reads it when torch is imported. Its threads look for work for milliseconds by
        # default, in which they take the cores of our kernels' own team, and of everything else
        os.environ.setdefault("GOMP_SPINCOUNT", _SPIN_COUNT)
    importlib.import_module(f"slipstream_core.runner.{kind}")


def load_runner(config: CoreConfig) -> Runner:
    """The runner of `config.model`. Raises ValueError where it cannot be had."""
    if config.model.startswith(_SIMULATED):
        from slipstream_core.runner.simulated.simulated_runner import load_simulated

        return load_simulated(config)
    from slipstream_core.runner import torch_factory

    return torch_factory.load_runner(config)
