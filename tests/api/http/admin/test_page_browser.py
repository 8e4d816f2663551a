"""The live page in a real browser, headless Chromium, before real stacks."""

from __future__ import annotations

import json
import os
import signal
import ssl
import urllib.request
from collections.abc import Iterator
from typing import Any

import pytest
from tests.helpers.browser import BROWSER_TESTS, FRAME, PATIENCE_MS, Viewer
from tests.helpers.certificates import Certificate
from tests.helpers.patience import PATIENCE_S, Patience
from tests.helpers.stacks import spareless_stack

from slipstream import Stack

pytestmark = BROWSER_TESTS
UNREADY = "document.querySelector('#processes li:not([data-state=ready])')"


# a POST begins the answer, whose id and first event an EventSource goes on from
EVENT_SOURCE = """
async (patienceMs) => {
  window.texts = []; window.numOpened = 0; window.hasEnded = false;
  const body = JSON.stringify({ prompt: "Source", max_tokens: 300, temperature: 0, stream: true });
  const headers = { "Content-Type": "application/json", "Accept": "text/event-stream" };
  const signal = AbortSignal.timeout(patienceMs);
  const response = await fetch("/v1/completions", { method: "POST", headers, body, signal });
  const reader = response.body.getReader();
  const first = new TextDecoder().decode((await reader.read()).value);
  await reader.cancel();
  const id = JSON.parse(/^data: (.*)$/m.exec(first)[1]).id;
  const source = new EventSource("/v1/streams/" + id);
  source.onopen = () => { window.numOpened += 1; };
  source.onmessage = (event) => {
    if (event.data === "[DONE]") { window.hasEnded = true; source.close(); return; }
    window.texts.push(...JSON.parse(event.data).choices.map((choice) => choice.text));
  };
}
"""


@pytest.fixture(scope="module")
def demo() -> Iterator[Stack]:
    with spareless_stack(http_port=0) as running:
        yield running


@pytest.fixture(scope="module")
def slow() -> Iterator[Stack]:
    """One whose answers last, each token depending on all before it."""
    with Stack("simulated:step_ms=10,mode=chain", http_port=0) as running:
        yield running


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> Certificate:
    return Certificate(tmp_path_factory.mktemp("tls"))


@pytest.fixture(scope="module")
def secure(certificate: Certificate) -> Iterator[Stack]:
    """One whose answers last, over TLS."""
    files = {"ssl_certfile": str(certificate.cert), "ssl_keyfile": str(certificate.key)}
    model = "simulated:step_ms=10,mode=chain"
    with spareless_stack(model, http_port=0, **files) as running:
        yield running


def post(
    stack: Stack, path: str, content: dict[str, Any], context: ssl.SSLContext | None = None
) -> Any:
    request = urllib.request.Request(
        f"{stack.http_address}{path}",
        json.dumps(content).encode(),
        {"Content-Type": "application/json"},
    )
    with urllib.request.urlopen(request, context=context, timeout=PATIENCE_S) as answer:
        return json.load(answer)


def completed(stack: Stack, prompt: str, num_tokens: int, **more: Any) -> Any:
    content = {"prompt": prompt, "max_tokens": num_tokens, "temperature": 0, **more}
    return post(stack, "/v1/completions", content)["choices"][0]


@pytest.mark.parametrize("mode", ["completion", "chat"])
def test_what_streams_is_what_the_api_gives(look, demo, mode):
    viewer = look(demo)
    prompt = "Exceptions are a means of" if mode == "completion" else "What is a list?"
    viewer.ask(prompt, mode=mode, max_tokens="70", temperature="0")
    viewer.wait_for_end()
    if mode == "chat":
        content = {"messages": [{"role": "user", "content": prompt}], "max_tokens": 70}
        answer = post(demo, "/v1/chat/completions", {**content, "temperature": 0})
        expected, num = answer["choices"][0]["message"]["content"], answer["usage"]
    else:
        content = {"prompt": prompt, "max_tokens": 70, "temperature": 0}
        answer = post(demo, "/v1/completions", content)
        expected, num = answer["choices"][0]["text"], answer["usage"]
    assert len(expected) > 20
    assert viewer.text == expected
    numbers = viewer.page.inner_text(".numbers")
    assert f"{num['completion_tokens']} tokens · first after" in numbers
    assert viewer.page.inner_text("#model") == "slipstream-demo"
    assert viewer.errors == []


