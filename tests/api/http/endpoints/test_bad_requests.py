"""Every endpoint and everything that can be wrong with a request: each is refused with the field
named, and nobody else notices.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from tests.helpers.fake_worker import Entry, FakeWorker, deltas
from tests.helpers.http_front import JSON, Answer, Front, Raw

from slipstream.http.endpoints.openapi import ENDPOINTS
from slipstream_ipc.messages import Abort, End, Fault, Submit

USER = {"role": "user", "content": "hi"}
TOOL = {"type": "function", "function": {"name": "look"}}
GOOD: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": "x"},
    "/v1/chat/completions": {"messages": [USER]},
    "/v1/responses": {"input": "x"},
    "/v1/responses/input_tokens": {"input": "x"},
    "/v1/messages": {"model": "fake", "max_tokens": 2, "messages": [USER]},
    "/v1/messages/count_tokens": {"model": "fake", "messages": [USER]},
    "/v1/embeddings": {"input": "x"},
    "/classify": {"input": "x"},
    "/score": {"text_1": "x", "text_2": "y"},
    "/v1/score": {"text_1": "x", "text_2": "y"},
    "/rerank": {"query": "x", "documents": ["y"]},
    "/v1/rerank": {"query": "x", "documents": ["y"]},
    "/v2/rerank": {"query": "x", "documents": ["y"]},
    "/generate": {"text": "x"},
    "/tokenize": {"prompt": "x"},
    "/detokenize": {"tokens": [1]},
    "/abort": {"request_id": "cmpl-" + 32 * "0"},
    "/v1/load_lora_adapter": {"lora_name": "x", "lora_path": "/x"},
    "/v1/unload_lora_adapter": {"lora_name": "x"},
}
WITHOUT_MODEL = {"/abort", "/v1/load_lora_adapter", "/v1/unload_lora_adapter"}
# they ignore unknown fields
TOLERANT = {
    "/v1/completions",
    "/v1/chat/completions",
    "/v1/responses",
    "/v1/responses/input_tokens",
    "/v1/messages",
    "/v1/messages/count_tokens",
    "/v1/embeddings",
    "/classify",
    "/score",
    "/v1/score",
    "/rerank",
    "/v1/rerank",
    "/v2/rerank",
}
NO_JSON = (b"", b"{", b"[]", b"null", b'"x"', b"[" * 9999, b"\xff")
# path, fields that are added, which one is named
WRONG: list[tuple[str, dict[str, Any], str]] = [
    ("/v1/completions", {"prompt": 7}, "prompt"),
    ("/v1/completions", {"prompt": []}, "prompt"),
    ("/v1/completions", {"prompt": [1000]}, "prompt"),
    ("/v1/completions", {"prompt": ["x"] * 1025}, "prompt"),
    ("/v1/completions", {"prompt": ["x"] * 1024, "n": 5}, "n"),
    ("/v1/completions", {"n": 129}, "n"),
    ("/v1/completions", {"max_tokens": "many"}, "max_tokens"),
    ("/v1/completions", {"best_of": 2}, "best_of"),
    ("/v1/completions", {"prompt_logprobs": -2}, "prompt_logprobs"),
    ("/v1/completions", {"prompt_logprobs": 1, "stream": True}, "prompt_logprobs"),
    ("/v1/responses", {"input": []}, "input"),
    ("/v1/responses/input_tokens", {"input": 7}, "input"),
    ("/v1/responses", {"input": 7}, "input"),
    ("/v1/responses", {"input": [{"role": "user"}]}, "input[0].content"),
    ("/v1/responses", {"tools": [{"type": 7}]}, "tools[0].type"),
    ("/v1/responses", {"conversation": "conv_1"}, "conversation"),
    ("/v1/chat/completions", {"messages": []}, "messages"),
    ("/v1/chat/completions", {"messages": "x"}, "messages"),
    ("/v1/chat/completions", {"messages": [{"role": "user"}]}, "messages[0].content"),
    ("/v1/chat/completions", {"messages": [{**USER, "name": 1}]}, "messages[0].name"),
    (
        "/v1/chat/completions",
        {"messages": [{**USER, "tool_calls": [{"id": "a"}]}]},
        "messages[0].tool_calls[0].function",
    ),
    (
        "/v1/chat/completions",
        {"messages": [{**USER, "tool_calls": [{"function": {"name": "a", "arguments": 1}}]}]},
        "messages[0].tool_calls[0].function.arguments",
    ),
    ("/v1/chat/completions", {"tools": {}}, "tools"),
    ("/v1/chat/completions", {"tools": [{"type": "function"}]}, "tools"),
    ("/v1/chat/completions", {"tools": [TOOL], "tool_choice": "always"}, "tool_choice"),
    ("/v1/chat/completions", {"tools": [TOOL], "tool_choice": {"type": "function"}}, "tool_choice"),
    ("/v1/chat/completions", {"chat_template_kwargs": []}, "chat_template_kwargs"),
    (
        "/v1/chat/completions",
        {"chat_template_kwargs": {"chat_template": "x"}},
        "chat_template_kwargs",
    ),
    ("/v1/chat/completions", {"continue_final_message": True}, "continue_final_message"),
    ("/v1/chat/completions", {"chat_template": "x"}, "chat_template"),
    ("/v1/chat/completions", {"prompt_logprobs": 1, "stream": True}, "prompt_logprobs"),
    ("/v1/responses", {"input": 1}, "input"),
    ("/v1/responses", {"max_output_tokens": 0}, "max_output_tokens"),
    ("/v1/messages", {"messages": []}, "messages"),
    ("/v1/messages", {"messages": [{"role": "tool", "content": "x"}]}, "messages[0].role"),
    ("/v1/messages", {"messages": [{"role": "user"}]}, "messages[0].content"),
    ("/v1/messages", {"max_tokens": 0}, "max_tokens"),
    ("/v1/messages", {"system": 1}, "system"),
    ("/v1/messages", {"temperature": -1}, "temperature"),
    ("/v1/messages", {"stop_sequences": "x"}, "stop_sequences"),
    ("/v1/messages", {"stop_sequences": [""]}, "stop_sequences"),
    ("/v1/messages", {"tools": [TOOL]}, "tools[0].name"),
    ("/v1/messages", {"tool_choice": {"type": "x"}}, "tool_choice.type"),
    ("/v1/messages", {"thinking": {"type": "x"}}, "thinking.type"),
    ("/v1/messages/count_tokens", {"messages": []}, "messages"),
    ("/v1/messages/count_tokens", {"tools": {}}, "tools"),
    ("/generate", {"text": 1}, "text"),
    ("/generate", {"prompt": "y"}, "prompt"),
    ("/generate", {"text": None}, "prompt"),
    ("/generate", {"text": None, "token_ids": [1, "x"]}, "token_ids[1]"),
    ("/generate", {"text": None, "token_ids": [1000]}, "token_ids"),
    ("/generate", {"text": None, "prompt_token_ids": []}, "prompt_token_ids"),
    ("/generate", {"temperature": 0}, "temperature"),
    ("/generate", {"sampling_params": {"temperature": -1}}, "sampling_params.temperature"),
    ("/generate", {"sampling_params": {"temperature": "x"}}, "sampling_params.temperature"),
    ("/generate", {"sampling_params": {"nonsense": 1}}, "sampling_params.nonsense"),
    ("/generate", {"sampling_params": {"n": 0}}, "sampling_params.n"),
    ("/generate", {"sampling_params": {"logprobs": 21}}, "sampling_params.logprobs"),
    ("/generate", {"stream_options": {"include_usage": True}}, "stream_options"),
    (
        "/generate",
        {"sampling_params": {"prompt_logprobs": 1}, "stream": True},
        "sampling_params.prompt_logprobs",
    ),
    ("/tokenize", {"prompt": 1}, "prompt"),
    ("/tokenize", {"prompt": None}, "prompt"),
    ("/tokenize", {"messages": [USER]}, "prompt"),
    ("/v1/embeddings", {"input": 7}, "input"),
    ("/v1/embeddings", {"input": []}, "input"),
    ("/v1/embeddings", {"input": ["x", 7]}, "input[1]"),
    ("/v1/embeddings", {"input": ["x"] * 2049}, "input"),
    ("/classify", {"input": ["x", 7]}, "input[1]"),
    ("/classify", {"use_activation": 7}, "use_activation"),
    ("/score", {"text_2": None}, "text_1"),
    ("/score", {"queries": "x"}, "text_1"),
    ("/score", {"text_2": []}, "text_2"),
    ("/score", {"text_2": ["y", 7]}, "text_2[1]"),
    ("/score", {"text_2": ["y"] * 2049}, "text_2"),
    ("/v1/score", {"text_1": {}}, "text_1"),
    ("/rerank", {"documents": "y"}, "documents"),
    ("/v1/rerank", {"documents": None}, "documents"),
    ("/v2/rerank", {"documents": [7]}, "documents"),
    ("/rerank", {"documents": ["y", {"image": "z"}]}, "documents[1]"),
    ("/rerank", {"query": ["x", "z"]}, "query"),
    ("/rerank", {"top_n": -1}, "top_n"),
    ("/v1/embeddings", {"encoding_format": "int8"}, "encoding_format"),
    ("/v1/embeddings", {"dimensions": "x"}, "dimensions"),
    ("/v1/embeddings", {"normalize": True, "use_activation": False}, "use_activation"),
    ("/tokenize", {"tools": [TOOL]}, "tools"),
    ("/tokenize", {"prompt": None, "messages": []}, "messages"),
    ("/tokenize", {"prompt": None, "messages": [{"role": "user"}]}, "messages[0].content"),
    ("/tokenize", {"prompt": None, "messages": [USER], "tools": [{}]}, "tools"),
    ("/tokenize", {"add_special_tokens": 1}, "add_special_tokens"),
    ("/detokenize", {"tokens": "x"}, "tokens"),
    ("/detokenize", {"tokens": [1, None]}, "tokens[1]"),
    ("/detokenize", {"tokens": [1000]}, "tokens"),
    ("/detokenize", {"tokens": [-1]}, "tokens"),
    ("/detokenize", {"tokens": [2**70]}, "tokens"),
    ("/abort", {"request_id": 1}, "request_id"),
    ("/abort", {"request_id": "x"}, "request_id"),
    ("/abort", {"request_id": "cmpl-" + 32 * "0" + ".9999x9999"}, "request_id"),
    ("/v1/load_lora_adapter", {"lora_path": None}, "lora_path"),
    ("/v1/load_lora_adapter", {"lora_name": ["x"]}, "lora_name"),
    ("/v1/load_lora_adapter", {"load_inplace": "yes"}, "load_inplace"),
    ("/v1/unload_lora_adapter", {"lora_name": ""}, "lora_name"),
    ("/v1/unload_lora_adapter", {"lora_int_id": "one"}, "lora_int_id"),
]


@pytest.fixture(autouse=True)
def undisturbed(played: FakeWorker, front: Front) -> Any:
    """A stream that runs all the while, and says the rest of its text afterwards."""
    with Raw(front.port) as raw:
        raw.post("/v1/completions", {"prompt": "x", "stream": True})
        handle = played.expect_and_accept()
        played.send(deltas(Entry(handle, "a")))
        raw.read_until(b"\r\n\r\n")
        assert raw.read_event()["choices"][0]["text"] == "a"
        yield
        played.send(deltas(Entry(handle, "b", 1, end=End("stop", 2))))
        assert raw.read_event()["choices"][0]["text"] == "b"
        assert raw.read_event() == "[DONE]"


@pytest.fixture(scope="module")
def locked(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Front]:
    """A front that wants a key, with a worker of its own: `played` sends to its latest client."""
    worker = FakeWorker(f"ipc://{tmp_path_factory.mktemp('locked')}/client.sock")
    front = Front(worker.address, api_keys=("right",))
    yield front
    front.stop()
    worker.stop()


def error_of(path: str, answer: Answer) -> dict[str, Any]:
    """The fields of an error. Of Anthropic's the field is what its message begins with."""
    if not path.startswith("/v1/messages"):
        return answer.error
    error: dict[str, Any] = answer.json["error"]
    assert set(error) - {"details"} == {"type", "message"}
    field = error["message"].partition(":")[0]
    param = None if field.startswith("the body") else field
    return {**error, "param": param, "code": error.get("details", {}).get("error_code")}


