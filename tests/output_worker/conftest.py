"""Small tokenizers of each kind, trained once per session, without files or the hub."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import pytest
from tests.helpers.compiled_tables import BYTE_KINDS, Compiled, any_ids
from tokenizers import Tokenizer

from slipstream_lab.models.tokenizers_in_small import KINDS
from slipstream_worker.detokenizer.compiler import compile_table
from slipstream_worker.detokenizer.factory import TableDetokenizerFactory
from slipstream_worker.detokenizer.reference import DecodeReference


@pytest.fixture(scope="session")
def tokenizer_of() -> Callable[[str], Tokenizer]:
    """Returns the tokenizer of a kind by its name in `KINDS`."""
    return cache(lambda kind: KINDS[kind]())


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


@pytest.fixture(scope="session")
def compiled(tokenizer_of: Callable[[str], Tokenizer]) -> Callable[[str], Compiled]:
    @cache
    def compile_kind(kind: str) -> Compiled:
        tokenizer = tokenizer_of(kind)
        table = compile_table(tokenizer)
        ids = any_ids(table, has_bytes=kind in BYTE_KINDS)
        factory, reference = TableDetokenizerFactory(table), DecodeReference(tokenizer)
        return Compiled(tokenizer, table, factory, reference, ids)

    return compile_kind
