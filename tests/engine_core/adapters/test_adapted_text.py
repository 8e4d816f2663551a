"""Rows with adapters say what the model says into which the adapter is merged, beside rows of other
adapters and of the base, and the same bits alone and among them.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.helpers.gguf_models import make_model, write_gguf
from tests.helpers.loras import ALL_LINEAR, Lora, load, save_lora, save_merged
from tests.helpers.told_drafts import ToldDrafts

from slipstream_core.config import LoraConfig
from slipstream_core.drafting.answer_memory import AnswerMemory
from slipstream_core.drafting.ngram_drafter import NgramDrafter
from slipstream_core.drafting.step_costs import StepCosts
from slipstream_core.drafting.suffix_drafter import SuffixDrafter
from slipstream_core.kernels.codes.coded_parameter import coded_parameters, dequantise_parameters
from slipstream_core.load_error import ModelLoadError
from slipstream_core.model.gguf.folder import unfold
from slipstream_core.model.loader import load_model
from slipstream_core.runner.torch_runner import KernelConfig, TorchRunner
from slipstream_lab.common.bare_loop import Driven, LoopRequest, drive
from slipstream_lab.models import tiny_models

LORAS = (
    Lora(ALL_LINEAR, 8, 16, seed=1),
    Lora(("q_proj", "v_proj"), 16, 32, seed=2),
    Lora(("o_proj", "down_proj"), 3, 8, seed=3, options={"use_rslora": True}),
    Lora(ALL_LINEAR, 6, 6, seed=4, ranks={"up_proj": 5}, alphas={"layers.1.self_attn.q_proj": 40}),
)
PLACES = (-1, 0, 1, 2, 3)
NUM_TOKENS = 24
BUDGETS = (7, 512)  # tokens per step: in chunks, and whole
QUICK = {"Llama", "Qwen3", "Qwen3.5", "Qwen3-MoE"}
OTHERS = {"Llama, tied embeddings", "Qwen2", "OLMo 2", "Granite", "Mistral, sliding window"}


# whose steps are one call; of the others transformers computes the mixers
HYBRIDS = {"Qwen3.5", "OLMo Hybrid", "LFM2", "Bamba", "Falcon-H1", "Mamba 2"}


WITH_EXPERTS = {"Qwen3-MoE", "Qwen2-MoE"}  # themselves not changed


def named(names: set[str]) -> list[Any]:
    every = (*tiny_models.ARCHITECTURES, *tiny_models.WITHIN_LIMITS, *tiny_models.HYBRIDS)
    marks = [pytest.mark.long]
    return [
        pytest.param(each, id=each.name, marks=[] if each.name in QUICK else marks)
        for each in every
        if each.name in names
    ]


def open_runner(folder: Path, loras: dict[str, Path] | None = None, **options: Any) -> TorchRunner:
    torch.set_num_threads(1)
    lora = None
    if loras is not None:
        modules = tuple((name, str(path)) for name, path in loras.items())
        lora = LoraConfig(modules=modules, max_rank=16, max_loras=8)
    return TorchRunner(
        load_model(str(folder), device="cpu", dtype=options.pop("dtype", "float32"), **options),
        num_blocks=400,
        block_size=tiny_models.BLOCK_SIZE,
        max_num_seqs=16,
        kernel_config=KernelConfig(threads=2),
        lora=lora,
    )


def requests_of(places: tuple[int, ...] = PLACES, **sampling: Any) -> list[LoopRequest]:
    return [
        LoopRequest(
            np.array(prompt, np.uint32), NUM_TOKENS, num_logprobs=0, adapter=place, **sampling
        )
        for prompt in tiny_models.prompts()[:3]
        for place in places
    ]


def said(driven: Driven) -> list[tuple[list[int], list[float]]]:
    return [(each.token_ids, each.logprobs) for each in driven.outputs]


@cache
def expected_of(folder: Path, **sampling: Any) -> list[tuple[list[int], list[float]]]:
    """Return what the model in `folder` says to each prompt, which several tests compare."""
    runner = open_runner(folder)
    try:
        return said(drive(runner, requests_of((-1,), **sampling), budget=512))
    finally:
        runner.close()


def assert_close(given: list[Any], expected: list[Any]) -> None:
    for (tokens, logprobs), (its, their) in zip(given, expected, strict=True):
        assert tokens == its
        np.testing.assert_allclose(logprobs, their, atol=3e-5)


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Makes a model, its adapters, and the models that these are merged into; each once."""
    made: dict[str, tuple[Path, list[Path], Any]] = {}

    def save(architecture: Any, loras: tuple[Lora, ...] = LORAS) -> tuple[Path, list[Path], Any]:
        if (key := f"{architecture.name} {loras}") in made:
            return made[key]
        folder = tmp_path_factory.mktemp("loras")
        base = folder / "base"
        tiny_models.save(architecture, base)
        paths = [save_lora(each, base, folder / f"lora{at}") for at, each in enumerate(loras)]
        merged = [save_merged(each, base, folder / f"merged{at}") for at, each in enumerate(loras)]
        made[key] = base, paths, merged
        return made[key]

    return save


