"""Detokenisers over compiled tables, under the rule of continuation, for every kind of decoder.

The oracle is `DecodeReference`: decode(prompt ids + output ids), less the beginning that it shares
with decode(prompt ids). It must be met for any ids at all, after every token.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.helpers.compiled_tables import BYTE_KINDS, KINDS, Compiled

from slipstream_worker.detokenizer.factory import Detokenizer, TableDetokenizerFactory

REPLACEMENT = "\ufffd"


def stream(detokenizer: Detokenizer, output_ids: Sequence[int]) -> str:
    return "".join([detokenizer.step(i) for i in output_ids]) + detokenizer.flush()


# Any ids


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=200, deadline=None)
@given(data=st.data(), skip=st.booleans())
def test_any_prompt_is_continued_with_any_output(
    compiled: Callable[[str], Compiled], kind: str, data: st.DataObject, skip: bool
) -> None:
    """After every token all is out but what `num_pending` says, and `flush` would bring that."""
    case = compiled(kind)
    ids = data.draw(case.any_ids)
    cut = data.draw(st.integers(0, len(ids)))
    prompt_ids, output_ids = ids[:cut], ids[cut:]
    detokenizer = case.create(prompt_ids, skip)
    assert not detokenizer.num_pending
    text = ""
    for count, token_id in enumerate(output_ids, 1):
        text += detokenizer.step(token_id)
        so_far = case.reference.continuation(prompt_ids, output_ids[:count], skip)
        assert so_far.startswith(text)
        pending = so_far[len(text) :]
        if kind == "byte_level":  # the U+FFFD of a character that the prompt began is the prompt's
            assert pending == (REPLACEMENT if pending else "")
            assert detokenizer.num_pending or not pending
        else:
            assert bool(detokenizer.num_pending) == bool(pending)
        ended = case.create(prompt_ids, skip)
        assert ended.step_many(output_ids[:count]) == text
        assert ended.flush() == pending
    text += detokenizer.flush()
    assert text == case.reference.continuation(prompt_ids, output_ids, skip)


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=100, deadline=None)
@given(data=st.data(), skip=st.booleans())
def test_text_does_not_depend_on_how_tokens_are_divided(
    compiled: Callable[[str], Compiled], kind: str, data: st.DataObject, skip: bool
) -> None:
    case = compiled(kind)
    prompt_ids, output_ids = data.draw(case.any_ids), data.draw(case.any_ids)
    one_by_one, mixed = case.create(prompt_ids, skip), case.create(prompt_ids, skip)
    at = 0
    while at < len(output_ids):
        length = data.draw(st.integers(0, 6), label="chunk, 0 for a step")
        chunk = output_ids[at : at + max(1, length)]
        text = mixed.step_many(chunk) if length else mixed.step(chunk[0])
        assert text == "".join([one_by_one.step(token_id) for token_id in chunk])
        assert mixed.num_pending == one_by_one.num_pending
        at += len(chunk)
    assert mixed.flush() == one_by_one.flush()


# Complaints, each by its name


@pytest.mark.parametrize("kind", BYTE_KINDS)
def test_character_split_over_tokens_comes_whole(
    compiled: Callable[[str], Compiled], kind: str
) -> None:
    case = compiled(kind)
    detokenizer = case.create()
    steps = [(detokenizer.step(i), detokenizer.num_pending) for i in case.spell("😀你".encode())]
    waits = [("", 1), ("", 2), ("", 3)]
    assert steps == [*waits, ("😀", 0), *waits[:2], ("你", 0)]
    assert detokenizer.flush() == ""


@pytest.mark.parametrize("kind", BYTE_KINDS)
def test_real_replacement_character_commits_at_once(
    compiled: Callable[[str], Compiled], kind: str
) -> None:
    case = compiled(kind)
    detokenizer = case.create()
    ids = case.spell(REPLACEMENT.encode())
    assert [detokenizer.step(i) for i in ids * 2] == ["", "", REPLACEMENT] * 2


@pytest.mark.parametrize("kind", BYTE_KINDS)
def test_broken_bytes_are_replaced_at_once(compiled: Callable[[str], Compiled], kind: str) -> None:
    case = compiled(kind)
    detokenizer = case.create()
    ids = case.spell(b"\x80\xe4a")
    assert [detokenizer.step(i) for i in ids] == [REPLACEMENT, "", f"{REPLACEMENT}a"]


@pytest.mark.parametrize("kind", BYTE_KINDS)
def test_half_a_surrogate_is_replaced_at_once(
    compiled: Callable[[str], Compiled], kind: str
) -> None:
    """No third byte makes a character of it, though Python's decoder waits for one."""
    case = compiled(kind)
    detokenizer = case.create()
    ids = case.spell(b"\xed\xa1")
    assert [detokenizer.step(i) for i in ids] == ["", REPLACEMENT * 2]
    assert stream(case.create(ids[:1]), ids[1:]) == REPLACEMENT


