"""Loading: what is learned of a model, and that what cannot be served says so at once."""

from __future__ import annotations

import json
import logging as python_logging
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from huggingface_hub.errors import (
    GatedRepoError,
    RemoteEntryNotFoundError,
    RepositoryNotFoundError,
)
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, GenerationConfig, LlamaConfig, LlamaForCausalLM
from transformers.models.llama.modeling_llama import LlamaMLP, LlamaRotaryEmbedding
from transformers.utils import logging

from slipstream_core.attention.geometry import LayerGeometry
from slipstream_core.load_error import ModelLoadError
from slipstream_core.model.attention_check import SelfAttention
from slipstream_core.model.hub import Source
from slipstream_core.model.loader import LoadedModel, load_model
from slipstream_ipc.messages import SamplingDefaults

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


@pytest.mark.parametrize(
    ("saved", "has_tiles", "loaded"),
    [
        ("bfloat16", True, torch.bfloat16),
        ("bfloat16", False, torch.float32),
        ("float16", True, torch.float32),
        ("float32", True, torch.float32),
    ],
)
def test_auto_dtype_on_a_cpu(
    copy: Path, monkeypatch: pytest.MonkeyPatch, saved: str, has_tiles: bool, loaded: torch.dtype
) -> None:
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: has_tiles)
    edit(copy, dtype=saved)
    assert load_model(str(copy), device="cpu").dtype == loaded


def test_tied_embeddings_are_one_tensor(tmp_path: Path) -> None:
    name = save(tmp_path, LlamaConfig(**SETTINGS, tie_word_embeddings=True))
    assert "lm_head.weight" not in load_file(tmp_path / "model.safetensors")
    module: Any = load_model(name, device="cpu").module
    assert module.lm_head.weight is module.model.embed_tokens.weight


def test_a_checkpoint_in_several_files(tiny: str, tmp_path: Path) -> None:
    whole = AutoModelForCausalLM.from_pretrained(tiny)
    whole.save_pretrained(tmp_path, max_shard_size="20KB")
    assert len(list(tmp_path.glob("model-*.safetensors"))) > 2
    weights = load_model(str(tmp_path), device="cpu").module.state_dict()
    assert weights.keys() == whole.state_dict().keys()
    for key, tensor in whole.state_dict().items():
        assert torch.equal(weights[key], tensor)
    second = next(tmp_path.glob("model-00002-*.safetensors"))
    second.unlink()
    said = problem(str(tmp_path))
    assert f"{second.name} is missing, though model.safetensors.index.json names it" in said


MEASURE_MEMORY = """
import gc, resource, sys
from slipstream_core.model.loader import load_model
load_model(sys.argv[1], device="cpu", dtype="float32")  # whatever comes with the first model
with open("/proc/self/statm") as statm:
    data = int(statm.read().split()[5]) * resource.getpagesize()
for limit in sys.argv[4:]:
    gc.collect()  # what an attempt that failed has left in cycles
    resource.setrlimit(resource.RLIMIT_DATA, (data + int(limit), resource.RLIM_INFINITY))
    try:
        load_model(sys.argv[2], device="cpu", dtype=sys.argv[3])
    except ValueError as error:
        print(error)
    else:
        print("loaded")
"""


