"""A tokenizer that panics, which Python does not take for an `Exception`: one request is at fault.

The decoder is Strip at a token's end, which in tokenizers 0.23 panics on an empty token.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer
from transformers import PreTrainedTokenizerFast

from slipstream_ipc.columns import pack_u32
from slipstream_ipc.messages import Render
from slipstream_worker.detokenizer import compiler as compiling
from slipstream_worker.detokenizer.compiler import UnsupportedDecoder, compile_table
from slipstream_worker.detokenizer.panics import PanicError
from slipstream_worker.detokenizer.window import WindowDetokenizerFactory
from slipstream_worker.tokenizer.process import TokenizerConfig, prepare
from slipstream_worker.tokenizer.prompt_rendering import render

WORD, EMPTY = 0, 1


@pytest.fixture
def panicky() -> Tokenizer:
    strip = {"type": "Strip", "content": " ", "start": 0, "stop": 1}
    model = {"type": "WordLevel", "vocab": {"word": WORD, "": EMPTY}, "unk_token": "word"}
    return Tokenizer.from_str(json.dumps({"version": "1.0", "decoder": strip, "model": model}))


def test_it_does_panic(panicky):
    with pytest.raises(BaseException, match="index out of bounds") as caught:
        panicky.decode([EMPTY])
    assert not isinstance(caught.value, Exception)


def test_a_stream_fails_with_an_error(panicky):
    stream = WindowDetokenizerFactory(panicky.to_str().encode()).create([WORD], False)
    assert stream.step(WORD) == "word"
    with pytest.raises(PanicError, match="index out of bounds"):
        stream.step(EMPTY)


def test_a_question_is_answered_with_the_fault(panicky):
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=panicky)
    answer = render(tokenizer, Render(1, token_ids=pack_u32([EMPTY])))
    assert answer.fault is not None
    assert answer.fault.field == "token_ids"
    assert render(tokenizer, Render(2, token_ids=pack_u32([WORD]))).text == "word"


def test_it_has_no_table(panicky, monkeypatch):
    """Where the steps look as if they could be compiled, it is asked, and panics."""

    def ask(tokenizer: Tokenizer, _table: object) -> None:
        tokenizer.decode([EMPTY])

    monkeypatch.setattr(compiling, "_compile", lambda *_: None)
    monkeypatch.setattr(compiling, "find_mismatch", ask)
    with pytest.raises(UnsupportedDecoder, match="panics"):
        compile_table(panicky)


@pytest.mark.parametrize(
    ("tokenizer_json", "why"),
    [
        (None, "tokenizer.json"),
        ("", "tokenizer.json is empty"),
        ('{"version": "1.0", "model": {"type": "Nope"}}', "KeyError: 'added_tokens'"),
    ],
)
def test_a_tokenizer_that_cannot_be_loaded_is_told_with_what_is_needed(
    tmp_path: Path, tokenizer_json: str | None, why: str
) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    if tokenizer_json is not None:
        (tmp_path / "tokenizer.json").write_text(tokenizer_json)
    config = TokenizerConfig(tokenizer=str(tmp_path), address="", cache_dir=str(tmp_path))
    tokenizer, ready = prepare(config)
    assert tokenizer is None
    assert why in ready.error
    assert "a valid tokenizer.json" in ready.error


def test_a_cache_that_cannot_be_written_is_no_fault_of_the_tokenizer(
    tmp_path: Path, demo_folder: Any
) -> None:
    (tmp_path / "file").touch()
    config = TokenizerConfig(tokenizer=demo_folder, address="", cache_dir=f"{tmp_path}/file/cache")
    error = prepare(config)[1].error
    assert "cannot write the cache folder" in error
    assert "XDG_CACHE_HOME" in error


@pytest.fixture
def demo_folder() -> str:
    from slipstream.demo_model import MODEL_PATH

    return str(MODEL_PATH)
