"""Records a model's forward for a card, with fewer kernels: norms, gates and products are fused.

The recording serves every step, recorded again in CUDA graphs or run operator by operator. It is
compared with the model at load, on the card; where it cannot be made or differs, the model itself
runs.
"""

from __future__ import annotations

import logging
import time
from typing import Any

import torch
from torch.fx import GraphModule

from slipstream_core.runner.compilation.fuse import attend_by_context
from slipstream_core.runner.compilation.fuse_card import Ops, by_multiples_of_tokens, fuse
from slipstream_core.runner.compilation.trace import (
    KEPT,
    TOKENS,
    TRIALS,
    Forward,
    OwnValue,
    compile_graph,
    eager,
    record_forward,
)

logger = logging.getLogger(__name__)

# Of a token's logits, relative to their size, for the median token: sums are in another order, and
# where two experts are level a token may get the other.
_TOLERANCES = {torch.float32: 1e-3}
_HALF_TOLERANCE = 0.1


def trace_for_card(module: Any, ops: Ops, vocab_size: int, device: torch.device) -> Forward | None:
    """The module's forward, recorded and fused; None if the module has to run itself.

    Weights of products with the same input become views of one matrix.
    """
    started = time.monotonic()
    try:
        forward = compile_graph(fused_graph(module, ops, device))
        with torch.inference_mode():
            for num_tokens in TRIALS:
                _try(eager(module), forward, num_tokens, vocab_size, device)
    except torch.AcceleratorError:
        raise  # the device is unusable
    except Exception as error:
        said = str(error).partition("\n")[0][:200]
        logger.warning("the forward pass is not fused and runs as it is, slower: %s", said)
        return None
    finally:
        if device.type == "cuda":  # the memory of weights that were joined is the cache's
            torch.cuda.empty_cache()
    logger.info("fused the forward pass in %.1f s", time.monotonic() - started)
    return forward


def fused_graph(module: torch.nn.Module, ops: Ops | None, device: torch.device) -> GraphModule:
    """The forward for any number of tokens, with ids, positions, keep and context as inputs.

    Without `ops` nothing is fused.
    """
    graph = record_forward(module, device)
    by_multiples_of_tokens(graph, tokens=TOKENS, kept=KEPT)
    attend_by_context(graph)
    if ops is not None:
        fuse(graph, ops)
    return graph


def _try(
    plain: Forward, fused: Forward, num_tokens: int, vocab_size: int, device: torch.device
) -> None:
    """Raise ValueError if the two forwards differ."""
    ids = (torch.arange(num_tokens, device=device) * 7919 + 1)[None] % vocab_size
    positions = torch.arange(num_tokens, device=device)[None] + 2
    keep = torch.arange(num_tokens, device=device)
    expected, given = (each(ids, positions, keep, OwnValue()) for each in (plain, fused))
    if expected.shape != given.shape or expected.dtype != given.dtype:
        raise ValueError(f"logits of {num_tokens} tokens have another shape")
    tolerance = _TOLERANCES.get(expected.dtype, _HALF_TOLERANCE)
    expected, given = expected[0].float(), given[0].float()
    sizes = expected.norm(dim=-1).clamp(min=1e-9)  # a padding token's may all be 0
    errors = (expected - given).norm(dim=-1) / sizes
    if not errors.median() <= tolerance:
        raise ValueError(f"logits of {num_tokens} tokens differ")
