"""/tokenize, /detokenize, and what a chat template is given: a worker that tests play, then real
processes with the model's own tokenizer, and one whose template knows tools.
"""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import signal
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from msgspec import structs
from openai import OpenAI
from tests.helpers.fake_worker import FakeWorker
from tests.helpers.http_front import Front, Raw
from tests.helpers.patience import PATIENCE_S
from tests.helpers.stacks import spareless_stack
from transformers import AutoTokenizer

from slipstream import BadRequestError, Client, ConnectionLostError, Stack
from slipstream.client.connection.queries import PendingQueries, new_tokenize
from slipstream.client.connection.thread_io import ThreadIO
from slipstream.demo_model import MODEL_PATH
from slipstream.http.api_errors import ApiError
from slipstream.http.exchange import HttpRequest
from slipstream.http.native.tokenize import MAX_IDS_FLOOR, detokenize, tokenize
from slipstream_ipc.columns import pack_u32
from slipstream_ipc.messages import (
    Cancelled,
    Detokenize,
    Detokenized,
    Fault,
    ModelCard,
    Ping,
    Submit,
    TemplateOptions,
    Tokenize,
    Tokenized,
)
from slipstream_ipc.validation.chat_template import (
    MAX_QUERY_CHARS,
    MAX_QUERY_TOKENS,
    MAX_SPELLED_TOKENS,
)