def test_stop_strings_temperature_and_length_reach_the_model(look, demo):
    whole = completed(demo, "Lambda expressions", 40)["text"]
    stop = whole[20:23]
    viewer = look(demo)
    viewer.ask("Lambda expressions", max_tokens="40", stops=stop + "\n\\n\\n\\n")
    viewer.wait_for_end()
    assert viewer.text == completed(demo, "Lambda expressions", 40, stop=[stop, "\n\n\n"])["text"]
    assert viewer.text == whole[: whole.index(stop)]


def test_the_server_tells_what_it_serves(look, demo):
    viewer = look(demo)
    with urllib.request.urlopen(f"{demo.http_address}/v1/models") as response:
        model = json.load(response)["data"][0]
    viewer.wait_for("document.getElementById('max-tokens').max")
    assert viewer.page.get_attribute("#max-tokens", "max") == str(model["max_model_len"])
    viewer.page.locator("#model").click()
    viewer.wait_for("/Process core/.test(document.getElementById('facts').innerText)")
    facts = viewer.page.inner_text("#facts")
    assert f"{model['max_model_len']:,} tokens" in facts
    assert "slipstream-demo" in facts
    viewer.page.keyboard.press("Escape")
    assert viewer.page.locator("#details").is_hidden()
    assert viewer.page.evaluate("document.activeElement.id") == "model"
    assert viewer.errors == []


def test_a_token_shows_what_else_could_have_been_there(look, demo):
    prompt = "Exceptions are a means of"
    viewer = look(demo)
    viewer.ask(prompt, max_tokens="12")
    viewer.wait_for_end()
    logprobs = completed(demo, prompt, 12, logprobs=5)["logprobs"]
    card = viewer.page.locator("#candidates")
    assert card.is_hidden()
    viewer.page.locator(".token").nth(3).hover()
    rows = card.locator(".candidate")
    assert rows.count() == len(logprobs["top_logprobs"][3]) >= 5
    shares = [float(text.strip("<% ")) for text in rows.locator("b").all_inner_texts()]
    assert shares == sorted(shares, reverse=True)
    assert sum(shares) <= 100.5
    taken = card.locator(".taken code").inner_text()
    assert taken == logprobs["tokens"][3].replace(" ", "␣").replace("\n", "↵")
    # by keyboard alone, too
    viewer.page.mouse.move(0, 0)
    assert card.is_hidden()
    viewer.page.locator(".tokens").focus()
    for _ in range(2):
        viewer.page.keyboard.press("ArrowRight")
    assert viewer.page.locator(".token.looked").get_attribute("data-index") == "1"
    assert card.is_visible()
    # unsure tokens have more colour than sure ones
    values = [
        float(one.evaluate("it => it.style.getPropertyValue('--unsure')"))
        for one in viewer.page.locator(".token").all()
    ]
    expected = [min(1, -each / 4) for each in logprobs["token_logprobs"]]
    assert values == pytest.approx(expected, abs=0.01)


def test_stop_ends_the_answer_here_and_in_the_engine(look, slow):
    viewer = look(slow)
    viewer.ask("Once", max_tokens="4000")
    viewer.wait_for_tokens(10)
    assert viewer.page.locator("#send").is_disabled()
    viewer.page.keyboard.press("Escape")
    viewer.wait_for_end()
    assert viewer.page.inner_text("#notice") == "Stopped."
    assert viewer.page.locator("#stop").is_disabled()
    text = viewer.text
    assert 10 <= viewer.page.locator(".token").count() < 1000
    assert completed(slow, "Once", 1000)["text"].startswith(text)
    viewer.wait_for("document.querySelector('#requests .value').textContent === '0'")
    assert viewer.text == text


@pytest.mark.parametrize("mode", ["completion", "chat"])
def test_a_reload_goes_on_with_the_answer(look, slow, mode):
    content = {"max_tokens": 400, "temperature": 0}
    if mode == "chat":
        content["messages"] = [{"role": "user", "content": "Once"}]
        expected = post(slow, "/v1/chat/completions", content)["choices"][0]["message"]["content"]
    else:
        expected = completed(slow, "Once", 400)["text"]
    viewer = look(slow)
    viewer.ask("Once", mode=mode, max_tokens="400", temperature="0")
    for num in (20, 5):  # the second time an answer that was gone on with already
        viewer.wait_for_tokens(num)
        viewer.page.reload()
        viewer.wait_for("document.querySelector('.turn')")
        assert viewer.page.locator("#send").is_disabled()
    os.kill(slow.pids["http"], signal.SIGKILL)
    viewer.wait_for_end()
    assert viewer.text == expected
    assert viewer.page.inner_text(".numbers").startswith("400 tokens · first after")
    assert "max tokens reached" in viewer.page.inner_text(".numbers")
    viewer.page.reload()  # what has ended is not asked for again
    viewer.wait_for("document.querySelector('.turn')")
    assert viewer.page.locator("#send").is_enabled()
    assert viewer.text == expected


