"""Which settings go with vLLM's engine, how its core is started, and what is refused, with why."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest

from slipstream.errors import BadRequestError
from slipstream.stack.plan.engine_options import (
    DENIED,
    NAMED_HERE,
    OF_OUR_ENGINE,
    check_engine,
    engine_options,
    engine_python,
)
from slipstream.stack.plan.process_plan import plan_stack
from slipstream.stack.settings import StackSettings, settings_from
from slipstream.stack.supervisor_events import SupervisorConfig
from slipstream_core.config import CoreConfig


def refused(**options: Any) -> str:
    settings = settings_from({"engine": "vllm", **options})
    with pytest.raises(BadRequestError) as raised:
        engine_options(settings)
    return str(raised.value)


def plan(tmp_path: Path, **options: Any) -> SupervisorConfig:
    return plan_stack(settings_from(options), tmp_path)


def core_of(config: SupervisorConfig) -> tuple[tuple[str, ...], CoreConfig, str | None]:
    spec = next(each for each in config.children if each.name == "core")
    return spec.argv, msgspec.json.decode(spec.config, type=CoreConfig), spec.forks


def test_a_stack_is_as_ever_without_another_engine(tmp_path: Path) -> None:
    argv, config, _ = core_of(plan(tmp_path))
    assert argv[0] == sys.executable
    assert (config.engine, config.engine_args) == ("slipstream", {})


def test_a_core_of_vllms_is_a_program_of_its_own_and_the_rest_is_forked(tmp_path: Path) -> None:
    config = plan(tmp_path, engine="vllm", engine_args='{"quantization": "fp8"}')
    argv, core, forks = core_of(config)
    assert argv == (sys.executable, "-P", "-m", "slipstream_core.main")
    assert (core.engine, core.engine_args) == ("vllm", {"quantization": "fp8"})
    assert forks is None
    assert [each.forks for each in config.children if each.name == "worker"] == [
        "slipstream_worker.main"
    ]


def test_a_core_in_another_environment_alone_has_its_python(tmp_path: Path) -> None:
    config = plan(tmp_path, engine="vllm", engine_python=sys.executable)
    argv, _, _ = core_of(config)
    assert argv[0] == sys.executable
    assert argv[2].endswith("slipstream_ipc/other_python.py")
    assert argv[-1] == "slipstream_core.main"
    others = [each.argv for each in config.children if each.name != "core"]
    assert all(each[:3] == (sys.executable, "-P", "-m") for each in others)


@pytest.mark.parametrize("name", OF_OUR_ENGINE)
def test_a_setting_of_our_engine_does_not_go_with_vllms(name: str) -> None:
    default = StackSettings.__struct_defaults__[StackSettings.__struct_fields__.index(name)]
    other: Any = {
        "attention_backend": "torch",
        "block_size": 32,
        "cuda_graph_sizes": [1],
        "device": "cpu",
        "kv_cache_dtype": "fp8",
        "nnodes": 2,
        "quantization": "q8_0",
        "speculative_config": {"method": "ngram"},
        "state_cache_gib": 1.0,
        "tensor_parallel_size": 2,
    }.get(name, not default)
    message = refused(**{name: other})
    assert message.startswith(f"{name}: got ")
    assert "with engine=vllm: give vLLM's own by engine_args" in message


@pytest.mark.parametrize("name", sorted(DENIED))
def test_a_denied_field_says_why(name: str) -> None:
    message = refused(engine_args={name: 2})
    assert message == f"engine_args: got '{name}: 2', allowed: {DENIED[name]}"


@pytest.mark.parametrize("name", sorted(NAMED_HERE))
def test_a_field_that_an_option_sets_names_the_option(name: str) -> None:
    message = refused(engine_args={name: 2})
    assert f"{NAMED_HERE[name]} sets this one" in message
    option = NAMED_HERE[name].removeprefix("--").replace("-", "_")
    assert " " in option or option == "MODEL" or option in StackSettings.__struct_fields__


@pytest.mark.parametrize("model", ["simulated:step_ms=1", "random:demo", "some/model:Q4_K_M"])
def test_a_model_that_vllm_cannot_have(model: str) -> None:
    with pytest.raises(BadRequestError) as raised:
        check_engine(settings_from({"engine": "vllm"}), model)
    assert str(raised.value) == f"engine: got 'vllm', allowed: slipstream with the model {model}"


@pytest.mark.parametrize("given", ["{", "[]"])
def test_arguments_are_an_object(given: str) -> None:
    assert "an object as JSON" in refused(engine_args=given)


@pytest.mark.parametrize(("name", "value"), [("engine_args", {}), ("engine_python", "python3")])
def test_options_of_the_engine_need_it(name: str, value: Any) -> None:
    with pytest.raises(BadRequestError, match="None without engine=vllm"):
        engine_options(settings_from({name: value}))


def test_a_python_without_the_packages_of_an_environment_with_vllm(tmp_path: Path) -> None:
    bare = tmp_path / "python"
    bare.write_text(f'#!/bin/sh\nexec {sys.executable} -S "$@"\n')
    bare.chmod(0o755)
    told = r"got 'a Python without msgspec, numpy, .*allowed: the Python .* with vLLM"
    with pytest.raises(BadRequestError, match=told):
        engine_python(settings_from({"engine": "vllm", "engine_python": str(bare)}))


def test_a_python_that_is_none_or_of_another_version(tmp_path: Path) -> None:
    with pytest.raises(BadRequestError, match=r"the Python .* of an environment"):
        engine_python(settings_from({"engine": "vllm", "engine_python": str(tmp_path / "no")}))
    other = tmp_path / "python"
    other.write_text("#!/bin/sh\necho 3.9\n")
    other.chmod(0o755)
    with pytest.raises(BadRequestError, match=r"got 'Python 3\.9, .*allowed: a Python 3\.1"):
        engine_python(settings_from({"engine": "vllm", "engine_python": str(other)}))
