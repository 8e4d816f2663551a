"""A scheduler's requests by the names of their fields, whichever of its parts a field stands in."""

from __future__ import annotations

from typing import Any

from slipstream_core.scheduler.request_table import NewRequest
from slipstream_ipc.messages import RequestSpec, SamplingParams

_OF_PARAMS = SamplingParams.__struct_fields__
_OF_SPEC = RequestSpec.__struct_fields__


def new_request(
    *,
    max_tokens: int,
    seed: int,
    num_logprobs: int = -1,
    stop_token_ids: tuple[int, ...] = (),
    **fields: Any,
) -> NewRequest:
    """num_logprobs: -1 is none."""
    of_params = {name: fields.pop(name) for name in _OF_PARAMS if name in fields}
    of_spec = {name: fields.pop(name) for name in _OF_SPEC if name in fields}
    params = SamplingParams(**{"logprobs": None if num_logprobs < 0 else num_logprobs} | of_params)
    spec = RequestSpec(params, **of_spec)
    return NewRequest(
        max_tokens=max_tokens, seed=seed, spec=spec, stop_token_ids=stop_token_ids, **fields
    )
