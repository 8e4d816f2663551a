"""Grammars, rules and forbidden ends beside other rows: recorded sampling by Triton's kernels gives
the tokens and log-probabilities of torch's operators.
"""

from __future__ import annotations

import os

import numpy as np
import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed; scripts/triton-tests brings it")
if os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("runs a model on a CPU with TRITON_INTERPRET=1", allow_module_level=True)

from msgspec.structs import replace
from tests.helpers.host_device import HostCopies, HostRecorder
from tests.helpers.sampling_plans import Row, plan_of

from slipstream_core.attention import kv_cache
from slipstream_core.attention.fixed_shape import FIXED_SHAPE
from slipstream_core.attention.geometry import LayerGeometry
from slipstream_core.runner.decode_graphs import DecodeGraphs, GraphKind
from slipstream_core.runner.graph_capture import CaptureConfig
from slipstream_core.runner.mixed_forwards import StaticForward
from slipstream_core.sampling.logits_processors import LogitsProcessors
from slipstream_core.sampling.sampler import sample
from slipstream_core.sampling.whole_vocab_sampling import whole_vocab_sampler
from slipstream_core.step.constraint_plan import (
    ConstraintPlan,
    ConstraintRefill,
    StepConstraints,
)

VOCAB, ROWS = 300, 3
NONE, WORDS = np.empty(0, np.int64), -(-VOCAB // 32)


def constraints(table: torch.Tensor) -> ConstraintPlan:
    """A bias for row 0, and penalties for row 2, which has seen its most likely token."""
    return ConstraintPlan(
        np.array([0, 2]),
        StepConstraints(
            bias_rows=np.array([0]),
            bias_ids=np.array([7]),
            biases=np.array([9.0], np.float32),
            allowed_rows=NONE,
            allowed_state_slots=NONE,
            banned_rows=NONE,
            banned_ids=NONE,
            word_rows=NONE,
            word_state_slots=NONE,
            word_heads=np.empty((0, 1), np.int64),
            word_lasts=NONE,
            tail_rows=NONE,
            tail_state_slots=NONE,
            penalty_rows=np.array([1]),
            count_state_slots=np.array([0]),
            repetitions=np.array([1.7], np.float32),
            frequencies=np.array([0.5], np.float32),
            presences=np.array([0.1], np.float32),
            any_repetition=True,
        ),
        ConstraintRefill(
            tail_state_slots=NONE,
            tails=np.empty((0, 1), np.int64),
            allowed_state_slots=NONE,
            allowed_bits=np.empty((0, 1), np.int32),
            count_state_slots=np.array([0]),
            seen=np.array([[int(table[2].argmax()), 5]]),
            num_seen=np.array([2]),
            output_state_slots=np.array([0]),
            output_ids=np.array([5]),
        ),
    )


def processors() -> LogitsProcessors:
    return LogitsProcessors(VOCAB, torch.device("cpu"), num_state_slots=4, max_model_len=64)


@pytest.mark.parametrize(
    ("kind", "rows"),
    [
        (GraphKind(logprobs=True), [Row(temperature=0, num_logprobs=2)] * ROWS),
        (GraphKind(drawn=True), [Row(seed=n) for n in range(ROWS)]),
        (
            GraphKind(drawn=True, truncated=True, logprobs=True),
            [Row((1.2, 0.0, 0.8)[n], top_k=20, num_logprobs=1, seed=n) for n in range(ROWS)],
        ),
    ],
    ids=["greedy", "drawn", "truncated"],
)
def test_a_step_is_sampled_as_by_torch(kind: GraphKind, rows: list[Row]) -> None:
    """Biases, penalties, and a grammar's mask with a forbidden end, in one batch."""
    table = torch.randn(ROWS, VOCAB, generator=torch.Generator().manual_seed(1)) * 2
    layer = LayerGeometry(1, 1, 8, 8, None, None, False)
    device = torch.device("cpu")
    whole = whole_vocab_sampler(VOCAB, device, model="it")
    vocab = torch.arange(VOCAB, dtype=torch.int32)
    graphs = DecodeGraphs(
        StaticForward(
            forward=lambda ids, *_: table[None, : ids.shape[1]],
            backend=FIXED_SHAPE,
            layers=kv_cache.allocate(
                [layer], num_blocks=4, block_size=16, dtype=torch.float32, device=device
            ),
            last_token=torch.zeros(ROWS + 1, dtype=torch.int64),
            tables=torch.zeros(ROWS + 1, 4, dtype=torch.int32),
            block_size=16,
        ),
        vocab=vocab,
        copies=HostCopies(),
        capture=CaptureConfig((ROWS,)),
        kinds=(kind,),
        whole=whole,
        logits_processors=processors(),
    )
    graphs.record(HostRecorder())
    rows[1] = rows[1]._replace(masked=(3, int(table[1].argmax())))
    plan = replace(plan_of(rows), constraints=constraints(table), grammar_rows=np.array([1]))
    assert plan.constraints is not None
    masks = np.random.default_rng(0).integers(-(2**31), 2**31, (1, WORDS)).astype(np.int32)
    graphs.forward(plan)
    pending = graphs.sample(plan, masks)
    assert pending is not None
    found = pending.wait()
    assert found.undefined is None
    allowed = processors().apply(table.clone(), plan.constraints)
    expected, logprobs = sample(table, plan, vocab, allowed=allowed, masks=masks)
    assert found.token_ids.tolist() == expected.tolist()
    assert found.token_ids[0] == 7 or kind.drawn
    assert found.token_ids[1] != table[1].argmax()
    if logprobs is not None:
        assert found.logprobs is not None
        width = logprobs.values.shape[1]
        np.testing.assert_allclose(
            found.logprobs.values[:, :width], logprobs.values.numpy(), atol=1e-5
        )
        assert found.logprobs.ids[:, :width].tolist() == logprobs.ids.tolist()
        assert found.logprobs.ranks.tolist() == logprobs.ranks.tolist()
    table[1, ::7] = torch.nan
    graphs.forward(plan)
    pending = graphs.sample(plan, masks)
    assert pending is not None
    broken = pending.wait()
    assert broken.undefined is not None
    assert broken.undefined.tolist() == [1]
    assert broken.token_ids[[0, 2]].tolist() == found.token_ids[[0, 2]].tolist()
    assert broken.token_ids[1] % 7 == 0
