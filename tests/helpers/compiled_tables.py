"""Compiled token tables of every kind of decoder."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain

from hypothesis import strategies as st
from tokenizers import Tokenizer

from slipstream_worker.detokenizer.factory import Detokenizer, TableDetokenizerFactory
from slipstream_worker.detokenizer.reference import DecodeReference
from slipstream_worker.detokenizer.table import TokenTable

BYTE_KINDS = ["byte_level", "llama_2", "gemma"]


KINDS = [
    *BYTE_KINDS,
    "metaspace_always",
    "metaspace_first",
    "metaspace_never",
    "word_piece",
    "word_piece_verbatim",
    "word_end",
    "no_decoder",
]


@dataclass(frozen=True)
class Compiled:
    """A tokenizer, its compiled table, and a strategy of token ids to test them with."""

    tokenizer: Tokenizer
    table: TokenTable
    factory: TableDetokenizerFactory
    reference: DecodeReference
    any_ids: st.SearchStrategy[list[int]]

    def id_of(self, token: str) -> int:
        token_id = self.tokenizer.token_to_id(token)
        assert token_id is not None, token
        return token_id

    def spell(self, data: bytes) -> list[int]:
        """The single-byte tokens that spell `data`."""
        byte_ids = self.table.byte_ids or range(self.table.vocab_size)
        id_of = {self.table.pieces[i]: i for i in reversed(byte_ids)}
        return [id_of[bytes([byte])] for byte in data]

    def create(self, prompt_ids: Sequence[int] = (), skip: bool = False) -> Detokenizer:
        return self.factory.create(list(prompt_ids), skip)


def any_ids(table: TokenTable, has_bytes: bool) -> st.SearchStrategy[list[int]]:
    """Lists of token ids of every kind: beyond the vocabulary, special, without a piece, with an
    empty one, invalid UTF-8. has_bytes: also characters spelled as single bytes.
    """
    pieces = list(enumerate(table.pieces))
    pools = [
        list(range(table.vocab_size + 4)),
        list(table.special),
        [i for i, piece in pieces if piece is None],
        [i for i, piece in pieces if piece == b""],
        [i for i, piece in pieces if piece is not None and b" " in piece],
        [i for i, piece in pieces if piece and piece.decode("utf-8", "replace").encode() != piece],
        [i for i, piece in pieces if len(piece or b"") == 1 and piece >= b"\x80"],
    ]
    if table.last_pieces:
        pools.append([i for i, piece in pieces if piece != table.last_pieces[i]])
    parts = st.one_of([st.sampled_from(pool).map(lambda i: [i]) for pool in pools if pool])
    if has_bytes:
        byte_ids = table.byte_ids or range(table.vocab_size)
        id_of = {table.pieces[i]: i for i in byte_ids}
        spelled = [[id_of[bytes([byte])] for byte in char.encode()] for char in "é▁你😀\ufffda "]
        parts |= st.sampled_from(spelled)
    return st.lists(parts, max_size=12).map(lambda parts: list(chain(*parts)))
