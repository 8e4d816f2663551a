"""Settings, and what becomes of them: nothing is started here."""

from __future__ import annotations

import argparse
import contextlib
import os
import stat
import sys
from pathlib import Path

import msgspec
import pytest
from tests.helpers.certificates import Certificate

from slipstream import BadRequestError
from slipstream.cli.keys import make_folder
from slipstream.cli.options.stack_options import add_settings, given_settings
from slipstream.demo_model import MODEL_NAME, MODEL_PATH
from slipstream.http.config import FrontConfig
from slipstream.http.credentials import Credentials
from slipstream.stack.plan.front_plan import open_host
from slipstream.stack.plan.models.model_source import model_and_tokenizer
from slipstream.stack.plan.process_plan import plan_stack
from slipstream.stack.settings import StackSettings, allowed_values, description, settings_from
from slipstream_core.config import CoreConfig, LoraConfig
from slipstream_ipc.process import role_of
from slipstream_ipc.secret_files import check_secret
from slipstream_worker.config import WorkerConfig

DEMO = str(MODEL_PATH)
OF_THE_SUPERVISOR = {
    "hang_timeout_s",
    "max_restarts",
    "restart_window_s",
    "drain_s",
    "log_stats_interval_s",
    "spare_core",
    "spare_worker",
}


def configs(folder: Path, **options: object) -> tuple[CoreConfig, WorkerConfig]:
    core, worker = plan_stack(settings_from(options), folder).children
    assert core.argv[-1] == "slipstream_core.main"
    assert worker.argv[-1] == "slipstream_worker.main"
    return (
        msgspec.json.decode(core.config, type=CoreConfig),
        msgspec.json.decode(worker.config, type=WorkerConfig),
    )


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (
            {"max_num_seq": 3},
            ["there is no option max_num_seq; did you mean ", "did you mean max_num_seqs?"],
        ),
        ({"max_num_seqs": 0}, ["max_num_seqs: got 0, allowed: an integer >= 1"]),
        ({"max_num_seqs": "8"}, ["max_num_seqs: got '8'"]),
        ({"block_size": 257}, ["block_size: got 257, allowed: an integer >= 1 and <= 256"]),
        ({"kv_cache_gib": 0}, ["kv_cache_gib: got 0, allowed: a number > 0"]),
        (
            {"gpu_memory_utilization": 0},
            ["gpu_memory_utilization: got 0, allowed: a number > 0 and < 1"],
        ),
        ({"gpu_memory_utilization": 1.0}, ["gpu_memory_utilization: got 1.0"]),
        ({"grace_s": -1}, ["grace_s: got -1, allowed: a number >= 0"]),
        ({"dtype": "int8"}, ["dtype: got 'int8', allowed: one of auto, bfloat16"]),
        ({"max_model_len": 0}, ["max_model_len: got 0, allowed: an integer >= 1, or None"]),
        ({"stream_interval": 0}, ["stream_interval: got 0, allowed: an integer >= 1 or auto"]),
        ({"http_port": 65536}, ["http_port: got 65536, allowed: an integer >= 0 and <= 65535, or"]),
        ({"model": 7}, ["model: got 7, allowed: a string"]),
    ],
)
def test_a_wrong_option_is_named_with_its_value_and_range(options, said):
    with pytest.raises(BadRequestError) as caught:
        settings_from(options)
    for part in said:
        assert part in str(caught.value)


def test_text_from_a_command_line_becomes_numbers():
    settings = settings_from({"max_num_seqs": "8", "kv_cache_gib": "0.5"}, from_text=True)
    assert (settings.max_num_seqs, settings.kv_cache_gib) == (8, 0.5)
    with pytest.raises(BadRequestError, match="max_num_seqs: got 'many', allowed: an integer >= 1"):
        settings_from({"max_num_seqs": "many"}, from_text=True)


def test_every_option_explains_itself():
    for name in StackSettings.__struct_fields__:
        assert description(name)
        assert allowed_values(name)


