"""Tokens to text: what users of the peers ran into, and what ours get in its place.

Each runs through a whole stack, with a compiled table and with the window, the slow way that
decoders without a table take.
"""

from __future__ import annotations

from itertools import pairwise

import pytest
from tests.helpers.scripted import EOS, FILLER, Watch, catch_up, play, shown

from slipstream.demo_model import MODEL_PATH
from slipstream_worker.detokenizer.factory import WindowDetokenizerFactory
from slipstream_worker.detokenizer.window import WindowDetokenizer

PROMPT = (5, 6, 7)
REPLACEMENT = "\ufffd"


@pytest.fixture(params=["table", "window"])
def settings(request, detokenizers) -> dict[str, object]:
    if request.param == "table":
        return {"detokenizers": detokenizers}
    return {"detokenizers": WindowDetokenizerFactory((MODEL_PATH / "tokenizer.json").read_bytes())}


@pytest.fixture(scope="module")
def encode(tokenizer):
    return lambda text: tokenizer.encode(text).ids


def read(stack, **params):
    """One stream to its end, and every state that its reader saw."""
    it = stack.client().submit(list(PROMPT), **params)
    return it, shown(it, stack.until)


@pytest.mark.parametrize("interval", [1, 3])
@pytest.mark.parametrize("text", ["a😀b", "你好, 世界", "é", "👩‍👩‍👧‍👦 und 🇪🇺", "naïve Ω ≈ ç"])
def test_no_half_characters_in_streams(make_stack, encode, settings, text, interval) -> None:
    """In every peer a character of several tokens once came as U+FFFD, or as U+FFFD and itself."""
    ids = encode(text)
    stack = play(make_stack, {PROMPT: ids}, **settings)
    it, states = read(stack, max_tokens=len(ids), stream_interval=interval, logprobs=0)
    assert (it.text, it.token_ids, len(it.ranks)) == (text, ids, len(ids))
    for seen, num_tokens in states:
        assert text.startswith(seen)
        assert num_tokens <= len(encode(seen)), "a character's ids do not leave before it"


def test_a_character_that_never_ends_is_shown_as_broken_and_is_not_lost(
    make_stack, encode, settings
) -> None:
    """The tail, in the middle of which the length cap falls: its ids are there, and one U+FFFD."""
    ids = [*encode("ab"), *encode("😀")[:3]]
    stack = play(make_stack, {PROMPT: ids}, **settings)
    it, states = read(stack, max_tokens=len(ids))
    assert (it.text, it.token_ids) == ("ab" + REPLACEMENT, ids)
    assert all(REPLACEMENT not in seen for seen, _ in states[:-1])


@pytest.mark.parametrize("is_late", [False, True])
def test_offsets_never_retreat_sglang_31598(
    make_stack, encode, tokenizer, settings, is_late
) -> None:
    """There "A 世", an unfinished character and "ab" came as "A 世世ab": what had been sent was
    counted anew from text in which it was shorter."""
    text = "A 世é 世ab 世 é世" * 3
    ids = [token_id for char in text for token_id in encode(char)]
    before = [FILLER] * 40 if is_late else []
    stack = play(make_stack, {PROMPT: [*before, *ids]}, **settings)
    client = stack.client()
    watch = Watch(client)
    it = client.submit(list(PROMPT), max_tokens=len(before) + len(ids))
    if is_late:
        stack.until(lambda: len(it.token_ids) > 3)
        assert len(catch_up(stack, it, len(before) + 20)) > 10
    states = shown(it, stack.until)
    assert it.text == "x" * len(before) + text
    for (seen, num_seen), (more, num_more) in pairwise(states):
        assert more.startswith(seen)
        assert num_more >= num_seen
    assert "".join(text for text, _ in watch.of(it.submit.handle)) == it.text


def test_real_replacement_character_commits_sglang_34740_20154(
    make_stack, encode, settings
) -> None:
    """There U+FFFD that the model itself wrote was taken for an unfinished character: it was never
    sent, and each further token decoded all of them again."""
    num = 60
    ids = encode(REPLACEMENT) * num
    stack = play(make_stack, {PROMPT: ids}, **settings)
    it, states = read(stack, max_tokens=len(ids))
    assert it.token_ids == ids
    assert set(it.text) == {REPLACEMENT}
    chars = [0, *[len(text) for text, _ in states]]
    assert max(after - before for before, after in pairwise(chars)) < num / 4
    if isinstance(settings["detokenizers"], WindowDetokenizerFactory):
        # in a row of them, it may decode some more or fewer; their ids wait until there is an end
        assert num / 2 < len(it.text) < 2 * num
    else:
        assert it.text == REPLACEMENT * num
        sent = [0, *[num_tokens for _, num_tokens in states]]
        assert max(after - before for before, after in pairwise(sent)) < len(ids) / 4


