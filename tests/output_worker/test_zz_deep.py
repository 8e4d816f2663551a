"""Detokenisers against the tokenizer's own decode, under the rule of continuation.

The oracle is `continuation`: decode(prompt ids + output ids), less the beginning that it shares
with decode(prompt ids).

`TableDetokenizer` must equal it for any ids at all, after every token. `WindowDetokenizer` must
equal it for any ids where the decoder makes no bytes (Metaspace, WordPiece), and for ids of whole
characters where it does; for random bytes it is held to lose and double nothing but U+FFFD and
characters made of stray bytes.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from itertools import chain
from os.path import commonprefix

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models

from slipstream_worker.compile_table import compile_table
from slipstream_worker.detokenizer import (
    Detokenizer,
    TableDetokenizerFactory,
    WindowDetokenizerFactory,
)

REPLACEMENT = "\ufffd"
ALPHABET = "abe théâtre été 今天你好中文 こんはい жик λκ दुनि 👍🏽👨‍👩‍👧🇫🇷\n\t.,!'<>1"


def continuation(
    tokenizer: Tokenizer, prompt_ids: Sequence[int], output_ids: Sequence[int], skip: bool
) -> str:
    prompt_text = tokenizer.decode(list(prompt_ids), skip_special_tokens=skip)
    text = tokenizer.decode([*prompt_ids, *output_ids], skip_special_tokens=skip)
    shared = commonprefix((prompt_text, text))  # noqa: RUF071 - it is characters that are meant
    return text[len(shared) :]


def stream(detokenizer: Detokenizer, output_ids: Sequence[int]) -> str:
    return "".join([detokenizer.step(i) for i in output_ids]) + detokenizer.flush()


@pytest.fixture(scope="module")
def table(byte_level: Tokenizer) -> TableDetokenizerFactory:
    return TableDetokenizerFactory(compile_table(byte_level))


def window(tokenizer: Tokenizer) -> WindowDetokenizerFactory:
    return WindowDetokenizerFactory(tokenizer.to_str().encode())


@pytest.fixture(scope="module")
def windows(
    byte_level: Tokenizer, byte_fallback: Tokenizer, metaspace: Tokenizer, word_piece: Tokenizer
) -> dict[str, tuple[Tokenizer, WindowDetokenizerFactory]]:
    return {
        "byte_level": (byte_level, window(byte_level)),
        "byte_fallback": (byte_fallback, window(byte_fallback)),
        "metaspace": (metaspace, window(metaspace)),
        "word_piece": (word_piece, window(word_piece)),
    }


def ids_of_bytes(data: bytes, tokenizer: Tokenizer) -> list[int]:
    """The ByteLevel tokens that are one byte each."""
    pieces = compile_table(tokenizer).pieces
    return [pieces.index(bytes([byte])) for byte in data]


def id_of(token: str, tokenizer: Tokenizer) -> int:
    token_id = tokenizer.token_to_id(token)
    assert token_id is not None, token
    return token_id


# Any ids: broken UTF-8, special tokens, holes, ids beyond the vocabulary


@pytest.fixture(scope="module")
def any_ids(byte_level: Tokenizer) -> st.SearchStrategy[list[int]]:
    table = compile_table(byte_level)
    single_bytes = [i for i, piece in enumerate(table.pieces) if len(piece) == 1]
    high = [i for i in single_bytes if table.pieces[i] >= b"\x80"]
    broken = [i for i, p in enumerate(table.pieces) if p.decode("utf-8", "replace").encode() != p]
    holes = [i for i in range(table.vocab_size) if byte_level.id_to_token(i) is None]
    character = (
        st.sampled_from("é你😀\ufffda")
        .map(str.encode)
        .map(lambda data: [table.pieces.index(bytes([byte])) for byte in data])
    )
    one = st.one_of(
        st.integers(0, table.vocab_size + 3),
        st.sampled_from(high),
        st.sampled_from(broken),
        st.sampled_from(table.special),
        st.sampled_from(holes),
    )
    runs = st.one_of(one.map(lambda token_id: [token_id]), character)
    return st.lists(runs, max_size=12).map(lambda runs: list(chain.from_iterable(runs)))


@settings(max_examples=400*100, deadline=None)
@given(data=st.data(), skip=st.booleans())
def test_table_continues_any_prompt_with_any_output(
    byte_level: Tokenizer,
    table: TableDetokenizerFactory,
    any_ids: st.SearchStrategy[list[int]],
    data: st.DataObject,
    skip: bool,
) -> None:
    """After every token all is out but an unfinished character, for which decode shows U+FFFD."""
    ids = data.draw(any_ids)
    cut = data.draw(st.integers(0, len(ids)))
    prompt_ids, output_ids = ids[:cut], ids[cut:]
    detokenizer = table.create(prompt_ids, skip)
    text = ""
    for count, token_id in enumerate(output_ids, 1):
        text += detokenizer.step(token_id)
        so_far = continuation(byte_level, prompt_ids, output_ids[:count], skip)
        assert text in (so_far, so_far.removesuffix(REPLACEMENT))
        assert detokenizer.is_pending or text == so_far
        assert not detokenizer.is_pending or byte_level.decode(
            ids[: cut + count], skip_special_tokens=skip
        ).endswith(REPLACEMENT)
    text += detokenizer.flush()
    assert text == continuation(byte_level, prompt_ids, output_ids, skip)


@settings(max_examples=200*100, deadline=None)
@given(data=st.data(), skip=st.booleans())
def test_table_text_does_not_depend_on_chunks(
    table: TableDetokenizerFactory,
    any_ids: st.SearchStrategy[list[int]],
    data: st.DataObject,
    skip: bool,
) -> None:
    prompt_ids, output_ids = data.draw(any_ids), data.draw(any_ids)
    one_by_one, mixed = table.create(prompt_ids, skip), table.create(prompt_ids, skip)
    at = 0
    while at < len(output_ids):
        length = data.draw(st.integers(0, 6), label="chunk, 0 for a step")
        chunk = output_ids[at : at + max(1, length)]
        text = mixed.step_many(chunk) if length else mixed.step(chunk[0])
        assert text == "".join([one_by_one.step(token_id) for token_id in chunk])
        at += len(chunk)
    assert mixed.flush() == one_by_one.flush()


# Complaints, each by its name


def test_character_split_over_tokens_comes_whole(
    byte_level: Tokenizer, table: TableDetokenizerFactory
) -> None:
    detokenizer = table.create([], False)
    ids = ids_of_bytes("😀".encode(), byte_level)
    assert [detokenizer.step(i) for i in ids] == ["", "", "", "😀"]
    assert detokenizer.flush() == ""


def test_real_replacement_character_commits_at_once(
    byte_level: Tokenizer, table: TableDetokenizerFactory
) -> None:
    detokenizer = table.create([], False)
    ids = ids_of_bytes(REPLACEMENT.encode(), byte_level)
    assert [detokenizer.step(i) for i in ids * 2] == ["", "", REPLACEMENT] * 2


def test_broken_bytes_are_replaced_at_once(
    byte_level: Tokenizer, table: TableDetokenizerFactory
) -> None:
    detokenizer = table.create([], False)
    ids = ids_of_bytes(b"\x80\xe4a", byte_level)
    assert [detokenizer.step(i) for i in ids] == [REPLACEMENT, "", f"{REPLACEMENT}a"]


def test_half_a_surrogate_is_replaced_at_once(
    byte_level: Tokenizer, table: TableDetokenizerFactory
) -> None:
    """No third byte makes a character of it, though Python's decoder waits for one."""
    detokenizer = table.create([], False)
    ids = ids_of_bytes(b"\xed\xa1", byte_level)
    assert [detokenizer.step(i) for i in ids] == ["", REPLACEMENT * 2]
    assert stream(table.create(ids[:1], False), ids[1:]) == REPLACEMENT


