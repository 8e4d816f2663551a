"""Debian's Chromium, and a person who looks at a page in it."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from tests.helpers.patience import PATIENCE_S

PATIENCE_MS = PATIENCE_S * 1000
# The driver's event loop cannot go on where a timeout has interrupted it, and each test behind that
# would hang, too: a timeout ends this process.
BROWSER_TESTS = [pytest.mark.process, pytest.mark.timeout(method="thread")]
# The headless shell comes first: the whole browser takes four times as long for a page, and some
# pages never open in it.
CHROMIUM = ("chromium-headless-shell", "chromium", "chromium-browser", "google-chrome")
WATCH = """
window.violations = [];
addEventListener("securitypolicyviolation", (event) => violations.push(event.violatedDirective));
{
  // entries are delivered late on a busy machine: their own time counts
  let shifts = [];
  // by the answer that grows above it; a word that grows may go to the next line
  const elementOf = ({ node }) => (node?.closest ? node : node?.parentElement);
  const isPushed = (source) => elementOf(source)?.closest(".numbers, .token");
  const isJump = (each) => !each.hadRecentInput && !each.sources.every(isPushed);
  const keep = (entries) => { shifts.push(...entries.filter(isJump)); };
  const observer = new PerformanceObserver((list) => keep(list.getEntries()));
  observer.observe({ type: "layout-shift", buffered: true });
  window.shiftsSince = (begin) => {
    keep(observer.takeRecords());
    return shifts.filter((each) => each.startTime >= begin).map((each) =>
      [each.value, ...each.sources.map(({ node }) => node?.outerHTML ?? node?.data)]);
  };
}
"""
# The driver waits for what is evaluated without a bound, and a busy browser may draw no frames.
FRAME = f"""
new Promise((resolve, reject) => {{
  requestAnimationFrame(() => setTimeout(resolve));
  setTimeout(() => reject(new Error("no frame is drawn")), {PATIENCE_MS});
}})
"""
# (the driver's own way to wait evaluates strings in the page, which the page's policy forbids)
WAIT = """
() => new Promise((resolve, reject) => {
  const begin = performance.now();
  const look = () => {
    if (%s) resolve();
    else if (performance.now() - begin > %d) reject(new Error(document.body.innerText));
    else setTimeout(look, 10);
  };
  look();
})
"""
# in place of the server's chats: requests in `asked`, the events that they go on from in `lastIds`,
# the answer by `feed(chunk)` and `finish()`
FEED = """
window.asked = [];
window.lastIds = [];
{
  const real = window.fetch;
  const encoder = new TextEncoder();
  window.fetch = async (path, options) => {
    if (path !== "/v1/chat/completions") return real(path, options);
    asked.push(JSON.parse(options.body));
    lastIds.push(options.headers["Last-Event-ID"] ?? null);
    const body = new ReadableStream({
      start(controller) {
        const send = (data) => controller.enqueue(encoder.encode(`id: x\\ndata: ${data}\\n\\n`));
        window.feed = (chunk) => send(JSON.stringify(chunk));
        window.finish = () => { send("[DONE]"); controller.close(); };
        options.signal.addEventListener("abort", () => controller.error(options.signal.reason));
      },
    });
    return new Response(body, { headers: { "Content-Type": "text/event-stream" } });
  };
}
"""


@contextmanager
def running_browser() -> Iterator[Any]:
    """Chromium, headless. Skips the test where there is none."""
    path = next((found for name in CHROMIUM if (found := shutil.which(name))), None)
    if path is None:
        pytest.skip("no Chromium on this machine (Debian: apt-get install chromium-headless-shell)")
    playwright_api = pytest.importorskip("playwright.sync_api")
    with playwright_api.sync_playwright() as playwright:
        running = playwright.chromium.launch(executable_path=path, args=["--no-sandbox"])
        yield running
        running.close()


class Viewer:
    """The live page, and what a person does there.

    kind: how answers are shown, "text" or "tokens". is_fed: chats are answered by the test
    (`feed`, `finish`). options: of the browser's context.
    """

    def __init__(
        self, browser: Any, url: str, kind: str = "tokens", is_fed: bool = False, **options: Any
    ) -> None:
        self._context = browser.new_context(**options)
        self._context.set_default_timeout(PATIENCE_MS)
        self._context.add_init_script(WATCH + (FEED if is_fed else ""))
        self.errors: list[str] = []
        self.requests: list[str] = []
        self.page = self._context.new_page()
        self._url = url
        self._open(kind)

    def _open(self, kind: str) -> None:
        self.page.on(
            "console", lambda it: it.type in ("error", "warning") and self.errors.append(it.text)
        )
        self.page.on("pageerror", lambda error: self.errors.append(str(error)))
        self.page.on("request", lambda request: self.requests.append(request.url))
        self.page.goto(self._url)
        self.show(kind)

    def open_tab(self) -> None:
        """Go on in another tab of the same browser, as tokens; the first one stays open."""
        self.page = self._context.new_page()
        self._open("tokens")

    def show(self, kind: str) -> None:
        """Show answers as "text" or as "tokens"."""
        self.page.locator(f"#view label:has(input[value={kind}])").click()

    def set(self, **settings: str) -> None:
        """Fill fields of the settings, by their elements' ids."""
        self.page.locator("#settings-open").click()
        for name, value in settings.items():
            self.page.locator(f"#{name.replace('_', '-')}").fill(value)
        self.page.locator("#settings-done").click()

    def ask(self, prompt: str, mode: str = "completion", **settings: str) -> None:
        """Send a prompt, with these settings."""
        if settings:
            self.set(**settings)
        self.page.locator(f"#mode label:has(input[value={mode}])").click()
        self.page.locator("#prompt").fill(prompt)
        self.page.locator("#send").click()

    def feed(self, finish_reason: str | None = None, **delta: Any) -> None:
        """A chunk of the answer, where the test gives it."""
        choice = {"index": 0, "delta": delta, "logprobs": None, "finish_reason": finish_reason}
        self.wait_for("window.feed")
        self.page.evaluate(f"feed({json.dumps({'id': 'chatcmpl-0', 'choices': [choice]})})")

    def finish(self) -> None:
        """The end of the answer, where the test gives it, with all of it shown."""
        self.page.evaluate("finish(), window.feed = null")
        self.wait_for_end()

    @property
    def asked(self) -> list[dict[str, Any]]:
        """The chats that the test was asked to answer."""
        found: list[dict[str, Any]] = self.page.evaluate("asked")
        return found

    @property
    def text(self) -> str:
        """Of the last answer, as far as it is there."""
        text: str = self.page.evaluate(
            "document.querySelector('.turn:last-child .body')?.textContent ?? ''"
        )
        return text

    def wait_for(self, condition: str) -> None:
        """JavaScript that is to become true."""
        self.page.evaluate(WAIT % (condition, PATIENCE_MS))

    def wait_for_tokens(self, num: int) -> None:
        """At least so many are there, of the last answer."""
        self.wait_for(f"document.querySelectorAll('.turn:last-child .token').length >= {num}")

    def wait_for_end(self) -> None:
        """Of the answer, with all of it shown."""
        self.wait_for("document.getElementById('turns').ariaBusy === 'false'")
        self.wait_for_frame()

    def wait_for_frame(self) -> None:
        """What has come is shown."""
        self.page.evaluate(FRAME)

    def close(self) -> None:
        """And see that nothing was complained of."""
        for page in self._context.pages:
            assert page.evaluate("violations") == []
        self._context.close()
