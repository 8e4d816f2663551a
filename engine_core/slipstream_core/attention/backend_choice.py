"""The contract of attention back ends, and the choice of the one that runs on Triton's kernels.

Triton is imported only where it may be used: not on a machine without a card, unless
TRITON_INTERPRET=1 selects its interpreter (tests).

A machine that cannot compile (no Triton, no C compiler) serves all the same, with torch's operators
and without recorded steps, and logs what to install: slow service is more useful than a core that
does not start. If the kernels should compile but do not, the model is refused, because their
results could not be trusted.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import TYPE_CHECKING, Literal, Protocol

import torch

from slipstream_core.attention.batch_order import BatchOrder
from slipstream_core.attention.block_tables import BlockTables
from slipstream_core.attention.fixed_shape import FixedShapeBackend
from slipstream_core.attention.geometry import LayerGeometry
from slipstream_core.attention.interface import AttentionContext
from slipstream_core.attention.kv_cache import LayerCache
from slipstream_core.kernels.card.tiles import MAX_DIM, MAX_GROUP, Heads, supports
from slipstream_core.kernels.card.triton_support import is_wanted, shared_limit, unready
from slipstream_core.load_error import ModelLoadError, compiling
from slipstream_core.step.plan import StepPlan

if TYPE_CHECKING:
    from slipstream_core.attention.triton_backend import TritonAttention

logger = logging.getLogger(__name__)

BackendName = Literal["auto", "triton", "torch"]


class AttentionBackend(Protocol):
    """A model's attention on one device, which makes a context for each step."""

    @property
    def fixed_shape(self) -> FixedShapeBackend | None:
        """The contexts of recorded steps; None where they cannot be, or do not pay."""

    @property
    def tables_device(self) -> torch.device:
        """The device that block tables are read on."""

    def order(self, plan: StepPlan) -> BatchOrder:
        """The order in which the model is given a plan's rows and tokens."""

    def of_plan(self, plan: StepPlan, order: BatchOrder, tables: BlockTables) -> AttentionContext:
        """The context of a plan's forward, in this order. The plan and the tables must not change
        until the forward is done.
        """


def triton_attention(
    geometry: Sequence[LayerGeometry],
    layers: Sequence[LayerCache],
    *,
    block_size: int,
    dtype: torch.dtype,
    device: torch.device,
    model: str,
    wanted: BackendName = "auto",
) -> TritonAttention | None:
    """Attention by compiled Triton kernels; None where TorchAttention has to serve.

    None on a CPU, without Triton or what it needs, and for heads too large for any tile in the
    card's shared memory. Raises ModelLoadError if the kernels cannot be compiled, or if `wanted` is
    triton and they cannot serve.
    """
    if wanted == "torch":
        return None
    why = _why_not(geometry, dtype, device)
    if why is not None and wanted == "triton":
        raise ModelLoadError(
            model, f"attention_backend is 'triton', but {why}; allowed here are 'auto' and 'torch'"
        )
    if not is_wanted(device):
        return None
    if why is not None:
        logger.warning(
            "%s: attention uses torch's operators instead of Triton's kernels, without CUDA "
            "graphs, which is several times slower",
            why,
        )
        return None
    with compiling(model, "attention"):
        from slipstream_core.attention.triton_backend import TritonAttention

        attention = TritonAttention(layers, block_size=block_size, device=device)
        attention.compile(geometry, dtype)
    return attention


def _why_not(
    geometry: Sequence[LayerGeometry], dtype: torch.dtype, device: torch.device
) -> str | None:
    """The reason why Triton's kernels cannot serve; None if they can."""
    if not is_wanted(device):
        return "its kernels need an NVIDIA card, and the device is the CPU"
    if (missing := unready()) is not None:
        return missing
    limit = shared_limit(device)
    for layer in geometry:
        heads = Heads(
            group=layer.num_heads // layer.num_kv_heads,
            key_dim=layer.key_dim,
            value_dim=layer.value_dim,
            itemsize=dtype.itemsize,
            is_latent=layer.is_latent,
        )
        if not supports(heads, limit):
            kind = str(dtype).removeprefix("torch.")
            return (
                f"head dimensions {heads.key_dim} and {heads.value_dim} in {kind} with "
                f"{heads.group} heads to a KV head exceed what its kernels support on this card "
                f"({MAX_DIM}, {MAX_GROUP} heads, {limit} bytes of shared memory)"
            )
    return None
