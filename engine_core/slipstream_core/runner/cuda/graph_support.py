"""Which models' decode steps cannot be recorded on a card, known beforehand.

Owns the reasons, and with them which sizes a core is to record. What else cannot be recorded is
found when it is tried (`graphs.record_all`); but a capture that breaks off is dear, and its error
names an operator, not the cause.

Experts are multiplied by torch's grouped product, on whose fast path the numbers of each expert's
tokens stay on the card. That path is for bfloat16 on cards of the generations 9.0 and 10.0; any
other brings the numbers to the host, in every layer (torch: native/cuda/GroupedBlas.cpp).
"""

from __future__ import annotations

import logging

import torch

from slipstream_core.config import CoreConfig
from slipstream_core.runner.cuda.recorder import batch_sizes
from slipstream_core.runner.model.loader import LoadedModel

logger = logging.getLogger(__name__)

_GENERATIONS = (9, 10)  # compute capability, its first number


def graph_sizes(model: LoadedModel, config: CoreConfig) -> tuple[int, ...]:
    """The numbers of rows whose decode steps a core records, ascending; a line says why none."""
    if model.device.type != "cuda" or config.enforce_eager:
        return ()
    capability = torch.cuda.get_device_capability(model.device)
    if (why := why_eager(model.module, model.dtype, capability)) is not None:
        logger.warning("decode steps are not recorded and run slower: %s", why)
        return ()
    return batch_sizes(config.max_num_seqs, config.cuda_graph_sizes)


def why_eager(
    module: torch.nn.Module, dtype: torch.dtype, capability: tuple[int, int] | None
) -> str | None:
    """Why steps of this model run eagerly; None where they may be recorded.

    `capability` is the card's; None where there is none.
    """
    if not any(_has_experts(each) for each in module.modules()):
        return None
    if dtype != torch.bfloat16:
        name = str(dtype).removeprefix("torch.")
        return f"experts in {name} make the host wait; in bfloat16 they do not"
    if capability is not None and capability[0] not in _GENERATIONS:
        return (
            f"experts make the host wait on a card of compute capability "
            f"{capability[0]}.{capability[1]}; on 9.0 and 10.0 they do not"
        )
    return None


def _has_experts(module: torch.nn.Module) -> bool:
    """By what transformers puts on classes whose experts' products can be chosen."""
    return hasattr(module, "_apply_gate") and hasattr(module, "is_transposed")
