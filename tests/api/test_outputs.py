"""Columns to deltas and completions: what was packed is what is read, and joining loses nothing."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from slipstream.delta_batch import DeltaBatch, TokenLogprobs
from slipstream.delta_objects import items_of, read_in_c
from slipstream.outputs import (
    CompletionOutput,
    Delta,
    Logprob,
    RequestMetrics,
    RequestOutput,
    join,
    metrics_of,
    together,
)
from slipstream_ipc.columns import check_deltas, pack_f32, pack_u32
from slipstream_ipc.messages import Deltas, End, LogprobColumns

Token = tuple[int, list[tuple[int, float]], int]  # id, candidates (its own first), own rank


@st.composite
def entries(draw: st.DrawFn, width: int | None = None) -> tuple[int, list[Token]]:
    """The width of an entry's log-probabilities, and its tokens."""
    width = draw(st.integers(0, 4)) if width is None else width
    ids = st.integers(0, 2**32 - 1)
    values = st.floats(-50, 0, width=32)
    tokens = []
    for _ in range(draw(st.integers(0, 4))):
        candidates = draw(
            st.lists(
                st.tuples(ids, values), min_size=width, max_size=width, unique_by=lambda c: c[0]
            )
        )
        token_id = candidates[0][0] if width else draw(ids)
        tokens.append((token_id, candidates, draw(st.integers(1, 9))))
    return width, tokens


def message_of(batch: list[tuple[int, list[Token]]]) -> Deltas:
    """The Deltas that hold these entries, as compact as a worker would make them."""
    tokens = [token for _, of_entry in batch for token in of_entry]
    with_values = [token for width, of_entry in batch for token in of_entry if width]
    candidates = [each for token in with_values for each in token[1]]
    counts = [len(of_entry) for _, of_entry in batch]
    widths = [width for width, _ in batch]
    same = len(set(widths)) == 1
    zeros = pack_u32([0] * len(batch))
    message = Deltas(
        zeros,
        zeros,
        zeros,
        ["text"] * len(batch),
        pack_u32([token[0] for token in tokens]),
        b"" if set(counts) == {1} else pack_u32(counts),
        logprobs=LogprobColumns(
            widths[0] if same else 0,
            pack_f32([value for _, value in candidates]),
            pack_u32([token_id for token_id, _ in candidates]),
            pack_u32([token[2] for token in with_values]),
            b"" if same else pack_u32(widths),
        )
        if any(widths)
        else None,
    )
    check_deltas(message)
    return message


def expected_logprobs(width: int, tokens: list[Token]) -> list[TokenLogprobs] | None:
    if not width:
        return None
    return [
        {
            token_id: Logprob(value, own_rank if index == 0 else index, token_id)
            for index, (token_id, value) in enumerate(candidates)
        }
        for _, candidates, own_rank in tokens
    ]


@given(st.lists(entries(), min_size=1, max_size=5), st.data())
def test_every_entry_reads_back(batch: list[tuple[int, list[Token]]], data: st.DataObject) -> None:
    found = DeltaBatch(message_of(batch), {})
    for index, (width, tokens) in enumerate(batch):
        skip = data.draw(st.integers(0, len(tokens)))
        delta = Delta("text", found, index, skip)
        assert delta.token_ids == [token[0] for token in tokens[skip:]]
        assert delta.num_tokens == len(tokens) - skip
        assert delta.logprobs == expected_logprobs(width, tokens[skip:])


@given(st.lists(entries(), min_size=1, max_size=5), st.data())
def test_c_makes_the_objects_that_the_reference_makes(
    batch: list[tuple[int, list[Token]]], data: st.DataObject
) -> None:
    found = DeltaBatch(message_of(batch), {})
    read_in_c(Delta, DeltaBatch, Logprob)
    unread = DeltaBatch(found.message, {})
    for index, (_, tokens) in enumerate(batch):
        skip = data.draw(st.integers(0, len(tokens) + 1))
        ids, logprobs = found.token_ids(index, skip), found.logprobs(index, skip)
        assert (found.objects.token_ids(index, skip), ids) == (
            ids,
            Delta("", found, index, skip).token_ids,
        )
        assert Delta("", unread, index, skip).token_ids == ids
        for each in (
            found.objects.logprobs(index, skip),
            Delta("", found, index, skip).logprobs,
            Delta("", unread, index, skip).logprobs,
        ):
            assert each == logprobs
            assert [list(own) for own in each or ()] == [list(own) for own in logprobs or ()]


@given(st.lists(st.integers(0, 2**32 - 1), min_size=1, max_size=4))
def test_c_reads_a_plain_message_as_the_reference_does(ids: list[int]) -> None:
    """One token for each entry, without log-probabilities: no objects are made for the message."""
    found = DeltaBatch(message_of([(0, [(each, [], 1)]) for each in ids]), {})
    read_in_c(Delta, DeltaBatch, Logprob)
    found._objects = None
    for entry, each in enumerate(ids):
        delta = Delta("", found, entry)
        assert (delta.token_ids, delta.logprobs) == ([each], None)
        assert delta.token_ids is not delta.token_ids
    assert found._objects is None
    assert Delta("", found, 0, 1).token_ids == found.token_ids(0, 1) == []
    for entry in (len(ids), -1, 2**70):
        with pytest.raises((IndexError, OverflowError)):
            _ = Delta("", found, entry).token_ids


