"""The simulated device keeps time, and its model notices every wrong column."""

from __future__ import annotations

import time
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

import numpy as np
import pytest
from msgspec.structs import replace
from tests.helpers.given_lengths import give
from tests.helpers.simulated_plans import BLOCK_SIZE, load, plan_of, sample
from tests.helpers.simulated_tokens import expected_tokens
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from slipstream_core.runner.simulated.simulated_text import SimulatedText, drawn_lengths
from slipstream_core.step.plan import Runner, StepFailed, StepPlan
from slipstream_ipc.validation.simulated_model import SimulatedOptions, parse_simulated

MODES = ["playback", "chain"]


# --- options ------------------------------------------------------------------------------------


def test_options_have_defaults_and_are_converted() -> None:
    assert parse_simulated("simulated:") == SimulatedOptions()
    assert parse_simulated("simulated:step_ms=2.5,prefill_us=0,vocab_size=9,mode=chain") == (
        SimulatedOptions(step_ms=2.5, prefill_us=0, vocab_size=9, mode="chain")
    )


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("speed=9", "unknown option 'speed'; known: step_ms, prefill_us"),
        ("step_ms=-1", "option 'step_ms' is '-1'; allowed: milliseconds that a step takes, 0 to"),
        ("step_ms=nan", "option 'step_ms' is 'nan'"),
        ("step_ms=inf", "option 'step_ms' is 'inf'"),
        ("step_ms=fast", "option 'step_ms' is 'fast'"),
        ("prefill_us", "option 'prefill_us' is ''"),
        ("synthetic_acceptance_length=0.5", "allowed: tokens that a step gives to a row, 1 to 17"),
        ("vocab_size=1", "option 'vocab_size' is '1'; allowed: a whole number of at least 2"),
        ("vocab_size=null", "option 'vocab_size' is 'null'"),
        ("max_model_len=0", "option 'max_model_len' is '0'"),
        ("mode=echo", "option 'mode' is 'echo'; allowed: playback or chain"),
        ("tokenizer=", "option 'tokenizer' is ''; allowed: a tokenizer.json or a folder with one"),
        ("mode=chain,mode=chain", "option 'mode' is given twice"),
        ("tokenizer=/nowhere", "option 'tokenizer' is '/nowhere'; allowed: a tokenizer.json"),
    ],
)
def test_a_bad_option_is_named_with_what_is_allowed(options: str, message: str) -> None:
    with pytest.raises(ValueError) as caught:
        load(options)
    assert message in str(caught.value)


def test_another_model_is_not_simulated() -> None:
    with pytest.raises(ValueError, match="a simulated model begins with 'simulated:'"):
        parse_simulated("gpt2")


def test_its_name_says_what_it_is() -> None:
    runner: Runner = load("step_ms=3,vocab_size=50")
    assert runner.info.name.startswith("simulated:")
    assert (runner.info.vocab_size, runner.info.max_model_len) == (50, 64)
    assert runner.info.block_size == BLOCK_SIZE


def test_max_model_len_is_the_options_unless_the_config_wants_less() -> None:
    assert load("max_model_len=32", max_model_len=None).info.max_model_len == 32
    assert load("max_model_len=32", max_model_len=16).info.max_model_len == 16
    assert load("", max_model_len=None).info.max_model_len == 4096
    with pytest.raises(ValueError, match=r"max_model_len is 64, but .* allows 32"):
        load("max_model_len=32", max_model_len=64)


def test_the_cache_holds_every_slot_within_its_bound() -> None:
    assert load(max_num_seqs=4).num_blocks == 4 * 16 + 1
    assert load(num_blocks=20).num_blocks == 20
    assert load(kv_cache_gib=2**-20).num_blocks == 1024 // (BLOCK_SIZE * 8)


# --- time ---------------------------------------------------------------------------------------


class Clock:
    """Stands for the module `time`: it passes where somebody sleeps, and where a test says so."""

    def __init__(self) -> None:
        self.now = 1000.0

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        assert seconds > 0
        self.now += seconds


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr("slipstream_core.runner.simulated.simulated_runner.time", clock)
    return clock


def test_the_device_takes_real_time() -> None:
    runner = load("step_ms=20,prefill_us=0,vocab_size=50")
    begin = time.monotonic()
    runner.launch(plan_of([1, 2, 3], step=1))
    runner.collect()
    assert time.monotonic() - begin >= 0.02


