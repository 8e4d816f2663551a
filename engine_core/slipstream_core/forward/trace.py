"""Records a model's forward as a flat list of operator calls, for CPUs, where calls are expensive.

A decode step of a small model spends most of its time between operators: modules, hooks, views. The
forward is recorded (`recorder`), generalised to any number of tokens, fused (`fuse`), and compared
with the model in a trial.

- The recording is of TOKENS tokens, a number that no model uses for anything else: where it occurs
  in an operator's arguments, it is the number of tokens. A multiple of it is not understood.
- A recording that cannot be made (control flow by value, as in mixtures of experts), is not
  understood, or differs in the trial is not used, and the model itself runs.
- Where decode steps cannot be a single call (`program`), or differ in the trial, they run as
  recorded.
- Trials exchange sums where several ranks compute the model, so all of them make the same ones, and
  agree on what is used.
- The weights are the module's own, and fused weights remain views of them, until the trial is over
  and large matrices are packed (`pack`). After that the module itself cannot run.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch

from slipstream_core.adapters.sites import Site, names_of_layers
from slipstream_core.attention.cpu_backend import CpuContext
from slipstream_core.attention.interface import AttentionContext, AttentionParams
from slipstream_core.forward.adapter_patterns import mark_sites
from slipstream_core.forward.expert_patterns import as_route
from slipstream_core.forward.experts import ExpertsForm, Mixture, as_mixture, marked
from slipstream_core.forward.fuse import (
    Pattern,
    attend_by_context,
    by_number_of_tokens,
    fuse,
    join,
)
from slipstream_core.forward.mixer_patterns import fold, mix_by_context, tokens_second
from slipstream_core.forward.operations import OperationList
from slipstream_core.forward.pack import pack
from slipstream_core.forward.program import DecodeGraph, decode_graph, trial_context
from slipstream_core.forward.projection import Packed, Projection
from slipstream_core.forward.recorder import record
from slipstream_core.kernels.cpu.kernels import Kernels
from slipstream_core.sharding.collectives import ExchangeFailed
from slipstream_core.sharding.exchange import ExchangeTimeoutError
from slipstream_core.states.flat_mixers import mixer_markers, mixers_by_kernels
from slipstream_core.states.flat_step import FlatContext, FlatStep, attention_of
from slipstream_core.states.mixers import MixingContext
from slipstream_core.states.state_cache import MixerStates
from slipstream_core.states.state_pool import StatePool, StateStep
from slipstream_ipc.arrays import Int32s, Int64s

logger = logging.getLogger(__name__)

_Contexts = tuple[AttentionContext, AttentionContext]  # of two forwards that are compared

# ids [1, T], positions [1, T], indices of the tokens whose logits are wanted [S], context
Forward = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, AttentionContext], torch.Tensor]

_CPU = torch.device("cpu")
TOKENS = 8191  # prime: a size of a recording must be no model's own (decision 034)
KEPT = 7919  # prime too; a small one is soon a model's own, as the last of 128 experts is 127
TRIALS = (1, 3, 40)  # tokens
_TOLERANCE = 1e-4  # relative to the largest logit: the order of sums differs
_OF_ANOTHER = "another rank cannot"
_OUT_OF_STEP = (MemoryError, ExchangeFailed, ExchangeTimeoutError)  # one rank is behind a sum

# a marker for attention in a recording; missing from torch's annotations
_library: Any = torch.library
_LIBRARY = _library.Library("slipstream", "FRAGMENT")
_LIBRARY.define(
    "attend(Tensor query, Tensor key, Tensor value, int layer, float scale, int? window, "
    "float? softcap, Tensor? sinks, bool is_latent) -> Tensor"
)
_LIBRARY.impl(
    "attend",
    lambda query, key, value, *_: query.new_empty(*query.shape[:2], value.shape[2]),
    "CompositeExplicitAutograd",
)


class _AttentionMarker:
    """An attention context that leaves a marker in the recording."""

    def attend(
        self,
        layer: int,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        params: AttentionParams,
    ) -> torch.Tensor:
        """Shapes as in AttentionContext.attend. Raises ValueError for attention in chunks."""
        *marks, chunk = params
        if chunk is not None:
            raise ValueError("a layer attends in chunks of positions")
        marked: torch.Tensor = torch.ops.slipstream.attend(query, key, value, layer, *marks)
        return marked


class OwnValue:
    """An attention context for the trial: a token's own value, scaled by its query and key."""

    def attend(
        self,
        layer: int,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        params: AttentionParams,
    ) -> torch.Tensor:
        """Shapes as in AttentionContext.attend."""
        group = query.shape[1] // key.shape[1]
        scores = (query * key.repeat_interleave(group, dim=1)).sum(-1, keepdim=True) * params.scale
        return value.repeat_interleave(group, dim=1) * scores.tanh()


