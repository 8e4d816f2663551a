"""Each option of `vllm serve` 0.33.0: taken, without effect, or refused with a reason."""

from __future__ import annotations

import logging
from typing import Any

import pytest
from tests.api.vllm_page import PAGE, page_with, serve_options, tables

import slipstream
from slipstream.cli.options.parser import Parser
from slipstream.cli.options.stack_options import given_settings
from slipstream.cli.serving.serve import add_serve
from slipstream.errors import BadRequestError
from slipstream.stack.settings import settings_from
from slipstream.vllm_flags import (
    RENAMED,
    VALUES,
    Flag,
    Only,
    Renamed,
    Without,
    flag_named,
    flags,
    treatments,
)

ALL = sorted({*flags(), *treatments()})
CONVERTED = {  # what a value is to be for an option that vLLM has, where its default says nothing
    "model": "simulated:",
    "tokenizer": "x",
    "dtype": "half",
    "quantization": "q8_0",
    "attention_backend": "FLASH_ATTN",
    "host": "0.0.0.0",
    "master_addr": "10.0.0.1",
    "node_rank": "0",
    "reasoning_parser": "qwen3",
    "tool_call_parser": "hermes",
    "stream_interval": "3",
    "gpu_memory_utilization": "0.8",
    "otlp_traces_endpoint": "http://localhost:4318",
}


@pytest.fixture(autouse=True)
def no_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    """Variables of the machine that runs the tests do not count."""
    monkeypatch.setattr("os.environ", {"PATH": "/usr/bin:/bin"})


def parsed(*words: str) -> Any:
    parser = Parser(prog="slipstream serve")
    add_serve(parser)
    return parser.parse_args(["simulated:", *words])


def settings(*words: str) -> dict[str, Any]:
    return given_settings(parsed(*words))


PLAIN: dict[str, Any] = {"model": "simulated:"}