def test_steps_take_their_time_one_after_the_other(clock: Clock) -> None:
    runner = load("step_ms=100,prefill_us=1000,vocab_size=50")
    assert (runner.done(), runner.done_at(), runner.fileno()) == (False, None, None)
    begin = clock.now
    runner.launch(plan_of([1, 2, 3], step=1))
    runner.launch(plan_of([0], start=3, prompt_len=3, gather=True, step=2))
    first = runner.done_at()
    assert first is not None
    assert first - begin == pytest.approx(0.103)
    clock.now = first - 0.001
    assert not runner.done()
    clock.now = first
    assert runner.done()
    assert runner.collect().step == 1
    assert clock.now == first
    second = runner.done_at()
    assert second is not None
    assert second - first == pytest.approx(0.1)  # its own prefill tokens are none
    assert not runner.done()
    assert runner.collect().step == 2
    assert clock.now == pytest.approx(second)
    assert runner.busy_s == pytest.approx(0.203)
    assert runner.idle_s == 0


def test_idle_is_what_lies_between_two_steps(clock: Clock) -> None:
    runner = load("step_ms=1,prefill_us=0,vocab_size=50")
    runner.launch(plan_of([1], prompt_len=1))
    runner.collect()
    clock.now += 0.25
    runner.launch(plan_of([1], start=1, prompt_len=1))
    assert runner.idle_s == pytest.approx(0.25)
    runner.collect()
    runner.launch(plan_of([1], start=2, prompt_len=1))
    assert runner.idle_s == pytest.approx(0.25)
    assert runner.busy_s == pytest.approx(0.003)


def test_a_done_step_is_collected_without_waiting() -> None:
    runner = load()
    runner.launch(plan_of([1, 2]))
    assert runner.done()
    runner.close()
    runner.close()
    assert not runner.done()


# --- text ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("chunk", [1, 3, 4, 11])
def test_chunks_and_gathered_ids_give_the_expected_text(mode: str, chunk: int) -> None:
    runner = load(f"step_ms=0,prefill_us=0,vocab_size=50,mode={mode}")
    prompt = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5]
    got: list[int] = []
    for start in range(0, len(prompt), chunk):
        got = [sample(runner, plan_of(prompt[start : start + chunk], start=start))]
    for _ in range(20):
        start = len(prompt) + len(got) - 1
        got.append(sample(runner, plan_of([0], start=start, prompt_len=len(prompt), gather=True)))
    assert got == expected_tokens(runner.text, prompt, 21, seed=7)
    # as after a recompute: all of it in one chunk
    again = plan_of(prompt + got[:-1], prompt_len=len(prompt), table=tuple(range(16, 0, -1)))
    assert sample(runner, again) == got[-1]


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("counts", [[3], [1, 4, 2], [17, 1]])
def test_several_tokens_of_a_step_are_those_of_single_steps(mode: str, counts: list[int]) -> None:
    runner = load(f"step_ms=0,prefill_us=0,vocab_size=50,mode={mode}")
    give(runner, counts)
    prompt = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5]
    history, num_computed, taken = list(prompt), 0, []
    while len(history) < 45:
        chunk = history[num_computed:]
        runner.launch(plan_of(chunk, start=num_computed, prompt_len=len(prompt)))
        result = runner.collect()
        assert result.counts is not None
        taken.append(result.counts.item())
        num_computed = len(history)  # what it gave but for the last one is computed by the next
        history += result.token_ids.tolist()
    assert history[len(prompt) :] == expected_tokens(
        runner.text, prompt, len(history) - len(prompt), seed=7
    )
    assert taken[: len(counts)] == counts


@pytest.mark.parametrize("mode", MODES)
def test_the_step_behind_begins_with_the_last_of_several_tokens(mode: str) -> None:
    runner = load(f"step_ms=0,prefill_us=0,vocab_size=50,mode={mode}")
    give(runner, [3])
    runner.launch(plan_of([3, 1, 4]))
    last = runner.collect().token_ids[-1]
    runner.launch(plan_of([0], start=3, prompt_len=3, gather=True))
    gathered = runner.collect()
    runner.launch(plan_of([int(last)], start=3, prompt_len=3))
    assert runner.collect().token_ids.tolist() == gathered.token_ids.tolist()


