"""What a prompt has of its answer: the text that the template writes behind the messages."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from slipstream_worker.tokenizer.open_turn import TEXT, ChatTexts, open_turn, split_at

LITERALS = ("<think>", "</think>", "<|call|>")
NASTY = st.lists(st.sampled_from([*LITERALS, "<", "think>", "a", "\n", "<|A|>"])).map("".join)


@given(NASTY, NASTY, st.sampled_from(["", "<|A|>", "<|A|>\n", "\n\n"]))
def test_an_introduction_ends_before_the_first_literal(closed, opened, introduction):
    """Whatever the messages say: they are in `closed`."""
    text = f"{closed}{introduction}<think>{opened}"
    assert open_turn(ChatTexts(text, closed, text), LITERALS) == f"<think>{opened}"
    without = closed + introduction
    assert open_turn(ChatTexts(without, closed, without), LITERALS) == ""


@given(NASTY, NASTY, st.sampled_from(["", "<think>\n", "<think>\n\n</think>\n\n"]))
def test_a_turn_that_goes_on_begins_behind_the_introduction(closed, turn, prefilled):
    prompted = f"{closed}<|B|>\n{prefilled}"
    texts = ChatTexts(f"{closed}<|B|>\n{turn}", closed, prompted)
    assert open_turn(texts, LITERALS) == (turn if texts.prompt != prompted else prefilled)


def test_a_template_may_end_a_chat_without_an_answer_otherwise():
    closed = "<|user|>hi<|end|><|endoftext|>"
    for opened in ("<think>", "<think>\n\n</think>"):
        for introduction in ("<|assistant|>", ""):
            text = f"<|user|>hi<|end|>{introduction}{opened}"
            assert open_turn(ChatTexts(text, closed, text, "hi"), LITERALS) == opened
            assert open_turn(ChatTexts(text, closed, text, ""), LITERALS) == ""


def test_what_differs_within_the_messages_is_no_open_turn():
    """A template that says before the messages whether it asks for an answer."""
    closed, text = "closed:<|user|><think>hi", "open:<|user|><think>hi<|assistant|>"
    assert open_turn(ChatTexts(text, closed, text, "<think>hi"), LITERALS) == ""


IDS = {"<think>": 5, "</think>": 6, "<|call|>": 7, "<|call|><think>": 8}


@given(NASTY)
def test_pieces_are_the_text(text):
    pieces = list(split_at(text, IDS))
    assert "".join(piece for _, piece in pieces) == text
    assert all(piece for _, piece in pieces)
    for token_id, piece in pieces:
        if token_id == TEXT:
            assert not any(literal in piece for literal in IDS)
        else:
            assert IDS[piece] == token_id


def test_the_longest_literal_counts():
    assert list(split_at("a<|call|><think>", IDS)) == [(TEXT, "a"), (8, "<|call|><think>")]
    assert list(split_at("a<think>", {})) == [(TEXT, "a<think>")]