def option(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def flag_of(name: str) -> Flag:
    flag = flag_named(name)
    assert flag is not None
    return flag


def words(flag: Flag, value: Any) -> list[str]:
    """An option with a value, as on vLLM's command line."""
    if flag.kind == "flag":
        return [option(flag.name) if value else f"--no-{option(flag.name)[2:]}"]
    if isinstance(value, list | dict):
        import json

        texts = [json.dumps(value)] if flag.kind != "values" else [str(each) for each in value]
        return [option(flag.name), *texts] if texts else []
    return [option(flag.name), str(value)]


def test_the_facts_are_those_of_0_33() -> None:
    assert len(flags()) == 320
    assert flags()["tensor_parallel_size"] == Flag("tensor_parallel_size", ("-tp",), "value", 1)
    assert flags()["gpu_memory_utilization"].default == 0.92
    assert flags()["enable_prefix_caching"].kind == "flag"


def test_no_option_of_ours_is_treated_as_foreign() -> None:
    assert not set(serve_options()) & set(treatments())


@pytest.mark.parametrize("name", flags())
def test_each_option_is_the_same_or_is_treated(name: str) -> None:
    treatment = treatments().get(name)
    if treatment is None:
        assert name in serve_options()
    elif isinstance(treatment, Renamed):
        assert treatment.name in serve_options()
    else:
        assert treatment.why


def test_the_page_is_made_of_the_table() -> None:
    made = page_with(tables())
    assert PAGE.read_text() == made, "python -m tests.api.vllm_page"


@pytest.mark.parametrize("name", treatments())
def test_what_vllm_would_do_anyway_is_taken(name: str) -> None:
    flag = flag_of(name)
    assert settings_from({name: None}) == settings_from({})
    if flag.default is not None:
        found = parsed(*words(flag, flag.default))
        if name == "shutdown_timeout":  # the default here is another
            assert given_settings(found) == PLAIN | {"drain_s": 0.0}
            return
        assert given_settings(found) == PLAIN
        assert not found.notes
        assert settings_from({name: flag.default}) == settings_from({})


@pytest.mark.parametrize(
    "name", [name for name in ALL if isinstance(treatments().get(name), Without)]
)
def test_what_has_no_effect_is_taken_with_a_line(
    name: str, caplog: pytest.LogCaptureFixture
) -> None:
    flag = flag_of(name)
    value: Any = {"values": ["7"], "object": {"a": 1}, "flag": not flag.default}.get(flag.kind, "7")
    found = parsed(*words(flag, value))
    assert given_settings(found) == PLAIN
    [note] = found.notes
    assert note.startswith(f"{words(flag, value)[0]} has no effect here: ") or flag.kind == "flag"
    assert settings_from({name: value}) == settings_from({})
    assert [record.message for record in caplog.records] == [
        f"{name} has no effect here: {treatments()[name].why}"
    ]


@pytest.mark.parametrize("name", [name for name in ALL if isinstance(treatments().get(name), Only)])
def test_what_would_change_something_is_refused_with_a_reason(
    name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    flag, treatment = flag_of(name), treatments()[name]
    assert isinstance(treatment, Only)
    for neutral in treatment.values:
        if neutral is not None:
            assert settings(*words(flag, neutral)) == PLAIN
        assert settings_from({name: neutral}) == settings_from({})
    value: Any = {"values": ["7"], "object": {"a": 1}, "flag": not flag.default}.get(flag.kind, "7")
    with pytest.raises(SystemExit) as caught:
        parsed(*words(flag, value))
    assert caught.value.code == 2
    said = capsys.readouterr().err
    assert said.startswith(f"slipstream serve: {option(name)}: got ")
    assert treatment.why in said
    assert "see docs/from-vllm.md" in said
    assert said.count("\n") == 1
    with pytest.raises(slipstream.BadRequestError, match=f"^{name}: got ") as error:
        settings_from({name: value})
    assert error.value.field == name


@pytest.mark.parametrize("name", [name for name in flags() if name not in treatments()])
def test_options_of_the_same_name_take_vllms_values(name: str) -> None:
    if name in ("config", "model"):
        return
    flag = flag_of(name)
    value = CONVERTED.get(name, flag.default if flag.default not in (None, []) else "7")
    if flag.kind == "flag":
        for bare, said in ((option(name), True), (f"--no-{option(name)[2:]}", False)):
            assert settings(bare) == PLAIN | {name: said}
        return
    for spelling in (option(name), f"--{name}", *flag.others):
        found = settings(spelling, str(value))
        setting = "http_port" if name == "port" else name
        assert setting in found or name in ("max_model_len",)


@pytest.mark.parametrize("name", RENAMED)
def test_renamed_options_say_so(name: str) -> None:
    flag, ours = flag_of(name), RENAMED[name].name
    value: Any = True if flag.kind == "flag" else CONVERTED.get(name, "7")
    found = parsed(*words(flag, [value] if flag.kind == "values" else value))
    assert ours in given_settings(found) or getattr(found, ours) in ("7", True)
    [note] = found.notes
    assert note.startswith(f"{option(name)} is {option(ours)}")


TAKEN = {
    "-tp 2": {"tensor_parallel_size": 2},
    "-pp 1": {},
    "-dp 1": {},
    "-q compressed-tensors": {"quantization": "compressed-tensors"},
    "-O3": {},
    "-O 3": None,
    "-cc.mode 3": {},
    "--compilation-config.cudagraph_mode=NONE": {},
    "--structured-outputs-config.backend xgrammar": {},
    "--structured_outputs_config.backend=xgrammar": {},
    "--enable-prefix-caching": {"enable_prefix_caching": True},
    "--enable-prefix-caching false": {"enable_prefix_caching": False},
    "--disable-prefix-caching": {"enable_prefix_caching": False},
    "--no-enforce-eager": {"enforce_eager": False},
    "--enforce-eager=true": {"enforce_eager": True},
    "--enforce-eager=no": {"enforce_eager": False},
    "--dtype half": {"dtype": "float16"},
    "--dtype=float": {"dtype": "float32"},
    "--max-model-len 32k": {"max_model_len": 32_000},
    "--max-model-len 32K": {"max_model_len": 32_768},
    "--max-model-len 25.6k": {"max_model_len": 25_600},
    "--gpu-memory-utilization .5": {"gpu_memory_utilization": 0.5},
    "--shutdown-timeout 5.": {"drain_s": 5.0},
    "--max-model-len auto": {"max_model_len": None},
    "--max-model-len -1": {"max_model_len": None},
    "--max-num-batched-tokens 1M": {"max_num_batched_tokens": 2**20},
    "--served-model-name a b": {"served_model_name": ("a", "b")},
    "--api-key a b": {"api_key": ("a", "b")},
    '--allowed-origins ["http://a","http://b"]': {"allowed_origins": ("http://a", "http://b")},
    "--cudagraph-capture-sizes 1 2 4": {"cuda_graph_sizes": (1, 2, 4)},
    "--swap-space 16 --task generate": {"runner": "generate"},
    "--task embed": {"runner": "pooling"},
    "--runner pooling --convert embed": {"runner": "pooling", "convert": "embed"},
    "--enable-auto-tool-choice --tool-call-parser hermes": {"tool_format": "hermes"},
    "--tool-call-parser openai": {"tool_format": "harmony"},
    "--tool-call-parser xlam": {},
    "--disable-log-stats": {"log_stats_interval_s": 0.0},
    "--disable-log-requests": {},
    "--quantization None": {"quantization": None},
    "--ctx-size 4k": {"max_model_len": 4000},
    "--kv-cache-dtype fp8": {"kv_cache_dtype": "fp8"},
    "--load-format hf --revision main": {"load_format": "hf", "revision": "main"},
    "--kv-cache-dtype auto --revision main": {"kv_cache_dtype": "auto", "revision": "main"},
    "--distributed-executor-backend mp --no-enable-chunked-prefill": {},
}


@pytest.mark.parametrize("line", [line for line, found in TAKEN.items() if found is not None])
def test_spellings_that_people_use(line: str) -> None:
    assert settings(*line.split()) == PLAIN | (TAKEN[line] or {})


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("-pp 2", "-pp: got '2', allowed: 1: of several devices only --tensor"),
        ("-q aqlm", "--quantization: got 'aqlm', allowed: one of auto-round, awq, bitnet,"),
        ("--hf-token secret", "--hf-token: got '(not shown)', allowed: nothing: $HF_TOKEN"),
        ("--max-model-len 2.5K", "--max-model-len: got '2.5K', allowed: an integer >= 1"),
        ("--structured-outputs-config.x 1", "--structured-outputs-config.x: got '1', allowed: the"),
        ("--cpu-offload-gb", "--cpu-offload-gb is missing: give a value"),
    ],
)
def test_what_is_refused_is_named_as_typed(
    line: str, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    try:
        settings(*line.split())
    except SystemExit:
        message = capsys.readouterr().err.removeprefix("slipstream serve: ")
    except slipstream.BadRequestError as error:
        message = option(str(error))
    else:
        pytest.fail("it is taken")
    assert message.replace("max_model_len", "max-model-len").startswith(said)


def test_a_word_behind_a_list_is_the_model_where_there_is_none() -> None:
    parser = Parser(prog="slipstream serve")
    add_serve(parser)
    found = parser.parse_args(["--api-key", "k", "simulated:"])
    assert given_settings(found) == PLAIN | {"api_key": ("k",)}


def test_keywords_of_llm() -> None:
    given = {"dtype": "half", "tool_call_parser": "hermes"}
    assert settings_from(given) == settings_from({"dtype": "float16", "tool_format": "hermes"})
    for refused, said in (
        ({"data_parallel_size": 2}, "data_parallel_size: got 2, allowed: 1: "),
        ({"tool_call_parser": "granite", "tool_format": "b"}, "tool_call_parser: got 'granite', "),
    ):
        with pytest.raises(slipstream.BadRequestError) as caught:
            settings_from(refused)
        assert str(caught.value).startswith(said)


def test_keywords_that_change_nothing_are_not_spoken_of(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    given = {"pipeline_parallel_size": 1, "load_format": "auto", "revision": None, "task": "auto"}
    assert settings_from(given) == settings_from({})
    assert not caplog.records


def test_files_and_variables_hold_them_too(
    tmp_path: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "server.yaml"
    file.write_text(
        "tool-call-parser: hermes\nenable-auto-tool-choice: true\npipeline_parallel_size: 1\n"
        "dtype: half\nmax-model-len: 32k\nenforce-eager: false\ncudagraph-capture-sizes: [1, 2]\n"
        "swap-space: 4\nno-enable-prefix-caching: true\n"
    )
    monkeypatch.setenv("SLIPSTREAM_REASONING_PARSER", "qwen3")
    monkeypatch.setenv("SLIPSTREAM_CPU_OFFLOAD_GB", "0")
    found = parsed("--config", str(file))
    assert given_settings(found) == PLAIN | {
        "tool_format": "hermes",
        "reasoning_format": "qwen3",
        "dtype": "float16",
        "max_model_len": 32_000,
        "enforce_eager": False,
        "enable_prefix_caching": False,
        "cuda_graph_sizes": (1, 2),
    }
    assert len(found.notes) == 5, found.notes
    assert capsys.readouterr().err == ""
    file.write_text("model: x\ncpu-offload-gb: 4\n")
    with pytest.raises(SystemExit):
        parsed("--config", str(file))
    assert ", line 2: cpu-offload-gb: got '4', allowed: 0: " in capsys.readouterr().err


def test_values_written_otherwise_are_of_options_of_the_same_name() -> None:
    assert set(VALUES) <= set(flags()) - set(treatments())


def test_a_value_that_is_gone_says_why() -> None:
    with pytest.raises(BadRequestError, match="FlashInfer's back end is gone"):
        settings_from({"attention_backend": "flashinfer"})
    assert settings_from({"attention_backend": "FLASHINFER"}).attention_backend == "auto"