def test_defaults_are_those_of_the_processes(tmp_path):
    core, worker = configs(tmp_path)
    assert core == CoreConfig(
        model=DEMO,
        address=core.address,
        runtime_dir=str(tmp_path),
        served_model_name="slipstream-demo",
        threads=1,
        dtype="float32",  # the demo model's texts do not depend on the batch
        card_defaults=("max_num_seqs", "max_num_batched_tokens"),  # not set by the user
    )
    assert worker == WorkerConfig(
        tokenizer=DEMO,
        client_address=f"ipc://{tmp_path}/client.sock",
        core_address=core.address,
        runtime_dir=str(tmp_path),
        cache_dir=worker.cache_dir,
        may_return=True,  # to a folder of a given name
        stack_incarnation=worker.stack_incarnation,
    )
    assert worker.stack_incarnation not in (0, configs(tmp_path)[1].stack_incarnation)


@pytest.mark.parametrize(
    ("given", "is_touched"),
    [({}, False), ({"kv_cache_gib": 1.0}, True), ({"num_blocks": 64}, True)],
)
def test_a_cache_of_a_given_size_is_touched_at_first(tmp_path, given, is_touched):
    core, _ = configs(tmp_path, **given)
    assert (core.touches_cache, core.kv_cache_gib) == (is_touched, 1.0)


def test_every_option_reaches_a_process(tmp_path):
    given = {
        "runner": "pooling",
        "convert": "embed",
        "served_model_name": "mine",
        "dtype": "bfloat16",
        "device": "cpu",
        "max_num_seqs": 7,
        "max_num_batched_tokens": 77,
        "max_model_len": 777,
        "max_waiting": 11,
        "max_waiting_tokens": 12345,
        "max_logprobs": 13,
        "logprobs_gib": 0.5,
        "response_store_mib": 1.5,
        "step_timeout_s": 12.5,
        "kv_cache_gib": 0.25,
        "kv_cache_dtype": "fp8",
        "gpu_memory_utilization": 0.5,
        "attention_backend": "torch",
        "enforce_eager": True,
        "language_model_only": True,
        "cuda_graph_sizes": (1, 8),
        "cuda_graphs_over_ranks": True,
        "enable_torch_symm_mem": True,
        "enable_prefix_caching": False,
        "share_prefix_cache": True,
        "num_blocks": 99,
        "state_cache_gib": 0.125,
        "block_size": 32,
        "threads": 3,
        "quantization": "q8_0",
        "speculative_config": {
            "method": "suffix",
            "model": None,
            "num_speculative_tokens": 3,
            "prompt_lookup_min": 1,
            "prompt_lookup_max": 5,
            "suffix_cache_mib": 6,
        },
        "tensor_parallel_size": 4,
        "native": False,
        "trust_remote_code": True,
        "hf_overrides": {"rope_theta": 5e5},
        "generation_config": "vllm",
        "override_generation_config": {"temperature": 0.5},
        "chat_template": "{{ messages }}",
        "default_chat_template_kwargs": {"enable_thinking": False},
        "tool_format": "hermes",
        "reasoning_format": "none",
        "stream_interval": 5,
        "client_timeout_s": 1.5,
        "grace_s": 2.5,
        "trace": str(tmp_path / "t.json"),
        "listen": "tcp://127.0.0.1:5555",
        "insecure": True,
        "otlp_traces_endpoint": "http://collector:4318/v1/traces",
    }
    of_the_front = {"http_port", "http_workers", "host", "api_key", "allowed_origins"}
    of_the_front |= {"allowed_hosts", "uds", "ssl_certfile", "ssl_keyfile", "access_log"}
    of_the_front |= {"forwarded_allow_ips", "api_key_file", "strict_fields", "openai_strict_finish"}
    of_the_front |= {"priority_key_file", "lora_key_file", "metrics_prefix"}
    elsewhere = {
        "model",
        "tokenizer",
        "hf_config_path",
        "load_format",
        *of_the_front,
        *OF_THE_SUPERVISOR,
    }
    elsewhere |= {"revision", "download_dir"}  # in names of models, and the environment
    # another engine's go with few of these (test_engine_options)
    elsewhere |= {"engine", "engine_args", "engine_python"}
    # none over ranks (below)
    elsewhere |= {"enable_lora", "lora_modules", "max_lora_rank", "max_loras", "lora_gib"}
    elsewhere |= {"allow_runtime_lora_updating", "lora_root"}
    elsewhere.add("log_format")  # in the environment of all processes
    elsewhere.add("output_workers")  # decides how many there are
    elsewhere |= {"nnodes", "node_rank", "master_addr", "master_port", "join_timeout_s"}
    assert {*given, "keys", "members"} == {*StackSettings.__struct_fields__} - elsewhere
    core, worker = configs(tmp_path, **given)
    arrived = {**msgspec.structs.asdict(worker), **msgspec.structs.asdict(core)}
    arrived["speculative_config"] = msgspec.to_builtins(core.speculative_config)
    assert {name: arrived[name] for name in given} == given