def test_an_answer_that_was_gone_on_with_can_be_stopped(look, slow):
    viewer = look(slow)
    viewer.ask("Once", max_tokens="4000")
    viewer.wait_for_tokens(10)
    viewer.page.reload()
    viewer.wait_for_tokens(3)
    viewer.page.keyboard.press("Escape")
    viewer.wait_for_end()
    assert viewer.page.inner_text("#notice") == "Stopped."
    viewer.wait_for("document.querySelector('#requests .value').textContent === '0'")
    assert completed(slow, "Once", 1500)["text"].startswith(viewer.text)


def test_a_completion_is_longer_than_the_apis_default(look, slow):
    viewer = look(slow)
    viewer.ask("Once", max_tokens="")
    viewer.wait_for_tokens(17)
    viewer.page.keyboard.press("Escape")


def test_enter_sends_and_what_runs_is_shown(look, slow):
    viewer = look(slow)
    viewer.set(max_tokens="1000")
    viewer.page.locator("#mode label:has(input[value=completion])").click()
    viewer.page.locator("#prompt").fill("Once")
    viewer.page.keyboard.press("Shift+Enter")
    viewer.page.keyboard.type("more")
    viewer.page.keyboard.press("Enter")
    viewer.wait_for("document.querySelector('.said')?.textContent === 'Once\\nmore'")
    viewer.wait_for("document.querySelector('#requests .value').textContent === '1'")
    for kind in ("even", "odd", "work"):  # of the timeline
        viewer.wait_for(f"document.querySelector('#timeline .{kind}').getAttribute('d')")
    viewer.wait_for("/steps of .* ms for 1 request /.test(document.body.innerText)")
    viewer.wait_for("parseFloat(document.querySelector('#throughput .value').textContent) > 0")
    viewer.wait_for("/ms/.test(document.querySelector('#itl .value').textContent)")
    viewer.wait_for("document.querySelector('#throughput .line').getAttribute('d').includes('L')")
    names = viewer.page.locator("#processes li").all_inner_texts()
    assert {"core", "worker", "http"} <= {name.split()[0].rstrip(",") for name in names}
    wide = viewer.page.locator("#timeline .even").get_attribute("d")
    viewer.page.locator("#zoom label:has(input[value='50000'])").click()
    assert viewer.page.locator("#timeline .even").get_attribute("d") != wide
    assert viewer.errors == []
    viewer.page.keyboard.press("Escape")


@pytest.mark.parametrize("name", ["worker", "core"])
def test_an_answer_outlives_a_process(look, slow, name):
    expected = completed(slow, f"The {name}", 300)["text"]
    viewer = look(slow)
    viewer.ask(f"The {name}", max_tokens="300")
    viewer.wait_for_tokens(20)
    os.kill(slow.pids[name], signal.SIGKILL)
    viewer.wait_for_end()
    assert viewer.text == expected
    viewer.wait_for(f"/{name}, \\d+ restart/.test(document.body.innerText)")
    assert viewer.errors == []


def test_an_answer_outlives_the_front(look, slow):
    expected = completed(slow, "The front", 300)["text"]
    viewer = look(slow)
    viewer.ask("The front", max_tokens="300")
    viewer.wait_for_tokens(20)
    os.kill(slow.pids["http"], signal.SIGKILL)
    viewer.wait_for("/going on where it was|gone on/.test(document.body.innerText)")
    viewer.wait_for_end()
    assert viewer.text == expected
    assert "gone on with after" in viewer.page.inner_text("#notice")
    viewer.wait_for("document.getElementById('connection').textContent === ''")


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [360, 390, 640, 900, 1280, 1600])
def test_it_fits_and_nothing_jumps(look, demo, width, scheme):
    options = {"viewport": {"width": width, "height": 800}, "color_scheme": scheme}
    patience = Patience()
    while not answers_without_a_jump(viewer := look(demo, **options), width):
        patience.check("some process is always silent")
    ground = viewer.page.evaluate("getComputedStyle(document.body).backgroundColor")
    assert (sum(json.loads(f"[{ground[4:-1]}]")) < 384) == (scheme == "dark")
    assert viewer.errors == []