def test_decoding_replacement_characters_is_not_quadratic_sglang_34740_20154(
    make_stack, encode, monkeypatch
) -> None:
    """The cost of the above: token ids that are decoded, all in all, for each token of a stream."""
    num_decoded = 0
    decode = WindowDetokenizer._decode

    def count(self, token_ids):
        nonlocal num_decoded
        num_decoded += len(token_ids)
        return decode(self, token_ids)

    monkeypatch.setattr(WindowDetokenizer, "_decode", count)
    factory = WindowDetokenizerFactory((MODEL_PATH / "tokenizer.json").read_bytes())
    costs = []
    for num in (40, 120):
        ids = encode(REPLACEMENT) * num
        stack = play(make_stack, {PROMPT: ids}, detokenizers=factory)
        num_decoded = 0
        it, _ = read(stack, max_tokens=len(ids))
        assert it.end.num_tokens == len(ids)
        costs.append(num_decoded / len(ids))
    assert costs[1] < 1.2 * costs[0]


@pytest.mark.parametrize("interval", [1, 7])
def test_tokens_that_decode_to_nothing_sglang_8031_13275(
    make_stack, encode, tokenizer, settings, interval
) -> None:
    """There a stream of such tokens stood still, or failed: here their ids come, text goes on
    behind them, and the end comes though the last ones say nothing."""
    special, unknown = 2, 4500  # skipped, and not in the vocabulary
    silent = [special, unknown] * 10
    ids = [*silent, *encode("one"), *silent, *encode(" two é"), *silent]
    stack = play(make_stack, {PROMPT: ids}, vocab_size=5000, **settings)
    it, _ = read(stack, max_tokens=len(ids), stream_interval=interval, logprobs=0)
    assert it.text == "one two é"
    assert it.token_ids == ids
    assert len(it.ranks) == it.end.num_tokens == len(ids)


def test_a_stream_of_nothing_but_silent_tokens_ends_sglang_8031_13275(make_stack, settings) -> None:
    """The same without any text at all, which no delta ever carries."""
    stack = play(make_stack, {PROMPT: [2, 3] * 20 + [EOS]}, **settings)
    it, states = read(stack, max_tokens=200, stop=("x",))
    assert (it.text, it.end.reason, it.end.num_tokens) == ("", "stop", 41)
    assert len(states) > 2, "its ids stream all the same"


def test_mixed_skip_special_tokens_in_one_batch_sglang_11944(
    make_stack, encode, tokenizer, settings
) -> None:
    """There one request's skip_special_tokens was applied to all that were decoded with it."""
    ids = [*encode("a"), 3, *encode("b"), 4, *encode("c")]
    stack = play(make_stack, {(*PROMPT, n): ids for n in range(9)}, **settings)
    client = stack.client()
    ways = [
        {"skip_special_tokens": True},
        {"skip_special_tokens": False},
        {"detokenize": False},
    ]
    streams = [client.submit([*PROMPT, n], max_tokens=len(ids), **ways[n % 3]) for n in range(9)]
    stack.until(lambda: all(s.is_over for s in streams))
    texts = ["abc", tokenizer.decode(ids, skip_special_tokens=False), ""]
    assert texts[1] == "a<|user|>b<|assistant|>c"
    assert [s.text for s in streams] == texts * 3
    assert [s.token_ids for s in streams] == [ids] * 9


def test_a_stop_string_of_a_special_token_is_found_only_where_that_is_shown(
    make_stack, encode
) -> None:
    """The same for stops: each stream's are sought in the text that this stream sees."""
    ids = [*encode("a"), 3, *encode("b")]
    stack = play(make_stack, {PROMPT: ids})
    client = stack.client()
    params = {"max_tokens": 3, "stop": ("<|user|>",)}
    skips = client.submit(list(PROMPT), skip_special_tokens=True, **params)
    shows = client.submit(list(PROMPT), skip_special_tokens=False, **params)
    stack.until(lambda: skips.is_over and shows.is_over)
    assert (skips.text, skips.end.reason) == ("ab", "length")
    assert (shows.text, shows.end.stop_reason) == ("a", "<|user|>")


@pytest.mark.parametrize("interval", [1, 5, 10])
def test_runs_of_blanks_keep_their_length_vllm(
    make_stack, encode, tokenizer, settings, interval
) -> None:
    """Of vLLM's tests: blanks, tabs and line ends in runs, alone at the beginning and the end."""
    text = "    \n\n  def f(x):\n\n\n        return\t\tx   \n \n  "
    ids = encode(text)
    stack = play(make_stack, {PROMPT: ids}, **settings)
    it, _ = read(stack, max_tokens=len(ids), stream_interval=interval)
    prompt_ids = list(PROMPT)
    assert it.text == tokenizer.decode(prompt_ids + ids)[len(tokenizer.decode(prompt_ids)) :]
    assert it.text == text