@pytest.mark.parametrize("skip", [False, True])
def test_token_that_decodes_to_nothing(
    byte_level: Tokenizer, table: TableDetokenizerFactory, skip: bool
) -> None:
    hole = next(i for i in range(9999) if byte_level.id_to_token(i) is None)
    detokenizer = table.create([hole, 99999], skip)
    assert detokenizer.step(hole) == ""
    assert detokenizer.step(99999) == ""
    assert detokenizer.step_many([99999, hole]) == ""
    assert detokenizer.step(id_of("Ġthe", byte_level)) == " the"
    assert detokenizer.flush() == ""


def test_pending_bytes_are_flushed_at_the_end(
    byte_level: Tokenizer, table: TableDetokenizerFactory
) -> None:
    detokenizer = table.create([], False)
    assert detokenizer.step_many(ids_of_bytes("a你".encode()[:-1], byte_level)) == "a"
    assert detokenizer.flush() == REPLACEMENT


def test_special_token_between_two_halves_of_a_character(
    byte_level: Tokenizer, table: TableDetokenizerFactory
) -> None:
    first, second = ids_of_bytes("é".encode(), byte_level)
    ids = [first, id_of("<s>", byte_level), second]
    assert stream(table.create([], True), ids) == "é"
    assert stream(table.create([], False), ids) == f"{REPLACEMENT}<s>{REPLACEMENT}"


