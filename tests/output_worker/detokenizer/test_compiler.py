"""Compiling decoders to tables: what tokens become, what is refused, what the self-test sees."""

from __future__ import annotations

from collections.abc import Callable

import msgspec
import pytest
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models

from slipstream_worker.detokenizer.compiler import UnsupportedDecoder, compile_table
from slipstream_worker.detokenizer.table import TokenTable
from slipstream_worker.detokenizer.verify import find_mismatch

TokenizerOf = Callable[[str], Tokenizer]


def with_decoder(tokenizer: Tokenizer, *steps: decoders.Decoder) -> Tokenizer:
    other = Tokenizer.from_str(tokenizer.to_str())
    other.decoder = steps[0] if len(steps) == 1 else decoders.Sequence(list(steps))
    return other


def piece_of(tokenizer: Tokenizer, pieces: tuple[bytes | None, ...], token: str) -> bytes | None:
    return pieces[tokenizer.token_to_id(token)]


# What tokens become


def test_pieces_of_byte_level(byte_level: Tokenizer) -> None:
    table = compile_table(byte_level)
    pieces = {
        "Ġthe": b" the",
        "Ċ": b"\n",
        "<tool_call>": b"<tool_call>",
        "中文 added": "中文 added".encode(),
        "é": b"\xe9",  # its text is in the alphabet, so decode takes it for a byte
        "<|späcial 標|>": "<|späcial 標|>".encode(),
    }
    assert {token: piece_of(byte_level, table.pieces, token) for token in pieces} == pieces
    assert table.mode == "bytelevel"
    assert table.vocab_size == 1 + max(byte_level.get_vocab().values())


def test_pieces_of_byte_fallback(byte_fallback: Tokenizer) -> None:
    table = compile_table(byte_fallback)
    pieces = {"▁the": b" the", "<0xE4>": b"\xe4", "<0x41>": b"A", "t": b"t", "": b""}
    assert {token: piece_of(byte_fallback, table.pieces, token) for token in pieces} == pieces
    assert {table.pieces[i] for i in table.byte_ids} == {bytes([byte]) for byte in range(256)}
    assert (table.mode, table.num_stripped, table.first_pieces) == ("text", 1, ())


def test_gemma_cuts_no_blank(tokenizer_of: TokenizerOf) -> None:
    table = compile_table(tokenizer_of("gemma"))
    assert (table.num_stripped, len(table.byte_ids)) == (0, 256)


@pytest.mark.parametrize(
    ("kind", "token", "first", "other"),
    [
        ("metaspace_always", "▁a▁b", b"ab", b" a b"),
        ("metaspace_first", "▁a▁b", b"ab", b" a b"),
        ("metaspace_never", "▁a▁b", b" a b", b" a b"),
        ("word_piece", "##o", b"##o", b"o"),
        ("word_piece", ".", b".", b"."),
        ("word_piece_verbatim", "!", b"!", b" !"),
        ("no_decoder", "the", b"the", b" the"),
    ],
)
def test_first_token_reads_otherwise(
    tokenizer_of: TokenizerOf, kind: str, token: str, first: bytes, other: bytes
) -> None:
    tokenizer = with_token(tokenizer_of(kind), token)
    table = compile_table(tokenizer)
    assert piece_of(tokenizer, table.pieces, token) == other
    assert piece_of(tokenizer, table.first_pieces or table.pieces, token) == first


def with_token(tokenizer: Tokenizer, token: str) -> Tokenizer:
    if tokenizer.token_to_id(token) is not None:
        return tokenizer
    tokenizer = Tokenizer.from_str(tokenizer.to_str())
    tokenizer.add_tokens([AddedToken(token)])
    return tokenizer


def test_end_of_word_is_a_blank_but_at_the_end(tokenizer_of: TokenizerOf) -> None:
    tokenizer = tokenizer_of("word_end")
    table = compile_table(tokenizer)
    assert piece_of(tokenizer, table.pieces, "a</w>b") == b"a b"
    assert piece_of(tokenizer, table.last_pieces, "a</w>b") == b"ab"
    assert piece_of(tokenizer, table.pieces, "<tool_call>") == b"<tool_call>"


def test_special_are_the_special_added_tokens_alone(byte_level: Tokenizer) -> None:
    special = {byte_level.id_to_token(token_id) for token_id in compile_table(byte_level).special}
    assert special == {"<unk>", "<s>", "</s>", "<|im_end|>", "<|späcial 標|>"}


@pytest.mark.parametrize("kind", ["byte_level", "llama_2"])
def test_ids_without_a_token_are_not_tokens_without_text(
    tokenizer_of: TokenizerOf, kind: str
) -> None:
    tokenizer = tokenizer_of(kind)
    table = compile_table(tokenizer)
    holes = [i for i in range(table.vocab_size) if tokenizer.id_to_token(i) is None]
    assert holes
    assert [i for i, piece in enumerate(table.pieces) if piece is None] == holes


def test_a_step_alone_in_a_sequence(byte_level: Tokenizer) -> None:
    wrapped = with_decoder(byte_level, decoders.Sequence([decoders.ByteLevel()]))
    assert compile_table(wrapped) == compile_table(byte_level)