def refusal(raw: Raw, path: str, body: Any, *headers: str) -> dict[str, Any]:
    raw.post(path, body, *headers)
    answer = raw.read()
    assert answer.status == 400, answer.body
    error = error_of(path, answer)
    assert error["type"] == "invalid_request_error"
    return error


def test_the_table_has_every_path_that_takes_a_body():
    assert set(GOOD) == {path for path, each in ENDPOINTS.items() if each.body is not None}
    assert {path for path, _, _ in WRONG} == set(GOOD)


@pytest.mark.parametrize("path", GOOD)
def test_what_is_no_json_object(raw, path):
    for body in NO_JSON:
        assert refusal(raw, path, body)["param"] is None


@pytest.mark.parametrize("path", sorted(GOOD.keys() - TOLERANT))
def test_what_nobody_knows(raw, path):
    error = refusal(raw, path, {**GOOD[path], "nonsense": 1})
    assert error["param"] == "nonsense"
    assert "nonsense" in error["message"]


@pytest.mark.parametrize("path", GOOD)
def test_bytes_that_are_no_text(raw, path):
    name = next(iter(GOOD[path])).encode()
    refusal(raw, path, b'{"%b": "\xff\xfe"}' % name)
    refusal(raw, path, b'{"%b": "\\ud800"}' % name)