def answers_without_a_jump(viewer: Viewer, width: int) -> bool:
    """Asserts that nothing moves during an answer. False if a process was not ready meanwhile, as
    before its first beats or on a busy machine: its state is then shown, which takes more room. Or
    if the numbers of the answer never came: a beat that finds no room is left out.
    """
    places = "[...document.querySelectorAll('.card')].map((it) => it.getBoundingClientRect().top)"
    viewer.wait_for("document.querySelector('#processes li')")
    viewer.wait_for(f"!{UNREADY}")
    viewer.wait_for("/\\d/.test(document.querySelector('#requests .value').textContent)")
    viewer.wait_for("document.getElementById('model').textContent.trim()")
    viewer.wait_for("document.getElementById('connection').textContent === ''")
    viewer.page.evaluate(f"document.fonts.ready.then(() => {FRAME})")
    before = viewer.page.evaluate(f"scrollTo(0, 0), {places}")
    begin = viewer.page.evaluate("performance.now()")
    # the page shows the last seconds, which may be others when the test looks
    viewer.page.evaluate(
        "window.worked = window.timed = window.wavered = false, setInterval(() => { "
        f"window.wavered ||= !!{UNREADY}; window.worked ||= "
        "!!document.querySelector('#timeline .work').getAttribute('d'); window.timed ||= "
        "parseFloat(document.querySelector('#ttft .value').textContent) > 0; }, 20)"
    )
    viewer.page.locator("#empty button").first.click()
    viewer.wait_for_end()
    shown = "(window.timed && window.worked)"
    viewer.wait_for(f"{shown} || performance.now() > {begin} + 20000")
    if not viewer.page.evaluate(shown):
        return False
    assert viewer.page.evaluate("document.documentElement.scrollWidth") <= width
    after = viewer.page.evaluate(f"scrollTo(0, 0), {places}")
    shifts = viewer.page.evaluate(f"shiftsSince({begin})")
    if viewer.page.evaluate("window.wavered"):
        return False
    assert after == before
    assert sum(value for value, *_ in shifts) < 0.01, shifts
    return True


def test_a_key_is_asked_for_and_kept_in_this_tab_alone(look):
    with spareless_stack("simulated:step_ms=1", http_port=0, api_key=("the-key",)) as stack:
        viewer = look(stack)
        viewer.page.locator("#key-row").wait_for(state="visible")
        viewer.ask("Once", max_tokens="5")
        viewer.wait_for("/asks for an API key/.test(document.body.innerText)")
        assert viewer.page.locator("#prompt").input_value() == "Once"
        assert viewer.page.locator(".turn").count() == 0
        viewer.page.locator("#key").fill("the-key")
        viewer.ask("Once", max_tokens="5")
        viewer.wait_for_tokens(5)
        viewer.wait_for_end()
        assert viewer.page.evaluate("Object.values(sessionStorage)") == ["the-key"]
        assert viewer.page.evaluate("document.cookie") == ""
        assert "the-key" not in viewer.page.evaluate("JSON.stringify({ ...localStorage })")
        viewer.page.reload()
        viewer.ask("Once", max_tokens="5")
        viewer.wait_for_tokens(5)


def over_tls(stack: Stack, certificate: Certificate, prompt: str) -> str:
    """The text of 300 tokens, as a client gets it that checks the certificate."""
    content = {"prompt": prompt, "max_tokens": 300, "temperature": 0}
    text: str = post(stack, "/v1/completions", content, certificate.context())["choices"][0]["text"]
    return text


def test_the_page_over_tls(look, secure, certificate):
    """A streamed answer, shown and compared with what a client that checks the certificate gets."""
    assert secure.http_address.startswith("https://")
    viewer = look(secure, ignore_https_errors=True)
    assert viewer.page.evaluate("[location.protocol, isSecureContext]") == ["https:", True]
    viewer.ask("Once", max_tokens="300")
    viewer.wait_for_tokens(20)
    assert viewer.page.locator("#send").is_disabled()  # it is being streamed
    viewer.wait_for_end()
    assert viewer.text == over_tls(secure, certificate, "Once")
    assert viewer.errors == []


