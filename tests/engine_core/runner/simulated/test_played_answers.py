"""The simulated model plays the answers of a file."""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from tests.helpers.simulated_plans import load, plan_of, sample
from tokenizers import Tokenizer

from slipstream.demo_model import MODEL_PATH
from slipstream_core.runner.simulated import played_answers
from slipstream_core.runner.simulated.played_answers import PlayedAnswers
from slipstream_core.runner.simulated.simulated_runner import SimulatedRunner
from slipstream_ipc.validation.simulated_model import parse_simulated

END = 1  # <|end|> of the demo model
QUESTION = "What is the weather in Oslo?"
CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Oslo"}}\n</tool_call>'
LINES: list[dict[str, object]] = [
    {"text": "I do not know."},
    {"text": CALL, "when": "weather"},
    {"text": "It is 4 degrees.", "when": "degrees"},
]


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.from_file(str(MODEL_PATH / "tokenizer.json"))


def answers(folder: Path, lines: Sequence[object]) -> Path:
    path = folder / "answers.jsonl"
    path.write_text("\n".join(json.dumps(line) for line in lines) + "\n")
    return path


def play(folder: Path, lines: Sequence[object], **settings: int) -> SimulatedRunner:
    path = answers(folder, lines)
    return load(
        f"step_ms=0,prefill_us=0,tokenizer={MODEL_PATH},answers={path}",
        **{"max_model_len": 64, **settings},
    )


def answer_to(runner: SimulatedRunner, prompt: list[int], chunk: int = 64) -> list[int]:
    """The ids before the end-of-text id; the prompt is computed in chunks."""
    got: list[int] = []
    for start in range(0, len(prompt), chunk):
        got = [sample(runner, plan_of(prompt[start : start + chunk], start=start))]
    while got[-1] != END:
        start = len(prompt) + len(got) - 1
        got.append(sample(runner, plan_of([0], start=start, prompt_len=len(prompt), gather=True)))
    return got[:-1]


