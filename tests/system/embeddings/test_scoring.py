"""Classes, scores and ranks of whole stacks, over HTTP and from Python, and while processes are
killed.
"""

from __future__ import annotations

import asyncio
import os
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.helpers.embedders import (
    new_tokenizer,
    reference_logits,
    reference_vectors,
    save_classifier,
    save_decoder,
    save_embedder,
)
from tests.helpers.patience import PATIENCE_S
from tests.helpers.stacks import spareless_stack
from tests.system.embeddings.test_embeddings import post

from slipstream import LLM, AsyncClient, BadRequestError, Client, Stack
from slipstream.stack.supervisor_events import ProcessRestarted

pytestmark = pytest.mark.process

QUERY = "the cat sat"
DOCUMENTS = ["dogs ran far", "a b c d. " * 9, "cat", "the mat on the cat sat.", "a dog"]
LABELS = ("no", "maybe", "yes")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_classifier("BERT", tmp_path_factory.mktemp("cross"))


@pytest.fixture(scope="module")
def stack(folder: Path) -> Iterator[Stack]:
    """Two workers, between which calls are spread."""
    settings: dict[str, Any] = {"max_restarts": 1000, "output_workers": 2}
    with Stack(str(folder), http_port=0, served_model_name="tiny", **settings) as stack:
        yield stack


@pytest.fixture(scope="module")
def client(stack: Stack) -> Iterator[Client]:
    with stack.client() as client:
        yield client


@pytest.fixture(scope="module")
def expected(folder: Path) -> np.ndarray[Any, Any]:
    return scores_of(folder, QUERY, DOCUMENTS)


def scores_of(folder: Path, query: str, documents: list[str]) -> np.ndarray[Any, Any]:
    given = new_tokenizer()([query] * len(documents), documents)
    logits = reference_logits(folder, given["input_ids"], given["token_type_ids"])[:, 0]
    return 1 / (1 + np.exp(-logits))


@pytest.mark.parametrize(
    ("path", "names"),
    [
        ("/score", ("text_1", "text_2")),
        ("/v1/score", ("queries", "documents")),
        ("/score", ("data_1", "data_2")),
        ("/score", ("queries", "items")),
    ],
)
def test_scores(stack: Stack, expected: Any, path: str, names: tuple[str, str]) -> None:
    status, found = post(stack, dict(zip(names, (QUERY, DOCUMENTS), strict=True)), path)
    assert status == 200
    assert [each["index"] for each in found["data"]] == list(range(len(DOCUMENTS)))
    scores = np.array([each["score"] for each in found["data"]])
    assert np.abs(scores - expected).max() <= 1e-5
    assert np.ptp(expected) > 0.01
    num = sum(map(len, new_tokenizer()([QUERY] * len(DOCUMENTS), DOCUMENTS)["input_ids"]))
    assert found["usage"] == {"prompt_tokens": num, "total_tokens": num}
    assert (found["object"], found["model"], found["data"][0]["object"]) == (
        "list",
        "tiny",
        "score",
    )
    assert found["id"].startswith("score-")


@pytest.mark.parametrize("path", ["/rerank", "/v1/rerank", "/v2/rerank"])
def test_rerank(stack: Stack, expected: Any, path: str) -> None:
    order = np.argsort(-expected).tolist()
    body = {"model": "tiny", "query": QUERY, "documents": DOCUMENTS}
    status, found = post(stack, body, path)
    assert status == 200
    assert [each["index"] for each in found["results"]] == order
    assert [each["document"]["text"] for each in found["results"]] == [
        DOCUMENTS[at] for at in order
    ]
    scores = [each["relevance_score"] for each in found["results"]]
    assert scores == pytest.approx(expected[order].tolist(), abs=1e-5)
    few = {**body, "top_n": 2, "return_documents": False, "documents": [{"text": "a"}, "cat", "b"]}
    status, found = post(stack, few, path)
    assert status == 200
    assert len(found["results"]) == 2
    assert set(found["results"][0]) == {"index", "relevance_score"}
    status, found = post(stack, {**body, "documents": []}, path)
    assert (status, found["results"]) == (200, [])


def test_a_request_with_many_documents(stack: Stack, expected: Any) -> None:
    documents = [DOCUMENTS[at % len(DOCUMENTS)] for at in range(700)]
    _, found = post(stack, {"query": QUERY, "documents": documents}, "/rerank")
    scores = {each["index"]: each["relevance_score"] for each in found["results"]}
    whole = expected[np.arange(700) % len(DOCUMENTS)]
    assert np.abs(np.array([scores[at] for at in range(700)]) - whole).max() <= 1e-5


