"""The window, against the tokenizer's own decode.

It must equal decode for any ids where the decoder makes no bytes (Metaspace, WordPiece), and for
ids of whole characters where it does; for random bytes it is held to lose and double nothing but
U+FFFD and characters made of stray bytes.
"""

from __future__ import annotations

from collections.abc import Sequence
from os.path import commonprefix

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models

from slipstream_worker.detokenizer.compiler import compile_table
from slipstream_worker.detokenizer.factory import Detokenizer
from slipstream_worker.detokenizer.window import WindowDetokenizer, WindowDetokenizerFactory

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


def id_of(token: str, tokenizer: Tokenizer) -> int:
    token_id = tokenizer.token_to_id(token)
    assert token_id is not None, token
    return token_id


TOKENIZERS = ["byte_level", "byte_fallback", "metaspace", "word_piece"]


@pytest.mark.parametrize("name", TOKENIZERS)
@settings(max_examples=100, deadline=None)
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
@settings(max_examples=100, deadline=None)
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
@settings(max_examples=100, deadline=None)
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
    steps = [(detokenizer.step(i), detokenizer.num_pending) for i in ids]
    waits = [("", 1), ("", 2), ("", 3)]
    assert steps == [*waits, ("😀", 0), *waits[:2], ("你", 0)]


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


def test_window_neither_stalls_nor_slows_down_on_replacement_characters(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Held back are a few of them at most, and the ten-thousandth costs what the tenth did."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_tokens([AddedToken(REPLACEMENT)])
    detokenizer = window(tokenizer).create([], False)
    decode, num_decoded = WindowDetokenizer._decode, []

    def counted(self: WindowDetokenizer, token_ids: list[int]) -> str:
        num_decoded.append(len(token_ids))
        return decode(self, token_ids)

    monkeypatch.setattr(WindowDetokenizer, "_decode", counted)
    num_tokens, num_chars, most_held = 10_000, 0, 0
    for count in range(1, num_tokens + 1):
        num_chars += len(detokenizer.step(0))
        most_held = max(most_held, count - num_chars)
    assert max(num_decoded) < 40
    assert sum(num_decoded) < 1000 * num_tokens  # all of it would be five times that
    assert most_held < 8
    assert num_chars + len(detokenizer.flush()) == num_tokens


def test_window_never_cuts_a_character_to_end_a_long_wait(byte_level: Tokenizer) -> None:
    """Every prefix of these tokens ends in U+FFFD, and 你 lies where the wait is cut short."""
    char_of = {
        piece: byte_level.id_to_token(token_id)
        for token_id, piece in enumerate(compile_table(byte_level).pieces)
        if len(piece or b"") == 1
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
    assert not detokenizer.num_pending
    assert stream(detokenizer, byte_fallback.encode("dog").ids) == " dog"