@pytest.mark.parametrize("architecture", named((QUICK | OTHERS) - HYBRIDS))
def test_equals_merged_models_in_mixed_batches(architecture: Any, saved: Any) -> None:
    base, paths, merged = saved(architecture)
    runner = open_runner(base, {f"a{at}": path for at, path in enumerate(paths)})
    try:
        for sampling in ({}, {"temperature": 0.8, "seed": 5}):
            by_place = [expected_of(folder, **sampling) for folder in (base, *merged)]
            expected = [by_place[at][prompt] for prompt in range(3) for at in range(len(PLACES))]
            for budget in BUDGETS:
                assert_close(said(drive(runner, requests_of(**sampling), budget=budget)), expected)
            # preempted: recomputed from the prompt and its outputs
            tight = drive(runner, requests_of(**sampling), budget=64, num_blocks=60)
            assert tight.num_preemptions
            assert_close(said(tight), expected)
    finally:
        runner.close()


@pytest.mark.parametrize("architecture", named(HYBRIDS | WITH_EXPERTS))
def test_each_linear_layer_of_hybrids_and_beside_experts_may_be_changed(
    architecture: Any, saved: Any
) -> None:
    loras = (Lora((), 8, 16, seed=1), Lora((), 5, 5, seed=2, std=0.15))
    base, paths, merged = saved(architecture, loras)
    by_place = [expected_of(folder) for folder in (base, *merged)]
    expected = [by_place[at][prompt] for prompt in range(3) for at in range(3)]
    assert expected[0][0] != expected[1][0] != expected[2][0]
    runner = open_runner(base, {f"a{at}": path for at, path in enumerate(paths)})
    try:
        for budget in BUDGETS:
            assert_close(said(drive(runner, requests_of((-1, 0, 1)), budget=budget)), expected)
    finally:
        runner.close()


@pytest.mark.quick
@pytest.mark.parametrize("architecture", named({"Llama"}))
def test_a_rows_bits_are_its_own(architecture: Any, saved: Any) -> None:
    base, paths, _ = saved(architecture)
    runner = open_runner(base, {f"a{at}": path for at, path in enumerate(paths)})
    plain = open_runner(base)
    try:
        together = said(drive(runner, requests_of(), budget=512))
        for at, request in enumerate(requests_of()):
            (alone,) = said(drive(runner, [request], budget=512))
            assert alone == together[at]
        assert said(drive(plain, requests_of((-1,)), budget=512)) == together[:: len(PLACES)]
    finally:
        runner.close()
        plain.close()


@pytest.mark.parametrize("architecture", named({"Llama"}))
def test_drafts_change_nothing(architecture: Any, saved: Any) -> None:
    base, paths, _ = saved(architecture)
    runner = open_runner(base, {f"a{at}": path for at, path in enumerate(paths)})
    try:
        assert runner.info.takes_drafts
        requests = [  # by their prompts the drafter knows the texts
            LoopRequest(
                np.array(prompt, np.uint32), NUM_TOKENS, 0.7, seed=9, num_logprobs=0, adapter=place
            )
            for prompt, place in zip(tiny_models.prompts(), PLACES, strict=True)
        ]
        plain = drive(runner, requests, budget=512)
        texts = [
            [*prompt, *output.token_ids]
            for prompt, output in zip(tiny_models.prompts(), plain.outputs, strict=True)
        ]
        drafted = drive(
            runner, requests, budget=512, drafter=ToldDrafts(texts, runner.info.vocab_size, 4)
        )
        assert any(step.num_accepted for step in drafted.steps)
        assert said(drafted) == said(plain)
    finally:
        runner.close()