def test_adapters_reach_the_core(tmp_path):
    given = {"enable_lora": True, "lora_modules": ["a=/x"], "max_lora_rank": 8, "max_loras": 3}
    core, _ = configs(tmp_path, **given)
    assert core.lora == LoraConfig(modules=(("a", "/x"),), max_rank=8, max_loras=3)
    assert configs(tmp_path)[0].lora is None


@pytest.mark.parametrize(
    "words", [["--no-enable-prefix-caching"], ["--enable-prefix-caching", "false"]]
)
def test_what_is_on_can_be_switched_off(words):
    parser = argparse.ArgumentParser()
    add_settings(parser)
    assert given_settings(parser.parse_args(words)) == {"enable_prefix_caching": False}
    assert given_settings(parser.parse_args([])) == {}


def test_the_members_reach_the_worker_one_by_one(tmp_path):
    _, worker = configs(tmp_path, members="tcp://10.0.0.5:7001, tcp://10.0.0.6:7001")
    assert worker.members == ("tcp://10.0.0.5:7001", "tcp://10.0.0.6:7001")
    with pytest.raises(BadRequestError) as refused:
        plan_stack(settings_from({"members": "tcp://10.0.0.5"}), tmp_path)
    assert refused.value.field == "members"


def test_the_folder_of_keys_reaches_the_worker_and_no_key_does(tmp_path):
    made = make_folder(tmp_path / "keys")
    options = {"listen": "tcp://127.0.0.1:5555", "keys": str(tmp_path / "keys")}
    plan = plan_stack(settings_from(options), tmp_path)
    _, worker = configs(tmp_path, **options)
    assert (worker.listen, worker.keys) == ("tcp://127.0.0.1:5555", str(tmp_path / "keys"))
    secret = made[1].read_text().split('secret-key = "')[1][:40]
    assert not any(secret.encode() in bytes(child.config) for child in plan.children)


@pytest.mark.parametrize(
    ("options", "field"),
    [
        ({"listen": "tcp://127.0.0.1:5555"}, "listen"),
        ({"listen": "tcp://*:5555", "insecure": True}, "listen"),
        ({"listen": "tcp://10.0.0.1:5555", "insecure": True}, "insecure"),
        ({"listen": "tcp://10.0.0.1:5555", "keys": "/nowhere"}, "keys"),
        ({"keys": "/nowhere"}, "keys"),
        ({"insecure": True}, "insecure"),
    ],
)
def test_listeners_that_cannot_be(tmp_path, options, field):
    with pytest.raises(BadRequestError) as caught:
        plan_stack(settings_from(options), tmp_path)
    assert caught.value.field == field


def test_what_the_supervisor_is_told(tmp_path):
    told = {"hang_timeout_s": 7.5, "max_restarts": 3, "restart_window_s": 60.0, "drain_s": 2.5}
    told |= {"log_stats_interval_s": 0.5}
    plan = plan_stack(settings_from({**told, "spare_core": False, "http_port": 0}), tmp_path)
    assert {name: getattr(plan, name) for name in told} == told
    assert [child.has_spare for child in plan.children] == [False, True, False]
    assert [child.drains for child in plan.children] == [False, True, True]
    assert {*told, "spare_core", "spare_worker"} == OF_THE_SUPERVISOR


def front(folder: Path, **options: object) -> FrontConfig:
    children = plan_stack(settings_from(options), folder).children
    assert [child.name for child in children] == ["core", "worker", "http"]
    assert children[2].argv[-1] == "slipstream.http.main"
    return msgspec.json.decode(children[2].config, type=FrontConfig)


