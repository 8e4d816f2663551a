"""Projections: joined, laid out, packed and shared by ranks, they compute what each did alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

from slipstream_core.forward import projection, trace
from slipstream_core.forward.fuse import dense_products
from slipstream_core.forward.projection import (
    Dense,
    Packed,
    Projection,
    SlicedInputs,
    SlicedOutputs,
    add_projection,
    joined,
    joined_for_cpu,
    lay_out_by_column,
    num_readers,
    project,
)
from slipstream_core.kernels.cpu.kernels import kernels
from slipstream_core.model.loader import load_model
from slipstream_core.sharding.collectives import slice_of

torch.set_num_threads(1)
KERNELS = kernels()
VOCAB = 97
LINEAR = torch.nn.functional.linear


def dense(num_outputs: int, num_inputs: int, *, biased: bool = False) -> Dense:
    bias = nn.Parameter(torch.randn(num_outputs), requires_grad=False) if biased else None
    weight = nn.Parameter(torch.randn(num_outputs, num_inputs), requires_grad=False)
    return Dense(weight, bias)


@given(
    st.lists(st.integers(1, 40), min_size=1, max_size=4),
    st.integers(1, 40),
    st.booleans(),
    st.data(),
)
def test_joined_projections_give_the_outputs_of_all(
    heights: list[int], num_inputs: int, biased: bool, data: st.DataObject
) -> None:
    for_cpu = not biased and data.draw(st.booleans())
    parts = [dense(height, num_inputs, biased=biased) for height in heights]
    x = torch.randn(1, 3, num_inputs)
    expected = torch.cat([part.forward(x) for part in parts], dim=-1)
    whole = (joined_for_cpu if for_cpu else joined)(parts)
    assert whole.num_outputs == sum(heights)
    torch.testing.assert_close(project(x, whole), expected)
    held = whole.weight.untyped_storage().data_ptr()
    for part, its in zip(parts, expected.split(heights, dim=-1), strict=True):
        assert part.weight.untyped_storage().data_ptr() == held, "weights are held once"
        torch.testing.assert_close(part.forward(x), its)
    by_column = for_cpu and sum(heights) > num_inputs
    assert whole.weight.t().is_contiguous() if by_column else whole.weight.is_contiguous()


def test_parts_that_are_joined_again_stay_where_they_are() -> None:
    parts = [dense(each, 5, biased=True) for each in (3, 4)]
    first, again = joined(parts), joined(parts)
    assert again.weight.data_ptr() == first.weight.data_ptr()
    assert again.bias is not None
    assert torch.equal(again.weight, first.weight)


@pytest.mark.parametrize("shape", [(40, 7), (7, 40)])
def test_a_wide_matrix_is_stored_by_column(shape: tuple[int, int]) -> None:
    given_, x = dense(*shape, biased=True), torch.randn(1, 2, shape[1])
    expected = given_.forward(x)
    lay_out_by_column(given_)
    assert (given_.weight.stride(0) == 1) == (shape[0] > shape[1])
    torch.testing.assert_close(given_.forward(x), expected)


@pytest.mark.skipif(KERNELS is None, reason="there is no C compiler")
@pytest.mark.parametrize("biased", [False, True])
def test_a_packed_projection_computes_the_same_from_memory_of_its_own(biased: bool) -> None:
    assert KERNELS is not None
    whole = torch.randn(9, 2)  # of which the bias is a column
    given_ = Dense(torch.randn(9, 20), whole[:, 1] if biased else None)
    x = torch.randn(1, 5, 20)
    expected = given_.forward(x)
    packed = given_.packed(KERNELS)
    assert isinstance(packed, Packed)
    given_.weight.zero_()
    torch.testing.assert_close(project(x, packed), expected)


@pytest.mark.skipif(KERNELS is None, reason="there is no C compiler")
@pytest.mark.parametrize(
    ("weight", "bias"), [(torch.bfloat16, torch.float32), (torch.float32, torch.bfloat16)]
)
def test_float32_alone_is_packed(weight: torch.dtype, bias: torch.dtype) -> None:
    assert KERNELS is not None
    assert Dense(torch.ones(4, 8, dtype=weight), torch.ones(4, dtype=bias)).packed(KERNELS) is None


@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("x_is_whole", [False, True])
def test_ranks_with_columns_add_up(
    biased: bool, x_is_whole: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole, x = dense(6, 7, biased=biased), torch.randn(1, 3, 7)
    parts = []
    for index in range(3):
        own = slice(*slice_of(7, index, 3))
        part = SlicedInputs(whole.weight[:, own], whole.bias, own if x_is_whole else None)
        parts.append((part, x if x_is_whole else x[..., own], x[..., own]))
    total = sum(LINEAR(own, part.weight) for part, _, own in parts)
    for part, given_, own in parts:
        exchanged: list[torch.Tensor] = []
        monkeypatch.setattr(
            projection, "sum_over_ranks", lambda y, said=exchanged: said.append(y) or total
        )
        torch.testing.assert_close(part.forward(given_), whole.forward(x))
        assert torch.equal(exchanged[0], LINEAR(own, part.weight)), "without a bias"


def test_ranks_with_rows_lie_side_by_side(monkeypatch: pytest.MonkeyPatch) -> None:
    whole, x = dense(7, 4, biased=True), torch.randn(1, 3, 4)
    expected = whole.forward(x)
    assert whole.bias is not None
    begin, end = slice_of(7, 1, 2)
    part = SlicedOutputs(whole.weight[begin:end], whole.bias[begin:end], 7)
    others = expected[..., :begin]
    monkeypatch.setattr(
        projection, "gather_over_ranks", lambda y, width: torch.cat([others, y], -1)[..., :width]
    )
    torch.testing.assert_close(part.forward(x), expected)
    part.is_gathered = False
    torch.testing.assert_close(part.forward(x), expected[..., begin:end])


class Halved(Projection):
    """Another kind, which neither joins nor packs."""

    def __init__(self, twice: Dense) -> None:
        super().__init__(twice.num_outputs, twice=2 * twice.weight)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return LINEAR(x, self.twice) / 2  # type: ignore[arg-type]


@pytest.mark.skipif(KERNELS is None, reason="there is no C compiler")
def test_another_kind_is_left_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All others are packed, and the forward is the model's."""
    assert KERNELS is not None
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
    )
    LlamaForCausalLM(config).save_pretrained(tmp_path)
    module = load_model(str(tmp_path), device="cpu", dtype="float32").module
    join, kinds = trace.join, list[list[str]]()

    def with_another(graph: Any) -> None:
        join(graph)
        node, its = dense_products(graph)[1]  # behind the first attention
        with graph.graph.inserting_before(node):
            node.update_arg(1, add_projection(graph, Halved(its)))

    def compile_noted(graph: Any) -> trace.Forward:
        calls = graph.graph.find_nodes(op="call_function", target=project)
        kinds.append([type(getattr(graph, each.args[1].target)).__name__ for each in calls])
        return compile_graph(graph)

    compile_graph = trace.compile_graph
    monkeypatch.setattr(trace, "join", with_another)
    monkeypatch.setattr(trace, "compile_graph", compile_noted)
    ids = torch.arange(9)[None] * 31 % VOCAB
    arguments = ids, torch.arange(9)[None], torch.arange(9), trace.OwnValue()
    with torch.inference_mode():
        expected = trace.eager(module)(*arguments)
    forward = trace.trace(module, KERNELS, VOCAB)
    assert forward is not None
    with torch.inference_mode():
        torch.testing.assert_close(forward(*arguments), expected, atol=1e-4, rtol=1e-3)
    assert kinds[-1] == ["Packed", "Halved", *["Packed"] * 7]


def test_readers_are_counted_by_memory() -> None:
    tied = nn.Parameter(torch.randn(4, 4))
    graph = torch.fx.GraphModule({}, torch.fx.Graph())
    graph.register_parameter("tied", tied)
    x = graph.graph.placeholder("x")
    added = graph.graph.call_function(torch.add, (x, graph.graph.get_attr("tied")))
    node = add_projection(graph, Dense(tied, torch.zeros(4)))
    graph.graph.output(graph.graph.call_function(project, (added, node)))
    readers = num_readers(graph, id)
    assert readers[id(tied)] == 2
    assert sorted(readers.values()) == [1, 2]
