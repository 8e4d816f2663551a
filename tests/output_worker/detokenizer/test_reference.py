"""The reference of what streams should read, by examples and where decode itself is the answer."""

from __future__ import annotations

from collections.abc import Callable
from itertools import chain
from os.path import commonprefix

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders

from slipstream_worker.detokenizer.reference import DecodeReference, byte_of_token

TokenizerOf = Callable[[str], Tokenizer]


def byte_ids(tokenizer: Tokenizer, data: bytes) -> list[int]:
    return [tokenizer.token_to_id(f"<0x{byte:02X}>") for byte in data]


@pytest.mark.parametrize(
    ("prompt", "output", "text"),
    [
        (b"", "😀".encode() + b"\xe4", "😀\ufffd"),  # decode makes five U+FFFD of it
        (b"", b"\xe4\xbda\x80", "\ufffd\ufffda\ufffd"),
        (b"", b"\xed\xa0\x80", "\ufffd" * 3),
        (b"x\xe4", b"\xbd\xa0", "你"),
        (b"x\xe4", b"\xbd", "\ufffd"),  # the other U+FFFD is the prompt's
        (b"x\xe4\xbd", b"a", "a"),
        (b"x\xf0\x9f", b"\x98\x80\x80", "😀\ufffd"),
        (b"x\xef\xbf", b"\xbd", ""),  # U+FFFD, which the prompt shows already
        (b"x\xef\xbf", b"\xbd\x80", "\ufffd"),
        ("▁".encode()[:1], "▁".encode()[1:], "▁"),  # spelled out, it is no blank
    ],
)
def test_byte_runs(tokenizer_of: TokenizerOf, prompt: bytes, output: bytes, text: str) -> None:
    tokenizer = tokenizer_of("gemma")
    prompt_ids, output_ids = byte_ids(tokenizer, prompt), byte_ids(tokenizer, output)
    assert DecodeReference(tokenizer).continuation(prompt_ids, output_ids, False) == text


def test_what_breaks_a_run(byte_fallback: Tokenizer) -> None:
    reference = DecodeReference(byte_fallback)
    first, second = byte_ids(byte_fallback, "é".encode())
    special, without_text = byte_fallback.token_to_id("<s>"), byte_fallback.token_to_id("")
    assert reference.decode([first, special, second], True) == "é"
    assert reference.decode([first, special, second], False) == "\ufffd<s>\ufffd"
    assert reference.decode([first, without_text, second], True) == "\ufffd\ufffd"
    assert reference.decode([first, 99999, second], False) == "é"


def test_first_blank_is_kept_behind_a_prompt(byte_fallback: Tokenizer) -> None:
    reference = DecodeReference(byte_fallback)
    ids = byte_fallback.encode("the dog").ids
    assert reference.decode(ids, True) == "the dog"
    assert reference.continuation(ids, ids, True) == " the dog"
    assert reference.continuation([byte_fallback.token_to_id("<s>")], ids, True) == "the dog"


@pytest.mark.parametrize(
    "kind",
    ["byte_level", "llama_2", "gemma", "metaspace_always", "word_piece", "word_end", "no_decoder"],
)
@settings(max_examples=60, deadline=None)
@given(data=st.data(), skip=st.booleans())
def test_it_is_decode_itself_where_no_run_is_broken(
    tokenizer_of: TokenizerOf, kind: str, data: st.DataObject, skip: bool
) -> None:
    tokenizer = tokenizer_of(kind)
    size = tokenizer.get_vocab_size()
    whole = [i for i in range(size) if byte_of_token(tokenizer.id_to_token(i) or "") is None]
    parts = st.sampled_from(whole).map(lambda token_id: [token_id])
    if kind in ("llama_2", "gemma"):
        spelled = [byte_ids(tokenizer, char.encode()) for char in "é▁你😀 "]
        parts |= st.sampled_from(spelled)
    prompt, output = data.draw(st.lists(parts, max_size=8)), data.draw(st.lists(parts, max_size=8))
    prompt_ids, output_ids = list(chain(*prompt)), list(chain(*output))
    before = tokenizer.decode(prompt_ids, skip_special_tokens=skip)
    text = tokenizer.decode(prompt_ids + output_ids, skip_special_tokens=skip)
    shared = commonprefix((before, text))  # noqa: RUF071 - it is characters that are meant
    reference = DecodeReference(tokenizer)
    assert reference.continuation(prompt_ids, output_ids, skip) == text[len(shared) :]


@given(token=st.text("<0x>+-aFgé ٣", min_size=5, max_size=6).map(lambda text: "<0x" + text[2:]))
def test_byte_tokens_are_those_of_the_decoder(token: str) -> None:
    made = decoders.ByteFallback().decode([token])
    byte = byte_of_token(token)
    if byte is None:
        assert made == token
    else:
        assert made == (chr(byte) if byte < 0x80 else "\ufffd")
