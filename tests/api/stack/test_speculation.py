"""Settings of speculation reach the core in vLLM's words, or are refused with the reason."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest

from slipstream.errors import BadRequestError
from slipstream.stack.plan.process_plan import core_config, plan_stack
from slipstream.stack.plan.speculation import speculative_options
from slipstream.stack.settings import settings_from
from slipstream_core.config import CoreConfig

GIVEN: list[tuple[dict[str, Any], tuple[int, int, int]]] = [
    ({}, (8, 2, 4)),
    ({"num_speculative_tokens": 16}, (16, 2, 4)),
    ({"prompt_lookup_max": 1}, (8, 1, 1)),
    ({"prompt_lookup_max": 10}, (8, 2, 10)),
    ({"prompt_lookup_min": 6}, (8, 6, 6)),
    ({"prompt_lookup_min": 3, "prompt_lookup_max": None}, (8, 3, 4)),
]


@pytest.mark.parametrize("from_text", [True, False])
@pytest.mark.parametrize(("given", "expected"), GIVEN)
def test_what_reaches_the_core(
    given: dict[str, Any], expected: tuple[int, int, int], from_text: bool
) -> None:
    value = given | {"method": "ngram"}
    options = {"speculative_config": json.dumps(value) if from_text else value}
    settings = settings_from(options, from_text=from_text)
    told = core_config(settings, "m") | {"address": ""}
    found = msgspec.convert(msgspec.to_builtins(told), CoreConfig).speculative_config
    assert found is not None
    lookup = found.prompt_lookup_min, found.prompt_lookup_max
    assert (found.num_speculative_tokens, *lookup) == expected


def test_answers_before_are_bounded() -> None:
    for given, mib in (({}, 64), ({"suffix_cache_mib": 3}, 3)):
        settings = settings_from({"speculative_config": given | {"method": "suffix"}})
        told = core_config(settings, "m") | {"address": ""}
        found = msgspec.convert(msgspec.to_builtins(told), CoreConfig).speculative_config
        assert found is not None
        assert (found.num_speculative_tokens, found.suffix_cache_mib) == (16, mib)


def test_nothing_is_drafted_unless_it_is_asked_for() -> None:
    assert speculative_options(settings_from({})) is None


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ("{", "speculative_config: got '{', allowed: an object as JSON ("),
        ("[1]", "speculative_config: got '[1]', allowed: an object as JSON ("),
        ({}, "speculative_config.method: got None, allowed: ngram, suffix"),
        ({"method": "medusa"}, "speculative_config.method: got 'medusa', allowed: ngram"),
        (
            {"prompt_lookup_mx": 4},
            "'prompt_lookup_mx', allowed: method, model, num_speculative_tokens, prompt_lookup_min",
        ),
        ({"prompt_lookup_mx": 4}, "draft_tensor_parallel_size; did you mean prompt_lookup_max?"),
        (
            {"rejection_sample_method": "block"},
            "_method: got 'block', allowed: nothing: drafts are verified by the stream's own noise",
        ),
        *(
            (
                {"num_speculative_tokens": value},
                f"_tokens: got {value!r}, allowed: 1 to 16",
            )
            for value in (0, 17, True, 2.5, "4")
        ),
        ({"suffix_cache_mib": 5}, '_mib: got 5, allowed: nothing without "method": "suffix"'),
        (
            {"method": "suffix", "suffix_cache_mib": 0},
            "suffix_cache_mib: got 0, allowed: 1 to 65536",
        ),
        (
            {"method": "suffix", "suffix_decoding_max_tree_depth": 24},
            "_depth: got 24, allowed: nothing: lengths follow what was right, and suffix_cache_mib",
        ),
        ({"prompt_lookup_max": 33}, "prompt_lookup_max: got 33, allowed: 1 to 32"),
        (
            {"prompt_lookup_min": 5, "prompt_lookup_max": 3},
            "prompt_lookup_min: got 5, allowed: at most prompt_lookup_max, 3",
        ),
    ],
)
def test_what_is_refused(given: str | dict[str, Any], said: str) -> None:
    if isinstance(given, dict) and given and "method" not in given:
        given = {"method": "ngram"} | given
    with pytest.raises(BadRequestError) as error:
        speculative_options(settings_from({"speculative_config": given}))
    assert said in str(error.value)


def folder_of(tmp_path: Path) -> str:
    (tmp_path / "config.json").write_text("{}")
    return str(tmp_path)


def test_a_model_alone_is_a_draft_model_as_in_vllm(tmp_path: Path) -> None:
    folder = folder_of(tmp_path)
    for more, num in (({}, 8), ({"num_speculative_tokens": 5, "draft_tensor_parallel_size": 1}, 5)):
        for given in (more, more | {"method": "draft_model"}):
            options = {"speculative_config": given | {"model": folder}}
            told = core_config(settings_from(options), "m") | {"address": ""}
            found = msgspec.convert(msgspec.to_builtins(told), CoreConfig).speculative_config
            assert found is not None
            got = found.method, found.model, found.num_speculative_tokens
            assert got == ("draft_model", folder, num)


def test_a_draft_model_from_the_hub_is_asked_for_before_anything_starts(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    config = {"model": "someone/who-is-not-here"}
    settings = settings_from({"speculative_config": config, "download_dir": str(tmp_path)})
    with pytest.raises(BadRequestError, match=r"speculative_config.model: got 'someone/who-is"):
        plan_stack(settings, tmp_path)


@pytest.mark.parametrize(
    ("more", "settings", "said"),
    [
        ({"model": None}, {}, "method: got None, allowed: ngram, suffix, draft_model"),
        ({"model": None, "method": "draft_model"}, {}, "model: got None, allowed: a folder or a"),
        ({"model": 3}, {}, "model: got 3, allowed: a folder or a hub id of a smaller model with"),
        ({"model": "simulated:"}, {}, "model: got 'simulated:', allowed: a folder or a hub id"),
        ({"model": "/not/there"}, {}, "config.model: got '/not/there', allowed: a folder with a c"),
        ({"model": "a/b:Q4_K_M"}, {}, "model: got 'a/b:Q4_K_M', allowed: a folder or a hub id of"),
        ({"method": "ngram"}, {}, 'allowed: nothing without "method": "draft_model"'),
        ({"prompt_lookup_min": 2}, {}, 'min: got 2, allowed: nothing with "method": "draft_model"'),
        ({"suffix_cache_mib": 2}, {}, 'mib: got 2, allowed: nothing with "method": "draft_model"'),
        ({"num_speculative_tokens": 17}, {}, "_tokens: got 17, allowed: 1 to 16"),
        ({"draft_tensor_parallel_size": 2}, {}, "_parallel_size: got 2, allowed: 1"),
        ({}, {"tensor_parallel_size": 2}, "allowed: nothing with device=auto, tensor_parallel_s"),
        ({}, {"device": "cuda"}, "parallel_size=1: drafts need a CPU, in one process"),
        ({}, {"model": "simulated:step_ms=1"}, "simulated model: its synthetic_acceptance_length"),
    ],
)
def test_draft_models_that_are_refused(
    more: dict[str, Any], settings: dict[str, Any], said: str, tmp_path: Path
) -> None:
    given = {"model": folder_of(tmp_path)} | more
    with pytest.raises(BadRequestError) as error:
        speculative_options(settings_from({"speculative_config": given} | settings))
    assert said in str(error.value)


def test_vllms_engine_has_options_of_its_own(tmp_path: Path) -> None:
    options = {"speculative_config": {"model": folder_of(tmp_path)}, "engine": "vllm"}
    with pytest.raises(BadRequestError, match="give vLLM's own by engine_args"):
        core_config(settings_from(options), "m")


def test_the_core_refuses_a_model_for_what_is_drafted_without() -> None:
    for given in ({"method": "ngram", "model": "m"}, {"method": "draft_model"}):
        config = given | {"num_speculative_tokens": 1}
        with pytest.raises(msgspec.ValidationError, match="draft_model needs a model, and no"):
            msgspec.convert({"model": "m", "address": "", "speculative_config": config}, CoreConfig)


def test_the_core_refuses_what_it_is_not_sent() -> None:
    lookup = {"prompt_lookup_min": 3, "prompt_lookup_max": 2}
    given = {"method": "ngram", "num_speculative_tokens": 1} | lookup
    with pytest.raises(msgspec.ValidationError, match="more than prompt_lookup_max"):
        msgspec.convert({"model": "m", "address": "", "speculative_config": given}, CoreConfig)
