"""Imported by vLLM in each process that computes, so that requests can begin with outputs there.

Its runner V2 is sent all tokens of a request that begins, and draws noise by seed and position: it
needs nothing. V1 is sent the prompt alone and keeps an empty list of outputs, so that penalties,
bad words, min_tokens and seeds would begin anew. Here it gets the outputs that `resume` has put
beside the parameters, and generators that stand where those outputs left them.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property, wraps
from typing import Any

import torch

from slipstream_core.vllm_engine.engine_requests import EARLIER

_MAX_DRAW = 2**31
_DRAWS_AT_ONCE = 1 << 16


class BeginsWithOutputs:
    """Mixed into vLLM's worker; it has nothing of its own, as the import is what counts."""


class _CpuGenerator(torch.Generator):
    """The generator of a request on a CPU, which draws as often for each of its outputs.

    torch's generators of CPUs have no offset to be set to: this one begins anew, and draws as often
    as its outputs did.
    """

    outputs: list[int]  # of the request, as they grow
    num_each: int  # draws for an output

    def get_offset(self) -> int:
        """The number of outputs that have drawn."""
        return len(self.outputs)

    def set_offset(self, _offset: int) -> torch.Generator:
        """Stand behind the request's outputs."""
        self.manual_seed(self.initial_seed())
        _draw(self, len(self.outputs) * self.num_each)
        return self


class _Sampler:
    """The sampler of vLLM's runner, as far as it draws from generators of CPUs."""

    def __init__(self, sample: Callable[..., object], vocab_size: int) -> None:
        """sample: (logits [rows, vocab_size] f32, generators by row, top_k, top_p)."""
        self._sample, self._vocab_size = sample, vocab_size

    @cached_property
    def num_draws(self) -> int:
        """Draws for an output, found by a trial: 0.30 draws for each id of the vocabulary, later
        releases once.

        Raises RuntimeError: it is another number.
        """
        drawn, tried = torch.Generator().manual_seed(0), torch.Generator().manual_seed(0)
        self._sample(torch.zeros(1, self._vocab_size), {0: drawn}, None, None)
        done = 0
        for num in (1, self._vocab_size):
            _draw(tried, num - done)
            done = num
            if torch.equal(drawn.get_state(), tried.get_state()):
                return num
        raise RuntimeError(
            "vLLM's sampler draws in a way that is not known: an output takes neither one draw of "
            f"its request's generator nor {self._vocab_size}, so no request could go on after a "
            "death"
        )


def _patch() -> None:
    from vllm.v1.worker import gpu_model_runner as module

    made, runner = module.CachedRequestState, module.GPUModelRunner
    if getattr(made, "begins_with_outputs", False):
        return
    samplers: list[_Sampler] = []  # of the latest runner
    initialise = runner.__init__

    @wraps(initialise)
    def note_sampler(self: Any, vllm_config: Any, *others: Any, **named: Any) -> None:
        initialise(self, vllm_config, *others, **named)
        vocab_size = vllm_config.model_config.get_vocab_size()
        samplers[:] = [_Sampler(self.sampler.topk_topp_sampler, vocab_size)]

    def begin(**fields: Any) -> Any:
        params, generator = fields.get("sampling_params"), fields.get("generator")
        earlier = (params.extra_args or {}).get(EARLIER) if params is not None else None
        outputs = list(earlier or ())
        fields["output_token_ids"] = outputs
        if generator is not None and generator.device.type == "cpu":
            num_each = samplers[0].num_draws
            fields["generator"] = _cpu_generator(generator.initial_seed(), outputs, num_each)
        return made(**fields)

    begin.begins_with_outputs = True  # type: ignore[attr-defined]
    module.CachedRequestState, runner.__init__ = begin, note_sampler


def _cpu_generator(seed: int, outputs: list[int], num_each: int) -> _CpuGenerator:
    generator = _CpuGenerator(device="cpu")
    generator.outputs, generator.num_each = outputs, num_each
    generator.manual_seed(seed)
    generator.set_offset(len(outputs))
    return generator


def _draw(generator: torch.Generator, num: int) -> None:
    """Draw so often: an exponential and a random integer take as much of a CPU's generator."""
    for begin in range(0, num, _DRAWS_AT_ONCE):
        size = (min(_DRAWS_AT_ONCE, num - begin),)
        torch.randint(0, _MAX_DRAW, size, generator=generator, dtype=torch.long)


_patch()
