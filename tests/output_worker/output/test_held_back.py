"""Nothing is held back that no later token can change: neither text nor the tokens that made it.

The oracle tries what may follow: what has left is the beginning that all texts share which may
come of it. Tokens leave with their text, so those before the last that brought text have left too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import chain
from os.path import commonprefix

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

# a fixture
from tests.helpers.admits import admit_of
from tests.helpers.compiled_tables import BYTE_KINDS, KINDS, Compiled

from slipstream_ipc.columns import pack_u32
from slipstream_ipc.messages import SamplingParams
from slipstream_worker.clients import deltas
from slipstream_worker.detokenizer import window
from slipstream_worker.detokenizer.factory import Detokenizer, TableDetokenizerFactory
from slipstream_worker.detokenizer.table import TokenTable
from slipstream_worker.detokenizer.window import WindowDetokenizerFactory
from slipstream_worker.output.stop_strings import StopStrings
from slipstream_worker.output.stream_output import StopCriteria, StreamOutput
from slipstream_worker.streams.stream import Reader, Stage, WorkerStream
from slipstream_worker.streams.stream_columns import StreamColumns

FOREVER = 2**30
MAX_PENDING = window._MAX_PENDING
REPLACEMENT = "\ufffd"
HALF, WHOLE = 0, 1
FACTORY = TableDetokenizerFactory(TokenTable("bytelevel", (b" \xe4\xb8", b"a"), ()))
# what can follow the beginnings of characters, and complete them or not
LATER_BYTES = [
    bytes([first]) + b"\x80" * num for first in b"\x80\x8f\x90\x9f\xa0\xbf" for num in range(3)
]


def output_of(detokenizer: Detokenizer, stops: Sequence[str] = ()) -> StreamOutput:
    matcher = StopStrings(stops) if stops else None
    return StreamOutput(detokenizer, matcher, StopCriteria())


def text_of(output: StreamOutput) -> str:
    start = output.log.find(0, 0)
    assert start is not None
    return output.log.text_between(start, output.log.end)


def shared_beginning(texts: Iterator[str]) -> str:
    return commonprefix(list(texts))  # noqa: RUF071 - it is characters that are meant


# ---- what was seen -----------------------------------------------------------------------------


@pytest.mark.parametrize("stops", [(), ("never",), ("  ",)])
def test_a_blank_and_two_bytes_of_a_character_again_and_again(stops: tuple[str, ...]) -> None:
    """A greedy model of random weights said it 82 times: all of them came as one."""
    output = output_of(FACTORY.create([WHOLE], False), stops)
    for count in range(1, 83):
        output.push([HALF])
        # the last one waits for its third byte; the one before it for what is held of its text
        assert output.log.num_tokens == max(0, count - (2 if stops == ("  ",) else 1))
        blank = "" if stops == ("  ",) else " "
        assert text_of(output) == f" {REPLACEMENT}" * (count - 1) + blank


def test_its_reader_gets_each_of_them() -> None:
    columns = StreamColumns(FACTORY.fast_table)
    stream = WorkerStream(bytes(16), Stage.RUNNING)
    admit = admit_of(bytes(16), pack_u32([WHOLE]), SamplingParams(), (), 0, FOREVER)
    stream.output = output_of(FACTORY.create([WHOLE], False))
    stream.reader = Reader(b"client", 1)
    columns.open(stream, admit)
    for count, token_id in enumerate([WHOLE] * 3 + [HALF] * 82, 1):
        stream.output.push([token_id])
        assert deltas.is_due(stream), count
        stream.reader.cursor = stream.output.log.end
        assert not deltas.is_due(stream)


@pytest.mark.parametrize("interval", [2, 5])
def test_text_of_an_unfinished_token_counts_as_that_token(interval: int) -> None:
    stream = WorkerStream(bytes(16), Stage.RUNNING, interval=interval)
    stream.output = output_of(FACTORY.create([WHOLE], False))
    stream.reader = Reader(b"client", 1)
    num_tokens = []
    for token_id in [WHOLE, WHOLE, *[HALF] * 20]:
        stream.output.push([token_id])
        if deltas.is_due(stream):
            stream.reader.cursor = stream.output.log.end
            num_tokens.append(stream.reader.cursor.num_tokens)
    begins = [0, *num_tokens]
    assert max(end - begin for begin, end in zip(begins, num_tokens, strict=False)) <= interval
    assert len(num_tokens) <= 1 + 22 / (interval - 1)


# ---- any tokens --------------------------------------------------------------------------------


def continuations(case: Compiled, kind: str) -> list[list[int]]:
    """What may follow: nothing, a text, bytes of all kinds, a token that ends a run."""
    texts = ("", "a", " the", "the")
    found = [case.tokenizer.encode(text, add_special_tokens=False).ids for text in texts]
    if kind in BYTE_KINDS:
        found += [case.spell(data) for data in (b"a", *LATER_BYTES)]
    return found


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=60, deadline=None)
@given(data=st.data(), skip=st.booleans())
def test_what_has_left_is_what_all_continuations_share(
    compiled: Callable[[str], Compiled], kind: str, data: st.DataObject, skip: bool
) -> None:
    case = compiled(kind)
    ids = data.draw(case.any_ids)[:12]
    cut = data.draw(st.integers(0, min(3, len(ids))))
    prompt_ids, output_ids = ids[:cut], ids[cut:]
    output = output_of(case.create(prompt_ids, skip))
    before = ""
    for count, token_id in enumerate(output_ids, 1):
        output.push([token_id])
        may_come = (
            case.reference.continuation(prompt_ids, [*output_ids[:count], *more], skip)
            for more in continuations(case, kind)
        )
        text = text_of(output)
        assert text == shared_beginning(may_come)
        if text != before:
            assert output.log.num_tokens >= count - 1
        before = text


def stopped(text: str, stops: Sequence[str]) -> str:
    """Up to the first stop string: the one that ends first, the longest of these."""
    for end in range(1, len(text) + 1):
        found = [stop for stop in stops if text[:end].endswith(stop)]
        if found:
            return text[: end - max(map(len, found))]
    return text


@pytest.mark.parametrize("kind", BYTE_KINDS)
@settings(max_examples=60, deadline=None)
@given(data=st.data(), skip=st.booleans())
def test_what_has_left_of_a_text_that_may_stop(
    compiled: Callable[[str], Compiled], kind: str, data: st.DataObject, skip: bool
) -> None:
    """What a stop string holds back is looked at again when the character behind it is whole."""
    case = compiled(kind)
    stops = data.draw(
        st.lists(st.text("ab é\ufffd", min_size=1, max_size=3), min_size=1, max_size=2).filter(
            # one that holds another before its end counts where `min_tokens` let that one pass
            lambda stops: not any(one in other[:-1] for one in stops for other in stops)
        )
    )
    parts = [[i] for i in case.spell(b"ab \xc3\xa9\xe4\xb8\xf0")]
    parts += [case.spell("é".encode())]
    ids = list(chain(*data.draw(st.lists(st.sampled_from(parts), max_size=10))))
    prompt_ids = case.tokenizer.encode("the", add_special_tokens=False).ids
    rests = [case.spell(stop[begin:].encode()) for stop in stops for begin in range(len(stop))]
    # a character's last byte, then the rest of a stop string
    rests += [case.spell(data) for data in LATER_BYTES] + [
        case.spell(data + stop[begin:].encode())
        for data in (b"\x80", b"\xa9", b"\x80\x80")
        for stop in stops
        for begin in range(len(stop))
    ]
    rests += continuations(case, kind)
    detokenizer = case.create(prompt_ids, skip)
    output = output_of(detokenizer, stops)
    for count, token_id in enumerate(ids, 1):
        output.push([token_id])
        may_come = (
            stopped(case.reference.continuation(prompt_ids, [*ids[:count], *more], skip), stops)
            for more in rests
        )
        if output.end is not None:
            break
        whole, text = shared_beginning(may_come), text_of(output)
        assert whole.startswith(text)
        assert text == whole or detokenizer.num_pending
        assert len(whole) - len(text) < max(map(len, stops))


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind not in ("llama_2", "gemma")])
@settings(max_examples=60, deadline=None)
@given(data=st.data(), skip=st.booleans())
def test_what_has_left_of_a_window(
    compiled: Callable[[str], Compiled], kind: str, data: st.DataObject, skip: bool
) -> None:
    """Where bytes are joined a U+FFFD at the end may be half a character, or a whole one: it is
    held back, and nothing before it, until as many tokens wait as a window holds. Of runs of byte
    tokens decode takes back what it showed."""
    case = compiled(kind)
    # a word's end within a token is a blank once another token follows: decode takes back "ab"
    taken_back = {case.tokenizer.token_to_id("a</w>b")}
    ids = [each for each in data.draw(case.any_ids) if each not in taken_back][:12]
    prompt_ids = case.tokenizer.encode("the", add_special_tokens=False).ids
    factory = WindowDetokenizerFactory(case.tokenizer.to_str().encode())
    detokenizer = factory.create(prompt_ids, skip)
    output = output_of(detokenizer)
    for count, token_id in enumerate(ids, 1):
        if len(detokenizer._pending) == MAX_PENDING - 1:
            break
        output.push([token_id])
        may_come = (
            case.reference.continuation(prompt_ids, [*ids[:count], *more], skip)
            for more in continuations(case, kind)
        )
        whole = shared_beginning(may_come)
        assert whole.startswith(text_of(output))
        assert text_of(output).rstrip(REPLACEMENT) == whole.rstrip(REPLACEMENT)


@pytest.mark.parametrize("kind", BYTE_KINDS)
def test_tokens_that_are_skipped_do_not_fill_a_window(
    compiled: Callable[[str], Compiled], kind: str
) -> None:
    """They wait with the half of a character that is before them, however many they are."""
    case = compiled(kind)
    added = case.tokenizer.get_added_tokens_decoder()
    special = next(each for each, token in added.items() if token.special)
    begin, end = case.spell(b"\xc3"), case.spell(b"\xa9")
    factory = WindowDetokenizerFactory(case.tokenizer.to_str().encode())
    detokenizer = factory.create([], True)
    output = output_of(detokenizer)
    output.push([special])
    assert detokenizer.num_pending == 0
    output.push(begin)
    for count in range(1, 3 * MAX_PENDING):
        output.push([special])
        assert text_of(output) == ""
        assert detokenizer.num_pending == len(begin) + count
    output.push(end)
    assert text_of(output) == "é"
    assert detokenizer.num_pending == 0
