"""Log-probabilities of given tokens and of the most likely ones, from logits.

Owns: the passes over the vocabulary, a bounded number of logits at a time. Does not know: plans,
requests. Two users: rows that want more than the sampler's columns are wide, and prompts.
"""

from __future__ import annotations

import torch

from slipstream_ipc.wide_logprobs import Candidates, joined

_LOGITS_AT_ONCE = 2**22  # temporaries of 16 MiB each


def candidates(logits: torch.Tensor, token_ids: torch.Tensor, num_logprobs: int) -> Candidates:
    """Of each row of `logits` [N, vocab] its token's and the `num_logprobs` most likely ones'.

    `token_ids` is int64 [N], on the logits' device. The result is on the host.
    """
    rows = max(1, _LOGITS_AT_ONCE // logits.shape[1])
    pieces = [
        _candidates(logits[begin : begin + rows], token_ids[begin : begin + rows], num_logprobs)
        for begin in range(0, len(logits), rows)
    ]
    return joined(pieces, 1 + num_logprobs)


def _candidates(logits: torch.Tensor, token_ids: torch.Tensor, num_logprobs: int) -> Candidates:
    logits = logits.float()
    own = logits.gather(1, token_ids[:, None])
    ranks = (logits > own).sum(-1) + 1
    values, ids = own, token_ids[:, None]
    if num_logprobs:
        top_values, top_ids = logits.topk(min(num_logprobs, logits.shape[1]), dim=-1)
        values, ids = torch.cat([own, top_values], 1), torch.cat([ids, top_ids], 1)
    values = values - logits.logsumexp(-1, keepdim=True)
    return Candidates(
        values.cpu().numpy(),
        ids.int().cpu().numpy().view("u4"),
        ranks.int().cpu().numpy().view("u4"),
    )
