"""Requests with token constraints, and the logits that are expected for them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from slipstream_core.scheduler.constraint_columns import TokenConstraints, token_constraints
from slipstream_ipc.messages import SamplingParams

Word = tuple[int, ...]


@dataclass(frozen=True)
class Asked:
    """A request's prompt and sampling parameters. words: its bad words, as token ids."""

    prompt: Word = (1, 2, 3)
    params: SamplingParams = field(default_factory=SamplingParams)
    words: tuple[Word, ...] = ()

    @property
    def constraints(self) -> TokenConstraints | None:
        return token_constraints(self.params, self.words)


def asked(prompt: Word = (1, 2, 3), words: Sequence[Word] = (), **params: Any) -> Asked:
    return Asked(prompt, SamplingParams(**params), tuple(words))


def expected_logits(logits: Sequence[float], it: Asked, outputs: Sequence[int]) -> list[float]:
    """The logits of one row after penalties and masks, computed token by token."""
    params, found = it.params, []
    for token_id, logit in enumerate(logits):
        value = logit + (params.logit_bias or {}).get(token_id, 0.0)
        if params.allowed_token_ids is not None and token_id not in params.allowed_token_ids:
            value = -math.inf
        for word in it.words:
            if tuple([*outputs, token_id][-len(word) :]) == word:
                value = -math.inf
        if token_id in it.prompt or token_id in outputs:
            r = params.repetition_penalty
            value = value / r if value > 0 else value * r
        num = list(outputs).count(token_id)
        value -= params.frequency_penalty * num + params.presence_penalty * (num > 0)
        found.append(value)
    return found
