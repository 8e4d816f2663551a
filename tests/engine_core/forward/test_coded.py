"""Forwards with coded matrices: to the bit those of the dequantised model, and no larger."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import nn
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeExperts

from slipstream_core.forward import trace
from slipstream_core.forward.projection import Packed
from slipstream_core.forward.trace import OwnValue
from slipstream_core.kernels.codes.coded_parameter import (
    CodedParameter,
    coded_parameters,
    dequantise_parameters,
)
from slipstream_core.kernels.codes.online import ONLINE, WITHOUT_ENDS
from slipstream_core.kernels.cpu.kernels import kernels
from slipstream_core.load_error import ModelLoadError
from slipstream_core.model import loader
from slipstream_core.model.coded_model import has_more_than_matrices
from slipstream_core.model.host_memory import HostMemory
from slipstream_core.model.loader import LoadedModel, load_model
from slipstream_core.model.quantization import widen_codes

torch.set_num_threads(1)
KERNELS = kernels()
VOCAB = 203
pytestmark = pytest.mark.skipif(KERNELS is None, reason="there is no C compiler")

SHAPE = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "initializer_range": 0.15,
}
KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {}),
    "tied": ("Llama", {"tie_word_embeddings": True}),
    "with biases": ("Qwen2", {}),
    "with norms of heads": ("Qwen3", {"head_dim": 16}),
    "fused": ("Phi3", {"pad_token_id": 0}),
    "with experts": (
        "Qwen3Moe",
        {"head_dim": 16, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32},
    ),
    "with turned experts": (
        "GptOss",
        {
            "head_dim": 16,
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "pad_token_id": 0,
            "layer_types": ["full_attention"] * 2,
        },
    ),
    "with scaled embeddings": ("Gemma2", {"head_dim": 16, "query_pre_attn_scalar": 16}),
}


def _save(folder: Path, kind: str, dtype: torch.dtype) -> tuple[str, str]:
    """A checkpoint of 16 bits, and the same numbers in float32."""
    torch.manual_seed(0)
    name, more = KINDS[kind]
    config = getattr(transformers, f"{name}Config")(**SHAPE, **more)
    model = getattr(transformers, f"{name}ForCausalLM")(config).to(dtype)
    model.save_pretrained(folder / "narrow")
    model.float()
    model.config.dtype = torch.float32
    model.save_pretrained(folder / "wide")
    return str(folder / "narrow"), str(folder / "wide")


def _load(folder: str, quantization: str | None = None) -> LoadedModel:
    return load_model(folder, device="cpu", dtype="float32", quantization=quantization)


def _logits(forward: trace.Forward, num_tokens: int) -> torch.Tensor:
    ids = (torch.arange(num_tokens)[None] * 31 + 1) % VOCAB
    positions = torch.arange(num_tokens)[None]
    with torch.inference_mode():
        return forward(ids, positions, torch.arange(num_tokens), OwnValue())


def _traced(model: LoadedModel) -> trace.Forward:
    assert KERNELS is not None
    forward = trace.trace(model.module, KERNELS, VOCAB)
    assert forward is not None
    return forward


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_16_bits_compute_what_float32_does(tmp_path: Path, kind: str, dtype: torch.dtype) -> None:
    narrow, wide = _save(tmp_path, kind, dtype)
    coded, plain = _load(narrow), _load(wide)
    assert len(list(coded_parameters(coded.module))) > 8
    assert not list(coded_parameters(plain.module))
    one, other = _traced(coded), _traced(plain)
    for num_tokens in (1, 3, 40):
        assert torch.equal(_logits(one, num_tokens), _logits(other, num_tokens))


@pytest.mark.parametrize("quantization", ONLINE)
@pytest.mark.parametrize(
    "kind", ["llama", "tied", "with biases", "fused", "with experts", "with turned experts"]
)
def test_quantised_matrices_compute_what_the_dequantised_model_does(
    tmp_path: Path, kind: str, quantization: str
) -> None:
    narrow, wide = _save(tmp_path, kind, torch.bfloat16)
    coded, plain = (_load(narrow, quantization) for _ in range(2))
    dequantise_parameters(plain.module)
    one, other = _traced(coded), _traced(plain)
    full = _traced(_load(wide))
    for num_tokens in (1, 3, 40):
        logits = _logits(one, num_tokens)
        assert torch.equal(logits, _logits(other, num_tokens))
        assert not torch.equal(logits, _logits(full, num_tokens))


@pytest.mark.parametrize("quantization", ONLINE)
def test_quantised_matrices_take_the_bytes_of_their_codes(
    tmp_path: Path, quantization: str
) -> None:
    narrow, _ = _save(tmp_path, "llama", torch.bfloat16)
    model = _load(narrow, quantization)
    form = ONLINE[quantization]
    coded = dict(model.module.named_parameters())
    for name, weight in coded.items():
        if isinstance(weight, CodedParameter):
            is_end = "embed" in name or "lm_head" in name
            stays = is_end and form in WITHOUT_ENDS
            assert weight.matrix.format.name == ("bfloat16" if stays else form.name)
    assert isinstance(coded["lm_head.weight"], CodedParameter)


@pytest.mark.parametrize("quantization", ["q8_0", "q4_0"])
@pytest.mark.parametrize("kind", ["llama", "with experts", "with turned experts"])
def test_the_memory_of_quantised_weights_counts_their_scales(
    tmp_path: Path, kind: str, quantization: str
) -> None:
    narrow, _ = _save(tmp_path, kind, torch.bfloat16)
    model = _load(narrow, quantization)
    assert model.kept_bytes == sum(each.nbytes for each in model.module.parameters())


def test_experts_that_are_put_together_are_memory_of_their_own(tmp_path: Path) -> None:
    narrow, _ = _save(tmp_path, "with experts", torch.bfloat16)
    model = _load(narrow)
    named = dict(model.module.named_parameters())
    experts = sum(each.nbytes for each in named.values() if each.dim() == 3)
    small = sum(each.nbytes for each in named.values() if not isinstance(each, CodedParameter))
    assert experts
    assert model.kept_bytes == experts + small


def test_what_is_widened_before_it_is_coded_has_to_fit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    narrow, _ = _save(tmp_path, "llama", torch.bfloat16)
    monkeypatch.setattr("slipstream_core.model.weight_sources.sixteen_bits", lambda *_: None)
    with_room = 300_000
    memory = HostMemory(with_room, with_room, "this machine")
    monkeypatch.setattr("slipstream_core.model.loader.read_host_memory", lambda: memory)
    with pytest.raises(ModelLoadError, match="its weights take"):
        _load(narrow, "q4_0")


def test_a_format_for_no_matrix_is_refused_and_one_for_some_says_so(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for size, name in ((48, "none"), (64, "some")):
        config = transformers.LlamaConfig(**SHAPE | {"hidden_size": size, "intermediate_size": 80})
        transformers.LlamaForCausalLM(config).save_pretrained(tmp_path / name)
    with pytest.raises(ModelLoadError, match="q8_0 has groups of 32, and all 16 matrices, model"):
        _load(str(tmp_path / "none"), "q8_0")
    _load(str(tmp_path / "none"), "int8_per_channel_weight_only")
    _load(str(tmp_path / "some"), "q8_0")
    assert "2 matrices, model.layers.0.mlp.down_proj.weight the first" in caplog.text
    assert "no whole groups of 32 and are not quantised to q8_0" in caplog.text


def test_what_cannot_be_quantised_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    narrow, _ = _save(tmp_path, "llama", torch.bfloat16)
    allowed = "fp8_per_block, fp8_per_channel, int8_per_channel_weight_only, q4_0, q8_0"
    for named in ("fp8", "compressed-tensors"):
        with pytest.raises(
            ModelLoadError, match=f"is '{named}', but its .* not quantised; allowed: {allowed}"
        ):
            _load(narrow, named)
    with pytest.raises(ModelLoadError, match="a CPU that computes in float32 alone"):
        load_model(narrow, device="cpu", dtype="bfloat16", quantization="q8_0")
    monkeypatch.setattr(loader, "has_more_than_matrices", lambda _: True)
    with pytest.raises(ModelLoadError, match="convolutions over channels and experts of an"):
        _load(narrow, "q8_0")


def test_convolutions_of_each_channel_stand_beside_codes() -> None:
    assert has_more_than_matrices(nn.Conv1d(4, 6, 3))
    assert not has_more_than_matrices(nn.Conv1d(4, 4, 3, groups=4))


@pytest.mark.parametrize("kind", ["with biases", "with experts", "with turned experts"])
def test_a_module_computes_with_codes_as_it_is(tmp_path: Path, kind: str) -> None:
    narrow, wide = _save(tmp_path, kind, torch.bfloat16)
    coded, plain = (trace.eager(_load(folder).module) for folder in (narrow, wide))
    torch.testing.assert_close(_logits(coded, 5), _logits(plain, 5), rtol=1e-5, atol=1e-5)


def test_without_panels_codes_become_float32(tmp_path: Path) -> None:
    narrow, wide = _save(tmp_path, "tied", torch.bfloat16)
    coded, plain = _load(narrow), _load(wide)
    assert widen_codes(coded.module)
    assert not list(coded_parameters(coded.module))
    module: Any = coded.module
    assert module.lm_head.weight is module.model.embed_tokens.weight
    for (name, one), (_, other) in zip(
        module.named_parameters(), plain.module.named_parameters(), strict=True
    ):
        assert torch.equal(one, other), name
    assert torch.equal(_logits(_traced(coded), 3), _logits(_traced(plain), 3))
    assert not widen_codes(plain.module)


@pytest.mark.parametrize("kind", ["llama", "tied"])
def test_codes_are_held_once(tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    narrow, _ = _save(tmp_path, kind, torch.bfloat16)
    model = _load(narrow)
    embedding, head = model.module.get_input_embeddings(), model.module.get_output_embeddings()
    assert isinstance(embedding.weight, CodedParameter)
    coded = list(coded_parameters(model.module))
    num_weights = sum(each.numel() for each in coded)
    assert sum(each.nbytes for each in coded) == 2 * num_weights
    # norms alone are this process's memory
    others = [each for each in model.module.parameters() if not isinstance(each, CodedParameter)]
    assert model.kept_bytes == sum(each.nbytes for each in others)
    panels: list[torch.Tensor] = []
    make = Packed.__init__

    def noted(self: Packed, *arguments: Any) -> None:
        panels.append(arguments[1])
        make(self, *arguments)

    monkeypatch.setattr(Packed, "__init__", noted)
    monkeypatch.setattr("slipstream_core.forward.pack.MIN_GIVEN_UP", 1)
    _traced(model)
    assert all(each.dtype == torch.uint8 for each in panels)
    in_panels = num_weights - (0 if kind == "tied" else embedding.weight.numel())
    padding = 2 * 64 * 31  # of the head's outputs, to whole panels
    assert 2 * in_panels <= sum(each.nbytes for each in panels) <= 2 * in_panels + padding
    left = {id(each) for each in coded if hasattr(each, "matrix")}
    assert left == (set() if kind == "tied" else {id(embedding.weight)})
    assert not hasattr(head.weight, "matrix")


def test_a_checkpoint_of_several_types_is_widened(tmp_path: Path) -> None:
    """A float32 matrix among others would lose bits in 16."""
    from safetensors.torch import load_file, save_file

    narrow, _ = _save(tmp_path, "llama", torch.bfloat16)
    file = Path(narrow, "model.safetensors")
    tensors = load_file(file)
    wide = torch.randn(VOCAB, 64)
    save_file({**tensors, "lm_head.weight": wide}, file, {"format": "pt"})
    module = _load(narrow).module
    assert not list(coded_parameters(module))
    assert torch.equal(module.get_output_embeddings().weight, wide)


def test_experts_of_an_unknown_form_are_widened(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    narrow, wide = _save(tmp_path, "with experts", torch.bfloat16)
    monkeypatch.setattr(
        Qwen3MoeExperts, "_apply_gate", lambda _, both: both.chunk(2, dim=-1)[0].sin()
    )
    model, plain = _load(narrow), _load(wide)
    assert not list(coded_parameters(model.module))
    assert {each.dtype for each in model.module.parameters()} == {torch.float32}
    assert KERNELS is not None
    assert trace.trace(model.module, KERNELS, VOCAB) is None
    one, other = (_logits(trace.eager(each.module), 5) for each in (model, plain))
    assert torch.equal(one, other)
