"""A browser that looks at pages."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
from tests.helpers.browser import Viewer, running_browser
from tests.helpers.http_front import Front

from slipstream import Stack

Look = Callable[..., Viewer]


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with running_browser() as running:
        yield running


@pytest.fixture
def look(browser: Any) -> Iterator[Look]:
    """Opens the page of a stack, or of a front without one."""
    viewers: list[Viewer] = []

    def look_at(server: Stack | Front, **options: Any) -> Viewer:
        if isinstance(server, Front):
            url = f"http://127.0.0.1:{server.port}/"
        else:
            assert server.http_address is not None
            url = server.http_address
        viewers.append(Viewer(browser, url, **options))
        return viewers[-1]

    yield look_at
    for viewer in viewers:
        viewer.close()
