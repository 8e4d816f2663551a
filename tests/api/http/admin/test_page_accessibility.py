"""The live page by axe-core's rules, in light, in dark and on a phone, and by keyboard alone."""

from __future__ import annotations

from typing import Any

import pytest
from tests.helpers.browser import BROWSER_TESTS

pytestmark = BROWSER_TESTS

WIDE = {"width": 1280, "height": 860}
PHONE = {"width": 390, "height": 844}
STILL = {"reduced_motion": "reduce"}  # colours that are on their way to others have any contrast
TOUCH = {**STILL, "has_touch": True}
ANSWER = """\
# Title

### Deep

Some *words* with [a link](https://example.org/) and `code`.

| | b |
|---|---|
| 1 | 2 |

```python
print("a line that is longer than a phone is wide, so that it has to scroll to be read whole")
```

- one
- two

#
"""
LOOKS = [
    pytest.param({"viewport": WIDE, "color_scheme": "light", **STILL}, id="light"),
    pytest.param({"viewport": WIDE, "color_scheme": "dark", **STILL}, id="dark"),
    pytest.param({"viewport": PHONE, "color_scheme": "light", **TOUCH}, id="phone"),
    pytest.param({"viewport": PHONE, "color_scheme": "dark", **TOUCH}, id="dark-phone"),
]


def check(viewer: Any) -> None:
    """No violation, and nothing wider than the page."""
    axe = pytest.importorskip("axe_playwright_python.sync_playwright").Axe()
    viewer.wait_for_frame()
    found = axe.run(viewer.page).response
    assert len(found["passes"]) > 10
    assert [(each["id"], each["nodes"][0]["html"]) for each in found["violations"]] == []
    width = viewer.page.viewport_size["width"]
    assert viewer.page.evaluate("document.documentElement.scrollWidth") <= width


def logprob(token: str, value: float) -> dict[str, Any]:
    return {"token": token, "bytes": list(token.encode()), "logprob": value, "top_logprobs": []}


@pytest.mark.parametrize("options", LOOKS)
def test_axe_has_nothing_to_say(look, front, options):
    viewer = look(front, kind="text", is_fed=True, **options)
    check(viewer)
    viewer.ask("What is it?\n\nAnd a word-that-is-too-long-for-a-line-" + "x" * 80, mode="chat")
    viewer.wait_for("window.feed")
    check(viewer)
    viewer.feed(reasoning_content="Let me see.")
    check(viewer)
    viewer.feed(tool_calls=[{"index": 0, "function": {"name": "look", "arguments": '{"a": 1}'}}])
    for part in ANSWER.splitlines(keepends=True):
        viewer.feed(content=part)
        if part.startswith(("#", "|", "```")):
            viewer.wait_for_frame()
    check(viewer)
    viewer.feed(finish_reason="stop")
    viewer.finish()
    check(viewer)
    viewer.page.locator("summary").click()
    check(viewer)
    for opening, closing in (("settings-open", "settings-done"), ("model", "details-close")):
        viewer.page.locator(f"#{opening}").click()
        check(viewer)
        viewer.page.locator(f"#{closing}").click()
    viewer.page.locator("[aria-label='Edit prompt 1']").click()
    check(viewer)
    viewer.page.keyboard.press("Escape")
    # how unsure tokens are may not cost contrast
    viewer.show("tokens")
    viewer.ask("And now?", mode="chat")
    viewer.wait_for("window.feed")
    tokens = [logprob(f"word{at} ", -at / 10) for at in range(60)]
    choice = {"index": 0, "delta": {"content": "".join(each["token"] for each in tokens)}}
    chunk = {"id": "x", "choices": [{**choice, "logprobs": {"content": tokens}}]}
    viewer.page.evaluate("(chunk) => feed(chunk)", chunk)
    viewer.wait_for_tokens(60)
    check(viewer)
    viewer.finish()
    viewer.page.locator(".tokens").last.focus()
    viewer.page.keyboard.press("End")
    assert viewer.page.locator("#candidates").is_visible()
    check(viewer)
    viewer.page.evaluate("document.getElementById('key-row').hidden = false")
    viewer.page.locator("#theme").click()
    check(viewer)
    assert viewer.errors == []


def test_a_conversation_by_keyboard_alone(look, front):
    viewer = look(front, kind="text", is_fed=True)
    keyboard = viewer.page.keyboard

    def focused() -> str:
        name: str = viewer.page.evaluate(
            "document.activeElement.ariaLabel ?? document.activeElement.id"
        )
        return name

    def tab_to(name: str) -> None:
        for _ in range(60):
            if focused() == name:
                return
            keyboard.press("Tab")
        raise AssertionError(f"{name} is not reached")

    viewer.page.locator("#theme").focus()
    tab_to("prompt")
    keyboard.type("One?")
    keyboard.press("Enter")
    viewer.feed(content="```\n1\n```")
    viewer.finish()
    assert focused() == "prompt"
    assert viewer.page.text_content("#announce").startswith("Answered: ```\n1")
    viewer.page.locator("#theme").focus()
    tab_to("Copy code block 1 of answer 1")
    tab_to("Regenerate answer 1")
    keyboard.press("Enter")
    assert focused() == "stop"
    viewer.feed(content="one")
    viewer.wait_for("/one/.test(document.querySelector('.body').textContent)")
    keyboard.press("Escape")
    viewer.wait_for_end()
    assert focused() == "send"
    viewer.page.locator("#theme").focus()
    tab_to("Edit prompt 1")
    keyboard.press("Enter")
    assert focused() == "Prompt 1"
    keyboard.press("End")
    keyboard.type(" Two?")
    keyboard.press("Enter")
    viewer.feed(content="2")
    viewer.finish()
    assert viewer.page.inner_text(".said") == "One? Two?"
    viewer.page.locator("#theme").focus()
    tab_to("settings-open")
    keyboard.press("Enter")
    assert viewer.page.locator("#settings").evaluate("it => it.open")
    keyboard.press("Escape")
    assert focused() == "settings-open"


def test_what_moves_can_be_followed_by_ear(look, front):
    """Parts that change are status regions; the answer is busy while it comes."""
    viewer = look(front, kind="text", is_fed=True)
    viewer.ask("One?", mode="chat")
    viewer.feed(content="x" * 1000)
    viewer.wait_for("document.querySelector('.answer').ariaBusy === 'true'")
    assert viewer.page.locator("#announce").get_attribute("role") == "status"
    assert viewer.page.text_content("#announce") == "Answering."
    viewer.finish()
    assert viewer.page.locator(".answer").get_attribute("aria-busy") == "false"
    assert 300 < len(viewer.page.text_content("#announce")) < 600


def test_enter_begins_a_line_where_fingers_type(look, front):
    viewer = look(front, kind="text", is_fed=True, is_mobile=True, has_touch=True, viewport=PHONE)
    viewer.page.locator("#prompt").fill("One")
    viewer.page.locator("#prompt").press("Enter")
    assert viewer.page.locator("#prompt").input_value() == "One\n"
    viewer.page.locator("#prompt").press("Control+Enter")
    viewer.feed(content="1")
    viewer.finish()
    assert viewer.page.locator(".said").inner_text().strip() == "One"
