"""Chooses the runner of a model: simulated, or torch, which is imported only for a real model."""

from __future__ import annotations

import importlib
import logging
import os
import sys

from slipstream_core.config import CoreConfig
from slipstream_core.load_error import ModelLoadError
from slipstream_core.step.plan import Runner
from slipstream_ipc.transformers_index import use_cached_index
from slipstream_ipc.validation.simulated_model import SIMULATED

_SPIN_COUNT = "10000"  # about 0.2 ms
_logger = logging.getLogger(__name__)


def import_runner(config: CoreConfig, *, is_awaited: bool = False) -> None:
    """Import what `load_runner` needs, which takes seconds and does not depend on the model.

    is_awaited: say so in the log.
    """
    kind = "simulated.simulated_runner" if config.model.startswith(SIMULATED) else "torch_factory"
    if config.native and "OMP_WAIT_POLICY" not in os.environ:
        # libgomp reads it when torch is imported. By default its idle threads spin for
        # milliseconds, on cores that our kernels' team and others need (decision 031).
        os.environ.setdefault("GOMP_SPINCOUNT", _SPIN_COUNT)
    if kind == "torch_factory" and config.device != "cpu":
        # read when torch first uses a card: segments that grow leave no holes between the memory of
        # the largest step, of recordings and of the cache
        os.environ.setdefault("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")
    if is_awaited and kind == "torch_factory" and "torch" not in sys.modules:
        _logger.info("importing torch and transformers")
    # ranks use more of torch
    is_alone = config.tensor_parallel_size == 1
    if kind == "torch_factory" and is_alone and not config.trust_remote_code:
        from slipstream_core.model.lean_imports import leave_out_unused

        leave_out_unused()
    if kind == "torch_factory":
        use_cached_index()
    importlib.import_module(f"slipstream_core.runner.{kind}")


def with_device_defaults(config: CoreConfig) -> CoreConfig:
    """The settings with the defaults of this machine's card, if it computes on one."""
    if config.model.startswith(SIMULATED) or config.device == "cpu" or not config.card_defaults:
        return config
    import torch

    if not torch.cuda.is_available():
        return config
    from slipstream_core.runner.card_defaults import with_card_defaults

    return with_card_defaults(config, int(torch.cuda.mem_get_info()[1]))


def load_runner(config: CoreConfig) -> Runner:
    """Build the runner of `config.model`. Raises ValueError if it cannot be loaded."""
    if config.model.startswith(SIMULATED):
        if config.tensor_parallel_size > 1:
            raise ModelLoadError(config.model, "a simulated model has no slices for several ranks")
        from slipstream_core.runner.simulated.simulated_runner import load_simulated

        return load_simulated(config)
    from slipstream_core.runner import torch_factory

    return torch_factory.load_runner(config)