TEMPLATE = """
{%- if tools %}T:{% for tool in tools %}{{ tool.function.name }} {% endfor %}{% endif %}
{%- for message in messages %}{{ message.role }}={{ message.content }}
{%- for call in message.tool_calls or [] -%}
!{{ call.function.name }}({{ call.function.arguments.x }})
{%- endfor -%}
{%- if message.tool_call_id %}#{{ message.tool_call_id }}{% endif %};{% endfor %}
{%- if mood %}mood={{ mood }};{% endif %}{% if add_generation_prompt %}GO{% endif %}"""
TOOLS = [{"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}]
USER = {"role": "user", "content": "hi"}
TEXT = "Once upon a time, naïve 日本\n"


# ---- a worker that tests play ------------------------------------------------------------------


def test_what_is_asked_and_answered(played, raw):
    raw.post("/tokenize", {"prompt": "hi", "add_special_tokens": False, "return_token_strs": True})
    asked = played.expect(Tokenize)
    assert (asked.text, asked.add_special_tokens, asked.with_strings) == ("hi", False, True)
    played.send(Tokenized(asked.number, pack_u32([4, 5]), ("h", "i")))
    assert raw.read().json == {
        "count": 2,
        "max_model_len": 2048,
        "tokens": [4, 5],
        "token_strs": ["h", "i"],
    }
    raw.post("/detokenize", {"tokens": [4, 5]})
    back = played.expect(Detokenize)
    assert (back.token_ids, back.skip_special_tokens) == (pack_u32([4, 5]), False)
    played.send(Detokenized(back.number, "hi"))
    assert raw.read().json == {"prompt": "hi"}


@pytest.mark.process
def test_each_key_has_its_own_turn(worker):
    """The worker takes turns among the tenants that questions name, as among those of streams."""
    front = Front(worker.address, api_keys=("one", "two"))
    found: dict[str, set[bytes]] = {"one": set(), "two": set()}
    chat = {"messages": [USER]}
    try:
        for key, tenants in found.items():
            for path, body in (
                ("/tokenize", {"prompt": "x"}),
                ("/detokenize", {"tokens": [1]}),
                ("/v1/messages/count_tokens", chat),
                ("/v1/responses/input_tokens", {"input": "x"}),
            ):
                with Raw(front.port) as raw:
                    asked_for = {**body, "model": worker.model.name}
                    raw.post(path, asked_for, f"Authorization: Bearer {key}")
                    kind = Detokenize if path == "/detokenize" else Tokenize
                    asked = worker.expect(kind)
                    tenants.add(asked.tenant)
                    fault = Fault("overloaded", "no")
                    answer = Detokenized if kind is Detokenize else Tokenized
                    worker.send(answer(asked.number, fault=fault))
                    assert raw.read().status == 503
    finally:
        front.stop()
    assert [len(tenants) for tenants in found.values()] == [1, 1]
    assert found["one"] != found["two"]
    assert {len(tenant) for tenants in found.values() for tenant in tenants} == {16}


@pytest.mark.parametrize(
    ("fault", "status", "param"),
    [
        (Fault("bad_request", "prompt: too long", "prompt"), 400, "prompt"),
        (Fault("overloaded", "1024 queries are waiting"), 503, None),
        (Fault("engine", "it died twice"), 500, None),
    ],
)
def test_faults_have_their_status(played, raw, fault, status, param):
    raw.post("/tokenize", {"prompt": "hi"})
    played.send(Tokenized(played.expect(Tokenize).number, fault=fault))
    answer = raw.read()
    assert (answer.status, answer.error["param"]) == (status, param)
    assert ("retry-after" in answer.headers) == (status == 503)


def test_it_is_asked_again_over_an_attach(played, raw):
    raw.post("/tokenize", {"prompt": "hi"})
    asked = played.expect(Tokenize)
    played.tell_to_attach()
    played.hellos.get(timeout=PATIENCE_S)
    again = played.expect(Tokenize)
    assert again == asked
    played.send(Tokenized(asked.number, pack_u32([1])))
    played.send(Tokenized(asked.number, pack_u32([2])))  # the first one's, late: ignored
    assert raw.read().json["tokens"] == [1]


@pytest.mark.parametrize(
    "wrong",
    [
        lambda number: Cancelled(number, ("ended",)),
        lambda number: Detokenized(number, "x"),
        lambda number: Tokenized(number, b"123"),
        lambda number: Tokenized(number, pack_u32([1]), ("a", "b")),
    ],
)
def test_an_answer_to_something_else_is_a_breach(played, raw, wrong):
    raw.post("/tokenize", {"prompt": "hi"})
    asked = played.expect(Tokenize)
    played.send(wrong(asked.number))
    played.hellos.get(timeout=PATIENCE_S)
    again = played.expect(Tokenize)
    played.send(Tokenized(again.number, pack_u32([1])))
    assert raw.read().json["tokens"] == [1]


def test_who_leaves_disturbs_nobody(played, front):
    with Raw(front.port) as raw:
        raw.post("/tokenize", {"prompt": "gone"})
        asked = played.expect(Tokenize)
    with Raw(front.port) as raw:
        raw.post("/tokenize", {"prompt": "here"})
        second = played.expect(Tokenize)
        played.send(Tokenized(asked.number, pack_u32([1])))
        played.send(Tokenized(second.number, pack_u32([2])))
        assert raw.read().json["tokens"] == [2]


def test_a_chats_tools_travel(played, raw):
    call = {"id": "c1", "type": "function", "function": {"name": "look", "arguments": '{"x": 1}'}}
    body = {
        "messages": [
            {**USER, "name": "me"},
            {"role": "assistant", "content": None, "tool_calls": [call]},
            {"role": "tool", "content": [{"type": "text", "text": "42"}], "tool_call_id": "c1"},
        ],
        "tools": TOOLS,
        "tool_choice": "auto",
        "chat_template_kwargs": {"mood": "good"},
        "add_generation_prompt": False,
        "continue_final_message": True,
    }
    raw.post("/v1/chat/completions", body)
    submit = played.expect(Submit)
    template = submit.template
    assert json.loads(template.tools) == TOOLS
    assert (template.kwargs, template.add_generation_prompt) == ('{"mood":"good"}', False)
    assert template.continue_final_message
    first, second, third = submit.messages
    assert first.name == "me"
    assert (second.content, second.tool_calls[0].function.name) == ("", "look")
    assert (third.content, third.tool_call_id) == ("42", "c1")
    played.reject(submit, Fault("overloaded", "x"))
    assert raw.read().status == 503
    raw.post("/v1/chat/completions", {"messages": [USER], "tools": [], "tool_choice": "none"})
    submit = played.expect(Submit)
    assert submit.template.kwargs == ""
    played.reject(submit, Fault("overloaded", "x"))
    raw.read()


def test_a_server_that_is_away_is_not_waited_for_without_end(address):
    io = ThreadIO(address, timeout_s=0.05)
    try:
        with pytest.raises(ConnectionLostError):
            io.ask(new_tokenize("x")).result(timeout=PATIENCE_S)
    finally:
        io.close()
    with pytest.raises(Exception, match="closed"):
        io.ask(new_tokenize("x")).result(timeout=PATIENCE_S)


def test_a_front_without_a_worker_says_that_it_is_not_ready(worker):
    front = Front(worker.address, timeout_s=0.2)
    try:
        with Raw(front.port) as raw:
            worker.stop()
            raw.post("/tokenize", {"prompt": "x"})
            answer = raw.read()
            assert (answer.status, answer.error["code"]) == (503, "not_ready")
    finally:
        front.stop()


def test_messages_that_cannot_travel_are_refused(worker: FakeWorker) -> None:
    with Client(worker.address) as client:
        half = {"function": {"name": "a", "arguments": '{"x": "\ud800"}'}}
        for prompt, field in (
            ([1, 2], "prompt"),
            ("\ud800", "prompt"),
            ([{"role": "user", "content": "x", "name": "\ud800"}], "messages[0].name"),
            ([{"role": "assistant", "content": "", "tool_calls": [half]}], "messages[0]"),
            ("x" * 17_000_000, "prompt"),
        ):
            with pytest.raises(BadRequestError) as caught:
                client.tokenize(prompt)
            assert caught.value.field == field
        for ids in ([-1], [1000], "x", [[1]]):
            with pytest.raises(BadRequestError) as caught:
                client.detokenize(ids)
            assert caught.value.field == "token_ids"
        with pytest.raises(BadRequestError, match="tools"):
            client.tokenize("x", tools=[{}])


# ---- real processes ----------------------------------------------------------------------------


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The demo model's tokenizer with a template that knows tools."""
    found = tmp_path_factory.mktemp("tokenizer")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(MODEL_PATH / name, found)
    (found / "chat_template.jinja").write_text(TEMPLATE)
    return found


@pytest.fixture(scope="module")
def stack(folder: Path) -> Iterator[Stack]:
    model = "simulated:step_ms=0,prefill_us=0"
    options = {"tokenizer": str(folder), "served_model_name": "tiny", "http_port": 0}
    with spareless_stack(model, **options) as running:
        yield running


@pytest.fixture(scope="module")
def tokenizer(folder: Path) -> Any:
    return AutoTokenizer.from_pretrained(folder)


@pytest.fixture
def connection(stack: Stack) -> Iterator[Raw]:
    assert stack.http_address is not None
    with Raw(int(stack.http_address.rpartition(":")[2])) as found:
        yield found


def ask(connection: Raw, path: str, **body: Any) -> Any:
    connection.post(path, body)
    answer = connection.read()
    assert answer.status == 200, answer.body
    return answer.json


def test_tokens_are_the_tokenizers_own(connection, tokenizer):
    for text in (TEXT, "", "a" * 5000, "<|user|>\n"):
        found = ask(connection, "/tokenize", prompt=text, return_token_strs=True, model="tiny")
        ids = tokenizer(text)["input_ids"]
        assert (found["tokens"], found["count"]) == (ids, len(ids))
        assert found["token_strs"] == tokenizer.convert_ids_to_tokens(ids)
        assert ask(connection, "/detokenize", tokens=ids) == {"prompt": tokenizer.decode(ids)}
    assert found["max_model_len"] == 4096


def test_spellings_are_told_of_so_many_tokens_and_more_are_refused(connection):
    text = "日本" * (MAX_SPELLED_TOKENS // 2)  # three tokens to a character
    connection.post("/tokenize", {"prompt": text, "return_token_strs": True})
    answer = connection.read()
    assert (answer.status, answer.error["param"]) == (400, "return_token_strs")
    assert f"at most {MAX_SPELLED_TOKENS} tokens" in answer.error["message"]
    assert ask(connection, "/tokenize", prompt=text)["count"] > MAX_SPELLED_TOKENS


def test_a_body_of_too_many_values_is_read_by_nobody(connection):
    for path in ("/v1/completions", "/v1/chat/completions", "/generate", "/tokenize", "/abort"):
        connection.post(path, b'{"prompt": [' + b"1," * (2**20 + 1))
        answer = connection.read()
        assert (answer.status, answer.error["code"]) == (413, "request_too_large")
    assert ask(connection, "/detokenize", tokens=[300])["prompt"]


def test_a_chat_is_tokenised_as_it_is_asked(connection, tokenizer):
    options = {"tools": TOOLS, "chat_template_kwargs": {"mood": "good"}}
    found = ask(connection, "/tokenize", messages=[USER], **options)
    shown = ask(connection, "/detokenize", tokens=found["tokens"])["prompt"]
    assert shown == "T:look user=hi;mood=good;GO"
    chat = ask(connection, "/v1/chat/completions", messages=[USER], max_tokens=1, **options)
    assert chat["usage"]["prompt_tokens"] == found["count"]
    plain = ask(connection, "/v1/chat/completions", messages=[USER], max_tokens=1)
    assert plain["usage"]["prompt_tokens"] < found["count"]
    found = ask(connection, "/tokenize", messages=[USER], add_generation_prompt=False)
    assert tokenizer.decode(found["tokens"]) == "user=hi;"


def test_the_openai_client_brings_its_tools(stack):
    call = {"id": "c1", "type": "function", "function": {"name": "look", "arguments": '{"x": 7}'}}
    turns: list[Any] = [
        USER,
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "content": "42", "tool_call_id": "c1"},
    ]
    with OpenAI(
        base_url=f"{stack.http_address}/v1", api_key="x", max_retries=0, timeout=PATIENCE_S
    ) as client:
        options: dict[str, Any] = {"model": "tiny", "max_tokens": 3, "tools": TOOLS}
        answer = client.chat.completions.create(messages=turns, tool_choice="auto", **options)
        assert answer.choices[0].message.tool_calls is None
        assert answer.usage is not None
        with stack.client() as native:
            expected = native.tokenize(turns, tools=TOOLS)
            assert native.detokenize(expected) == (
                "T:look user=hi;assistant=!look(7);tool=42#c1;GO"
            )
        assert answer.usage.prompt_tokens == len(expected)
        stream = client.chat.completions.create(messages=turns, stream=True, **options)
        assert list(stream)[-1].choices[0].finish_reason == "length"


def test_both_python_clients(stack, tokenizer):
    async def main() -> tuple[list[int], str, list[int]]:
        async with stack.async_client() as client:
            ids = await client.tokenize(TEXT)
            return ids, await client.detokenize(ids), await client.tokenize([USER])

    with stack.client() as client:
        ids = client.tokenize(TEXT)
        assert ids == tokenizer(TEXT)["input_ids"]
        assert client.detokenize(ids) == tokenizer.decode(ids)
        assert client.generate(TEXT, max_tokens=1).prompt_token_ids == ids
        assert (ids, client.detokenize(ids), client.tokenize([USER])) == asyncio.run(main())
        with pytest.raises(BadRequestError) as caught:
            client.detokenize([client.model.vocab_size])
        assert caught.value.field == "token_ids"


def test_questions_survive_the_death_of_the_worker(stack):
    with stack.client() as client:
        expected = client.tokenize(TEXT)
        futures = [client._io.ask(new_tokenize(TEXT, TemplateOptions())) for _ in range(50)]
        os.kill(stack.pids["worker"], signal.SIGKILL)
        futures += [client._io.ask(new_tokenize(TEXT, TemplateOptions())) for _ in range(50)]
        for future in futures:
            assert future.result(timeout=PATIENCE_S).token_ids == pack_u32(expected)


def test_more_tokens_than_one_may_ask_about_name_the_field() -> None:
    io: Any = SimpleNamespace(models=(ModelCard("m", "/nowhere", 1000, 99, ()),))
    whole = json.dumps({"tokens": [1] * (MAX_IDS_FLOOR + 1)}).encode()
    unread = b'{"tokens": [' + b"1," * (
        2 * MAX_IDS_FLOOR
    )  # what is refused by its commas need not even be JSON
    for body in (whole, unread):
        with pytest.raises(ApiError, match=f"allowed: at most {MAX_IDS_FLOOR}") as caught:
            detokenize(io, HttpRequest(body=body), io)
        assert caught.value.body.error.param == "tokens"
    long = structs.replace(io.models[0], max_model_len=2 * MAX_IDS_FLOOR)
    with pytest.raises(ApiError, match="not JSON"):
        detokenize(SimpleNamespace(models=(long,)), HttpRequest(body=unread), io)
    longest = structs.replace(io.models[0], max_model_len=2**30)
    with pytest.raises(ApiError, match=f"allowed: at most {MAX_QUERY_TOKENS}"):
        detokenize(SimpleNamespace(models=(longest,)), HttpRequest(body=b"," * 2**21), io)


def test_a_text_longer_than_one_may_ask_about_is_sent_to_nobody() -> None:
    io: Any = SimpleNamespace(models=(ModelCard("m", "/nowhere", 1000, 99, ()),))
    body = json.dumps({"prompt": "x" * (MAX_QUERY_CHARS + 1)}).encode()
    with pytest.raises(ApiError, match=f"allowed: at most {MAX_QUERY_CHARS}") as caught:
        tokenize(io, HttpRequest(body=body), io)
    assert caught.value.body.error.param == "prompt"


def test_a_question_that_nobody_waits_for_is_not_kept() -> None:
    """Its text may be large, and no server may come to answer it for a while."""
    questions = PendingQueries()
    asked = new_tokenize("x" * 99)

    def num_kept() -> int:
        return sys.getrefcount(asked.text) - references

    posted: list[Callable[[], None]] = []
    references = 0
    references = num_kept()
    futures: list[Future[Any]] = [Future() for _ in range(3)]
    for future in futures:
        questions.ask(asked, future, 0.0, posted.append)
    assert num_kept() == 3
    futures[0].cancel()
    futures[2].cancel()
    assert num_kept() == 3  # whoever cancels may do so while these are being sent
    for command in posted:
        command()
    posted.clear()
    assert num_kept() == 1
    sent: list[Any] = []
    questions.refill()
    questions.flush(lambda question: sent.append(question) is None)
    assert [question.number for question in sent] == [1]
    questions.answer(Tokenized(0, pack_u32([1])))
    questions.answer(Tokenized(1, pack_u32([1])))
    assert futures[1].result(0).token_ids == pack_u32([1])


def test_a_question_may_be_cancelled_while_it_is_sent() -> None:
    """By another thread; here in the middle of what that could interrupt."""
    questions, future = PendingQueries(), Future[Any]()
    posted: list[Callable[[], None]] = []
    questions.ask(new_tokenize("x"), future, 0.0, posted.append)
    questions.flush(lambda _: future.cancel())
    questions.answer(Tokenized(0, pack_u32([1])))
    for command in posted:
        command()
    questions.answer(Tokenized(0, pack_u32([1])))
    assert future.cancelled()


def test_pings_are_no_answers() -> None:
    """The numbers of questions are no streams' handles: a late answer is ignored."""
    questions = PendingQueries()
    questions.answer(Tokenized(5, pack_u32([1])))
    assert not isinstance(Ping(), Tokenized)