@given(st.lists(st.text(max_size=3), max_size=300), st.integers(0, 400))
def test_c_makes_the_deltas_that_the_reference_makes(texts: list[str], num_taken: int) -> None:
    batch = DeltaBatch(message_of([(0, [(7, [], 1)])] * len(texts)), {}) if texts else None
    indices = [2 * at for at in range(len(texts))]
    found = items_of(Delta)(indices, texts, batch)
    kept = []
    for (index, delta), at in zip(found, range(min(num_taken, len(texts))), strict=False):
        assert (index, delta.text, delta._batch, delta._entry) == (2 * at, texts[at], batch, at)
        assert delta._skip == 0
        assert delta.token_ids == [7]
        kept.append(delta)
    del found
    pairs = list(items_of(Delta)(indices, texts, batch))  # each a tuple of its own
    assert [(index, delta.text) for index, delta in pairs] == list(zip(indices, texts, strict=True))
    assert all(type(delta) is Delta for _, delta in pairs)
    assert [each.text for each in kept] == texts[: len(kept)]


def test_deltas_need_an_index_each() -> None:
    with pytest.raises(ValueError):
        list(items_of(Delta)([1], ["a", "b"], None))


def test_classes_of_another_layout_are_made_by_their_call() -> None:
    class Other(Delta, frozen=True, gc=False, eq=False):
        more: int = 7

    batch = DeltaBatch(message_of([(0, [(7, [], 1)])]), {})
    ((index, delta),) = items_of(Other)([5], ["a"], batch)
    assert (index, delta.text, delta.more, delta._entry) == (5, "a", 7, 0)


ONE = pack_u32([1])
WRONG_COLUMNS = [
    (1, b"", b"", 0, b"", b"", b"", b""),
    (1, ONE + b"1", b"", 0, b"", b"", b"", b""),
    (1, ONE, pack_u32([2]), 0, b"", b"", b"", b""),
    (2, ONE, ONE, 0, b"", b"", b"", b""),
    (1, ONE, b"", 1, ONE, b"", ONE, b""),
    (1, ONE, b"", 1, ONE, ONE, b"", b""),
    (1, ONE, b"", 2, ONE, ONE, ONE, b""),
    (1, ONE, b"", 0, ONE, ONE, ONE, pack_u32([2])),
    (2, ONE + ONE, b"", 0, ONE, ONE, ONE, ONE),
    (1, b"", pack_u32([2**32 - 1]), 0, b"", b"", b"", pack_u32([2**32 - 1])),
    (-1, b"", b"", 0, b"", b"", b"", b""),
    (1, ONE, b"", -1, b"", b"", b"", b""),
]


@pytest.mark.parametrize("columns", WRONG_COLUMNS)
def test_columns_that_do_not_fit_are_no_objects(columns: tuple[object, ...]) -> None:
    objects = DeltaBatch(message_of([(1, [(5, [(5, -1.0)], 1)])]), {}).objects
    for entry, skip in ((1, 0), (-1, 0), (0, -1), (2**70, 0)):
        for make in (objects.token_ids, objects.logprobs):
            with pytest.raises((IndexError, OverflowError)):
                make(entry, skip)
    with pytest.raises(ValueError, match=r"columns|range|fit"):
        type(objects)(*columns, Logprob)
    with pytest.raises(TypeError):
        type(objects)(1, "a", b"", 0, b"", b"", b"", b"", Logprob)


@given(st.integers(0, 4), st.data())
def test_join_says_what_its_parts_say(width: int, data: st.DataObject) -> None:
    parts = data.draw(st.lists(entries(width), max_size=5))
    others = data.draw(st.lists(entries(), min_size=1, max_size=2))
    end = End("stop", 9, stop_reason="x")
    deltas = []
    for index, part in enumerate(parts):
        ends = {1: end} if index == len(parts) - 1 else {}
        deltas.append(
            Delta(f"<{index}>", DeltaBatch(message_of([others[0], part, *others[1:]]), ends), 1)
        )
    cut = data.draw(st.integers(0, len(parts)))
    whole = join([join(deltas[:cut]), *deltas[cut:]])
    tokens = [token for _, of_part in parts for token in of_part]
    assert whole.text == "".join(f"<{index}>" for index in range(len(parts)))
    assert whole.token_ids == [token[0] for token in tokens]
    assert whole.logprobs == (expected_logprobs(width, tokens) if tokens else None)
    assert whole.finish_reason == ("stop" if parts else None)
    assert whole.stop_reason == ("x" if parts else None)


