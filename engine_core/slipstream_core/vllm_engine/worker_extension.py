"""Imported by vLLM in each process that computes, so that requests can begin with outputs there.

Its runner V2 is sent all tokens of a request that begins, and draws noise by seed and position: it
needs nothing. V1 is sent the prompt alone and keeps an empty list of outputs, so that penalties,
bad words, min_tokens and seeds would begin anew. Here it gets the outputs that `resume` has put
beside the parameters, and generators that stand where those outputs left them.
"""

from __future__ import annotations

from typing import Any

import torch

from slipstream_core.vllm_engine.engine_requests import EARLIER

_MAX_DRAW = 2**31


class BeginsWithOutputs:
    """Mixed into vLLM's worker; it has nothing of its own, as the import is what counts."""


class _CpuGenerator(torch.Generator):
    """The generator of a request on a CPU, which draws one number for each of its outputs.

    torch's generators of CPUs have no offset to be set to: this one begins anew, and draws as often
    as there are outputs.
    """

    outputs: list[int]  # of the request, as they grow

    def get_offset(self) -> int:
        """The draws that the request's outputs took."""
        return len(self.outputs)

    def set_offset(self, _offset: int) -> torch.Generator:
        """Stand behind the request's outputs."""
        self.manual_seed(self.initial_seed())
        for _ in self.outputs:
            torch.randint(0, _MAX_DRAW, (1,), generator=self, dtype=torch.long)
        return self


def _patch() -> None:
    from vllm.v1.worker import gpu_model_runner as module

    made = module.CachedRequestState
    if getattr(made, "begins_with_outputs", False):
        return

    def begin(**fields: Any) -> Any:
        params, generator = fields.get("sampling_params"), fields.get("generator")
        earlier = (params.extra_args or {}).get(EARLIER) if params is not None else None
        outputs = list(earlier or ())
        fields["output_token_ids"] = outputs
        if generator is not None and generator.device.type == "cpu":
            fields["generator"] = _cpu_generator(generator.initial_seed(), outputs)
        return made(**fields)

    begin.begins_with_outputs = True  # type: ignore[attr-defined]
    module.CachedRequestState = begin


def _cpu_generator(seed: int, outputs: list[int]) -> _CpuGenerator:
    generator = _CpuGenerator(device="cpu")
    generator.outputs = outputs
    generator.manual_seed(seed)
    generator.set_offset(len(outputs))
    return generator


_patch()