def test_a_front_is_there_where_it_has_a_port(tmp_path, monkeypatch):
    monkeypatch.delenv("SLIPSTREAM_API_KEY", raising=False)
    default = front(tmp_path, http_port=0)
    assert default == FrontConfig(f"ipc://{tmp_path}/client.sock", DEMO, MODEL_NAME, port=0)
    assert front(tmp_path, http_port=0, served_model_name="mine").model_name == "mine"
    assert front(tmp_path, http_port=0, metrics_prefix="vllm").metrics_prefix == "vllm"
    trace = str(tmp_path / "t.json")
    given = front(tmp_path, http_port=81, host="::1", api_key=["one", "two"], trace=trace)
    assert (given.port, given.host, given.api_keys) == (81, "::1", ("one", "two"))
    assert given.trace == trace
    monkeypatch.setenv("SLIPSTREAM_API_KEY", "three")
    assert front(tmp_path, http_port=0, api_key="one").api_keys == ("one", "three")


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({"http_port": 0}, None),
        ({"http_port": 0, "host": "localhost"}, None),
        ({"http_port": 0, "host": "::1"}, None),
        ({"host": "0.0.0.0"}, None),
        ({"uds": "s", "host": "0.0.0.0"}, None),
        ({"http_port": 0, "host": "0.0.0.0", "api_key": "one"}, None),
        ({"http_port": 0, "host": "0.0.0.0"}, "0.0.0.0"),
        ({"http_port": 81, "host": "::"}, "::"),
        ({"http_port": 81, "host": "gpu1.example"}, "gpu1.example"),
    ],
)
def test_where_everybody_who_reaches_it_is_served(monkeypatch, given, expected):
    monkeypatch.delenv("SLIPSTREAM_API_KEY", raising=False)
    assert open_host(settings_from(given)) == expected


def test_several_fronts_share_what_the_supervisor_binds(tmp_path):
    plan = plan_stack(settings_from({"http_port": 81, "http_workers": 3}), tmp_path)
    assert plan.listen == ("127.0.0.1", 81)
    fronts = [child for child in plan.children if child.front_index is not None]
    assert [child.name for child in fronts] == ["http-0", "http-1", "http-2"]
    assert len({bytes(child.config) for child in fronts}) == 1
    assert plan_stack(settings_from({}), tmp_path).listen is None


def test_each_of_several_workers_has_its_own_address_and_share(tmp_path):
    given = {"output_workers": 3, "listen": "tcp://127.0.0.1:5555", "insecure": True}
    plan = plan_stack(settings_from({**given, "response_store_mib": 6.0}), tmp_path)
    workers = [child for child in plan.children if role_of(child.name) == "worker"]
    assert [child.name for child in workers] == ["worker-0", "worker-1", "worker-2"]
    found = [msgspec.json.decode(child.config, type=WorkerConfig) for child in workers]
    assert [(each.index, each.num_workers) for each in found] == [(0, 3), (1, 3), (2, 3)]
    assert found[0].client_address == plan.address
    assert [each.client_address for each in found[1:]] == [f"{plan.address}.{i}" for i in (1, 2)]
    assert [each.listen for each in found] == [f"tcp://127.0.0.1:{5555 + i}" for i in range(3)]
    assert {each.response_store_mib for each in found} == {2.0}
    assert all(child.has_spare and child.drains for child in workers)
    assert [child.name for child in plan_stack(settings_from({}), tmp_path).children][1] == "worker"


def test_there_is_a_port_for_each_worker(tmp_path):
    given = {"output_workers": 3, "listen": "tcp://127.0.0.1:65534", "insecure": True}
    with pytest.raises(BadRequestError, match=r"listen: got .*, allowed: a port of at most 65533"):
        plan_stack(settings_from(given), tmp_path)


@pytest.mark.parametrize("key", ["", "se cret", "secret\n", "sécret", ["fine", ""], [7], 7])
def test_a_key_that_cannot_be_is_refused_without_being_shown(tmp_path, key):
    with pytest.raises(BadRequestError, match=r"api_key: got '\(not shown\)'") as caught:
        plan_stack(settings_from({"api_key": key, "http_port": 0}), tmp_path)
    assert "cret" not in str(caught.value)
    assert caught.value.__cause__ is None


