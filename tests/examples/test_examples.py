"""The programs of `examples/`, run as they are, beside one server with the bundled model."""

from __future__ import annotations

import asyncio
import contextlib
import http.client
import importlib.util
import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from tests.helpers.browser import PATIENCE_MS, running_browser
from tests.helpers.patience import PATIENCE_S, Patience
from tests.helpers.ports import free_port
from tests.helpers.processes import started
from tests.helpers.stacks import spareless_stack

from slipstream import Stack

pytestmark = pytest.mark.process

EXAMPLES = Path(__file__).parents[2] / "examples"


class Files(SimpleHTTPRequestHandler):
    """Says nothing of what it serves."""

    def log_message(self, *_: Any) -> None:
        """Nothing."""


@pytest.fixture(scope="module")
def page() -> Iterator[str]:
    """Where the page is served; its origin."""
    folder = str(EXAMPLES / "resuming_page")
    with ThreadingHTTPServer(("127.0.0.1", 0), partial(Files, directory=folder)) as server:
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join(PATIENCE_S)


@pytest.fixture(scope="module")
def stack(page: str) -> Iterator[Stack]:
    """A core that a test stops is none that hangs."""
    with spareless_stack(http_port=0, allowed_origins=[page], hang_timeout_s=PATIENCE_S) as running:
        yield running


