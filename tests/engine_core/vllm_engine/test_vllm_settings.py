"""Translates a core's settings into vLLM's, and refuses those of the start and of requests."""

from __future__ import annotations

import logging
import secrets
import sys
from typing import Any

import pytest
from tests.helpers import fake_vllm
from tests.helpers.admits import admit_of, with_fields

from slipstream_core.config import CoreConfig
from slipstream_core.engine.build import engine_of
from slipstream_core.load_error import ModelLoadError
from slipstream_core.model.fingerprint import fingerprint_of
from slipstream_core.step.plan import TurnRunner
from slipstream_core.vllm_engine.engine_requests import Objections, vllm_params
from slipstream_core.vllm_engine.runner import load
from slipstream_core.vllm_engine.settings import check_version, engine_args
from slipstream_ipc.columns import pack_u32
from slipstream_ipc.messages import Admit, SamplingParams
from slipstream_ipc.messages.request import StructuredOutputs


def config_of(**settings: Any) -> CoreConfig:
    return CoreConfig(**{"model": "/m", "address": "ipc:///a", "engine": "vllm", **settings})


def admit(**params: Any) -> Admit:
    asked = SamplingParams(**{"temperature": 0.0, **params})
    return admit_of(secrets.token_bytes(16), pack_u32([5, 6, 7]), asked, max_tokens=9)


def objections(version: str = fake_vllm.VERSION, **engine_args: Any) -> Objections:
    return Objections(fake_vllm.EngineArgs(**engine_args).create_engine_config(None), version)


def test_every_shared_setting_is_translated_once() -> None:
    args = engine_args(
        config_of(
            dtype="bfloat16",
            max_model_len=99,
            max_num_seqs=7,
            max_num_batched_tokens=333,
            enforce_eager=True,
            enable_prefix_caching=False,
            gpu_memory_utilization=0.5,
            num_blocks=77,
            max_logprobs=5,
            trust_remote_code=True,
            hf_overrides={"a": 1},
            generation_config="vllm",
            override_generation_config={"top_p": 0.5},
            kv_cache_gib=2.5,
            engine_args={"quantization": "fp8"},
        ),
        is_cpu=True,
    )
    assert args == {
        "model": "/m",
        "dtype": "bfloat16",
        "max_model_len": 99,
        "max_num_seqs": 7,
        "max_num_batched_tokens": 333,
        "enforce_eager": True,
        "enable_prefix_caching": False,
        "gpu_memory_utilization": 0.5,
        "num_gpu_blocks_override": 77,
        "max_logprobs": 5,
        "trust_remote_code": True,
        "hf_overrides": {"a": 1},
        "generation_config": "vllm",
        "override_generation_config": {"top_p": 0.5},
        "kv_cache_memory_bytes": int(2.5 * 2**30),
        "scheduling_policy": "priority",
        "disable_log_stats": True,
        "async_scheduling": False,
        "worker_extension_cls": "slipstream_core.vllm_engine.worker_extension.BeginsWithOutputs",
        "quantization": "fp8",
    }


def test_what_is_left_open_is_vllms_to_choose() -> None:
    config = config_of(card_defaults=("max_num_seqs", "max_num_batched_tokens"))
    args = engine_args(config, is_cpu=False)
    assert {"max_num_seqs", "max_num_batched_tokens", "kv_cache_memory_bytes"}.isdisjoint(args)
    runner = load(config)
    assert runner.info.max_num_seqs == fake_vllm.MAX_NUM_SEQS
    runner.close()


def test_the_model_is_described_by_vllm() -> None:
    runner = load(config_of(max_logprobs=-1))
    info = runner.info
    assert info.engine == f"vllm {fake_vllm.VERSION}"
    assert info.eos_token_ids == (fake_vllm.EOS,)
    assert info.default_sampling.temperature == 0.7
    assert (info.vocab_size, info.block_size, info.max_logprobs) == (997, 16, 63)
    runner.close()
    runner.close()  # idempotent


def load_configured(config: CoreConfig) -> TurnRunner[Any]:
    return engine_of(config).load(config)


def test_replicas_are_equal_only_with_the_same_engine() -> None:
    runner = load(config_of())
    info = runner.info
    runner.close()
    prints = {
        fingerprint_of(config_of(model="random:x", engine_args=args), info)
        for args in ({}, {"quantization": "fp8"})
    }
    assert len(prints) == 2


@pytest.mark.parametrize("version", ["0.30.0", "0.31.1", "0.32.0", "0.33.0", "0.33.1rc1"])
def test_versions_that_serve(version: str) -> None:
    check_version("m", version)


@pytest.mark.parametrize("version", ["0.29.9", "0.34.0", "1.0.0", "dev", "0.dev"])
def test_versions_that_are_refused(version: str, monkeypatch: pytest.MonkeyPatch) -> None:
    fake_vllm.install(monkeypatch, version)
    with pytest.raises(ModelLoadError) as raised:
        load_configured(config_of())
    why = f"vllm {version} is not supported, allowed: 0.30 to 0.33"
    assert str(raised.value) == f"cannot load the model '/m': {why}"