@pytest.mark.process
@pytest.mark.parametrize(("saved", "loaded"), [("float32", "float32"), ("bfloat16", "float32")])
def test_loading_holds_the_weights_once(tiny: str, tmp_path: Path, saved: str, loaded: str) -> None:
    sizes = {"hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 3}
    config = LlamaConfig(**(SETTINGS | sizes))
    model = AutoModelForCausalLM.from_config(config, dtype=getattr(torch, saved))
    model.save_pretrained(tmp_path)
    file_size = (tmp_path / "model.safetensors").stat().st_size
    loaded_size = sum(parameter.numel() for parameter in model.parameters()) * 4
    assert loaded_size > 150 << 20
    del model
    # The limit counts private mappings, so the mapped file is in it although it takes no memory
    # that could not be given back; matrices are not converted, so it is all there is.
    # less room than another copy would take, in the narrower dtype too
    limits = [str(int(file_size + part * loaded_size)) for part in (-0.1, 0.3)]
    done = subprocess.run(
        [sys.executable, "-c", MEASURE_MEMORY, tiny, str(tmp_path), loaded, *limits],
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    refused, enough = done.stdout.splitlines()
    assert "allocate memory" in refused  # the limit is one
    assert enough == "loaded"


def test_default_sampling(copy: Path) -> None:
    assert load_model(str(copy), device="cpu").default_sampling == SamplingDefaults()
    GenerationConfig(do_sample=True, temperature=0.6, top_k=20, top_p=0.95).save_pretrained(copy)
    given = load_model(str(copy), device="cpu").default_sampling
    assert given == SamplingDefaults(temperature=0.6, top_k=20, top_p=0.95)
    GenerationConfig(repetition_penalty=1.05).save_pretrained(copy)
    given = load_model(str(copy), device="cpu").default_sampling
    assert given == SamplingDefaults(repetition_penalty=1.05)


def test_several_eos_ids_of_the_generation_settings(copy: Path) -> None:
    GenerationConfig(eos_token_id=[5, 7]).save_pretrained(copy)
    assert load_model(str(copy), device="cpu").eos_token_ids == (5, 7, 2)  # and the configuration's


def test_eos_ids_of_the_configuration(copy: Path) -> None:
    (copy / "generation_config.json").unlink()
    edit(copy, eos_token_id=[11, 2])
    assert load_model(str(copy), device="cpu").eos_token_ids == (11, 2)


def test_eos_ids_outside_of_the_vocabulary_are_left_out(
    copy: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (copy / "generation_config.json").unlink()
    num = json.loads((copy / "config.json").read_text())["vocab_size"]
    edit(copy, eos_token_id=[2, num, -1, num - 1])
    with caplog.at_level(python_logging.WARNING):
        assert load_model(str(copy), device="cpu").eos_token_ids == (2, num - 1)
    assert f"[2, {num}, -1, {num - 1}]" in caplog.text


def test_no_eos_id(copy: Path) -> None:
    (copy / "generation_config.json").unlink()
    edit(copy, eos_token_id=None)
    assert load_model(str(copy), device="cpu").eos_token_ids == ()


def test_a_configuration_that_asks_for_tuples(copy: Path) -> None:
    edit(copy, return_dict=False)
    assert load_model(str(copy), device="cpu").vocab_size == 97


def test_a_configuration_that_requires_a_padding_id(tmp_path: Path) -> None:
    sizes = SETTINGS | {"cls_token_id": 1, "sep_token_id": 2}
    name = save(tmp_path, transformers.ModernBertDecoderConfig(**sizes))
    assert load_model(name, device="cpu").vocab_size == 97


def test_max_model_len(tiny: str) -> None:
    assert load_model(tiny, device="cpu", max_model_len=50).max_model_len == 50
    said = problem(tiny, max_model_len=129)
    assert "max_model_len is 129, allowed: at most the model's 128" in said


def test_a_length_that_rope_scaling_carries(copy: Path) -> None:
    rope = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128}
    overrides = {"rope_scaling": rope}
    for edited in (False, True):
        assert load_model(str(copy), device="cpu", hf_overrides=overrides).max_model_len == 128
        given = {"device": "cpu", "max_model_len": 512, "hf_overrides": overrides}
        model = load_model(str(copy), **given)
        assert model.max_model_len == 512
        assert model.module.config.rope_parameters["factor"] == 4.0
        said = problem(str(copy), max_model_len=513, hf_overrides=overrides)
        assert "at most the model's 512 (128 times its rope scaling)" in said
        if not edited:
            edit(copy, rope_scaling=rope, rope_parameters=None)
            overrides = {}


def test_generation_settings_that_are_replaced(copy: Path, tmp_path: Path) -> None:
    GenerationConfig(do_sample=True, temperature=0.6, top_k=20).save_pretrained(copy)
    GenerationConfig(do_sample=True, top_p=0.5).save_pretrained(tmp_path / "other")

    def found(**options: Any) -> SamplingDefaults:
        return load_model(str(copy), device="cpu", **options).default_sampling

    assert found(override_generation_config={"top_k": 5}) == SamplingDefaults(0.6, 5)
    assert found(generation_config="vllm") == SamplingDefaults()
    other = str(tmp_path / "other")
    assert found(generation_config=other).top_p == 0.5
    assert "generation_config: /nowhere" in problem(str(copy), generation_config="/nowhere")


def test_an_override_of_what_is_loaded(copy: Path) -> None:
    said = problem(str(copy), hf_overrides={"model_type": "gpt2"})
    assert "hf_overrides may not have 'model_type'" in said


def test_a_name_relative_to_the_working_folder(tiny: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(Path(tiny).parent)
    assert load_model("./" + Path(tiny).name, device="cpu").vocab_size == 97
    assert load_model(Path(tiny).name, device="cpu").vocab_size == 97


def test_nothing_is_printed_and_logging_is_left_as_it_was(
    copy: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    before = logging.get_verbosity(), logging.is_progress_bar_enabled()
    weights = load_file(copy / "model.safetensors")
    weights["model.mtp.stray"] = torch.zeros(3)  # transformers would report it
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


@pytest.fixture
def empty_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    cache = tmp_path / "hub"
    for name in ("HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE"):
        monkeypatch.setattr(f"huggingface_hub.constants.{name}", str(cache))
    return cache


def fill(cache: Path, tiny: str, *, without: str = "") -> None:
    """What a download of somebody/tiny leaves behind."""
    folder = cache / "models--somebody--tiny"
    (folder / "refs").mkdir(parents=True)
    (folder / "refs" / "main").write_text("0" * 40)
    shutil.copytree(tiny, folder / "snapshots" / ("0" * 40))
    if without:
        (folder / "snapshots" / ("0" * 40) / without).unlink()


@pytest.fixture
def requests_made(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Requests to a hub that cannot be reached."""
    made: list[str] = []

    def refuse(url: str, **_options: object) -> None:
        made.append(url)
        raise ConnectionError("Name or service not known")

    monkeypatch.setattr("slipstream_core.model.hub.get_hf_file_metadata", refuse)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    return made


def test_a_hub_out_of_reach(
    empty_cache: Path,
    requests_made: list[str],
    capfd: pytest.CaptureFixture[str],
) -> None:
    said = problem("nobody/nothing")
    assert len(requests_made) == 1  # and no second attempt
    assert "nobody/nothing/resolve/main/config.json: Name or service not known" in said
    assert f"{empty_cache} has no earlier download" in said
    assert "give the folder of a model" in said
    assert "`hf download nobody/nothing`" in said
    assert capfd.readouterr() == ("", "")


def test_a_hub_that_is_not_to_be_asked(
    empty_cache: Path, requests_made: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    assert "HF_HUB_OFFLINE is set" in problem("nobody/nothing")
    assert not requests_made


def test_an_earlier_download_is_used_where_the_hub_is_out_of_reach(
    empty_cache: Path, requests_made: list[str], tiny: str
) -> None:
    fill(empty_cache, tiny)
    assert load_model("somebody/tiny", device="cpu").vocab_size == 97
    assert len(requests_made) == 1


def test_an_earlier_download_that_lacks_the_weights(
    empty_cache: Path, requests_made: list[str], tiny: str
) -> None:
    fill(empty_cache, tiny, without="model.safetensors")
    said = problem("somebody/tiny")
    assert "weights could not be loaded" in said
    assert f"download in {empty_cache} may be incomplete" in said
    assert len(requests_made) == 1


@pytest.mark.parametrize(
    ("kind", "said"),
    [
        (GatedRepoError, "access is restricted: accept the terms"),
        (RepositoryNotFoundError, "has no such model"),
        (RemoteEntryNotFoundError, "holds no config.json"),
    ],
)
def test_what_the_hub_says_against_it(
    monkeypatch: pytest.MonkeyPatch, requests_made: list[str], kind: Any, said: str
) -> None:
    def answer(_url: str) -> None:
        raise kind.__new__(kind)

    monkeypatch.setattr("slipstream_core.model.hub.get_hf_file_metadata", answer)
    assert said in problem("nobody/nothing")


def test_a_name_that_is_neither_folder_nor_hub_id() -> None:
    assert "neither a folder nor a hub id" in problem("a/b/c")


def test_what_the_hub_logs_is_said_once(
    tiny: str, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    hub = python_logging.getLogger("huggingface_hub")
    before = hub.handlers[:]
    lines: list[str] = []

    def locate(name: str) -> Source:
        hub.getChild("utils").warning("trying again")
        return Source(name, True)

    monkeypatch.setattr("slipstream_core.model.loader.locate", locate)
    handler = python_logging.Handler()
    monkeypatch.setattr(handler, "emit", lambda record: lines.append(record.getMessage()))
    root = python_logging.getLogger()
    root.addHandler(handler)
    try:
        load_model(tiny, device="cpu")
    finally:
        root.removeHandler(handler)
    assert lines.count("trying again") == 1
    assert capfd.readouterr() == ("", "")
    assert before
    assert hub.handlers == before


def test_progress_bars_where_somebody_watches(
    tiny: str, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.stderr.isatty", lambda: True)
    load_model(tiny, device="cpu")
    out, err = capfd.readouterr()
    assert out == ""
    assert "Loading weights: 100%" in err


def test_an_unknown_architecture(copy: Path) -> None:
    edit(copy, model_type="perpetuum_mobile")
    assert "could not be read" in problem(str(copy))


def test_a_configuration_that_is_no_json(copy: Path) -> None:
    (copy / "config.json").write_text("{")
    assert "could not be read" in problem(str(copy))


def test_a_pointer_in_place_of_a_configuration(copy: Path) -> None:
    (copy / "config.json").write_text("version https://git-lfs.github.com/spec/v1\nsize 1\n")
    assert "config.json is a pointer of Git LFS" in problem(str(copy))


def test_code_in_the_folder_is_not_run(copy: Path) -> None:
    edit(copy, model_type="own", auto_map={"AutoConfig": "own.OwnConfig"})
    (copy / "own.py").write_text("raise SystemExit('was run')")
    assert "its own code, which is not run; set trust_remote_code" in problem(str(copy))


OWN_CODE = """
from transformers import LlamaConfig, LlamaForCausalLM
class OwnConfig(LlamaConfig):
    model_type = "own"
class OwnForCausalLM(LlamaForCausalLM):
    config_class = OwnConfig
"""


def test_code_in_the_folder_is_run_where_it_is_trusted(
    copy: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "m"))
    monkeypatch.setattr("sys.path", sys.path[:])
    own = {"AutoConfig": "own.OwnConfig", "AutoModelForCausalLM": "own.OwnForCausalLM"}
    edit(copy, model_type="own", auto_map=own)
    (copy / "own.py").write_text(OWN_CODE)
    model = load_model(str(copy), device="cpu", trust_remote_code=True)
    assert type(model.module).__name__ == "OwnForCausalLM"
    assert len(model.geometry) == 2


def test_a_weight_is_missing(copy: Path) -> None:
    weights = load_file(copy / "model.safetensors")
    del weights["model.layers.1.mlp.up_proj.weight"]
    save_file(weights, copy / "model.safetensors", metadata={"format": "pt"})
    assert "lacks 1 of the weights" in problem(str(copy))
    assert "model.layers.1.mlp.up_proj.weight" in problem(str(copy))


def with_more(folder: Path, **tensors: torch.Tensor) -> None:
    weights = load_file(folder / "model.safetensors") | tensors
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


@pytest.mark.parametrize(
    "tensor",
    [
        "model.stray",
        "v_head.summary.weight",
        "model.layers.2.mlp.up_proj.weight",
        "model.layers.0.mlp.up_proj.bias",
        "model.layers.0.mlp.up_proj.lora_A.weight",
        "model.layers.0.self_attn.q_proj.weight_scale",
        "model.layers.0.self_attn.q_proj.weight_scale_inv",
        "model.layers.0.self_attn.q_proj.weight_scale_2",
        "model.layers.0.self_attn.q_proj.input_scale",
        "model.layers.0.self_attn.q_proj.qweight",
        "model.layers.0.self_attn.q_proj.weight.absmax",
        "model.layers.0.self_attn.q_proj.SCB",
        "model.layers.0.self_attn.k_proj.weight_packed",
    ],
)
def test_a_tensor_without_a_place_is_refused_by_its_name(copy: Path, tensor: str) -> None:
    with_more(copy, **{tensor: torch.ones(1)})
    said = problem(str(copy))
    assert f"has 1 tensors that LlamaConfig has no place for, {tensor} among them" in said
    assert ("quantised weights, and no method is named" in said) == ("q_proj." in tensor) or (
        "weight_packed" in tensor
    )


@pytest.mark.parametrize(
    "tensor",
    [
        "model.layers.0.self_attn.rotary_emb.inv_freq",
        "model.rotary_emb.inv_freq",
        "transformer.h.0.attn.masked_bias",
        "visual.blocks.0.attn.proj.weight",
        "model.visual.merger.weight",
        "vision_tower.vision_model.embeddings.patch_embedding.weight",
        "model.multi_modal_projector.linear_1.weight",
        "audio_tower.layers.0.weight",
        "mtp.layers.0.input_layernorm.weight",
        "model.mtp_layers.0.weight",
        "model.layers.0.self_attn.k_scale",
        "model.layers.0.self_attn.attn.v_scale",
        "model.layers.0.self_attn.k_proj.k_scale",
        "model.layers.0.self_attn.v_proj.output_scale",
        "model.layers.0.self_attn.kv_scale",
        "model.layers.0.self_attn.prob_output_scale",
    ],
)
def test_what_has_no_effect_may_be_left(copy: Path, tensor: str) -> None:
    with_more(copy, **{tensor: torch.ones(1)})
    assert load_model(str(copy), device="cpu").vocab_size == 97


def test_layers_behind_the_last_are_heads_only_where_there_are_such(copy: Path) -> None:
    with_more(copy, **{"model.layers.2.mlp.up_proj.weight": torch.ones(1)})
    edit(copy, num_nextn_predict_layers=1)
    assert load_model(str(copy), device="cpu").vocab_size == 97
    with_more(copy, **{"model.layers.3.mlp.up_proj.weight": torch.ones(1)})
    assert "model.layers.3.mlp.up_proj.weight among them" in problem(str(copy))


def test_a_head_that_is_tied_may_be_there_twice(tmp_path: Path) -> None:
    name = save(tmp_path, LlamaConfig(**SETTINGS, tie_word_embeddings=True))
    weights = load_file(tmp_path / "model.safetensors")
    with_more(tmp_path, **{"lm_head.weight": weights["model.embed_tokens.weight"].clone()})
    module: Any = load_model(name, device="cpu").module
    assert module.lm_head.weight is module.model.embed_tokens.weight


def test_weights_of_another_shape(copy: Path) -> None:
    edit(copy, intermediate_size=64)
    assert "weights" in problem(str(copy))


def test_no_weights(copy: Path) -> None:
    (copy / "model.safetensors").unlink()
    assert "weights could not be loaded" in problem(str(copy))


def test_broken_weights(copy: Path) -> None:
    (copy / "model.safetensors").write_bytes(b"not weights")
    assert "model.safetensors is cut off, or no safetensors file" in problem(str(copy))


def test_cuda_that_is_not_there(tiny: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ModelLoadError, match="no CUDA device"):
        load_model(tiny, device="cuda")
    assert load_model(tiny).device == torch.device("cpu")


def test_dynamic_rope_within_what_changes_its_frequencies(copy: Path) -> None:
    """No row is so long that the frequencies of a whole batch change with it."""
    rope = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0}
    edit(copy, rope_parameters=rope)
    model = load_model(str(copy), device="cpu")
    most = model.module.config.max_position_embeddings
    assert model.max_model_len == most
    said = f"max_model_len is {most + 1}, allowed: at most the model's {most}"
    with pytest.raises(ModelLoadError, match=said):
        load_model(str(copy), device="cpu", max_model_len=most + 1)


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
    assert "set max_model_len to at most that" in problem(name)
    assert "beyond 64 tokens" in problem(name)
    assert load_model(name, device="cpu", max_model_len=64).max_model_len == 64


def test_shapes_that_depend_on_values(tmp_path: Path) -> None:
    sizes = {"num_local_experts": 2, "kv_channels": 8}
    said = problem(save(tmp_path, transformers.JetMoeConfig(**SETTINGS | sizes)))
    assert "JetMoeForCausalLM needs the values of its tensors" in said


def not_there(_: torch.Tensor) -> None:
    raise NotImplementedError("no such attention")


@pytest.mark.parametrize(
    ("compute", "needs_values"),
    [
        (lambda states: states.sum().item(), True),
        (lambda states: bool((states > 0).any()), True),
        (lambda states: states[states > 0], True),
        (lambda states: states.unique(), True),
        (lambda states: states.tolist(), True),
        (lambda states: states.float().numpy(), True),
        (lambda states: states.flatten().repeat_interleave(states.flatten().long()), True),
        (not_there, False),
        (lambda states: states @ states, False),
    ],
)
def test_a_forward_that_needs_values_is_told_from_one_that_is_not_supported(
    tiny: str, monkeypatch: pytest.MonkeyPatch, compute: Any, needs_values: bool
) -> None:
    attention = transformers.models.llama.modeling_llama.LlamaAttention
    monkeypatch.setattr(attention, "forward", lambda _, **given: compute(given["hidden_states"]))
    said = problem(tiny)
    reason = "needs the values of its tensors, which its trial does not have"
    assert (reason in said) == needs_values
    assert ("does not attend in a supported way" in said) != needs_values


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


def test_logits_of_other_tokens_than_were_asked_for(
    tiny: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    original = LlamaForCausalLM.forward

    def forward(self: Any, *args: Any, logits_to_keep: Any = 0, **kwargs: Any) -> Any:
        output = original(self, *args, **kwargs)
        output.logits = output.logits[:, 1:]
        return output

    monkeypatch.setattr(LlamaForCausalLM, "forward", forward)
    assert "its logits are (1, 7, 97) where 1 x 2 chosen tokens" in problem(tiny)


def test_a_model_that_computes_logits_of_all_tokens_computes_those_asked_for(
    tiny: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    original = LlamaForCausalLM.forward
    ids = torch.arange(5)[None]
    asked = {"input_ids": ids, "position_ids": ids, "use_cache": False}
    kept = torch.tensor([3, 1])

    def logits(model: LoadedModel) -> torch.Tensor:
        with torch.inference_mode():
            found: Any = model.module(**asked, logits_to_keep=kept, paged=SelfAttention())
        return found.logits  # type: ignore[no-any-return]

    expected = logits(load_model(tiny, device="cpu"))

    def forward(self: Any, *args: Any, logits_to_keep: Any = 0, **kwargs: Any) -> Any:
        return original(self, *args, **kwargs)

    monkeypatch.setattr(LlamaForCausalLM, "forward", forward)
    model = load_model(tiny, device="cpu")
    assert expected.shape == (1, 2, 97)
    assert torch.equal(logits(model), expected)
    with torch.inference_mode():
        every = model.module(**asked, paged=SelfAttention()).logits  # none are asked for
    assert torch.equal(every[:, kept], expected)


@pytest.mark.parametrize("shift", [1, -1])
def test_tokens_that_meet_outside_of_attention(
    tiny: str, monkeypatch: pytest.MonkeyPatch, shift: int
) -> None:
    original = LlamaMLP.forward

    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        return original(self, x + 0.01 * x.roll(shift, dims=1))

    monkeypatch.setattr(LlamaMLP, "forward", forward)
    said = problem(tiny)
    assert "LlamaForCausalLM cannot be served" in said
    assert "its tokens influence each other outside of attention" in said


def test_positions_that_are_not_heeded(tiny: str, monkeypatch: pytest.MonkeyPatch) -> None:
    original = LlamaRotaryEmbedding.forward

    def forward(self: Any, x: torch.Tensor, position_ids: torch.Tensor) -> Any:
        return original(self, x, torch.arange(x.shape[1], device=x.device)[None])

    monkeypatch.setattr(LlamaRotaryEmbedding, "forward", forward)
    assert "counts its tokens" in problem(tiny)


def test_a_window_that_attention_is_not_told_of(tmp_path: Path) -> None:
    sizes = {"intermediate_size": 48, "num_local_experts": 2, "num_experts_per_tok": 2}
    name = save(tmp_path, transformers.PhimoeConfig(**(SETTINGS | sizes), sliding_window=8))
    said = problem(name)
    assert "a window of 8 tokens in its configuration and None to its attention" in said
    assert load_model(name, device="cpu", max_model_len=8).max_model_len == 8
