"""A model says the same with drafts as without, to the bit: greedy or drawn, of any architecture
whose rows can be verified; the others are not drafted.
"""

from __future__ import annotations

import dataclasses
import logging
from functools import cache, partial
from pathlib import Path
from shutil import copytree
from tempfile import mkdtemp
from typing import Any

import numpy as np
import pytest
import torch
from msgspec.structs import replace
from tests.helpers.told_drafts import ToldDrafts
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import LlamaConfig, LlamaForCausalLM

from slipstream_core.config import CoreConfig, SpeculativeConfig
from slipstream_core.engine.build import drafter_of, model_drafter_of
from slipstream_core.grammar.bitmasks import GrammarBitmasks
from slipstream_core.load_error import ModelLoadError
from slipstream_core.model.loader import LoadedModel, load_model
from slipstream_core.runner.draft_model import check_draft_model
from slipstream_core.runner.kv_cache_size import block_bytes
from slipstream_core.runner.torch_factory import load_draft_model, load_runner
from slipstream_core.runner.torch_runner import KernelConfig, TorchRunner
from slipstream_core.scheduler import state_marks
from slipstream_core.sharding.rank import Rank
from slipstream_core.step.plan import ModelInfo, StepPlan, StepResult
from slipstream_ipc.history.token_log import TokenLog
from slipstream_ipc.messages import SamplingParams
from slipstream_lab.common.bare_loop import Driven, LoopRequest, drive
from slipstream_lab.models import tiny_models

# those whose decode steps are one call with products of our own
DRAFTED = {
    "Llama",
    "Llama, llama3 rope",
    "Llama, tied embeddings",
    "Qwen2",
    "Qwen2, sliding window",
}
DRAFTED |= {"Qwen3", "Qwen3, YaRN rope", "Mistral, sliding window", "Ministral, sliding window"}
DRAFTED |= {"Granite", "OLMo 2", "OLMo 3", "SmolLM3", "Seed-OSS", "Mistral 3, as text"}
DRAFTED |= {"Qwen2-VL, as text", "Qwen2.5-VL, as text", "Qwen3-VL, as text", "LLaVA, as text"}
DRAFTED |= {"Qwen3-MoE", "Qwen2-MoE", "Mixtral", "GPT-OSS", "Granite-MoE", "OLMoE", "GLM-4-MoE"}
DRAFTED |= {"Qwen3-VL-MoE, as text"}
HYBRIDS = {"Qwen3.5", "Qwen3.5-MoE", "Qwen3.5, as text", "Qwen3.5-MoE, as text", "OLMo Hybrid"}
HYBRIDS |= {"LFM2", "LFM2-MoE", "LFM3", "LFM2-VL, as text", "Bamba", "Granite 4-H", "Falcon-H1"}
HYBRIDS |= {"Nemotron-H", "Nemotron-H, limited", "Nemotron-H, experts", "Mamba", "Falcon-Mamba"}
HYBRIDS |= {"Mamba 2", "Jamba"}
DRAFTED |= HYBRIDS
QUICK = {"Llama", "Qwen3", "OLMo 2", "Qwen3-MoE", "Qwen3.5"}
# latents, with states besides, operators of torch's in between
UNDRAFTED = {"DeepSeek V3 (MLA)", "Kimi Linear (MLA)", "OPT"}
ALL = (*tiny_models.ARCHITECTURES, *tiny_models.WITHIN_LIMITS, *tiny_models.HYBRIDS)


def named(names: set[str]) -> list[Any]:
    return [
        pytest.param(each, id=each.name, marks=[] if each.name in QUICK else [pytest.mark.long])
        for each in ALL
        if each.name in names
    ]


