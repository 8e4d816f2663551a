"""`slipstream bench embeddings`: both sides are measured, and their vectors compared."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer
from transformers import AutoModel

from slipstream.cli.main import main
from slipstream_lab import embeddings


class Encoder:
    """In place of sentence-transformers: one text at a time. scale: of its vectors."""

    scale = 1.0

    def __init__(self, folder: str, *, device: str) -> None:
        self._model = AutoModel.from_pretrained(folder).eval().to(device)
        self._tokenizer = Tokenizer.from_file(f"{folder}/tokenizer.json")

    @torch.inference_mode()
    def encode(self, texts: Sequence[str]) -> Any:
        each_ids = [torch.tensor([self._tokenizer.encode(text).ids]) for text in texts]
        rows = [self._model(ids).last_hidden_state[0].mean(0) for ids in each_ids]
        vectors = torch.nn.functional.normalize(torch.stack(rows), dim=-1)
        return (self.scale * vectors).numpy()


@pytest.fixture(autouse=True)
def peer(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 2}
    for name, size in (sizes | {"num_hidden_layers": 1}).items():
        monkeypatch.setitem(embeddings._SHAPE, name, size)
    module = SimpleNamespace(SentenceTransformer=Encoder)
    monkeypatch.setitem(sys.modules, "sentence_transformers", module)


def test_texts_are_of_words_that_are_tokens(tmp_path: Path) -> None:
    tokenizer = Tokenizer.from_file(str(embeddings.save_embedder(tmp_path) / "tokenizer.json"))
    texts = embeddings.made_up_texts(200)
    for text in texts:
        assert len(tokenizer.encode(text).ids) == len(text.split()) + 2
        assert tokenizer.token_to_id("[UNK]") not in tokenizer.encode(text).ids
    lens = [len(text.split()) for text in texts]
    assert 30 < np.median(lens) < 80
    assert max(lens) <= 254


def test_both_are_measured(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "rows.json"
    assert main(["bench", "embeddings", "--quick", "--threads", "1", "--json", str(file)]) == 0
    (row,) = json.loads(file.read_text())
    assert row["tokens"] == sum(len(text.split()) + 2 for text in embeddings.made_up_texts(32))
    assert row["ratio"] == pytest.approx(row["slipstream"] / row["peer"])
    assert row["bound"] > 0
    assert "goal at least 3" in capsys.readouterr().out


def test_other_vectors_end_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(Encoder, "scale", 1.1)
    assert main(["bench", "embeddings", "--quick", "--threads", "1"]) != 0
    assert "other vectors" in capsys.readouterr().err


def test_without_the_peer_it_says_how_to_have_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "sentence_transformers", None)
    assert main(["bench", "embeddings", "--quick"]) == 2
    assert "pip install sentence-transformers" in capsys.readouterr().err