def test_an_answer_over_tls_outlives_the_front(look, secure, certificate):
    expected = over_tls(secure, certificate, "The front")
    viewer = look(secure, ignore_https_errors=True)
    viewer.ask("The front", max_tokens="300")
    viewer.wait_for_tokens(20)
    os.kill(secure.pids["http"], signal.SIGKILL)
    viewer.wait_for("/going on where it was|gone on/.test(document.body.innerText)")
    viewer.wait_for_end()
    assert viewer.text == expected


def test_an_event_source_over_tls_goes_on_where_it_was(look, secure, certificate):
    """The browser's own EventSource, which sends Last-Event-ID by itself."""
    expected = over_tls(secure, certificate, "Source")
    viewer = look(secure, ignore_https_errors=True)
    viewer.page.evaluate(EVENT_SOURCE, PATIENCE_MS)
    viewer.wait_for("window.texts.length >= 20")
    os.kill(secure.pids["http"], signal.SIGKILL)
    viewer.wait_for("window.hasEnded")
    assert viewer.page.evaluate("window.texts.join('')") == expected
    assert viewer.page.evaluate("window.numOpened") >= 2


def events(*chunks: Any) -> str:
    return "".join(f"id: x\ndata: {json.dumps(chunk)}\n\n" for chunk in chunks) + (
        "id: x\ndata: [DONE]\n\n"
    )


def chunk(text: str, tokens: list[tuple[str, float]], offset: int) -> dict[str, Any]:
    logprobs = {
        "tokens": [token for token, _ in tokens],
        "token_logprobs": [value for _, value in tokens],
        "top_logprobs": [{token: value} for token, value in tokens],
        "text_offset": [offset] * len(tokens),
    }
    choice = {"index": 0, "text": text, "logprobs": logprobs, "finish_reason": None}
    return {"id": "cmpl-0", "choices": [choice]}


def test_text_is_text_however_tokens_cut_it(look, demo):
    evil = "<img src=x onerror=alert(1)><script>alert(2)</script>\u0085\u2028"
    face = "\N{GRINNING FACE}"
    body = events(
        chunk(evil, [(evil, -0.1)], 0),
        chunk("", [("bytes:\\xf0\\x9f", -0.5)], len(evil)),
        chunk(face, [("bytes:\\x98\\x80", -9999.0)], len(evil)),
        chunk("tail", [], 0),
    )
    viewer = look(demo)
    viewer.page.route(
        "**/v1/completions",
        lambda route: route.fulfill(body=body, content_type="text/event-stream"),
    )
    viewer.ask("Once")
    viewer.wait_for_end()
    assert viewer.text == evil + face + "tail"
    assert viewer.page.locator(".body *:not(span, .tokens)").count() == 0
    viewer.page.locator(".token").nth(1).hover()
    assert viewer.page.locator("#candidates b").all_inner_texts() == ["< 0.1 %"]
    assert viewer.errors == []


def test_a_model_without_a_chat_template_completes(look, demo):
    fault = {"message": "this model has no chat template", "param": "messages"}
    viewer = look(demo)
    viewer.page.route(
        "**/v1/chat/completions",
        lambda route: route.fulfill(status=400, json={"error": fault}),
    )
    viewer.ask("Lambda expressions", mode="chat", max_tokens="10")
    viewer.wait_for("/no chat template/.test(document.getElementById('notice').textContent)")
    viewer.wait_for_end()
    assert viewer.text == completed(demo, "Lambda expressions", 10)["text"]


def test_a_refusal_is_told_and_changes_nothing(look, demo):
    viewer = look(demo)
    viewer.ask("Once", max_tokens="10", temperature="0")
    viewer.wait_for_end()
    text = viewer.text
    viewer.ask("x " * 3000)
    viewer.wait_for("document.getElementById('notice').className === 'bad'")
    viewer.wait_for_end()
    assert "allowed" in viewer.page.inner_text("#notice")
    assert viewer.text == text
    assert viewer.page.locator("#prompt").input_value() == "x " * 3000
    # neither does a refused edit, which stays open
    viewer.page.locator("[aria-label='Edit prompt 1']").click()
    viewer.page.locator(".edit textarea").fill("y " * 3000)
    viewer.page.locator(".edit button[type=submit]").click()
    viewer.wait_for("document.getElementById('notice').className === 'bad'")
    viewer.wait_for_end()
    assert viewer.page.locator(".edit textarea").input_value() == "y " * 3000
    viewer.page.keyboard.press("Escape")
    assert viewer.page.inner_text(".said") == "Once"
    assert viewer.text == text
