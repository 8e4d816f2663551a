"""From a step's logits to its result: what is sampled is stored, shared among ranks, and delivered.

- Of several ranks the first one samples, and the others receive its ids, or all sample a plan that
  is `sliced` together. A step that cannot be sampled fails on the first rank alone; the others
  receive any ids, as its rows are computed again.
- A plan that awaits masks stops here until they arrive.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from slipstream_core.model.loader import LoadedModel
from slipstream_core.runner.decode_graphs import DecodeGraphs
from slipstream_core.runner.readback import EndedStep, Prompts, deliver, rows_of, wide
from slipstream_core.sampling.logits_processors import LogitsProcessors
from slipstream_core.sampling.logprobs import arrived, candidates
from slipstream_core.sampling.sampler import sample, undefined_of
from slipstream_core.sampling.slice_sampling import SliceSampler
from slipstream_core.sampling.whole_vocab_sampling import whole_vocab_sampler
from slipstream_core.sharding.collectives import gather_over_ranks, ids_from_lead, share_of
from slipstream_core.step.awaited_masks import AwaitedMasks
from slipstream_core.step.drafts import Unfolded, accepted, only_accepted
from slipstream_core.step.plan import PromptPlan, StepFailed, StepPlan, StepResult
from slipstream_core.step.staging import Copies, to_device


class SampleStage:
    """The last stage of a step, on the device's thread. masks: those that plans await.

    last_token: [max_num_seqs + 1] int64, each slot's last sampled token; one more for padding rows.
    vocab: [vocab] int32, all ids. share: columns of a rank's logits, where those are slices.
    """

    def __init__(
        self,
        model: LoadedModel,
        copies: Copies | None,
        *,
        max_num_seqs: int,
        max_model_len: int,
        native: bool,
        is_recorded: bool,
    ) -> None:
        """copies: of a card; None: a step ends with its job. native: with kernels. is_recorded: of
        forwards that are. Raises ModelLoadError.
        """
        device = model.device
        self._device, self._rank, self._copies = device, model.rank, copies
        self._vocab_size = model.vocab_size
        self.whole = None
        if native:
            self.whole = whole_vocab_sampler(model.vocab_size, device, model=model.name)
        self.last_token = torch.zeros(max_num_seqs + 1, dtype=torch.int64, device=device)
        self.logits_processors = LogitsProcessors(
            model.vocab_size, device, num_state_slots=max_num_seqs, max_model_len=max_model_len
        )
        self.vocab = torch.arange(model.vocab_size, dtype=torch.int32, device=device)
        self.share: int | None = None
        self._slices: SliceSampler | None = None
        if model.rank is not None and model.head_is_sliced:
            self.share = share_of(model.vocab_size, model.rank.size)
            # not with the kernels, whose noise is not torch's to the last bit, nor with recorded
            # forwards, which end in whole logits
            if self.whole is None and not is_recorded:
                self._slices = SliceSampler(self.vocab, model.rank)
        self.masks = AwaitedMasks()

    @property
    def may_slice(self) -> bool:
        """True if plans may be `sliced`; the same on all ranks."""
        return self._slices is not None

    def result_of(
        self,
        plan: StepPlan,
        logits: torch.Tensor,
        graphs: DecodeGraphs | None,
        drafts: Unfolded | None = None,
    ) -> Any:
        """The result of a step, from `logits` [S + N, vocab]. graphs: those that computed it.

        Returns a StepResult; with `copies`, the work is enqueued and a PendingStep is returned.
        """
        if self._rank is None:
            return self._sampled(plan, logits, graphs, drafts)
        if plan.sliced:
            return self._chosen(plan, logits)
        if self.share is not None and graphs is None:
            logits = gather_over_ranks(logits, self._vocab_size)
        if not self._rank.leads:
            return self._received(plan)
        num_rows = len(plan.temperatures)
        try:
            result = self._sampled(plan, logits, graphs)
        except torch.AcceleratorError:
            raise
        except Exception as error:
            if num_rows:
                ids_from_lead(torch.zeros(num_rows, dtype=torch.int64, device=self._device))
            raise StepFailed(plan.step, error) from error
        if num_rows:
            ids_from_lead(self.last_token[self._to(plan.slots[plan.samples])])
        return result

    def _sampled(
        self,
        plan: StepPlan,
        logits: torch.Tensor,
        graphs: DecodeGraphs | None,
        drafts: Unfolded | None = None,
    ) -> Any:
        """Sample from `logits` [S + N, vocab], and store and deliver what was sampled; of a step
        with drafts what is accepted.
        """
        prompt: Prompts = ()
        if plan.prompt is not None:
            num = len(logits) - len(plan.prompt.tokens)
            logits, prompt = logits[:num], self._of_prompts(logits[num:], plan.prompt)
        if len(logits) == 0:  # prefill chunks only
            nothing = StepResult(plan.step, np.empty(0, np.int64), None)
            if self._copies is None:
                return replace(nothing, prompt=tuple(map(arrived, prompt)))
            return EndedStep(nothing, self._copies.record(), prompt)
        masks = self.masks.wait(plan.step) if plan.awaits_masks else None
        if graphs is not None and (sampled := graphs.sample(plan, masks)) is not None:
            return sampled
        logits, constraints = logits.float(), plan.constraints
        allowed = None if constraints is None else self.logits_processors.apply(logits, constraints)
        token_ids, logprobs = sample(
            logits,
            plan,
            self.vocab,
            allowed=allowed,
            masks=masks,
            whole=self.whole,
            share=self.share,
        )
        undefined = undefined_of(logits, token_ids)
        found = None
        if drafts is not None:
            found = accepted(drafts, token_ids.numpy(), rows_of(undefined))
        if constraints is not None:
            self.logits_processors.sampled(token_ids, None if found is None else found.is_kept)
        slots = plan.slots[plan.samples]
        more = wide(logits, token_ids, plan, self._copies) if plan.any_wide else ()
        if drafts is None or found is None:
            self.last_token.index_copy_(0, self._to(slots), token_ids)
            return deliver(self._copies, plan, token_ids, undefined, logprobs, more, prompt)
        lasts = found.places[np.cumsum(found.counts) - 1]
        self.last_token.index_copy_(0, self._to(slots[lasts]), token_ids[self._to(lasts)])
        result = deliver(None, plan, token_ids, undefined, logprobs, more, prompt)
        assert isinstance(result, StepResult)
        return only_accepted(result, drafts, found)

    def _chosen(self, plan: StepPlan, logits: torch.Tensor) -> Any:
        """Sample with the other ranks from slices [S, own], and store and deliver the ids."""
        assert self._slices is not None
        token_ids, undefined = self._slices.sample(logits.float(), plan)
        self.last_token.index_copy_(0, self._to(plan.slots[plan.samples]), token_ids)
        return deliver(self._copies, plan, token_ids, undefined)

    def _received(self, plan: StepPlan) -> Any:
        """Store what the first rank has sampled."""
        num = int(np.count_nonzero(plan.samples))
        token_ids = torch.empty(num, dtype=torch.int64, device=self._device)
        if num:
            ids_from_lead(token_ids)
            self.last_token.index_copy_(0, self._to(plan.slots[plan.samples]), token_ids)
        return deliver(self._copies, plan, token_ids)

    def _of_prompts(self, logits: torch.Tensor, prompt: PromptPlan) -> Prompts:
        """Log-probabilities of each row's prompt, from `logits` [N, vocab]."""
        targets = self._to(prompt.targets)
        ends = np.cumsum(prompt.counts)
        spans = zip(ends - prompt.counts, ends, prompt.num_logprobs, strict=True)
        return tuple(
            candidates(logits[begin:end], targets[begin:end], int(num), self._copies)
            for begin, end, num in spans
        )

    def _to(self, column: npt.NDArray[np.generic]) -> torch.Tensor:
        return to_device(column, self._device)
