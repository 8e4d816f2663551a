"""Embeddings of a whole stack, over HTTP and from Python, and while its processes are killed."""

from __future__ import annotations

import asyncio
import base64
import json
import os
import signal
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.helpers.embedders import WIDTH, new_tokenizer, reference_vectors, save_embedder
from tests.helpers.patience import PATIENCE_S
from tests.helpers.stacks import spareless_stack

from slipstream import AsyncClient, BadRequestError, Client, Stack, StackError
from slipstream.demo_model import MODEL_PATH
from slipstream.stack.supervisor_events import ProcessRestarted

pytestmark = pytest.mark.process

TEXTS = ["the cat sat", "dogs ran far", "a b c d. " * 9, "cat", "", "the mat on the cat sat."]
PROMPTS = {"query": "a cat ", "passage": "the "}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_embedder("BERT", tmp_path_factory.mktemp("bert"), prompts=PROMPTS)


@pytest.fixture(scope="module")
def stack(folder: Path) -> Iterator[Stack]:
    settings: dict[str, Any] = {"served_model_name": "tiny", "max_restarts": 1000}
    overrides = {"matryoshka_dimensions": [8, 16]}
    with Stack(str(folder), http_port=0, hf_overrides=overrides, **settings) as stack:
        yield stack


@pytest.fixture(scope="module")
def client(stack: Stack) -> Iterator[Client]:
    with stack.client() as client:
        yield client


def expected_of(folder: Path, texts: list[str]) -> np.ndarray[Any, Any]:
    return reference_vectors(folder, new_tokenizer()(texts)["input_ids"])


def post(stack: Stack, body: Any, path: str = "/v1/embeddings") -> tuple[int, Any]:
    request = urllib.request.Request(
        f"{stack.http_address}{path}",
        json.dumps(body).encode(),
        {"content-type": "application/json"},
    )
    try:
        with urllib.request.urlopen(request, timeout=PATIENCE_S) as answer:
            return answer.status, json.load(answer)
    except urllib.error.HTTPError as error:
        return error.code, json.load(error)


def test_floats_and_base64(stack: Stack, folder: Path) -> None:
    expected = expected_of(folder, TEXTS)
    status, found = post(stack, {"model": "tiny", "input": TEXTS})
    assert status == 200
    assert [each["index"] for each in found["data"]] == list(range(len(TEXTS)))
    vectors = np.array([each["embedding"] for each in found["data"]])
    assert np.abs(vectors - expected).max() <= 1e-5
    num_tokens = sum(map(len, new_tokenizer()(TEXTS)["input_ids"]))
    assert found["usage"] == {"prompt_tokens": num_tokens, "total_tokens": num_tokens}
    assert (found["object"], found["model"], found["data"][0]["object"]) == (
        "list",
        "tiny",
        "embedding",
    )
    status, coded = post(stack, {"input": TEXTS, "encoding_format": "base64"})
    assert status == 200
    same = [np.frombuffer(base64.b64decode(each["embedding"]), "<f4") for each in coded["data"]]
    assert np.abs(np.stack(same) - expected).max() <= 1e-5


@pytest.mark.parametrize("form", ["text", "ids", "list of ids"])
def test_forms_of_an_input(stack: Stack, folder: Path, form: str) -> None:
    [ids] = new_tokenizer()(TEXTS[:1])["input_ids"]
    given: Any = {"text": TEXTS[0], "ids": ids, "list of ids": [ids]}[form]
    status, found = post(stack, {"input": given})
    assert status == 200
    expected = expected_of(folder, TEXTS[:1])
    assert np.abs(np.array(found["data"][0]["embedding"]) - expected).max() <= 1e-5
    assert found["usage"]["prompt_tokens"] == len(ids)


def test_a_request_with_many_inputs(stack: Stack, folder: Path) -> None:
    texts = [TEXTS[at % len(TEXTS)] for at in range(700)]
    _, found = post(stack, {"input": texts, "encoding_format": "base64"})
    vectors = [np.frombuffer(base64.b64decode(each["embedding"]), "<f4") for each in found["data"]]
    expected = expected_of(folder, TEXTS)[np.arange(700) % len(TEXTS)]
    assert np.abs(np.stack(vectors) - expected).max() <= 1e-5


def test_vectors_are_cut_to_what_the_model_is_made_for(stack: Stack, client: Client) -> None:
    whole, short = client.embed("cat").vectors, client.embed("cat", dimensions=8).vectors
    assert short.shape == (1, 8)
    assert np.abs(short - whole[:, :8] / np.linalg.norm(whole[:, :8])).max() <= 1e-6
    assert np.array_equal(client.embed("cat", dimensions=WIDTH).vectors, whole)
    raw = client.embed("cat", normalize=False).vectors
    assert np.linalg.norm(raw) == pytest.approx(np.linalg.norm(raw @ whole.T), rel=1e-4)
    status, found = post(stack, {"input": "cat", "dimensions": 9})
    assert (status, found["error"]["param"]) == (400, "dimensions")
    assert "allowed: 8, 16, 32" in found["error"]["message"]


def test_prompts_by_their_names(client: Client, folder: Path) -> None:
    found = client.embed(["cat sat"], prompt_name="query").vectors
    assert np.abs(found - expected_of(folder, ["a cat cat sat"])).max() <= 1e-5


