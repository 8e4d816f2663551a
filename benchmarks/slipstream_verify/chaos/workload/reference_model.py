"""Checks whether a real model could have produced a stream, with one forward pass over all of it:
the margin of each token below the best one, in float32, by transformers.

- A recomputed position may differ in its last bits (another batch, a prefill in place of a decode).
  So a token that is not the best one (of the noised logits, where it was sampled) is right if it
  lies within TOLERANCE of it, and is counted as a near tie.
- Where a truncation's edge is that close, the token may lie on either side of it: it must lie
  inside the wider edge, and is compared with the best token inside the narrower one.
- Top-p and min-p need a top-k here: without one the sampler may draw several times.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
from msgspec import Struct

from slipstream.request.requests import new_submit
from slipstream_ipc.columns import pack_u32
from slipstream_ipc.messages import Admit, ModelCard, RequestSpec
from slipstream_verify.chaos.workload.chaos_workload import ChaosRequest
from slipstream_worker.streams.registration import register

if TYPE_CHECKING:
    import torch

    from slipstream_verify.chaos.workload.grammar_masks import GrammarMasks

TOLERANCE = 1e-4
_POSITIONS = 128  # positions at a time: a row of logits may be large


class ReferenceSummary(Struct, frozen=True):
    """Margins over all checked tokens."""

    num_tokens: int
    num_near_ties: int
    num_wrong: int
    largest_margin: float


class ReferenceModel:
    """A model loaded for checking only. card: of the stack that serves it."""

    def __init__(self, card: ModelCard) -> None:
        import torch
        from transformers import AutoModelForCausalLM

        self._card = card
        self._grammars: GrammarMasks | None = None
        model = AutoModelForCausalLM.from_pretrained(card.path, dtype=torch.float32)
        self._model = model.eval()  # type: ignore[no-untyped-call]

    def margins(
        self, request: ChaosRequest, prompt_ids: Sequence[int], token_ids: Sequence[int]
    ) -> list[float]:
        """How far each token lies below the best one; 0 for the best one."""
        import torch

        if not token_ids:
            return []
        submit = new_submit(request.prompt, request.params, stream_id=request.stream_id)
        admit = register(
            *(submit, pack_u32(list(prompt_ids)), b"", self._card),
            spec=RequestSpec(request.params),
            fingerprint=b"",
        )
        allowed = self._allowed(admit, token_ids)
        with torch.inference_mode():
            hidden = torch.tensor([[*prompt_ids, *token_ids[:-1]]])
            logits = self._model(hidden, logits_to_keep=len(token_ids)).logits[0].float()
            found: list[float] = []
            for begin in range(0, len(token_ids), _POSITIONS):
                part = token_ids[begin : begin + _POSITIONS]
                rows = logits[begin : begin + len(part)]
                mask = None if allowed is None else allowed[begin : begin + len(part)]
                found += margins_of(rows, part, admit, len(prompt_ids), begin, mask)
        return found

    def _allowed(self, admit: Admit, token_ids: Sequence[int]) -> torch.Tensor | None:
        """The tokens that the request's grammar allows, bool [N, vocab]; None without a grammar."""
        if admit.spec.params.structured_outputs is None:
            return None
        from slipstream_verify.chaos.workload.grammar_masks import GrammarMasks

        if self._grammars is None:
            self._grammars = GrammarMasks(self._card)
        return self._grammars.allowed(admit, token_ids)


def margins_of(
    logits: torch.Tensor,
    token_ids: Sequence[int],
    admit: Admit,
    prompt_len: int,
    num_before: int,
    grammar: torch.Tensor | None = None,
) -> list[float]:
    """Margins of N output tokens, from the raw logits [N, vocab] at their positions. Pure.

    num_before: outputs before the first of them. grammar: the allowed tokens, bool [N, vocab].
    """
    import torch

    from slipstream_core.sampling.noise import exponential, row_keys

    params = admit.spec.params
    num = len(token_ids)
    ids = torch.tensor(token_ids)[:, None]
    allowed = logits.clone()
    num_masked = max(0, min(num, params.min_tokens - num_before))
    allowed[:num_masked, list(admit.derived.stop_token_ids)] = -torch.inf
    if grammar is not None:
        allowed.masked_fill_(~grammar, -torch.inf)
    if params.temperature == 0:
        return _below(allowed, allowed, ids)
    scaled = allowed / max(params.temperature, 1e-5)
    positions = prompt_len + num_before + np.arange(num)
    keys = torch.from_numpy(row_keys(np.full(num, admit.derived.seed, np.int64), positions))
    vocab = torch.arange(logits.shape[1], dtype=torch.int32)
    scores = scaled - exponential(keys, vocab).log()
    top_k = params.top_k if 0 < params.top_k < logits.shape[1] else 0
    if not top_k:
        assert params.top_p == 1
        assert params.min_p == 0
        return _below(scores, scores, ids)
    wide = scores.masked_fill(~_kept(scaled, top_k, params.top_p, params.min_p, 1), -torch.inf)
    narrow = scores.masked_fill(~_kept(scaled, top_k, params.top_p, params.min_p, -1), -torch.inf)
    return _below(narrow, wide, ids)


def _below(scores: torch.Tensor, own_scores: torch.Tensor, ids: torch.Tensor) -> list[float]:
    """How far each token's own score lies below the best one; never negative."""
    below = scores.amax(-1, keepdim=True) - own_scores.gather(1, ids)
    found: list[float] = below[:, 0].clamp(min=0).tolist()
    return found


def _kept(scaled: torch.Tensor, top_k: int, top_p: float, min_p: float, side: int) -> torch.Tensor:
    """The tokens that truncation keeps, bool [N, vocab], with edges moved by TOLERANCE: side 1 is
    wider.
    """
    slack = side * TOLERANCE
    values = scaled.topk(top_k, dim=-1).values
    probs = values.softmax(-1)  # over what top-k keeps, which top-p applies to
    before = probs.cumsum(-1) - probs
    inside = before < top_p + slack if top_p < 1 else before >= 0
    inside &= probs >= min_p * probs[:, :1] * (1 - slack)
    inside[:, 0] = True
    last = values.masked_fill(~inside, float("inf")).amin(-1, keepdim=True)
    return scaled >= last - slack


def summarise(margins: Sequence[float]) -> ReferenceSummary:
    """The summary over all tokens."""
    ties = [margin for margin in margins if 0 < margin <= TOLERANCE]
    wrong = [margin for margin in margins if margin > TOLERANCE]
    return ReferenceSummary(len(margins), len(ties), len(wrong), max(margins, default=0.0))