class _InvalidError(ValueError):
    """As pydantic's ValidationError, whose first line does not say what is wrong."""

    def __str__(self) -> str:
        return "2 validation errors for ModelConfig\n  Value error, ..."

    def errors(self) -> list[dict[str, Any]]:
        many = " ".join(f"'M{i}ForCausalLM'," for i in range(300))
        return [
            {"loc": ("dtype",), "msg": "no such\ntype"},
            {"loc": (), "msg": f"Value error, ['X'] are not supported. Supported: {many}"},
        ]


def test_what_vllm_says_against_a_model_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuses(*_args: Any) -> Any:
        raise _InvalidError

    monkeypatch.setattr(fake_vllm.EngineArgs, "create_engine_config", refuses)
    with pytest.raises(ModelLoadError) as raised:
        load_configured(config_of())
    told = str(raised.value)
    why = "dtype: no such type; Value error, ['X'] are not supported. Supported: 'M0ForCausalLM',"
    assert told.startswith(f"cannot load the model '/m': vLLM 0.32.0: {why}")
    assert len(told) < 400


def test_a_missing_vllm_is_said_with_the_ways_to_have_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "vllm.version", None)
    with pytest.raises(
        ModelLoadError, match=r"--engine vllm needs the package vllm.*--engine-python"
    ):
        load_configured(config_of())


def test_a_field_that_vllm_lacks_is_named() -> None:
    with pytest.raises(ModelLoadError, match="EngineArgs have no field 'speed' in this version"):
        load_configured(config_of(engine_args={"speed": 9}))


def test_an_error_of_vllms_is_one_line_with_its_version() -> None:
    with pytest.raises(ModelLoadError) as raised:
        load_configured(config_of(dtype="float16"))
    assert str(raised.value).endswith("vLLM 0.32.0: ValueError: float16 is not for this device")


def test_content_that_vllm_would_log_is_not_logged(caplog: pytest.LogCaptureFixture) -> None:
    load(config_of()).close()
    logger = logging.getLogger("vllm.logging_utils.dump_input")
    with caplog.at_level(logging.DEBUG):
        logger.error("Dumping scheduler output for model execution: %s", [1, 2, 3])
    assert not caplog.records


def test_what_vllms_own_front_would_refuse_is_refused_with_its_words() -> None:
    fault = objections()(admit(logit_bias={996: 1.0, 997: 1.0}))
    assert fault is not None
    assert (fault.code, fault.field) == ("bad_request", "logit_bias")
    assert fault.message == "vLLM: logit_bias contains out-of-vocab token ids"
    assert objections()(admit(logit_bias={996: 1.0})) is None


def test_ids_that_vllm_would_apply_to_other_requests_are_refused() -> None:
    fault = objections("0.30.0")(admit(allowed_token_ids=[5, 6]))
    assert fault is not None
    why = "vLLM 0.30.0 applies them to other requests, too, allowed: from 0.31 on"
    assert (fault.message, fault.field) == (f"allowed_token_ids: {why}", "allowed_token_ids")
    assert objections("0.30.0")(admit()) is None
    assert objections("0.31.0")(admit(allowed_token_ids=[5, 6])) is None


GRAMMAR = StructuredOutputs(regex="a+")


@pytest.mark.parametrize(
    ("engine_args", "without"),
    [
        ({"speculative_config": {"num_speculative_tokens": 2}}, "speculative decoding"),
        ({"async_scheduling": True}, "asynchronous scheduling"),
    ],
)
def test_masks_are_refused_where_vllm_cannot_wait_for_them(
    engine_args: dict[str, Any], without: str
) -> None:
    object_to = objections(**engine_args)
    fault = object_to(admit(structured_outputs=GRAMMAR))
    assert fault is not None
    why = f"got a grammar, allowed: none with --engine vllm and {without}"
    assert fault.message == f"structured_outputs: {why}"
    fault = object_to(admit(thinking_token_budget=3))
    assert fault is not None
    assert fault.field == "thinking_token_budget"
    assert object_to(admit()) is None
    assert objections()(admit(structured_outputs=GRAMMAR)) is None


def test_parameters_are_vllms() -> None:
    asked = with_fields(
        admit(
            temperature=0.5,
            top_k=-1,
            top_p=0.9,
            min_p=0.1,
            min_tokens=2,
            logprobs=3,
            logprob_token_ids=(1, 2, 3),
        ),
    )
    made = vllm_params(
        asked.spec.params,
        seed=-1,
        max_tokens=9,
        stop_token_ids=(3, 4),
        constraints=None,
        num_prompt_logprobs=-1,
    )
    assert made.seed not in (None, -1)
    assert vars(made) | {"seed": 0} == {
        "temperature": 0.5,
        "top_k": 0,
        "top_p": 0.9,
        "min_p": 0.1,
        "seed": 0,
        "max_tokens": 9,
        "min_tokens": 2,
        "stop_token_ids": [3, 4],
        "ignore_eos": True,
        "detokenize": False,
        "logprobs": 3,
        "logprob_token_ids": [1, 2, 3],
        "prompt_logprobs": None,
        "presence_penalty": 0.0,
        "frequency_penalty": 0.0,
        "repetition_penalty": 1.0,
        "logit_bias": None,
        "allowed_token_ids": None,
        "skip_clone": True,
    }
