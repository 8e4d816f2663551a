"""A file becomes a folder once, whole, for its user alone; what is not understood is refused."""

from __future__ import annotations

import json
import os
import shutil
import time
from collections.abc import Callable
from pathlib import Path

import gguf
import numpy as np
import pytest
from tests.helpers.gguf_models import (
    FAMILIES,
    in_file,
    make_model,
    weights_of,
    write_gguf,
    write_tokenizer,
)

from slipstream.stack.plan.models.model_source import is_gguf
from slipstream_core.load_error import ModelLoadError
from slipstream_core.model.fingerprint import fingerprint_of_files
from slipstream_core.model.gguf.folder import (
    Overrides,
    hold,
    remove_unused,
    unfold,
    weights_file,
)
from slipstream_core.model.gguf.names import Parameter, parameters_of
from slipstream_core.model.gguf.reader import GGUFError, read_gguf
from slipstream_core.model.loader import load_model
from slipstream_core.sharding.rank import Rank


def written(
    folder: Path,
    family: str = "llama",
    extra: Callable[[gguf.GGUFWriter], None] | None = None,
    kind: str = "F32",
) -> Path:
    def fill(writer: gguf.GGUFWriter) -> None:
        write_tokenizer(writer)
        if extra is not None:
            extra(writer)

    return write_gguf(folder / "x.gguf", family, make_model(family), kind, extra=fill)


def refusal(folder: Path, extra: Callable[[gguf.GGUFWriter], None], family: str = "llama") -> str:
    file = written(folder, family, extra)
    with pytest.raises(GGUFError) as refused:
        unfold(file, cache=folder / "cache")
    assert not (folder / "cache").exists() or not any((folder / "cache").iterdir())
    return str(refused.value)


def test_a_folder_is_made_once_and_belongs_to_its_user(tmp_path: Path) -> None:
    file = written(tmp_path)
    folder = unfold(file, cache=tmp_path / "cache")
    assert folder.stat().st_mode & 0o777 == 0o700
    assert weights_file(folder) == file
    before = (folder / "config.json").stat()
    assert unfold(file, cache=tmp_path / "cache") == folder
    assert (folder / "config.json").stat() == before
    assert [each.name for each in folder.parent.iterdir()] == [folder.name]
    assert not is_gguf(str(folder))  # it is a checkpoint now


def test_equal_headers_in_two_places_are_two_folders(tmp_path: Path) -> None:
    file = written(tmp_path)
    folder = unfold(file, cache=tmp_path / "cache")
    other = Path(shutil.copy(file, tmp_path / "y.gguf"))
    second = unfold(other, cache=tmp_path / "cache")
    assert weights_file(second) == other
    assert folder != second


def test_the_fingerprint_covers_the_weights(tmp_path: Path) -> None:
    file = written(tmp_path)
    folder = unfold(file, cache=tmp_path / "cache")
    before = fingerprint_of_files(str(folder))
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
    assert len(before) == 16
    assert fingerprint_of_files(str(folder)) != before


def test_sampling_that_a_file_suggests_is_the_default(tmp_path: Path) -> None:
    def suggest(writer: gguf.GGUFWriter) -> None:
        writer.add_sampling_temp(0.6)
        writer.add_sampling_top_k(20)
        writer.add_sampling_penalty_repeat(1.05)

    folder = unfold(written(tmp_path, extra=suggest), cache=tmp_path / "cache")
    defaults = load_model(str(folder), device="cpu").default_sampling
    assert (defaults.temperature, defaults.top_k, defaults.repetition_penalty) == (0.6, 20, 1.05)


def test_what_does_not_change_the_model_is_no_obstacle(tmp_path: Path) -> None:
    def tell(writer: gguf.GGUFWriter) -> None:
        writer.add_license("apache-2.0")
        writer.add_tags(["text-generation"])
        writer.add_file_type(7)
        writer.add_quantization_version(2)
        writer.add_string("quantize.imatrix.file", "imatrix.dat")

    assert unfold(written(tmp_path, extra=tell), cache=tmp_path / "cache").is_dir()


@pytest.mark.parametrize("name", ["blk.0.attn_sinks.weight", "blk.7.attn_q.weight", "x", "v.blk"])
def test_a_tensor_without_a_place_is_refused_by_name(name: str, tmp_path: Path) -> None:
    said = refusal(tmp_path, lambda writer: writer.add_tensor(name, np.zeros(32, np.float32)))
    assert said == f"x.gguf has tensor {name!r}, which is no part of 'llama'"


