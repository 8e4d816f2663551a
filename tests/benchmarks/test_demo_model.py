"""The bundled demo model: it loads offline, keeps its size, and writes readable words."""

import os
import re
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM, AutoTokenizer

from slipstream import LLM, SamplingParams
from slipstream.demo_model import MODEL_NAME, MODEL_PATH
from slipstream_lab.demo_model import corpus, questions
from slipstream_lab.demo_model.questions import (
    FIRST_ANSWERS,
    FOLLOW_UP,
    PYTHON_ANSWERS,
    SMALL_TALK,
    KnownAnswer,
)
from slipstream_lab.demo_model.train import (
    ASSISTANT_ID,
    BATCH_TOKENS,
    CHAT_TEMPLATE,
    END_OF_TURN_ID,
    OPENING_TOKENS,
    PIECE_TOKENS,
    batch_loss,
    batches,
    epochs,
    excerpts,
    late_cooling,
    lone_batches,
    orthogonal,
    weighed,
)

MAX_FOLDER_BYTES = 6_000_000
WRONG_OF_PYTHON = 17
WRONG_OF_SMALL_TALK = 5
WRONG_OF_FOLLOW_UPS = 0
WRONG_OF_STRANGERS = 6
WRONG_OF_NEWCOMERS = 1
"""Answers that the bundled weights get wrong, of 396, 75, 32, 40 and 40; the goal: a twentieth of
each, of those that strangers and newcomers asked six."""
WORD = re.compile(r"[A-Za-z]+(?:'[a-z]+)?")


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    """So small a model spends its time on waking threads, all the more on a busy machine."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return AutoTokenizer.from_pretrained(MODEL_PATH, local_files_only=True)


@pytest.fixture(scope="module")
def model() -> Any:
    return AutoModelForCausalLM.from_pretrained(MODEL_PATH, local_files_only=True).eval()


@pytest.fixture(scope="module")
def vocabulary() -> set[str]:
    """Every word of the language reference, in lower case."""
    return {w.lower() for entry in corpus.topic_entries() for w in WORD.findall(entry.text)}


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM(threads=1) as llm:
        yield llm


def complete(model: Any, tokenizer: Any, prompt: str, num_tokens: int) -> list[int]:
    ids = torch.tensor([tokenizer.encode(prompt)])
    output = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=num_tokens,
        do_sample=False,
    )
    return output[0, ids.shape[1] :].tolist()


def share_of_known_words(text: str, vocabulary: set[str]) -> float:
    """Share of whitespace-separated pieces holding letters whose words are all known."""
    pieces = [WORD.findall(piece) for piece in text.split()]
    worded = [words for words in pieces if words]
    assert len({tuple(words) for words in worded}) >= 15, f"few or repeated words: {text}"
    return sum(all(w.lower() in vocabulary for w in words) for words in worded) / len(worded)


def test_importing_the_package_loads_nothing_else() -> None:
    code = (
        "import pathlib, sys, slipstream; before = set(sys.modules); import slipstream.demo_model; "
        "print(*(set(sys.modules) - before))"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout.split() == ["slipstream.demo_model"]


def test_folder_is_small_and_complete() -> None:
    assert MODEL_NAME == "slipstream-demo"
    files = {path.name: path.stat().st_size for path in MODEL_PATH.iterdir()}
    assert sum(files.values()) <= MAX_FOLDER_BYTES, files
    assert {
        "README.md",
        "chat_template.jinja",
        "config.json",
        "generation_config.json",
        "model.safetensors",
        "tokenizer.json",
        "tokenizer_config.json",
    } == set(files)


def test_configuration(model: Any, tokenizer: Any) -> None:
    config = model.config
    assert config.model_type == "llama"
    assert config.tie_word_embeddings
    assert config.num_key_value_heads < config.num_attention_heads
    assert config.head_dim in (32, 64)
    assert config.max_position_embeddings == 2048
    assert model.dtype == torch.bfloat16
    assert len(tokenizer) == config.vocab_size
    assert tokenizer.eos_token_id == config.eos_token_id
    ends = tokenizer.convert_tokens_to_ids(["<|end|>", "<|endoftext|>"])
    assert model.generation_config.eos_token_id == ends


@settings(max_examples=300, deadline=None)
@given(
    st.text()
    | st.text(alphabet=st.characters(max_codepoint=127))
    | st.lists(st.sampled_from(["<|end|>", "<|user|>", " ", "\n", "a", "é", "🙂", "<|"])).map(
        "".join
    )
)
def test_every_text_survives_the_tokenizer(tokenizer: Any, text: str) -> None:
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_decoding_can_drop_the_special_tokens(tokenizer: Any) -> None:
    ids = tokenizer.encode("<|assistant|>Hello<|end|><|endoftext|>")
    assert tokenizer.decode(ids, skip_special_tokens=True) == "Hello"


def test_chat_template_renders_turns_and_the_generation_prompt(tokenizer: Any) -> None:
    messages = [
        {"role": "system", "content": "Be kind."},
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": "Hello"},
        {"role": "user", "content": "What is `assert`?"},
    ]
    closed = tokenizer.apply_chat_template(messages, tokenize=False)
    assert closed == (
        "<|system|>\nBe kind.<|end|>\n<|user|>\nHi<|end|>\n<|assistant|>\nHello<|end|>\n"
        "<|user|>\nWhat is `assert`?<|end|>\n"
    )
    opened = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert opened == f"{closed}<|assistant|>\n"


def test_chat_template_takes_every_role_of_a_conversation(tokenizer: Any) -> None:
    """Developers speak as the system does, tools as the user; the model knows no others."""
    roles = ["developer", "user", "assistant", "tool"]
    messages = [{"role": role, "content": role} for role in roles]
    assert tokenizer.apply_chat_template(messages, tokenize=False) == (
        "<|system|>\ndeveloper<|end|>\n<|user|>\nuser<|end|>\n"
        "<|assistant|>\nassistant<|end|>\n<|user|>\ntool<|end|>\n"
    )


def test_chat_template_takes_turns_with_calls(tokenizer: Any) -> None:
    """A call is a line with its name and arguments: a form that no parser of answers looks for."""
    calls: list[Any] = [
        {"type": "function", "function": {"name": "look", "arguments": {"at": "x"}}},
        {"type": "function", "function": {"name": "wait", "arguments": "{bad"}},
    ]
    messages: list[Any] = [
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": None, "tool_calls": calls},
        {"role": "assistant", "content": "Well:", "tool_calls": calls[:1]},
        {"role": "tool", "content": "42"},
    ]
    assert tokenizer.apply_chat_template(messages, tokenize=False) == (
        "<|user|>\nHi<|end|>\n"
        '<|assistant|>\nlook {"at": "x"}\nwait {bad<|end|>\n'
        '<|assistant|>\nWell:\nlook {"at": "x"}<|end|>\n'
        "<|user|>\n42<|end|>\n"
    )


def test_the_program_that_trains_it_writes_the_same_template() -> None:
    assert (MODEL_PATH / "chat_template.jinja").read_text() == CHAT_TEMPLATE


def test_chat_template_refuses_unknown_roles(tokenizer: Any) -> None:
    with pytest.raises(Exception, match="role 'robot' is not"):
        tokenizer.apply_chat_template([{"role": "robot", "content": "Hi"}], tokenize=False)


@pytest.mark.parametrize("prompt", ["The assert statement", "In Python, a function", "A class is"])
def test_completions_are_readable(
    model: Any, tokenizer: Any, vocabulary: set[str], prompt: str
) -> None:
    text = tokenizer.decode(complete(model, tokenizer, prompt, 80), skip_special_tokens=True)
    assert share_of_known_words(text, vocabulary) >= 0.7, text


def test_chat_answers_are_readable_and_end(
    model: Any, tokenizer: Any, vocabulary: set[str]
) -> None:
    chat = [{"role": "user", "content": "Who are you?"}]
    prompt = tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
    ids = complete(model, tokenizer, prompt, 120)
    assert ids[-1] == tokenizer.eos_token_id
    text = tokenizer.decode(ids, skip_special_tokens=True)
    assert share_of_known_words(text, vocabulary) >= 0.7, text


def test_the_last_position_can_be_reached(model: Any, tokenizer: Any) -> None:
    length = model.config.max_position_embeddings
    ids = torch.tensor([tokenizer.encode("Python is a language. " * length)[:length]])
    with torch.no_grad():
        logits = model(input_ids=ids).logits
    assert logits.shape == (1, length, model.config.vocab_size)
    assert torch.isfinite(logits).all()


def test_corpus_is_a_function_of_its_seed_and_mixes_documents_with_chats() -> None:
    topics, others = corpus.topic_entries(), corpus.docstrings()
    documents, chats = corpus.epoch(topics, others, Random(7))
    assert (documents, chats) == corpus.epoch(topics, others, Random(7))
    assert (documents, chats) != corpus.epoch(topics, others, Random(8))
    assert len(topics) > 50
    assert len(others) > 1000
    assert {corpus.document(entry) for entry in topics} <= set(documents)
    for chat in chats:
        roles = [message["role"] for message in chat if message["role"] != "system"]
        assert roles == ["user", "assistant"] * (len(roles) // 2) != []
        assert all(message["content"].strip() for message in chat)


def test_of_a_chat_training_weighs_the_answers_and_their_openings_most(tokenizer: Any) -> None:
    turns = [("What is it?", "A long answer. " * 20), ("And that?", "Another answer. " * 20)]
    chat = [
        {"role": role, "content": text.strip()}
        for turn in turns
        for role, text in zip(("user", "assistant"), turn, strict=True)
    ]
    text = tokenizer.apply_chat_template(chat, tokenize=False) + "<|endoftext|>"
    whole = np.asarray(tokenizer.encode(text))
    lengths = set()
    for seed in range(20):
        (piece,) = weighed(whole, Random(seed))
        ids, weights = piece[0].astype(int), piece[1]
        lengths.add(len(ids))
        counted = tokenizer.decode(ids[weights > 0])
        answers = "<|end|>".join(turn[1].strip() for turn in turns) + "<|end|>"
        assert answers.startswith(counted)
        assert "Another" in counted
        assert ids[-1] == tokenizer.convert_tokens_to_ids("<|endoftext|>")
        assert weights[-1] == 0
        for start in np.flatnonzero(ids == ASSISTANT_ID).tolist():
            opening = weights[start + 2 : start + 2 + OPENING_TOKENS]
            assert opening[0] > opening[-1] > 0
            assert not weights[start : start + 2].any()
    last = int(np.flatnonzero(whole == ASSISTANT_ID)[-1])
    assert lengths == {len(whole), last + 2 + OPENING_TOKENS + 1}
    assert whole[-3] == END_OF_TURN_ID


def test_a_document_is_trained_in_pieces_that_are_left_out_at_random() -> None:
    ids = np.arange(10, 10 + 10 * PIECE_TOKENS + 7)
    pieces = weighed(ids, Random(1))
    assert 3 <= len(pieces) <= 10
    assert len({piece[0, 0] for piece in pieces}) == len(pieces)
    for piece in pieces:
        assert (piece[0, 0] - 10) % PIECE_TOKENS == 0
        assert (np.diff(piece[0]) == 1).all()
        assert piece[1, 0] == 0  # what it follows is another text
        assert (piece[1, 1:] == 1).all()


def test_no_answer_counts_whose_question_is_in_another_row(tokenizer: Any) -> None:
    stream = batches(epochs(tokenizer, 0), 0)
    torn = 0
    for ids, weights in (next(stream) for _ in range(12)):
        for row, weight in zip(ids.tolist(), weights.tolist(), strict=True):
            text = tokenizer.decode(row)
            first = re.search(r"<\|(system|user|assistant|end)\|>", text)
            if first and first[1] in ("assistant", "end"):  # the rest of a chat, then others
                torn += 1
                begin = next((n for n, each in enumerate(row) if each in (2, 3)), len(row))
                ends = [n for n in range(begin) if row[n] == END_OF_TURN_ID]
                assert not any(weight[n] for n in ends)
            assert not any(w for each, w in zip(row, weight, strict=True) if each in (2, 3, 4))
    assert torn > 10


def test_the_third_part_begins_each_text_in_a_row_of_its_own(tokenizer: Any) -> None:
    pieces = next(epochs(tokenizer, 0, part=3))[:3000]
    stream = lone_batches(iter([pieces]), 0)
    rows: list[tuple[list[int], list[float]]] = []
    while len(rows) < len(pieces):
        ids, weights = next(stream)
        assert ids.numel() <= BATCH_TOKENS or len(ids) == 1
        rows += zip(ids.tolist(), weights.tolist(), strict=True)
    left = {tuple(piece[0].astype(int)): piece[1].tolist() for piece in pieces}
    for row, weight in rows:
        length = max(n for n, each in enumerate(row) if each or not n) + 1
        whole = next(row[:n] for n in (length, length + 1) if tuple(row[:n]) in left)
        counted = left[tuple(whole)]
        assert weight == counted + [0.0] * (len(row) - len(counted))
    assert {tuple(row)[: len(each)] for row, _ in rows for each in left if row[0] == each[0]}


def test_excerpts_are_a_document_in_order_cut_between_paragraphs() -> None:
    text = corpus.document(corpus.topic_entries()[3])
    assert "\n\n".join(excerpts(text, Random(1))) == text
    assert len(excerpts(text * 3, Random(1))) > 1


def test_the_third_part_holds_its_rate_and_then_cools() -> None:
    rates = [late_cooling(step, 3000) for step in range(1, 3001)]
    assert rates[0] < 0.02
    assert rates[99:1500] == [1.0] * 1401
    assert rates[1500:] == sorted(rates[1500:], reverse=True)
    assert rates[-1] == 0.0
    few = [late_cooling(step, 600) for step in range(1, 601)]
    assert few[99:300] == [1.0] * 201
    assert few[-1] == 0.0


@pytest.mark.parametrize("shape", [(6, 6), (5, 9), (9, 5)])
def test_an_update_is_orthogonal_by_the_polynomial_of_its_singular_values(
    shape: tuple[int, int],
) -> None:
    gradient = torch.randn(shape, generator=torch.Generator().manual_seed(5), dtype=torch.float64)
    a, b, c = coefficients = (3.4445, -4.775, 2.0315)
    left, values, right = torch.linalg.svd(gradient, full_matrices=False)
    values = values / values.norm()
    for _ in range(5):
        values = a * values + b * values**3 + c * values**5
    expected = left @ torch.diag(values) @ right
    assert torch.allclose(orthogonal(gradient, coefficients, 5, 1e-7), expected)


def test_processes_of_one_training_share_their_gradients() -> None:
    code = (
        "import os, torch, torch.distributed as distributed\n"
        "from slipstream_lab.demo_model.train import average_gradients\n"
        "distributed.init_process_group('gloo')\n"
        "model = torch.nn.Linear(2, 3)\n"
        "(model(torch.ones(1, 2)).sum() * (1 + int(os.environ['RANK']))).backward()\n"
        "average_gradients(model)\n"
        "print(*{value for each in model.parameters() for value in each.grad.flatten().tolist()})\n"
    )
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    shared = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", code],
            env={**os.environ, **shared, "RANK": str(rank)},
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    assert [process.communicate(timeout=120)[0].strip() for process in processes] == ["1.5"] * 2


def test_the_loss_is_the_models_own_over_the_tokens_that_count(model: Any) -> None:
    generator = torch.Generator().manual_seed(3)
    ids = torch.randint(10, 4000, (3, 24), generator=generator)
    weights = torch.randint(0, 3, (3, 24), generator=generator).float()
    with torch.no_grad():
        losses = torch.nn.functional.cross_entropy(
            model(input_ids=ids).logits[:, :-1].float().transpose(1, 2),
            ids[:, 1:],
            reduction="none",
        )
        expected = (losses * weights[:, 1:]).sum() / weights[:, 1:].sum()
        assert torch.isclose(batch_loss(model, ids, weights).float(), expected, rtol=0.01)
        assert batch_loss(model, ids, torch.zeros(3, 24)) == 0


def test_a_name_belongs_to_one_topic() -> None:
    names = [name for entry in corpus.topic_entries() for name in entry.names]
    assert len(names) == len(set(names))
    assert not {"clas", "pas", "i", "a"} & set(names)  # no singulars of keywords


@pytest.mark.parametrize("part", [1, 2, 3, 4])
def test_tests_ask_as_training_never_does(part: int) -> None:
    topics, others = corpus.topic_entries(), corpus.docstrings()[:50]
    _, chats = corpus.epoch(topics, others, Random(3), part=part)
    asked = {message["content"] for chat in chats for message in chat if message["role"] == "user"}
    names = {form for entry in topics for name in entry.names for form in corpus.wordings(name)}
    tests = {question.format(name) for question in corpus.TEST_QUESTIONS for name in names}
    assert len(asked) > 1000
    assert not asked & tests
    assert "an assert statement" in names


def test_an_answer_is_right_for_its_own_questions_alone() -> None:
    answers = [*PYTHON_ANSWERS, *SMALL_TALK]
    for answer in answers:
        assert answer.marks
        assert answer.tests
        assert answer.questions or answer.tasks
        right = [each.text for each in answers if questions.is_right(each.text, answer)]
        assert right == [answer.text]
        rest = next(each.text for each in answers if each.text not in answer.text)
        assert not questions.is_right(f"{answer.text} {rest}", answer)
        assert not questions.is_right(answer.text.replace(answer.marks[0], ""), answer)


def test_training_asks_no_question_of_a_test_about_python() -> None:
    tests = {questions.plain(test) for each in PYTHON_ANSWERS for test in each.tests}
    tests |= {questions.plain(test) for each in SMALL_TALK for test in each.tests}
    random = Random(23)
    asked = {
        questions.plain(questions.ask(each, random, part=part))
        for each in (*PYTHON_ANSWERS, *SMALL_TALK)
        for part in (1, 2, 3, 4)
        for _ in range(50)
    }
    assert len(asked) > 10_000
    assert not asked & tests
    long = [test for test in tests if test.count(" ") >= 2]
    assert not [each for each in asked if any(test in each for test in long)]


def test_the_third_part_asks_nothing_that_is_one_word_from_a_test() -> None:
    test = next(t for each in PYTHON_ANSWERS for t in each.tests if t.count(" ") >= 5)
    words = test.rstrip("?").split()
    for near in (words, words[1:], [*words[:2], "other", *words[3:]], [*words, "now"]):
        assert questions.is_near_a_test(" ".join(near))
    assert not questions.is_near_a_test(" ".join(["other", "words", *words[2:]]))
    for each in (*PYTHON_ANSWERS, *SMALL_TALK):
        for text in (*each.more_tasks, *each.more_names, *each.more_questions):
            assert not questions.is_near_a_test(text), text


def test_a_question_has_one_answer() -> None:
    by_question: dict[str, set[str]] = {}
    for answer in (*PYTHON_ANSWERS, *SMALL_TALK):
        more = (*answer.more_tasks, *answer.more_names, *answer.more_questions)
        for each in (*answer.tasks, *answer.names, *answer.questions, *answer.tests, *more):
            by_question.setdefault(questions.plain(each), set()).add(answer.text)
    twice = {each: texts for each, texts in by_question.items() if len(texts) > 1 and each}
    assert not twice
    topics = {name for entry in corpus.topic_entries() for name in entry.names}
    names = {name for each in PYTHON_ANSWERS for name in (*each.names, *each.more_names)}
    assert not topics & {name.removeprefix("a ").removeprefix("the ") for name in names}


def test_topics_are_answered_from_the_right_topic() -> None:
    """Each topic, asked in every wording that training does not use, by a name in any form."""
    random = Random(17)
    topics = corpus.topic_entries()
    asked = [
        (question.format(random.choice(corpus.wordings(random.choice(entry.names)))), entry)
        for entry in topics
        for question in corpus.TEST_QUESTIONS
    ]
    params = SamplingParams(temperature=0, max_tokens=40)
    with LLM(threads=1) as llm:
        outputs = llm.chat(
            [[{"role": "user", "content": question}] for question, _ in asked],
            sampling_params=params,
            use_tqdm=False,
        )
    wrong = [
        f"{question} -> {output.outputs[0].text[:60]!r}"
        for (question, entry), output in zip(asked, outputs, strict=True)
        if not output.outputs[0].text.startswith(corpus.answer(entry.text)[:50])
    ]
    assert len(wrong) <= 0.05 * len(asked), "\n".join([f"{len(wrong)} of {len(asked)}", *wrong])


def judged(llm: LLM, chats: list[tuple[list[str], KnownAnswer]]) -> list[str]:
    """Ask the last question of each chat, whose earlier turns the model answers too; the wrong.

    Each chat's turns before the last are questions; their answers come from the model.
    """
    params = SamplingParams(temperature=0, max_tokens=120)
    messages: list[list[dict[str, str]]] = [[] for _ in chats]
    for turn in range(max(len(asked) for asked, _ in chats)):
        rows = [n for n, (asked, _) in enumerate(chats) if turn < len(asked)]
        for row in rows:
            messages[row].append({"role": "user", "content": chats[row][0][turn]})
        outputs = llm.chat([messages[n] for n in rows], sampling_params=params, use_tqdm=False)
        for row, output in zip(rows, outputs, strict=True):
            reply = output.outputs[0]
            text = reply.text if reply.finish_reason == "stop" else f"{reply.text} (no end)"
            messages[row].append({"role": "assistant", "content": text})
    return [
        f"{asked[-1]} -> {said[-1]['content'][:70]!r}"
        for (asked, right), said in zip(chats, messages, strict=True)
        if not questions.is_right(said[-1]["content"], right)
        or said[-1]["content"].endswith("(no end)")
    ]


def test_common_questions_are_answered_in_words_that_training_never_saw(llm: LLM) -> None:
    # the bundled weights are older than the answers of every day
    asked = [([test], each) for each in FIRST_ANSWERS for test in each.tests]
    assert len(asked) >= 200
    wrong = judged(llm, asked)
    assert len(wrong) <= WRONG_OF_PYTHON, "\n".join([f"{len(wrong)} of {len(asked)}", *wrong])


def test_what_strangers_asked_is_answered(llm: LLM) -> None:
    """Titles of much-voted questions on Stack Overflow, 2008 to 2013 (CC BY-SA), as they were
    written there. They were chosen before any reply to them was seen: those that one of the answers
    fits, without those that training forms.
    """
    lines = (Path(__file__).parent / "asked_by_strangers.txt").read_text().splitlines()
    rows = [line.split("\t") for line in lines]
    asked = [
        ([title], next(each for each in PYTHON_ANSWERS if mark in each.text))
        for title, mark in rows
    ]
    assert len({title for title, _ in rows}) == 40
    wrong = judged(llm, asked)
    assert len(wrong) <= WRONG_OF_STRANGERS, "\n".join([f"{len(wrong)} of {len(asked)}", *wrong])


def test_forty_first_questions_of_a_newcomer_are_answered(llm: LLM) -> None:
    """Questions by somebody who knew only what the model is for, each with a pattern that any right
    answer has; both were written before a reply was seen. By eye one more is wrong.
    """
    lines = (Path(__file__).parent / "asked_by_newcomers.txt").read_text().splitlines()
    asked = [line.split("\t") for line in lines]
    assert len({question for question, _ in asked}) == 40
    chats = [[{"role": "user", "content": question}] for question, _ in asked]
    params = SamplingParams(temperature=0, max_tokens=160)
    texts = [output.outputs[0].text for output in llm.chat(chats, params, use_tqdm=False)]
    wrong = [
        f"{question} -> {text[:70]!r}"
        for (question, pattern), text in zip(asked, texts, strict=True)
        if not re.search(pattern, text, re.IGNORECASE)
    ]
    assert len(wrong) <= WRONG_OF_NEWCOMERS, "\n".join([f"{len(wrong)} of {len(asked)}", *wrong])


def test_training_asks_nothing_as_strangers_did() -> None:
    lines = (Path(__file__).parent / "asked_by_strangers.txt").read_text().splitlines()
    titles = {questions.plain(line.split("\t")[0]) for line in lines}
    random = Random(29)
    asked = {
        questions.plain(questions.ask(each, random, part=part))
        for each in PYTHON_ANSWERS
        for part in (1, 3)
        for _ in range(25)
    }
    assert len(asked) > 5_000
    assert not asked & titles


def test_small_talk_is_answered_and_what_it_cannot_do_is_said(llm: LLM) -> None:
    asked = [([test], each) for each in SMALL_TALK for test in each.tests]
    wrong = judged(llm, asked)
    assert len(wrong) <= WRONG_OF_SMALL_TALK, "\n".join([f"{len(wrong)} of {len(asked)}", *wrong])


def test_what_refers_to_the_turn_before_is_told_that_each_question_stands_alone(llm: LLM) -> None:
    firsts = ("How do I sort a list in Python?", "What are exceptions?", "hello", "What is 2+2?")
    asked = [([first, test], FOLLOW_UP) for first in firsts for test in FOLLOW_UP.tests]
    thanks = next(each for each in SMALL_TALK if each.text.startswith("You are welcome"))
    asked += [([first, "thanks"], thanks) for first in firsts]
    wrong = judged(llm, asked)
    assert len(wrong) <= WRONG_OF_FOLLOW_UPS, "\n".join([f"{len(wrong)} of {len(asked)}", *wrong])


def test_what_newcomers_ask_first_is_answered(llm: LLM) -> None:
    by_mark = {each.marks[0]: each for each in (*PYTHON_ANSWERS, *SMALL_TALK)}
    asked = {
        "hello": "Hello! I am the demo model",
        "hi": "Hello! I am the demo model",
        "What is 2+2?": "I cannot calculate",
        "How do I sort a list in Python?": "sorted(items)",
        "Who are you?": "a very small language model",
        "Tell me a joke": "I cannot write stories",
        "And what is it good for?": "I answer each question by itself",
    }
    wrong = judged(llm, [([asking], by_mark[mark]) for asking, mark in asked.items()])
    assert not wrong


def test_what_the_readme_asks_is_answered_from_its_topic(model: Any, tokenizer: Any) -> None:
    beginnings = {
        "What is an assert statement?": "Assert statements are a convenient way to insert",
        "Explain lambda.": "Lambda expressions (sometimes called lambda forms)",
    }
    for question, beginning in beginnings.items():
        chat = [{"role": "user", "content": question}]
        prompt = tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
        ids = complete(model, tokenizer, prompt, 20)
        assert tokenizer.decode(ids, skip_special_tokens=True).startswith(beginning)


def test_corpus_knows_topics_by_keyword_and_docstrings_by_full_name() -> None:
    names = {name for entry in corpus.topic_entries() for name in entry.names}
    assert {"assert", "lambda", "and", "dictionary", "assert statement", "for loop"} <= names
    texts = {name: entry.text for entry in corpus.docstrings() for name in entry.names}
    assert texts["os.path.join"].startswith("Join two or more pathname components")
    assert {"print", "str.join", "math.isclose", "textwrap.dedent"} <= set(texts)
    assert not any(part.startswith("_") for name in texts for part in name.split("."))
