"""An adapter's folder is read as peft means it, or refused in one line that names what is wrong."""

from __future__ import annotations

import json
import math
import os
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from tests.helpers.loras import Lora

from slipstream_core.adapters.adapter_file import Adapter, AdapterError, read_adapter
from slipstream_core.adapters.sites import Site, why_no_site

CONFIG, TENSORS = "adapter_config.json", "adapter_model.safetensors"
K, N, RANK = 12, 20, 4
Q, V = "model.layers.0.self_attn.q_proj", "model.layers.1.self_attn.v_proj"
SITES = {Q: Site(0, N, K), V: Site(1, N, K)}


class _Model(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.head = torch.nn.Linear(2, 2)
        self.norm = torch.nn.LayerNorm(2)


def read(folder: Path, max_rank: int = 16) -> Adapter:
    return read_adapter(folder, SITES, max_rank, lambda name: why_no_site(_Model(), name))


def tensors(rank: int = RANK, dtype: torch.dtype = torch.float32) -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    found = {}
    for name in SITES:
        found[f"base_model.model.{name}.lora_A.weight"] = torch.randn(rank, K).to(dtype)
        found[f"base_model.model.{name}.lora_B.weight"] = torch.randn(N, rank).to(dtype)
    return found


def save(folder: Path, its: dict[str, torch.Tensor] | None = None, **fields: Any) -> Path:
    folder.mkdir(exist_ok=True, parents=True)
    config = Lora(("q_proj", "v_proj"), RANK, 8).config() | fields
    (folder / CONFIG).write_text(json.dumps(config))
    save_file(tensors() if its is None else its, folder / TENSORS)
    return folder


def A(name: str = Q) -> str:
    return f"base_model.model.{name}.lora_A.weight"


def test_factors_are_scaled_as_peft_scales_them(tmp_path: Path) -> None:
    its = tensors()
    for fields, scales in (
        ({"lora_alpha": 8}, (2, 2)),
        ({"lora_alpha": 8, "use_rslora": True}, (4, 4)),
        ({"alpha_pattern": {"q_proj": 1}}, (0.25, 2)),
        ({"alpha_pattern": {"layers.1.self_attn.v_proj": 2, "v_proj": 3}}, (2, 0.5)),
        ({"alpha_pattern": {r"^model.layers.\d+.self_attn.q_proj": 4}}, (1, 2)),
        ({"alpha_pattern": {"proj": 4, "layers.1": 4}}, (2, 2)),  # ends of names, at a dot
        ({"r": 9, "rank_pattern": {"(q|v)_proj": 4}}, (2, 2)),
    ):
        adapter = read(save(tmp_path, **fields))
        for name, scale in zip((Q, V), scales, strict=True):
            a, b = adapter.factors[name]
            torch.testing.assert_close(a, its[A(name)])
            wanted = its[A(name).replace("lora_A", "lora_B")].t() * scale
            torch.testing.assert_close(b, wanted)
    assert adapter.num_bytes == 2 * 4 * RANK * (K + N)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_halves_stay_so_where_their_scale_is_exact(tmp_path: Path, dtype: torch.dtype) -> None:
    its = tensors(dtype=dtype)
    for alpha, kept in ((2 * RANK, dtype), (0.25 * RANK, dtype), (1.1 * RANK, torch.float32)):
        adapter = read(save(tmp_path, its, lora_alpha=alpha))
        a, b = adapter.factors[Q]
        assert (a.dtype, b.dtype) == (dtype, kept)
        assert torch.equal(a, its[A()])
        assert torch.equal(
            b.float(), its[A().replace("lora_A", "lora_B")].float().t() * (alpha / RANK)
        )
        both = 2 * (K * 2 + N * kept.itemsize) * RANK
        assert adapter.num_bytes == both


def test_halves_that_a_scale_makes_too_large_become_float32(tmp_path: Path) -> None:
    its = tensors(dtype=torch.float16)
    its[A().replace("lora_A", "lora_B")][:] = 60000
    _, b = read(save(tmp_path, its, lora_alpha=4 * RANK)).factors[Q]
    assert b.dtype == torch.float32
    assert (b == 240000).all()


def test_the_digest_is_of_the_content(tmp_path: Path) -> None:
    one, same = (read(save(tmp_path / name)) for name in ("one", "same"))
    assert one.digest == same.digest
    assert len(one.digest) == 16
    its = tensors()
    its[A()][0, 0] += 1
    assert read(save(tmp_path / "one", its)).digest != one.digest
    assert read(save(tmp_path / "one", lora_alpha=9)).digest != one.digest


def changed(**fields: Any) -> Callable[[Path], object]:
    return lambda folder: save(folder, **fields)


def with_tensor(name: str, tensor: torch.Tensor) -> Callable[[Path], object]:
    return lambda folder: save(folder, tensors() | {name: tensor})


def without(name: str) -> Callable[[Path], object]:
    return lambda folder: save(folder, {key: it for key, it in tensors().items() if key != name})


def pickled(folder: Path) -> None:
    save(folder)
    (folder / TENSORS).rename(folder / "adapter_model.bin")


def removed(name: str) -> Callable[[Path], object]:
    return lambda folder: (save(folder) / name).unlink()


def truncated(folder: Path) -> None:
    data = (save(folder) / TENSORS).read_bytes()
    (folder / TENSORS).write_bytes(data[:-100])


def piped(folder: Path) -> None:
    (save(folder) / TENSORS).unlink()
    os.mkfifo(folder / TENSORS)


def written(text: str) -> Callable[[Path], object]:
    return lambda folder: (save(folder) / CONFIG).write_text(text)


NAN = torch.full((RANK, K), math.nan)
REFUSED: dict[str, tuple[Callable[[Path], object], str]] = {
    "no folder": (lambda _: None, "there is no folder"),
    "no config": (removed(CONFIG), "adapter_config.json is missing"),
    "no tensors": (removed(TENSORS), "adapter_model.safetensors is missing"),
    "pickles": (pickled, "pickles, which are never read"),
    "pipe": (piped, "not a file"),
    "truncated": (truncated, "adapter_model.safetensors: cannot be read"),
    "no JSON": (written("{"), "not an object in JSON"),
    "a list": (written("[]"), "not an object in JSON"),
    "nested": (written('{"r":' + "[" * 100_000), "not an object in JSON"),
    "long": (written(" " * (2**20 + 1)), "1048577 bytes, allowed: 1048576"),
    "other kind": (changed(peft_type="IA3"), "peft_type: 'IA3', allowed: LORA"),
    "DoRA": (changed(use_dora=True), "use_dora: True, allowed: false"),
    "modules_to_save": (changed(modules_to_save=["lm_head"]), "modules_to_save: ['lm_head']"),
    "bias": (changed(bias="lora_only"), "bias: 'lora_only', allowed: none"),
    "lora_bias": (changed(lora_bias=True), "lora_bias: True, allowed: false"),
    "layers": (changed(layer_replication=[[0, 2]]), "layer_replication: [[0, 2]], allowed: none"),
    "aLoRA": (
        changed(alora_invocation_tokens=[5, 6]),
        "alora_invocation_tokens: [5, 6], allowed: none: an adapter here is active from a prompt's",
    ),
    "QALoRA": (changed(use_qalora=True), "use_qalora: True, allowed: none"),
    "BD-LoRA": (changed(use_bdlora={"nblocks": 2}), "use_bdlora: {'nblocks': 2}, allowed: none"),
    "experts": (changed(target_parameters=["x"]), "target_parameters: ['x'], allowed: none"),
    "tokens": (changed(trainable_token_indices=[1]), "trainable_token_indices: [1]"),
    "arrow": (changed(arrow_config={"top_k": 2}), "arrow_config: {'top_k': 2}"),
    "a later field": (changed(use_novel=True), "use_novel: True, allowed: none: it is not known"),
    **{
        way: (changed(init_lora_weights=way), f"init_lora_weights: '{way}', allowed: true, false")
        for way in ("pissa", "pissa_niter_4", "olora", "corda", "loftq", "mica", "lora_ga")
    },
    "rank 0": (changed(r=0), "r: 0, allowed: at least 1"),
    "no number": (changed(lora_alpha="8"), "lora_alpha: '8', allowed: a number"),
    "infinite": (written('{"peft_type":"LORA","lora_alpha":1e999}'), "not an object in JSON"),
    "true": (changed(r=True), "r: True, allowed: at least 1"),
    "patterns": (changed(rank_pattern=[1]), "rank_pattern: [1], allowed: an object"),
    "slow pattern": (changed(alpha_pattern={"(a+)+b": 1}), "with one repetition at most"),
    "slow patterns": (changed(alpha_pattern={".*a.*b.*c": 1}), "with one repetition at most"),
    "no pattern": (changed(alpha_pattern={"(": 1}), "with one repetition at most"),
    "many": (changed(alpha_pattern={f"a{at}": 1 for at in range(1025)}), "1025 patterns"),
    "no site": (
        with_tensor(A("model.layers.7.mlp"), torch.ones(RANK, K)),
        "'model.layers.7.mlp': it has lora_A without lora_B",
    ),
    "half": (without(A()), f"{Q}': it has lora_B without lora_A"),
    "embedding": (
        with_tensor("base_model.model.model.embed_tokens.lora_embedding_A", torch.ones(4, 4)),
        "is no factor of a linear layer",
    ),
    "magnitudes": (
        with_tensor(A().replace("A.weight", "magnitude_vector"), torch.ones(4)),
        "is no factor of a linear layer",
    ),
    "whole layer": (
        with_tensor("base_model.model.lm_head.weight", torch.ones(4, 4)),
        "is no factor of a linear layer",
    ),
    "another head": (
        with_tensor(f"base_model.model.{Q}.base_layer.weight", torch.ones(N + 1, K)),
        f"{Q}.base_layer: [21, 12], allowed: [20, 12]; it was made for another base",
    ),
    "a weight alone": (
        with_tensor("base_model.model.lm_head.base_layer.weight", torch.ones(N, K)),
        "'lm_head': its own weight is saved, allowed: of linear layers that the adapter changes",
    ),
    "empty": (lambda folder: save(folder, {}), "it has no tensors"),
    "not finite": (with_tensor(A(), NAN), f"{Q}.lora_A: it has numbers that are not finite"),
    "overflow": (changed(lora_alpha=1e39), "lora_B: it has numbers that are not finite"),
    "other type": (
        with_tensor(A(), torch.ones(RANK, K, dtype=torch.float64)),
        f"{Q}.lora_A: float64, allowed: float32, bfloat16, float16",
    ),
    "other base": (
        with_tensor(A(), torch.ones(RANK, K + 1)),
        f"lora_A [4, 13] and lora_B [20, 4], allowed: [rank, {K}] and [{N}, rank]",
    ),
    "one dimension": (with_tensor(A(), torch.ones(RANK)), "lora_A [4] and lora_B"),
    "other rank": (changed(r=3), ": rank 4, allowed: 3, as adapter_config.json says"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_served_is_refused_by_name(name: str, tmp_path: Path) -> None:
    make, says = REFUSED[name]
    folder = tmp_path / "adapter"
    make(folder)
    with pytest.raises(AdapterError) as caught:
        read(folder)
    assert says in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_heads_own_weight_is_let_be(tmp_path: Path) -> None:
    """peft 0.21.2 saves it beside the factors of `lm_head`, however large."""
    name = f"base_model.model.{Q}.base_layer.weight"
    adapter, plain = (
        read(save(tmp_path / at, its))
        for at, its in (("a", tensors() | {name: torch.full((N, K), math.nan)}), ("b", None))
    )
    assert adapter.factors.keys() == {Q, V}
    assert torch.equal(adapter.factors[Q].b, plain.factors[Q].b)
    assert adapter.num_bytes == plain.num_bytes
    wide = {Q: Site(0, 10_000, 2_000)}
    its = {
        A(): torch.ones(RANK, 2_000),
        A().replace("lora_A", "lora_B"): torch.ones(10_000, RANK),
        name: torch.ones(10_000, 2_000),
    }
    assert read_adapter(save(tmp_path / "wide", its), wide, 16, str).factors.keys() == {Q}


def test_ranks_are_bounded(tmp_path: Path) -> None:
    its = tensors()
    b = A().replace("lora_A", "lora_B")
    its |= {A(): torch.ones(32, K), b: torch.ones(N, 32)}
    folder = save(tmp_path, its, rank_pattern={"q_proj": 32})
    says = f"rank 32 at {Q}, allowed: 16 (--max-lora-rank)"
    with pytest.raises(AdapterError) as caught:
        read(folder)
    assert str(caught.value) == says
    assert read(folder, 32).factors[Q].a.shape == (32, K)


def test_layers_that_are_no_sites_say_why(tmp_path: Path) -> None:
    for name, why in (
        ("model.nothing", "this model has no such layer"),
        ("norm", "it is LayerNorm, allowed: linear layers"),
        ("head", "this model does not use it as a product of its own"),
    ):
        its = tensors()
        its |= {A(name): torch.ones(RANK, 2), A(name).replace("_A", "_B"): torch.ones(2, RANK)}
        with pytest.raises(AdapterError, match=why):
            read(save(tmp_path, its))


def test_a_file_larger_than_any_adapter_is_not_read(tmp_path: Path) -> None:
    folder = save(tmp_path)
    with (folder / TENSORS).open("r+b") as file:
        file.truncate(1 << 40)  # a hole
    with pytest.raises(AdapterError, match=r"1099511627776 bytes, allowed: \d+ \(rank 16"):
        read(folder)


@pytest.mark.parametrize("seed", range(4))
def test_damaged_folders_are_read_or_refused_in_one_line(seed: int, tmp_path: Path) -> None:
    chance = random.Random(seed)
    folder = save(tmp_path)
    whole = {name: (folder / name).read_bytes() for name in (CONFIG, TENSORS)}
    refused = []
    for _ in range(250):
        name = chance.choice((CONFIG, TENSORS))
        data = bytearray(whole[name])
        for _ in range(chance.randint(1, 6)):
            at = chance.randrange(min(len(data), 600))  # headers rather than numbers
            match chance.randrange(3):
                case 0:
                    data[at] = chance.randrange(256)
                case 1:
                    del data[at : at + chance.randrange(9)]
                case 2:
                    data[at:at] = chance.choice(
                        (b"}", b"[", b'"', b"9" * 20, b"-1", b"null", b"\0")
                    )
        (folder / name).write_bytes(data)
        try:
            adapter = read(folder)
        except AdapterError as error:
            refused.append(str(error))
        else:
            assert adapter.factors.keys() <= {Q, V}
            assert all(each.isfinite().all() for it in adapter.factors.values() for each in it)
        (folder / name).write_bytes(whole[name])
    assert len(refused) > 100
    assert all(len(each.splitlines()) == 1 and len(each) < 1500 for each in refused)
    assert read(folder).factors.keys() == {Q, V}
