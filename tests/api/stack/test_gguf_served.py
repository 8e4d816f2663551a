"""A stack serves a GGUF file as it serves the folder that the file was made of."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from tests.helpers.gguf_models import demo_gguf

from slipstream import LLM, SamplingParams


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
