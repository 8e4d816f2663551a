"""The tokens of an answer's content are found by its events alone."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from slipstream.http.answers.content_tokens import content_tokens
from slipstream_ipc.messages import AnswerEvent, EventKind

CONTENT, REASONING, BEGINS, ARGUMENTS, ENDS = EventKind

# tokens of one part: pieces that may cut a character, delimiters of one token, blanks around
TEXT = st.text("ab é", min_size=1, max_size=6)


@st.composite
def parts(draw: st.DrawFn) -> tuple[list[bytes], list[AnswerEvent], list[bool]]:
    raws: list[bytes] = []
    events: list[AnswerEvent] = []
    expected: list[bool] = []
    for kind in draw(st.lists(st.sampled_from([CONTENT, REASONING, ARGUMENTS]), max_size=5)):
        text = draw(TEXT)
        encoded = text.encode()
        cuts = sorted(draw(st.sets(st.integers(1, len(encoded)), max_size=3)) | {len(encoded)})
        events.append(AnswerEvent(kind, text))
        for begin, end in zip([0, *cuts], cuts, strict=False):
            raws.append(encoded[begin:end])
            expected.append(kind == CONTENT)
        delimiter = draw(st.sampled_from([b"</abab>", b"<a>", b""]))
        raws.append(delimiter)
        expected.append(False)
    return raws, events, expected


@given(parts())
def test_they_are_found(found: tuple[list[bytes], list[AnswerEvent], list[bool]]) -> None:
    raws, events, expected = found
    assert content_tokens(raws, events) == expected


def test_a_token_counts_for_its_last_byte() -> None:
    raws = [b"hm", b"m<", b"/t>", b"\n\nThe", b" end<", b"call>", b"f"]
    events = [AnswerEvent(REASONING, "hmm"), AnswerEvent(CONTENT, "The end")]
    assert content_tokens(raws, events) == [False, False, False, True, False, False, False]


def test_rewritten_arguments_and_broken_characters_are_passed_over() -> None:
    raws = [b"yes\xff", b"<f>", b"<x>1</x>", b"</f>", b"then"]
    events = [
        AnswerEvent(CONTENT, "yes\ufffd"),
        AnswerEvent(BEGINS, "f"),
        AnswerEvent(ARGUMENTS, '{"x": 1}'),
        AnswerEvent(ENDS),
        AnswerEvent(CONTENT, "then"),
    ]
    assert content_tokens(raws, events) == [True, False, False, False, True]
