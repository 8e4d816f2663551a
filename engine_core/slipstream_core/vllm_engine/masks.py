"""The masks of our grammars for vLLM's sampler, which asks for its own grammars' otherwise.

vLLM's thread asks while the forward pass of a turn runs, and waits for the engine, which has them
once the tokens of the turn before are in the histories.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from slipstream_core.step.awaited_masks import AwaitedMasks
from slipstream_core.vllm_engine.turn import VllmTurn


def grammar_output(masks: AwaitedMasks, turn: VllmTurn, scheduled: Any, requests: Any) -> Any:
    """The `GrammarOutput` of a turn's requests that sample with a mask; None: none does.

    scheduled: vLLM's `SchedulerOutput`. requests: its scheduler's, by id.
    """
    if not turn.masked_ids:
        return None
    at = {request_id: i for i, request_id in enumerate(turn.masked_ids)}
    sampled = [
        request_id
        for request_id in scheduled.num_scheduled_tokens
        if request_id in at
        and (request := requests.get(request_id)) is not None
        and not request.is_prefill_chunk
    ]
    if not sampled:
        return None
    rows = masks.wait(turn.step)
    from vllm.v1.core.sched.output import GrammarOutput

    return GrammarOutput(
        structured_output_request_ids=sampled,
        grammar_bitmask=np.ascontiguousarray(rows[[at[each] for each in sampled]]),
    )
