"""How columns and heads are dealt out, and which models are refused."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from slipstream_core.attention.geometry import LayerGeometry
from slipstream_core.load_error import ModelLoadError
from slipstream_core.model.local_modules import UnknownStyleError, as_local_modules
from slipstream_core.sharding import collectives
from slipstream_core.sharding.rank import Rank
from slipstream_core.sharding.sharding_plan import ShardingPlan, plan_for

LLAMA = {
    "model.layers.*.self_attn.q_proj": "colwise",
    "model.layers.*.self_attn.k_proj": "colwise",
    "model.layers.*.self_attn.v_proj": "colwise",
    "model.layers.*.self_attn.o_proj": "rowwise",
}


@given(st.integers(0, 200), st.integers(1, 9))
def test_slices_are_those_of_torch(width: int, size: int) -> None:
    """Transformers cuts with torch.chunk; ours have to be the same columns."""
    columns = torch.arange(width)
    chunks = list(columns.chunk(size)) if width else []
    chunks += [columns[:0]] * (size - len(chunks))
    for index, chunk in enumerate(chunks):
        begin, end = collectives.slice_of(width, index, size)
        assert columns[begin:end].tolist() == chunk.tolist()
        assert end - begin <= collectives.share_of(width, size)


def shell(styles: dict[str, str], model_type: str = "llama", **config: int) -> Any:
    """A model of one layer, with the modules that the styles name, on the meta device."""
    its = SimpleNamespace(model_type=model_type, **config)
    its.get_text_config = lambda: its
    model = nn.Module()
    for part in styles:
        *path, last = part.replace("*", "0").split(".")
        parent = model
        for name in path:
            if not hasattr(parent, name):
                parent.add_module(name, nn.Module())
            parent = parent.get_submodule(name)
        parent.add_module(last, nn.Linear(2, 2, device="meta"))
    model.tp_plan = styles
    model.config = its
    model.get_input_embeddings = lambda: getattr(model, "embed_in", None)
    model.get_output_embeddings = lambda: getattr(model, "lm_head", None)
    return model


def layers(heads: int, key_heads: int) -> tuple[LayerGeometry, ...]:
    return (LayerGeometry(heads, key_heads, 16, 16, None, None, False),) * 2


@pytest.mark.parametrize(
    ("heads", "key_heads", "size", "shares"),
    [(8, 4, 2, False), (8, 4, 4, False), (8, 4, 8, True), (8, 1, 2, True), (6, 2, 2, False)],
)
def test_key_heads_are_dealt_out_or_shared(
    heads: int, key_heads: int, size: int, shares: bool
) -> None:
    plan = plan_for("it", shell(LLAMA), layers(heads, key_heads), Rank(0, size))
    assert plan.shared_key_heads == (key_heads if shares else None)
    loaded = plan.for_transformers()
    keys = [style for part, style in loaded.items() if "k_proj" in part or "v_proj" in part]
    assert keys == ["replicate" if shares else "colwise"] * 2
    assert loaded["model.layers.*.self_attn.q_proj"] == "colwise"
    assert plan.keeps_one_head("model.layers.17.self_attn.k_proj") == shares
    assert not plan.keeps_one_head("model.layers.17.self_attn.q_proj")


@pytest.mark.parametrize(
    ("heads", "key_heads", "size", "sizes"),
    [(6, 2, 4, "1, 2, 6"), (8, 2, 3, "1, 2, 4, 8"), (12, 3, 2, "1, 3, 6, 12")],
)
def test_heads_that_do_not_divide_are_refused_with_the_sizes_that_would_do(
    heads: int, key_heads: int, size: int, sizes: str
) -> None:
    with pytest.raises(ModelLoadError, match=f"tensor_parallel_size may be {sizes}$"):
        plan_for("it", shell(LLAMA), layers(heads, key_heads), Rank(0, size))


def test_heads_that_share_latents_are_dealt_out() -> None:
    """Each has keys of its own, which a rank makes of the latents that all ranks hold."""
    styles = {"model.layers.*.self_attn.q_b_proj": "colwise"}
    latent = (LayerGeometry(8, 1, 24, 16, None, None, False, is_latent=True),) * 2
    assert plan_for("it", shell(styles), latent, Rank(0, 4)).styles == styles
    with pytest.raises(ModelLoadError, match=r"may be 1, 2, 4, 8$"):
        plan_for("it", shell(styles), latent, Rank(0, 3))


def test_fused_projections_share_no_key_head() -> None:
    styles = {"layers.*.attention.query_key_value": "colwise"}
    with pytest.raises(ModelLoadError, match=r"may be 1, 2$"):
        plan_for("it", shell(styles), layers(8, 2), Rank(0, 4))


def test_a_plan_that_leaves_attention_whole_asks_nothing_of_heads() -> None:
    styles = {"lm_head": "colwise_gather_output"}
    assert plan_for("it", shell(styles), layers(7, 7), Rank(0, 2)).styles == styles


@pytest.mark.parametrize(
    ("of_head", "of_embedding"),
    [("colwise_gather_output", "embedding_rowwise"), ("replicate", None), (None, None)],
)
def test_an_embedding_beside_a_cut_head_is_cut(
    of_head: str | None, of_embedding: str | None
) -> None:
    model = shell({**LLAMA, "lm_head": "", "embed_in": ""})
    model.tp_plan = LLAMA if of_head is None else {**LLAMA, "lm_head": of_head}
    plan = plan_for("it", model, layers(8, 4), Rank(0, 2))
    assert plan.styles.get("embed_in") == of_embedding


def test_a_model_without_a_plan_is_refused() -> None:
    with pytest.raises(ModelLoadError, match="Module has no tensor parallel plan"):
        plan_for("it", shell({}), layers(8, 8), Rank(0, 2))


@pytest.mark.parametrize("index", range(8))
def test_ranks_that_share_a_key_head_keep_it_alone(index: int) -> None:
    rank = Rank(index, 8)
    plan = plan_for("it", shell(LLAMA), layers(8, 4), rank)
    attention = nn.Module()
    attention.k_proj = nn.Linear(5, 12)
    attention.v_proj = nn.Linear(5, 12, bias=False)
    attention.q_proj = nn.Linear(5, 3)
    model = nested("model.layers.0.self_attn", attention)
    whole = {name: each.clone() for name, each in model.named_parameters()}
    as_local_modules(model, plan, rank)
    for name, each in model.named_parameters():
        rows = slice(None) if "q_proj" in name else slice(index // 2 * 3, index // 2 * 3 + 3)
        assert torch.equal(each, whole[name][rows])


@pytest.mark.parametrize(("size", "index"), [(2, 1), (8, 5)])
def test_norms_have_the_weights_of_the_heads_that_a_rank_holds(size: int, index: int) -> None:
    """As Command R+'s: of 8 query heads and 4 key heads."""
    norms = [f"model.layers.*.self_attn.{each}_norm" for each in "qk"]
    model = shell({**LLAMA, **dict.fromkeys(norms, "")}, "cohere")
    model.tp_plan = LLAMA
    rank = Rank(index, size)
    plan = plan_for("it", model, layers(8, 4), rank)
    loaded = plan.for_transformers()
    assert loaded[f"{norms[0]}.weight"] == "colwise"
    attention = nn.Module()
    attention.q_norm, attention.k_norm = nn.Module(), nn.Module()
    attention.q_norm.weight = nn.Parameter(torch.randn(8 // size, 3))
    keys = torch.randn(4, 3)
    if size > 4:  # loaded whole
        assert loaded[norms[1]] == "replicate"
        attention.k_norm.weight = nn.Parameter(keys)
    else:
        assert loaded[f"{norms[1]}.weight"] == "colwise"
        attention.k_norm.weight = nn.Parameter(keys.chunk(size)[index])
    of_queries = attention.q_norm.weight.clone()
    as_local_modules(nested("model.layers.0.self_attn", attention), plan, rank)
    assert torch.equal(attention.q_norm.weight, of_queries)
    own = keys[index // 2 : index // 2 + 1] if size > 4 else keys.chunk(size)[index]
    assert torch.equal(attention.k_norm.weight, own)


def nested(path: str, module: nn.Module) -> nn.Module:
    for name in reversed(path.split(".")):
        outer = nn.Module()
        outer.add_module(name, module)
        module = outer
    return module


@pytest.mark.parametrize(("key_heads", "size"), [(4, 2), (4, 4), (2, 4), (1, 2)])
def test_fused_heads_are_cut_to_the_own_ones(key_heads: int, size: int) -> None:
    """Together the ranks have every query head once, and every key and value head as often."""
    heads, dim = 4, 3
    rows = (heads + 2 * key_heads) * dim
    styles = {"model.layers.*.self_attn.qkv_proj": "colwise_gather_output"}
    kept = []
    for index in range(size):
        attention = nn.Module()
        attention.config = SimpleNamespace(num_attention_heads=heads)
        attention.num_key_value_heads, attention.head_dim = key_heads, dim
        attention.qkv_proj = nn.Linear(1, rows, bias=False)
        attention.qkv_proj.weight.data = torch.arange(rows, dtype=torch.float32)[:, None]
        model = nested("model.layers.0.self_attn", attention)
        rank = Rank(index, size)
        plan = plan_for("it", shell(styles, "phi3"), layers(heads, key_heads), rank)
        as_local_modules(model, plan, rank)
        own, own_keys = attention.config.num_attention_heads, attention.num_key_value_heads
        assert (own, own_keys) == (heads // size, max(1, key_heads // size))
        queries, keys, values = attention.qkv_proj.weight[:, 0].split(
            [own * dim, own_keys * dim, own_keys * dim]
        )
        assert ((values - keys) == key_heads * dim).all()
        # a query head finds the key head that it has in the whole model
        group = own // own_keys
        for head in range(own):
            whole = int(queries[head * dim]) // dim
            key = int(keys[head // group * dim]) // dim - heads
            assert key == whole // (heads // key_heads)
        kept += queries.tolist()
    assert kept == list(range(heads * dim))


def test_a_correction_whose_parts_do_not_divide_is_left_out() -> None:
    styles = {
        "model.layers.*.self_attn.qkv_proj": "colwise_gather_output",
        "model.layers.*.mlp.gate_up_proj": "colwise_gather_output",
    }
    whole = shell(styles, "phi3", intermediate_size=9)
    plan = plan_for("it", whole, layers(4, 2), Rank(0, 2))
    assert plan.styles["model.layers.*.mlp.gate_up_proj"] == "colwise_gather_output"
    assert plan.styles["model.layers.*.self_attn.qkv_proj"] == "fused_heads"
    plan = plan_for("it", whole, layers(5, 5), Rank(0, 3))
    assert plan.styles["model.layers.*.mlp.gate_up_proj"] == "packed_colwise"
    assert plan.styles["model.layers.*.self_attn.qkv_proj"] == "colwise_gather_output"


def test_corrections_are_of_the_text_model_inside_another_one() -> None:
    projection = "model.language_model.layers.*.self_attn.qkv_proj"
    styles = {projection: "colwise_gather_output"}
    plan = plan_for("it", shell(styles, "phi3"), layers(4, 2), Rank(0, 2))
    assert plan.styles[projection] == "fused_heads"


def test_a_style_that_has_no_plain_form_is_named() -> None:
    model = nn.Module()
    model.norm = nn.LayerNorm(4)
    with pytest.raises(UnknownStyleError, match="LayerNorm in the style 'sequence_parallel'"):
        as_local_modules(model, ShardingPlan({"norm": "sequence_parallel"}), Rank(0, 2))


def test_what_ranks_exchange_has_shapes_on_the_meta_device() -> None:
    """So recordings keep it; nothing is exchanged there."""
    x = torch.empty(1, 7, 50, device="meta").transpose(0, 1)
    assert collectives.sum_over_ranks(x).shape == x.shape
    assert collectives.gather_over_ranks(x, 99).shape == (7, 1, 99)


@pytest.mark.parametrize("size", [2, 3, 5])
def test_sums_of_a_group_of_cpus_are_made_in_the_order_of_ranks(
    size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So that a row's bits do not depend on its batch; of two ranks they never do."""
    torch.manual_seed(0)
    parts = [torch.randn(4, 9) * 10.0**index for index in range(size)]
    asked = []

    def all_gather(slices: list[torch.Tensor], own: torch.Tensor) -> None:
        asked.append("all_gather")
        assert torch.equal(own, parts[0])
        for each, part in zip(slices, parts, strict=True):
            each.copy_(part)

    group = SimpleNamespace(
        get_world_size=lambda: size,
        all_gather=all_gather,
        all_reduce=lambda x: asked.append("all_reduce"),
    )
    monkeypatch.setattr(collectives, "_Any", group)
    total = collectives.sum_over_ranks(parts[0])
    if size == 2:
        assert asked == ["all_reduce"]
        return
    expected = parts[0]
    for part in parts[1:]:
        expected = expected + part
    assert asked == ["all_gather"]
    assert torch.equal(total, expected)
    assert not torch.equal(total, parts[0])


def test_steps_without_logits_exchange_nothing() -> None:
    """There is no process group here, so whatever waits for one would raise."""
    assert collectives.sum_over_ranks(torch.empty(1, 0, 5)).shape == (1, 0, 5)
    assert collectives.gather_over_ranks(torch.empty(1, 0, 5), 9).shape == (1, 0, 9)