def test_long_inputs_are_cut_where_that_is_asked_for(
    stack: Stack, client: Client, folder: Path
) -> None:
    long = "the cat sat on mat. " * 40
    with pytest.raises(BadRequestError, match=r"^input\[1\]: got 242 tokens, allowed: 1 to 128"):
        client.embed(["cat", long])
    for most in (5, -1):
        ids = new_tokenizer()(long, truncation=True, max_length=128 if most < 0 else most)
        found = client.embed(["cat", long], truncate_prompt_tokens=most)
        expected = reference_vectors(folder, [ids["input_ids"]])
        assert np.abs(found.vectors[1] - expected).max() <= 1e-5
        assert found.num_prompt_tokens == [3, len(ids["input_ids"])]


@pytest.mark.parametrize(
    ("body", "param", "words"),
    [
        ({"input": []}, "input", "an empty list"),
        ({"input": ["a", 7]}, "input[1]", "input[1]"),
        ({"input": ["a"] * 2049}, "input", "got 2049 inputs, allowed: 2048"),
        ({"input": [[1], [64]]}, "input[1]", "allowed: token ids in [0, 64)"),
        ({"input": "a", "dimensions": 0}, "dimensions", "dimensions"),
        ({"input": "a", "dimensions": 5000}, "dimensions", "dimensions"),
        ({"input": "a", "truncate_prompt_tokens": 129}, "truncate_prompt_tokens", "1 to 128"),
        ({"input": "a", "prompt_name": "none"}, "prompt_name", "'passage', 'query'"),
        ({"input": "a", "encoding_format": "int8"}, "encoding_format", "base64"),
        ({"input": "cat " * 200}, "input", "allowed: 1 to 128 tokens"),
    ],
)
def test_bad_requests(stack: Stack, body: Any, param: str, words: str) -> None:
    status, found = post(stack, body)
    assert (status, found["error"]["param"]) == (400, param)
    assert words in found["error"]["message"]


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", {"prompt": "a"}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a"}]}),
        ("/v1/responses", {"input": "a"}),
        ("/v1/messages", {"messages": [{"role": "user", "content": "a"}], "max_tokens": 4}),
        ("/generate", {"prompt": "a"}),
    ],
)
def test_it_generates_nothing(stack: Stack, path: str, body: Any) -> None:
    status, found = post(stack, {"model": "tiny", **body}, path)
    assert status == 400
    assert "is served for embeddings: it generates no text" in found["error"]["message"]


def test_python_clients(stack: Stack, client: Client, folder: Path) -> None:
    with pytest.raises(BadRequestError, match="is served for embeddings"):
        client.generate("a")

    async def embed() -> Any:
        async with AsyncClient(stack.address) as other:
            return await asyncio.gather(*[other.embed(text) for text in TEXTS])

    found = asyncio.run(embed())
    vectors = np.concatenate([each.vectors for each in found])
    assert np.abs(vectors - expected_of(folder, TEXTS)).max() <= 1e-5


def test_metrics(stack: Stack, client: Client) -> None:
    client.embed(["cat", "the cat sat"])
    with urllib.request.urlopen(f"{stack.http_address}/metrics", timeout=PATIENCE_S) as answer:
        text = answer.read().decode()
    names = ("request_success_total", "prompt_tokens_total", "e2e_request_latency_seconds_count")
    for name in names:
        [line, *_] = [each for each in text.splitlines() if each.startswith(f"slipstream:{name}")]
        assert float(line.split()[-1]) > 0


@pytest.mark.parametrize("names", [("core",), ("worker",), ("core", "worker")])
def test_no_query_is_lost_where_processes_are_killed(
    stack: Stack, client: Client, folder: Path, names: tuple[str, ...]
) -> None:
    """A thousand queries of four threads, each checked; processes die twice meanwhile."""
    expected = expected_of(folder, TEXTS)
    errors: list[BaseException] = []
    num_answered = 0
    reached = {at: threading.Event() for at in (300, 600)}
    lock = threading.Lock()

    def ask() -> None:
        nonlocal num_answered
        try:
            for at in range(250):
                which = at % len(TEXTS)
                found = client.embed(TEXTS[which]).vectors
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
        for name in names:
            os.kill(pids[name], signal.SIGKILL)
        left = set(names)
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


def test_a_generator_embeds_nothing_unless_it_is_asked_to(tmp_path: Path) -> None:
    with spareless_stack("simulated:", http_port=0) as stack, stack.client() as client:
        with pytest.raises(BadRequestError, match="generates text: it is not served for embedd"):
            client.embed("a")
        status, found = post(stack, {"input": "a"})
        assert status == 400
        assert "(--runner pooling)" in found["error"]["message"]


def test_a_decoder_is_served_for_pooling(tmp_path: Path) -> None:
    """By its last token; the demo model has no file that says so."""
    with (
        spareless_stack(str(MODEL_PATH), runner="pooling") as stack,
        stack.client() as client,
    ):
        text = "Once upon a time"
        ids = client.tokenize(text)
        expected = reference_vectors(MODEL_PATH, [ids], "lasttoken")
        for given in (text, ids):
            assert np.abs(client.embed(given).vectors - expected).max() <= 1e-5


def test_models_that_are_wrong_are_refused_by_name(tmp_path: Path) -> None:
    save_embedder("MPNet", tmp_path)
    with pytest.raises(StackError, match="MPNetModel cannot be served for embeddings"):
        spareless_stack(str(tmp_path))