def test_sampled_token_comes_first_and_keeps_its_rank() -> None:
    candidates = [(7, -2.0), (5, -0.5), (7, -2.0)]  # sampled: 7, which is the second most likely
    batch = DeltaBatch(message_of([(3, [(7, candidates, 2)])]), {})
    logprobs = Delta("text", batch, 0).logprobs
    assert logprobs == [{7: Logprob(-2.0, 2, 7), 5: Logprob(-0.5, 1, 5)}]
    assert list(logprobs[0]) == [7, 5]


def test_delta_shows_what_it_says() -> None:
    batch = DeltaBatch(message_of([(0, [(5, [], 1)])]), {0: End("length", 1)})
    assert repr(Delta("a", batch, 0)) == "Delta(text='a', token_ids=[5], finish_reason='length')"


def test_completion_reads_like_its_delta() -> None:
    batch = DeltaBatch(message_of([(1, [(5, [(5, -1.0)], 1)])]), {0: End("stop", 1, stop_reason=5)})
    completion = RequestOutput("a", Delta("a", batch, 0), "id", "label", pack_u32(np.arange(3)))
    assert completion.token_ids == [5]
    assert completion.num_tokens == 1
    assert completion.logprobs == [{5: Logprob(-1.0, 1, 5)}]
    assert (completion.finish_reason, completion.stop_reason) == ("stop", 5)
    assert completion.prompt_token_ids == [0, 1, 2]
    assert repr(completion) == (
        "RequestOutput(request_id='id', prompt=None, prompt_token_ids=[0, 1, 2], "
        f"prompt_logprobs=None, outputs={completion.outputs!r}, finished=True, metrics=None)"
    )


def test_an_output_says_how_much_of_its_prompt_was_cached() -> None:
    end = End("stop", 1, num_cached_tokens=16)
    batch = DeltaBatch(message_of([(0, [(5, [], 1)])]), {0: end})
    for whole in (Delta("a", batch, 0), join([Delta("a", batch, 0)]), join([], end)):
        assert RequestOutput("a", whole, "1", "", b"").num_cached_tokens == 16
    assert RequestOutput("", join([]), "1", "", b"").num_cached_tokens is None


def test_an_output_has_vllms_shape_whoever_asked() -> None:
    batch = DeltaBatch(message_of([(1, [(5, [(5, -1.0)], 1)])]), {0: End("stop", 1, stop_reason=5)})
    whole = Delta("a", batch, 0)
    other = RequestOutput("b", Delta("b", batch, 0), "2", "", b"")
    output = RequestOutput("a", whole, "1", "label", b"", (other,), prompt="say a")
    assert (output.request_id, output.prompt, output.finished) == ("1", "say a", True)
    first, second = output.outputs
    assert (first.index, first.text, second.index, second.text) == (0, "a", 1, "b")
    assert (first.token_ids, first.num_tokens, first.logprobs) == ([5], 1, whole.logprobs)
    assert (first.finish_reason, first.stop_reason) == ("stop", 5)
    assert first == CompletionOutput("a", whole, 0)
    assert first != second
    assert repr(first).startswith(
        "CompletionOutput(index=0, text='a', token_ids=[5], cumulative_logprob=-1.0, logprobs=[{5: "
    )
    assert repr(output).count("CompletionOutput(") == 2


@given(st.integers(1, 4), st.data())
def test_the_cumulative_logprob_is_that_of_the_tokens_themselves(
    width: int, data: st.DataObject
) -> None:
    _, tokens = data.draw(entries(width))
    batch = DeltaBatch(message_of([(width, tokens)]), {})
    answer = CompletionOutput("text", Delta("text", batch, 0), 0)
    expected = sum(candidates[0][1] for _, candidates, _ in tokens)
    found = answer.cumulative_logprob
    assert (found is None) == (not tokens)
    assert not tokens or found == pytest.approx(expected)


def test_a_joined_delta_has_the_times_of_its_first_and_last_token() -> None:
    parts = [[], [(5, [], 1)], [(6, [], 1)], []]  # tokens; none in the first and the last
    deltas = [
        Delta("", DeltaBatch(message_of([(0, tokens)]), {}, at=10.0 + index), 0)
        for index, tokens in enumerate(parts)
    ]
    for whole in (join(deltas), join([join(deltas[:3]), deltas[3]])):
        metrics = metrics_of(whole, submitted_at=9.0, monotonic_zero=1000.0)
        assert metrics == RequestMetrics(1009.0, 1011.0, 1013.0)
    nothing = metrics_of(deltas[0], submitted_at=9.0, monotonic_zero=1000.0)
    assert nothing.first_token_time is None


def test_metrics_of_several_answers_cover_all_of_them() -> None:
    batch = DeltaBatch(message_of([(0, [(5, [], 1)])]), {0: End("stop", 1)})
    first, second = (
        RequestOutput("a", Delta("a", batch, 0), "1", "", b"", metrics=RequestMetrics(*times))
        for times in ((1.0, 3.0, 4.0), (2.0, None, 5.0))
    )
    assert together([first, second]).metrics == RequestMetrics(1.0, 3.0, 5.0)
    assert together([second]).metrics == second.metrics
    assert together([first, replace(second, metrics=None)]).metrics is None