def test_an_architecture_that_is_not_served_is_named_with_those_that_are(tmp_path: Path) -> None:
    file = written(tmp_path)
    writer = gguf.GGUFWriter(file, "mamba")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(
        GGUFError, match=r"architecture 'mamba', which is not served .* llama, mistral3, qwen2"
    ):
        unfold(file, cache=tmp_path / "cache")


@pytest.mark.parametrize(
    ("tell", "said"),
    [
        (
            lambda writer: writer.add_rope_scaling_type(gguf.RopeScalingType.LONGROPE),
            "has positions scaled by 'longrope'",
        ),
        (
            lambda writer: writer.add_tensor("rope_freqs.weight", np.full(16, 3, np.float32)),
            "divides the frequencies of positions by 'rope_freqs.weight' otherwise",
        ),
        (
            lambda writer: writer.add_tensor("rope_freqs.weight", np.ones(3, np.float32)),
            "has no tensor 'rope_freqs.weight' of 16 values",
        ),
        (lambda writer: writer.add_rope_scaling_yarn_ext_factor(0.5), "yarn_ext_factor"),
        (lambda writer: writer.add_rope_scaling_attn_factors(2.0), "attn_factor"),
        (lambda writer: writer.add_sliding_window_pattern(4), "attention.sliding_window_pattern"),
        (lambda writer: writer.add_rope_dimension_sections([1, 2, 3, 4]), "dimension_sections"),
        (lambda writer: writer.add_expert_shared_count(1), "llama.expert_shared_count"),
    ],
)
def test_positions_that_are_not_understood_are_refused(
    tell: Callable[[gguf.GGUFWriter], None], said: str, tmp_path: Path
) -> None:
    assert said in refusal(tmp_path, tell)


@pytest.mark.parametrize(
    ("family", "tell", "said"),
    [
        (
            "granite",
            lambda writer: writer.add_rope_scaling_finetuned(False),
            "has False in 'granite.rope.scaling.finetuned'; served is True alone",
        ),
        (
            "granite",
            lambda writer: writer.add_head_count_kv([1, 2]),
            "has blocks that differ in 'granite.attention.head_count_kv'",
        ),
        (
            "lfm2",
            lambda writer: writer.add_head_count_kv([0, 2]),
            "has no list of 3 whole numbers in 'lfm2.attention.head_count_kv'",
        ),
        (
            "glm4moe",
            lambda writer: writer.add_nextn_predict_layers(3),
            "has 3 blocks, of which 3 draft tokens",
        ),
        (
            "glm4moe",
            lambda writer: writer.add_expert_gating_func(gguf.ExpertGatingFuncType.SOFTMAX),
            "has 1 in 'glm4moe.expert_gating_func'; served is 2 alone",
        ),
        (
            "qwen35",
            lambda writer: writer.add_array("qwen35.attention.recurrent_layers", [1, 0]),
            "has no list of truths in 'qwen35.attention.recurrent_layers'",
        ),
        (
            "mixtral",
            lambda writer: writer.add_expert_used_count(0),
            "has 4 experts in 'llama.expert_count' and 0 in 'llama.expert_used_count'",
        ),
    ],
)
def test_blocks_and_experts_that_are_not_understood_are_refused(
    family: str, tell: Callable[[gguf.GGUFWriter], None], said: str, tmp_path: Path
) -> None:
    assert said in refusal(tmp_path, tell, family)


@pytest.mark.parametrize(
    ("tell", "said"),
    [
        (lambda writer: writer.add_feed_forward_length([96, 64] * 3), "has blocks that differ"),
        (lambda writer: writer.add_head_count_kv([2, 2, 1] * 2), "has blocks that differ"),
        (lambda writer: writer.add_value_length_swa(8), "attention.value_length_swa"),
        (lambda writer: writer.add_rope_dimension_count(8), "gemma4.rope.dimension_count"),
    ],
)
def test_blocks_of_gemma_4_differ_as_they_do_or_are_refused(
    tell: Callable[[gguf.GGUFWriter], None], said: str, tmp_path: Path
) -> None:
    assert said in refusal(tmp_path, tell, "gemma4")


