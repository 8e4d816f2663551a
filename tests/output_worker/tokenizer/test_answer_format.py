"""The format of answers that a tokenizer process reports, and the worker's card."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest
from tests.helpers.chat_templates import ALWAYS_REASONS, HYBRID, tokenizer_with

from slipstream_ipc.messages import TokenizerReady
from slipstream_worker.tokenizer.process import TokenizerConfig, chat_traits, prepare


class Prepared:
    """What a tokenizer process says of one folder, with options."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def __call__(self, template: str | None, **options: str) -> TokenizerReady:
        tokenizer = tokenizer_with(template)
        tokenizer.save_pretrained(str(self.folder))
        config = TokenizerConfig(
            tokenizer=str(self.folder), address="", cache_dir=str(self.folder / "cache"), **options
        )
        loaded, ready = prepare(config)
        if not ready.error:
            assert ready.delimiter_ids.items() <= tokenizer.get_added_vocab().items()
            traits = chat_traits(loaded, ready)
            assert (traits.format is None) == (not ready.answer_format)
            if traits.format is not None:
                assert traits.format.format.name == ready.answer_format
        return ready


def test_a_template_in_place_of_the_tokenizers(tmp_path: Path) -> None:
    tokenizer_with(HYBRID).save_pretrained(str(tmp_path))
    config = TokenizerConfig(
        tokenizer=str(tmp_path), address="", cache_dir=str(tmp_path), chat_template=ALWAYS_REASONS
    )
    tokenizer, ready = prepare(config)
    assert tokenizer.chat_template == ALWAYS_REASONS
    assert ready.answer_format == "qwen3+none"


def test_a_pointer_in_place_of_a_tokenizer_is_named(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text("version https://git-lfs.github.com/spec/v1\n")
    config = TokenizerConfig(tokenizer=str(tmp_path), address="", cache_dir=str(tmp_path))
    tokenizer, ready = prepare(config)
    assert tokenizer is None
    assert "tokenizer.json is a pointer of Git LFS" in ready.error


@pytest.fixture
def prepared(tmp_path: Path) -> Prepared:
    return Prepared(tmp_path)


@pytest.mark.parametrize(
    ("template", "options", "name"),
    [
        (HYBRID, {}, "qwen3+hermes"),
        (ALWAYS_REASONS, {}, "qwen3+none"),
        (HYBRID, {"tool_format": "none"}, "qwen3+none"),
        (HYBRID, {"tool_format": "none", "reasoning_format": "none"}, ""),
        (ALWAYS_REASONS, {"tool_format": "hermes"}, "qwen3+hermes"),
        (None, {}, ""),
        (None, {"reasoning_format": "qwen3"}, "qwen3+none"),
    ],
)
def test_a_process_says_the_format(prepared, template, options, name):
    ready = prepared(template, **options)
    assert not ready.error
    assert ready.answer_format == name
    literals = {"<think>", "</think>", "<tool_call>", "</tool_call>"}
    assert literals <= ready.delimiter_ids.keys()
    assert "<|im_start|>" not in ready.delimiter_ids


def test_a_name_that_the_table_does_not_have_is_an_error(prepared):
    ready = prepared(HYBRID, tool_format="nonsense")
    assert ready.error.startswith("tool_format: got 'nonsense', allowed: ")


def test_a_format_that_is_not_known_is_logged_once(prepared, caplog):
    caplog.set_level(logging.INFO)
    prepared(HYBRID)
    prepared(None)
    assert not caplog.records
    prepared("{{ tools }}")
    (record,) = caplog.records
    assert record.getMessage().startswith("answers are not taken apart: its chat template and")
    assert "--tool-format" in record.getMessage()


def test_an_ambiguous_template_is_logged_once(prepared, caplog, monkeypatch):
    from slipstream_ipc.formats import choose
    from slipstream_ipc.formats.answer_format import Delimiter, ReasoningFormat, Signature

    other = ReasoningFormat(
        "other", (Delimiter("<a>"),), (Delimiter("</a>"),), signatures=(Signature(("<think>",)),)
    )
    monkeypatch.setattr(choose, "REASONING", {**choose.REASONING, "other": other})
    assert prepared(HYBRID).answer_format == "none+hermes"
    (record,) = caplog.records
    assert record.levelno == logging.WARNING
    assert "fit several formats: qwen3, other" in record.getMessage()
