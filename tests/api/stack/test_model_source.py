"""What a user may name as a model, and what is said at once about what cannot be had."""

from __future__ import annotations

import socket
from pathlib import Path

import msgspec
import pytest

from slipstream import BadRequestError
from slipstream.stack.plan.models.model_source import check_hub, folder_or_hub_id, is_gguf
from slipstream.stack.plan.process_plan import plan_stack
from slipstream.stack.settings import settings_from
from slipstream_ipc.hub_id import split_revision


@pytest.fixture
def hub(tmp_path, monkeypatch):
    """A hub where nothing listens, and an empty cache: (its port, the cache)."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", f"http://127.0.0.1:{port}")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    for name in ("http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY"):
        monkeypatch.delenv(name, raising=False)
    return port, tmp_path / "hub"


def refusal(option: str, value: str) -> str:
    with pytest.raises(BadRequestError) as caught:
        folder_or_hub_id(option, value)
    assert caught.value.field == option
    return str(caught.value)


def test_gguf_files_and_folders_with_one_are_models(tmp_path):
    file, folder = tmp_path / "llama-7b.Q4_K_M.gguf", tmp_path / "folder"
    folder.mkdir()
    for path in (file, folder / "x.gguf"):
        path.touch()
    for given in (file, folder):
        assert is_gguf(folder_or_hub_id("model", str(given)))
    assert is_gguf(folder_or_hub_id("model", "org/name-GGUF:Q4_K_M"))
    assert not is_gguf(folder_or_hub_id("model", "org/name"))
    (folder / "config.json").touch()  # as repositories of GGUF files often have
    assert is_gguf(folder_or_hub_id("model", str(folder)))
    (folder / "model.safetensors").touch()
    assert not is_gguf(folder_or_hub_id("model", str(folder)))


def test_an_unfolded_gguf_file_is_a_checkpoint(tmp_path):
    (tmp_path / "config.json").touch()
    (tmp_path / "weights-00001.gguf").symlink_to(tmp_path / "x.gguf")
    assert not is_gguf(folder_or_hub_id("model", str(tmp_path)))


def test_a_gguf_repository_needs_a_type(tmp_path):
    assert "TheBloke/Llama-GGUF:Q4_K_M" in refusal("model", "TheBloke/Llama-GGUF")
    assert "a file of the suffix .gguf" in refusal("model", str(tmp_path / "nowhere.gguf"))
    assert "no hub id" not in refusal("tokenizer", str(tmp_path / "nowhere.gguf"))


def test_a_missing_gguf_file_is_no_hub_id(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "models").mkdir()
    (tmp_path / "models" / "tiny.Q8_0.gguf").touch()
    said = refusal("model", "models/tiny.Q4_0.gguf")
    assert "there is no file models/tiny.Q4_0.gguf" in said
    assert "did you mean models/tiny.Q8_0.gguf" in said
    (tmp_path / "models" / "tiny.gguf").symlink_to("blobs/0123")
    assert "models/tiny.gguf is a link to blobs/0123, which does not exist" in refusal(
        "model", "models/tiny.gguf"
    )
    assert "there is no file tiny.gguf" in refusal("model", "tiny.gguf")


def test_an_adapter_is_no_model(tmp_path):
    (tmp_path / "adapter_config.json").touch()
    said = refusal("model", str(tmp_path))
    assert said.endswith(
        "has no config.json, but an adapter: give its base model, and it in lora_modules with "
        "enable_lora"
    )


def test_a_typo_in_a_path_gets_the_nearest_name(tmp_path, monkeypatch):
    (tmp_path / "qwen3").mkdir()
    (tmp_path / "qwen3" / "config.json").touch()
    said = refusal("model", str(tmp_path / "qwne3"))
    assert said.endswith(f"; did you mean {tmp_path}/qwen3?")
    assert refusal("tokenizer", str(tmp_path / "qwne3")).endswith("qwen3?")
    said = refusal("model", str(tmp_path / "nowhere" / "qwen3"))
    assert said.endswith(f"; there is no folder {tmp_path}/nowhere")
    monkeypatch.chdir(tmp_path)
    assert refusal("model", "./qwne3").endswith("; did you mean qwen3?")
    assert folder_or_hub_id("model", "qwen3") == str(tmp_path / "qwen3")


def test_a_hub_that_is_not_reached_is_said_without_starting_a_process(tmp_path, hub):
    port, cache = hub
    settings = settings_from({"model": "Qwen/Qwen3-0.6B"})
    with pytest.raises(BadRequestError) as caught:
        plan_stack(settings, tmp_path)
    said = str(caught.value)
    assert said.startswith("model: got 'Qwen/Qwen3-0.6B', allowed: a folder, or a hub id that can")
    assert f"http://127.0.0.1:{port} cannot be reached (Connection refused)" in said
    assert f"{cache} has no earlier download" in said
    assert "hf download Qwen/Qwen3-0.6B" in said
    settings = settings_from({"tokenizer": "gpt2"})
    with pytest.raises(BadRequestError, match="tokenizer: got 'gpt2', allowed: a folder, or a hub"):
        plan_stack(settings, tmp_path)


def test_a_hub_that_does_not_answer_is_asked_once_and_by_no_process(hub, tmp_path):
    _port, cache = hub
    (cache / "models--org--name" / "snapshots" / "abc").mkdir(parents=True)
    (cache / "models--org--name" / "snapshots" / "abc" / "config.json").write_text("{}")
    settings = settings_from({"model": "org/name"})
    config = plan_stack(settings, tmp_path)
    assert config.environment == {"HF_HUB_OFFLINE": "1"}


def test_a_folder_for_downloads_and_a_revision(hub, tmp_path):
    kept = tmp_path / "kept"
    (kept / "models--org--name" / "snapshots" / "abc").mkdir(parents=True)
    (kept / "models--org--name" / "snapshots" / "abc" / "config.json").write_text("{}")
    options = {"model": "org/name", "download_dir": str(kept), "revision": "v1.0"}
    config = plan_stack(settings_from(options), tmp_path)
    assert config.environment == {"HF_HUB_CACHE": str(kept), "HF_HUB_OFFLINE": "1"}
    told = [msgspec.json.decode(child.config) for child in config.children]
    assert [each.get("model", each.get("tokenizer")) for each in told] == ["org/name@v1.0"] * 2
    assert split_revision("org/name@v1.0") == ("org/name", "v1.0")


@pytest.mark.parametrize(
    ("model", "revision"), [(None, "v1"), ("org/name", "a b"), ("org/name", "")]
)
def test_a_revision_that_is_none(hub, tmp_path, model, revision):
    with pytest.raises(BadRequestError, match="revision: got"):
        plan_stack(settings_from({"model": model, "revision": revision}), tmp_path)


def test_a_path_that_looks_like_a_hub_id_gets_the_nearest_name_too(tmp_path, hub, monkeypatch):
    (tmp_path / "models" / "qwen3").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(BadRequestError, match=r"did you mean models/qwen3\?$"):
        check_hub("model", folder_or_hub_id("model", "models/qwne3"))


def test_a_hub_that_answers_an_earlier_download_and_a_proxy_pass(hub, monkeypatch):
    port, cache = hub
    with socket.create_server(("127.0.0.1", port)):
        check_hub("model", "gpt2")
    with pytest.raises(BadRequestError):
        check_hub("model", "gpt2")
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:1")
    check_hub("model", "gpt2")
    monkeypatch.delenv("http_proxy")
    made: Path = cache / "models--gpt2" / "snapshots" / "abc"
    made.mkdir(parents=True)
    with pytest.raises(BadRequestError):
        check_hub("model", "gpt2")
    (made / "config.json").touch()
    check_hub("model", "gpt2")


def test_a_hub_that_must_not_be_asked(hub, monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(BadRequestError, match="HF_HUB_OFFLINE is set, and"):
        check_hub("model", "gpt2")


def test_a_folder_without_a_configuration_is_told_what_it_lacks(tmp_path: Path) -> None:
    with pytest.raises(BadRequestError) as caught:
        folder_or_hub_id("model", str(tmp_path))
    assert str(caught.value).endswith(f"; {tmp_path} has no config.json")