def eager(module: Any) -> Forward:
    """The module itself as a Forward."""

    def forward(
        ids: torch.Tensor, positions: torch.Tensor, keep: torch.Tensor, context: AttentionContext
    ) -> torch.Tensor:
        logits: torch.Tensor = module(
            input_ids=ids,
            position_ids=positions,
            use_cache=False,
            logits_to_keep=keep,
            paged=context,
        ).logits
        return logits

    return forward


def trace(
    module: Any,
    kernels: Kernels,
    vocab_size: int,
    agree: Callable[[bool], bool] = bool,
    states: Sequence[MixerStates] = (),
    sites: dict[str, Site] | None = None,
    *,
    keeps_module: bool = False,
) -> Forward | None:
    """The module's forward, recorded and fused; None if the module has to run itself.

    agree: whether all ranks say so. states: of its mixers, if it has any; the forward then takes a
    FlatContext. sites: is filled with the linear layers that adapters may change; None: none may.
    keeps_module: the module can run afterwards, from weights of its own beside the packed ones.
    """
    started = time.monotonic()
    plain = eager(module)
    traced, failed = None, None
    try:
        with marked(module) as forms:
            graph = record_forward(module, states=states)
        if states:
            fold(graph)
            tokens_second(graph, TOKENS)
        by_number_of_tokens(graph, tokens=TOKENS, kept=KEPT)
        attend_by_context(graph)
        mix_by_context(graph)
        fuse(graph, kernels, _patterns(kernels, forms))
        if sites is not None:
            sites.clear()  # of an attempt before, with other numbers
            sites.update(mark_sites(graph, names_of_layers(module), kept=KEPT))
        join(graph)
        traced = compile_graph(graph)
    except Exception as error:
        failed = error
    if agree(traced is not None) and traced is not None:
        with torch.inference_mode():
            failed = _trials(plain, traced, vocab_size, agree, _contexts(kernels, states))
    else:
        failed = failed or ValueError(_OF_ANOTHER)
    if failed is not None or traced is None:
        said = _first_line(failed)
        logger.info("the forward pass cannot be traced and runs as it is: %s", said)
        return None
    traced = _with_packed(
        graph, traced, kernels, vocab_size, agree, states, keeps_module=keeps_module
    )
    logger.debug("traced the forward pass in %.1f s", time.monotonic() - started)
    return traced


def _patterns(kernels: Kernels, forms: list[ExpertsForm]) -> dict[Any, Pattern]:
    """Patterns of experts."""
    ops: Any = kernels
    return {
        torch.ops.aten.topk.default: partial(as_route, ops=ops),
        torch.ops.slipstream.experts.default: partial(as_mixture, forms=forms),
    }


def kernels_mix(
    module: Any, kernels: Kernels, vocab_size: int, states: Sequence[MixerStates]
) -> bool:
    """True if the mixers of a module that is not recorded may run by our kernels, on a CPU.

    Its forward then takes a MixingContext of `mixers_by_kernels`.
    """
    forward = eager(module)
    failed: Exception | None = None
    try:
        contexts = [
            (context, MixingContext(flat.attention, mixers_by_kernels(states, flat.step)))
            for context, flat in _contexts(kernels, states)
            if isinstance(flat, FlatContext)
        ]
        with torch.inference_mode():
            failed = _trials(forward, forward, vocab_size, bool, contexts)
    except Exception as error:
        failed = error
    if failed is not None:
        logger.info("mixers run as transformers has them, slowly: %s", _first_line(failed))
    return failed is None


def _first_line(error: Exception | None) -> str:
    return str(error).partition("\n")[0][:200]