@pytest.mark.parametrize("mean", [1.25, 2, 4.5])
def test_the_mean_number_of_tokens_is_the_one_asked_for(mean: float) -> None:
    hashes = np.random.default_rng(1).integers(0, 2**64, 20_000, np.uint64)
    lengths = drawn_lengths(hashes, mean=mean)
    assert set(lengths.tolist()) <= {int(mean), int(mean) + 1}
    assert abs(lengths.mean() - mean) < 0.02


def test_wide_rows_and_masked_ones_get_one_token() -> None:
    runner = load("step_ms=0,prefill_us=0,vocab_size=200,synthetic_acceptance_length=4")
    runner.launch(plan_of([1, 2, 3]))
    assert len(runner.collect().token_ids) == 4
    masked = {"masked_rows": np.array([0]), "masked_ids": np.array([5])}
    runner.launch(replace(plan_of([1, 2, 3]), **masked))
    assert len(runner.collect().token_ids) == 1
    wide = {"any_wide": True, "num_logprobs": np.array([100], np.int32)}
    runner.launch(replace(plan_of([1, 2, 3]), **wide))
    result = runner.collect()
    assert (len(result.token_ids), result.counts, len(result.wide)) == (1, None, 1)


@pytest.mark.parametrize("mode", MODES)
def test_a_chunk_reads_what_another_one_of_its_step_writes(mode: str) -> None:
    """Whatever lay there before: values go round at 2**64."""
    runner = load(f"step_ms=0,prefill_us=0,vocab_size=50,mode={mode}")
    for first in range(20):
        prompt = [first, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5]
        front, rest = plan_of(prompt[:8]), plan_of(prompt[8:], start=8)
        both = {
            name: np.concatenate([getattr(front, name), getattr(rest, name)])
            for name in StepPlan.__struct_fields__
            if isinstance(getattr(front, name), np.ndarray)
        }
        both["slots"], both["table_slots"] = np.array([0, 1]), np.repeat([0, 1], 16)
        runner.launch(replace(front, **both))
        expected = expected_tokens(runner.text, prompt, 1, seed=7)
        assert runner.collect().token_ids[1:].tolist() == expected


def expected(mode: str, prompt: list[int], seed: int = 0) -> list[int]:
    text = SimulatedText(parse_simulated(f"simulated:vocab_size=5000,mode={mode}"))
    return expected_tokens(text, prompt, 12, seed=seed)


@pytest.mark.parametrize("mode", MODES)
def test_text_depends_on_prompt_order_and_seed(mode: str) -> None:
    texts = [
        expected(mode, [1, 2, 3]),
        expected(mode, [1, 2, 4]),
        expected(mode, [2, 1, 3]),
        expected(mode, [0, 1, 2, 3]),
        expected(mode, [1, 2, 3], seed=1),
        expected(mode, [1, 2, 3], seed=-1),
    ]
    assert len({tuple(each) for each in texts}) == len(texts)
    assert expected(mode, [1, 2, 3]) == texts[0]


def test_temperature_zero_has_no_seed() -> None:
    runner = load()
    greedy = plan_of([1, 2, 3], temperatures=np.zeros(1, np.float32), all_greedy=True)
    assert sample(runner, greedy) == expected_tokens(runner.text, [1, 2, 3], 1)[0]


@pytest.mark.parametrize("mode", MODES)
def test_masked_ids_are_not_sampled(mode: str) -> None:
    runner = load(f"step_ms=0,prefill_us=0,vocab_size=20,mode={mode}")
    masked = np.array([token for token in range(20) if token != 13])
    plan = plan_of([1, 2, 3], masked_rows=np.zeros(19, np.int64), masked_ids=masked)
    assert sample(runner, plan) == 13
    with pytest.raises(StepFailed, match="every id that could be sampled is masked"):
        sample(
            runner,
            plan_of([1], masked_rows=np.zeros(20, np.int64), masked_ids=np.arange(20)),
        )
    stops = tuple(masked.tolist())
    want = expected_tokens(runner.text, [1, 2, 3], 9, min_tokens=4, stop_token_ids=stops)
    assert want[:4] == [13] * 4
    assert set(want[4:]) != {13}


