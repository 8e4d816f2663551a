"""What launches of the fused forward's kernels are put together from."""

from __future__ import annotations

import torch

from slipstream_core.attention.interface import CacheSlots
from slipstream_core.forward import forward_ops
from slipstream_core.forward.expert_patterns import RouteForm
from slipstream_core.forward.forward_ops import ForwardOps
from slipstream_core.forward.rope_patterns import NormForm, RopeForm

FORMS = (
    forward_ops._norm_form,
    forward_ops._two_norms_form,
    forward_ops._rotation_form,
    forward_ops._route_form,
)


def step(num_tokens: int, num_layers: int = 3) -> None:
    """The kernels of some equal layers, over tensors without content."""

    def empty(*shape: int) -> torch.Tensor:
        return torch.empty(shape, device="meta", dtype=torch.bfloat16)

    ops, x = ForwardOps(), empty(1, num_tokens, 96)
    for _ in range(num_layers):
        ops.rms_norm(x, empty(96), 1e-5, True, False)
        ops.add_rms_norm(x, x, empty(96), 1e-5, True, False)
        ops.add_layer_norm(x, x, empty(96), empty(96), 1e-5)
        ops.two_rms_norms(x, x, empty(96), empty(96), 1e-5, True, False)
        query, key = empty(1, 4, num_tokens, 24), empty(1, 2, num_tokens, 24)
        angles = empty(1, num_tokens, 24), empty(1, num_tokens, 24)
        form, norm = RopeForm(24, False, False, True), NormForm(1e-6, True, False)
        slots = CacheSlots(empty(64, 2, 24), empty(64, 2, 24), empty(num_tokens))
        value, weight = empty(num_tokens, 2, 24), empty(24)
        ops.rotate_and_store(query, key, value, *angles, weight, weight, form, norm, slots)
        logits = empty(num_tokens, 8)
        ops.route(logits, None, RouteForm(2, "softmax", "sum", 1.0), torch.bfloat16)


def test_what_a_kernel_is_compiled_for_is_put_together_once_for_equal_layers() -> None:
    for form in FORMS:
        form.cache_clear()
    step(5)
    made = [form.cache_info().misses for form in FORMS]
    assert made == [3, 1, 1, 1]  # a norm adds, or does not, or takes the mean away
    for num_tokens in (5, 1, 40):
        step(num_tokens)
    assert [form.cache_info().misses for form in FORMS] == made
