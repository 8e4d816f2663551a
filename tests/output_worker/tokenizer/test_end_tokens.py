"""Which tokens end an answer, as a tokenizer, its files and its template name them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tests.helpers.chat_templates import CHANNELS, ENDS_CHATS, HYBRID, SHORT_IDS, tokenizer_with
from transformers import AutoTokenizer

from slipstream_worker.tokenizer.end_tokens import end_token_ids
from slipstream_worker.tokenizer.template_dialect import TemplateDialect, find_dialect


def texts(tokenizer: Any, *delimiters: str) -> list[str]:
    found = end_token_ids(tokenizer, find_dialect(tokenizer), delimiters)
    return [str(tokenizer.convert_ids_to_tokens(each)) for each in found]


def with_tokens(template: str | None, *added: str, eos: str | None = None) -> Any:
    tokenizer = tokenizer_with(template)
    tokenizer.add_special_tokens({"extra_special_tokens": list(added)})
    tokenizer.eos_token, tokenizer.name_or_path = eos, ""  # else the demo model's files count
    return tokenizer


@pytest.mark.parametrize(
    ("template", "ends"),
    [
        (None, []),
        (HYBRID, ["<|im_end|>"]),
        (ENDS_CHATS, ["<|end|>", "<|endoftext|>"]),
        (SHORT_IDS, []),  # nothing is behind a turn
        ("{{ raise_exception('no') }}", []),
        ("{% for m in messages %}{{ m.content }}<|unknown|>{% endfor %}", []),
        ("{% for m in messages %}{{ m.content }} <|end|>\n{% endfor %}<|im_start|>", ["<|end|>"]),
    ],
)
def test_what_a_template_writes_behind_a_turn(template: str | None, ends: list[str]) -> None:
    if template is not None and template.endswith("<|im_start|>"):
        ends = [*ends, "<|im_start|>"]  # a token behind the last turn is one that ends chats
    tokenizer = with_tokens(template, "<|im_start|>", "<|im_end|>", "<|end|>", "<|endoftext|>")
    assert texts(tokenizer) == ends


def test_a_delimiter_of_the_answers_format_is_no_end() -> None:
    tokenizer = with_tokens(ENDS_CHATS, "<|end|>", "<|endoftext|>")
    assert texts(tokenizer, "<|end|>") == ["<|endoftext|>"]
    named = with_tokens(None, "<|end|>", "<|endoftext|>", eos="<|end|>")
    assert texts(named, "<|end|>") == []
    assert "<|end|>" in CHANNELS  # which is between messages of one answer


def test_a_token_that_nobody_names_is_no_end() -> None:
    tokenizer = with_tokens(None, "<|im_end|>", "<|eot_id|>", "<|endoftext|>", eos="<|im_end|>")
    assert texts(tokenizer) == ["<|im_end|>"]


def test_files_that_name_other_tokens(tmp_path: Path) -> None:
    saved = with_tokens(None, "<|im_end|>", "<|eot_id|>", "<|end|>", "<|eom|>", eos="<|im_end|>")
    saved.save_pretrained(str(tmp_path))
    file = tmp_path / "tokenizer_config.json"
    told = json.loads(file.read_text())
    told["extra_special_tokens"] = {"eot_token": "<|eot_id|>", "image_token": "<|eom|>"}
    file.write_text(json.dumps(told))
    more = {"eos_token": {"content": "<|end|>"}, "pad_token": "<|eom|>", "eot_token": "unheard of"}
    (tmp_path / "special_tokens_map.json").write_text(json.dumps(more))
    tokenizer = AutoTokenizer.from_pretrained(str(tmp_path))
    found = end_token_ids(tokenizer, TemplateDialect())
    assert set(tokenizer.convert_ids_to_tokens(found)) == {"<|im_end|>", "<|eot_id|>", "<|end|>"}
    (tmp_path / "special_tokens_map.json").write_text("[")
    assert tokenizer.convert_tokens_to_ids("<|eot_id|>") in end_token_ids(
        tokenizer, TemplateDialect()
    )