def test_a_wrong_block_or_position_or_id_changes_the_text() -> None:
    """Far from the last block too: a chain looks at an earlier position each time."""
    prompt = [(5 * i) % 50 for i in range(40)]
    options = "step_ms=0,prefill_us=0,vocab_size=50,mode=chain"
    table = tuple(range(1, 17))

    def text_with(**wrong: Any) -> list[int]:
        runner = load(options)
        sample(runner, plan_of(prompt))
        got = []
        for start in range(40, 63):
            changes = wrong if start > 41 else {}
            plan = plan_of([0], start=start, prompt_len=40, gather=True, **changes)
            got.append(sample(runner, plan))
        return got

    right = text_with()
    assert text_with(table=(1, 3, 2, *table[3:])) != right
    assert text_with(table=(1, 2, 3, 4, 5, 6, 7, 8, 9, 9, *table[10:])) != right
    assert text_with(gather_slots=np.array([-1])) != right
    assert text_with(gather_slots=np.array([1])) != right
    assert text_with(kv_lens=np.array([40], np.int32)) != right


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"kv_slots": np.array([1, 2, 3])}, "behind the null block"),
        ({"kv_slots": np.array([4, 5, 10**6])}, "the cache goes from 4"),
        ({"positions": np.array([62, 63, 64])}, "outside of max_model_len 64"),
        ({"token_ids": np.array([1, 2, 50])}, "outside of the vocabulary of 50"),
        ({"gather_slots": np.array([-1, -1, 9])}, "out of bounds"),
        ({"table_blocks": np.zeros(16, np.int32)}, "a block table ends before the position"),
    ],
)
def test_an_impossible_step_fails_alone(changes: dict[str, Any], message: str) -> None:
    runner = load()
    runner.launch(replace(plan_of([1, 2, 3], step=1), **changes))
    runner.launch(plan_of([1, 2, 3], step=2))
    with pytest.raises(StepFailed, match="step 1 failed") as caught:
        runner.collect()
    assert message in str(caught.value)
    assert runner.collect().step == 2


@pytest.mark.parametrize("k", [0, 1, 5])
def test_logprobs_begin_with_the_sampled_token_and_descend(k: int) -> None:
    runner = load()
    runner.launch(plan_of([1, 2, 3], num_logprobs=k))
    result = runner.collect()
    assert result.logprobs is not None
    values, ids = result.logprobs.values, result.logprobs.ids
    assert values.shape == ids.shape == (1, 1 + k)
    assert (values.dtype, ids.dtype) == (np.float32, np.uint32)
    assert ids[0, 0] == result.token_ids[0]
    assert ids[0, 1:].tolist() == list(dict.fromkeys(ids[0].tolist()))[:k]
    assert (np.diff(values[0, 1:]) < 0).all()
    assert np.exp(values[0, 1:]).sum() < 1
    assert values[0, 0] == values[0, 1:].max(initial=values[0, 0])
    assert result.logprobs.ranks.tolist() == [1]
    runner.launch(plan_of([1, 2, 3]))
    assert runner.collect().logprobs is None


# --- with a tokenizer ---------------------------------------------------------------------------


@pytest.fixture(scope="module")
def tokenizer_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A byte-level tokenizer with special tokens in front, as small as can be."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=["<s>", "</s>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator([topics["if"], topics["while"]], trainer)
    folder = tmp_path_factory.mktemp("tokenizer")
    tokenizer.save(str(folder / "tokenizer.json"))
    return folder


def test_playback_reads_a_text_that_the_tokenizer_encodes(tokenizer_folder: Path) -> None:
    runner = load(f"tokenizer={tokenizer_folder}")
    tokenizer = Tokenizer.from_file(str(tokenizer_folder / "tokenizer.json"))
    assert runner.info.vocab_size == tokenizer.get_vocab_size()
    ids = expected_tokens(runner.text, [5, 6, 7], 60, seed=3)
    text = tokenizer.decode(ids, skip_special_tokens=False)
    assert text.strip("\ufffd") in "\n\n".join(topics[name] for name in sorted(topics))


def test_a_chain_uses_ordinary_ids_only(tokenizer_folder: Path) -> None:
    text = SimulatedText(
        parse_simulated(f"simulated:tokenizer={tokenizer_folder / 'tokenizer.json'},mode=chain")
    )
    ids = expected_tokens(text, [5, 6, 7], 2000)
    assert set(ids).isdisjoint({0, 1})
    assert len(set(ids)) > 350


def test_a_vocabulary_may_be_padded_but_not_cut(tokenizer_folder: Path) -> None:
    assert load(f"tokenizer={tokenizer_folder},vocab_size=512").info.vocab_size == 512
    with pytest.raises(ValueError, match=r"option 'vocab_size' is 300.*give at least 400"):
        load(f"tokenizer={tokenizer_folder},vocab_size=300")
