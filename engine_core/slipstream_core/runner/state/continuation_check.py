"""Checks that a mixer gives in chunks and single steps what it gives at once.

Some of transformers' mixers forget their state where a chunk of more than one token continues a
row (Mamba-1, in Jamba): the text would be wrong, and nothing would say so. So each kind of mixer is
tried with its loaded weights. One that fails in chunks alone has its chunks computed token by
token; one that fails in single steps, too, cannot be served.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence

import numpy as np
import torch

from slipstream_core.runner.state.mixers import Mixer
from slipstream_core.runner.state.state_cache import MixerStates
from slipstream_core.runner.state.state_pool import StatePool, StateStep

logger = logging.getLogger(__name__)

_NUM_TOKENS = 7
_STEPS = (1,) * _NUM_TOKENS
_CHUNKS = ((4, 3), (2, 1, 1, 3))
_SLOT = 1
# relative to the largest output: chunks sum in another order than single steps
_TOLERANCES = {torch.float32: 1e-3}
_TOLERANCE = 5e-2  # of dtypes with few digits
_POWER = 10.0  # times the tolerance: what a forgotten state has to change


def check_continuation(
    name: str,
    mixers: Sequence[Mixer],
    states: Sequence[MixerStates],
    *,
    width: int,
    dtype: torch.dtype,
) -> None:
    """Try each kind of mixer on inputs of `width`, and set `is_stepped` of those that need it.

    Raises ValueError for one that cannot be continued.
    """
    generator = torch.Generator().manual_seed(1)
    inputs = torch.randn(1, _NUM_TOKENS, width, generator=generator).to(dtype)
    tolerance = _TOLERANCES.get(dtype, _TOLERANCE)
    fails_in_chunks: dict[str, bool] = {}
    with torch.inference_mode():
        for mixer, own in zip(mixers, states, strict=True):
            if mixer.kind not in fails_in_chunks:
                fails_in_chunks[mixer.kind] = _fails_in_chunks(mixer, own, inputs, tolerance)
            mixer.is_stepped = fails_in_chunks[mixer.kind]
    for kind, fails in fails_in_chunks.items():
        if fails:
            logger.warning(
                "%s: %s gives other results where a chunk of a prompt continues another, so such "
                "chunks are computed token by token, which takes longer",
                name,
                kind,
            )


def _fails_in_chunks(
    mixer: Mixer, states: MixerStates, inputs: torch.Tensor, tolerance: float
) -> bool:
    whole = _mixed(mixer, states, inputs, (_NUM_TOKENS,))
    allowed = tolerance * whole.abs().max()

    def differ(lens: tuple[int, ...]) -> bool:
        off = (_mixed(mixer, states, inputs, lens) - whole).abs().max()
        return not bool(off <= allowed)

    if differ(_STEPS):
        raise ValueError(f"{mixer.kind} gives other results in single steps than at once")
    begin = _CHUNKS[0][0]
    forgotten = _mixed(mixer, states, inputs[:, begin:], (_NUM_TOKENS - begin,))
    # a state that changes little would not be missed here
    if not bool((forgotten - whole[:, begin:]).abs().max() > _POWER * allowed):
        return True
    return any(differ(lens) for lens in _CHUNKS)


def _mixed(
    mixer: Mixer, states: MixerStates, inputs: torch.Tensor, lens: Sequence[int]
) -> torch.Tensor:
    """Outputs float32 [1, L, width] of a row that is computed in chunks of these lengths."""
    pool = StatePool({mixer.number: states}, _SLOT + 1, inputs.device)
    outputs, start = [], 0
    for length in lens:
        step = StateStep(
            pool,
            slots=np.array([_SLOT]),
            query_lens=np.array([length], np.int32),
            starts=np.array([start], np.int32),
            num_decodes=int(length == 1 and start > 0),
        )
        outputs.append(step.mix(mixer, inputs[:, start : start + length]).float())
        start += length
    return torch.cat(outputs, dim=1)