def remembering(memory: AnswerMemory) -> SuffixDrafter:
    costs = StepCosts([(1, 1.0), (256, 1.1)])  # drafts cost next to nothing
    own = NgramDrafter(
        num_speculative_tokens=8, prompt_lookup_min=1, prompt_lookup_max=4, costs=costs
    )
    return SuffixDrafter(own, memory, num_speculative_tokens=8, costs=costs)


@pytest.mark.parametrize("architecture", named({"Llama"}))
@pytest.mark.parametrize("sampling", [{}, {"temperature": 0.6, "seed": 7}])
def test_drafts_in_batches_of_adapters_and_the_base_change_nothing(
    architecture: Any, sampling: dict[str, Any], saved: Any
) -> None:
    base, paths, _ = saved(architecture)
    runner = open_runner(base, {f"a{at}": path for at, path in enumerate(paths)})
    memory = AnswerMemory(1 << 22)
    try:
        plain = said(drive(runner, requests_of(**sampling), budget=512))
        assert len({tuple(tokens) for tokens, _ in plain[: len(PLACES)]}) > 1
        for budget in (512, 40, 512):
            drafted = drive(
                runner, requests_of(**sampling), budget=budget, drafter=remembering(memory)
            )
            if budget == 512:
                assert said(drafted) == plain
            else:  # prompts are computed in chunks
                assert_close(said(drafted), plain)
        right = sum(step.num_accepted for step in drafted.steps)
        assert right > len(plain) * NUM_TOKENS * 0.6  # each has its own answer
    finally:
        runner.close()


