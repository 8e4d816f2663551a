"""`slipstream formats`: the table, and which of its entries a model has."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.helpers.chat_templates import ALWAYS_REASONS, HYBRID, tokenizer_with

from slipstream.cli.main import main
from slipstream_ipc.formats.table import CALLS, REASONING, WHOLE


@pytest.fixture(scope="module")
def hybrid(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("hybrid")
    tokenizer_with(HYBRID).save_pretrained(str(folder))
    return folder


def shown(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    assert main(["formats", *words]) == 0
    said = capsys.readouterr()
    assert not said.err
    return said.out


def test_the_table_is_listed(capsys):
    lines = shown(capsys).splitlines()
    names = {line.split()[0] for line in lines if line.startswith("  ")}
    assert names == {*CALLS, *REASONING, *WHOLE}
    assert all(line.isprintable() and len(line) <= 160 for line in lines)


def test_a_model_has_a_format_for_a_reason(capsys, hybrid):
    first, second = shown(capsys, "--tokenizer", str(hybrid)).splitlines()
    assert first.startswith("reasoning:  qwen3 (its chat template has '<think>'")
    assert second.startswith("tool calls: hermes (its chat template has '<tool_call>'")


def test_the_bundled_model_has_none(capsys):
    lines = shown(capsys, "slipstream-demo").splitlines()
    why = "its chat template and its tokens are those of no known format"
    assert lines == [f"reasoning:  none ({why})", f"tool calls: none ({why})"]


def test_reasoning_alone(capsys, tmp_path):
    tokenizer_with(ALWAYS_REASONS).save_pretrained(str(tmp_path))
    first, second = shown(capsys, "--tokenizer", str(tmp_path)).splitlines()
    assert first.startswith("reasoning:  qwen3 (")
    assert second.startswith("tool calls: none (")


@pytest.mark.parametrize("words", [["/nowhere"], ["--tokenizer", "/nowhere"], ["random:x"]])
def test_what_is_no_model_is_refused(capsys, words):
    assert main(["formats", *words]) == 2
    assert capsys.readouterr().err.startswith("slipstream formats: ")


def test_a_folder_without_a_tokenizer_is_refused(capsys, tmp_path):
    assert main(["formats", "--tokenizer", str(tmp_path)]) == 2
    assert "a model whose tokenizer can be loaded" in capsys.readouterr().err
