"""A stack serves a GGUF file as it serves the folder that the file was made of."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import ClassVar
from urllib.parse import unquote, urlsplit

import msgspec
import pytest
from tests.helpers.gguf_models import demo_gguf, make_model, write_gguf

from slipstream import LLM, BadRequestError, SamplingParams
from slipstream.cli.main import main
from slipstream.stack.plan.process_plan import plan_stack
from slipstream.stack.settings import settings_from


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A user's cache of the test's own."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "slipstream" / "gguf"


def answers(model: str | None) -> list[object]:
    params = SamplingParams(max_tokens=24, temperature=0.0)
    with LLM(model, dtype="float32", spare_core=False, spare_worker=False) as llm:
        plain = llm.generate(["Once upon a time", "The  cafe\u0301 \u4f60"], params)
        chat = llm.chat([{"role": "user", "content": "Tell me a story."}], params)
    return [
        (each.prompt_token_ids, each.outputs[0].token_ids, each.outputs[0].text)
        for each in (*plain, *chat)
    ]


def test_texts_are_those_of_the_folder(cache: Path, tmp_path: Path) -> None:
    file = demo_gguf(tmp_path / "demo.BF16.gguf")
    assert answers(str(file)) == answers(None)
    [folder] = cache.iterdir()
    assert folder.stat().st_mode & 0o777 == 0o700
    assert os.readlink(folder / "weights-00001.gguf") == str(file)


def test_formats_describes_a_file(
    cache: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["formats"]) == 0
    table = capsys.readouterr().out
    assert main(["formats", str(demo_gguf(tmp_path / "demo.gguf"))]) == 0
    described = capsys.readouterr().out
    assert described
    assert described != table


def test_a_file_that_is_not_understood_is_refused_before_a_process_starts(
    cache: Path, tmp_path: Path
) -> None:
    file = tmp_path / "x.gguf"
    file.write_bytes(b"GGUF" + bytes(40))
    with pytest.raises(BadRequestError) as refused:
        plan_stack(settings_from({"model": str(file)}), tmp_path)
    assert "x.gguf is a GGUF file of version 0; served are versions 2 and 3" in str(refused.value)
    with pytest.raises(BadRequestError, match=r"hf_config_path: got 'x', allowed: None with"):
        plan_stack(settings_from({"hf_config_path": "x"}), tmp_path)


@pytest.mark.parametrize("given", ["safetensors", "hf"])
def test_a_load_format_that_a_gguf_file_is_not_in_is_refused(
    given: str, cache: Path, tmp_path: Path
) -> None:
    file = demo_gguf(tmp_path / "demo.gguf")
    settings = settings_from({"model": str(file), "load_format": given})
    with pytest.raises(BadRequestError) as refused:
        plan_stack(settings, tmp_path)
    said = f"load_format: got '{given}', allowed: auto or gguf, as {file} has its weights in a GGUF"
    assert str(refused.value).startswith(said)
    plan_stack(settings_from({"model": str(file), "load_format": "gguf"}), tmp_path)


def test_a_load_format_that_a_folder_is_not_in_is_refused(tmp_path: Path) -> None:
    with pytest.raises(BadRequestError) as refused:
        plan_stack(settings_from({"load_format": "gguf"}), tmp_path)
    said = "load_format: got 'gguf', allowed: auto, hf or safetensors, as "
    assert str(refused.value).startswith(said)
    assert "has no GGUF file" in str(refused.value)
    plan_stack(settings_from({"load_format": "safetensors"}), tmp_path)


def test_a_cache_that_cannot_be_written_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "blocked").touch()
    file = write_gguf(tmp_path / "tiny.gguf", "llama", make_model("llama"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "blocked"))
    with pytest.raises(BadRequestError) as refused:
        folder_of(str(file), tmp_path)
    said = str(refused.value)
    assert f"its folder cannot be made in {tmp_path}/blocked/slipstream/gguf: Not a dir" in said
    assert "set XDG_CACHE_HOME" in said


def test_a_relative_cache_is_left_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("XDG_CACHE_HOME", "somewhere")  # which the specification rules out
    file = write_gguf(tmp_path / "tiny.gguf", "llama", make_model("llama"))
    assert folder_of(str(file), tmp_path).parent == tmp_path / ".cache" / "slipstream" / "gguf"


def test_a_projector_beside_the_model_is_no_model(cache: Path, tmp_path: Path) -> None:
    downloads = tmp_path / "downloads"
    downloads.mkdir()
    write_gguf(downloads / "Tiny.Q8_0.GGUF", "llama", make_model("llama"), "Q8_0")
    for name in ("mmproj-F16.gguf", "Tiny.mmproj-Q8_0.gguf"):
        (downloads / name).touch()
    weights = folder_of(str(downloads), tmp_path) / "weights-00001.gguf"
    assert os.readlink(weights) == str(downloads / "Tiny.Q8_0.GGUF")


class Hub(BaseHTTPRequestHandler):
    """A hub with one repository of GGUF files."""

    files: ClassVar[dict[str, bytes]] = {}

    def do_GET(self) -> None:
        self._answer(with_content=True)

    def do_HEAD(self) -> None:
        self._answer(with_content=False)

    def _answer(self, *, with_content: bool) -> None:
        path = unquote(urlsplit(self.path).path)
        name = path.partition("/resolve/main/")[2]
        if name in self.files:
            content = self.files[name]
        elif path == "/api/models/org/tiny-GGUF/tree/main":
            told = [
                {"type": "file", "path": each, "size": len(content), "oid": "0" * 40}
                for each, content in self.files.items()
            ]
            content = json.dumps(told).encode()
        else:
            self.send_error(404)
            return
        self.send_response(200)
        self.send_header("Content-Length", str(len(content)))
        self.send_header("ETag", f'"{hash(content):x}"')
        self.send_header("X-Repo-Commit", "0" * 40)
        self.end_headers()
        if with_content:
            self.wfile.write(content)

    def log_message(self, *_: object) -> None:
        """Nothing is written."""


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    model = make_model("llama")
    parts = tmp_path / "parts"
    parts.mkdir()
    write_gguf(parts / "tiny-Q8_0.gguf", "llama", model, "Q8_0", split_max_tensors=9)
    Hub.files = {f"Q8_0/{each.name}": each.read_bytes() for each in parts.iterdir()}
    for kind in ("Q4_0", "UD-Q4_0"):
        whole = write_gguf(tmp_path / f"tiny-{kind}.gguf", "llama", model, "Q4_0")
        Hub.files[whole.name] = whole.read_bytes()
    Hub.files["mmproj-tiny-Q4_0.gguf"] = b""
    server = ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    Thread(target=server.serve_forever, daemon=True).start()
    address = f"http://127.0.0.1:{server.server_port}"
    monkeypatch.setenv("HF_ENDPOINT", address)
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setenv("HF_HUB_OFFLINE", "0")
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", address)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    for name in ("http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY"):
        monkeypatch.delenv(name, raising=False)
    yield
    server.shutdown()
    server.server_close()


def folder_of(model: str, tmp_path: Path) -> Path:
    config = plan_stack(settings_from({"model": model}), tmp_path)
    [core] = [child for child in config.children if child.name == "core"]
    return Path(msgspec.json.decode(core.config)["model"])


def test_a_type_of_a_hubs_repository_is_downloaded(
    hub: None, cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = folder_of("org/tiny-GGUF:q4_0", tmp_path)
    assert folder.parent == cache
    assert (folder / "weights-00001.gguf").resolve().read_bytes() == Hub.files["tiny-Q4_0.gguf"]
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    assert folder_of("org/tiny-GGUF:Q4_0", tmp_path) == folder


def test_all_parts_of_a_split_file_are_downloaded(hub: None, cache: Path, tmp_path: Path) -> None:
    folder = folder_of("org/tiny-GGUF:Q8_0", tmp_path)
    parts = [each.resolve().read_bytes() for each in sorted(folder.glob("weights-*.gguf"))]
    assert parts == [Hub.files[name] for name in sorted(Hub.files) if "Q8_0/" in name]
    assert len(parts) > 1


def test_a_type_that_a_repository_has_not_is_refused_with_those_it_has(
    hub: None, cache: Path, tmp_path: Path
) -> None:
    with pytest.raises(BadRequestError, match=r"of type 'Q6_K'; it has Q4_0, Q8_0, UD-Q4_0"):
        folder_of("org/tiny-GGUF:Q6_K", tmp_path)