def test_steps_on_tokens_in_a_row(byte_fallback: Tokenizer) -> None:
    tokenizer = with_decoder(
        byte_fallback,
        decoders.Replace(Regex("▁+"), " "),
        decoders.Strip(content="t", left=1, right=0),
        decoders.WordPiece(),
    )
    assert piece_of(tokenizer, compile_table(tokenizer).pieces, "▁the") == b"  the"


def test_blanks_are_stripped_twice(byte_fallback: Tokenizer) -> None:
    strip = decoders.Strip(content=" ", left=1, right=0)
    tokenizer = with_decoder(
        byte_fallback, decoders.Replace("▁", " "), decoders.Fuse(), strip, decoders.Fuse(), strip
    )
    assert compile_table(tokenizer).num_stripped == 2


def test_empty_vocabulary() -> None:
    tokenizer = Tokenizer(models.BPE())
    assert compile_table(tokenizer).vocab_size == 0
    tokenizer.decoder = decoders.ByteLevel()
    assert compile_table(tokenizer).vocab_size == 0


# What is refused


STRIP = decoders.Strip(content=" ", left=1, right=0)


@pytest.mark.parametrize(
    ("steps", "reason"),
    [
        ([decoders.CTC()], "the decoder is CTC: CTC is not known"),
        ([decoders.ByteLevel(), decoders.ByteLevel()], "ByteLevel follows ByteLevel"),
        ([decoders.ByteLevel(), STRIP], "Strip follows ByteLevel"),
        ([decoders.ByteFallback(), decoders.Metaspace()], "Metaspace follows ByteFallback"),
        ([decoders.Fuse(), decoders.Replace("▁", " ")], "Replace follows Fuse"),
        ([decoders.Fuse(), decoders.BPEDecoder()], "BPEDecoder follows Fuse"),
        ([decoders.Fuse(), decoders.Strip(content="_", left=1)], "Strip follows Fuse"),
        ([decoders.Fuse(), decoders.Strip(content=" ", right=1)], "removes text at the end"),
        ([decoders.Metaspace(), decoders.ByteLevel()], "follows a rule for the first token"),
    ],
    ids=lambda steps: None if isinstance(steps, str) else " ".join(map(str, steps))[:60],
)
def test_unsupported_decoders_say_why(
    byte_fallback: Tokenizer, steps: list[decoders.Decoder], reason: str
) -> None:
    with pytest.raises(UnsupportedDecoder, match=reason):
        compile_table(with_decoder(byte_fallback, *steps))


def test_a_token_that_is_a_byte_only_as_the_first(byte_fallback: Tokenizer) -> None:
    tokenizer = with_decoder(byte_fallback, decoders.Metaspace(), decoders.ByteFallback())
    tokenizer.add_tokens([AddedToken("▁<0x41>")])
    with pytest.raises(UnsupportedDecoder, match="a byte in one place"):
        compile_table(tokenizer)


# The self-test


@pytest.mark.parametrize(
    ("kind", "token", "piece"),
    [
        ("byte_level", "Ġthe", b"the"),
        ("llama_2", "<0xE4>", b"\xe5"),
        ("llama_2", "<0x8F>", b"\x9f"),
        ("byte_level", "ð", b"\xf1"),
        ("word_piece", "##o", b" o"),
    ],
)
def test_self_test_finds_one_wrong_piece(
    tokenizer_of: TokenizerOf, kind: str, token: str, piece: bytes
) -> None:
    tokenizer = with_token(tokenizer_of(kind), token)
    table = compile_table(tokenizer)
    at = tokenizer.token_to_id(token)
    pieces = (*table.pieces[:at], piece, *table.pieces[at + 1 :])
    assert find_mismatch(tokenizer, msgspec.structs.replace(table, pieces=pieces)) is not None


@pytest.mark.parametrize(
    ("kind", "change"),
    [
        ("byte_level", lambda table: {"special": table.special[:-1]}),
        ("llama_2", lambda table: {"special": table.special[:-1]}),
        ("llama_2", lambda table: {"num_stripped": 0}),
        ("llama_2", lambda table: {"num_stripped": 2}),
        ("gemma", lambda table: {"num_stripped": 1}),
        ("llama_2", lambda table: {"pieces": tuple(p or b"" for p in table.pieces)}),
        ("metaspace_always", lambda table: {"first_pieces": ()}),
        ("metaspace_never", lambda table: {"num_stripped": 1}),
        ("no_decoder", lambda table: {"first_pieces": ()}),
        ("word_end", lambda table: {"last_pieces": table.pieces}),
    ],
)
def test_self_test_finds_one_wrong_rule(
    tokenizer_of: TokenizerOf, kind: str, change: Callable[[TokenTable], dict[str, object]]
) -> None:
    tokenizer = tokenizer_of(kind)
    table = compile_table(tokenizer)
    assert find_mismatch(tokenizer, table) is None
    assert find_mismatch(tokenizer, msgspec.structs.replace(table, **change(table))) is not None


def test_a_table_that_fails_its_self_test_is_refused(
    byte_level: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "slipstream_worker.detokenizer.compiler.find_mismatch", lambda *_: "'a' is not 'b'"
    )
    with pytest.raises(UnsupportedDecoder, match="self-test: 'a' is not 'b'"):
        compile_table(byte_level)