def test_a_stray_byte_does_not_take_back_the_characters_before_it(
    compiled: Callable[[str], Compiled],
) -> None:
    """decode makes U+FFFD of the whole run; 😀 has left long ago."""
    case = compiled("llama_2")
    ids = [*case.spell("😀".encode() + b"\xe4"), case.id_of("▁the")]
    assert stream(case.create(), ids) == f"😀{REPLACEMENT} the"


@pytest.mark.parametrize("kind", BYTE_KINDS)
@pytest.mark.parametrize("skip", [False, True])
def test_token_that_decodes_to_nothing(
    compiled: Callable[[str], Compiled], kind: str, skip: bool
) -> None:
    case = compiled(kind)
    hole = case.table.pieces.index(None)
    the = case.id_of("Ġthe" if kind == "byte_level" else "▁the")
    detokenizer = case.create([the, hole, 99999], skip)
    assert detokenizer.step(hole) == ""
    assert detokenizer.step(99999) == ""
    assert detokenizer.step_many([99999, hole]) == ""
    assert detokenizer.step(the) == " the"
    assert detokenizer.flush() == ""


def test_a_token_without_text_ends_a_run_of_bytes_and_no_token_does_not(
    compiled: Callable[[str], Compiled],
) -> None:
    case = compiled("llama_2")
    first, second = case.spell("é".encode())
    assert stream(case.create(), [first, case.id_of(""), second]) == REPLACEMENT * 2
    assert stream(case.create(), [first, case.table.pieces.index(None), second]) == "é"


@pytest.mark.parametrize("kind", BYTE_KINDS)
def test_pending_bytes_are_flushed_at_the_end(
    compiled: Callable[[str], Compiled], kind: str
) -> None:
    case = compiled(kind)
    detokenizer = case.create()
    assert detokenizer.step_many(case.spell("a你".encode()[:-1])) == "a"
    assert detokenizer.num_pending
    num_bytes = 1 if kind == "byte_level" else 2
    assert detokenizer.flush() == REPLACEMENT * num_bytes


@pytest.mark.parametrize("kind", BYTE_KINDS)
def test_special_token_between_two_halves_of_a_character(
    compiled: Callable[[str], Compiled], kind: str
) -> None:
    case = compiled(kind)
    first, second = case.spell("é".encode())
    ids = [first, case.id_of("<s>"), 99999, second]
    for cut in range(4):
        assert stream(case.create(ids[:cut], True), ids[cut:]) == "é"
    assert stream(case.create(skip=False), ids) == f"{REPLACEMENT}<s>{REPLACEMENT}"
    assert stream(case.create(ids[:3], skip=False), ids[3:]) == REPLACEMENT


def test_special_byte_token_is_skipped(compiled: Callable[[str], Compiled]) -> None:
    case = compiled("llama_2")
    first, second = case.spell("é".encode())
    special = (*case.table.special, first)
    factory = TableDetokenizerFactory(msgspec.structs.replace(case.table, special=special))
    for cut in (0, 1):
        prompt_ids, output_ids = [first][:cut], [first, second][cut:]
        assert stream(factory.create(prompt_ids, True), output_ids) == REPLACEMENT
        assert stream(factory.create(prompt_ids, False), output_ids) == "é"


@pytest.mark.parametrize("kind", KINDS)
def test_streams_of_one_table_skip_special_tokens_each_as_asked(
    compiled: Callable[[str], Compiled], kind: str
) -> None:
    case = compiled(kind)
    end = case.id_of("<|im_end|>")
    shown, skipped = case.create(skip=False), case.create(skip=True)
    assert [shown.step(end), skipped.step(end)] == ["<|im_end|>", ""]


@pytest.mark.parametrize("kind", BYTE_KINDS)
def test_prompt_ends_inside_a_character(compiled: Callable[[str], Compiled], kind: str) -> None:
    case = compiled(kind)
    ids = case.spell("x😀".encode())
    for cut in (2, 3, 4):
        assert stream(case.create(ids[:cut]), ids[cut:]) == "😀"