def _with_packed(
    graph: torch.fx.GraphModule,
    traced: Forward,
    kernels: Kernels,
    vocab_size: int,
    agree: Callable[[bool], bool],
    states: Sequence[MixerStates] = (),
    *,
    keeps_module: bool = False,
) -> Forward:
    """The recording with packed matrices, and with decode steps as one call if possible.

    Unless it is kept, packing empties the module's weights, so the module cannot run any more: from
    here on a failure raises or leaves the recording in use.
    """
    with torch.inference_mode():
        if pack(graph, kernels, keeps_module=keeps_module):
            traced = compile_graph(graph)
        decode, failed = None, None
        try:
            decode = decode_graph(graph, kernels)
        except Exception as error:
            failed = error
        if agree(decode is not None) and decode is not None:
            try:
                return _with_decodes(traced, decode, kernels, vocab_size, agree, states)
            except _OUT_OF_STEP:
                raise
            except Exception as error:
                failed = error
        elif failed is None and decode is not None:
            failed = ValueError(_OF_ANOTHER)
        if failed is not None:
            said = _first_line(failed)
            logger.warning("decode steps run as traced, not as one call: %s", said)
    return traced


def record_forward(
    module: torch.nn.Module, device: torch.device = _CPU, states: Sequence[MixerStates] = ()
) -> torch.fx.GraphModule:
    """The operators of a forward of TOKENS tokens, of which KEPT have logits, for `device`.

    states: of the module's mixers, if it has any.
    """
    recorder: AttentionContext = _AttentionMarker()
    if states:
        recorder = MixingContext(recorder, mixer_markers(states))
    return record(
        module,
        lambda call, ids, positions, keep: eager(call)(ids, positions, keep, recorder),
        {
            "ids": torch.zeros(1, TOKENS, dtype=torch.int64),
            "positions": torch.zeros(1, TOKENS, dtype=torch.int64),
            "keep": torch.zeros(KEPT, dtype=torch.int64),
        },
        device,
    )


def compile_graph(graph: torch.fx.GraphModule) -> Forward:
    """The graph as a Forward."""
    graph.graph.lint()
    graph.recompile()
    for node in graph.graph.nodes:
        if node.op == "get_attr":  # module attribute lookup is slow
            held = graph.__dict__[node.target] = getattr(graph, node.target)
            if isinstance(held, Projection):
                held.__dict__.update(held._parameters | held._buffers)
    forward: Forward = graph.forward
    return forward


def _with_decodes(
    traced: Forward,
    decode: DecodeGraph,
    kernels: Kernels,
    vocab_size: int,
    agree: Callable[[bool], bool] = bool,
    states: Sequence[MixerStates] = (),
) -> Forward:
    """A Forward that uses `decode` for steps of decode rows only, and `traced` for others.

    Raises why there is none.
    """
    failed: Exception | None = None
    try:
        of_decodes = compile_graph(decode.module)
        contexts = [_decode_contexts(decode, kernels, states, num_tokens) for num_tokens in TRIALS]
    except Exception as error:
        failed = error
    if not agree(failed is None):
        raise failed or ValueError(_OF_ANOTHER)
    failed = _trials(traced, of_decodes, vocab_size, agree, contexts)
    if failed is not None:
        raise failed
    products = (each for each in decode.module.modules() if isinstance(each, Projection | Mixture))
    has_exact_rows = all(isinstance(each, Packed) for each in products)
    return DecodesInOneCall(traced, of_decodes, decode.program, has_exact_rows=has_exact_rows)


class DecodesInOneCall:
    """A Forward whose steps of decode rows are one call.

    program: what that call runs.
    has_exact_rows: True if the bits of a decode row's logits do not depend on the rows beside it.
    """

    def __init__(
        self,
        traced: Forward,
        of_decodes: Forward,
        program: OperationList,
        *,
        has_exact_rows: bool,
    ) -> None:
        self.program = program
        self._traced = traced
        self._of_decodes = of_decodes
        self.has_exact_rows = has_exact_rows

    def __call__(
        self,
        ids: torch.Tensor,
        positions: torch.Tensor,
        keep: torch.Tensor,
        context: AttentionContext,
    ) -> torch.Tensor:
        attention = attention_of(context)
        is_short = isinstance(attention, CpuContext) and attention.decodes_only
        return (self._of_decodes if is_short else self._traced)(ids, positions, keep, context)