def test_keys_come_from_a_file_too(tmp_path, monkeypatch):
    """One on a line: a command line can be read by every user of the machine."""
    monkeypatch.setenv("SLIPSTREAM_API_KEY", "three")
    file = tmp_path / "keys"
    file.write_text("one\n\ntwo\r\n")
    file.chmod(0o600)
    given = front(tmp_path, http_port=0, api_key="zero", api_key_file=str(file))
    assert (given.api_keys, given.api_key_file) == (("zero", "three"), str(file))
    assert Credentials(given).keys.check({b"x-api-key": b"two"}) is None
    command = plan_stack(settings_from({"http_port": 0, "api_key_file": str(file)}), tmp_path)
    assert not any("two" in word for child in command.children for word in child.argv)


@pytest.mark.parametrize(
    ("content", "why"),
    [
        (None, "No such file or directory"),
        (b"", "at least one key"),  # not a server without keys
        (b"\n \n", "at least one key"),
        (b"fine\nse cret\n", "line 2"),
        ("sécret".encode(), "line 1"),
        (b"\xffsecret", "line 1"),
    ],
)
def test_a_file_of_keys_that_cannot_be_is_refused_without_being_shown(tmp_path, content, why):
    file = tmp_path / "keys"
    if content is not None:
        file.write_bytes(content)
        file.chmod(0o600)
    with pytest.raises(BadRequestError) as caught:
        plan_stack(settings_from({"api_key_file": str(file), "http_port": 0}), tmp_path)
    assert str(caught.value).startswith(f"api_key_file: got {str(file)!r}, allowed: ")
    assert why in str(caught.value)
    assert "cret" not in str(caught.value)


@pytest.mark.parametrize(
    ("key", "shown"), [("se cret", r"\(not shown\)"), (" ", r"\(not"), ("", "'")]
)
@pytest.mark.parametrize("given", [{}, {"api_key": "another"}])
def test_a_key_in_the_environment_that_cannot_be_is_refused(
    tmp_path, monkeypatch, key, shown, given
):
    """An empty one is a secret that was not filled in: no server that serves everybody."""
    monkeypatch.setenv("SLIPSTREAM_API_KEY", key)
    with pytest.raises(BadRequestError, match=rf"\$SLIPSTREAM_API_KEY: got '{shown}"):
        plan_stack(settings_from({"http_port": 0, **given}), tmp_path)


@pytest.mark.parametrize("mode", [0o644, 0o640, 0o604, 0o666, 0o660])
@pytest.mark.parametrize("name", ["api_key_file", "ssl_keyfile", "ssl_certfile"])
def test_a_secret_that_others_can_read_is_refused(tmp_path, name, mode):
    """ssl_certfile holds the key where ssl_keyfile is not given."""
    certificate = Certificate(tmp_path)
    both = tmp_path / "both"
    both.write_bytes(certificate.key.read_bytes() + certificate.cert.read_bytes())
    keys = tmp_path / "keys"
    keys.write_text("secret\n")
    file = {"api_key_file": keys, "ssl_keyfile": certificate.key, "ssl_certfile": both}[name]
    given = {"http_port": 0, name: str(file)}
    if name == "ssl_keyfile":
        given["ssl_certfile"] = str(certificate.cert)
    file.chmod(0o600)
    plan_stack(settings_from(given), tmp_path)
    file.chmod(mode)
    with pytest.raises(BadRequestError, match=rf"^{name}: .*mode {mode:04o} of user .*0600"):
        plan_stack(settings_from(given), tmp_path)


@pytest.mark.parametrize(
    ("mode", "is_allowed"), [(0o440, True), (0o640, True), (0o444, False), (0o660, False)]
)
def test_a_secret_of_root_may_be_a_groups(tmp_path, monkeypatch, mode, is_allowed):
    monkeypatch.setattr(os, "getuid", lambda: 1000)
    status = os.stat_result((stat.S_IFREG | mode, 0, 0, 1, 0, 0, 0, 0, 0, 0))
    with contextlib.nullcontext() if is_allowed else pytest.raises(PermissionError):
        check_secret(tmp_path, status)