def test_python_clients(stack: Stack, client: Client, expected: Any) -> None:
    found = client.score(QUERY, DOCUMENTS)
    assert np.abs(found.scores - expected).max() <= 1e-5
    pairs = client.score([QUERY] * len(DOCUMENTS), DOCUMENTS, use_activation=False)
    logits = np.log(expected / (1 - expected))
    assert np.abs(pairs.scores - logits).max() <= 1e-3
    best = client.rerank(QUERY, DOCUMENTS, top_n=1)[0]
    assert (best.index, best.document) == (expected.argmax(), DOCUMENTS[expected.argmax()])
    assert client.rerank(QUERY, []) == []
    with pytest.raises(BadRequestError, match="is served for classes and scores, not for embedd"):
        client.embed("a")
    with pytest.raises(BadRequestError, match="is served for classes and scores: it generates no"):
        client.generate("a")

    async def score() -> Any:
        async with AsyncClient(stack.address) as other:
            calls = [other.score(QUERY, text) for text in DOCUMENTS]
            ranked = await other.rerank(QUERY, DOCUMENTS)
            classes = await other.classify(QUERY)
            return await asyncio.gather(*calls), ranked, classes

    several, ranked, classes = asyncio.run(score())
    assert np.abs(np.concatenate([each.scores for each in several]) - expected).max() <= 1e-5
    assert [each.index for each in ranked] == np.argsort(-expected).tolist()
    assert (classes.labels, classes.best) == (("relevant",), ["relevant"])


@pytest.mark.parametrize(
    ("path", "body", "param", "words"),
    [
        ("/score", {"text_1": "a"}, "text_1", "allowed: text_1 and text_2, or queries and docum"),
        ("/score", {"text_1": "a", "documents": "b"}, "text_1", "got documents, text_1"),
        ("/score", {"text_1": ["a", "b"], "text_2": ["c"]}, "text_1", "as many as of text_2"),
        ("/score", {"text_1": "a", "text_2": ["b"] * 2049}, "text_2", "got 2049 inputs"),
        ("/score", {"queries": "a", "documents": ["b", "c " * 200]}, "documents[1]", "1 to 128"),
        ("/rerank", {"query": "a", "documents": ["b", "c " * 200]}, "documents[1]", "1 to 128"),
        ("/rerank", {"query": "a", "documents": ["b", 7]}, "documents[1]", "a text"),
        ("/rerank", {"query": "a", "documents": ["b"], "top_n": -1}, "top_n", "0 or None for all"),
        ("/rerank", {"query": "a", "documents": ["b"], "instruction": "c"}, "instruction", "none"),
        ("/rerank", {"documents": ["b"]}, "query", "query"),
        ("/classify", {"input": []}, "input", "an empty list"),
        ("/classify", {"input": ["a", "b " * 200]}, "input[1]", "1 to 128"),
        ("/v1/embeddings", {"input": "a"}, None, "--convert embed"),
    ],
)
def test_bad_requests(stack: Stack, path: str, body: Any, param: str | None, words: str) -> None:
    status, found = post(stack, body, path)
    assert (status, found["error"]["param"]) == (400, param)
    assert words in found["error"]["message"]


def test_long_documents_are_cut_where_that_is_asked_for(client: Client, folder: Path) -> None:
    long = "the cat sat on mat. " * 40
    given = new_tokenizer()(QUERY, long, truncation=True, max_length=128)
    types = [given["token_type_ids"]]
    logits = reference_logits(folder, [given["input_ids"]], types)
    found = client.score(QUERY, long, truncate_prompt_tokens=-1, use_activation=False)
    assert found.scores == pytest.approx(logits[0], abs=1e-4)
    assert found.num_prompt_tokens == [128]
    found = client.score(QUERY, long, max_tokens_per_doc=4)
    assert found.scores == pytest.approx(scores_of(folder, QUERY, ["the cat sat on"]), abs=1e-5)