@pytest.mark.parametrize("path", GOOD)
def test_what_has_to_be_there(raw, path):
    assert refusal(raw, path, {})["param"] in {*GOOD[path], "prompt"}


@pytest.mark.parametrize("path", sorted(GOOD.keys() - WITHOUT_MODEL))
def test_another_model(raw, path):
    raw.post(path, {**GOOD[path], "model": "gpt-4"})
    answer = raw.read()
    error = error_of(path, answer)
    assert (answer.status, error["code"]) == (404, "model_not_found")
    assert error["param"] == "model"


@pytest.mark.parametrize(("path", "fields", "param"), WRONG)
def test_the_field_is_named(raw, path, fields, param):
    given = {**GOOD[path], **fields}
    given = {name: value for name, value in given.items() if value is not None}
    error = refusal(raw, path, given)
    assert error["param"] == param
    assert error["message"]


@pytest.mark.parametrize("path", GOOD)
def test_what_is_too_large(front, path):
    with Raw(front.port) as raw:
        raw.send(
            f"POST {path} HTTP/1.1\r\nHost: localhost\r\n{JSON}\r\nContent-Length: 100001\r\n\r\n"
        )
        assert raw.read().status == 413
    with Raw(front.port) as raw:
        raw.send(f"POST {path} HTTP/1.1\r\nHost: localhost\r\nX: {'y' * 9000}\r\n\r\n")
        assert raw.read().status == 431