@pytest.mark.parametrize("is_salted", [True, False])
def test_an_adapters_answers_are_drafted_for_no_other(
    is_salted: bool, saved: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nor for the base. Without their own roots they would be, to the same prompts."""
    (architecture,) = [each for each in tiny_models.ARCHITECTURES if each.name == "Llama"]
    base, paths, _ = saved(architecture)
    runner = open_runner(base, {f"a{at}": path for at, path in enumerate(paths)})
    if not is_salted:
        from slipstream_lab.common import bare_loop

        made = bare_loop.NewRequest
        monkeypatch.setattr(
            bare_loop, "NewRequest", lambda **given: made(**given | {"prefix_root": b""})
        )

    def num_drafts(places: tuple[int, ...], memory: AnswerMemory) -> int:
        # what repeats nothing, so that own text foresees next to nothing
        requests = requests_of(places, temperature=2.0, seed=3)
        driven = drive(runner, requests, budget=512, drafter=remembering(memory))
        return sum(step.num_drafts for step in driven.steps)

    try:
        memory = AnswerMemory(1 << 22)
        num_drafts((0,), memory)
        others = (-1, 1, 2, 3)
        unheard = num_drafts(others, AnswerMemory(1 << 22))
        assert (num_drafts(others, memory) == unheard) == is_salted
        if not is_salted:
            return
        # its own, which rows of its own root may follow, are there all the while
        assert num_drafts((0,), memory) > num_drafts((0,), AnswerMemory(1 << 22)) + 20
    finally:
        runner.close()


@pytest.mark.parametrize("is_salted", [True, False])
def test_adapters_share_no_cached_blocks(
    is_salted: bool, saved: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without their own roots, rows go on from what other adapters have computed."""
    (architecture,) = [each for each in tiny_models.ARCHITECTURES if each.name == "Llama"]
    base, paths, merged = saved(architecture)
    by_place = [expected_of(folder) for folder in (base, *merged)]
    expected = [by_place[at][prompt] for prompt in range(3) for at in range(len(PLACES))]
    runner = open_runner(base, {f"a{at}": path for at, path in enumerate(paths)})
    if not is_salted:
        from slipstream_lab.common import bare_loop

        made = bare_loop.NewRequest
        monkeypatch.setattr(
            bare_loop, "NewRequest", lambda **given: made(**given | {"prefix_root": b""})
        )
    try:
        # one after another, so that each finds what those before it have left
        driven = drive(runner, requests_of() * 2, budget=40, is_cached=True)
        assert driven.num_cached
        num_wrong = sum(
            given[0] != wanted[0] for given, wanted in zip(said(driven), expected * 2, strict=True)
        )
        assert (num_wrong == 0) == is_salted
    finally:
        runner.close()


@pytest.mark.parametrize("architecture", named({"Llama, tied embeddings"}))
def test_of_a_tied_head_the_head_alone_is_changed(architecture: Any, saved: Any) -> None:
    loras = (Lora(("lm_head",), 4, 8, seed=1), Lora(("lm_head", "q_proj"), 8, 8, seed=2))
    base, paths, merged = saved(architecture, loras)
    by_place = [expected_of(folder) for folder in (base, *merged)]
    expected = [by_place[at][prompt] for prompt in range(3) for at in range(3)]
    runner = open_runner(base, {f"a{at}": path for at, path in enumerate(paths)})
    try:
        for budget in BUDGETS:
            assert_close(said(drive(runner, requests_of((-1, 0, 1)), budget=budget)), expected)
    finally:
        runner.close()


@pytest.mark.parametrize("quantization", [None, "q8_0"])
def test_coded_bases_are_changed_in_float32(
    quantization: str | None, saved: Any, tmp_path: Path
) -> None:
    (architecture,) = [each for each in tiny_models.ARCHITECTURES if each.name == "Qwen3"]
    base, paths, _ = saved(architecture, LORAS[:2])
    narrow, wide = tmp_path / "narrow", tmp_path / "wide"
    load(base).to(torch.bfloat16).save_pretrained(narrow)
    coded = load_model(str(narrow), device="cpu", dtype="float32", quantization=quantization)
    assert list(coded_parameters(coded.module))
    dequantise_parameters(coded.module)
    dense = load(base)
    dense.load_state_dict(coded.module.state_dict())
    dense.save_pretrained(wide)
    merged = [
        save_merged(each, wide, tmp_path / f"merged{at}") for at, each in enumerate(LORAS[:2])
    ]
    by_place = [expected_of(folder) for folder in (wide, *merged)]
    expected = [by_place[at][prompt] for prompt in range(3) for at in range(3)]
    loras = {f"a{at}": path for at, path in enumerate(paths)}
    runner = open_runner(narrow, loras, quantization=quantization)
    try:
        for budget in BUDGETS:
            assert_close(said(drive(runner, requests_of((-1, 0, 1)), budget=budget)), expected)
    finally:
        runner.close()


def test_codes_of_gguf_files_are_changed_in_float32(tmp_path: Path) -> None:
    """Its rows of queries and keys lie in another order than the layer's."""
    model = make_model("llama 3.1")
    file = write_gguf(tmp_path / "x.gguf", "llama 3.1", model, "Q4_0")
    wide, gguf = tmp_path / "wide", unfold(file, cache=tmp_path / "cache")
    model.save_pretrained(wide)  # the numbers that the file's codes stand for
    loras = {f"a{at}": save_lora(each, wide, tmp_path / f"a{at}") for at, each in enumerate(LORAS)}
    merged = [save_merged(each, wide, tmp_path / f"m{at}") for at, each in enumerate(LORAS)]
    by_place = [expected_of(folder) for folder in (wide, *merged)]
    expected = [by_place[at][prompt] for prompt in range(3) for at in range(len(PLACES))]
    runner = open_runner(gguf, loras, max_model_len=tiny_models.MAX_MODEL_LEN)
    try:
        for budget in BUDGETS:
            assert_close(said(drive(runner, requests_of(), budget=budget)), expected)
    finally:
        runner.close()


def test_layers_that_are_no_products_of_their_own_are_refused(tmp_path: Path) -> None:
    (architecture,) = [
        each for each in tiny_models.ARCHITECTURES if each.name.startswith("DeepSeek V3 (")
    ]
    tiny_models.save(architecture, tmp_path / "base")
    lora = save_lora(Lora(("kv_b_proj",)), tmp_path / "base", tmp_path / "lora")
    with pytest.raises(ModelLoadError, match="does not use it as a product of its own") as caught:
        open_runner(tmp_path / "base", {"a": lora})
    assert str(caught.value).startswith("cannot load the model ")


def test_what_cannot_be_served_is_refused_by_name(tmp_path: Path) -> None:
    (architecture,) = [each for each in tiny_models.ARCHITECTURES if each.name == "Llama"]
    tiny_models.save(architecture, tmp_path / "base")
    lora = save_lora(Lora(rank=17), tmp_path / "base", tmp_path / "lora")
    with pytest.raises(ModelLoadError, match=r"the adapter 'sql': rank 17 at .*, allowed: 16"):
        open_runner(tmp_path / "base", {"sql": lora})
    with pytest.raises(ModelLoadError, match="enable_lora: adapters need a model that is computed"):
        open_runner(tmp_path / "base", {"sql": lora}, dtype="bfloat16")