@pytest.mark.parametrize("level", ["loud", "7", "debug "])
def test_a_log_level_that_is_none_is_the_users_fault(tmp_path, monkeypatch, level):
    monkeypatch.setenv("SLIPSTREAM_LOG_LEVEL", level)
    with pytest.raises(BadRequestError) as caught:
        plan_stack(settings_from({}), tmp_path)
    assert str(caught.value) == (
        f"$SLIPSTREAM_LOG_LEVEL: got {level!r}, allowed: debug, info, warning, error, critical"
    )


@pytest.mark.parametrize("level", ["", "debug", "Warning", "CRITICAL"])
def test_log_levels(tmp_path, monkeypatch, level):
    monkeypatch.setenv("SLIPSTREAM_LOG_LEVEL", level)
    plan_stack(settings_from({}), tmp_path)


def test_compiled_tables_lie_in_the_users_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", f"{tmp_path}/somewhere")
    assert configs(tmp_path)[1].cache_dir == f"{tmp_path}/somewhere/slipstream"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", f"{tmp_path}/someone")
    assert configs(tmp_path)[1].cache_dir == f"{tmp_path}/someone/.cache/slipstream"


def test_compiled_tables_lie_beside_the_sockets_where_no_home_can_be_written(tmp_path, monkeypatch):
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setenv("HOME", "/dev/null")
    assert configs(tmp_path)[1].cache_dir == f"{tmp_path}/cache"
    monkeypatch.setenv("HOME", f"{tmp_path}/someone")
    monkeypatch.setattr("os.access", lambda *_: False)  # as on a file system that is read-only
    assert configs(tmp_path)[1].cache_dir == f"{tmp_path}/cache"


def test_a_user_without_a_home_has_a_cache(tmp_path, monkeypatch):
    def no_home() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr(Path, "home", no_home)
    assert configs(tmp_path)[1].cache_dir == f"{tmp_path}/cache"


@pytest.mark.parametrize(
    ("model", "tokenizer", "core_loads", "worker_loads"),
    [
        (None, None, DEMO, DEMO),
        (MODEL_NAME, None, DEMO, DEMO),
        (DEMO, "gpt2", DEMO, "gpt2"),
        ("gpt2", None, "gpt2", "gpt2"),
        ("Qwen/Qwen3-0.6B", None, "Qwen/Qwen3-0.6B", "Qwen/Qwen3-0.6B"),
        ("simulated", None, f"simulated:tokenizer={DEMO}", DEMO),
        ("simulated:", None, f"simulated:tokenizer={DEMO}", DEMO),
        ("simulated:step_ms=2", None, f"simulated:step_ms=2,tokenizer={DEMO}", DEMO),
        (f"simulated:tokenizer={DEMO},mode=chain", None, ..., DEMO),
        ("simulated:step_ms=2", DEMO, f"simulated:step_ms=2,tokenizer={DEMO}", DEMO),
        (f"simulated:tokenizer={DEMO}/tokenizer.json", None, ..., DEMO),
        ("random:qwen3-0.6b", DEMO, "random:qwen3-0.6b", DEMO),
    ],
)
def test_models(model, tokenizer, core_loads, worker_loads):
    found = model_and_tokenizer(model, tokenizer)
    assert found[1] == worker_loads
    if core_loads is not ...:
        assert found[0] == core_loads


@pytest.mark.parametrize(
    ("model", "tokenizer", "told"),
    [
        (None, None, None),
        (DEMO, DEMO, None),
        ("simulated:", DEMO, None),
        ("random:qwen3-0.6b", DEMO, DEMO),
    ],
)
def test_a_core_is_told_of_a_tokenizer_in_place_of_the_models(tmp_path, model, tokenizer, told):
    settings = settings_from({"model": model, "tokenizer": tokenizer})
    core = msgspec.json.decode(plan_stack(settings, tmp_path).children[0].config)
    assert core["tokenizer"] == told


