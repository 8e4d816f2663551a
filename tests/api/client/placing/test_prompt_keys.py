"""Keys of prompts: what keeps them over a conversation's turns, and what tells them apart."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import structs

from slipstream.client.placing.prompt_keys import PromptKey, chat_key, prompt_key, text_key
from slipstream.packed_prompts import packed
from slipstream_ipc.messages import ChatMessage, Submit, TemplateOptions
from slipstream_ipc.validation.media import media_item
from slipstream_ipc.validation.request_spec import root_digest

SYSTEM = ChatMessage("system", "You are kind.")
FIRST, SECOND, THIRD = [ChatMessage("user", text * 90) for text in ("first ", "second ", "third ")]
ANSWER, OTHER_ANSWER = [ChatMessage("assistant", text * 90) for text in ("yes ", "no ")]
TEXTS = st.text(max_size=3000)


def common(one: PromptKey, other: PromptKey) -> int:
    """How many beginnings two prompts share."""
    num = min(len(one.chain), len(other.chain))
    equal: list[bool] = (one.chain[:num] == other.chain[:num]).tolist()
    return equal.index(False) if False in equal else num


def test_the_first_key_stays_over_a_conversation() -> None:
    turns = [SYSTEM, FIRST, ANSWER, SECOND, OTHER_ANSWER, THIRD]
    keys = [chat_key(turns[:end], b"m") for end in (2, 4, 6)]
    assert len({key.first for key in keys}) == 1
    assert [key.num_continued for key in keys] == [0, 1, 2]
    assert keys[0].second is None
    assert keys[1].second == keys[2].second != keys[1].first


def test_a_tool_loop_continues_a_conversation_within_a_turn() -> None:
    call = ChatMessage("tool", "42")
    key = chat_key([SYSTEM, FIRST, ANSWER, call], b"m")
    assert (key.first, key.second) == (chat_key([SYSTEM, FIRST], b"m").first, None)
    assert key.num_continued == 1
    assert key.prompt_len - key.prior_len < 20 < key.prior_len


def test_the_prior_length_ends_with_the_last_answer() -> None:
    before = chat_key([SYSTEM, FIRST, ANSWER], b"m")
    after = chat_key([SYSTEM, FIRST, ANSWER, SECOND], b"m")
    assert after.prior_len == before.prompt_len
    assert before.prior_len == 0  # a last turn of the assistant is continued, not repeated


@pytest.mark.parametrize(
    "other",
    [
        chat_key([SYSTEM, SECOND], b"m"),
        chat_key([FIRST], b"m"),
        chat_key([SYSTEM, FIRST], b"another"),
        chat_key([SYSTEM, FIRST], b"m", TemplateOptions(tools="[]")),
        chat_key([SYSTEM, FIRST], b"m", TemplateOptions(kwargs="{}")),
        chat_key([ChatMessage("user", SYSTEM.content), FIRST], b"m"),
    ],
)
def test_what_a_prompt_depends_on_is_in_its_key(other: PromptKey) -> None:
    key = chat_key([SYSTEM, FIRST], b"m")
    assert key.first != other.first
    assert common(key, other) == 0


def test_a_given_key_replaces_the_first_turns() -> None:
    one = chat_key([SYSTEM, FIRST], b"m", prompt_cache_key="k")
    other = chat_key([SYSTEM, SECOND], b"m", prompt_cache_key="k")
    assert one.first == other.first != chat_key([SYSTEM, FIRST], b"m").first
    assert one.first != chat_key([SYSTEM, FIRST], b"m", prompt_cache_key="l").first
    assert one.first != chat_key([SYSTEM, FIRST], b"another", prompt_cache_key="k").first
    longer = [chat_key([FIRST, ANSWER, end], b"m", prompt_cache_key="k") for end in (SECOND, THIRD)]
    assert longer[0].first == longer[1].first == one.first
    assert longer[0].second != longer[1].second


def test_a_text_has_the_key_of_its_first_512_tokens() -> None:
    text = b"x" * 2048
    assert text_key(text + b"a", b"m").first == text_key(text + b"b", b"m").first
    assert text_key(text, b"m").first != text_key(text[:-1] + b"y", b"m").first
    assert text_key(text + b"a" * 2047, b"m").second is None
    assert text_key(text * 2 + b"a", b"m").second == text_key(text * 2 + b"b", b"m").second
    assert text_key(text, b"m").num_continued is None


def test_ids_and_texts_are_read_from_a_submit() -> None:
    def submit(**prompt: object) -> Submit:
        return Submit(1, b"i" * 16, b"", **prompt)  # type: ignore[arg-type]

    ids = np.arange(1000, dtype="<u4").tobytes()
    assert prompt_key(submit(token_ids=ids), "m").prompt_len == 1000
    assert prompt_key(submit(text="é" * 10), "m").prompt_len == 5
    assert prompt_key(submit(text=""), "m").prompt_len == 0
    salted = submit(messages=(SYSTEM, FIRST), cache_salt="s")
    chat = prompt_key(salted, "m", "k")
    same = chat_key([SYSTEM, FIRST], root_digest("m", salted), prompt_cache_key="k")
    assert chat.first == same.first
    others = submit(messages=(SYSTEM, FIRST)), structs.replace(salted, cache_salt="t")
    firsts = {prompt_key(each, model, "k").first for each in (salted, *others) for model in "mn"}
    assert len(firsts) == 6


def test_prompts_with_other_images_are_other_prompts() -> None:
    turn = ChatMessage("user", "What is it?", parts=(0, "What is it?"))
    firsts = set()
    for data in (b"one", b"another", b"one"):
        media = (media_item("image", data),)
        chat = Submit(1, b"i" * 16, b"", messages=(turn,), media=media)  # type: ignore[arg-type]
        ids = Submit(1, b"i" * 16, b"", token_ids=bytes(8), media=media)  # type: ignore[arg-type]
        firsts |= {prompt_key(each, "m").first for each in (chat, ids, packed(chat))}
    assert len(firsts) == 4


@given(TEXTS, TEXTS, TEXTS)
def test_texts_share_as_many_hashes_as_whole_chunks(start: str, one: str, other: str) -> None:
    bodies = [(start + end).encode() for end in (one, other)]
    keys = [text_key(body, b"m") for body in bodies]
    pairs = enumerate(zip(*bodies, strict=False))
    num_equal = next((at for at, (a, b) in pairs if a != b), min(map(len, bodies)))
    assert common(*keys) == num_equal // 512
    for key, body in zip(keys, bodies, strict=True):
        assert key.lengths.tolist() == [128 * depth for depth in range(1, len(body) // 512 + 1)]


def test_a_chain_has_a_bounded_length() -> None:
    key = text_key(bytes(8 * 2**20), b"m")
    assert len(key.chain) == len(key.lengths) == 512
    assert (np.diff(key.lengths[:64]) == 128).all()
    assert (np.diff(key.lengths[63:]) == 1024).all()


def test_another_process_has_the_same_keys() -> None:
    """Routers agree on homes without talking; Python's own hashes differ between processes."""
    code = (
        "from slipstream.client.placing.prompt_keys import chat_key\n"
        "from slipstream_ipc.messages import ChatMessage\n"
        "key = chat_key([ChatMessage('user', 'a'), ChatMessage('user', 'b')], b'm')\n"
        "print(key.first, key.second)"
    )
    printed = subprocess.run(
        [sys.executable, "-c", code], check=True, capture_output=True, text=True, timeout=60
    ).stdout
    key = chat_key([ChatMessage("user", "a"), ChatMessage("user", "b")], b"m")
    assert printed.split() == [str(key.first), str(key.second)]
