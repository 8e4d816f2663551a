"""The draft model beside a model on a CPU: its cache, and the steps in which it foresees tokens.

- Its cache has the blocks of the model's, and is read under the same tables: a block holds the keys
  of the same tokens for both.
- The first forward of a plan computes what the rows lack; each behind it one draft of every row
  that wants another. A draft is sampled as the model's token at its place will be: by the row's
  parameters, with the noise of its seed and position. What a request forbids is not looked at, so
  a draft of it is wrong.
- Whatever it computes, texts are the model's own.
"""

from __future__ import annotations

import logging
from typing import Any

import numpy as np
import torch
from msgspec.structs import replace

from slipstream_core.attention import kv_cache
from slipstream_core.attention.block_tables import BlockTables
from slipstream_core.attention.cpu_backend import CpuBackend
from slipstream_core.forward.trace import DecodesInOneCall, Forward, eager, trace
from slipstream_core.kernels.cpu.cpu_threads import Threads
from slipstream_core.kernels.cpu.kernels import Kernels
from slipstream_core.load_error import ModelLoadError
from slipstream_core.model.loader import LoadedModel
from slipstream_core.model.quantization import widen_codes
from slipstream_core.model.tokenizer_file import find_folder, find_tokenizer
from slipstream_core.sampling.sampler import sample
from slipstream_core.step.plan import StepPlan, StepResult, columns_over
from slipstream_ipc.arrays import Int64s
from slipstream_ipc.history.pages import spans

logger = logging.getLogger(__name__)

# files of tokenizers that are not in a tokenizer.json
_VOCABULARIES = ("*.model", "*.tiktoken", "vocab.*", "merges.txt", "added_tokens.json")


class DraftModel:
    """A loaded draft model. It runs on the thread of the model's device."""

    def __init__(
        self,
        model: LoadedModel,
        kernels: Kernels,
        tables: BlockTables,
        threads: Threads,
        *,
        num_blocks: int,
        block_size: int,
        vocab_size: int,
    ) -> None:
        """tables, num_blocks, block_size: of the model's cache. vocab_size: ids of the model."""
        self._tables, self._threads = tables, threads
        self._vocab_size = model.vocab_size
        layers = kv_cache.allocate(
            model.geometry,
            num_blocks=num_blocks,
            block_size=block_size,
            dtype=model.dtype,
            device=model.device,
        )
        self._attention = CpuBackend(kernels, layers, block_size)
        forward = trace(model.module, kernels, model.vocab_size)
        if forward is None and widen_codes(model.module):
            forward = trace(model.module, kernels, model.vocab_size)
        if forward is None or not isinstance(forward, DecodesInOneCall):
            logger.warning("steps of the draft model %s are not one call, and slow", model.name)
        self._model: Forward = eager(model.module) if forward is None else forward
        self._vocab = torch.arange(min(vocab_size, model.vocab_size), dtype=torch.int32)

    def foresee(self, plan: StepPlan) -> StepResult:
        """The tokens that a plan asks for, row by row; nothing is stored of them but keys."""
        proposals = plan.proposals
        assert proposals is not None
        lens = proposals.lens  # [S]
        found = np.zeros((len(lens), int(lens.max(initial=1))), np.int64)
        if len(lens):
            found[:, 0] = self._sampled(plan)
        else:
            self._forward(plan)
        drawn = np.flatnonzero(lens > 0)
        firsts = np.cumsum(lens - 1) - (lens - 1)
        before = _decode_of(plan, drawn)
        for at in range(1, found.shape[1]):
            is_wanted = lens[drawn] > at
            drawn, before = drawn[is_wanted], _decode_of(before, np.flatnonzero(is_wanted))
            before = replace(
                before,
                token_ids=found[drawn, at - 1],
                positions=before.kv_lens.astype(np.int64),
                kv_slots=proposals.kv_slots[firsts[drawn] + at - 1],
                kv_lens=before.kv_lens + np.int32(1),
            )
            found[drawn, at] = self._sampled(before)
        places = spans(np.arange(len(lens)) * found.shape[1], lens)
        return StepResult(plan.step, found.ravel()[places], None)

    def _sampled(self, plan: StepPlan) -> Int64s:
        logits = self._forward(plan).float()[:, : len(self._vocab)]
        token_ids, _ = sample(logits, plan, self._vocab)
        ids: Int64s = token_ids.numpy()
        return ids

    def _forward(self, plan: StepPlan) -> torch.Tensor:
        """Logits of the sampled rows, [S, vocab]."""
        order = self._attention.order(plan)
        context = self._attention.of_plan(plan, order, self._tables)
        # the model's vocabulary may be padded to more than this one's
        ids = torch.from_numpy(plan.token_ids).clamp(max=self._vocab_size - 1)
        positions, keep = torch.from_numpy(plan.positions), order.last[plan.samples]
        is_list = isinstance(self._model, DecodesInOneCall) and context.decodes_only
        self._threads.begin_forward(is_list=is_list)
        logits = self._model(ids[None], positions[None], torch.from_numpy(keep), context)[0]
        self._threads.end_forward()
        return logits


