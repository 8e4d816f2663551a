"""The masks of our grammars for vLLM's sampler, which asks for its own grammars' otherwise.

vLLM's thread asks while the forward pass of a turn runs, and waits for the engine, which has them
once the tokens of the turn before are in the histories.
"""

from __future__ import annotations

from queue import SimpleQueue
from typing import Any

import numpy as np
import numpy.typing as npt

from slipstream_core.vllm_engine.turn import VllmTurn

Int32s = npt.NDArray[np.int32]


class GivenMasks:
    """The masks of turns, in launch order; from the engine's thread to vLLM's."""

    def __init__(self) -> None:
        self._given: SimpleQueue[tuple[int, Int32s] | None] = SimpleQueue()

    def give(self, step: int, masks: Int32s) -> None:
        """The masks of a turn, [G, ceil(vocab / 32)]."""
        self._given.put((step, masks))

    def close(self) -> None:
        """No more masks come: a turn that waits for some fails."""
        self._given.put(None)

    def bitmask(self, turn: VllmTurn, scheduled: Any, requests: Any) -> Any:
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
        masks = self._take(turn.step)
        from vllm.v1.core.sched.output import GrammarOutput

        return GrammarOutput(
            structured_output_request_ids=sampled,
            grammar_bitmask=np.ascontiguousarray(masks[[at[each] for each in sampled]]),
        )

    def _take(self, step: int) -> Int32s:
        while (given := self._given.get()) is not None:
            if given[0] == step:
                return given[1]
        raise RuntimeError("the engine ends, and gives no masks")