def test_parts_of_heads_that_turn_otherwise_are_refused(tmp_path: Path) -> None:
    file = written(tmp_path, "gemma4")
    tensor = read_gguf(file).tensors["rope_freqs.weight"]
    content = bytearray(file.read_bytes())
    content[tensor.start : tensor.start + 4] = np.float32(3).tobytes()
    file.write_bytes(content)
    with pytest.raises(GGUFError, match="otherwise than Gemma 4 does"):
        unfold(file, cache=tmp_path / "cache")


def test_embeddings_that_are_multiplied_are_no_head(tmp_path: Path) -> None:
    model = make_model("falcon-h1", tie_word_embeddings=True)
    file = write_gguf(tmp_path / "x.gguf", "falcon-h1", model)
    with pytest.raises(GGUFError, match="has no head of its own, and its embeddings are multip"):
        unfold(file, cache=tmp_path / "cache")


def test_granites_that_only_attend_are_no_hybrids(tmp_path: Path) -> None:
    """Their converter is that of hybrids, and writes the sizes of mixers that they have not."""

    def tell(writer: gguf.GGUFWriter) -> None:
        writer.add_ssm_conv_kernel(4)
        writer.add_ssm_inner_size(128)
        writer.add_head_count_kv([1, 1])
        writer.add_expert_count(0)
        writer.add_expert_used_count(0)
        writer.add_expert_shared_feed_forward_length(96)
        writer.add_rope_scaling_finetuned(True)

    assert unfold(written(tmp_path, "granite", tell), cache=tmp_path / "cache").is_dir()


def test_a_decay_that_grows_is_refused_when_weights_are_read(tmp_path: Path) -> None:
    file = written(tmp_path, "qwen35")
    tensor = read_gguf(file).tensors["blk.0.ssm_a"]
    content = bytearray(file.read_bytes())
    content[tensor.start : tensor.start + 4] = np.float32(0.5).tobytes()
    file.write_bytes(content)
    folder = unfold(file, cache=tmp_path / "cache")
    with pytest.raises(ModelLoadError, match=r"has in tensor 'blk.0.ssm_a' a decay of 0 or more"):
        load_model(str(folder), device="cpu")


def test_files_have_some_parameters_in_two_ways() -> None:
    """Experts' gates beside their inputs, latents' keys and values whole, a bias without suffix."""
    for architecture, tensor, name in (
        ("qwen35moe", "blk.0.ffn_gate_up_exps.weight", "mlp.experts.gate_up_proj"),
        ("deepseek2", "blk.0.attn_kv_b.weight", "self_attn.kv_b_proj.weight"),
        ("qwen3next", "blk.0.ssm_in.weight", "linear_attn.in_proj_qkvz.weight"),
        ("glm4moe", "blk.0.exp_probs_b", "mlp.gate.e_score_correction_bias"),
    ):
        [found] = parameters_of(architecture, [tensor], 1)
        assert found == Parameter(f"model.layers.0.{name}", (tensor,), "plain")


def test_another_configuration_may_be_given(tmp_path: Path) -> None:
    def unknown(writer: gguf.GGUFWriter) -> None:
        writer.add_uint32("llama.unheard_of", 1)

    given = tmp_path / "given"
    make_model("llama").config.save_pretrained(given)
    file = written(tmp_path, extra=unknown)
    folder = unfold(file, Overrides(config=given), cache=tmp_path / "cache")
    told = json.loads((folder / "config.json").read_bytes())
    assert told == json.loads((given / "config.json").read_bytes())
    assert load_model(str(folder), device="cpu").vocab_size == 331


def test_numbers_that_are_none_are_refused_when_weights_are_read(tmp_path: Path) -> None:
    file = written(tmp_path, kind="Q8_0")
    tensor = read_gguf(file).tensors["blk.1.ffn_up.weight"]
    content = bytearray(file.read_bytes())
    content[tensor.start : tensor.start + 2] = np.float16("inf").tobytes()
    file.write_bytes(content)
    folder = unfold(file, cache=tmp_path / "cache")
    reason = r"has in tensor 'blk.1.ffn_up.weight' a scale that is not finite"
    with pytest.raises(ModelLoadError, match=reason):
        load_model(str(folder), device="cpu")


def test_a_slice_of_a_file_is_refused(tmp_path: Path) -> None:
    folder = unfold(written(tmp_path), cache=tmp_path / "cache")
    with pytest.raises(ModelLoadError, match="set tensor_parallel_size to 1"):
        load_model(str(folder), device="cpu", rank=Rank(0, 2))


