from __future__ import annotations

import json
import struct
from pathlib import Path

import pytest

from slipstream_core.config import CoreConfig
from slipstream_core.model.fingerprint import fingerprint_of
from slipstream_core.step.plan import ModelInfo

INFO = ModelInfo("m", 100, 512, (1,), 1024, 16)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "tokenizer.json").write_text('{"model": {}}')
    (tmp_path / "chat_template.jinja").write_text("{{ messages }}")
    header = json.dumps({"w": {"dtype": "F32", "shape": [4096], "data_offsets": [0, 16384]}})
    weights = struct.pack("<Q", len(header)) + header.encode() + bytes(16384)
    (tmp_path / "model.safetensors").write_bytes(weights)
    return tmp_path


def of(model: str, **settings: object) -> bytes:
    return fingerprint_of(CoreConfig(model=model, address="ipc:///a", **settings), INFO)  # type: ignore[arg-type]


def test_it_is_of_the_files_and_not_of_their_place(folder: Path, tmp_path_factory) -> None:
    other = tmp_path_factory.mktemp("other")
    for path in folder.iterdir():
        (other / path.name).write_bytes(path.read_bytes())
    assert len(of(str(folder))) == 16
    assert of(str(folder)) == of(str(other))


@pytest.mark.parametrize(
    "name", ["config.json", "tokenizer.json", "chat_template.jinja", "model.safetensors"]
)
def test_every_file_counts(folder: Path, name: str) -> None:
    before = of(str(folder))
    path = folder / name
    path.write_bytes(path.read_bytes()[:-2] + b"12")
    assert of(str(folder)) != before


def test_weights_count_by_their_header_size_and_samples(folder: Path) -> None:
    before = of(str(folder))
    path = folder / "model.safetensors"
    whole = path.read_bytes()
    for changed in (whole + b"0", whole.replace(b"F32", b"I32"), whole[:-1024] + b"1" * 1024):
        path.write_bytes(changed)
        assert of(str(folder)) != before


def test_a_large_vocabulary_counts_by_its_beginning_size_and_samples(folder: Path) -> None:
    path = folder / "tokenizer.json"
    whole = bytes(3 * 2**20)
    path.write_bytes(whole)
    before = of(str(folder))
    for changed in (b"1" + whole[1:], whole + b"0", whole[:-1] + b"1"):
        path.write_bytes(changed)
        assert of(str(folder)) != before


def test_dtype_counts(folder: Path) -> None:
    assert of(str(folder)) != of(str(folder), dtype="bfloat16")


def test_a_tokenizer_in_place_of_the_models_counts(folder: Path, tmp_path_factory) -> None:
    other = tmp_path_factory.mktemp("other")
    (other / "tokenizer.json").write_text("{}")
    found = of(str(folder)), of(str(folder), tokenizer=str(other))
    (other / "tokenizer.json").write_text("[]")
    assert len({*found, of(str(folder), tokenizer=str(other))}) == 3


def test_the_speed_of_a_simulated_model_does_not_count() -> None:
    assert of("simulated:step_ms=1") == of("simulated:step_ms=2,prefill_us=0")
    assert of("simulated:mode=chain") != of("simulated:")


def test_random_weights_are_told_by_their_name() -> None:
    assert of("random:/a") == of("random:/a") != of("random:/b")


def test_a_model_that_cannot_be_read_has_none() -> None:
    assert of("simulated:tokenizer=/nowhere") == b""


def test_a_huge_header_is_not_read_whole(folder: Path) -> None:
    (folder / "model.safetensors").write_bytes(b"\xff" * 64)
    assert len(of(str(folder))) == 16
