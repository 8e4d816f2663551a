"""The sizes of recorded steps, rows and tokens, and the models that cannot be recorded on a card.

Other models that cannot be recorded are found by trying (`graph_capture.record_all`), but a failed
capture is slow, and its error names an operator instead of the cause.

Experts are multiplied by torch's grouped product. On its fast path, for bfloat16 on cards of
compute capability 9.0 and 10.0, the number of tokens of each expert stays on the card; otherwise
the numbers are copied to the host in every layer (torch: native/cuda/GroupedBlas.cpp).
"""

from __future__ import annotations

import bisect
import logging
from collections.abc import Sequence

import torch

from slipstream_core.config import CoreConfig
from slipstream_core.model.loader import LoadedModel

logger = logging.getLogger(__name__)

BUCKETS = (16, 32, 64, 128, 256, *range(512, 2049, 256))  # tokens of a step

_GENERATIONS = (9, 10)  # major compute capability


def graph_sizes(model: LoadedModel, config: CoreConfig) -> tuple[int, ...]:
    """The batch sizes whose decode steps are recorded, ascending; logs the reason if none are."""
    if model.device.type != "cuda" or config.enforce_eager:
        return ()
    if model.rank is not None and not config.cuda_graphs_over_ranks:
        logger.warning(
            "CUDA graphs are disabled: steps of several ranks are recorded with "
            "--cuda-graphs-over-ranks alone, as no two cards have run them yet"
        )
        return ()
    capability = torch.cuda.get_device_capability(model.device)
    if (why := why_eager(model.module, model.dtype, capability)) is not None:
        logger.warning("CUDA graphs are disabled, so decode steps are slower: %s", why)
        return ()
    return batch_sizes(config.max_num_seqs, config.cuda_graph_sizes)


def batch_sizes(max_num_seqs: int, wanted: Sequence[int] = ()) -> tuple[int, ...]:
    """The batch sizes to record, ascending.

    `wanted` replaces the default; sizes above `max_num_seqs` are left out. By default 1, 2, 4 and
    multiples of 8, of 16 above 256 and of 64 above 512 (padding costs relatively less in larger
    batches), and `max_num_seqs` itself.
    """
    if wanted:
        return tuple(sorted({size for size in wanted if 1 <= size <= max_num_seqs}))
    sizes = {1, 2, 4, max_num_seqs}
    sizes.update(range(8, 257, 8), range(272, 513, 16), range(576, max_num_seqs + 1, 64))
    return tuple(sorted(size for size in sizes if size <= max_num_seqs))


def token_buckets(max_num_batched_tokens: int) -> tuple[int, ...]:
    """The numbers of tokens to record, ascending: up to the first that holds the largest step."""
    last = bisect.bisect_left(BUCKETS, max_num_batched_tokens)
    return BUCKETS[: last + 1]


def why_eager(
    module: torch.nn.Module, dtype: torch.dtype, capability: tuple[int, int] | None
) -> str | None:
    """The reason why steps of this model run eagerly; None if they may be recorded.

    `capability` is the card's, or None without a card.
    """
    if not any(_has_experts(each) for each in module.modules()):
        return None
    if dtype != torch.bfloat16:
        name = str(dtype).removeprefix("torch.")
        return f"experts in {name} synchronize with the host; in bfloat16 they do not"
    if capability is not None and capability[0] not in _GENERATIONS:
        return (
            f"experts synchronize with the host on a card of compute capability "
            f"{capability[0]}.{capability[1]}; on 9.0 and 10.0 they do not"
        )
    return None


def _has_experts(module: torch.nn.Module) -> bool:
    """True if the module has experts, by attributes that transformers sets on such classes."""
    return hasattr(module, "_apply_gate") and hasattr(module, "is_transposed")
