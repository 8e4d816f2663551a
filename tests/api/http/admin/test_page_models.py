"""The page of a front over replicas of several models, in a real browser."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from msgspec.structs import replace
from tests.helpers.browser import BROWSER_TESTS, Viewer
from tests.helpers.fake_worker import MODEL, FakeWorker
from tests.helpers.http_front import Front

from slipstream_ipc.transport.sockets import private_directory

pytestmark = BROWSER_TESTS
CARDS = [
    replace(MODEL, name="one", fingerprint=b"1"),
    replace(MODEL, name="two", fingerprint=b"2", max_model_len=77),
]


@pytest.fixture
def front() -> Iterator[Front]:
    folder = private_directory()
    workers = [FakeWorker(f"ipc://{folder}/{card.name}", model=card) for card in CARDS]
    running = Front(",".join([each.address for each in workers]), is_router=True)
    yield running
    running.stop()
    for each in workers:
        each.stop()


def test_the_model_that_is_asked_is_chosen_among_those_there_are(look, front):
    viewer = look(front, is_fed=True)
    viewer.wait_for("document.getElementById('models').options.length === 2")
    chosen = viewer.page.locator("#models")
    assert chosen.is_visible()
    assert chosen.input_value() == "one"
    assert viewer.page.inner_text("#model") == "one, two"
    chosen.select_option("two")
    assert viewer.page.get_attribute("#max-tokens", "max") == "77"
    viewer.ask("Which one?", mode="chat")
    viewer.feed(content="The second.")
    viewer.finish()
    assert [body["model"] for body in viewer.asked] == ["two"]
    rows = viewer.page.inner_text("#replicas")
    assert "(one)" in rows
    assert "(two)" in rows
    assert viewer.errors == []


# visible controls whose words do not fit
OVERFLOWING = """
[...document.querySelectorAll("button, select, .choice, .choice label:not(.unseen) span")]
  .filter((it) => it.checkVisibility() && it.scrollWidth > it.clientWidth)
  .map((it) => [it.id || it.textContent, it.scrollWidth, it.clientWidth])
"""
# controls below the prompt that cover one another
COVERED = """
(() => {
  const all = [...document.querySelectorAll("#ask .buttons > *")];
  const boxes = all.filter((it) => it.checkVisibility())
    .map((it) => [it.id || it.className, it.getBoundingClientRect()]);
  return boxes.flatMap(([name, box], at) => boxes.slice(at + 1).filter(([, other]) =>
    box.left < other.right - 0.5 && other.left < box.right - 0.5
    && box.top < other.bottom - 0.5 && other.top < box.bottom - 0.5
  ).map(([other]) => [name, other]));
})()
"""


def assert_controls_fit(viewer: Viewer) -> None:
    assert viewer.page.evaluate(OVERFLOWING) == []
    assert viewer.page.evaluate(COVERED) == []
    width = "document.documentElement"
    assert viewer.page.evaluate(f"{width}.scrollWidth - {width}.clientWidth") == 0


@pytest.mark.parametrize("width", [360, 390, 768, 1280])
def test_controls_fit_with_one_model_and_with_two(look, front, width):
    viewer = look(front, is_fed=True, viewport={"width": width, "height": 800})
    viewer.wait_for("document.getElementById('models').options.length === 2")
    assert viewer.page.locator("#models").is_visible()
    assert_controls_fit(viewer)
    viewer.page.evaluate("document.getElementById('models').hidden = true")
    assert viewer.page.locator("#models").is_hidden()
    assert_controls_fit(viewer)
