"""Where streams stop: what users of the peers ran into, and what ours get in its place.

Most of these need several tokens of a stream in one step. There that takes speculative decoding;
here a worker that fell behind is enough.
"""

from __future__ import annotations

import pytest
from tests.helpers.scripted import EOS, FILLER, Watch, catch_up, play, shown

PROMPT = (5, 6, 7)
BEFORE = 40  # tokens of filler: enough that the worker gets what follows in one step
X = "x" * BEFORE  # and their text


@pytest.fixture(scope="module")
def spell(tokenizer):
    """A text's tokens, one character at a time."""

    def spelled(text: str) -> list[int]:
        return [token_id for char in text for token_id in tokenizer.encode(char).ids]

    return spelled


def all_at_once(stack, ids, **params):
    """A stream whose worker gets what is behind the filler in one step, to its end."""
    client = stack.client()
    watch = Watch(client)
    it = client.submit(list(PROMPT), **params)
    stack.until(lambda: len(it.token_ids) > 3)
    batch = catch_up(stack, it, BEFORE + len(ids))
    assert ids == [token_id for token_id in batch if token_id != FILLER][: len(ids)]
    stack.until(lambda: it.is_over)
    assert watch.num_ends(it.submit.handle) == 1
    return it


@pytest.mark.parametrize("interval", [1, 4])
@pytest.mark.parametrize("include", [False, True])
def test_no_part_of_a_stop_string_leaks_vllm_57052_47616(
    make_stack, spell, interval, include
) -> None:
    """There text of the stop string went out before it was whole, or with it, whatever
    include_stop_str_in_output said; here also its ids wait, and a false beginning is let go."""
    stop = "</answer>"
    stack = play(make_stack, {PROMPT: spell(f"42 </ans 43 {stop} more")})
    client = stack.client()
    it = client.submit(
        list(PROMPT),
        max_tokens=60,
        stop=(stop,),
        include_stop_str_in_output=include,
        stream_interval=interval,
        logprobs=1,
    )
    states = shown(it, stack.until)
    whole = "42 </ans 43 " + (stop if include else "")
    assert (it.text, it.end.reason, it.end.stop_reason) == (whole, "stop", stop)
    begins = [stop[:n] for n in range(1, len(stop))]
    for text, num_tokens in states[:-1]:
        assert whole.startswith(text)
        assert not any(text.endswith(begin) for begin in begins)
        assert num_tokens <= len(spell(text)), "no id leaves before its text"
    assert it.token_ids == spell(whole)
    assert len(it.ranks) == it.end.num_tokens == len(it.token_ids)
    assert len(states) > 1


@pytest.mark.parametrize("interval", ["auto", 1, 4])
def test_a_stop_string_is_found_behind_any_number_of_false_beginnings_vllm_57052(
    make_stack, spell, interval
) -> None:
    """What one stream, or the one before it, has shown to be harmless does not end the search."""
    rest = [FILLER] * 12
    pieces = ["<a", "</answ", "<", "b<<", "</answer"]
    false = [token_id for piece in pieces for token_id in [*rest, *spell(piece), *rest]]
    stack = play(
        make_stack, {PROMPT: [*false, *spell("</answer>"), *rest]}, stream_interval=interval
    )
    client = stack.client()
    for _ in range(3):
        streams = [
            client.submit(list(PROMPT), max_tokens=400, stop=("</answer>",)) for _ in range(3)
        ]
        stack.until(lambda streams=streams: all(s.is_over for s in streams))
        assert {s.end.stop_reason for s in streams} == {"</answer>"}
        assert [s.token_ids for s in streams] == [false] * 3


@pytest.mark.parametrize("include", [False, True])
@pytest.mark.parametrize("first", ["string", "eos"])
def test_eos_and_stop_string_in_the_same_step_sglang_28802(
    make_stack, spell, first, include
) -> None:
    """There the one that came second in a step was named as the reason, and what lay between them
    was shown or lost."""
    ids = [*spell("ab<END>c"), EOS] if first == "string" else [*spell("ab"), EOS, *spell("c<END>")]
    stack = play(make_stack, {PROMPT: [*[FILLER] * BEFORE, *ids]})
    it = all_at_once(
        stack, ids, max_tokens=200, stop=("<END>",), include_stop_str_in_output=include
    )
    if first == "string":
        text = X + "ab" + ("<END>" if include else "")
        assert (it.end.reason, it.end.stop_reason) == ("stop", "<END>")
        assert it.token_ids == [*[FILLER] * BEFORE, *spell(text.removeprefix(X))]
    else:
        text = X + "ab"  # EOS is special, and skipped
        assert (it.end.reason, it.end.stop_reason) == ("stop", None)
        assert it.token_ids == [*[FILLER] * BEFORE, *spell("ab"), EOS]
    assert it.text == text