def run(name: str, *arguments: str, given: str = "", address: str | None = None) -> str:
    """What an example says; it is given `given` to read."""
    done = subprocess.run(
        [sys.executable, "-W", "error::ResourceWarning", str(EXAMPLES / name), *arguments],
        env={**os.environ, **({} if address is None else {"SLIPSTREAM_ADDRESS": address})},
        input=given,
        capture_output=True,
        text=True,
        timeout=2 * PATIENCE_S,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_chat_keeps_its_history(stack: Stack) -> None:
    questions = ["What is an assert statement?", "Explain lambda."]
    shown = run("chat.py", given="\n".join(questions), address=stack.address)
    answers = []
    history: list[dict[str, str]] = []
    with stack.client() as client:
        for question in questions:
            history.append({"role": "user", "content": question})
            answers.append(client.generate(history, max_tokens=200, temperature=0).text)
            history.append({"role": "assistant", "content": answers[-1]})
    for answer in answers:
        assert answer
        assert answer in shown


def test_chat_leaves_out_what_does_not_fit(stack: Stack) -> None:
    long = "What is a list? " * 60  # a few hundred tokens
    shown = run("chat.py", given="\n".join([long] * 7), address=stack.address)
    assert shown.count("> ") >= 7


@pytest.mark.parametrize("num_prompts", [3, 500])
def test_batch_answers_every_prompt_in_order(tmp_path: Path, num_prompts: int) -> None:
    begins = ["In Python,", "Lambda expressions", "Exceptions are a means of"]
    prompts = [f"{begins[number % 3]} {number}" for number in range(num_prompts)]
    (tmp_path / "prompts.txt").write_text("\n".join(prompts))
    said = run("batch.py", str(tmp_path / "prompts.txt"), str(tmp_path / "answers.jsonl"))
    rows = [json.loads(line) for line in (tmp_path / "answers.jsonl").read_text().splitlines()]
    assert [row["prompt"] for row in rows] == prompts
    assert all(row["finish_reason"] in ("stop", "length") for row in rows)
    assert sum(bool(row["text"]) for row in rows) > num_prompts / 2
    assert said.startswith(f"{num_prompts} answers, ")


def test_extraction_gives_objects_of_the_schema(stack: Stack) -> None:
    sentences = ["The assert statement checks a condition.", "A lambda is an expression."]
    said = run("extraction.py", given="\n".join(sentences), address=stack.address)
    facts = [json.loads(line) for line in said.splitlines()]
    assert len(facts) == len(sentences)
    for fact in facts:
        assert set(fact) == {"subject", "kind", "mentions"}
        assert fact["kind"] in ("statement", "expression", "type", "other")


# ---- the proxy -----------------------------------------------------------------------------------


@contextlib.contextmanager
def listening(name: str, **environment: str) -> Iterator[int]:
    """An example that listens; its port."""
    port = free_port()
    command = [sys.executable, str(EXAMPLES / name), str(port)]
    with started(command, env={**os.environ, **environment}) as process:
        patience = Patience()
        while True:
            patience.check(f"{name} listens nowhere")
            assert process.poll() is None
            with contextlib.suppress(OSError):
                http.client.HTTPConnection("127.0.0.1", port, timeout=PATIENCE_S).connect()
                break
        yield port
        process.send_signal(signal.SIGINT)
        process.wait(PATIENCE_S)


@pytest.fixture(scope="module")
def proxy(stack: Stack) -> Iterator[int]:
    """Its port."""
    upstream = str(stack.http_address)
    with listening("asgi_proxy.py", UPSTREAM=upstream, USER_KEYS="anna:one,bo:two") as port:
        yield port


def ask(
    port: int, method: str, path: str, body: object = None, **headers: str
) -> tuple[http.client.HTTPConnection, http.client.HTTPResponse]:
    """A request on a connection of its own."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=PATIENCE_S)
    content = None if body is None else json.dumps(body)
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    connection.request(method, path, content, {"Content-Type": "application/json", **named})
    return connection, connection.getresponse()


STREAM = {"prompt": "In Python,", "max_tokens": 24, "temperature": 0, "stream": True}


def test_proxy_refuses_who_has_no_key(proxy: int) -> None:
    for headers in ({}, {"Authorization": "Bearer three"}):
        connection, response = ask(proxy, "POST", "/v1/completions", STREAM, **headers)
        assert response.status == 401
        connection.close()


@pytest.mark.parametrize("path", ["http://other.example/x", "//other.example/x", "x"])
def test_proxy_goes_to_no_other_server(path: str) -> None:
    """Some ASGI servers give an application the whole target, as with a host."""
    spec = importlib.util.spec_from_file_location("asgi_proxy", EXAMPLES / "asgi_proxy.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    app = module.Proxy("http://127.0.0.1:9", {"anna": "one"}, "its own key")
    sent: list[dict[str, Any]] = []

    async def send(message: dict[str, Any]) -> None:
        sent.append(message)

    async def receive() -> dict[str, Any]:
        raise AssertionError("nothing is read of such a request")

    headers = [(b"authorization", b"Bearer one")]
    scope = {"type": "http", "method": "GET", "path": path, "query_string": b"", "headers": headers}
    asyncio.run(app(scope, receive, send))
    assert sent[0]["status"] == 400


def test_proxy_hands_streams_on_and_users_resume(proxy: int, stack: Stack) -> None:
    headers = {"Authorization": "Bearer two", "Accept": "text/event-stream"}
    connection, response = ask(proxy, "POST", "/v1/completions", STREAM, **headers)
    assert response.status == 200
    whole = response.read().decode()
    connection.close()
    assert whole.endswith("data: [DONE]\n\n")
    events = whole.split("\n\n")
    half = len(events) // 2
    last = events[half].partition("id: ")[2].partition("\n")[0]
    headers["Last_Event_ID"] = last
    connection, response = ask(proxy, "POST", "/v1/completions", STREAM, **headers)
    assert texts(response.read().decode()) == texts("\n\n".join(events[half + 1 :]))
    connection.close()
    connection, response = ask(proxy, "GET", "/v1/models?x=1", Authorization="Bearer one")
    assert json.load(response)["data"][0]["id"] == "slipstream-demo"
    connection.close()


def texts(events: str) -> str:
    """All text of a stream's events."""
    data = [line.removeprefix("data: ") for line in events.splitlines() if line[:6] == "data: "]
    assert data[-1] == "[DONE]"
    return "".join(json.loads(each)["choices"][0]["text"] for each in data[:-1])


def test_proxy_ends_what_its_user_has_left(proxy: int, stack: Stack) -> None:
    endless = {**STREAM, "max_tokens": 2000, "ignore_eos": True}
    aborted = num_aborted(stack)
    connection, response = ask(
        proxy, "POST", "/v1/completions", endless, Authorization="Bearer one"
    )
    response.read1(1)
    response.close()
    connection.close()
    patience = Patience()
    while num_aborted(stack) == aborted:
        patience.wait("the stream runs on")


def num_aborted(stack: Stack) -> float:
    """Streams that were aborted, as /metrics tells."""
    where = str(stack.http_address).removeprefix("http://")
    connection = http.client.HTTPConnection(where, timeout=PATIENCE_S)
    connection.request("GET", "/metrics")
    lines = connection.getresponse().read().decode().splitlines()
    connection.close()
    return sum(
        float(line.rpartition(" ")[2])
        for line in lines
        if line.startswith("slipstream:request_success_total") and '"abort"' in line
    )


# ---- the application -----------------------------------------------------------------------------


@pytest.fixture(scope="module")
def application(stack: Stack) -> Iterator[int]:
    """Its port."""
    with listening("asgi_app.py", SLIPSTREAM_ADDRESS=stack.address) as port:
        yield port


def test_application_answers_and_knows_before_its_status(application: int, stack: Stack) -> None:
    question = "What is the assert statement?"
    with stack.client() as client:
        turns = [{"role": "user", "content": question}]
        right = client.generate(turns, max_tokens=200, temperature=0).text
    assert post_text(application, question) == (200, f"{right}\n")
    status, refusal = post_text(application, "What is a list? " * 2000)
    assert status == 400
    assert "max_model_len" in refusal


def post_text(port: int, text: str) -> tuple[int, str]:
    """The status and the body that a text is answered with."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=PATIENCE_S)
    connection.request("POST", "/", text)
    response = connection.getresponse()
    found = response.status, response.read().decode()
    connection.close()
    return found


# ---- the page ------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with running_browser() as running:
        yield running


def test_page_goes_on_after_its_servers_front_has_died(
    browser: Any, page: str, stack: Stack
) -> None:
    prompt, max_tokens = "Exceptions are a means of", 1200
    with stack.client() as client:
        right = client.generate(prompt, max_tokens=max_tokens, temperature=0, ignore_eos=True).text
    context = browser.new_context()
    context.set_default_timeout(PATIENCE_MS)
    tab = context.new_page()
    tab.goto(f"{page}/?server={stack.http_address}&max_tokens={max_tokens}")
    tab.locator("#prompt").fill(prompt)
    tab.locator("button").click()
    tab.wait_for_function("document.getElementById('answer').textContent.length > 0")
    core, front = stack.pids["core"], stack.pids["http"]
    os.kill(core, signal.SIGSTOP)  # no message is sent before the reader is back
    try:
        os.kill(front, signal.SIGKILL)
        tab.wait_for_function("Number(document.getElementById('answer').dataset.breaks) > 0")
        part = tab.locator("#answer").text_content()
    finally:
        os.kill(core, signal.SIGCONT)
    tab.wait_for_function("document.getElementById('status').textContent === 'done'")
    whole = tab.locator("#answer").text_content()
    context.close()
    assert len(part) < len(whole)
    assert whole == right


def test_page_goes_on_with_the_next_server(browser: Any, page: str, tmp_path: Path) -> None:
    """The page has read a part when the server is stopped; another computes the rest."""
    prompt, max_tokens, model = "Exceptions are a means of", 600, "simulated:step_ms=20,mode=chain"
    settings: dict[str, Any] = {"http_port": free_port(), "drain_s": 0.1}
    settings |= {"runtime_dir": tmp_path / "s", "allowed_origins": [page]}
    context = browser.new_context()
    context.set_default_timeout(PATIENCE_MS)
    tab = context.new_page()
    with spareless_stack(model, **settings) as stack:
        with stack.client() as client:
            options: dict[str, Any] = {"temperature": 0, "ignore_eos": True}
            right = client.generate(prompt, max_tokens=max_tokens, **options).text
        tab.goto(f"{page}/?server={stack.http_address}&max_tokens={max_tokens}")
        tab.locator("#prompt").fill(prompt)
        tab.locator("button").click()
        tab.wait_for_function("document.getElementById('answer').textContent.length > 0")
    part = tab.locator("#answer").text_content()
    with spareless_stack(model, **settings):
        tab.wait_for_function("document.getElementById('status').textContent === 'done'")
    whole = tab.locator("#answer").text_content()
    context.close()
    assert 0 < len(part) < len(whole)
    assert whole == right
