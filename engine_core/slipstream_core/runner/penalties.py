"""Presence, frequency and repetition penalties on a step's logits.

Owns: what they mean, and the counts of tokens that they need. Knows no requests: a plan's `Rules`
say which row has what.

Rules:
- As in vLLM: first the repetition penalty, over prompt and outputs (Keskar et al., 2019, CTRL),
  then frequency and presence, over outputs alone (as OpenAI defines them).
- Memory grows with the rows that have penalties at once, and is kept: 4 bytes a token of the
  vocabulary and row, one more once a row has a repetition penalty.
- The work is a few passes over the rows with penalties; on a CPU a few rows at a time, so that what
  lies between them stays in its cache.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch

from slipstream_core.runner.rules import Refill, Rules

_CPU_CHUNK = 1 << 17  # elements


class Penalties:
    """Of one runner."""

    def __init__(self, vocab_size: int, device: torch.device) -> None:
        self._device = device
        # by lane and token: how often it was output, and whether it is in the prompt
        self._counts = torch.zeros((0, vocab_size), dtype=torch.int32, device=device)
        self._in_prompt = torch.zeros((0, vocab_size), dtype=torch.bool, device=device)

    def load(self, rules: Rules) -> None:
        """These rules are meant from now on."""
        self._places = self._to(rules.penalty_places)
        self._lanes = self._to(rules.count_lanes)
        self._repetitions = self._to(rules.repetitions)[:, None]
        self._frequencies = self._to(rules.frequencies)[:, None]
        self._presences = self._to(rules.presences)[:, None]
        self._any_repetition = rules.any_repetition

    def refill(self, refill: Refill) -> None:
        """Rows got lanes; these are their tokens."""
        if not len(refill.count_lanes):
            return
        missing = int(refill.count_lanes.max()) + 1 - len(self._counts)
        if missing > 0:
            more = max(missing, len(self._counts))
            self._counts = _with_lanes(self._counts, more)
            self._in_prompt = _with_lanes(self._in_prompt, more)
        lanes = self._to(refill.count_lanes)
        self._counts[lanes] = 0
        self._in_prompt[lanes] = False
        at = self._to(refill.prompt_lanes), self._to(refill.prompt_ids)
        self._in_prompt[at] = True
        at = self._to(refill.output_lanes), self._to(refill.output_ids)
        once = torch.ones(1, dtype=torch.int32, device=self._device).expand(len(at[0]))
        self._counts.index_put_(at, once, accumulate=True)

    def apply(self, logits: torch.Tensor) -> None:
        """Change the logits of the rows with rules, float32 [C, vocab], in place."""
        num = len(self._places)
        chunk = num
        if logits.device.type == "cpu":
            chunk = max(1, _CPU_CHUNK // logits.shape[1])
        for start in range(0, num, max(1, chunk)):
            part = slice(start, start + chunk)
            places = self._places[part]
            logits[places] = self._penalised(logits[places], part)

    def sampled(self, token_ids: torch.Tensor) -> None:
        """The rows with rules sampled these, int64 [C]."""
        if len(self._places):
            self._counts[self._lanes, token_ids[self._places]] += 1

    def _penalised(self, logits: torch.Tensor, part: slice) -> torch.Tensor:
        lanes = self._lanes[part]
        counts = self._counts[lanes]
        was_output = counts > 0
        if self._any_repetition:
            repetition = self._repetitions[part]
            seen = was_output | self._in_prompt[lanes]
            changed = torch.where(logits > 0, logits / repetition, logits * repetition)
            logits = torch.where(seen, changed, logits)
        logits -= self._frequencies[part] * counts
        logits -= self._presences[part] * was_output
        return logits

    def _to(self, column: npt.NDArray[np.generic]) -> torch.Tensor:
        return torch.from_numpy(column).to(self._device, non_blocking=True)


def _with_lanes(table: torch.Tensor, more: int) -> torch.Tensor:
    return torch.cat([table, table.new_zeros((more, table.shape[1]))])
