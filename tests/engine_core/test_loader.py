"""Loading: what is learned of a model, and that what cannot be served says so at once."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, GenerationConfig, LlamaConfig
from transformers.utils import logging

from slipstream_core.runner.geometry import LayerGeometry
from slipstream_core.runner.loader import ModelLoadError, load_model

SETTINGS: dict[str, Any] = {
    "vocab_size": 97,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}


def save(folder: Path, config: Any) -> str:
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    return str(folder)


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> str:
    return save(tmp_path_factory.mktemp("tiny"), LlamaConfig(**SETTINGS))


@pytest.fixture
def copy(tiny: str, tmp_path: Path) -> Path:
    shutil.copytree(tiny, tmp_path / "copy")
    return tmp_path / "copy"


def edit(folder: Path, **changes: object) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def problem(name: str, **options: Any) -> str:
    with pytest.raises(ModelLoadError) as error:
        load_model(name, device="cpu", **options)
    assert error.value.model == name
    assert repr(name) in str(error.value)
    return str(error.value)


def test_what_is_learned(tiny: str) -> None:
    model = load_model(tiny, device="cpu")
    assert model.name == tiny
    assert model.vocab_size == 97
    assert model.max_model_len == 128
    assert model.eos_token_ids == (2,)
    assert model.dtype == torch.float32
    assert model.device == torch.device("cpu")
    assert model.geometry == (LayerGeometry(4, 2, 8, 8, None, None, False),) * 2
    assert model.geometry[0].bytes_per_token(torch.bfloat16) == 2 * (8 + 8) * 2
    assert not model.module.training


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_dtype(tiny: str, dtype: Any) -> None:
    model = load_model(tiny, device="cpu", dtype=dtype)
    assert model.dtype == getattr(torch, dtype)
    assert {parameter.dtype for parameter in model.module.parameters()} == {model.dtype}


def test_auto_dtype_on_a_cpu_is_float32(copy: Path) -> None:
    edit(copy, dtype="bfloat16")
    assert load_model(str(copy), device="cpu").dtype == torch.float32


def test_several_eos_ids_of_the_generation_settings(copy: Path) -> None:
    GenerationConfig(eos_token_id=[5, 7]).save_pretrained(copy)
    assert load_model(str(copy), device="cpu").eos_token_ids == (5, 7)


def test_eos_ids_of_the_configuration(copy: Path) -> None:
    (copy / "generation_config.json").unlink()
    edit(copy, eos_token_id=[11, 2])
    assert load_model(str(copy), device="cpu").eos_token_ids == (11, 2)


def test_no_eos_id(copy: Path) -> None:
    (copy / "generation_config.json").unlink()
    edit(copy, eos_token_id=None)
    assert load_model(str(copy), device="cpu").eos_token_ids == ()


def test_max_model_len(tiny: str) -> None:
    assert load_model(tiny, device="cpu", max_model_len=50).max_model_len == 50
    assert "max_model_len is 129, but the model reaches 128" in problem(tiny, max_model_len=129)


def test_a_name_relative_to_the_working_folder(tiny: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(Path(tiny).parent)
    assert load_model("./" + Path(tiny).name, device="cpu").vocab_size == 97
    assert load_model(Path(tiny).name, device="cpu").vocab_size == 97


def test_nothing_is_printed_and_logging_is_left_as_it_was(
    copy: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    before = logging.get_verbosity(), logging.is_progress_bar_enabled()
    weights = load_file(copy / "model.safetensors")
    weights["model.stray"] = torch.zeros(3)  # transformers would report it
    save_file(weights, copy / "model.safetensors", metadata={"format": "pt"})
    capfd.readouterr()
    load_model(str(copy), device="cpu")
    assert capfd.readouterr() == ("", "")
    assert (logging.get_verbosity(), logging.is_progress_bar_enabled()) == before


def test_no_such_folder(tmp_path: Path) -> None:
    assert "no such folder" in problem(str(tmp_path / "absent"))
    assert "no such folder" in problem("./absent")


def test_a_folder_of_something_else(tmp_path: Path) -> None:
    assert "no config.json" in problem(str(tmp_path))


def test_a_hub_id_out_of_reach(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    assert "reachable hub id" in problem("nobody/nothing")


def test_an_unknown_architecture(copy: Path) -> None:
    edit(copy, model_type="perpetuum_mobile")
    assert "could not be read" in problem(str(copy))


def test_a_configuration_that_is_no_json(copy: Path) -> None:
    (copy / "config.json").write_text("{")
    assert "could not be read" in problem(str(copy))


def test_code_in_the_folder_is_not_run(copy: Path) -> None:
    edit(copy, model_type="own", auto_map={"AutoConfig": "own.OwnConfig"})
    (copy / "own.py").write_text("raise SystemExit('was run')")
    assert "could not be read" in problem(str(copy))


def test_a_weight_is_missing(copy: Path) -> None:
    weights = load_file(copy / "model.safetensors")
    del weights["model.layers.1.mlp.up_proj.weight"]
    save_file(weights, copy / "model.safetensors", metadata={"format": "pt"})
    assert "lacks 1 of the weights" in problem(str(copy))
    assert "model.layers.1.mlp.up_proj.weight" in problem(str(copy))


def test_weights_of_another_shape(copy: Path) -> None:
    edit(copy, intermediate_size=64)
    assert "weights" in problem(str(copy))


def test_no_weights(copy: Path) -> None:
    (copy / "model.safetensors").unlink()
    assert "weights could not be loaded" in problem(str(copy))


def test_broken_weights(copy: Path) -> None:
    (copy / "model.safetensors").write_bytes(b"not weights")
    assert "weights could not be loaded" in problem(str(copy))


def test_cuda_that_is_not_there(tiny: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ModelLoadError, match="no CUDA device"):
        load_model(tiny, device="cuda")
    assert load_model(tiny).device == torch.device("cpu")


def test_dynamic_rope(copy: Path) -> None:
    rope = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0}
    edit(copy, rope_parameters=rope)
    assert "'dynamic', whose results depend on who shares a batch" in problem(str(copy))


def test_longrope_within_its_short_range_only(tmp_path: Path) -> None:
    rope = {
        "rope_type": "longrope",
        "rope_theta": 10000.0,
        "short_factor": [1.0] * 4,
        "long_factor": [2.0] * 4,
    }
    config = transformers.Phi3Config(
        **SETTINGS, rope_parameters=rope, original_max_position_embeddings=64
    )
    name = save(tmp_path, config)
    assert "a max_model_len of at most that" in problem(name)
    assert "beyond 64 tokens" in problem(name)
    assert load_model(name, device="cpu", max_model_len=64).max_model_len == 64


def test_an_encoder(tmp_path: Path) -> None:
    transformers.T5Config(vocab_size=97).save_pretrained(tmp_path)
    assert "it has an encoder" in problem(str(tmp_path))


def test_layers_of_an_unknown_type(tmp_path: Path) -> None:
    config = transformers.Llama4TextConfig(
        **SETTINGS, head_dim=8, attention_chunk_size=8, num_local_experts=2
    )
    config.save_pretrained(tmp_path)
    assert "layers of type chunked_attention" in problem(str(tmp_path))


@pytest.mark.parametrize(
    ("config", "name"),
    [
        (transformers.BloomConfig(hidden_size=32, n_layer=2, n_head=4), "BloomForCausalLM"),
        (transformers.GPTJConfig(n_embd=32, n_layer=2, n_head=4, rotary_dim=8), "gptj"),
    ],
)
def test_attention_that_cannot_be_replaced(tmp_path: Path, config: Any, name: str) -> None:
    config.save_pretrained(tmp_path)
    assert f"{name} does not let its attention be replaced" in problem(str(tmp_path))


def test_attention_calls_that_do_not_match_the_layers(
    tiny: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    attention = transformers.models.llama.modeling_llama.LlamaAttention
    original = attention.forward

    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        if self.layer_idx == 1:
            return kwargs["hidden_states"], None
        return original(self, *args, **kwargs)

    monkeypatch.setattr(attention, "forward", forward)
    assert "1 attention calls over 1 layers where the configuration names 2" in problem(tiny)