KINDS: list[dict[str, Any]] = [
    {},
    {"temperature": 0.8, "seed": 3},
    {"temperature": 1.0, "top_p": 0.9, "seed": 4, "num_logprobs": 2},
    {"temperature": 0.7, "top_k": 20, "min_p": 0.02, "seed": 5},
    {"num_logprobs": 0},
]
PENALISED = SamplingParams(
    presence_penalty=0.5, frequency_penalty=0.3, repetition_penalty=1.2, logit_bias={7: 2.0}
)
ALLOWED = SamplingParams(
    allowed_token_ids=[*range(10, 90)], frequency_penalty=-0.2, logprob_token_ids=[11, 12, 5]
)
LISTED = replace(ALLOWED, logprob_token_ids=[40, 13, 80])
# more than 63 log-probabilities are no columns; words are banned by what is said in front of them
CONSTRAINED: list[dict[str, Any]] = [
    {"more": PENALISED},
    {"more": PENALISED, "temperature": 0.9, "seed": 1, "num_logprobs": 3},
    {"more": ALLOWED, "num_logprobs": 3},
    {"more": LISTED, "temperature": 1.0, "top_p": 0.8, "seed": 2, "num_logprobs": 3},
    {"num_logprobs": 100, "temperature": 0.8, "seed": 3},
]


def load(
    architecture: Any,
    folder: Path,
    *,
    max_num_seqs: int = len(KINDS),
    draft: LoadedModel | None = None,
    num_draft_states: int = 70,
    **options: Any,
) -> TorchRunner:
    torch.set_num_threads(1)
    tiny_models.save(architecture, folder)
    model = load_model(str(folder), device="cpu", dtype="float32")
    of_states = {"num_snapshots": 40, "num_draft_states": num_draft_states}
    return TorchRunner(
        dataclasses.replace(model, draft=draft),
        num_blocks=200,
        block_size=tiny_models.BLOCK_SIZE,
        max_num_seqs=max_num_seqs,
        kernel_config=KernelConfig(threads=1, **options),
        **of_states if model.states else {},
    )