@pytest.mark.parametrize("first", ["string", "id"])
def test_stop_id_and_stop_string_in_the_same_step(make_stack, spell, first) -> None:
    """The same with an id that the request named: the earlier of the two is the end."""
    named = 777
    ids = [*spell("<END>"), named] if first == "string" else [named, *spell("<END>")]
    stack = play(make_stack, {PROMPT: [*[FILLER] * BEFORE, *ids]})
    it = all_at_once(stack, ids, max_tokens=200, stop=("<END>",), stop_token_ids=(named,))
    assert it.end.stop_reason == ("<END>" if first == "string" else named)
    assert it.text == X
    assert it.token_ids == [FILLER] * BEFORE + ([] if first == "string" else [named])


@pytest.mark.parametrize("kind", ["string", "id", "eos"])
@pytest.mark.parametrize("num_behind", [0, 1, 5])
def test_length_cap_masks_no_earlier_stop_sglang_31569(make_stack, spell, kind, num_behind) -> None:
    """There a step that brought the stop and then went over max_tokens ended with "length", and
    showed what came behind the stop."""
    stop = {"string": spell("<END>"), "id": [777], "eos": [EOS]}[kind]
    ids = [*spell("ab"), *stop, *spell("cdefg")[:num_behind]]
    stack = play(make_stack, {PROMPT: [*[FILLER] * BEFORE, *ids]})
    it = all_at_once(
        stack, ids, max_tokens=BEFORE + len(ids), stop=("<END>",), stop_token_ids=(777,)
    )
    assert it.end.reason == "stop"
    assert it.end.stop_reason == {"string": "<END>", "id": 777, "eos": None}[kind]
    assert it.text == X + "ab"
    assert it.token_ids == [
        *[FILLER] * BEFORE,
        *spell("ab"),
        *(stop if kind != "string" else []),
    ]


def test_a_stop_behind_the_length_cap_does_not_count_sglang_31569(make_stack, spell) -> None:
    """The other way round: the cap comes first, and half of a stop string before it is text."""
    stack = play(make_stack, {PROMPT: spell("ab<END>")})
    client = stack.client()
    it = client.submit(list(PROMPT), max_tokens=5, stop=("<END>",))
    stack.until(lambda: it.is_over)
    assert (it.end.reason, it.text, it.token_ids) == ("length", "ab<EN", spell("ab<EN"))


@pytest.mark.parametrize("is_late", [False, True])
@pytest.mark.parametrize(
    ("pieces", "stop", "text"),
    [
        (["S", "T", "O", "P"], "STOP", "a "),
        (["ST", "O", "P"], "STOP", "a "),
        (["w", "</", "s", ">", "y"], "</s>", "a w"),
        ([" generator", " yields"], "tor yi", "a  genera"),
        (["\n", "\n", "User", ":"], "\n\nUser:", "a "),
        (["é"], "é", "a "),  # whose tokens are half a character each
        (["😀", "!"], "😀!", "a "),
    ],
)
def test_stop_string_over_several_tokens_sglang_6511(
    make_stack, tokenizer, spell, pieces, stop, text, is_late
) -> None:
    """There a stop string that began in one token and ended in another was not found."""
    ids = [token_id for piece in pieces for token_id in tokenizer.encode(piece).ids]
    assert tokenizer.decode(ids).count(stop) == 1
    before = [FILLER] * BEFORE if is_late else []
    answer = [*before, *spell("a "), *ids]
    stack = play(make_stack, {PROMPT: answer})
    if is_late:
        it = all_at_once(stack, [*spell("a "), *ids], max_tokens=200, stop=(stop,))
        text = X + text
    else:
        client = stack.client()
        it = client.submit(list(PROMPT), max_tokens=200, stop=(stop,))
        stack.until(lambda: it.is_over)
    assert (it.text, it.end.stop_reason) == (text, stop)
    assert it.token_ids == answer[: it.end.num_tokens]
    assert tokenizer.decode(it.token_ids).startswith(text), "no token more than the text takes"
    assert not tokenizer.decode(it.token_ids[:-1]).startswith(text)


