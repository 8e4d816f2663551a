"""Small tokenizers of each kind, trained once for all tests; no files and no hub needed."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from functools import cache
from pathlib import Path
from types import ModuleType

import pytest
from tokenizers import Tokenizer

_SOURCE = Path(__file__).parents[2] / "benchmarks" / "tokenizers_in_small.py"


def _load_source() -> ModuleType:
    spec = importlib.util.spec_from_file_location(_SOURCE.stem, _SOURCE)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="session")
def tokenizer_of() -> Callable[[str], Tokenizer]:
    """The tokenizer of a kind, by the kind's name."""
    kinds = _load_source().KINDS
    return cache(lambda kind: kinds[kind]())


@pytest.fixture(scope="session")
def byte_level(tokenizer_of: Callable[[str], Tokenizer]) -> Tokenizer:
    return tokenizer_of("byte_level")


@pytest.fixture(scope="session")
def byte_fallback(tokenizer_of: Callable[[str], Tokenizer]) -> Tokenizer:
    return tokenizer_of("llama_2")


@pytest.fixture(scope="session")
def metaspace(tokenizer_of: Callable[[str], Tokenizer]) -> Tokenizer:
    return tokenizer_of("metaspace_always")


@pytest.fixture(scope="session")
def word_piece(tokenizer_of: Callable[[str], Tokenizer]) -> Tokenizer:
    return tokenizer_of("word_piece")