@cache
def small_model() -> Path:
    """A folder with a draft model of another architecture and an eighth of the parameters or so,
    and of a vocabulary with another padding.
    """
    folder = Path(mkdtemp())
    config = LlamaConfig(
        vocab_size=tiny_models.VOCAB_SIZE - 3,
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        max_position_embeddings=50,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    return folder


def small_draft() -> LoadedModel:
    return load_model(str(small_model()), device="cpu", dtype="float32")


def drive_by_model(
    runner: TorchRunner, requests: list[LoopRequest], most: int, **options: Any
) -> Driven:
    """With as many drafts of the draft model as there may be."""
    drafts = SpeculativeConfig(method="draft_model", model="m", num_speculative_tokens=most)
    config = CoreConfig(model="", address="", speculative_config=drafts)
    info = dataclasses.replace(
        runner.info, decode_s=((1, 1.0), (64, 1.1)), draft_s=((1, 0.001), (64, 0.001))
    )
    by_model = model_drafter_of(config, info)
    drafter = partial(drafter_of, config, info, by_model=by_model)
    return drive(runner, requests, drafter=drafter, by_model=by_model, **options)


def said(
    driven: Driven, kinds: list[dict[str, Any]]
) -> list[tuple[list[int], list[float], list[float]]]:
    return [
        (each.token_ids, each.logprobs if "num_logprobs" in kind else [], each.others)
        for each, kind in zip(driven.outputs, kinds, strict=True)
    ]


def asked(
    kinds: list[dict[str, Any]], words: list[tuple[tuple[int, ...], ...]] | None = None
) -> list[LoopRequest]:
    return [
        LoopRequest(np.array(prompt, np.uint32), 40, **kind, bad_words=words[at] if words else ())
        for at, (prompt, kind) in enumerate(zip(tiny_models.prompts(), kinds, strict=True))
    ]


def texts_of(plain: Driven) -> list[list[int]]:
    return [
        [*prompt, *output.token_ids]
        for prompt, output in zip(tiny_models.prompts(), plain.outputs, strict=True)
    ]


@pytest.mark.quick
@pytest.mark.parametrize("architecture", named(DRAFTED))
def test_equals_what_is_said_without_drafts(architecture: Any, tmp_path: Path) -> None:
    runner = load(architecture, tmp_path, draft=small_draft())
    num_accepted_of_model = 0
    try:
        assert runner.info.takes_drafts
        requests, options = asked(KINDS), {"budget": 512, "is_cached": runner.info.has_states}
        plain = drive(runner, requests, **options)
        assert not any(step.num_drafts for step in plain.steps)
        texts = texts_of(plain)
        for most in (1, 4, 16):
            drafter = ToldDrafts(texts, runner.info.vocab_size, most, seed=most)
            drafted = drive(runner, requests, drafter=drafter, **options)
            assert said(drafted, KINDS) == said(plain, KINDS), most
            num_drafts = sum(step.num_drafts for step in drafted.steps)
            num_accepted = sum(step.num_accepted for step in drafted.steps)
            assert 0 < num_accepted < num_drafts
            assert len(drafted.steps) < len(plain.steps)
            # what was computed behind the drafts is a cache like any other
            again = drive(runner, requests, **options)
            assert said(again, KINDS) == said(plain, KINDS)
            by_model = drive_by_model(runner, requests, most, **options)
            assert said(by_model, KINDS) == said(plain, KINDS), most
            assert sum(step.num_drafts for step in by_model.steps)
            num_accepted_of_model += sum(step.num_accepted for step in by_model.steps)
        assert num_accepted_of_model  # equal noise draws equal tokens, even of a model of noise
    finally:
        runner.close()


@pytest.mark.parametrize("architecture", named({"Llama", "Qwen3"}))
def test_constraints_and_many_logprobs_are_those_behind_each_draft(
    architecture: Any, tmp_path: Path
) -> None:
    runner = load(architecture, tmp_path, draft=small_draft())
    try:
        free = drive(runner, asked(CONSTRAINED), budget=512)
        # forbid what would be said: pairs and triples in the middle of it
        words = [
            tuple(tuple(ids[at : at + num]) for at, num in ((3, 2), (9, 3), (20, 2)))
            for ids in (each.token_ids for each in free.outputs)
        ]
        requests = asked(CONSTRAINED, words)
        plain = drive(runner, requests, budget=512)
        assert said(plain, CONSTRAINED) != said(free, CONSTRAINED)
        texts = texts_of(plain)
        for most in (1, 4, 16):
            drafter = ToldDrafts(texts, runner.info.vocab_size, most, seed=most)
            drafted = drive(runner, requests, budget=512, drafter=drafter)
            assert said(drafted, CONSTRAINED) == said(plain, CONSTRAINED), most
            num_drafts = sum(step.num_drafts for step in drafted.steps)
            assert 0 < sum(step.num_accepted for step in drafted.steps) < num_drafts
            by_model = drive_by_model(runner, requests, most, budget=512)
            assert said(by_model, CONSTRAINED) == said(plain, CONSTRAINED), most
            assert sum(step.num_drafts for step in by_model.steps)
    finally:
        runner.close()


@pytest.mark.parametrize("architecture", named({"Llama", "Qwen3", "Qwen2, sliding window", "LFM2"}))
def test_drafts_beside_prompts_change_nothing(architecture: Any, tmp_path: Path) -> None:
    """Of five requests two run at a time, so prompts come beside rows that have drafts."""
    runner = load(architecture, tmp_path, max_num_seqs=2)
    try:
        requests = asked(CONSTRAINED)
        plain = drive(runner, requests, budget=512, is_cached=True)
        texts = texts_of(plain)
        num_beside = 0
        for most in (1, 4, 16):
            drafter = ToldDrafts(texts, runner.info.vocab_size, most, seed=most)
            drafted = drive(runner, requests, budget=512, is_cached=True, drafter=drafter)
            assert said(drafted, CONSTRAINED) == said(plain, CONSTRAINED), most
            num_beside += sum(step.num_drafts > 0 and step.has_prompts for step in drafted.steps)
        assert num_beside
    finally:
        runner.close()


@pytest.mark.parametrize("architecture", named({"Qwen3.5", "LFM2"}))
@pytest.mark.parametrize("max_num_seqs", [5, 2])
def test_states_in_front_of_drafts_are_saved_given_up_and_computed_again(
    architecture: Any, max_num_seqs: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of answers, too, with which second turns begin."""
    monkeypatch.setattr(state_marks, "_BACK", tiny_models.BLOCK_SIZE)
    runner = load(architecture, tmp_path, max_num_seqs=max_num_seqs, num_draft_states=18)
    num_preempted = num_cached = 0
    try:
        first = asked(KINDS)
        texts = texts_of(drive(runner, first, budget=512, is_cached=True))
        turns = [
            dataclasses.replace(each, prompt=np.array(text, np.uint32), max_tokens=8)
            for each, text in zip(first, texts, strict=True)
        ]
        kinds, requests = KINDS * 2, [*first, *turns]
        for limits in ({"budget": 512}, {"budget": 512, "num_blocks": 34}, {"budget": 16}):
            plain = drive(runner, requests, is_cached=True, **limits)
            told = [
                [*each.prompt.tolist(), *output.token_ids]
                for each, output in zip(requests, plain.outputs, strict=True)
            ]
            for most in (1, 4, 16):
                drafter = ToldDrafts(told, runner.info.vocab_size, most, seed=most)
                drafted = drive(runner, requests, is_cached=True, drafter=drafter, **limits)
                assert said(drafted, kinds) == said(plain, kinds), (limits, most)
                assert sum(step.num_accepted for step in drafted.steps)
                num_preempted += drafted.num_preemptions
                num_cached += drafted.num_cached
        assert num_cached
        assert num_preempted
    finally:
        runner.close()


@pytest.mark.parametrize("architecture", named({"Llama", "Qwen2, sliding window"}))
@pytest.mark.parametrize("max_num_seqs", [5, 2])
def test_a_draft_model_that_is_the_model_is_always_right(
    architecture: Any, max_num_seqs: int, tmp_path: Path
) -> None:
    """So its cache is that of the model, whatever becomes of blocks: they are shared, given up, and
    filled in chunks; and it draws with the model's noise.
    """
    tiny_models.save(architecture, tmp_path)
    itself = load_model(str(tmp_path), device="cpu", dtype="float32")
    runner = load(architecture, tmp_path, draft=itself, max_num_seqs=max_num_seqs)
    kinds, requests = KINDS * 2, asked(KINDS) * 2
    num_shared = num_preempted = 0
    try:
        for limits in ({"budget": 512}, {"budget": 512, "num_blocks": 40}, {"budget": 16}):
            plain = drive(runner, requests, is_cached=True, **limits)
            for most in (1, 16):
                driven = drive_by_model(runner, requests, most, is_cached=True, **limits)
                assert said(driven, kinds) == said(plain, kinds), (limits, most)
                num_drafts = sum(step.num_drafts for step in driven.steps)
                assert num_drafts == sum(step.num_accepted for step in driven.steps) > 100
                num_shared += driven.num_cached
                num_preempted += driven.num_preemptions
        assert num_shared
        assert num_preempted or max_num_seqs == 2
    finally:
        runner.close()


def test_blocks_that_a_draft_model_has_filled_are_not_filled_again(tmp_path: Path) -> None:
    [llama] = named({"Llama"})
    runner = load(*llama.values, tmp_path, draft=small_draft())
    computed: list[int] = []
    model: Any = runner._draft_model
    usual = model.foresee

    def counted(plan: StepPlan) -> StepResult:
        computed.append(plan.num_tokens)
        result: StepResult = usual(plan)
        return result

    model.foresee = counted
    try:
        first = LoopRequest(np.arange(3, 43, dtype=np.uint32), 8)
        for requests, most in (([first], 48), ([first, dataclasses.replace(first, seed=1)], 70)):
            computed.clear()
            one_by_one = dataclasses.replace(runner.info, max_num_seqs=1)
            runner.info, before = one_by_one, runner.info
            drive_by_model(runner, requests, 4, budget=512, is_cached=True)
            runner.info = before
            assert 40 < sum(computed) < most
    finally:
        runner.close()


def test_draft_models_that_cannot_be(tmp_path: Path) -> None:
    architectures = {each.name: each for each in ALL}
    folders = {name: tmp_path / name for name in ("Llama", "Qwen3.5", "OPT")}
    for name, folder in folders.items():
        tiny_models.save(architectures[name], folder)
    llama, hybrid, opt = (
        load_model(str(folder), device="cpu", dtype="float32") for folder in folders.values()
    )
    assert not opt.states
    folders["small"] = tmp_path / "small"
    copytree(small_model(), folders["small"])
    small = load_model(str(folders["small"]), device="cpu", dtype="float32")
    with pytest.raises(ModelLoadError, match="carries recurrent states, which cannot be taken"):
        check_draft_model(llama, hybrid)
    with pytest.raises(ModelLoadError, match=r"it has [\d,]+ parameters, and .* allowed are no mo"):
        check_draft_model(small, llama)
    with pytest.raises(ModelLoadError, match="without tokenizers 196 ids are not 199"):
        check_draft_model(llama, small)
    for folder, words in ((folders["small"], ("a", "b")), (folders["Llama"], ("b", "a"))):
        given = Tokenizer(WordLevel({word: at for at, word in enumerate(words)}, unk_token="a"))
        given.save(str(folder / "tokenizer.json"))
    with pytest.raises(ModelLoadError, match="'a' is 0 in the one and 1 in the other; allowed is"):
        check_draft_model(llama, small)
    check_draft_model(llama, small, str(folders["small"]))  # in place of the model's own
    (folders["OPT"] / "tokenizer.json").write_bytes(
        (folders["Llama"] / "tokenizer.json").read_bytes()
    )
    (folders["Llama"] / "tokenizer.json").write_bytes(
        (folders["small"] / "tokenizer.json").read_bytes() + b"\n"
    )
    check_draft_model(llama, small)  # as files they differ
    config = CoreConfig(model="", address="", tokenizer=str(folders["OPT"]))
    with pytest.raises(ModelLoadError, match="'a' is 0 in the one and 1 in the other; allowed is"):
        load_draft_model(llama, str(folders["small"]), config)
    with pytest.raises(ModelLoadError, match=r"nothing is drafted of .*OPT: drafts are verified"):
        load(architectures["OPT"], folders["OPT"], draft=small)
    on_card = dataclasses.replace(llama, device=torch.device("cuda"))
    config = CoreConfig(model="", address="")
    with pytest.raises(ModelLoadError, match=r"nothing is drafted of .*, as it is on a card"):
        load_draft_model(on_card, str(small_model()), config)
    with pytest.raises(ModelLoadError, match=r"nothing is drafted of .*, as several ranks"):
        load_draft_model(llama, str(small_model()), config, Rank(0, 2))


def test_without_a_tokenizer_json_other_files_say_whether_tokens_are_the_same(
    tmp_path: Path,
) -> None:
    [llama] = named({"Llama"})
    folders = [tmp_path / name for name in ("a", "b")]
    for folder in folders:
        tiny_models.save(*llama.values, folder)
    model, draft = (load_model(str(each), device="cpu", dtype="float32") for each in folders)
    given: list[tuple[dict[str, bytes], dict[str, bytes], str | None]] = [
        ({}, {}, r"cannot be told: .*\(its: none; the model's: none\); put a tokenizer.json into"),
        ({"tokenizer.model": b"1"}, {}, "its: none; the model's: tokenizer.model"),
        ({}, {"vocab.json": b"2"}, "its: vocab.json; the model's: tokenizer.model"),
        ({"vocab.json": b"2"}, {"tokenizer.model": b"2"}, "its: tokenizer.model, vocab.json; the "),
        ({}, {"tokenizer.model": b"1"}, None),
        ({"tokenizer.json": b"{}"}, {}, None),
        ({"added_tokens.json": b"{}"}, {}, "not both have a tokenizer.json"),
    ]
    for own, other, said in given:
        for folder, files in zip(folders, (own, other), strict=True):
            for name, content in files.items():
                (folder / name).write_bytes(content)
        if said is None:
            check_draft_model(model, draft)
            continue
        with pytest.raises(ModelLoadError, match=said):
            check_draft_model(model, draft)
    check_draft_model(model, model)


def test_a_core_loads_both_and_knows_what_their_steps_take(tmp_path: Path) -> None:
    [llama] = named({"Llama"})
    tiny_models.save(*llama.values, tmp_path)
    drafts = SpeculativeConfig(method="draft_model", model=str(tmp_path), num_speculative_tokens=4)
    alone = CoreConfig(
        model=str(tmp_path), address="", device="cpu", dtype="float32", kv_cache_gib=0.001
    )
    found = []
    for config in (
        alone,
        replace(alone, speculative_config=drafts),
        replace(alone, speculative_config=drafts, predecessor_ended_s=1.0),
    ):
        runner = load_runner(config)
        runner.close()
        found.append((runner.num_blocks, runner.info))
    (num, plain), (num_with_draft, info), (_, successor) = found
    assert plain.draft_model_len == 0
    assert num_with_draft == num // 2  # as large as the model
    assert info.draft_model_len == tiny_models.MAX_MODEL_LEN
    assert [rows for rows, _ in info.draft_s[:2]] == [1, 2]
    assert all(seconds > 0 for _, seconds in info.draft_s)
    assert not successor.draft_s
    assert successor.draft_share == 1.0  # by which its steps are estimated, as none is measured


def test_a_block_has_room_for_both_models(tmp_path: Path) -> None:
    [llama] = named({"Llama"})
    tiny_models.save(*llama.values, tmp_path)
    model, draft = load_model(str(tmp_path), device="cpu", dtype="float32"), small_draft()
    both = block_bytes(dataclasses.replace(model, draft=draft), 16)
    assert both == block_bytes(model, 16) + block_bytes(draft, 16) == block_bytes(model, 16) + 2048


GRAMMARS = GrammarBitmasks(TokenLog(), 10)
GIVEN = SpeculativeConfig(
    method="ngram", num_speculative_tokens=4, prompt_lookup_min=2, prompt_lookup_max=4
)


@pytest.mark.parametrize("architecture", named(UNDRAFTED))
def test_others_are_not_drafted_and_the_log_says_so(
    architecture: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    runner = load(architecture, tmp_path)
    runner.close()
    assert not runner.info.takes_drafts
    config = CoreConfig(model=str(tmp_path), address="", speculative_config=GIVEN)
    with caplog.at_level(logging.WARNING):
        assert drafter_of(config, runner.info, GRAMMARS) is None
    assert "speculative_config has no effect" in caplog.text
    assert drafter_of(CoreConfig(model=str(tmp_path), address=""), runner.info, GRAMMARS) is None


def test_nothing_is_drafted_without_room_for_states(tmp_path: Path) -> None:
    [hybrid] = named({"Qwen3.5"})
    runner = load(*hybrid.values, tmp_path, num_draft_states=0)
    runner.close()
    assert not runner.info.takes_drafts


def test_torchs_own_products_are_not_drafted(tmp_path: Path) -> None:
    [llama] = named({"Llama"})
    for options in ({"native": False}, {"packs": False}):
        folder = tmp_path / next(iter(options))
        runner = load(*llama.values, folder, **options)
        runner.close()
        assert not runner.info.takes_drafts


def test_where_drafts_are_verified_they_are_proposed(tmp_path: Path) -> None:
    info = ModelInfo("m", 10, 64, (), 1, 16, takes_drafts=True)
    config = CoreConfig(model=str(tmp_path), address="", speculative_config=GIVEN)
    assert drafter_of(config, info, GRAMMARS) is not None