@pytest.mark.parametrize("path", GOOD)
def test_what_says_that_it_is_no_json(front, path):
    with Raw(front.port) as raw:
        raw.send(f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: text/plain\r\n\r\n")
        assert raw.read().status == 415


@pytest.mark.parametrize("path", [path.replace("{id}", "fake") for path in ENDPOINTS])
def test_other_methods(front, path):
    allowed = {"GET", "POST"}
    methods = ["DELETE", "PUT", "PATCH"]
    if path.startswith("/v1/responses/") and path not in GOOD:
        allowed = {"GET, DELETE, POST"}
        methods.remove("DELETE")
    with Raw(front.port) as raw:
        for method in methods:
            with Raw(front.port) as other:
                other.send(f"{method} {path} HTTP/1.1\r\nHost: localhost\r\n\r\n")
                answer = other.read()
                code = error_of(path, answer)["code"]
                assert (answer.status, code) == (405, "method_not_allowed")
                assert answer.headers["allow"] in allowed
        raw.send(f"OPTIONS {path} HTTP/1.1\r\nHost: localhost\r\n\r\n")
        answer = raw.read(with_body=False)
        assert answer.status == 204
        assert "OPTIONS" in answer.headers["allow"]


@pytest.mark.parametrize(
    "path", [path.replace("{id}", "fake") for path, each in ENDPOINTS.items() if each.has_key]
)
def test_without_the_key(locked, path):
    for headers in ((), ("Authorization: Bearer wrong",)):
        with Raw(locked.port) as raw:
            if path not in GOOD:
                answer = raw.get(path, *headers)
            else:
                raw.post(path, GOOD[path], *headers)
                answer = raw.read()
            code = error_of(path, answer)["code"]
            assert (answer.status, code) == (401, "invalid_api_key")


def test_good_ones_are_taken(played, raw):
    """Or every refusal above could be for another reason."""
    for path, kind in (
        ("/v1/completions", "text"),
        ("/generate", "text"),
        ("/v1/chat/completions", "messages"),
        ("/v1/messages", "messages"),
    ):
        raw.post(path, {**GOOD[path]})
        submit = played.expect(Submit)
        assert getattr(submit, kind)
        played.accept(submit)
        played.send(deltas(Entry(submit.handle, "x", end=End("stop", 1))))
        assert raw.read().status == 200


@pytest.mark.parametrize("is_stream", [False, True])
def test_a_prompt_that_the_engine_refuses_is_named(played, raw, is_stream):
    raw.post("/v1/completions", {"prompt": ["a", "b", "c"], "stream": is_stream})
    submits = [played.expect(Submit) for _ in range(3)]
    played.accept(submits[0])
    played.reject(submits[2], Fault("bad_request", "prompt: got 9 tokens, allowed: 7", "prompt"))
    answer = raw.read()
    assert answer.status == 400
    assert answer.error["message"] == "prompt[2]: prompt: got 9 tokens, allowed: 7"
    for _ in range(2):
        played.expect(Abort)
    assert answer.error["param"] == "prompt"


def test_a_prompt_that_the_front_refuses_is_named(played, raw):
    for prompts, message in (
        ([[1], [10**6]], "prompt[1]: "),
        ([[10**6]], "prompt: "),
    ):
        raw.post("/v1/completions", {"prompt": prompts})
        answer = raw.read()
        assert answer.status == 400
        assert answer.error["message"].startswith(message)
