"""The page of a front over replicas of several models, in a real browser."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from msgspec.structs import replace
from tests.helpers.browser import BROWSER_TESTS
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
