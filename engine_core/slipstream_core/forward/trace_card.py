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

from slipstream_core.attention.interface import AttentionParams, CacheSlots
from slipstream_core.forward.fuse import attend_by_context
from slipstream_core.forward.fuse_card import Ops, by_multiples_of_tokens, fuse
from slipstream_core.forward.trace import (
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
# Untrained weights amplify a rounding of each layer to more than that: what is allowed then is this
# many times what such a rounding does to the model itself. Zeros differ by 1, unrelated logits by
# 1.4.
_TIMES_OWN = 4.0
_MOST = 0.9


def trace_for_card(module: Any, ops: Ops, vocab_size: int, device: torch.device) -> Forward | None:
    """The module's forward, recorded and fused; None if the module has to run itself.

    Weights of products with the same input become views of one matrix.
    """
    started = time.monotonic()
    try:
        forward = compile_graph(fused_graph(module, ops, device))
        with torch.inference_mode():
            trial = _Trial(module, vocab_size, device)
            for num_tokens in TRIALS:
                trial.compare(forward, num_tokens)
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


class _RoundedAnew(OwnValue):
    """An attention context whose outputs are off by up to half a unit in the last place."""

    def __init__(self, device: torch.device) -> None:
        self._generator = torch.Generator(device).manual_seed(0)

    def attend(
        self,
        layer: int,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        params: AttentionParams,
    ) -> torch.Tensor:
        """Shapes as in AttentionContext.attend."""
        output = super().attend(layer, query, key, value, params)
        shares = torch.empty(output.shape, device=output.device)
        shares.uniform_(-1.0, 1.0, generator=self._generator)
        unit = torch.finfo(output.dtype).eps / 2
        return (output.float() * (1.0 + unit * shares)).to(output.dtype)


class OwnStored(OwnValue):
    """Own values in slots, as of a paged cache, for layers that the model has attended with."""

    def __init__(self) -> None:
        self._layers: dict[int, CacheSlots] = {}

    def attend(
        self,
        layer: int,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        params: AttentionParams,
    ) -> torch.Tensor:
        """Shapes as in AttentionContext.attend."""
        if layer not in self._layers:
            keys, values = (each.new_full(each.shape, torch.nan) for each in (key, value))
            if params.is_latent:
                values = keys[..., : value.shape[2]]
            slots = torch.arange(len(key), device=key.device).flip(0)
            self._layers[layer] = CacheSlots(keys, values, slots)
        return super().attend(layer, query, key, value, params)

    def cache_slots(self, layer: int) -> CacheSlots:
        """The slots in which a fused forward stores keys and values."""
        return self._layers[layer]

    def attend_stored(
        self, layer: int, query: torch.Tensor, params: AttentionParams
    ) -> torch.Tensor:
        """Shapes as in `attend`."""
        keys, values, slots = self._layers[layer]
        return super().attend(layer, query, keys[slots], values[slots], params)


class _Trial:
    """Compares a fused forward with the model."""

    def __init__(self, module: Any, vocab_size: int, device: torch.device) -> None:
        self._eager = eager(module)
        self._vocab_size = vocab_size
        self._device = device
        self._dtype = module.dtype
        self._own_error: float | None = None  # what one rounding for each layer does to the model

    def compare(self, fused: Forward, num_tokens: int) -> None:
        """Raise ValueError if the two forwards differ."""
        error = self.error_of(fused, num_tokens)
        allowed = _TOLERANCES.get(self._dtype, _HALF_TOLERANCE)
        if not error <= allowed:
            allowed = min(max(allowed, _TIMES_OWN * self._own()), _MOST)
        if not error <= allowed:
            raise ValueError(
                f"logits of {num_tokens} tokens differ: by {error:.2g} of their size, where "
                f"{allowed:.2g} is allowed"
            )

    def error_of(self, fused: Forward, num_tokens: int) -> float:
        """The relative difference between the median token's logits.

        Raises ValueError if the shapes or types of the logits differ.
        """
        context = OwnStored()
        expected = self._logits(self._eager, num_tokens, context)
        given = self._logits(fused, num_tokens, context)
        if expected.shape != given.shape or expected.dtype != given.dtype:
            raise ValueError(f"logits of {num_tokens} tokens have another shape")
        return _median_error(expected, given)

    def _own(self) -> float:
        if self._own_error is None:
            num_tokens = max(TRIALS)
            exact = self._logits(self._eager, num_tokens)
            anew = self._logits(self._eager, num_tokens, _RoundedAnew(self._device))
            self._own_error = _median_error(exact, anew)
        return self._own_error

    def _logits(
        self, forward: Forward, num_tokens: int, context: OwnValue | None = None
    ) -> torch.Tensor:
        positions = torch.arange(num_tokens, device=self._device)
        ids = (positions * 7919 + 1)[None] % self._vocab_size
        return forward(ids, positions[None] + 2, positions, context or OwnValue())


def _median_error(expected: torch.Tensor, given: torch.Tensor) -> float:
    """The relative error of the median token, for logits [1, n, vocab]."""
    expected, given = expected[0].float(), given[0].float()
    sizes = expected.norm(dim=-1).clamp(min=1e-9)  # a padding token's may all be 0
    # the median: a token whose experts are level may get the other one (decision 034)
    return float(((expected - given).norm(dim=-1) / sizes).median())