def test_a_relative_folder_is_the_callers(tmp_path, monkeypatch):
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "config.json").touch()
    monkeypatch.chdir(tmp_path)
    assert model_and_tokenizer("mine", None) == (str(tmp_path / "mine"),) * 2


def test_played_answers_are_the_callers_file(tmp_path, monkeypatch):
    (tmp_path / "a.jsonl").write_text('{"text": "a"}')
    monkeypatch.chdir(tmp_path)
    expected = f"simulated:step_ms=2,answers={tmp_path}/a.jsonl,tokenizer={DEMO}"
    assert model_and_tokenizer("simulated:step_ms=2,answers=a.jsonl", None) == (expected, DEMO)
    with pytest.raises(BadRequestError, match=r"answers: got 'b\.jsonl', allowed: an existing"):
        model_and_tokenizer("simulated:answers=b.jsonl", None)


@pytest.mark.parametrize(
    "model", ["./nowhere", "/nowhere/at/all", "a/b/c", __file__, str(Path(__file__).parent), ""]
)
def test_a_model_that_cannot_be_is_refused_with_what_can(model):
    with pytest.raises(BadRequestError) as caught:
        model_and_tokenizer(model, None)
    assert str(caught.value).startswith("model: got ")
    assert "a hub id" in str(caught.value)
    assert "simulated:" in str(caught.value)


@pytest.mark.parametrize(
    ("model", "tokenizer"),
    [
        ("simulated:tokenizer=/nowhere", None),
        ("simulated", "/nowhere"),
        (f"simulated:tokenizer={DEMO}", DEMO),
        (None, "./nowhere"),
        ("random:qwen3-0.6b", None),
        ("random:qwen3-0.6b", "./nowhere"),
    ],
)
def test_a_tokenizer_that_cannot_be_is_refused(model, tokenizer):
    with pytest.raises(BadRequestError, match=r"tokenizer(: got | is missing)"):
        model_and_tokenizer(model, tokenizer)


def test_a_folder_without_a_model_is_told_what_it_lacks(tmp_path):
    with pytest.raises(BadRequestError, match=r"allowed: a folder with a config\.json"):
        model_and_tokenizer(str(tmp_path), None)


@pytest.mark.parametrize("option", ["tool_format", "reasoning_format"])
def test_a_format_that_there_is_not_is_refused_with_what_there_is(tmp_path, option):
    with pytest.raises(BadRequestError, match=rf"{option}: got 'xml', allowed: .*none") as caught:
        configs(tmp_path, **{option: "xml"})
    assert caught.value.field == option


def test_a_folder_too_deep_for_a_socket_is_refused():
    with pytest.raises(BadRequestError, match=r"runtime_dir: got .* allowed: a shorter"):
        plan_stack(StackSettings(), Path("/tmp") / ("x" * 120))


@pytest.mark.parametrize(
    ("given", "url"),
    [
        ("http://collector:4318", "http://collector:4318/v1/traces"),
        ("https://[::1]:4318/", "https://[::1]:4318/v1/traces"),
        ("https://collector/otlp/v1/traces", "https://collector/otlp/v1/traces"),
    ],
)
def test_where_traces_go(tmp_path: Path, given: str, url: str) -> None:
    _, worker = configs(tmp_path, otlp_traces_endpoint=given)
    assert worker.otlp_traces_endpoint == url
    assert front(tmp_path, http_port=0, otlp_traces_endpoint=given).is_traced
    assert not front(tmp_path, http_port=0).is_traced


@pytest.mark.parametrize(
    "given", ["collector:4318", "grpc://x", "http://", "http://x:99999", "http://u:secret@x:4318"]
)
def test_where_traces_cannot_go(tmp_path: Path, given: str) -> None:
    with pytest.raises(BadRequestError, match="otlp_traces_endpoint") as caught:
        configs(tmp_path, otlp_traces_endpoint=given)
    assert "secret" not in str(caught.value)


def test_traces_need_an_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("opentelemetry.sdk", "opentelemetry.sdk.trace"):  # also where a test imported it
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(BadRequestError, match=r"pip install 'slipstream\[otel\]'") as caught:
        configs(tmp_path, otlp_traces_endpoint="http://127.0.0.1:4318")
    assert caught.value.field == "otlp_traces_endpoint"
