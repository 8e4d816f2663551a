"""Tokenizers without a tokenizer.json: those that transformers runs in Python, and those it reads
from other files."""

from __future__ import annotations

import base64
import json
from collections.abc import Sequence
from os.path import commonprefix
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import zmq
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.helpers.patience import PATIENCE_S

from slipstream_ipc.columns import u32
from slipstream_ipc.messages import Render, Rendered, TokenizerReady
from slipstream_worker.detokenizer.compiler import UnsupportedDecoder
from slipstream_worker.detokenizer.factory import TableDetokenizerFactory
from slipstream_worker.detokenizer.slow_compiler import compile_slow, slow_pieces
from slipstream_worker.detokenizer.table import load_table
from slipstream_worker.tokenizer.client import TokenizerClient
from slipstream_worker.tokenizer.process import TokenizerConfig, prepare

TEXT = "héllo naïve 日本 😀 said"


class BytesTokenizer:
    """As code in a model's folder wraps tiktoken: its tokens are bytes."""

    is_fast = False
    all_special_ids = (5,)

    def __init__(self, errors: str = "replace") -> None:
        self.added_tokens_decoder = {5: "<|end|>"}
        self._tokens = [b"a", b" th", "é".encode()[:1], b"\xa9!", "日".encode()]
        self._errors = errors

    def __len__(self) -> int:
        return 6

    def convert_ids_to_tokens(self, token_id: int) -> bytes:
        return self._tokens[token_id]

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool, **_: Any) -> str:
        if self._errors == "raise":
            raise ValueError("not these")
        shown = [i for i in ids if i != 5 or not skip_special_tokens]
        data = b"".join([b"<|end|>" if i == 5 else self._tokens[i] for i in shown])
        text = data.decode("utf-8", "replace" if self._errors == "upper" else self._errors)
        return text.upper() if self._errors == "upper" else text