def test_more_prompts_than_are_remembered_are_found_again(
    tmp_path: Path, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(played_answers, "_MAX_PROMPTS", 3)
    played = PlayedAnswers(answers(tmp_path, LINES), tokenizer, (END,))
    for step in range(5):  # prompts that are known, beside ones that are not
        prompts = np.array([7, 8, 10 + step], np.uint64)
        for at in played.missing(prompts):
            played.learn(int(prompts[at]), np.empty(0, np.int64))
        positions = played.positions(prompts, np.zeros(3, np.uint64), np.zeros(3, np.int64))
        assert len(positions) == 3
        assert len(played._found) <= 3


@pytest.mark.parametrize("chunk", [1, 3, 64])
def test_what_the_prompt_says_last_chooses_the_answer(
    tmp_path: Path, tokenizer: Tokenizer, chunk: int
) -> None:
    runner = play(tmp_path, LINES)
    for prompt, text in [
        ("Who was Ada?", "I do not know."),
        (QUESTION, CALL),
        (f"{QUESTION} It has 4 degrees", "It is 4 degrees."),
        ("At 4 degrees, what weather?", CALL),
    ]:
        assert tokenizer.decode(answer_to(runner, tokenizer.encode(prompt).ids, chunk)) == text


def test_ids_are_played_as_they_are_special_ones_included(tmp_path: Path) -> None:
    ids = [7, 2, 900, 3, 7]
    runner = play(tmp_path, [{"token_ids": ids}])
    assert answer_to(runner, [5, 6]) == ids
    assert runner.info.eos_token_ids == (END, 0)


def test_the_spelling_of_a_special_token_is_that_token(tmp_path: Path) -> None:
    runner = play(tmp_path, [{"text": "<|user|>a<|system|>"}])
    ids = answer_to(runner, [5])
    assert (ids[0], ids[-1]) == (3, 2)


def test_an_end_is_played_over_and_over(tmp_path: Path) -> None:
    runner = play(tmp_path, [{"token_ids": [9]}])
    assert answer_to(runner, [5]) == [9]
    again = [
        sample(runner, plan_of([0], start=at, prompt_len=1, gather=True)) for at in range(2, 9)
    ]
    assert again == [END] * 7


def test_seeds_choose_among_equals_and_a_recompute_chooses_the_same(tmp_path: Path) -> None:
    lines = [{"token_ids": [10 + i, 30 + i]} for i in range(4)]
    runner = play(tmp_path, lines)
    firsts = {}
    for seed in range(20):
        firsts[seed] = sample(runner, plan_of([5, 6], seeds=np.array([seed])))
    assert set(firsts.values()) == {10, 11, 12, 13}
    other = play(tmp_path, lines)  # a successor, which never saw the prompt alone
    for seed, first in firsts.items():
        both = plan_of([5, 6, first], prompt_len=2, seeds=np.array([seed]))
        assert sample(other, both) == first + 20


def test_a_masked_id_gives_way_and_a_grammar_keeps_what_it_allows(tmp_path: Path) -> None:
    runner = play(tmp_path, [{"token_ids": [9, 8]}])
    masked = plan_of([5], masked_rows=np.zeros(1, np.int64), masked_ids=np.array([9]))
    assert sample(runner, masked) == 8
    text = runner.text
    for allowed, picked in (([9, 40], 9), ([40], 40)):
        bits = np.zeros(text.vocab_size, np.uint8)
        bits[allowed] = 1
        mask = np.packbits(bits, bitorder="little").view(np.int32)[None]
        assert text.pick_allowed(np.array([0]), mask).tolist() == [picked]


def test_the_logprobs_of_a_special_id_are_its_own(tmp_path: Path) -> None:
    runner = play(tmp_path, [{"token_ids": [3]}])
    runner.launch(plan_of([5], num_logprobs=2))
    logprobs = runner.collect().logprobs
    assert logprobs is not None
    assert logprobs.ids[0, :2].tolist() == [3, 3]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ({}, "line 2: either text or token_ids is to be given"),
        ({"text": "a", "token_ids": [1]}, "line 2: either text or token_ids"),
        ({"token_ids": [-1]}, "line 2: Expected `int` >= 0"),
        ({"text": "a", "if": "b"}, "line 2: Object contains unknown field `if`"),
        ({"text": "a", "when": ""}, "line 2: Expected `str` of length >= 1"),
        ({"token_ids": [4096]}, "needs id 4096; the vocabulary has 4096"),
    ],
)
def test_a_wrong_line_is_named(tmp_path: Path, line: object, message: str) -> None:
    with pytest.raises(ValueError) as caught:
        play(tmp_path, [{"text": "fine"}, line])
    assert message in str(caught.value)


def test_a_file_that_cannot_be_played_is_refused(tmp_path: Path) -> None:
    given = f"tokenizer={MODEL_PATH},answers={tmp_path}/none"
    with pytest.raises(ValueError, match=r"none' \(No such file or directory\); allowed: a file"):
        load(given)
    with pytest.raises(ValueError, match="which holds no answers"):
        play(tmp_path, [])
    with pytest.raises(ValueError, match="'answers' with no tokenizer"):
        parse_simulated("simulated:answers=a.jsonl")
    with pytest.raises(ValueError, match="'answers' with a mode"):
        parse_simulated(f"simulated:{given},mode=chain")
    shutil.copy(MODEL_PATH / "tokenizer.json", tmp_path)
    file = answers(tmp_path, [{"text": "a"}])
    with pytest.raises(ValueError, match=r"end-of-text token, which neither generation_config"):
        load(f"tokenizer={tmp_path},answers={file}")
    (tmp_path / "tokenizer_config.json").write_text('{"eos_token": {"content": "<|end|>"}}')
    assert load(f"tokenizer={tmp_path},answers={file}").info.eos_token_ids == (END,)