@pytest.mark.parametrize("kind", BYTE_KINDS)
def test_broken_character_of_the_prompt_is_not_doubled(
    compiled: Callable[[str], Compiled], kind: str
) -> None:
    case = compiled(kind)
    prompt_ids = case.spell("x😀".encode()[:-1])
    assert stream(case.create(prompt_ids), []) == ""
    assert stream(case.create(prompt_ids), case.spell(b"a")) == "a"


@pytest.mark.parametrize("kind", BYTE_KINDS)
def test_replacement_character_that_the_prompt_begins_is_not_doubled(
    compiled: Callable[[str], Compiled], kind: str
) -> None:
    case = compiled(kind)
    ids = case.spell(REPLACEMENT.encode() + b"a")
    assert stream(case.create(ids[:2]), ids[2:]) == "a"


@pytest.mark.parametrize("kind", ["llama_2", "metaspace_always"])
def test_the_first_blank_of_an_answer_is_kept(
    compiled: Callable[[str], Compiled], kind: str
) -> None:
    """decode(output ids) alone would cut it and glue two words together."""
    case = compiled(kind)
    ids = case.tokenizer.encode("the dog").ids
    end = case.id_of("</s>")
    assert stream(case.create(ids, True), ids) == " the dog"
    assert stream(case.create([*ids, *[end] * 40], True), ids) == " the dog"
    assert stream(case.create([end], True), ids) == "the dog"
    assert stream(case.create([], True), [end, *ids]) == "the dog"


def test_a_token_without_text_is_a_first_token_and_no_blank(
    compiled: Callable[[str], Compiled],
) -> None:
    case = compiled("llama_2")
    the, without_text = case.id_of("▁the"), case.id_of("")
    for cut in (0, 1):
        ids = [without_text, the, the]
        assert stream(case.create(ids[:cut]), ids[cut:]) == "the the"
    case = compiled("no_decoder")
    the, without_text = case.id_of("the"), case.id_of("")
    for cut in (0, 1):
        ids = [without_text, the]
        assert stream(case.create(ids[:cut]), ids[cut:]) == " the"


def test_two_blanks_are_cut_wherever_they_stand(compiled: Callable[[str], Compiled]) -> None:
    case = compiled("llama_2")
    factory = TableDetokenizerFactory(msgspec.structs.replace(case.table, num_stripped=2))
    blank, two, the = case.spell(b" ")[0], case.id_of("▁▁"), case.id_of("▁the")
    for ids, text in [
        ([two, the], " the"),
        ([blank, the], "the"),
        ([the, two], "the  "),
        ([blank, two, the], "  the"),
        ([blank, blank, blank], " "),
    ]:
        for cut in range(len(ids)):
            prompt_text = stream(factory.create([], False), ids[:cut])
            assert prompt_text + stream(factory.create(ids[:cut], False), ids[cut:]) == text


def test_a_prompt_of_a_broken_byte_ends_the_cutting_of_blanks(
    compiled: Callable[[str], Compiled],
) -> None:
    case = compiled("llama_2")
    assert stream(case.create(case.spell(b"\xe4")), [case.id_of("▁the")]) == " the"


def test_the_blank_behind_a_word_comes_with_the_next_word(
    compiled: Callable[[str], Compiled],
) -> None:
    case = compiled("word_end")
    word, both = case.id_of("the</w>"), case.id_of("a</w>b")
    detokenizer = case.create([word])
    steps = [(detokenizer.step(i), detokenizer.num_pending) for i in (word, word, both, word)]
    assert steps == [(" the", 0), (" the", 0), (" a", 1), (" bthe", 0)]
    assert detokenizer.flush() == ""
    assert stream(case.create([word]), [both]) == " ab"
    assert stream(case.create([both]), [word]) == " bthe"
    assert stream(case.create([both]), []) == ""


@pytest.mark.parametrize("kind", KINDS)
def test_only_the_ends_of_a_prompt_are_read(compiled: Callable[[str], Compiled], kind: str) -> None:
    """A long prompt costs no more than a short one."""

    class Prompt(list[int]):
        num_read = 0

        def __iter__(self):  # type: ignore[no-untyped-def]
            return self._counted(super().__iter__())

        def __reversed__(self):  # type: ignore[no-untyped-def]
            return self._counted(super().__reversed__())

        def _counted(self, ids):  # type: ignore[no-untyped-def]
            for token_id in ids:
                self.num_read += 1
                yield token_id

    case = compiled(kind)
    prompt = Prompt([case.id_of("t" if kind != "no_decoder" else "the")] * 10_000)
    case.factory.create(prompt, False)
    assert 0 < prompt.num_read <= 5