def test_streams_of_one_table_skip_special_tokens_each_as_asked(
    byte_level: Tokenizer, table: TableDetokenizerFactory
) -> None:
    end = id_of("<|im_end|>", byte_level)
    shown, skipped = table.create([], False), table.create([], True)
    assert [shown.step(end), skipped.step(end)] == ["<|im_end|>", ""]
    tool_call = id_of("<tool_call>", byte_level)
    assert [shown.step(tool_call), skipped.step(tool_call)] == ["<tool_call>", "<tool_call>"]


def test_prompt_ends_inside_a_character(
    byte_level: Tokenizer, table: TableDetokenizerFactory
) -> None:
    ids = ids_of_bytes("x😀".encode(), byte_level)
    for cut in (2, 3, 4):
        assert stream(table.create(ids[:cut], False), ids[cut:]) == "😀"


def test_broken_character_of_the_prompt_is_not_doubled(
    byte_level: Tokenizer, table: TableDetokenizerFactory
) -> None:
    prompt_ids = ids_of_bytes("x😀".encode()[:-1], byte_level)
    assert stream(table.create(prompt_ids, False), []) == ""
    assert stream(table.create(prompt_ids, False), ids_of_bytes(b"a", byte_level)) == "a"


def test_only_the_prompts_last_bytes_are_read(table: TableDetokenizerFactory) -> None:
    """A long prompt costs no more than a short one."""

    class Prompt(list[int]):
        num_read = 0

        def __reversed__(self):  # type: ignore[no-untyped-def]
            for token_id in super().__reversed__():
                self.num_read += 1
                yield token_id

    prompt = Prompt([60] * 10_000)
    table.create(prompt, False)
    assert 0 < prompt.num_read <= 3


# The window


TOKENIZERS = ["byte_level", "byte_fallback", "metaspace", "word_piece"]


@pytest.mark.parametrize("name", TOKENIZERS)
@settings(max_examples=150*100, deadline=None)
@given(data=st.data(), skip=st.booleans())
def test_window_continues_text(
    windows: dict[str, tuple[Tokenizer, WindowDetokenizerFactory]],
    name: str,
    data: st.DataObject,
    skip: bool,
) -> None:
    """Byte tokens that spell U+FFFD look like broken ones, so byte fallback is not asked for it."""
    tokenizer, factory = windows[name]
    alphabet = ALPHABET if name == "byte_fallback" else ALPHABET + REPLACEMENT
    texts = data.draw(st.lists(st.text(alphabet, max_size=30), max_size=5))
    special = st.sampled_from([id_of(t, tokenizer) for t in ("<s>", "</s>", "<|späcial 標|>")])
    ids: list[int] = []
    for text in texts:
        ids += tokenizer.encode(text, add_special_tokens=False).ids
        ids += data.draw(st.lists(special, max_size=2))
    cut = data.draw(st.integers(0, len(ids)))
    prompt_ids, output_ids = ids[:cut], ids[cut:]
    expected = continuation(tokenizer, prompt_ids, output_ids, skip)
    detokenizer = factory.create(prompt_ids, skip)
    text = ""
    for token_id in output_ids:
        text += detokenizer.step(token_id)
        assert expected.startswith(text)
    assert text + detokenizer.flush() == expected
    batched = factory.create(prompt_ids, skip)
    assert batched.step_many(output_ids) + batched.flush() == expected