@pytest.mark.parametrize("names", [("core",), ("core", "worker")])
def test_no_query_is_lost_where_processes_are_killed(
    stack: Stack, client: Client, expected: Any, names: tuple[str, ...]
) -> None:
    """A thousand queries of four threads, each checked; processes die twice meanwhile."""
    errors: list[BaseException] = []
    num_answered = 0
    reached = {at: threading.Event() for at in (300, 600)}
    lock = threading.Lock()

    def ask() -> None:
        nonlocal num_answered
        try:
            for at in range(250):
                which = at % len(DOCUMENTS)
                found = client.score(QUERY, DOCUMENTS[which]).scores
                assert np.abs(found - expected[which]).max() <= 1e-5
                with lock:
                    num_answered += 1
                    if num_answered in reached:
                        reached[num_answered].set()
        except BaseException as error:
            errors.append(error)
            for each in reached.values():
                each.set()

    threads = [threading.Thread(target=ask) for _ in range(4)]
    for thread in threads:
        thread.start()
    for event in reached.values():
        assert event.wait(PATIENCE_S)
        stack.events()
        pids = stack.pids
        killed = [name for name in pids if name.rstrip("-0123456789") in names]
        for name in killed:
            os.kill(pids[name], signal.SIGKILL)
        left = set(killed)
        while left:
            ended = stack.next_event(PATIENCE_S)
            assert ended is not None
            if isinstance(ended, ProcessRestarted):
                left.discard(ended.name)
    for thread in threads:
        thread.join(PATIENCE_S)
        assert not thread.is_alive()
    assert not errors
    assert num_answered == 1000


def test_classes(tmp_path: Path) -> None:
    """Of a model with three labels, which scores nothing."""
    save_classifier("DistilBERT", tmp_path, labels=LABELS)
    ids = new_tokenizer()(DOCUMENTS)["input_ids"]
    logits = reference_logits(tmp_path, ids)
    probs = np.exp(logits) / np.exp(logits).sum(1, keepdims=True)
    with spareless_stack(str(tmp_path), http_port=0) as stack, stack.client() as client:
        status, found = post(stack, {"input": DOCUMENTS}, "/classify")
        assert status == 200
        assert np.abs(np.array([each["probs"] for each in found["data"]]) - probs).max() <= 1e-5
        assert [each["label"] for each in found["data"]] == [LABELS[at] for at in probs.argmax(1)]
        assert {each["num_classes"] for each in found["data"]} == {3}
        assert found["usage"]["prompt_tokens"] == sum(map(len, ids))
        classes = client.classify(ids, use_activation=False)
        assert np.abs(classes.probs - logits).max() <= 1e-4
        assert classes.best == [LABELS[at] for at in probs.argmax(1)]
        with pytest.raises(BadRequestError, match="a model of 3 labels, allowed: one that has one"):
            client.score("a", "b")


def test_an_embedder_scores_by_cosine(tmp_path: Path) -> None:
    save_embedder("BERT", tmp_path)
    vectors = reference_vectors(tmp_path, new_tokenizer()([QUERY, *DOCUMENTS])["input_ids"])
    cosines = vectors[1:] @ vectors[0]
    with spareless_stack(str(tmp_path), http_port=0) as stack, stack.client() as client:
        assert np.abs(client.score(QUERY, DOCUMENTS).scores - cosines).max() <= 1e-5
        status, found = post(stack, {"query": QUERY, "documents": DOCUMENTS, "top_n": 1}, "/rerank")
        assert (status, found["results"][0]["index"]) == (200, cosines.argmax())
        status, found = post(stack, {"input": "a"}, "/classify")
        assert status == 400
        assert "(--convert classify serves it so)" in found["error"]["message"]


def test_a_decoder_that_answers_with_a_word(tmp_path: Path) -> None:
    """As vLLM serves Qwen3-Reranker; its pairs need a template."""
    save_decoder("Qwen3", tmp_path)
    overrides = {
        "architectures": ["Qwen3ForSequenceClassification"],
        "classifier_from_token": ["cat", "dog"],
        "is_original_qwen3_reranker": True,
    }
    template = (
        "{% for turn in messages if turn.role in ('query', 'document') %}{{ turn.content }} "
        "{% endfor %}{{ instruction or 'away' }}"
    )
    settings: dict[str, Any] = {"hf_overrides": overrides}
    with LLM(str(tmp_path), chat_template=template, **settings) as llm:
        found = llm.score("cat", ["dog", "mat"], instruction="far")
        whole = llm.classify(["cat dog far", "cat mat far"])
        ranked = llm.rerank("cat", ["dog", "mat"], instruction="far", top_n=1)
    assert [each.outputs.score for each in found] == pytest.approx(
        [each.outputs.probs[0] for each in whole], abs=1e-6
    )
    assert ranked[0].relevance_score == max(each.outputs.score for each in found)
    with spareless_stack(str(tmp_path), **settings) as stack, stack.client() as client:
        with pytest.raises(BadRequestError, match="start the server with --chat-template FILE"):
            client.score("cat", "dog")
        assert client.classify("cat dog far").probs[0, 0] == pytest.approx(
            whole[0].outputs.probs[0], abs=1e-6
        )