@pytest.mark.parametrize("detokenize", [True, False])
def test_eos_inside_several_tokens_of_one_step_ends_there_sglang_30291(
    make_stack, tokenizer, spell, detokenize
) -> None:
    """There the tokens behind an EOS were shown where they came with it in one step."""
    ids = [*spell("ab"), EOS, *spell("never"), EOS, *spell("shown")]
    stack = play(make_stack, {PROMPT: [*[FILLER] * BEFORE, *ids]}, grace_s=0.0)
    it = all_at_once(stack, ids, max_tokens=200, logprobs=2, detokenize=detokenize)
    assert it.text == (X + "ab" if detokenize else "")
    assert it.token_ids == [*[FILLER] * BEFORE, *spell("ab"), EOS]
    assert (it.end.reason, it.end.num_tokens) == ("stop", BEFORE + 3)
    assert len(it.ranks) == BEFORE + 3, "log-probabilities and usage end there, too"
    stack.until(stack.holds_nothing)


@pytest.mark.parametrize("ignore_eos", [False, True])
def test_ignored_eos_is_a_token_like_any_other(make_stack, spell, ignore_eos) -> None:
    """Of vLLM's tests: beside each other, one request stops at EOS and the other does not."""
    answer = [*spell("ab"), EOS, *spell("cd")]
    stack = play(make_stack, {PROMPT: answer})
    client = stack.client()
    it = client.submit(list(PROMPT), max_tokens=5, ignore_eos=ignore_eos)
    other = client.submit(list(PROMPT), max_tokens=5, ignore_eos=not ignore_eos)
    stack.until(lambda: it.is_over and other.is_over)
    stops, goes_on = (other, it) if ignore_eos else (it, other)
    assert (stops.text, stops.token_ids, stops.end.reason) == ("ab", answer[:3], "stop")
    assert (goes_on.text, goes_on.token_ids, goes_on.end.reason) == ("abcd", answer, "length")


@pytest.mark.parametrize("include", [False, True])
@pytest.mark.parametrize("kind", ["string", "id"])
def test_stop_included_or_not_with_logprobs_and_nothing_after_vllm(
    make_stack, tokenizer, spell, kind, include
) -> None:
    """Of vLLM's tests: text, ids, log-probabilities and count agree about where a stream ends."""
    named = tokenizer.encode("Q").ids[0]
    stop_ids = spell("<END>") if kind == "string" else [named]
    stack = play(make_stack, {PROMPT: [*spell("ab"), *stop_ids, *spell("after")]})
    client = stack.client()
    it = client.submit(
        list(PROMPT),
        max_tokens=60,
        logprobs=3,
        include_stop_str_in_output=include,
        stop=("<END>",) if kind == "string" else (),
        stop_token_ids=(named,) if kind == "id" else (),
    )
    stack.until(lambda: it.is_over)
    assert it.text == "ab" + (tokenizer.decode(stop_ids) if include else "")
    kept = [*spell("ab"), *(stop_ids if include or kind == "id" else [])]
    assert it.token_ids == kept
    assert len(it.ranks) == it.end.num_tokens == len(kept)


@pytest.mark.parametrize("kind", ["string", "id", "eos"])
@pytest.mark.parametrize("min_tokens", [0, 4, 12])
def test_min_tokens_with_stops_vllm(make_stack, tokenizer, spell, kind, min_tokens) -> None:
    """Of vLLM's tests: a stop under min_tokens is text or is not sampled; the next one counts."""
    stop_ids = {"string": spell("#"), "id": [777], "eos": [EOS]}[kind]
    answer = [*spell("ab"), *stop_ids, *spell("cdefghijklmn"), *stop_ids, *spell("o")]
    stack = play(make_stack, {PROMPT: answer})
    client = stack.client()
    it = client.submit(
        list(PROMPT), max_tokens=60, min_tokens=min_tokens, stop=("#",), stop_token_ids=(777,)
    )
    stack.until(lambda: it.is_over)
    assert it.end.reason == "stop"
    assert it.end.stop_reason == {"string": "#", "id": 777, "eos": None}[kind]
    if not min_tokens:
        assert it.text == "ab"
        return
    assert it.end.num_tokens >= min_tokens
    if kind == "string":
        assert it.text == "ab#cdefghijklmn"
    else:  # where it must not be sampled, the script goes on with what follows
        assert it.text == "abccdefghijklmn"
        assert it.token_ids.count(stop_ids[0]) == 1