class _Rows(NamedTuple):
    """A trial's rows, as StateStep and FlatStep take them."""

    slots: Int64s
    query_lens: Int32s
    starts: Int32s
    prompt_lens: Int32s


def _contexts(kernels: Kernels, states: Sequence[MixerStates]) -> list[_Contexts]:
    """Contexts for each of TRIALS, for a module and for its recording. With states, a step's rows
    continue those of the step before.
    """
    if not states:
        return [(OwnValue(), OwnValue())] * len(TRIALS)
    pools = [_pool(states, num_slots=4) for _ in range(2)]
    steps: tuple[tuple[Sequence[int], Sequence[int], Sequence[int], Sequence[int], int], ...] = (
        ([0], [1], [0], [1], 0),  # slots, query_lens, starts, prompt_lens, num_decodes
        ([0, 1], [1, 2], [1, 0], [1, 9], 1),
        ([0, 2, 1, 3], [1, 1, 18, 20], [2, 0, 2, 0], [1, 0, 9, 20], 2),
    )
    contexts: list[_Contexts] = []
    for (slots, *columns, num_decodes), num_tokens in zip(steps, TRIALS, strict=True):
        rows = _Rows(np.array(slots), *(np.array(each, np.int32) for each in columns))
        assert rows.query_lens.sum() == num_tokens
        step = StateStep(pools[0], **rows._asdict(), num_decodes=num_decodes)
        contexts.append(
            (
                MixingContext(OwnValue(), step),
                FlatContext(OwnValue(), FlatStep(kernels, pools[1], **rows._asdict())),
            )
        )
    return contexts


def _decode_contexts(
    decode: DecodeGraph, kernels: Kernels, states: Sequence[MixerStates], num_rows: int
) -> _Contexts:
    """Contexts of rows that decode, for a recording and for its list, with equal states."""
    attention = trial_context(decode, kernels, num_rows)
    if not states:
        return attention, attention
    ones = np.ones(num_rows, np.int32)
    half = 2 * (np.arange(num_rows, dtype=np.int32) % 2)  # of them have a token of their prompt
    rows = _Rows(np.arange(num_rows), query_lens=ones, starts=ones, prompt_lens=half)._asdict()
    pools = [_pool(states, num_rows, fill=True) for _ in range(2)]
    one, other = (FlatContext(attention, FlatStep(kernels, pool, **rows)) for pool in pools)
    return one, other


def _pool(states: Sequence[MixerStates], num_slots: int, *, fill: bool = False) -> StatePool:
    """A pool for a trial, of zeros or of numbers that every such pool has."""
    pool = StatePool(dict(enumerate(states)), num_slots, _CPU)
    generator = torch.Generator().manual_seed(1)
    for each in pool.states if fill else ():
        each.normal_(generator=generator)
    return pool


def _trials(
    plain: Forward,
    traced: Forward,
    vocab_size: int,
    agree: Callable[[bool], bool],
    contexts: Sequence[_Contexts],
) -> Exception | None:
    """The reason not to use `traced`: it fails, or the two differ, here or on another rank; else
    None.

    Raises what leaves ranks at different sums (`_OUT_OF_STEP`).
    """
    failed: Exception | None = None
    for num_tokens, both in zip(TRIALS, contexts, strict=True):
        try:  # all trials, as the other ranks do
            _try(plain, traced, num_tokens, vocab_size, both)
        except _OUT_OF_STEP:
            raise
        except Exception as error:
            failed = failed or error
    return None if agree(failed is None) else failed or ValueError(_OF_ANOTHER)


def _try(
    plain: Forward,
    traced: Forward,
    num_tokens: int,
    vocab_size: int,
    contexts: _Contexts,
) -> None:
    """Raise ValueError if the two forwards differ."""
    ids = (torch.arange(num_tokens) * 7919 + 1)[None] % vocab_size
    positions = torch.arange(num_tokens)[None] + 2
    keep = torch.arange(0, num_tokens, 2)
    expected, given = (
        forward(ids, positions, keep, context)
        for forward, context in zip((plain, traced), contexts, strict=True)
    )
    if expected.shape != given.shape or expected.dtype != given.dtype:
        raise ValueError(f"logits of {num_tokens} tokens have another shape")
    if not (expected - given).abs().max() <= _TOLERANCE * expected.abs().max():
        raise ValueError(f"logits of {num_tokens} tokens differ")
