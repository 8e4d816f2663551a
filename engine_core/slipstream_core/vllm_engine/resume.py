"""Begins a request of vLLM's engine, with the outputs that an earlier core has sampled, if any.

vLLM itself goes on with requests that it has preempted, whose outputs are outputs: so penalties,
min_tokens, bad words and seeds go on where they were. As a longer prompt they would begin anew.
"""

from __future__ import annotations

from typing import Any

from slipstream_core.vllm_engine.engine_requests import EARLIER


def begin(core: Any, made: Any) -> None:
    """Add an `EngineCoreRequest` to vLLM's engine core, on the thread that drives it."""
    request, wave = core.preprocess_add_request(made)
    outputs = (made.sampling_params.extra_args or {}).get(EARLIER)
    if outputs:
        request.append_output_token_ids(list(outputs))
    core.add_request(request, wave)