_BY_ROW, _BY_SAMPLE = tuple(columns_over("R")), tuple(columns_over("S"))


def _decode_of(plan: StepPlan, at: Int64s) -> StepPlan:
    """A plan in which these of the sampled rows, [n], have one token each, all of them sampled."""
    rows = np.flatnonzero(plan.samples)[at]
    columns: dict[str, Any] = {name: getattr(plan, name)[rows] for name in _BY_ROW}
    columns |= {name: getattr(plan, name)[at] for name in _BY_SAMPLE}
    columns["query_lens"] = np.ones(len(at), np.int32)
    return replace(plan, num_decodes=len(at), **columns)


def num_parameters(model: LoadedModel) -> int:
    """The number of a model's weights, before a runner has taken them."""
    return sum(each.numel() for each in model.module.parameters())


def why_not(model: LoadedModel, draft: LoadedModel) -> str | None:
    """The reason why a model cannot be the draft model of another one; None: it can be."""
    if draft.states:
        return "it carries recurrent states, which cannot be taken back by a token"
    sizes = num_parameters(model), num_parameters(draft)
    if sizes[1] > sizes[0]:
        return f"it has {sizes[1]:,} parameters, and {model.name} {sizes[0]:,}: allowed are no more"
    return None


def why_other_tokens(model: str, draft: str, vocab_sizes: tuple[int, int]) -> str | None:
    """The reason why two models, which have so many ids, do not speak of the same tokens; None:
    they do.
    """
    try:
        files = find_tokenizer(model), find_tokenizer(draft)
    except ValueError as error:
        if vocab_sizes[0] != vocab_sizes[1]:
            return f"{error}; without tokenizers {vocab_sizes[1]} ids are not {vocab_sizes[0]}"
        return _why_other_files(model, draft)
    if files[0].read_bytes() == files[1].read_bytes():
        return None
    from tokenizers import Tokenizer

    own, other = (Tokenizer.from_file(str(each)).get_vocab() for each in files)  # added ones, too
    if own == other:
        return None
    differing = sorted(token for token, at in own.items() if other.get(token) != at)
    differing += sorted(other.keys() - own.keys())
    return (
        f"its tokens are others: {files[1]} has {len(other)}, {files[0]} {len(own)}, and "
        f"{differing[0]!r} is {other.get(differing[0])} in the one and {own.get(differing[0])} in "
        "the other; allowed is a draft model with the same tokenizer"
    )


def _why_other_files(model: str, draft: str) -> str | None:
    """The reason why files of a tokenizer other than tokenizer.json do not show that two models
    speak of the same tokens; None: they do, or a model has random weights, whose ids mean nothing.
    """
    folders = [each for each in (find_folder(model), find_folder(draft)) if each is not None]
    if len(folders) < 2 or folders[0].resolve() == folders[1].resolve():
        return None
    own, other = (
        {path.name: path.read_bytes() for each in _VOCABULARIES for path in folder.glob(each)}
        for folder in folders
    )
    if own and own == other:
        return None
    names = [", ".join(sorted(files)) or "none" for files in (other, own)]
    return (
        f"whether its tokens are the same cannot be told: not both have a tokenizer.json, and the "
        f"files of their vocabularies are not the same (its: {names[0]}; the model's: {names[1]}); "
        "put a tokenizer.json into both folders"
    )


def check_draft_model(model: LoadedModel, draft: LoadedModel, tokenizer: str | None = None) -> None:
    """Raises ModelLoadError where the one cannot draft for the other. tokenizer: the folder or hub
    id of the one that is used in place of the model's own.
    """
    sizes = model.vocab_size, draft.vocab_size
    why = why_not(model, draft) or why_other_tokens(tokenizer or model.name, draft.name, sizes)
    if why is not None:
        raise ModelLoadError(model.name, f"speculative_config.model is {draft.name!r}, but {why}")