@pytest.mark.parametrize("name", ["metaspace", "word_piece"])
@settings(max_examples=150*100, deadline=None)
@given(data=st.data(), skip=st.booleans())
def test_window_continues_any_ids_of_decoders_without_bytes(
    windows: dict[str, tuple[Tokenizer, WindowDetokenizerFactory]],
    name: str,
    data: st.DataObject,
    skip: bool,
) -> None:
    tokenizer, factory = windows[name]
    ids = st.lists(st.integers(0, tokenizer.get_vocab_size() + 3), max_size=20)
    prompt_ids, output_ids = data.draw(ids), data.draw(ids)
    text = stream(factory.create(prompt_ids, skip), output_ids)
    assert text == continuation(tokenizer, prompt_ids, output_ids, skip)


def _ascii(text: str) -> str:
    return "".join([char for char in text if char.isascii()])


@pytest.mark.parametrize("name", ["byte_level", "byte_fallback"])
@settings(max_examples=150*100, deadline=None)
@given(data=st.data(), skip=st.booleans())
def test_window_neither_loses_nor_doubles_text_between_stray_bytes(
    windows: dict[str, tuple[Tokenizer, WindowDetokenizerFactory]],
    name: str,
    data: st.DataObject,
    skip: bool,
) -> None:
    """ASCII is the part of which stray bytes can make nothing and break nothing.

    (A byte token for ASCII can be broken by its neighbours in a run, so none is drawn.)
    """
    tokenizer, factory = windows[name]
    size = tokenizer.get_vocab_size()
    tokens = {i: tokenizer.id_to_token(i) or "" for i in range(size)}
    high = [i for i, t in tokens.items() if t.startswith("<0x") and int(t[3:5], 16) >= 0x80]
    low = [i for i, t in tokens.items() if t.startswith("<0x") and int(t[3:5], 16) < 0x80]
    one = st.integers(0, size - 1).filter(lambda token_id: token_id not in low)
    ids = st.lists(st.one_of(one, st.sampled_from(high)) if high else one, max_size=30)
    prompt_ids, output_ids = data.draw(ids), data.draw(ids)
    text = stream(factory.create(prompt_ids, skip), output_ids)
    expected = continuation(tokenizer, prompt_ids, output_ids, skip)
    assert _ascii(text) == _ascii(expected)


def test_window_keeps_the_first_blank_of_an_answer(
    byte_fallback: Tokenizer, metaspace: Tokenizer
) -> None:
    for tokenizer in (byte_fallback, metaspace):
        ids = tokenizer.encode("the dog").ids
        detokenizer = window(tokenizer).create(ids, True)
        assert stream(detokenizer, ids) == " the dog"
        assert stream(window(tokenizer).create([], True), ids) == "the dog"


def test_window_keeps_the_first_blank_behind_skipped_special_tokens(
    byte_fallback: Tokenizer,
) -> None:
    ids = byte_fallback.encode("the dog").ids
    prompt_ids = [*ids, *[id_of("</s>", byte_fallback)] * 40]
    assert stream(window(byte_fallback).create(prompt_ids, True), ids) == " the dog"


def test_window_decodes_byte_runs_character_by_character(byte_fallback: Tokenizer) -> None:
    detokenizer = window(byte_fallback).create([], False)
    ids = [id_of(f"<0x{byte:02X}>", byte_fallback) for byte in "😀你".encode()]
    steps = [(detokenizer.step(i), detokenizer.is_pending) for i in ids]
    waits = ("", True)
    assert steps == [waits, waits, waits, ("😀", False), waits, waits, ("你", False)]


