"""Checks that a mixer gives in chunks and single steps what it gives at once.

Some of transformers' mixers forget their state where a chunk of more than one token continues a
row (Mamba-1, in Jamba): the text would be wrong, and nothing would say so. So each kind of mixer is
tried with its loaded weights, in float32: what is tried is its code, and few digits would hide a
state that is forgotten. One that fails in chunks alone has its chunks computed token by token,
unless kernels compute it; one that fails in single steps, too, cannot be served.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from slipstream_core.states.mixers import Mixer
from slipstream_core.states.state_cache import EachTokenAlone, MixerStates
from slipstream_core.states.state_pool import StatePool, StateStep

_NUM_TOKENS = 7
_STEPS = (1,) * _NUM_TOKENS
_CHUNKS = ((4, 3), (2, 1, 1, 3))
_SLOT = 1
# relative to the largest output: chunks sum in another order than single steps
_TOLERANCE = 1e-3
_POWER = 10.0  # times the tolerance: what a forgotten state has to change


def check_continuation(mixers: Sequence[Mixer]) -> str:
    """Try each kind of mixer, and set `is_stepped` of those that need it; returns why some do.

    A trial forward has run (`read_states`). Raises ValueError for a mixer that cannot be continued.
    """
    faults: dict[tuple[type, int], str | None] = {}
    for mixer in mixers:
        kind = type(mixer.module), mixer.width
        if kind not in faults:
            twin = mixer.in_float32()
            twin.unlimit()
            with torch.inference_mode():
                faults[kind] = _fault_of_chunks(twin)
        mixer.is_stepped = faults[kind] is not None
    said = {f"{kind.__name__} {fault}" for (kind, _), fault in faults.items() if fault is not None}
    return ", ".join(sorted(said))


def _fault_of_chunks(mixer: Mixer) -> str | None:
    """Return why a float32 mixer cannot continue a row with a chunk; None if it can."""
    generator = torch.Generator().manual_seed(1)
    inputs = torch.randn(1, _NUM_TOKENS, mixer.width, generator=generator)
    inputs = inputs.to(next(mixer.module.parameters(), inputs).device)
    alone = EachTokenAlone()
    alone.mix(mixer, inputs)
    states = alone.shapes[mixer]
    whole = _mixed(mixer, states, inputs, (_NUM_TOKENS,))
    allowed = _TOLERANCE * whole.abs().max()

    def differ(lens: tuple[int, ...]) -> bool:
        off = (_mixed(mixer, states, inputs, lens) - whole).abs().max()
        return not bool(off <= allowed)

    if differ(_STEPS):
        raise ValueError(f"{mixer.kind} gives other results in single steps than at once")
    # transformers' own Mamba-1 does, without an error (decision 029)
    if any(differ(lens) for lens in _CHUNKS):
        return "forgets its state where a chunk continues a row"
    begin = _CHUNKS[0][0]
    forgotten = _mixed(mixer, states, inputs[:, begin:], (_NUM_TOKENS - begin,))
    # a state that changes little would not be missed here
    if not bool((forgotten - whole[:, begin:]).abs().max() > _POWER * allowed):
        return "shows no effect of its state in a trial"
    return None


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
            prompt_lens=np.array([sum(lens)], np.int32),
            num_decodes=int(length == 1 and start > 0),
        )
        outputs.append(step.mix(mixer, inputs[:, start : start + length]).float())
        start += length
    return torch.cat(outputs, dim=1)
