"""One turn of vLLM's loop: what it may compute, and what it has computed as columns."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from slipstream_core.step.plan import Candidates, Logprobs, StepResult
from slipstream_ipc.arrays import Int64s


@dataclass(frozen=True, slots=True)
class PromptScores:
    """The prompts that a turn has scored, whole."""

    request_ids: tuple[str, ...]  # [P]

    @property
    def starts(self) -> Int64s:
        """The first position of each, [P]."""
        return np.zeros(len(self.request_ids), np.int64)


@dataclass(slots=True, eq=False)
class VllmTurn:
    """A turn. The first fields are set when it is planned; the others while it runs, and are read
    once it is collected.
    """

    step: int
    rows: Int64s  # those of the requests in vLLM, which it may compute
    begins: list[Any] = field(default_factory=list)  # `EngineCoreRequest`, new in this turn
    masked_ids: list[str] = field(default_factory=list)  # of requests that sample with a mask
    num_tokens: int = 0
    prompt: PromptScores | None = None
    request_ids: list[str] = field(default_factory=list)  # [S] that got tokens
    cached: list[tuple[str, int]] = field(default_factory=list)  # that began: id, cached tokens
    ended: list[tuple[str, str]] = field(default_factory=list)  # that vLLM let go: id, reason

    @property
    def num_requests(self) -> int:
        """The requests that got tokens."""
        return len(self.request_ids)

    @property
    def is_proposal(self) -> bool:
        """False: vLLM drafts within its steps."""
        return False

    @property
    def awaits_masks(self) -> bool:
        """True if `VllmRunner.sample` has to be called before the turn can sample."""
        return bool(self.masked_ids)


def result_of(turn: VllmTurn, outputs: Iterable[Any], model_output: Any) -> StepResult:
    """The columns of a turn's tokens; fills in what was not known before of `turn`.

    outputs: `EngineCoreOutput` of each request that has something new. model_output: the
    `ModelRunnerOutput` they were made from, whose log-probabilities are taken whole; or None.
    """
    ids, tokens, counts = turn.request_ids, list[int](), list[int]()
    scored: list[str] = []
    prompts: list[Candidates] = []
    for out in outputs:
        if out.prefill_stats is not None:
            turn.cached.append((out.request_id, out.prefill_stats.num_cached_tokens))
        if out.new_prompt_logprobs_tensors is not None:
            scored.append(out.request_id)
            prompts.append(_candidates(out.new_prompt_logprobs_tensors))
        if out.finish_reason is not None:
            turn.ended.append((out.request_id, str(out.finish_reason)))
        new = out.new_token_ids
        if new:
            ids.append(out.request_id)
            tokens += new
            counts.append(len(new))
    if prompts:
        turn.prompt = PromptScores(tuple(scored))
    has_spans = len(tokens) != len(ids)
    columns = np.array(counts, np.int64) if has_spans else None
    logprobs = None
    if ids and model_output is not None and model_output.logprobs is not None:
        logprobs = _logprobs(model_output, ids, columns)
    return StepResult(
        turn.step,
        np.array(tokens, np.int64),
        logprobs,
        prompt=tuple(prompts),
        counts=columns,
    )


def _logprobs(model_output: Any, ids: list[str], counts: Int64s | None) -> Logprobs:
    """The log-probabilities of the tokens of these requests, in their order."""
    lists, index = model_output.logprobs, model_output.req_id_to_index
    at = np.fromiter((index[request_id] for request_id in ids), np.int64, len(ids))
    if lists.cu_num_generated_tokens is not None:
        at = np.asarray(lists.cu_num_generated_tokens, np.int64)[at]
    if counts is not None:
        firsts = np.cumsum(counts) - counts
        at = np.repeat(at - firsts, counts) + np.arange(counts.sum())
    return Logprobs(
        np.ascontiguousarray(lists.logprobs[at], np.float32),
        lists.logprob_token_ids[at].astype(np.uint32),
        lists.sampled_token_ranks[at].astype(np.uint32),
    )


def _candidates(tensors: Any) -> Candidates:
    """A prompt's log-probabilities, from the second token on."""
    return Candidates(
        tensors.logprobs.float().cpu().numpy(),
        tensors.logprob_token_ids.cpu().numpy().astype(np.uint32),
        tensors.selected_token_ranks.cpu().numpy().astype(np.uint32),
    )