def test_window_decodes_long_byte_runs(byte_fallback: Tokenizer) -> None:
    text = "λ" + "你" * 20 + "1"
    ids = [id_of(f"<0x{byte:02X}>", byte_fallback) for byte in text.encode()]
    for cut in range(len(ids)):
        detokenizer = window(byte_fallback).create(ids[:cut], False)
        expected = continuation(byte_fallback, ids[:cut], ids[cut:], False)
        assert stream(detokenizer, ids[cut:]) == expected


def test_window_does_not_double_text_that_decode_takes_back(byte_fallback: Tokenizer) -> None:
    """A stray byte turns the whole run, 😀 included, into U+FFFD; 😀 has left long ago."""
    detokenizer = window(byte_fallback).create([], False)
    ids = [id_of(f"<0x{byte:02X}>", byte_fallback) for byte in "😀".encode() + b"\xe4"]
    text = stream(detokenizer, [*ids, *byte_fallback.encode("dog").ids])
    assert text == f"😀{REPLACEMENT} dog"


def test_window_does_not_double_a_replacement_character_that_the_prompt_begins(
    byte_fallback: Tokenizer,
) -> None:
    ids = [id_of(f"<0x{byte:02X}>", byte_fallback) for byte in REPLACEMENT.encode()]
    detokenizer = window(byte_fallback).create(ids[:2], False)
    assert stream(detokenizer, [ids[2], *byte_fallback.encode("dog").ids]) == " dog"


def test_window_flushes_an_unfinished_character(byte_fallback: Tokenizer) -> None:
    detokenizer = window(byte_fallback).create([], False)
    assert stream(detokenizer, [id_of("<0xE4>", byte_fallback)]) == REPLACEMENT


def test_window_neither_stalls_nor_slows_down_on_replacement_characters() -> None:
    """Held back are a few of them at most, and the ten-thousandth costs what the tenth did."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_tokens([AddedToken(REPLACEMENT)])
    detokenizer = window(tokenizer).create([], False)
    num_tokens, num_chars, most_held = 10_000, 0, 0
    start = time.perf_counter()
    for count in range(1, num_tokens + 1):
        num_chars += len(detokenizer.step(0))
        most_held = max(most_held, count - num_chars)
    assert time.perf_counter() - start < 5  # 0.3 s alone; decoding all of it takes minutes
    assert most_held < 8
    assert num_chars + len(detokenizer.flush()) == num_tokens


def test_window_never_cuts_a_character_to_end_a_long_wait(byte_level: Tokenizer) -> None:
    """Every prefix of these tokens ends in U+FFFD, and 你 lies where the wait is cut short."""
    char_of = {
        piece: byte_level.id_to_token(token_id)
        for token_id, piece in enumerate(compile_table(byte_level).pieces)
        if len(piece) == 1
    }
    tokens = [b"\x80"] * 4 + [b"\xe4", b"\xbd", b"\xa0\xe4", b"\x80"]
    names = ["".join([char_of[bytes([byte])] for byte in token]) for token in tokens]
    vocab = {name: token_id for token_id, name in enumerate(sorted(set(names)))}
    tokenizer = Tokenizer(models.BPE(vocab, []))
    tokenizer.decoder = decoders.ByteLevel()
    output_ids = [vocab[name] for name in names]
    assert stream(window(tokenizer).create([], False), output_ids) == tokenizer.decode(output_ids)


def test_window_forgets_tokens_that_decode_to_nothing(byte_fallback: Tokenizer) -> None:
    detokenizer = window(byte_fallback).create(byte_fallback.encode("the").ids, True)
    special = id_of("</s>", byte_fallback)
    assert detokenizer.step_many([special] * 8) == ""
    assert not detokenizer.is_pending
    assert stream(detokenizer, byte_fallback.encode("dog").ids) == " dog"
