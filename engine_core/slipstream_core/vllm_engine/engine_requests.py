"""A scheduler request in vLLM's terms, and what vLLM's own front would refuse of it.

Stop strings, formats and the ends that they make are the worker's, and grammars are ours (`masks`):
vLLM is told of neither.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import numpy as np

from slipstream_core.scheduler.constraint_columns import TokenConstraints, token_constraints
from slipstream_core.scheduler.request_table import NewRequest
from slipstream_core.vllm_engine.settings import minor_version
from slipstream_ipc.messages import Admit, Fault, SamplingParams
from slipstream_ipc.validation.token_constraints import unpack_words

EARLIER = "slipstream_outputs"
"""In vLLM's `SamplingParams.extra_args`: the outputs that a request begins with."""

_NOT_A_SEED = -1  # vLLM takes it for none
_SEED_INSTEAD = 2**62 + 1


def engine_request(
    request: NewRequest,
    request_id: str,
    prompt_ids: list[int],
    outputs: list[int],
    lora_request: Any = None,
) -> Any:
    """The `EngineCoreRequest`. outputs: sampled before. lora_request: vLLM's."""
    from vllm.v1.engine import EngineCoreRequest

    params = vllm_params(
        request.spec.params,
        seed=request.seed,
        max_tokens=request.max_tokens,
        stop_token_ids=request.stop_token_ids,
        constraints=request.constraints,
        num_prompt_logprobs=request.num_prompt_logprobs,
    )
    if outputs:
        params.extra_args = {EARLIER: outputs}
    return EngineCoreRequest(
        request_id=request_id,
        prompt_token_ids=prompt_ids,
        mm_features=None,
        sampling_params=params,
        pooling_params=None,
        arrival_time=time.time(),
        lora_request=lora_request,
        # only requests with an equal one share cached blocks
        cache_salt=request.prefix_root.hex() or None,
        data_parallel_rank=None,
        priority=request.spec.priority,
    )


def vllm_params(
    params: SamplingParams,
    *,
    seed: int,
    max_tokens: int,
    stop_token_ids: Sequence[int],
    constraints: TokenConstraints | None,
    num_prompt_logprobs: int,
) -> Any:
    """vLLM's `SamplingParams`. Raises ValueError for what they cannot hold.

    Whatever samples has a seed, so that it can be continued after a death.
    """
    from vllm import SamplingParams as Params

    seed = _SEED_INSTEAD if seed == _NOT_A_SEED else seed
    own = TokenConstraints() if constraints is None else constraints
    made = Params(
        temperature=params.temperature,
        top_k=max(params.top_k, 0),
        top_p=params.top_p,
        min_p=params.min_p,
        seed=seed if params.temperature else None,
        max_tokens=max_tokens,
        min_tokens=params.min_tokens,
        stop_token_ids=list(stop_token_ids),
        ignore_eos=True,  # ids that end are among `stop_token_ids`
        detokenize=False,
        logprobs=params.logprobs,
        logprob_token_ids=list(params.logprob_token_ids or ()) or None,
        prompt_logprobs=None if num_prompt_logprobs < 0 else num_prompt_logprobs,
        presence_penalty=own.presence,
        frequency_penalty=own.frequency,
        repetition_penalty=own.repetition,
        logit_bias=dict(zip(own.bias_ids.tolist(), own.biases.tolist(), strict=True)) or None,
        allowed_token_ids=None if own.allowed is None else _ids_of(own.allowed),
    )
    made.skip_clone = True
    words = [[token_id] for token_id in own.banned_ids.tolist()] + [list(w) for w in own.words]
    if words:
        made._bad_words_token_ids = words
    return made


class Objections:
    """Refuses what vLLM's own front would refuse. Called with each registration."""

    def __init__(self, vllm_config: Any, version: str) -> None:
        self._config, self._version = vllm_config, version
        # when 0.30 moves a request in a batch, its mask stays and applies to the next request there
        self._mixes_allowed_ids = minor_version(version) < (0, 31)
        self._without_masks: str | None = None  # what takes no masks of ours
        if vllm_config.speculative_config is not None:
            self._without_masks = "speculative decoding"  # a draft would need one, too
        elif vllm_config.scheduler_config.async_scheduling:
            # a turn would ask for them before the tokens of the one before have left vLLM
            self._without_masks = "asynchronous scheduling"

    def __call__(self, admit: Admit) -> Fault | None:
        """The reason why vLLM cannot compute a registration; None if it can."""
        params, derived = admit.spec.params, admit.derived
        config = self._config
        if (without := self._without_masks) is not None:
            if params.structured_outputs is not None:
                why = f"got a grammar, allowed: none with --engine vllm and {without}"
                return Fault("bad_request", f"structured_outputs: {why}", "structured_outputs")
            if params.thinking_token_budget is not None:
                why = f"allowed: none with --engine vllm and {without}"
                return Fault("bad_request", why, "thinking_token_budget")
        if self._mixes_allowed_ids and params.allowed_token_ids is not None:
            why = f"vLLM {self._version} applies them to other requests, too, allowed: from 0.31 on"
            return Fault("bad_request", f"allowed_token_ids: {why}", "allowed_token_ids")
        words = unpack_words(derived.bad_word_ids, derived.bad_word_counts)
        try:
            made = vllm_params(
                params,
                seed=derived.seed,
                max_tokens=derived.max_tokens,
                stop_token_ids=derived.stop_token_ids,
                constraints=token_constraints(params, words),
                num_prompt_logprobs=-1
                if params.prompt_logprobs is None
                else params.prompt_logprobs,
            )
            made.verify(
                config.model_config,
                config.speculative_config,
                config.structured_outputs_config,
                None,
            )
        except ValueError as error:
            field = getattr(error, "parameter", None) or _first_word(str(error), params)
            return Fault("bad_request", f"vLLM: {error}", field)
        return None


def _first_word(message: str, params: SamplingParams) -> str | None:
    """The parameter that a message begins with, as vLLM's do where they do not name it apart."""
    word = message.partition(" ")[0]
    return word if word in params.__struct_fields__ else None


def _ids_of(mask: bytes) -> list[int]:
    bits = np.unpackbits(np.frombuffer(mask, np.uint8), bitorder="little")
    ids: list[int] = np.flatnonzero(bits).tolist()
    return ids