@pytest.fixture(scope="module")
def byt5(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from transformers import ByT5Tokenizer

    path = tmp_path_factory.mktemp("byt5")
    ByT5Tokenizer().save_pretrained(str(path))
    return path


@pytest.fixture(scope="module")
def prepared(byt5: Path, tmp_path_factory: pytest.TempPathFactory) -> SimpleNamespace:
    cache = tmp_path_factory.mktemp("cache")
    tokenizer, ready = prepare(
        TokenizerConfig(tokenizer=str(byt5), address="", cache_dir=str(cache))
    )
    assert not ready.error
    assert not tokenizer.is_fast
    table = load_table(Path(ready.table_path))
    return SimpleNamespace(tokenizer=tokenizer, table=table, factory=TableDetokenizerFactory(table))


def continuation(tokenizer: Any, prompt: list[int], output: list[int], *, skip: bool) -> str:
    options = {"skip_special_tokens": skip, "clean_up_tokenization_spaces": False}
    before, whole = (
        tokenizer.decode(prompt, **options),
        tokenizer.decode(prompt + output, **options),
    )
    return whole[len(commonprefix((before, whole))) :]  # noqa: RUF071 - characters are meant


@settings(max_examples=300, deadline=None)
@given(data=st.data(), skip=st.booleans())
def test_byt5_reads_as_transformers_decodes_it(
    prepared: SimpleNamespace, data: st.DataObject, skip: bool
) -> None:
    """It leaves bytes out that belong to no character; every prefix of the text is the text's."""
    any_id = st.integers(0, len(prepared.tokenizer) - 1) | st.sampled_from(
        [byte + 3 for byte in "é日😀\ufffd".encode()]
    )
    ids = st.lists(any_id, max_size=20) | st.text("é日😀\ufffda", max_size=6).map(
        lambda text: [byte + 3 for byte in text.encode()]
    )
    prompt, output = data.draw(ids), data.draw(ids)
    detokenizer = prepared.factory.create(prompt, skip)
    text = ""
    for count, token_id in enumerate(output, 1):
        text += detokenizer.step(token_id)
        assert text == continuation(prepared.tokenizer, prompt, output[:count], skip=skip)
    assert detokenizer.flush() == ""


def test_byt5_is_served_by_the_prompt_process(byt5: Path, tmp_path: Path) -> None:
    options: dict[str, object] = {"tokenizer": str(byt5), "cache_dir": str(tmp_path / "cache")}
    with zmq.Context() as context:
        prompts = TokenizerClient(context, f"ipc://{tmp_path}/p", options)
        answers: list[Rendered | TokenizerReady] = []
        keys = [prompts.ask(Render(0, TEXT)), prompts.ask(Render(0, TEXT * 1000))]
        while len(answers) < 3:
            assert prompts.socket.poll(int(PATIENCE_S * 1e3))
            answers += prompts.receive()
        prompts.close()
    ready, short, long = answers
    assert isinstance(ready, TokenizerReady)
    assert not ready.error
    assert isinstance(short, Rendered)
    assert isinstance(long, Rendered)
    assert [short.key, long.key] == keys
    assert u32(short.token_ids).tolist() == [*[byte + 3 for byte in TEXT.encode()], 1]
    assert len(u32(long.token_ids)) == 1000 * len(TEXT.encode()) + 1


def test_tokens_of_bytes() -> None:
    for errors in ("replace", "ignore"):
        tokenizer = BytesTokenizer(errors)
        pieces = slow_pieces(tokenizer)
        assert pieces == (b"a", b" th", b"\xc3", b"\xa9!", "日".encode(), b"<|end|>")
        table = compile_slow(tokenizer, pieces)
        assert (table.errors, table.special) == (errors, (5,))
        stream = TableDetokenizerFactory(table).create([], True)
        assert [stream.step(i) for i in (0, 2, 5, 3, 2)] == ["a", "", "", "é!", ""]


@pytest.mark.parametrize("what", ["upper", "raise"])
def test_a_decode_that_no_table_can_hold_is_refused(what: str) -> None:
    tokenizer = BytesTokenizer(what)
    with pytest.raises(UnsupportedDecoder):
        compile_slow(tokenizer, slow_pieces(tokenizer))


def test_tokens_that_are_no_bytes_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokenizer = BytesTokenizer()
    monkeypatch.setattr(tokenizer, "convert_ids_to_tokens", lambda _: "word@@")
    monkeypatch.setattr("slipstream_worker.tokenizer.process.load_tokenizer", lambda _: tokenizer)
    config = TokenizerConfig(tokenizer="x", address="", cache_dir=str(tmp_path))
    said = prepare(config)[1].error
    assert "BytesTokenizer has no tokenizer.json" in said
    assert "word@@" in said


# ---- files that transformers converts, with packages that need not be there --------------------


def check(folder: Path, tmp_path: Path) -> None:
    config = TokenizerConfig(tokenizer=str(folder), address="", cache_dir=str(tmp_path / "cache"))
    tokenizer, ready = prepare(config)
    assert not ready.error
    ids = tokenizer(TEXT, add_special_tokens=False)["input_ids"]
    stream = TableDetokenizerFactory(load_table(Path(ready.table_path))).create([], False)
    assert stream.step_many(ids) + stream.flush() == tokenizer.decode(ids) == TEXT


@pytest.mark.parametrize("kind", ["unigram", "bpe"])
def test_a_sentencepiece_model_alone(tmp_path: Path, kind: str) -> None:
    trainer = pytest.importorskip("sentencepiece").SentencePieceTrainer
    pytest.importorskip("google.protobuf")
    folder = tmp_path / "model"
    folder.mkdir()
    (tmp_path / "text").write_text(f"{TEXT}\n" * 50 + "once upon a time there was a word\n" * 50)
    trainer.train(
        input=str(tmp_path / "text"),
        model_prefix=str(folder / "tokenizer"),
        vocab_size=310 if kind == "bpe" else 300,
        model_type=kind,
        byte_fallback=True,
        hard_vocab_limit=False,
        minloglevel=2,
    )
    (folder / "config.json").write_text(json.dumps({"model_type": "llama"}))
    check(folder, tmp_path)


def test_a_tiktoken_file_alone(tmp_path: Path) -> None:
    pytest.importorskip("tiktoken")
    folder = tmp_path / "model"
    folder.mkdir()
    tokens = [*[bytes([byte]) for byte in range(256)], b" n", "é".encode(), b"ll", b"llo"]
    lines = [base64.b64encode(token) + b" %d\n" % rank for rank, token in enumerate(tokens)]
    (folder / "tokenizer.model").write_bytes(b"".join(lines))
    (folder / "config.json").write_text(json.dumps({"model_type": "llama"}))
    check(folder, tmp_path)


def test_the_packages_that_are_missing_are_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "tokenizer.model").write_bytes(b"\x0a\x0enonsense")
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama"}))
    config = TokenizerConfig(tokenizer=str(tmp_path), address="", cache_dir=str(tmp_path / "cache"))
    monkeypatch.setattr("slipstream_worker.tokenizer.process.find_spec", lambda _: None)
    said = prepare(config)[1].error
    assert "sentencepiece" in said
    assert "pip install 'slipstream[tokenizers]'" in said