def test_a_weight_that_is_missing_is_named(tmp_path: Path) -> None:
    given = tmp_path / "given"
    make_model("llama with biases").config.save_pretrained(given)
    folder = unfold(written(tmp_path), Overrides(config=given), cache=tmp_path / "cache")
    with pytest.raises(ModelLoadError, match=r"lacks 8 weights, model.layers.0.self_attn.*bias"):
        load_model(str(folder), device="cpu")


def test_names_are_those_of_the_package(tmp_path: Path) -> None:
    """The package knows experts by the names that they had before transformers merged them."""
    for family, (architecture, *_) in FAMILIES.items():
        model = make_model(family)
        own = weights_of(model)
        num_blocks = model.config.num_hidden_layers
        key = next(key for key, name in gguf.MODEL_ARCH_NAMES.items() if name == architecture)
        theirs = gguf.get_tensor_name_map(key, num_blocks)
        folder = tmp_path / family.replace(" ", "-")
        folder.mkdir()
        file = write_gguf(folder / "x.gguf", family, model)
        found = list(parameters_of(architecture, read_gguf(file).tensors, num_blocks))
        assert {each.name for each in found} == own.keys() - {"lm_head.weight"} | (
            own.keys() & {each.name for each in found}
        )
        for parameter in found:
            of_transformers = (".experts.", "shared_mlp", "sinks")
            if len(parameter.tensors) == 1 and not any(
                each in parameter.name for each in of_transformers
            ):
                assert in_file(theirs, architecture, parameter.name) == parameter.tensors[0]


def test_a_file_has_types_of_its_own(tmp_path: Path) -> None:
    folder = unfold(written(tmp_path), cache=tmp_path / "cache")
    with pytest.raises(ModelLoadError, match="quantization is 'q8_0', but a GGUF file has types"):
        load_model(str(folder), device="cpu", quantization="q8_0")


HOUR, DAY = 3600, 24 * 3600


def kept(cache: Path, name: str, age: float, num_bytes: int = 10) -> Path:
    """A folder in the cache that was used so long before the time 100 days."""
    folder = cache / name
    folder.mkdir(parents=True)
    with (folder / "tokenizer.json").open("wb") as file:
        file.truncate(num_bytes)
    os.utime(folder, (100 * DAY - age,) * 2)
    return folder


def test_folders_that_were_not_used_for_a_month_are_removed(tmp_path: Path) -> None:
    for name, age in (("old", 31), ("new", 29), (".part-x", 31)):
        kept(tmp_path, name, age * DAY)
    (tmp_path / "a file").touch()
    remove_unused(tmp_path, 100 * DAY)
    assert {each.name for each in tmp_path.iterdir()} == {"new", "a file"}


def test_the_longest_unused_folders_beyond_a_gibibyte_are_removed(tmp_path: Path) -> None:
    for day in range(1, 6):
        kept(tmp_path, str(day), day * DAY, (1 << 30) // 3 - 100)
    remove_unused(tmp_path, 100 * DAY)
    assert {each.name for each in tmp_path.iterdir()} == {"1", "2", "3"}


def test_what_was_used_in_the_last_hour_stays_whatever_its_size(tmp_path: Path) -> None:
    for number in range(4):
        kept(tmp_path, str(number), HOUR - 1 - number, 1 << 30)
    remove_unused(tmp_path, 100 * DAY)
    assert len(list(tmp_path.iterdir())) == 4


def test_a_folder_that_a_process_computes_from_stays(tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    folder = unfold(written(tmp_path), cache=cache)
    other = kept(cache, "other", 0)
    load_model(str(folder), device="cpu")
    for each in (folder, other):
        os.utime(each, (0, 0))
    remove_unused(cache, time.time())
    assert folder.is_dir()
    assert not other.exists()
    hold(tmp_path / "absent")  # which is no error


def test_unfolding_removes_what_is_unused_and_finding_a_folder_uses_it(tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    old = kept(cache, "old", 99 * DAY)
    file = written(tmp_path)
    folder = unfold(file, cache=cache)
    assert not old.exists()
    os.utime(folder, (0, 0))
    assert unfold(file, cache=cache) == folder
    assert time.time() - folder.stat().st_mtime < HOUR
